"""Rules of code cells, and of the badge that opens them in Colab."""

from __future__ import annotations

import re

from bookkit.lint.rules import Findings, Page, rule
from bookkit.model.chapter import FOLDED

KNOWN_TAGS = re.compile(  # from-NAME: a passage of examples/
    r"setup|hide-cell|timing"
    r"|(?:exercise|check|solution)-[a-zA-Z_]\w*|(?:id|from)-[a-z0-9]+(?:-[a-z0-9]+)*"
)


@rule
def badge(page: Page) -> Findings:
    """Below the title of a page with code: the Colab badge, and a link to the site."""
    if not page.chapter.code:
        return
    first, name = page.chapter.cells[0], page.chapter.page
    line = next((line for line in first.lines[1:] if line.strip()), "")
    colab, site = page.book.colab_url(name), page.book.page_url(name)
    if not all(piece in line for piece in ("colab-badge.svg", f"]({colab})", f"]({site})")):
        what = f"below the title stand the Colab badge, linked to {colab}, and a link to {site}"
        yield first.line, what


@rule
def narrow_lines(page: Page) -> Findings:
    """Code has at most 88 columns, the setup cell 100."""
    for cell in page.chapter.code:
        limit = 100 if "setup" in cell.tags else 88
        for number, line in enumerate(cell.lines, cell.line):
            if len(line) > limit:
                yield number, f"{len(line)} columns; break it before {limit}"


@rule
def known_tags(page: Page) -> Findings:
    """A misspelt tag would do nothing."""
    for cell in page.chapter.cells:
        for tag in cell.tags:
            if not KNOWN_TAGS.fullmatch(tag):
                yield cell.line, f"nothing uses the tag {tag!r}; KNOWN_TAGS in cells.py has all"


@rule
def folded_cells(page: Page) -> Findings:
    """A folded cell has a title and is folded on the site and in Colab; a solution is folded."""
    for cell in page.chapter.code:
        folded, form = FOLDED in cell.tags, cell.metadata.get("cellView") == "form"
        if folded and not form:
            yield cell.line, "Colab does not fold this cell: add `:cellView: form`"
        elif not folded and (form or cell.tagged("solution-")):
            yield cell.line, "the site does not fold this cell: add the tag hide-cell"
        elif folded and not cell.title:
            yield cell.line, "a folded cell begins with its title, `# @title What it holds`"
