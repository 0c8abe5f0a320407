"""Chapters' notebooks in another language, from the same catalogues as the site: locale/*.po.

Message by message, as gettext does: a paragraph, heading, list item, table cell or alt text that
has a translation is replaced; everything else stays English, byte for byte. Comments in code are
replaced too, code is not touched (bookkit/words/comments.py). Links to the book's own pages go to
the translated pages, figures are those with translated words, and the badge opens the translated
notebook. `make sync` writes them; there is nothing to run here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode

from bookkit.model.book import Book, Language
from bookkit.words.comments import with_comments

MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)
ALERT = re.compile(r"\[!\w+\][ \t]*\n")
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FOLD_SUMMARY = re.compile(r"(<summary>)\s*(.*?)\s*(</summary>)", re.S)
CELL_BORDER = re.compile(r"(?<!\\)\|")
BADGE = re.compile(
    r"\[!\[(?P<colab>[^\]]*)\]\((?P<picture>\S+)\)\]\(\S+\) \[(?P<page>[^\]]*)\]\(\S+\)"
)


def with_summaries(html: str, messages: Mapping[str, str]) -> str:
    """HTML with the summaries of its folds translated."""

    def translated(summary: re.Match[str]) -> str:
        new = messages.get(key(summary[2]))
        return f"{summary[1]}{new}{summary[3]}" if new else summary[0]

    return FOLD_SUMMARY.sub(translated, html)


def key(content: str) -> str:
    return content.replace("\n", " ").strip()


def translate_markdown(text: str, messages: Mapping[str, str]) -> str:
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
            content = token.content
            if alert := ALERT.match(content):
                content, start = content[alert.end() :], start + 1
            new = translated_message(content, messages)
            if new is None:
                continue
            first = content.split("\n")[0]
            if in_cell:
                lines[start] = with_cell(lines[start], column, new.replace("|", r"\|"))
            elif first in lines[start]:  # after a prefix: "## ", "- ", "> "
                edits.append((start, end, lines[start][: lines[start].index(first)] + new))
        elif token.type == "html_block" and token.map:
            start, end = token.map
            block = "\n".join(lines[start:end])
            edits.append((start, end, with_summaries(block, messages)))
    for start, end, replacement in sorted(edits, reverse=True):
        lines[start:end] = [replacement]
    return "\n".join(lines)


def translated_message(content: str, messages: Mapping[str, str]) -> str | None:
    """The translation of what Sphinx takes for one message: lines joined, images' alt texts apart."""
    new = messages.get(key(content)) or content

    def with_alt(image: re.Match[str]) -> str:
        return f"![{messages.get(image['alt'], image['alt'])}]({image['target']})"

    new = IMAGE.sub(with_alt, new)
    return new if new != content else None


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

    def badge(line: re.Match[str]) -> str:
        colab, site = (messages.get(line[part], line[part]) for part in ("colab", "page"))
        picture = f"[![{colab}]({line['picture']})]({book.colab_url(page, language)})"
        return f"{picture} [{site}]({book.page_url(page, language)})"

    translated = copy.deepcopy(notebook)
    for cell in translated.cells:
        if cell.cell_type == "markdown":
            text = translate_markdown(cell.source, messages)
            for folder in ("book/", "_static/figures/"):
                text = text.replace(f"{book.site}{folder}", f"{book.site}{language.path}{folder}")
            cell.source = BADGE.sub(badge, text)
        elif cell.cell_type == "code":
            cell.source = with_comments(cell.source, messages)
    return translated
