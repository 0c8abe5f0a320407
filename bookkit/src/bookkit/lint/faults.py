"""Plant one fault at a time in a page with proof cells, and see whether a proof notices.

    bookkit faults                        every fault of tests/pages/
    bookkit faults --page 02-variables --name swapped-axes
    bookkit faults --seconds 600 --seed 7      a seeded sample that ends in time

Where the claims of a page are tests, tests/book/test_faults.py plants its faults; `make faults` runs
both.

Before all faults, each chapter runs without any, in the same way: it must pass, and says how long
its cells take. A sample takes that time from the stored executions instead.

A fault is one changed line of a cell that shows. It must be noticed in the cell that the list names,
mostly a proof, and nowhere before. Any other outcome is printed and ends the command with 1, unless
the list gives a reason why it survives.
"""

from __future__ import annotations

import argparse
import ast
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from bookkit.lint.tables import FIELDS, listed_faults
from bookkit.lint.tables import Entry as Fault
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import Cell, Chapter, by_name
from bookkit.run.cells import as_jobs, run_jobs
from bookkit.run.execute import seconds_of_cells

CANNOT_RUN = ("SyntaxError", "IndentationError", "NameError", "ModuleNotFoundError")


class BadEntry(Exception):
    """The list and the chapter do not fit together."""


def label(fault: Fault) -> str:
    return f"{fault['chapter']} / {fault['name']}"


def changed_cell(fault: Fault, chapter: Chapter) -> tuple[Cell, str]:
    """The cell that a listed fault changes, and its new source."""
    find, new, name = fault["find"], fault["replace"], label(fault)
    if "\n" in find.strip("\n") or "\n" in new.strip("\n"):
        raise BadEntry(f"{name}: a fault changes one line; `find` or `replace` has several")
    if find == new:
        raise BadEntry(f"{name}: `find` and `replace` are the same")
    cells = [cell for cell in chapter.shown if find in cell.source]
    count = sum(cell.source.count(find) for cell in cells)
    if count != 1:
        raise BadEntry(f"{name}: `find` occurs {count} times in the code, not once: {find!r}")
    source = cells[0].source.replace(find, new)
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise BadEntry(f"{name}: the changed cell is not Python: {error.msg}") from None
    return cells[0], source


def fit_to_chapter(fault: Fault, chapter: Chapter) -> tuple[Cell, str, Cell]:
    """(cell that changes, its new source, cell that must fail) of a fault on a page with proofs."""
    changed, source = changed_cell(fault, chapter)
    target = cell_that_fails(fault, chapter)
    if target.index < changed.index:
        order = f"cell that must fail ({target.index}) stands before the one that changes"
        raise BadEntry(f"{label(fault)}: the {order} ({changed.index})")
    return changed, source, target


def cell_that_fails(fault: Fault, chapter: Chapter) -> Cell:
    """Named by its tag; a survivor runs to the last cell."""
    name, given = label(fault), fault.get("fails")
    if given is None:
        return chapter.code[-1]
    if target := chapter.named(given):
        return target
    raise BadEntry(f"{name}: `fails` names id-{given}, a tag that no cell of the page has")


def has_proofs(chapter: Chapter) -> bool:
    """Are its claims cells? Else they are tests, and tests/book/test_faults.py plants its faults."""
    return any(cell.is_proof for cell in chapter.code)


def unfit_faults(
    faults: Iterable[Fault], books: dict[str, Chapter], rows: Collection[str] | None = None
) -> Iterator[str]:
    """Entries that do not fit their chapters; without `rows`, whatever rows they name."""
    seen, planted = set(), dict[tuple[str, str, str], str]()
    for fault in faults:
        if label(fault) in seen:
            yield f"two faults are called {label(fault)}: rename one"
        seen.add(label(fault))
        if lacks := [name for name in FIELDS if name not in fault]:
            what = "; ".join(f"no `{name}`, {FIELDS[name]}" for name in lacks)
            yield f"{label(fault)}: {what}"
            continue
        mistake = (fault["chapter"], fault["find"], fault["replace"])
        if (other := planted.setdefault(mistake, label(fault))) != label(fault):
            yield f"{label(fault)} plants the same mistake as {other}: remove one"
        for name in fault["rows"] if rows is not None else ():
            if name not in (rows or ()):
                yield f"{label(fault)}: no row {name} in tests/rows.toml"
        if fault["chapter"] not in books:
            yield f"{label(fault)}: no such chapter"
            continue
        try:
            chapter = books[fault["chapter"]]
            (fit_to_chapter if has_proofs(chapter) else changed_cell)(fault, chapter)
        except BadEntry as error:
            yield str(error)


def job_with_fault(
    key: int, chapter: Chapter, changed: Cell, source: str, last: int, timeout: float
) -> dict[str, Any]:
    """The chapter's cells up to the one that must fail, one of them changed."""
    cells = [cell for cell in chapter.code if cell.index <= last]
    made = as_jobs(cells, id=key, timeout=timeout, fresh="setup" in changed.tags)
    for cell in made["cells"]:
        if cell["index"] == changed.index:
            cell["source"] = source
    return made


def verdict(fault: Fault, target: Cell, outcome: dict[str, Any]) -> tuple[str, str]:
    """(word, remark) of one listed fault; "killed" and "survives" are the good words."""
    failed, error = outcome["failed"], outcome["error"] or ""
    if failed is None and "survives" in fault:
        return "survives", fault["survives"]
    if failed is None:
        return "SURVIVED", f"cell {target.index} ran as if nothing were wrong"
    if "survives" in fault:
        return "NOTICED", f"listed as a survivor, but cell {failed} fails: {error}"
    if error.startswith("TIMEOUT"):
        return "HUNG", f"cell {failed}: {error}; a fault must be noticed, not waited for"
    if error.startswith(CANNOT_RUN):
        return "BROKEN", f"cell {failed}: {error}; plant a wrong program, not one that cannot run"
    if failed != target.index:
        return "ELSEWHERE", f"cell {failed} fails, not cell {target.index}: {error}"
    return "killed", error


def seconds_unchanged(
    chapters: list[Chapter], parallel: int
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Run each chapter unchanged: its seconds by cell, and what is wrong with those that fail."""
    jobs = [as_jobs(chapter.code, id=chapter.name) for chapter in chapters]
    seconds, bad = {}, {}
    for outcome in run_jobs(jobs, parallel):
        name = outcome["id"]
        seconds[name] = {cell["end"]: cell["seconds"] for cell in outcome["cells"]}
        if outcome["failed"] is not None:
            bad[name] = f"{name}: unchanged, cell {outcome['failed']} fails: {outcome['error']}"
    return seconds, bad


def seconds_stored(book: Book, chapters: list[Chapter]) -> dict[str, dict[int, float]]:
    """The seconds of each cell, chapter by chapter, when the chapter was executed for the site."""
    return {chapter.name: seconds_of_cells(book, f"book/{chapter.name}") for chapter in chapters}


def plant(
    book: Book,
    faults: list[Fault],
    books: dict[str, Chapter],
    parallel: int,
    budget: float | None,
    seed: int,
) -> list[str]:
    """Plant faults, all or those that fit into the budget of seconds; what is to be mended."""
    problems = list(unfit_faults(faults, books))
    plans = [(fault, books[fault["chapter"]]) for fault in faults] if not problems else []
    began = time.monotonic()
    used = list({c.name: c for _, c in plans}.values())
    bad: dict[str, str] = {}
    if budget:
        seconds = seconds_stored(book, used)
    else:
        seconds, bad = seconds_unchanged(used, parallel)
    problems += bad.values()
    fitted = [(fault, c, *fit_to_chapter(fault, c)) for fault, c in plans if c.name not in bad]
    jobs = []
    for key, (_, chapter, changed, source, target) in enumerate(fitted):
        cost = 0.5 + sum(s for cell, s in seconds[chapter.name].items() if cell <= target.index)
        job = job_with_fault(key, chapter, changed, source, target.index, 60 + 10 * cost)
        jobs.append({**job, "cost": cost})
    left = budget - (time.monotonic() - began) if budget else None
    if budget:
        random.Random(seed).shuffle(jobs)
    counts: Counter[str] = Counter()
    for outcome in run_jobs(jobs, parallel, seconds=left):
        fault, _, changed, _, target = fitted[outcome["id"]]
        word, remark = verdict(fault, target, outcome)
        counts[word] += 1
        cells = f"cell {changed.index:2} → {target.index:2}  {outcome['seconds']:5.1f} s"
        print(f"{word:9}  {label(fault):44} {cells}  {remark}"[:200], flush=True)
        if word.isupper():
            what = f"{fault['find']!r} → {fault['replace']!r}"
            problems.append(f"{label(fault)} ({word}): {what}: {remark}")
    if budget:
        fit = f"{counts.total()} of {len(fitted)} faults fitted into {budget:.0f} s"
        print(f"seed {seed}: {fit}", flush=True)
        if fitted and not counts:
            problems.append(f"no fault fits into {budget:.0f} s: give --seconds more")
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    print(f"{words}; {time.monotonic() - began:.0f} s", flush=True)
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bookkit faults", description=__doc__.split("\n")[0])
    parser.add_argument("--page", action="append", help="only this page (repeatable)")
    parser.add_argument("--name", help="only faults of this name")
    parser.add_argument("--seconds", type=float, help="a sample that ends within this time")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    parser.add_argument("--list", action="store_true", help="only check that the list fits")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    chosen, book = parser.parse_args(arguments), Book()
    books = by_name(book.root)
    if unknown := set(chosen.page or ()) - set(books):
        raise Problem(f"No pages with code: {', '.join(unknown)}. There are: {', '.join(books)}")
    faults = [
        fault
        for fault in listed_faults(book)
        if (fault["chapter"] not in books or has_proofs(books[fault["chapter"]]))
        and (not chosen.page or fault["chapter"] in chosen.page)
        and (not chosen.name or fault["name"] == chosen.name)
    ]
    if chosen.list:
        problems = list(unfit_faults(faults, books))
        if not problems:
            print(f"{len(faults)} faults fit their chapters")
    else:
        problems = plant(book, faults, books, chosen.jobs, chosen.seconds, chosen.seed)
    if problems:
        print("\nTo mend:")
        print("\n".join("  " + problem for problem in problems))
    return bool(problems)
