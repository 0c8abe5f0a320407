"""Exercises: the check rejects the stub and a wrong answer, and accepts the solution.

A chapter runs once, cell by cell; after each check come the calls that a reader could make. Wrong
answers are in tests/exercises.toml.
"""
import functools
import tomllib

import pytest

from bookkit.lint.anatomy import exercises
from bookkit.model.chapter import chapters
from bookkit.run.cells import as_jobs, run_jobs
from rules import BOOK, verify

LIST = BOOK.root / "tests" / "exercises.toml"


@functools.cache
def wrong_answers():
    return tomllib.loads(LIST.read_text("utf-8")) if LIST.exists() else {}


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
