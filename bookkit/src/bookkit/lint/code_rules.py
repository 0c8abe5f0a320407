"""Rules of code cells."""

from __future__ import annotations

import re

from bookkit.lint.rules import CHAPTER, PAGE, Page, Said, rule
from bookkit.model.chapter import FOLDED

COLUMNS = 88
# from-NAME: a passage of examples/.
KNOWN_TAGS = re.compile(
    r"setup|hide-cell|hide-input|raises-exception|timing"
    r"|(?:exercise|check|solution)-[a-zA-Z_]\w*|(?:id|from)-[a-z0-9]+(?:-[a-z0-9]+)*"
)


@rule(CHAPTER, PAGE)
def narrow_lines(page: Page) -> Said:
    """Code has at most 88 columns, the setup cell 100."""
    for cell in page.chapter.code:
        limit = 100 if "setup" in cell.tags else COLUMNS
        for number, line in enumerate(cell.lines, cell.line):
            if len(line) > limit:
                yield number, f"{len(line)} columns; break it before {limit}"


@rule(CHAPTER, PAGE)
def known_tags(page: Page) -> Said:
    """Cells have tags that some check knows."""
    for cell in page.chapter.cells:
        for tag in cell.tags:
            if not KNOWN_TAGS.fullmatch(tag):
                what = f"no check knows the tag {tag!r}; KNOWN_TAGS in code_rules.py has all"
                yield cell.line, what


@rule(CHAPTER, PAGE)
def folded_cells(page: Page) -> Said:
    """A folded cell has a title, `# @title …`, and is folded on the site and in Colab alike."""
    for cell in page.chapter.code:
        folded, form = bool(FOLDED & set(cell.tags)), cell.metadata.get("cellView") == "form"
        if folded != form:
            missing = "`:cellView: form`, so that Colab folds it"
            if not folded:
                missing = "the tag hide-cell (or hide-input)"
            yield cell.line, f"folded here and not there: it needs {missing}"
        elif folded and not cell.title:
            what = "a folded cell without a title: its first line is `# @title What it holds`"
            yield cell.line, what


@rule(CHAPTER, PAGE)
def names_of_cells(page: Page) -> Said:
    """A tag id-SLUG names one cell of its page."""
    seen: dict[str, int] = {}
    for cell in page.chapter.code:
        slugs = [tag for tag in cell.tags if tag.startswith("id-")]
        if len(slugs) > 1:
            yield cell.line, f"a cell with two names, {' and '.join(slugs)}: keep one"
        for slug in slugs[:1]:
            if slug in seen:
                yield cell.line, f"{slug} names the cell at line {seen[slug]} too: choose another"
            seen.setdefault(slug, cell.line)
