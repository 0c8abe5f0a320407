"""What a rule is: a function of a page that yields lines, what is wrong there and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from nbformat import NotebookNode

from bookkit.model.book import Book
from bookkit.model.chapter import Chapter
from bookkit.run.execute import found_in_cache

Findings = Iterator[tuple[int, str]]  # line of the file, what is wrong and what to do


@dataclass(frozen=True)
class Page:
    chapter: Chapter
    book: Book = field(default_factory=Book)

    @cached_property
    def executed(self) -> NotebookNode | None:
        """The executed notebook, if this very code was executed; nothing runs here."""
        page = self.chapter.page
        return found_in_cache(self.book, page) if page in self.book.chapters else None


RULES: dict[str, Callable[[Page], Findings]] = {}


def rule(check: Callable[[Page], Findings]) -> Callable[[Page], Findings]:
    """Register a rule; its name, with hyphens, stands behind each of its findings."""
    RULES[check.__name__.replace("_", "-")] = check
    return check


def findings(page: Page) -> Iterator[str]:
    """All that is wrong with a page, by line."""
    found = [(line, what, name) for name, check in RULES.items() for line, what in check(page)]
    for line, what, name in sorted(found):
        yield f"{page.chapter.page}.md:{line}: {what} [{name}]"
