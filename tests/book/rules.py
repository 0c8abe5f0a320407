"""What the checks of the book have in common: the book, and a test that fails by its messages."""
import pytest

from bookkit.model.book import Book

BOOK = Book()


def verify(problems):
    if problems := [str(problem) for problem in problems]:
        pytest.fail("\n".join(problems), pytrace=False)
