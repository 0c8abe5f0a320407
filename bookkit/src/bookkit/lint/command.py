"""Check pages against the rules: name the line, what is wrong, what to do.

    bookkit lint                   every page
    bookkit lint book/01-mesh.md   one page, in seconds

Nothing is executed: rules about outputs read what the last execution of this very code showed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bookkit.lint import cells, markdown, names, outputs  # noqa: F401 (each registers its rules)
from bookkit.lint.rules import RULES, Page, findings
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import load_chapter


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bookkit lint", description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: all pages")
    chosen, book = parser.parse_args(arguments), Book()
    pages = sorted((book.root / "book").rglob("*.md"))
    files = [path.resolve() for path in chosen.pages] or pages
    for path in files:
        if path not in pages:
            raise Problem(f"{path} is not a page: name one, for example book/01-mesh.md")
    found = [one for path in files for one in findings(Page(load_chapter(path), book))]
    print("\n".join(found) or f"{len(RULES)} rules: nothing to correct")
    return bool(found)
