"""bookkit VERB: one command for all that is done with the book.

    bookkit                  lists the verbs
    bookkit VERB --help      what a verb takes

`python -m bookkit VERB` is the same; so is `python bookkit/src/bookkit VERB`, which needs no
installation of this package.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started as a folder: Python put the package itself on its path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bookkit.model.book import Problem  # noqa: E402
from bookkit.model.verbs import VERBS  # noqa: E402


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
