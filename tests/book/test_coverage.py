"""Every skill of tests/rows.toml is shown by the chapters that promise it, with a fault planted."""
import pytest

from bookkit.lint.faults import BadEntry, listed, place
from bookkit.lint.rows import entries, gaps, problems_of, rows, texts, without_faults
from bookkit.model.chapter import by_name
from rules import verify


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry['id']}-{entry['chapter']}")
def test_entry(entry):
    verify(problems_of(entry, rows().get(entry["id"]), by_name(), texts()))


def test_no_gaps():
    verify(gaps(entries(), rows(), texts()))


def test_every_asserted_row_has_a_fault():
    verify(without_faults(entries(), rows(), listed()))


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
            place(fault, books[fault["chapter"]])
        except BadEntry as error:
            yield f"tests/mutants.toml: {error}"


def test_faults_fit_their_chapters():
    """That each is noticed takes minutes: `make mutants`."""
    verify(misplaced(listed(), by_name(), rows()))
