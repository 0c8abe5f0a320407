"""Every skill of tests/rows.toml is shown by the chapters that promise it, with a fault planted."""
import pytest

from bookkit.lint.faults import BadEntry, fit_to_chapter, listed_faults
from bookkit.lint.rows import (
    gaps,
    listed_rows,
    problems_of,
    text_of_pages,
    wanted_rows,
    without_faults,
)
from bookkit.model.chapter import by_name
from rules import verify


@pytest.mark.parametrize("entry", listed_rows(), ids=lambda entry: f"{entry['id']}-{entry['chapter']}")
def test_entry(entry):
    verify(problems_of(entry, wanted_rows().get(entry["id"]), by_name(), text_of_pages()))


def test_no_gaps():
    verify(gaps(listed_rows(), wanted_rows(), text_of_pages()))


def test_every_asserted_row_has_a_fault():
    verify(without_faults(listed_rows(), wanted_rows(), listed_faults()))


def misplaced(faults, books, every):
    seen = set()
    for fault in faults:
        key = (fault["chapter"], fault["name"])
        if key in seen:
            yield f"tests/mutants.toml: two faults are called {' / '.join(key)}"
        seen.add(key)
        for name in fault["rows"]:
            if name not in every:
                yield f"tests/mutants.toml: {' / '.join(key)}: no row {name} in tests/rows.toml"
        if fault["chapter"] not in books:
            yield f"tests/mutants.toml: {' / '.join(key)}: no such chapter"
            continue
        try:
            fit_to_chapter(fault, books[fault["chapter"]])
        except BadEntry as error:
            yield f"tests/mutants.toml: {error}"


def test_faults_fit_their_chapters():
    """That each is noticed takes minutes: `make mutants`."""
    verify(misplaced(listed_faults(), by_name(), wanted_rows()))
