"""How the book's checks are written.

A rule is a function of a chapter that yields one message per problem: where, what is wrong, what to
do. `over_chapters` makes a test of some rules and every chapter there is; new chapters need no new
test. tests/test_checks_can_fail.py shows each rule a bad chapter, so that no rule is blind.
"""
import ast
import inspect

import pytest

from bookkit.model.book import Book
from bookkit.model.chapter import chapters

BOOK = Book()
ALL = []


def rule(function):
    ALL.append(function)
    return function


def verify(problems):
    if problems := list(problems):
        pytest.fail("\n".join(problems), pytrace=False)


def tree(code):
    """A cell's syntax tree as text: what it does, whatever its comments say."""
    try:
        return ast.dump(ast.parse(code))
    except SyntaxError:  # IPython's own syntax, or wrong on purpose: nothing may change
        return code


def over_chapters(module):
    """A test of every rule defined in this module against every chapter."""
    found = [function for function in ALL if function.__module__ == module]
    assert found and all(len(inspect.signature(function).parameters) == 1 for function in found)

    @pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
    @pytest.mark.parametrize("check", found, ids=lambda function: function.__name__)
    def test(check, chapter):
        verify(check(chapter))
    return test
