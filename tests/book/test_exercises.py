"""Exercises: the check rejects the stub and a wrong answer, and accepts the solution.

The calls that a reader could make are executed with the chapter (bookkit/run/calls.py); wrong answers stand in the tables of tests/.
"""
import pytest

from bookkit.lint.anatomy import exercises
from bookkit.model.book import Problem
from bookkit.model.chapter import by_name
from bookkit.run.calls import SOLUTION, STUB, WRONG, answers, wrong_answers
from bookkit.run.execute import executed_with_calls
from rules import BOOK, verify

pytestmark = pytest.mark.newest  # of kernels and setup cells: once is enough

WANTED = {STUB: "not yet", WRONG: "not yet", SOLUTION: "correct"}
PAGES = [page for page in BOOK.chapters if exercises(by_name()[page.removeprefix("book/")])]


@pytest.fixture(scope="module")
def executed():
    """Chapters with a reader's calls, two at a time, and what went wrong with those that failed."""
    try:
        return executed_with_calls(BOOK, PAGES), ""
    except Problem as problem:
        passed = [page for page in PAGES if f"{page}.md" not in str(problem)]
        return executed_with_calls(BOOK, passed), str(problem)


def judge(page, notebook, wrong):
    """Where a check answers otherwise than it should."""
    asked = [(what, exercise, said) for what, exercise, said in answers(notebook) if what in WANTED]
    for what, exercise, said in asked:
        if not said.strip("'\"").startswith(WANTED[what]):
            how = "; a check says \"not yet …\" and does not raise" if "raised " in said else ""
            yield (f"{page}.md, exercise {exercise}: the check answers {said} to {what}, "
                   f"not \"{WANTED[what]} …\"{how}")
    for exercise in wrong:
        if (WRONG, exercise) not in {(what, one) for what, one, _ in asked}:
            yield f"{page}.md: tests have a wrong answer to {exercise}, an exercise that is not there"


@pytest.mark.parametrize("page", PAGES)
def test_checks(executed, page):
    notebooks, failed = executed
    assert page in notebooks, failed
    verify(judge(page, notebooks[page], wrong_answers(BOOK, page)))
