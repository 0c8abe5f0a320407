"""bookkit VERB: one command for all that is done with the book.

    bookkit                  lists the verbs
    bookkit VERB --help      what a verb takes

`python -m bookkit VERB` is the same.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from bookkit.model.book import Problem

# What can be asked for, in the order of a day's work: a module with main(arguments), what it does.
VERBS = {
    "execute": ("run.execute", "execute the chapters whose code changed"),
    "site": ("site.build", "build the site in every language"),
    "figures": ("site.figures", "draw the book's figures from their programs"),
    "sync": ("words.sync", "write notebooks/ and setup cells from book/"),
    "po": ("words.po", "bring the catalogues for translators up to date"),
    "translations": ("words.report", "say what is translated, and what is broken"),
    "lint": ("lint.command", "check pages against the rules"),
    "publish-as": ("site.publish_as", "write another address, branch or tag everywhere"),
    "second-compiler": (
        "compilers.second_compiler",
        "compile programs of the book for TPU too, and check what is stored",
    ),
}


def end_with_order() -> None:
    """Let whoever is stopped by SIGTERM stop what it started, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; what a person has to mend is said on stderr, without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print("usage: bookkit VERB …\n")
        print("\n".join(f"  {verb:13} {about}" for verb, (_, about) in VERBS.items()))
        return 0 if words else 2
    verb, *rest = words
    if verb not in VERBS:
        print(f"bookkit has no verb {verb!r}; `bookkit` lists them", file=sys.stderr)
        return 2
    end_with_order()
    module = importlib.import_module(f"bookkit.{VERBS[verb][0]}")
    try:
        return module.main(rest) or 0
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
