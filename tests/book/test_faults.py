"""Each mistake that tests/pages/*.toml plants in a page is noticed by the test, or the cell, it names.

    make faults PAGE=02-variables

A fault is one line of the page's code, replaced. `fails` names a test of the page, or `cell:ID`: the
cell that must be the first to raise. Left to the night are those with `slow = true`, and those of
pages that are not chapters.
"""

import importlib

import jax
import pytest

from pages import BOOK, cells_of, pages_with_code, run, source_of, tables, with_fault

pytestmark = pytest.mark.faults
NOT_THE_LESSON = SyntaxError, NameError, ImportError  # a program that cannot run proves nothing
FAULTS = {name: tables()[name].get("fault", []) for name in pages_with_code() if name in tables()}


def items(page):
    for name in [page] if page else FAULTS:
        for fault in FAULTS.get(name, []):
            slow = fault.get("slow") or source_of(name).parent != BOOK
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(name, fault, id=f"{name}-{fault['name']}", marks=marks)


def pytest_generate_tests(metafunc):
    page = metafunc.config.getoption("page", None)
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("name, fault", list(items(page)), indirect=["name"])
    else:
        metafunc.parametrize("name", [page] if page else list(FAULTS), indirect=True)


def named_test(name, fault):
    module = importlib.import_module("test_" + name.replace("-", "_"))
    return getattr(module, fault["fails"])


@pytest.fixture(scope="module")
def name(request):
    """The page; its programs go with it, for a process of Linux has room for 65,530 mappings."""
    yield request.param
    jax.clear_caches()


def test_fault_is_noticed(name, fault):
    """With one line of the page changed, the cell raises or the test fails that the fault names."""
    cells = with_fault(cells_of(name), fault["find"], fault["replace"])
    wanted = fault["fails"]
    with (
        pytest.raises((Exception, pytest.fail.Exception)) as caught,
        run(name, cells=cells) as page,
    ):
        named_test(name, fault)(page) if not wanted.startswith("cell:") else None
    assert not caught.errisinstance(NOT_THE_LESSON), f"plant a program that can run: {caught.value}"
    cell = getattr(caught.value, "cell", None)
    where = wanted if cell is None else f"cell:{cell}"
    assert where == wanted, f"{where} noticed it first: {caught.value}"


@pytest.mark.slow  # by day, tests/book/test_PAGE.py say the same
def test_without_a_fault_all_pass(name):
    """The named tests pass here on the page as it is: nothing else made them fail."""
    with run(name) as page:
        for fault in FAULTS[name]:
            if not fault["fails"].startswith("cell:"):
                named_test(name, fault)(page)
