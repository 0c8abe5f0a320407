"""Print, for each row of tests/rows.toml, the cells that show it, and what is missing.

A row is shown by each cell that must notice a fault planted for it (`fails`); the tables add cells
that no fault names, and the sentences of rows that are advice. Each page has its table,
tests/pages/PAGE.toml.
"""

from __future__ import annotations

import argparse
import ast
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bookkit.lint.faults import unfit_faults
from bookkit.lint.rules import WHOLE, SaidOfBook, rule
from bookkit.lint.tables import Entry, listed_faults, listed_rows
from bookkit.model.book import Book
from bookkit.model.chapter import Cell, Chapter, by_name, page_files

Row = dict[str, Any]
RAISES = "NotImpl"  # an error of the program itself, no assertion


def wanted_rows(book: Book) -> dict[str, Row]:
    return tomllib.loads((book.root / "tests" / "rows.toml").read_text("utf-8"))


def shown_rows(listed: Iterable[Row], wanted: dict[str, Row], faults: Iterable[Entry]) -> list[Row]:
    """What is listed, and in `noticed` the cells that planted faults name for their rows."""
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


def cell_of(slug: str, chapter: Chapter | None) -> Cell | str:
    """The code cell of this tag, or what is wrong with it."""
    if chapter is None:
        return "the page has no code cells"
    return chapter.named(slug) or f"no cell of {chapter.name} has the tag id-{slug}"


def problems_of(
    entry: Row, row: Row | None, books: dict[str, Chapter], pages: dict[str, str]
) -> Iterator[str]:
    """What is wrong with one row as it is shown."""
    where = f"{entry.get('id')} in {entry.get('chapter')}"
    if row is None:
        yield f"{where}: tests/rows.toml has no such row"
        return
    if entry["chapter"] not in pages:
        yield f"{where}: there is no book/{entry['chapter']}.md"
        return
    chapter, page = books.get(entry["chapter"]), pages[entry["chapter"]]
    if row["kind"] == "asserted":
        noticed = [cell_of(slug, chapter) for slug in entry.get("noticed", ())]
        if not entry.get("cells") and not any(isinstance(c, Cell) and asserts(c) for c in noticed):
            yield f"{where}: an asserted row names its cells, or a fault names one that asserts"
        for cell in (cell_of(slug, chapter) for slug in entry.get("cells", ())):
            if isinstance(cell, str):
                yield f"{where}: {cell}"
            elif not asserts(cell):
                how = "name the cell that asserts, or let it assert"
                yield f"{where}: cell {cell.index} cannot fail; {how}"
        return
    words = " ".join(entry.get("text", "").split())
    if not words:
        yield f"{where}: a judgement row quotes its sentence in `text`"
    elif (count := " ".join(page.split()).count(words)) != 1:
        yield f"{where}: `text` is {count} times on the page, not once: {words[:60]!r}"
    source = entry.get("source", "")
    if source.startswith("http") and source not in page:
        yield f"{where}: the page does not link to its source {source}"
    elif not source or (source not in page and isinstance(cell_of(source, chapter), str)):
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
    faults = listed_faults(book)
    for name in dict.fromkeys(fault["file"] for fault in faults):
        for what in unfit_faults([one for one in faults if one["file"] == name], books, every):
            yield name, 1, what
    found = shown_rows(listed_rows(book), every, faults)
    said = [*gaps(found, every, pages), *without_faults(found, every, faults)]
    for what in said:
        yield "tests/rows.toml", 1, what
    for entry in found:
        for what in problems_of(entry, every.get(entry["id"]), books, pages):
            yield entry["file"], 1, what


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="bookkit coverage", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    book = Book()
    books, pages, every = by_name(book.root), text_of_pages(book), wanted_rows(book)
    found = shown_rows(listed_rows(book), every, listed_faults(book))
    for name, row in every.items():
        shown = []
        for entry in (entry for entry in found if entry["id"] == name):
            slugs = [*entry.get("cells", ()), *entry["noticed"]]
            chapter = books.get(entry["chapter"])
            cells = [cell_of(slug, chapter) for slug in slugs]
            numbers = ", ".join(
                str(n) for n in sorted({c.index for c in cells if isinstance(c, Cell)})
            )
            shown.append(f"{entry['chapter']} " + (f"cells {numbers}" if numbers else "text"))
        absent = [home for home in row["chapters"] if home not in pages]
        later = f"(not written: {', '.join(absent)})" if absent else ""
        mark = "J" if row["kind"] == "judgement" else " "
        print(f"{name:4}{mark} {'; '.join([*shown, later]).strip('; '):60} {row['can']}")
    missing = [f"{path}: {what}" for path, _, what in faults_and_rows(book)]
    if missing:
        print("\nMissing:")
        print("\n".join("  " + text for text in missing))
    else:
        print("\nNothing is missing in the chapters that exist.")
    return bool(missing)
