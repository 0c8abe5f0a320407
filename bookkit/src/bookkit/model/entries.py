"""Entries of a reference page: sections that are called by the id of their first code cell.

The site gives such a section the short anchor #SLUG (bookkit.sphinx_ext.entries); here it is read
from the source, for rules and for the index of messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import Cell, Chapter, load_chapter

HEADING = re.compile(r"(?m)^(#{1,6}) +(.+?)[ \t]*$")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
VARIES = re.compile(r"\s*…\s*")  # what stands for it in a heading that quotes a message


@dataclass(frozen=True)
class Section:
    """Of a page: its heading, and what stands between it and the next heading of any level."""

    page: str  # book/messages/messages-meshes
    level: int
    heading: str  # as it is written, with its marks
    line: int  # of the file
    text: str  # its Markdown
    code: tuple[Cell, ...]

    @property
    def slug(self) -> str | None:
        """The short anchor: what the first code cell is called."""
        first = self.code[0] if self.code else None
        return first.tagged("id-") if first else None

    @property
    def messages(self) -> list[str]:
        """What the heading quotes, in code form."""
        return [text.strip() for _, text in CODE_SPAN.findall(self.heading)]

    @property
    def fragments(self) -> list[str]:
        """The pieces of the messages that do not vary."""
        return [one for text in self.messages for one in VARIES.split(text) if one.strip()]


def sections(chapter: Chapter) -> Iterator[Section]:
    """Every section of a page below its title, in order."""
    page = chapter.page
    level, heading, line, text, code = 1, "", 1, "", list[Cell]()
    for cell in chapter.cells:
        if cell.kind == "code":
            code.append(cell)
            continue
        at = 0
        for found in HEADING.finditer(without_code(cell.source)):
            text += cell.source[at : found.start()]
            if level > 1:
                yield Section(page, level, heading, line, text, tuple(code))
            level, heading = len(found[1]), cell.source[found.start(2) : found.end(2)]
            line, text, code = cell.line + cell.source.count("\n", 0, found.start()), "", []
            at = found.end()
        text += cell.source[at:] + "\n\n"
    if level > 1:
        yield Section(page, level, heading, line, text, tuple(code))


def without_code(markdown: str) -> str:
    """The same length, blanks where a fence shows code: what looks like a heading there is none."""
    return re.sub(
        r"(?ms)^(`{3,}|~{3,})[^\n]*$.*?^\1[ \t]*$", lambda found: " " * len(found[0]), markdown
    )


# The index of all messages, book/messages/messages.md, which `bookkit sync` keeps.

INDEX = "book/messages/messages"
LIST_BEGINS, LIST_ENDS = "<!-- written by bookkit sync -->\n", "<!-- end -->"


def index_of_messages(book: Book) -> str:
    """Each group, book/messages/messages-GROUP, with a link to each of its entries."""
    groups = []
    for page in book.pages:
        if not page.startswith(f"{INDEX}-"):
            continue
        chapter = load_chapter(book.source(page))
        title = chapter.cells[0].lines[0].removeprefix("# ")
        lines = [f"## [{title}]({book.page_url(page)})", ""]
        for section in sections(chapter):
            if section.slug:
                lines.append(f"- [{section.heading}]({book.page_url(page)}#{section.slug})")
        groups.append("\n".join(lines))
    return "\n\n".join(groups)


def with_index(text: str, book: Book) -> str:
    """The text of book/messages/messages.md, listing the entries that there are."""
    before, begin, rest = text.partition(LIST_BEGINS)
    _, end, after = rest.partition(LIST_ENDS)
    if not begin or not end:
        what = f"{LIST_BEGINS.strip()} … {LIST_ENDS}, between which the list stands"
        raise Problem(f"{INDEX}.md lacks {what}: put them back")
    return f"{before}{LIST_BEGINS}\n{index_of_messages(book)}\n\n{LIST_ENDS}{after}"
