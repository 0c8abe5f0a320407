"""Rules of code cells, whatever they are for; form.py has those of showing and proving."""

from __future__ import annotations

import re

from bookkit.lint.rules import CHAPTER, PAGE, Page, Said, rule
from bookkit.model.chapter import shared_cells

COLUMNS = 88
# proof, stored: form.py. mesh, fixed-mesh: what predictions that are tagged rerun are run on.
# stored-rows: what the compiler for TPU made of a page's programs, written by sync.
# lesson: a cell that asserts because that is what it teaches. from-NAME: a passage of examples/.
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
def few_timings(page: Page) -> Said:
    """At most two cells of a page are tagged timing."""
    for cell in [cell for cell in page.chapter.code if "timing" in cell.tags][2:]:
        yield cell.line, "a third cell tagged timing; a page may have two"


@rule(CHAPTER, PAGE)
def plain_python(page: Page) -> Said:
    """Cells are plain Python, without magics and shell lines."""
    for cell in page.chapter.code:
        try:
            compile(cell.source, "cell", "exec")
        except SyntaxError as error:
            line = cell.line + (error.lineno or 1) - 1
            yield (
                line,
                f"not plain Python ({error.msg}); magics do not run everywhere: write it out",
            )


@rule(CHAPTER, PAGE)
def known_tags(page: Page) -> Said:
    """Cells have tags that some check knows."""
    for cell in page.chapter.cells:
        for tag in cell.tags:
            if not KNOWN_TAGS.fullmatch(tag):
                yield (
                    cell.line,
                    f"no check knows the tag {tag!r}; KNOWN_TAGS in code_rules.py has all",
                )


@rule(CHAPTER, PAGE)
def same_bytes(page: Page) -> Said:
    """Cells that chapters share are the bytes of book/cells/."""
    shared = shared_cells(page.book)
    for cell in page.chapter.code:
        name = "setup" if "setup" in cell.tags else cell.tagged("shared-")
        if name is None:
            continue
        if name not in shared:
            yield (
                cell.line,
                f"tagged for book/cells/{name}.py, which is missing: write it, or untag",
            )
        elif cell.source != shared[name]:
            pairs = zip([*cell.lines, ""], [*shared[name].split("\n"), ""])
            off = next((at for at, (a, b) in enumerate(pairs) if a != b), len(cell.lines))
            what = f"not the bytes of book/cells/{name}.py: change that file, then `make sync`"
            yield cell.line + off, what


@rule(CHAPTER, PAGE)
def setup_is_second(page: Page) -> Said:
    """The second cell of a page with code, and no other, is the folded setup cell."""
    whole_program = any(cell.tagged("from-") for cell in page.chapter.code)
    if not page.chapter.code or (page.kind != CHAPTER and whole_program):
        return  # a program of examples/, cell by cell, which needs nothing before it
    second = page.chapter.cells[min(1, len(page.chapter.cells) - 1)]
    if second.kind != "code" or set(second.tags) != {"setup", "hide-cell"}:
        yield second.line, "the second cell is the setup cell, tagged setup and hide-cell"
    elif second.metadata.get("cellView") != "form":
        yield second.line, "the setup cell needs `:cellView: form`, so that Colab folds it"
    for cell in page.chapter.code[1:]:
        if "setup" in cell.tags:
            yield cell.line, "a second setup cell; one is enough: delete it"
