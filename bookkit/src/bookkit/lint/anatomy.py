"""Rules of a chapter's anatomy: how it opens and closes, how exercises and predictions are built.

That exercises and predictions work is tried by running them, tests/book/.
"""

from __future__ import annotations

import ast
import re

from bookkit.lint.prose import blocks
from bookkit.lint.rules import CHAPTER, PAGE, WHOLE, Page, Said, SaidOfBook, rule
from bookkit.lint.tables import PAGES
from bookkit.model.book import Book
from bookkit.model.chapter import EXERCISE_PARTS, Cell, Chapter, chapters
from bookkit.run.calls import wrong_answers

WRITTEN_MESH = "(2, 4)"


@rule(CHAPTER, PAGE)
def badge(page: Page) -> Said:
    """A page with code opens with its title, then the Colab badge and a link to the site."""
    if page.kind == PAGE and not page.chapter.code:
        return
    first, name = page.chapter.cells[0], f"book/{page.chapter.name}"
    if not titled(first):
        yield first.line, "a page begins with a Markdown cell and `# Its title`"
        return
    colab, site = page.book.colab_url(name), page.book.page_url(name)
    lines = [line for line in first.lines if line.strip()]
    badge = lines[1] if len(lines) > 1 else ""
    if f"]({colab})" not in badge or f"]({site})" not in badge or "colab-badge.svg" not in badge:
        what = f"the line after the title holds the Colab badge, linked to {colab}, and a link to {site}"
        yield first.line, what


def titled(first: Cell) -> bool:
    return first.kind == "markdown" and bool(re.match(r"# \S", first.source))


@rule(CHAPTER)
def opening(page: Page) -> Said:
    """A chapter opens with its question and answer in bold, You will, You need."""
    first = page.chapter.cells[0]
    if not titled(first):
        return  # the rule `badge` says so
    texts = [text for _, text, _, _ in blocks(first.source)]
    if not any(
        re.fullmatch(r"\*\*(?!You (?:will|need)\b)[^*].*\*\*", text, re.S) for text in texts
    ):
        yield first.line, "the question and its answer stand on top, one bold paragraph: write it"
    for phrase in ("You will", "You need"):
        if not re.search(rf"\*\*{phrase}\b", first.source, re.I):
            yield first.line, f"no **{phrase}** on top: add it"
    items = r"\*\*You will\b.*?\n\n?((?:\s*[-*] .*\n(?:  .*\n)*)+)"
    if found := re.search(items, first.source + "\n", re.I):
        count = len(re.findall(r"(?m)^\s*[-*] ", found[1]))
        if count > 4:
            yield first.line, f"{count} verbs under **You will**; 4 are the limit"


def section(chapter: Chapter, pattern: str) -> str | None:
    """The Markdown below the heading that matches, up to the next one of its level."""
    text = "\n\n".join(cell.source for cell in chapter.markdown)
    found = re.search(rf"(?mi)^(#+) [^\n]*(?:{pattern})[^\n]*$", text)
    if not found:
        return None
    rest = text[found.end() :]
    end = re.search(rf"(?m)^#{{1,{len(found[1])}}} ", rest)
    return rest[: end.start()] if end else rest


@rule(CHAPTER)
def closing(page: Page) -> Said:
    """A chapter closes with Takeaways (1 to 5), In practice, Exercises, Further reading."""
    last = page.chapter.cells[-1].line
    takeaways = section(page.chapter, r"take[ -]?aways?")
    for name in ("Takeaways", "Exercises", "In practice", "Further reading"):
        pattern = {"Takeaways": r"take[ -]?aways?", "Exercises": "exercises?"}.get(name, name)
        if section(page.chapter, pattern) is None:
            yield last, f"no heading {name}: add it"
    if takeaways is not None:
        count = len(re.findall(r"(?m)^(?:[-*]|\d+\.) ", takeaways))
        if not 1 <= count <= 5:
            yield last, f"{count} takeaways in a list; 1 to 5 belong there"


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
    """An exercise, which each chapter has, is a stub, a check that asks it, a folded solution."""
    found = exercises(page.chapter)
    if not found and page.kind == CHAPTER:
        yield 1, "no exercise; tag a stub exercise-NAME, its check check-NAME, and solution-NAME"
    for name, cells in found.items():
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


@rule(WHOLE)
def answers_listed(book: Book) -> SaidOfBook:
    """Each exercise has a wrong answer beside its page, and why it is one."""
    for chapter in chapters(book.root):
        found, listed = exercises(chapter), wrong_answers(book, f"book/{chapter.name}")
        path = f"{PAGES}/{chapter.name}.toml"
        for name in found:
            entry = listed.get(name, {})
            if not entry.get("wrong") or not entry.get("why"):
                needs = f"needs `wrong` (Python that assigns answer_{name}) and `why`"
                yield path, 1, f"[exercise.{name}] {needs}"
        for name in set(listed) - set(found):
            yield path, 1, f"[exercise.{name}] has no exercise in the chapter: delete it"
