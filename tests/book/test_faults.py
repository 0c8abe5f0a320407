"""Each mistake that tests/pages/*.toml plants in a page is noticed by the test, or the cell, it names.

    make faults PAGE=02-variables

A fault is one line of the page's code, replaced. `fails` names a test of the page, or `cell:ID`: the
cell that must be the first to raise. `slow = true` leaves a fault to the night.
"""

import importlib

import jax
import pytest

from pages import cells_of, pages_with_code, run, tables, with_fault

pytestmark = pytest.mark.faults
NOT_THE_LESSON = SyntaxError, NameError, ImportError  # a program that cannot run proves nothing
FAULTS = {name: tables()[name].get("fault", []) for name in pages_with_code() if name in tables()}


def items():
    for name, faults in FAULTS.items():
        for fault in faults:
            marks = [pytest.mark.xdist_group(name)]
            if fault.get("slow"):
                marks.append(pytest.mark.slow)
            yield pytest.param(name, fault, id=f"{name}-{fault['name']}", marks=marks)


def named_test(name, fault):
    module = importlib.import_module("test_" + name.replace("-", "_"))
    return getattr(module, fault["fails"])


@pytest.fixture(scope="module")
def name(request):
    """The page; its programs go with it, for a process of Linux has room for 65,530 mappings."""
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("name, fault", list(items()), indirect=["name"])
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
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAULTS],
    indirect=True,
)
def test_without_a_fault_all_pass(name):
    """The named tests pass here on the page as it is: nothing else made them fail."""
    with run(name) as page:
        for fault in FAULTS[name]:
            if not fault["fails"].startswith("cell:"):
                named_test(name, fault)(page)
