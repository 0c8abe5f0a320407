"""Rules of a page's anatomy: how it opens, how exercises are built.

That exercises work is tried by running them, tests/book/.
"""

from __future__ import annotations

import ast
import re

from bookkit.lint.rules import CHAPTER, PAGE, Page, Said, rule
from bookkit.model.chapter import EXERCISE_PARTS, Cell, Chapter


@rule(CHAPTER, PAGE)
def badge(page: Page) -> Said:
    """A page with code opens with its title, then the Colab badge and a link to the site."""
    if page.kind == PAGE and not page.chapter.code:
        return
    first, name = page.chapter.cells[0], page.chapter.page
    if first.kind != "markdown" or not re.match(r"# \S", first.source):
        yield first.line, "a page begins with a Markdown cell and `# Its title`"
        return
    colab, site = page.book.colab_url(name), page.book.page_url(name)
    lines = [line for line in first.lines if line.strip()]
    badge = lines[1] if len(lines) > 1 else ""
    if f"]({colab})" not in badge or f"]({site})" not in badge or "colab-badge.svg" not in badge:
        what = f"the line after the title holds the Colab badge, linked to {colab}, and a link to {site}"
        yield first.line, what


# Exercises.


def exercises(chapter: Chapter) -> dict[str, dict[str, Cell]]:
    """{name: {"exercise-": cell, "check-": cell, "solution-": cell}} in the order of the page."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in chapter.code:
        for part in EXERCISE_PARTS:
            if name := cell.tagged(part):
                found.setdefault(name, {})[part] = cell
    return found


def defined_names(source: str) -> set[str]:
    """Names that a cell assigns or defines at its top level."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                one.id
                for target in targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name)
            }
    return names


@rule(CHAPTER, PAGE)
def exercise_cells(page: Page) -> Said:
    """An exercise is a stub, a check that asks it, a folded solution."""
    for name, cells in exercises(page.chapter).items():
        if missing := [part + name for part in EXERCISE_PARTS if part not in cells]:
            yield next(iter(cells.values())).line, f"no cell tagged {', '.join(missing)}: add it"
            continue
        stub, check, solution = (cells[part] for part in EXERCISE_PARTS)
        if not stub.index < check.index < solution.index:
            yield stub.line, f"exercise {name}: the order is stub, check, solution"
        if f"answer_{name}" not in defined_names(stub.source):
            yield stub.line, f"the stub does not define answer_{name}"
        if f"check_{name}" not in defined_names(check.source):
            yield check.line, f"the check does not define check_{name}"
        if f"check_{name}(" not in check.lines[-1]:
            yield check.line, f"the last line calls check_{name}"
        if f"answer_{name}" not in defined_names(solution.source):
            yield solution.line, f"the solution does not define answer_{name}"
        if solution.lines[-1].strip() != f"check_{name}(answer_{name})":
            what = f"the last line is check_{name}(answer_{name}), so that its answer shows"
            yield solution.line, what
        folded = "hide-cell" in solution.tags and solution.metadata.get("cellView") == "form"
        if not folded or not solution.lines[0].startswith("# @title Solution"):
            what = "tag hide-cell, `:cellView: form`, first line `# @title Solution`"
            yield solution.line, f"a solution is folded: {what}"
