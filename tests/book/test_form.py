"""What readers can rely on, on every page: what is seen runs as it is seen, and little is folded."""

import ast
import json
import re
import subprocess
import sys

import pytest

from pages import BOOK, NO_SETUP, cells_of, pages_with_code, source_of

PAGES = pages_with_code()
# Where the assert is the lesson: each entry of this page ends in the line that catches it.
MANY_ASSERTS = {"silent-failures"}
SETUP = (BOOK.parent / "companion" / "setup_cell.py").read_text("utf-8").strip()


@pytest.fixture(scope="module")
def undefined(tmp_path_factory):
    """The names that visible cells use and no visible cell above makes, by page: ruff's rule F821."""
    folder = tmp_path_factory.mktemp("in_view")
    for name in PAGES:
        sources = [cell.source for cell in cells_of(name) if cell.in_view]
        (folder / f"{name}.py").write_text("\n\n".join(sources))
    command = "check --isolated --select F821 --output-format json --exit-zero .".split()
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command], cwd=folder, capture_output=True, text=True
    )
    found = {name: [] for name in PAGES}
    for row in json.loads(done.stdout):
        found[re.search(r"([^/\\]+)\.py$", row["filename"])[1]].append(row["message"])
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_visible_cell_uses_what_visible_cells_made(undefined, name):
    """Every name that a visible cell uses was imported or made in a visible cell above it."""
    assert not undefined[name]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in NO_SETUP])
def test_the_setup_cell_is_the_same_on_every_page(name):
    """It is the first cell, and short."""
    first = cells_of(name)[0]
    assert first.source == SETUP and "setup" in first.tags
    assert len(SETUP.splitlines()) <= 16


@pytest.mark.parametrize("name", PAGES)
def test_folds_hide_checks_and_solutions_and_nothing_else(name):
    """A cell that is folded is the check of an exercise or its solution."""
    for cell in cells_of(name)[1:]:
        if not cell.in_view:
            assert any(tag.startswith(("check-", "solution-")) for tag in cell.tags), cell.id


@pytest.mark.parametrize("name", PAGES)
def test_at_most_a_quarter_of_the_words_are_folded(name):
    text = re.sub(r"(?ms)^```\{code-cell\}.*?^```$", "", source_of(name).read_text("utf-8"))
    prose = re.sub(r"\]\([^)]*\)", "]", text.split("---", 2)[2])
    folded = re.findall(r"(?s)<details.*?</details>", prose)
    share = sum(len(fold.split()) for fold in folded) / len(prose.split())
    assert share <= 0.25, f"{share:.0%}"


@pytest.mark.parametrize("name", [name for name in PAGES if name not in MANY_ASSERTS])
def test_at_most_three_asserts_are_in_view(name):
    """Proofs are tests; a few asserts that a reader would write may stay."""
    nodes = [
        node for cell in cells_of(name) if cell.in_view for node in ast.walk(ast.parse(cell.source))
    ]
    assert sum(isinstance(node, ast.Assert) for node in nodes) <= 3
