"""Chapters with the calls that a reader could make: what their checks say, what they have loaded.

After the check of each exercise the stub is judged, then a wrong answer (the tables in tests/ have
one for each); after its solution, the solution; after the last cell, the packages are named that the
chapter has loaded. A chapter is executed so for the site: what the calls answered is kept in the cache,
where tests/book reads it, and the rest is published.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from bookkit.model.book import Book

CALL = "call"  # the key in a cell's metadata that tells a reader's call from a chapter's own cells
CAUGHT = """\
try:
    {name} = {call}
except Exception as error:
    {name} = f"raised {{type(error).__name__}}: {{error}}"
{name}"""
LOADED = 'sorted({name.split(".")[0] for name in __import__("sys").modules})'
STUB, WRONG, SOLUTION, LOADED_PACKAGES = "the stub", "the wrong answer", "the solution", "packages"


def wrong_answers(book: Book, page: str) -> dict[str, dict[str, str]]:
    """By exercise: Python that assigns a wrong answer, and why it is wrong."""
    name = page.rsplit("/", 1)[-1]
    path = book.root / f"tests/pages/{name}.toml"
    found = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    return dict(found.get("exercise", {}))


def call(what: str, exercise: str, source: str) -> NotebookNode:
    return new_code_cell(source, metadata={CALL: {"what": what, "exercise": exercise}})


def judged(what: str, exercise: str) -> NotebookNode:
    source = f"str(check_{exercise}(answer_{exercise}))"
    return call(what, exercise, CAUGHT.format(name="_answered", call=source))


def calls_after(
    cell: NotebookNode, wrong: Mapping[str, Mapping[str, str]]
) -> Iterator[NotebookNode]:
    for tag in cell.metadata.get("tags", ()):
        if tag.startswith("check-"):
            exercise = tag.removeprefix("check-")
            yield judged(STUB, exercise)
            if exercise in wrong:
                yield call(WRONG, exercise, wrong[exercise]["wrong"])
                yield judged(WRONG, exercise)
        elif tag.startswith("solution-"):
            yield judged(SOLUTION, tag.removeprefix("solution-"))


def with_calls(book: Book, page: str, notebook: NotebookNode) -> NotebookNode:
    """A chapter, changed: with a reader's calls between its cells."""
    wrong, lines = wrong_answers(book, page), notebook.metadata.get("source_map", [])
    cells, map_of_lines = [], []
    for number, cell in enumerate(notebook.cells):
        more = list(calls_after(cell, wrong)) if cell.cell_type == "code" else []
        if number == len(notebook.cells) - 1:
            more.append(call(LOADED_PACKAGES, "", LOADED))
        cells += [cell, *more]
        map_of_lines += lines[number : number + 1] * (1 + len(more))
    for number, cell in enumerate(cells, 1):
        cell["id"] = f"cell-{number}"
    notebook.cells = cells
    if lines:
        notebook.metadata["source_map"] = map_of_lines
    return notebook


def without_calls(executed: NotebookNode) -> NotebookNode:
    """The chapter's own cells again, with what they showed."""
    own = [cell for cell in executed.cells if CALL not in cell.metadata]
    return NotebookNode({**executed, "cells": own})


def answers(executed: NotebookNode) -> Iterator[tuple[str, str, str]]:
    """(what was judged, exercise, what the check said) of each call; and the packages, at the end."""
    for cell in executed.cells:
        about: Any = cell.metadata.get(CALL)
        said = [output.data["text/plain"] for output in cell.get("outputs", ()) if "data" in output]
        if about and said:
            yield about["what"], about["exercise"], said[-1]
