"""What a reader reads as sentences, with code spans, links and formulas told apart."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

READER = MarkdownIt("commonmark").enable("table")


def blocks(markdown: str) -> Iterator[tuple[str, str, int, str]]:
    """(kind, text, line, HTML tag) of each paragraph, heading, list item and table cell."""
    tokens, inside = READER.parse(hide_display_math(markdown)), []
    for token in tokens:
        if token.nesting == 1:
            inside.append(token)
        elif token.nesting == -1:
            inside.pop()
        elif token.type == "inline":
            names = [outer.type for outer in inside]
            kind = (
                "heading"
                if "heading_open" in names
                else "table"
                if "table_open" in names
                else "item"
                if "list_item_open" in names
                else "alert"
                if "blockquote_open" in names
                else "paragraph"
            )
            yield kind, token.content, (token.map or [0])[0], inside[-1].tag


def hide_display_math(markdown: str) -> str:
    """Blank out $$…$$ but keep the lines, so that line numbers stay right."""
    return re.sub(r"\$\$.*?\$\$", lambda found: "\n" * found[0].count("\n"), markdown, flags=re.S)


def code_spans(markdown: str) -> Iterator[str]:
    """The text of each inline code span."""
    for token in READER.parse(hide_display_math(markdown)):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def read_aloud(text: str) -> str:
    """Prose as it is read aloud: no images, addresses, marks; one word for code or a formula."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"\[!\w+\]\s*\n?", "", text)  # an alert's mark
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"(`+)(?:.+?)\1", "code", text, flags=re.S)
    text = re.sub(r"(?<![\\$])\$(?!\s)[^$\n]+?\$", "formula", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>\s][^>]*>", " ", text)
    return re.sub(r"\s+", " ", text.replace("*", "").replace("__", "")).strip()


def headings(markdown: str) -> list[tuple[int, int, str]]:
    """(line from 0, level, text) of each heading."""
    found = blocks(markdown)
    return [(line, int(tag[1]), text) for kind, text, line, tag in found if kind == "heading"]
