"""Add a language: an entry in _config.yml, empty catalogues, and notebooks that are still English.

    bookkit new-language ja 日本語

CODE is Sphinx's and gettext's: ja, pt_BR. The site follows from the entry: its address (ja/), the
language menu, hreflang, search and Sphinx's own words. Then translate locale/CODE/.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Problem, find_root
from bookkit.words import po, sync

ENTRIES = re.compile(r"^( *)book_languages:.*\n(?:\1 +.*\n)+", re.M)


def add(config: str, code: str, name: str) -> str:
    """The text of _config.yml with one more language, last."""
    block = ENTRIES.search(config)
    if not block:
        raise Problem("_config.yml has no book_languages: to add a language to")
    indent = block[1] + "  "
    entry = f"{indent}{code}: {{name: {name}, path: {code.replace('_', '-')}/}}\n"
    return config[: block.end()] + entry + config[block.end() :]


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(
        prog="bookkit new-language", description=__doc__.split("\n")[0]
    )
    options.add_argument("code", help="such as ja or pt_BR")
    options.add_argument("name", help="as its readers call it: 日本語")
    chosen, root = options.parse_args(arguments), root or find_root()
    book = Book(root)
    if not re.fullmatch(r"[a-z]{2,3}(_[A-Z]{2})?", chosen.code) or not chosen.name:
        raise Problem(
            f"{chosen.code!r} {chosen.name!r}: give a code such as ja or pt_BR, and a name"
        )
    if any(chosen.code == language.code for language in book.languages):
        raise Problem(f"_config.yml has {chosen.code} already: `make po` brings it up to date")
    config = root / "_config.yml"
    config.write_text(add(config.read_text("utf-8"), chosen.code, chosen.name), "utf-8")
    po.main([], root)
    sync.main([], root)
    print(f"Now translate locale/{chosen.code}/, then `make sync site`.")
