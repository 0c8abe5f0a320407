"""Every page, text and table of the book against the rules of the house: `bookkit lint`, file by file."""
import pytest

from bookkit.lint.command import committed, findings
from bookkit.lint.rules import RULES, of_book
from bookkit.model.chapter import page_files
from rules import BOOK, verify

PAGES = page_files(BOOK.root)


@pytest.mark.reads("book/{path.stem}.md", "book/notation.md", "book/glossary.md", "tests/exceptions.toml", "headings")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path):
    verify(findings(BOOK, [path], RULES.values()))


def test_other_texts():
    verify(findings(BOOK, [path for path in committed(BOOK) if path not in PAGES], RULES.values()))


def test_the_book_as_a_whole():
    verify(of_book(BOOK, RULES.values()))
