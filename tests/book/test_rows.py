"""What beside the pages promises something is there: faults, rows of coverage, wrong answers.

Each row of tests/rows.toml is what a reader can do, and where it is taught. An asserted row is put to
the test by a planted fault of each of its pages (`rows` in tests/pages/PAGE.toml); a `[[row]]` there
adds tests that no fault names, and quotes the sentence and the source of what is advice.
"""

import ast
import collections
import tomllib
from pathlib import Path

import pytest

from pages import cells_of, exercises_of, pages_with_code, source_of, tables

TESTS = Path(__file__).parent
ROWS = tomllib.loads((TESTS.parent / "rows.toml").read_text("utf-8"))
TABLES = tables()
KEYS = {"fault", "row", "exercise"}
OF_FAULT = {"name", "rows", "find", "replace", "fails"}


def names_of_tests(page, alone=False):
    """The tests of a page; `alone`: those that need nothing but the page, as a fault calls them."""
    path = TESTS / f"test_{page.replace('-', '_')}.py"
    tree = ast.parse(path.read_text("utf-8") if path.exists() else "")
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        test.name for test in tests if not alone or [one.arg for one in test.args.args] == ["page"]
    }


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("page", TABLES)
def test_each_fault_can_be_planted_and_names_what_notices_it(page):
    faults = TABLES[page].get("fault", [])
    cells = cells_of(page) if page in pages_with_code() else []
    notice = names_of_tests(page, alone=True) | {f"cell:{cell.id}" for cell in cells}
    for fault in faults:
        assert set(fault) - {"slow"} == OF_FAULT, f"{fault.get('name')}: wants {OF_FAULT}"
        name, find = fault["name"], fault["find"]
        assert set(fault["rows"]) <= set(ROWS), f"{name}: tests/rows.toml lacks one of its rows"
        found = [cell.source for cell in cells if find in cell.source]
        assert sum(source.count(find) for source in found) == 1, (
            f"{name}: {find!r} is not there once"
        )
        assert find != fault["replace"], name
        ast.parse(found[0].replace(find, fault["replace"]))
        assert fault["fails"] in notice, f"{name}: the page has no {fault['fails']}"
    for told in ("name",), ("find", "replace"):
        planted = collections.Counter(tuple(fault[key] for key in told) for fault in faults)
        assert not (twice := [one for one, n in planted.items() if n > 1]), f"twice: {twice}"


@pytest.mark.parametrize("page", TABLES)
def test_each_table_belongs_to_a_page_and_holds_nothing_that_is_not_read(page):
    source_of(page)
    assert set(TABLES[page]) <= KEYS
    for row in TABLES[page].get("row", []):
        assert set(row) <= {"id", "cells", "text", "source"} and row["id"] in ROWS
        assert set(row.get("cells", [])) <= names_of_tests(page), row


@pytest.mark.parametrize("page", pages_with_code())
def test_each_exercise_has_a_wrong_answer_and_why_it_is_one(page):
    listed = TABLES.get(page, {}).get("exercise", {})
    assert set(listed) == set(exercises_of(page))
    assert all(entry["wrong"] and entry["why"] for entry in listed.values())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["kind"] == "asserted"])
def test_an_asserted_row_is_put_to_the_test_on_each_of_its_pages(name):
    for page in ROWS[name]["chapters"]:
        faults = TABLES.get(page, {}).get("fault", [])
        assert any(name in fault["rows"] for fault in faults), f"no fault for {name} on {page}"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["kind"] == "judgement"])
def test_advice_is_on_a_page_with_its_source(name):
    found = [
        (page, row) for page in TABLES for row in TABLES[page].get("row", []) if row["id"] == name
    ]
    assert {page for page, _ in found} & set(ROWS[name]["chapters"]), "no page quotes it"
    for page, row in found:
        text = source_of(page).read_text("utf-8")
        assert flat(text).count(flat(row["text"])) == 1, f"{page}: {row['text'][:60]!r}"
        ids = {cell.id for cell in cells_of(page)} if page in pages_with_code() else set()
        assert row["source"] in text or row["source"] in ids, f"{page}: {row['source']}"
