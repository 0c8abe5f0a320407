"""Exercises: the check rejects the stub and a wrong answer, and accepts the solution.

A chapter runs once, cell by cell; after each check come the calls that a reader could make. Wrong
answers are in tests/exercises.toml.
"""
import ast
import functools
import tomllib

import pytest

from bookkit.model.chapter import chapters
from bookkit.run.cells import as_jobs, run_jobs
from rules import BOOK, over_chapters, rule, verify

LIST = BOOK.root / "tests" / "exercises.toml"
PARTS = ("exercise-", "check-", "solution-")


@functools.cache
def wrong_answers():
    return tomllib.loads(LIST.read_text("utf-8")) if LIST.exists() else {}


def exercises(chapter):
    """{name: {"exercise-": cell, "check-": cell, "solution-": cell}} in the order of the page."""
    found = {}
    for cell in chapter.code:
        for part in PARTS:
            if name := cell.tagged(part):
                found.setdefault(name, {})[part] = cell
    return found


def defined(source):
    """Names that a cell assigns or defines at its top level."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names |= {inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name)} \
                if target else set()
    return names


@rule
def anatomy_of_exercises(chapter):
    found = exercises(chapter)
    if not found:
        yield f"book/{chapter.name}.md: no exercise; tag a stub exercise-NAME, and so on"
    for name, cells in found.items():
        where = f"book/{chapter.name}.md, exercise {name}"
        if missing := [part + name for part in PARTS if part not in cells]:
            yield f"{where}: no cell tagged {', '.join(missing)}"
            continue
        stub, check, solution = (cells[part] for part in PARTS)
        if not stub.index < check.index < solution.index:
            yield f"{where}: the order is stub, check, solution"
        if f"answer_{name}" not in defined(stub.source):
            yield f"{where}, cell {stub.index}: the stub does not define answer_{name}"
        if f"check_{name}" not in defined(check.source):
            yield f"{where}, cell {check.index}: the check does not define check_{name}"
        if f"check_{name}(" not in check.lines[-1]:
            yield f"{where}, cell {check.index}: the last line calls check_{name}"
        if f"answer_{name}" not in defined(solution.source):
            yield f"{where}, cell {solution.index}: the solution does not define answer_{name}"
        if solution.lines[-1].strip() != f"check_{name}(answer_{name})":
            yield (f"{where}, cell {solution.index}: the last line is check_{name}(answer_{name}), "
                   "so that its answer shows")
        if "hide-cell" not in solution.tags or solution.metadata.get("cellView") != "form" \
                or not solution.lines[0].startswith("# @title Solution"):
            yield (f"{where}, cell {solution.index}: a solution is folded: tag hide-cell, "
                   "`:cellView: form`, first line `# @title Solution`")


test_anatomy = over_chapters(__name__)


def probe(index, source):
    return {"index": index, "source": source, "tags": [], "probe": True}


def plan(chapter, wrong):
    """One job: the chapter with a reader's calls after each check; and which call is which."""
    found = exercises(chapter)
    last = max(cell.index for cells in found.values() for cell in cells.values())
    job = as_jobs([cell for cell in chapter.code if cell.index <= last], timeout=200)
    checks = {cells["check-"].index: name for name, cells in found.items() if len(cells) == 3}
    cells, asked, number = [], {}, 1000
    for cell in job["cells"]:
        cells.append({**cell, "tags": [tag for tag in cell["tags"] if tag == "raises-exception"]})
        if name := checks.get(cell["index"]):
            call = f"str(check_{name}(answer_{name}))"
            trials = [("the stub", "", "not yet")]
            if name in wrong:
                trials.append(("the wrong answer", wrong[name]["wrong"], "not yet"))
            for what, source, wanted in trials:
                if source:
                    cells.append(probe(number, source))
                    asked[number] = (name, what, None)
                    number += 1
                cells.append(probe(number, call))
                asked[number] = (name, what, wanted)
                number += 1
        if name := next((tag[9:] for tag in cell["tags"] if tag.startswith("solution-")), None):
            cells.append(probe(number, f"str(check_{name}(answer_{name}))"))
            asked[number] = (name, "the solution", "correct")
            number += 1
    return {**job, "cells": cells}, asked


def judge(chapter, outcome, asked):
    if outcome["failed"] is not None:
        yield f"book/{chapter.name}.md, cell {outcome['failed']}: fails: {outcome['error']}"
    for entry in outcome["cells"]:
        if entry["end"] not in asked:
            continue
        name, what, wanted = asked[entry["end"]]
        where = f"book/{chapter.name}.md, exercise {name}"
        if wanted is None and entry["error"]:
            yield f"{where}: {what} of tests/exercises.toml does not run: {entry['error']}"
        elif wanted and entry["error"]:
            yield f"{where}: the check raises for {what}: {entry['error']}; it says \"not yet …\""
        elif wanted and not str(entry["value"]).startswith(wanted):
            yield f"{where}: the check answers {entry['value']!r} to {what}, not \"{wanted} …\""


@pytest.mark.parametrize("chapter", [chapter for chapter in chapters() if exercises(chapter)],
                         ids=lambda chapter: chapter.name)
def test_checks(chapter):
    job, asked = plan(chapter, wrong_answers().get(chapter.name, {}))
    [outcome] = run_jobs([job])
    verify(judge(chapter, outcome, asked))


def unlisted(books, wrong):
    """Exercises without a wrong answer, and wrong answers without an exercise."""
    for chapter in books:
        for name in exercises(chapter):
            entry = wrong.get(chapter.name, {}).get(name, {})
            if not entry.get("wrong") or not entry.get("why"):
                yield (f'tests/exercises.toml: ["{chapter.name}".{name}] needs `wrong` (Python that '
                       f"assigns answer_{name}) and `why`")
    names = {chapter.name: exercises(chapter) for chapter in books}
    for chapter, entries in wrong.items():
        for name in entries:
            if name not in names.get(chapter, {}):
                yield f'tests/exercises.toml: ["{chapter}".{name}] has no exercise in the chapter'


def test_every_exercise_has_a_wrong_answer():
    verify(unlisted(chapters(), wrong_answers()))
