"""Entries of a reference page: sections that are called by the id of their first code cell.

The site gives such a section the short anchor #SLUG (bookkit.sphinx_ext.entries); here it is read
from the source, for rules and for the index of messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import Cell, Chapter, load_chapter

HEADING = re.compile(r"(?m)^#{2,6} +(.+?)[ \t]*$")  # below the title of the page
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
VARIES = re.compile(r"\s*…\s*")  # what stands for it in a heading that quotes a message


@dataclass(frozen=True)
class Section:
    """Of a page: its heading, and the code between it and the next heading of any level."""

    heading: str  # as it is written, with its marks
    line: int  # of the file
    code: list[Cell]

    @property
    def slug(self) -> str | None:
        """The short anchor: what the first code cell is called."""
        return self.code[0].tagged("id-") if self.code else None

    @property
    def fragments(self) -> list[str]:
        """The pieces that do not vary of the messages that the heading quotes, in code form."""
        quoted = [text.strip() for _, text in CODE_SPAN.findall(self.heading)]
        return [one for text in quoted for one in VARIES.split(text) if one.strip()]


def sections(chapter: Chapter) -> list[Section]:
    """Every section of a page below its title, in order."""
    found: list[Section] = []
    for cell in chapter.cells:
        if cell.kind == "markdown":
            for heading in HEADING.finditer(without_code(cell.source)):
                words = cell.source[heading.start(1) : heading.end(1)]
                line = cell.line + cell.source.count("\n", 0, heading.start())
                found.append(Section(words, line, []))
        elif found:
            found[-1].code.append(cell)
    return found


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
