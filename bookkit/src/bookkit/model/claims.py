"""What the book proves: the claim of every proof cell, and the releases its very code ran on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from bookkit.model.book import Book
from bookkit.model.chapter import Cell, Chapter, load_chapter


@dataclass(frozen=True)
class Claim:
    page: str  # "book/09-fsdp"
    kind: str  # of the page: chapter, page, reference
    slug: str  # the strip's anchor is checked-SLUG
    claim: str  # one sentence
    stored: bool  # does it rest on rows that were compiled elsewhere and stored?
    line: int  # of the page's file, where the proof begins
    title: str  # of the page
    number: int | None  # of the chapter


def claims(book: Book) -> list[Claim]:
    """Every claim that a proof cell makes, in the order of the book."""
    return [one for page in book.chapters for one in claims_of(book, page)]


def claims_of(book: Book, page: str) -> list[Claim]:
    """The claims of one page, in order."""
    chapter, kind = load_chapter(book.source(page)), book.kind(page)
    number = int(chapter.name[:2]) if kind == "chapter" else None
    title = title_of(chapter)
    return [
        Claim(page, kind, cell.slug, cell.claim, "stored" in cell.tags, cell.line, title, number)
        for cell in chapter.code
        if cell.slug and cell.claim
    ]


def title_of(chapter: Chapter) -> str:
    """The first heading of a page, or its name where it has none."""
    lines = (line for cell in chapter.markdown for line in cell.lines)
    return next((line[2:].strip() for line in lines if line.startswith("# ")), chapter.name)


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
