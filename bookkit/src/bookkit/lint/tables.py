"""Tables beside the pages: planted faults, rows of coverage, wrong answers.

A page has one file, tests/pages/PAGE.toml, in which cells are named by their tags id-SLUG and claims
by their tests in tests/book/test_PAGE.py:

    [[fault]]       name, rows, find (once in the page's code), replace,
                    fails = the test that must fail, or cell:SLUG that must raise first,
                    or survives = the reason; slow = true leaves it to the night
    [[row]]         id, cells = [the tests that assert it]; for advice: text, source = address or SLUG
    [exercise.NAME] wrong = Python that assigns answer_NAME, why = the mistake in it
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from bookkit.lint.rules import WHOLE, SaidOfBook, rule
from bookkit.model.book import Book
from bookkit.model.chapter import Chapter, page_files

Entry = dict[str, Any]  # with "chapter", the page's name, and "file", the table that it stands in
PAGES = "tests/pages"
FIELDS = {  # what a fault cannot do without
    "rows": 'the rows of tests/rows.toml that it puts to the test, such as ["A5"]',
    "find": "a piece of one line of code that readers see",
    "replace": "what a person would write there by mistake",
}
KEYS = {
    "fault": {"name", "rows", "find", "replace", "fails", "survives", "slow"},
    "row": {"id", "cells", "text", "source"},
    "exercise": {"wrong", "why"},
}


def tables_of_pages(book: Book) -> dict[str, dict[str, Any]]:
    """What tests/pages/ holds, by the name of the page."""
    paths = sorted((book.root / PAGES).glob("*.toml"))
    return {path.stem: tomllib.loads(path.read_text("utf-8")) for path in paths}


def tests_of_page(book: Book, page: str) -> Path:
    return book.root / "tests" / "book" / f"test_{page.replace('-', '_')}.py"


def names_of_tests(book: Book, page: str) -> set[str]:
    """The tests of a page."""
    path = tests_of_page(book, page)
    tree = ast.parse(path.read_text("utf-8") if path.exists() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def entries_of_pages(book: Book, kind: str) -> list[Entry]:
    return [
        {**entry, "chapter": page, "file": f"{PAGES}/{page}.toml"}
        for page, table in tables_of_pages(book).items()
        for entry in table.get(kind, ())
    ]


def listed_faults(book: Book) -> list[Entry]:
    return entries_of_pages(book, "fault")


def listed_rows(book: Book) -> list[Entry]:
    return entries_of_pages(book, "row")


def wrong_answers(book: Book, page: str) -> dict[str, dict[str, str]]:
    """By exercise of a page: Python that assigns a wrong answer, and why it is wrong."""
    return dict(tables_of_pages(book).get(page, {}).get("exercise", {}))


def label(fault: Entry) -> str:
    return f"{fault['chapter']} / {fault['name']}"


def unfit_faults(
    faults: Iterable[Entry], books: dict[str, Chapter], rows: Collection[str]
) -> Iterator[str]:
    """Why a fault cannot be planted, or twice the same."""
    seen, planted = set(), dict[tuple[str, str, str], str]()
    for fault in faults:
        name = label(fault)
        if name in seen:
            yield f"two faults are called {name}: rename one"
        seen.add(name)
        if lacks := [key for key in FIELDS if key not in fault]:
            yield f"{name}: " + "; ".join(f"no `{key}`, {FIELDS[key]}" for key in lacks)
            continue
        find, new = fault["find"], fault["replace"]
        if (other := planted.setdefault((fault["chapter"], find, new), name)) != name:
            yield f"{name} plants the same mistake as {other}: remove one"
        for row in set(fault["rows"]) - set(rows):
            yield f"{name}: no row {row} in tests/rows.toml"
        if fault["chapter"] not in books:
            yield f"{name}: no such chapter"
        elif find == new:
            yield f"{name}: `find` and `replace` are the same"
        else:
            cells = [cell for cell in books[fault["chapter"]].code if find in cell.source]
            if (count := sum(cell.source.count(find) for cell in cells)) != 1:
                yield f"{name}: `find` occurs {count} times in the code, not once: {find!r}"
            elif not is_python(cells[0].source.replace(find, new)):
                yield f"{name}: the changed cell is not Python"


def is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


@rule(WHOLE)
def one_table_a_page(book: Book) -> SaidOfBook:
    """What is planted in a page, shown by it and answered stands in tests/pages/PAGE.toml."""
    there = {path.stem for path in page_files(book.root)}
    for page, table in tables_of_pages(book).items():
        name = f"{PAGES}/{page}.toml"
        if page not in there:
            yield name, 1, f"no page of the book is called {page}: delete it, or rename it"
        yield from ((name, 1, what) for what in unlike_a_table(table))


def unlike_a_table(table: dict[str, Any]) -> Iterator[str]:
    """Keys that nothing reads, and keys that are missing."""
    for kind in sorted(set(table) - set(KEYS)):
        yield f"nothing reads [{kind}]; there are {', '.join(KEYS)}"
    faults, rows, exercises = (table.get(kind, ()) for kind in KEYS)
    named = [*((f"fault {one.get('name')}", "fault", one) for one in faults)]
    named += [(f"row {one.get('id')}", "row", one) for one in rows]
    named += [(f"exercise {name}", "exercise", exercises[name]) for name in exercises]
    for name, kind, entry in named:
        if unknown := set(entry) - KEYS[kind]:
            yield f"{name}: nothing reads {', '.join(sorted(unknown))}"
        if kind == "fault":
            if missing := {"name", *FIELDS} - set(entry):
                yield f"{name}: it lacks {', '.join(sorted(missing))}"
            if ("fails" in entry) == ("survives" in entry):
                yield f"{name}: give `fails`, the test that must fail, or `survives`, the reason"
        elif kind == "row" and "id" not in entry:
            yield f"{name}: it lacks id"
