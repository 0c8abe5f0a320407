"""Print, for each row of tests/rows.toml, the cells that show it, and what is missing.

    bookkit coverage        ends with 1 if a chapter that exists lacks a row of its own

tests/coverage.toml maps rows to cells; tests/test_coverage.py checks with the functions below.
"""

from __future__ import annotations

import argparse
import ast
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from bookkit.lint.faults import listed_faults
from bookkit.model.book import find_root
from bookkit.model.chapter import Cell, Chapter, by_name

Row = dict[str, Any]


def wanted_rows() -> dict[str, Row]:
    return tomllib.loads((find_root() / "tests" / "rows.toml").read_text("utf-8"))


def listed_rows() -> list[Row]:
    path = find_root() / "tests" / "coverage.toml"
    return tomllib.loads(path.read_text("utf-8")).get("row", []) if path.exists() else []


def text_of_pages() -> dict[str, str]:
    """Every page of the book, for what judgement rows quote."""
    return {
        path.stem: path.read_text("utf-8") for path in sorted((find_root() / "book").glob("*.md"))
    }


def asserts(cell: Cell) -> bool:
    """Could this cell fail by an assertion (or must it raise)?"""
    if "raises-exception" in cell.tags:
        return True
    for node in ast.walk(ast.parse(cell.source)):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Raise) and node.exc and "NotImpl" not in ast.unparse(node):
            return True  # such as raise RuntimeError("accepted") where an error was expected
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if name.startswith("assert_"):
                return True
    return False


def cell_of(piece: str, chapter: Chapter) -> Cell | str:
    """The one code cell that holds the piece, or what is wrong with the piece."""
    found = chapter.holding(piece)
    if len(found) != 1:
        where = ", ".join(str(cell.index) for cell in found) or "none"
        return f"{piece!r} is to be in one code cell of {chapter.name}, but is in {where}"
    return found[0]


def problems_of(
    entry: Row, row: Row | None, books: dict[str, Chapter], pages: dict[str, str]
) -> Iterator[str]:
    """What is wrong with one entry of tests/coverage.toml."""
    where = f"tests/coverage.toml, {entry.get('id')} in {entry.get('chapter')}"
    if row is None:
        yield f"{where}: tests/rows.toml has no such row"
        return
    if entry["chapter"] not in pages:
        yield f"{where}: there is no book/{entry['chapter']}.md"
        return
    chapter = books.get(entry["chapter"])
    cells = []
    for piece in entry.get("cells", []):
        found = cell_of(piece, chapter) if chapter else f"{entry['chapter']} has no code cells"
        if isinstance(found, str):
            yield f"{where}: {found}"
        else:
            cells.append(found)
    if row["kind"] == "asserted":
        if not entry.get("cells"):
            yield f"{where}: an asserted row names its cells"
        for cell in cells:
            if not asserts(cell):
                yield (
                    f"{where}: cell {cell.index} cannot fail; name the cell that asserts, "
                    "or let it assert"
                )
        return
    words = " ".join(entry.get("text", "").split())
    if not words:
        yield f"{where}: a judgement row quotes its sentence in `text`"
    elif (count := " ".join(pages[entry["chapter"]].split()).count(words)) != 1:
        yield f"{where}: `text` is {count} times on the page, not once: {words[:60]!r}"
    source = entry.get("source", "")
    if source.startswith("http"):
        if source not in pages[entry["chapter"]]:
            yield f"{where}: the page does not link to its source {source}"
    elif chapter is None or isinstance(cell_of(source, chapter), str):
        if not source or source not in pages[entry["chapter"]]:
            yield f"{where}: `source` is an address that the page links to, or part of one cell"


def gaps(found: list[Row], every: dict[str, Row], pages: dict[str, str]) -> Iterator[str]:
    """Rows that a chapter which exists owes its readers."""
    for name, row in every.items():
        for home in row["chapters"]:
            if home not in pages:
                continue
            if not any(entry["id"] == name and entry["chapter"] == home for entry in found):
                if row["kind"] == "judgement" and any(entry["id"] == name for entry in found):
                    continue  # said once is enough
                yield f"{name} is not covered in {home}: {row['can']}"


def without_faults(found: list[Row], every: dict[str, Row], faults: list[Row]) -> Iterator[str]:
    """Asserted rows that no planted fault puts to the test."""
    planted = {(fault["chapter"], name) for fault in faults for name in fault["rows"]}
    for entry in found:
        row = every.get(entry["id"])
        if row and row["kind"] == "asserted" and (entry["chapter"], entry["id"]) not in planted:
            yield f"{entry['id']} in {entry['chapter']} has no fault in tests/mutants.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="bookkit coverage", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    books, pages, every, found = by_name(), text_of_pages(), wanted_rows(), listed_rows()
    missing = [*gaps(found, every, pages), *without_faults(found, every, listed_faults())]
    for entry in found:
        missing += problems_of(entry, every.get(entry["id"]), books, pages)
    for name, row in every.items():
        shown = []
        for entry in found:
            if entry["id"] != name:
                continue
            chapter = books.get(entry["chapter"])
            cells = [cell_of(piece, chapter) for piece in entry.get("cells", [])] if chapter else []
            numbers = ", ".join(str(cell.index) for cell in cells if isinstance(cell, Cell))
            shown.append(f"{entry['chapter']} " + (f"cells {numbers}" if numbers else "text"))
        absent = [home for home in row["chapters"] if home not in pages]
        later = f"(not written: {', '.join(absent)})" if absent else ""
        mark = "J" if row["kind"] == "judgement" else " "
        print(f"{name:4}{mark} {'; '.join([*shown, later]).strip('; '):60} {row['can']}")
    if missing:
        print("\nMissing:")
        print("\n".join("  " + text for text in missing))
    else:
        print("\nNothing is missing in the chapters that exist.")
    return bool(missing)
