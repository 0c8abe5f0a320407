"""The releases that the very code of a page ran on, from the matrix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from bookkit.model.book import Book
from bookkit.model.chapter import Cell, load_chapter


@dataclass(frozen=True)
class RanOn:
    """A stack on which a page's code, as it is now, passed from its first cell to its last."""

    stack: str  # as book/matrix.json names it
    date: str
    versions: dict[str, str]  # python, jax, flax and all else, by name


def ran_on(book: Book, page: str) -> list[RanOn]:
    """The recorded stacks on which this very code ran; a record of other code does not count."""
    path = book.root / "book" / "matrix.json"
    recorded = json.loads(path.read_text("utf-8")) if path.exists() else {}
    chapter = load_chapter(book.source(page))
    digest = code_digest(chapter.code)
    return [
        RanOn(name, stack["date"], stack["versions"])
        for name, stack in recorded.items()
        if (run := stack["notebooks"].get(chapter.name))
        and "failed" not in run
        and run.get("code") == digest
    ]


def code_digest(cells: Iterable[Cell]) -> str:
    """Of the code cells of a page, in order.

    The setup cell is left out: it prepares a place to run, and names the branch that it installs.
    """
    sources = (cell.source for cell in cells if "setup" not in cell.tags)
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]
