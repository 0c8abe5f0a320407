"""Chapters' notebooks in another language, from the same catalogues as the site: locale/*.po.

Message by message, as gettext does: a paragraph, heading, list item, table cell or alt text that
has a translation is replaced, everything else stays English, byte for byte. Code is not touched.
Links to the book's own pages go to the translated pages, and the badge opens the translated
notebook. `make sync` writes them; there is nothing to run here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping

import polib
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode

from tools.book import Book, Language

MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)
ALERT = re.compile(r"\[!\w+\][ \t]*\n")
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<target>[^)\s]+)\)")
CELL_BORDER = re.compile(r"(?<!\\)\|")
BADGE = re.compile(
    r"\[!\[(?P<colab>[^\]]*)\]\((?P<picture>\S+)\)\]\(\S+\) \[(?P<page>[^\]]*)\]\(\S+\)"
)


def messages_in(path: str) -> dict[str, str]:
    """Finished translations: fuzzy ones fall back to English."""
    return {
        entry.msgid: entry.msgstr
        for entry in polib.pofile(path)
        if entry.msgstr and not entry.fuzzy and not entry.obsolete
    }


def catalogue(book: Book, language: Language) -> Callable[[str], Mapping[str, str]]:
    """page → its messages, with those of the site's templates for the badge line."""
    folder = book.root / "locale" / language.code / "LC_MESSAGES"

    def read(name: str) -> dict[str, str]:
        path = folder / f"{name}.po"
        return messages_in(str(path)) if path.exists() else {}

    shared = read("sphinx")
    return lambda page: {**shared, **read(page)}


def translate(text: str, messages: Mapping[str, str]) -> str:
    """Markdown with each message that has a translation replaced."""
    lines = text.split("\n")
    edits: list[tuple[int, int, str]] = []
    column, in_cell = 0, False
    for token in MARKDOWN.parse(text):
        if token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            column, in_cell = column + 1, True
        elif token.type in ("th_close", "td_close"):
            in_cell = False
        elif token.type == "inline" and token.map:
            start, end = token.map
            if in_cell:
                if new := message(token.content, messages):
                    lines[start] = with_cell(lines[start], column, new.replace("|", r"\|"))
            else:
                edits += paragraph(token.content, start, end, lines, messages)
    for start, end, new in sorted(edits, reverse=True):
        lines[start:end] = [new]
    return "\n".join(lines)


def message(content: str, messages: Mapping[str, str]) -> str | None:
    """The translation of what Sphinx takes for one message: lines joined, images' alt texts apart."""
    new = messages.get(content.replace("\n", " ").strip()) or content

    def with_alt(image: re.Match[str]) -> str:
        return f"![{messages.get(image['alt'], image['alt'])}]({image['target']})"

    new = IMAGE.sub(with_alt, new)
    return new if new != content else None


def paragraph(
    content: str, start: int, end: int, lines: list[str], messages: Mapping[str, str]
) -> list[tuple[int, int, str]]:
    """How to replace lines start to end, which hold `content` after a prefix ("## ", "- ", "> ")."""
    if alert := ALERT.match(content):
        content, start = content[alert.end() :], start + 1
    new = message(content, messages)
    first = content.split("\n")[0]
    if new is None or first not in lines[start]:
        return []
    return [(start, end, lines[start][: lines[start].index(first)] + new)]


def with_cell(row: str, column: int, new: str) -> str:
    """A table's row with its cell `column` (from 1) replaced."""
    borders = [border.start() for border in CELL_BORDER.finditer(row)]
    if not row.lstrip().startswith("|"):
        borders.insert(0, -1)
    start = borders[column - 1] + 1
    end = borders[column] if column < len(borders) else len(row)
    return f"{row[:start]} {new} {row[end:]}"


def translate_notebook(
    notebook: NotebookNode, book: Book, page: str, language: Language, messages: Mapping[str, str]
) -> NotebookNode:
    """A copy of a chapter's notebook in another language."""
    translated = copy.deepcopy(notebook)
    for cell in translated.cells:
        if cell.cell_type == "markdown":
            text = translate(cell.source, messages)
            text = text.replace(f"{book.site}book/", f"{book.site}{language.path}book/")
            cell.source = with_badge(text, book, page, language, messages)
    return translated


def with_badge(
    text: str, book: Book, page: str, language: Language, messages: Mapping[str, str]
) -> str:
    def badge(line: re.Match[str]) -> str:
        colab, site = (messages.get(line[part], line[part]) for part in ("colab", "page"))
        picture = f"[![{colab}]({line['picture']})]({book.colab_url(page, language)})"
        return f"{picture} [{site}]({book.page_url(page, language)})"

    return BADGE.sub(badge, text)
