"""The rule that each row of tests/rows.toml is proved by a test, and a planted fault proves the test.

A row is shown by each test that must notice a fault planted for it (`fails`); the tables add tests
that no fault names, and the sentences of rows that are advice. Each page has its table,
tests/pages/PAGE.toml.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from bookkit.lint.rules import WHOLE, SaidOfBook, rule
from bookkit.lint.tables import (
    Entry,
    label,
    listed_faults,
    listed_rows,
    names_of_tests,
    unfit_faults,
)
from bookkit.model.book import Book
from bookkit.model.chapter import Cell, Chapter, by_name, page_files

Row = dict[str, Any]
RAISES = "NotImpl"  # an error of the program itself, no assertion


def wanted_rows(book: Book) -> dict[str, Row]:
    return tomllib.loads((book.root / "tests" / "rows.toml").read_text("utf-8"))


def shown_rows(listed: Iterable[Row], wanted: dict[str, Row], faults: Iterable[Entry]) -> list[Row]:
    """What is listed, and in `noticed` what planted faults name for their rows."""
    found = {(row["id"], row["chapter"]): {"cells": [], **row, "noticed": []} for row in listed}
    for fault in faults:
        for name in fault.get("rows", ()) if "survives" not in fault else ():
            if wanted.get(name, {}).get("kind") == "asserted":
                new = {"id": name, "cells": [], "noticed": []}
                new |= {"chapter": fault["chapter"], "file": fault["file"]}
                found.setdefault((name, fault["chapter"]), new)["noticed"].append(fault["fails"])
    return list(found.values())


def text_of_pages(book: Book) -> dict[str, str]:
    """Every page of the book, for what judgement rows quote."""
    return {path.stem: path.read_text("utf-8") for path in page_files(book.root)}


def asserts(cell: Cell) -> bool:
    """Could this cell fail by an assertion (or must it raise)?"""
    if "raises-exception" in cell.tags:
        return True
    for node in ast.walk(ast.parse(cell.source)):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Raise) and node.exc and RAISES not in ast.unparse(node):
            return True  # such as raise RuntimeError("accepted") where an error was expected
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.startswith("assert_"):
                return True
    return False


def no_evidence(name: str, chapter: Chapter | None, tests: set[str]) -> str:
    """Why what a table names proves nothing; "" for a test of the page, or a cell that can fail."""
    if name in tests:
        return ""
    cell = chapter.named(name.removeprefix("cell:")) if chapter else None
    if cell is None:
        return f"the page has no test {name} and no cell tagged id-{name.removeprefix('cell:')}"
    if not name.startswith("cell:") and not asserts(cell):
        return f"cell {cell.index} cannot fail; name the test, or the cell, that asserts"
    return ""


def problems_of(
    entry: Row, row: Row | None, chapter: Chapter | None, page: str | None, tests: set[str]
) -> Iterator[str]:
    """What is wrong with one row as a page (its text is given) shows it."""
    where = f"{entry.get('id')} in {entry.get('chapter')}"
    if row is None:
        yield f"{where}: tests/rows.toml has no such row"
        return
    if page is None:
        yield f"{where}: no page of the book is called {entry['chapter']}"
        return
    if row["kind"] == "asserted":
        noticed = (no_evidence(name, chapter, tests) for name in entry.get("noticed", ()))
        if not entry.get("cells") and all(noticed):
            yield f"{where}: an asserted row names its tests, or a fault names one that fails"
        for name in entry.get("cells", ()):
            if what := no_evidence(name, chapter, tests):
                yield f"{where}: {what}"
        return
    words = " ".join(entry.get("text", "").split())
    if not words:
        yield f"{where}: a judgement row quotes its sentence in `text`"
    elif (count := " ".join(page.split()).count(words)) != 1:
        yield f"{where}: `text` is {count} times on the page, not once: {words[:60]!r}"
    source = entry.get("source", "")
    if source.startswith("http") and source not in page:
        yield f"{where}: the page does not link to its source {source}"
    elif not source or (source not in page and not (chapter and chapter.named(source))):
        yield f"{where}: `source` is an address that the page links to, or the tag of a cell"


def gaps(found: list[Row], every: dict[str, Row], pages: dict[str, str]) -> Iterator[str]:
    """Rows that a chapter which exists owes its readers."""
    for name, row in every.items():
        for home in row["chapters"]:
            shown = [entry["chapter"] for entry in found if entry["id"] == name]
            once = row["kind"] == "judgement" and shown  # said once is enough
            if home in pages and home not in shown and not once:
                yield f"{name} is not covered in {home}: {row['can']}"


def without_faults(found: list[Row], every: dict[str, Row], faults: list[Entry]) -> Iterator[str]:
    """Asserted rows that no planted fault puts to the test."""
    planted = {(fault["chapter"], name) for fault in faults for name in fault.get("rows", ())}
    for entry in found:
        row = every.get(entry["id"])
        if row and row["kind"] == "asserted" and (entry["chapter"], entry["id"]) not in planted:
            yield f"{entry['id']} in {entry['chapter']} has no fault in {entry['file']}"


@rule(WHOLE)
def faults_and_rows(book: Book) -> SaidOfBook:
    """Every row of tests/rows.toml is shown where it is promised, and a fault puts it to the test."""
    books, pages, every = by_name(book.root), text_of_pages(book), wanted_rows(book)
    tests = {page: names_of_tests(book, page) for page in pages}
    faults = listed_faults(book)
    for name in dict.fromkeys(fault["file"] for fault in faults):
        for what in unfit_faults([one for one in faults if one["file"] == name], books, every):
            yield name, 1, what
    for fault in faults:
        page = fault["chapter"]
        if page in books and "fails" in fault:
            if what := no_evidence(fault["fails"], books[page], tests[page]):
                yield fault["file"], 1, f"{label(fault)}: {what}"
    found = shown_rows(listed_rows(book), every, faults)
    for what in [*gaps(found, every, pages), *without_faults(found, every, faults)]:
        yield "tests/rows.toml", 1, what
    for entry in found:
        row, page = every.get(entry["id"]), entry["chapter"]
        known = books.get(page), pages.get(page), tests.get(page, set())
        for what in problems_of(entry, row, *known):
            yield entry["file"], 1, what
