"""The rule of pages that say what a message means: an entry is whole, and quotes what was raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bookkit.lint.outputs import outputs, text_of_output
from bookkit.lint.rules import REFERENCE, Page, Said, rule
from bookkit.model.addresses import addresses, meaning_of_url
from bookkit.model.book import Book
from bookkit.model.entries import Section, sections

THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|discussions)/\d+")


@rule(REFERENCE)
def message_entries(page: Page) -> Said:
    """Each entry of messages-*: message, id, a chapter, a thread; its words were raised."""
    if not page.chapter.name.startswith("messages-"):
        return
    for entry in filter(lambda one: one.is_entry, sections(page.chapter)):
        if not entry.messages:
            yield entry.line, "an entry is called by its message: quote it in code form"
        if not entry.slug:
            yield entry.line, "its first cell gives the entry its address: tag it id-SLUG"
        if not lessons(page.book, entry):
            yield entry.line, "no link to what teaches it: name a chapter, with its address"
        if not any(THREAD.match(url) for url in addresses(entry.text)):
            yield entry.line, "no link to a public thread where it was met: name one"
        if page.executed is None:
            continue  # the rule `executed` says so
        evidence = "\n".join("".join(text.split()) for text in seen_in(page, entry))
        for fragment in entry.fragments:
            if "".join(fragment.split()) not in evidence:
                how = (
                    "quote the message, with … for what varies, or assert it in a test of the page"
                )
                yield entry.line, f"{fragment!r} is in no output and no test: {how}"


def lessons(book: Book, entry: Section) -> list[str]:
    """The pages with lessons that an entry links to, in order."""
    targets = (meaning_of_url(url, book) for url in addresses(entry.text))
    pages = (target.name for target in targets if target and target.kind == "page")
    return [page for page in pages if book.kind(page) != "reference"]


def seen_in(page: Page, entry: Section) -> Iterator[str]:
    """What its cells printed, and every string of the page's tests."""
    own = {id(cell) for cell in entry.code}
    for cell, output in outputs(page):
        if id(cell) in own:
            yield text_of_output(output)
    name = f"test_{page.chapter.name.replace('-', '_')}.py"
    tests = page.book.root / "tests" / "book" / name
    if tests.exists():
        yield from strings(tests.read_text("utf-8"))


def strings(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
