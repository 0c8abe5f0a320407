"""Rules of code cells."""

from __future__ import annotations

import re
import symtable

from bookkit.lint.rules import CHAPTER, PAGE, Page, Said, rule
from bookkit.model.chapter import Cell

COLUMNS = 88
FOLDED = {"hide-cell", "hide-input"}  # with its output; its code alone
# proof, stored, predicted, rerun, mesh, fixed-mesh, lesson, shared-NAME: of pages in the old form.
# stored-rows: what other compilers made of a page's programs, written by sync.
# from-NAME: a passage of examples/.
KNOWN_TAGS = re.compile(
    r"setup|hide-cell|hide-input|raises-exception|timing|mesh|fixed-mesh|predicted|rerun"
    r"|proof|stored|stored-rows|lesson"
    r"|(?:shared|exercise|check|solution)-[a-zA-Z_]\w*|(?:id|from)-[a-z0-9]+(?:-[a-z0-9]+)*"
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


def bound_and_read(cell: Cell) -> tuple[set[str], set[str]]:
    """Names that a cell binds, and those that it reads from outside, in its functions too."""
    try:
        tables = [symtable.symtable(cell.source, "cell", "exec")]
    except SyntaxError:
        return set(), set()
    own = tables[0].get_symbols()
    bound = {one.get_name() for one in own if one.is_assigned() or one.is_imported()}
    read = set()
    for table in tables:  # grows
        tables += table.get_children()
        for one in table.get_symbols():
            if one.is_referenced() and (table.get_type() == "module" or one.is_global()):
                read.add(one.get_name())
    return bound, read - bound


@rule(CHAPTER, PAGE)
def proofs_apart(page: Page) -> Said:
    """No cell that shows reads a name that a proof has bound."""
    proven: dict[str, int] = {}
    for cell in page.chapter.code:
        bound, read = bound_and_read(cell)
        if cell.is_proof:
            proven |= dict.fromkeys(bound, cell.line)
            continue
        for name in sorted(read & set(proven)):
            what = f"{name} comes from the proof at line {proven[name]}"
            yield cell.line, f"{what}: bind it in a cell that shows, or rename it in the proof"
        for name in bound:
            proven.pop(name, None)
