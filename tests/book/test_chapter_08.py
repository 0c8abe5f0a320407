"""Chapter 8 teaches JAX alone: neither its cells nor the instruments bring Flax in."""
import ast

import pytest

from bookkit.model.chapter import by_name
from bookkit.run.calls import LOADED_PACKAGES, answers
from bookkit.run.execute import executed_with_calls
from rules import BOOK

pytestmark = pytest.mark.newest  # of kernels and setup cells: once is enough

PAGE = "book/08-distributed-arrays"


@pytest.fixture(scope="module")
def chapter():
    if PAGE not in BOOK.chapters:
        pytest.skip(f"no {PAGE}")
    return by_name()[PAGE.removeprefix("book/")]


def imported(source):
    """Top-level packages that a cell imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def loaded(page):
    """The packages that were loaded after a chapter's last cell, when it was executed with calls."""
    [said] = [said for what, _, said in answers(executed_with_calls(BOOK, [page])[page]) if what == LOADED_PACKAGES]
    return set(ast.literal_eval(said))


def test_no_cell_imports_flax(chapter):
    bad = [cell.where for cell in chapter.code if "flax" in imported(cell.source)]
    assert not bad, f"{', '.join(bad)}: imports flax; chapter 8 is JAX alone"


def test_flax_is_not_loaded_after_the_last_cell(chapter):
    assert {"jax", "meshscope"} <= loaded(PAGE) and "flax" not in loaded(PAGE)


def test_the_check_can_fail():
    """Chapter 2 teaches Flax, and shows that flax is seen where it is loaded."""
    assert "flax" in loaded("book/02-variables")
