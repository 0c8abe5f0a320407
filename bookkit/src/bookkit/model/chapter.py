"""Read the book's chapters into cells.

A chapter is a page such as `book/01-mesh.md` with a jupytext header. Cells are counted from 1,
Markdown and code together, as a reader counts them in Colab.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jupytext

FOLDED = "hide-cell"  # the tag of a cell that is folded, with its output
FOLD = re.compile(r"(?s)<details.*?</details>\n*")  # in text
EXERCISE_PARTS = ("exercise-", "check-", "solution-")  # what their tags begin with


@dataclasses.dataclass(frozen=True)
class Cell:
    index: int
    kind: str  # "markdown" or "code"
    source: str
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    page: str = ""  # "book/02-variables"
    line: int = dataclasses.field(default=1, compare=False)  # of the file, where its source begins

    @property
    def where(self) -> str:
        return f"{self.page}.md:{self.line}"

    @property
    def lines(self) -> list[str]:
        return self.source.split("\n") if self.source else []

    def tagged(self, prefix: str) -> str | None:
        """The rest of the first tag that starts with prefix: "check-specs" → "specs"."""
        return next((tag[len(prefix) :] for tag in self.tags if tag.startswith(prefix)), None)

    @property
    def slug(self) -> str | None:
        """The name that faults, rows and links call this cell by: its tag id-SLUG, or setup."""
        return self.tagged("id-") or ("setup" if "setup" in self.tags else None)

    @property
    def title(self) -> str | None:
        """What Colab shows in place of a folded cell: its first line `# @title …`."""
        found = re.match(r"# @title (.+)", self.source)
        return found[1].strip() if found else None


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A page of the book: its text alone where it has no code."""

    page: str  # "book/02-variables"
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """What its tests and its table of faults are called: no two pages share it."""
        return self.page.rsplit("/", 1)[-1]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def markdown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @property
    def minutes(self) -> int:
        """To read what is in view: 200 words a minute, and two seconds for a line of code."""
        text = " ".join(cell.source for cell in self.markdown)
        text = re.sub(r"(?s)```.*?```|!\[.*?\]\(.*?\)|\]\(.*?\)", " ", FOLD.sub(" ", text))
        seen = [cell for cell in self.code if FOLDED not in cell.tags]
        return max(1, round(len(text.split()) / 200 + sum(len(cell.lines) for cell in seen) / 30))

    def named(self, slug: str) -> Cell | None:
        """The code cell tagged id-SLUG."""
        return next((cell for cell in self.code if cell.slug == slug), None)


@functools.cache  # a fifth of a second for each page, and many ask
def parse(page: str, text: str) -> Chapter:
    cells, at = [], 0
    for index, cell in enumerate(jupytext.reads(text, fmt="md:myst").cells, 1):
        at = max(text.find(f"\n{cell.source}", at), at)
        line, tags = text.count("\n", 0, at + 1) + 1, tuple(cell.metadata.get("tags", ()))
        known = dict(cell.metadata)
        cells.append(Cell(index, cell.cell_type, cell.source, tags, known, page, line))
        at += len(cell.source)
    return Chapter(page, tuple(cells))


def load_chapter(path: Path) -> Chapter:
    folders = path.with_suffix("").parts
    below = len(folders) - folders[::-1].index("book") - 1  # the last folder of this name
    return parse("/".join(folders[below:]), path.read_text(encoding="utf-8"))
