"""The rules of pages, as functions that `bookkit lint` calls and that the tests show good and bad.

A rule's name is its id, the first line of its docstring what it wants. It binds kinds of pages
(chapter, page, reference), any committed text, or the book as a whole, and yields the line of a
file with what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nbformat import NotebookNode

from bookkit.model.book import KINDS, Book
from bookkit.model.chapter import Chapter
from bookkit.run.execute import found_in_cache

CHAPTER, PAGE, REFERENCE = KINDS
TEXT = "text"  # any committed text: the rule is given its name, the text and the book
WHOLE = "book"  # the rule is given the book, and names the file itself
Said = Iterator[tuple[int, str]]  # line of the file, what is wrong and what to do
SaidOfBook = Iterator[tuple[str, int, str]]  # and the file before it


@dataclass(frozen=True)
class Page:
    """What a rule of pages is given."""

    chapter: Chapter
    kind: str
    book: Book = field(default_factory=Book)

    @cached_property
    def executed(self) -> NotebookNode | None:
        """The executed notebook, if this very code was executed; nothing runs here."""
        page = self.chapter.page
        if page not in self.book.chapters:
            return None
        return found_in_cache(self.book, page)


@dataclass(frozen=True)
class Rule:
    id: str
    about: str
    kinds: tuple[str, ...]
    check: Callable[..., Iterable[tuple[Any, ...]]]


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what} [{self.rule}]"


RULES: dict[str, Rule] = {}


def rule(*kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a rule of these kinds of pages."""

    def register(check: Callable[..., Any]) -> Callable[..., Any]:
        name = check.__name__.replace("_", "-")
        assert name not in RULES and check.__doc__ and set(kinds) <= {*KINDS, TEXT, WHOLE}
        RULES[name] = Rule(name, check.__doc__.split("\n")[0].rstrip("."), kinds, check)
        return check

    return register


def of_page(page: Page, rules: Iterable[Rule]) -> Iterator[Finding]:
    """What is wrong with a page.

    A reference with code keeps the rules of pages too; one without is a table or a list.
    """
    kinds = {page.kind}
    if page.kind == REFERENCE and page.chapter.code:
        kinds.add(PAGE)
    for one in rules:
        if not kinds & set(one.kinds):
            continue
        for line, what in one.check(page):
            yield Finding(f"{page.chapter.page}.md", line, one.id, what)


def of_text(name: str, text: str, book: Book, rules: Iterable[Rule]) -> Iterator[Finding]:
    for one in rules:
        if TEXT in one.kinds:
            for line, what in one.check(name, text, book):
                yield Finding(name, line, one.id, what)


def of_book(book: Book, rules: Iterable[Rule]) -> Iterator[Finding]:
    for one in rules:
        if WHOLE in one.kinds:
            for path, line, what in one.check(book):
                yield Finding(path, line, one.id, what)
