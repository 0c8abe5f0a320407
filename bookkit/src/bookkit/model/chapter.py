"""Read the book's chapters into cells: what the checks and the tools share.

A chapter is a `book/NN-name.md` with a jupytext header. Cells are counted from 1, Markdown and
code together, as a reader counts them in Colab.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
from markdown_it import MarkdownIt

from tools.book import ROOT, is_notebook

MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclasses.dataclass(frozen=True)
class Cell:
    index: int
    kind: str  # "markdown" or "code"
    source: str
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    chapter: str = ""

    @property
    def where(self) -> str:
        return f"book/{self.chapter}.md, cell {self.index}"

    @property
    def lines(self) -> list[str]:
        return self.source.split("\n") if self.source else []

    def tagged(self, prefix: str) -> str | None:
        """The rest of the first tag that starts with prefix: "check-specs" → "specs"."""
        return next((tag[len(prefix) :] for tag in self.tags if tag.startswith(prefix)), None)


@dataclasses.dataclass(frozen=True)
class Chapter:
    name: str  # "02-variables"
    cells: tuple[Cell, ...]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def markdown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    def holding(self, piece: str) -> list[Cell]:
        """The code cells that contain this piece of text."""
        return [cell for cell in self.code if piece in cell.source]


def parse(name: str, text: str) -> Chapter:
    notebook = jupytext.reads(text, fmt="md:myst")
    return Chapter(
        name,
        tuple(
            Cell(
                index,
                cell.cell_type,
                cell.source,
                tuple(cell.metadata.get("tags", ())),
                dict(cell.metadata),
                name,
            )
            for index, cell in enumerate(notebook.cells, 1)
        ),
    )


@functools.cache
def load(path: Path) -> Chapter:
    return parse(path.stem, path.read_text(encoding="utf-8"))


def chapters(root: Path = ROOT) -> list[Chapter]:
    """Every chapter with code, in order."""
    return [load(path) for path in sorted((root / "book").glob("*.md")) if is_notebook(path)]


def by_name(root: Path = ROOT) -> dict[str, Chapter]:
    return {chapter.name: chapter for chapter in chapters(root)}


def pages(root: Path = ROOT) -> list[Path]:
    """Every Markdown page of the book, with or without code."""
    return sorted((root / "book").rglob("*.md"))


# Prose: what a reader reads as sentences, with code spans, links and formulas told apart.


def blocks(markdown: str) -> Iterator[tuple[str, str, int, str]]:
    """(kind, text, line, HTML tag) of each paragraph, heading, list item and table cell."""
    tokens, inside = MARKDOWN.parse(hide_display_math(markdown)), []
    for token in tokens:
        if token.nesting == 1:
            inside.append(token)
        elif token.nesting == -1:
            inside.pop()
        elif token.type == "inline":
            names = [outer.type for outer in inside]
            kind = (
                "heading"
                if "heading_open" in names
                else "table"
                if "table_open" in names
                else "item"
                if "list_item_open" in names
                else "alert"
                if "blockquote_open" in names
                else "paragraph"
            )
            yield kind, token.content, (token.map or [0])[0], inside[-1].tag


def hide_display_math(markdown: str) -> str:
    """Blank out $$…$$ but keep the lines, so that line numbers stay right."""
    return re.sub(r"\$\$.*?\$\$", lambda found: "\n" * found[0].count("\n"), markdown, flags=re.S)


def code_spans(markdown: str) -> Iterator[str]:
    """The text of each inline code span."""
    for token in MARKDOWN.parse(hide_display_math(markdown)):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def plain(text: str) -> str:
    """Prose as it is read aloud: no images, addresses, marks; one word for code or a formula."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"\[!\w+\]\s*\n?", "", text)  # an alert's mark
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"(`+)(?:.+?)\1", "code", text, flags=re.S)
    text = re.sub(r"(?<![\\$])\$(?!\s)[^$\n]+?\$", "formula", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>\s][^>]*>", " ", text)
    return re.sub(r"\s+", " ", text.replace("*", "").replace("__", "")).strip()


def words(text: str) -> list[str]:
    return [word for word in plain(text).split() if re.search(r"\w", word)]


SHORT = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|Fig|Eq|No|approx)\.(?=\s)")


def sentences(text: str) -> list[str]:
    text = SHORT.sub(lambda found: found[1] + "\N{ONE DOT LEADER}", plain(text))
    parts = re.split(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"“'‘(]?[A-Z0-9]|code\b|formula\b)", text)
    return [part for part in parts if re.search(r"\w", part)]


def headings(markdown: str) -> list[tuple[int, str]]:
    """(level, text) of each heading."""
    return [(int(tag[1]), text) for kind, text, _, tag in blocks(markdown) if kind == "heading"]
