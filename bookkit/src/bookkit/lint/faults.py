"""Plant one fault at a time in a chapter and see whether the chapter notices.

    bookkit mutants                       every fault of tests/mutants.toml
    bookkit mutants --chapter 02-variables --name swapped-axes
    bookkit mutants --seconds 600 --seed 7     a seeded sample that ends in time

A listed fault must be noticed in the cell that the list names, and nowhere before. Any other
outcome is printed and ends the command with 1, unless the list gives a reason why it survives.
"""

from __future__ import annotations

import argparse
import ast
import random
import time
import tomllib
from pathlib import Path
from typing import Any

from bookkit.model.book import find_root
from bookkit.model.chapter import Cell, Chapter, by_name
from bookkit.run.cells import as_jobs, run_jobs

Fault = dict[str, Any]  # an entry of tests/mutants.toml
CANNOT_RUN = ("SyntaxError", "IndentationError", "NameError", "ModuleNotFoundError")


class BadEntry(Exception):
    """The list and the chapter do not fit together."""


def listed_faults(path: Path | None = None) -> list[Fault]:
    path = path or find_root() / "tests" / "mutants.toml"
    return tomllib.loads(path.read_text("utf-8")).get("mutant", []) if path.exists() else []


def fit_to_chapter(mutant: Fault, chapter: Chapter) -> tuple[Cell, str, Cell]:
    """(cell that changes, its new source, cell that must fail) of a listed fault."""
    find, name = mutant["find"], f"{mutant['chapter']} / {mutant['name']}"
    if "\n" in find.strip("\n") or "\n" in mutant["replace"].strip("\n"):
        raise BadEntry(f"{name}: a fault changes one line; `find` or `replace` has several")
    if find == mutant["replace"]:
        raise BadEntry(f"{name}: `find` and `replace` are the same")
    holding = chapter.holding(find)
    count = sum(cell.source.count(find) for cell in holding)
    if count != 1:
        raise BadEntry(
            f"{name}: `find` occurs {count} times in the chapter's code, not once: {find!r}"
        )
    targets = chapter.holding(mutant["fails"])
    if len(targets) != 1:
        raise BadEntry(
            f"{name}: `fails` is found in {len(targets)} code cells, not in one: "
            f"{mutant['fails']!r}"
        )
    changed, target = holding[0], targets[0]
    if target.index < changed.index:
        raise BadEntry(
            f"{name}: the cell that must fail ({target.index}) stands before the cell "
            f"that changes ({changed.index})"
        )
    source = changed.source.replace(find, mutant["replace"])
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise BadEntry(f"{name}: the changed cell is not Python: {error.msg}") from None
    return changed, source, target


def job(
    key: int, chapter: Chapter, changed: Cell, source: str, last: int, timeout: float
) -> dict[str, Any]:
    made = as_jobs(
        [cell for cell in chapter.code if cell.index <= last],
        id=key,
        timeout=timeout,
        fresh="setup" in changed.tags,
    )
    for cell in made["cells"]:
        if cell["index"] == changed.index:
            cell["source"] = source
    return made


def verdict(mutant: Fault, target: Cell, outcome: dict[str, Any]) -> tuple[str, str]:
    """(word, remark) of one listed fault; "killed" and "survives" are the good words."""
    failed, error = outcome["failed"], outcome["error"] or ""
    if failed is None:
        return (
            ("survives", mutant["survives"])
            if "survives" in mutant
            else ("SURVIVED", f"cell {target.index} ran as if nothing were wrong")
        )
    if "survives" in mutant:
        return "NOTICED", f"listed as a survivor, but cell {failed} fails: {error}"
    if error.startswith("TIMEOUT"):
        return "HUNG", f"cell {failed}: {error}; a fault must be noticed, not waited for"
    if error.startswith(CANNOT_RUN):
        return "BROKEN", f"cell {failed}: {error}; plant a wrong program, not one that cannot run"
    if failed != target.index:
        return "ELSEWHERE", f"cell {failed} fails, not cell {target.index}: {error}"
    return "killed", error


# The command.


def baselines(
    names: list[str], books: dict[str, Chapter], parallel: int
) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Run each chapter unchanged; its seconds by cell, or a message about what fails."""
    jobs = [as_jobs(books[name].code, id=name) for name in names]
    seconds, bad = {}, []
    for outcome in run_jobs(jobs, parallel):
        name = outcome["id"]
        if outcome["failed"] is not None:
            bad.append(f"{name}: unchanged, cell {outcome['failed']} fails: {outcome['error']}")
        seconds[name] = {cell["end"]: cell["seconds"] for cell in outcome["cells"]}
    return seconds, bad


def until(seconds: dict[int, float], last: int) -> float:
    return sum(value for index, value in seconds.items() if index <= last)


def show_progress(text: str) -> None:
    print(text, flush=True)


def check_listed(
    mutants: list[Fault], books: dict[str, Chapter], options: argparse.Namespace
) -> list[str]:
    problems, plans = [], []
    for mutant in mutants:
        if mutant["chapter"] not in books:
            problems.append(f"{mutant['chapter']} / {mutant['name']}: no such chapter")
            continue
        try:
            plans.append((mutant, *fit_to_chapter(mutant, books[mutant["chapter"]])))
        except BadEntry as error:
            problems.append(str(error))
    names = sorted({plan[0]["chapter"] for plan in plans})
    began = time.monotonic()
    seconds, bad = baselines(names, books, options.jobs)
    problems += bad
    plans = [plan for plan in plans if not any(text.startswith(plan[0]["chapter"]) for text in bad)]
    cost = [until(seconds[mutant["chapter"]], target.index) + 0.5 for mutant, _, _, target in plans]
    order, left = list(range(len(plans))), None
    if options.seconds:  # in random order, those that still fit
        left = options.seconds - (time.monotonic() - began)
        random.Random(options.seed).shuffle(order)
    jobs = []
    for key in order:
        mutant, changed, source, target = plans[key]
        timeout = 60 + 10 * cost[key]
        planted = job(key, books[mutant["chapter"]], changed, source, target.index, timeout)
        jobs.append({**planted, "cost": cost[key]})
    counts: dict[str, int] = {}
    for outcome in run_jobs(jobs, options.jobs, seconds=left):
        mutant, changed, _, target = plans[outcome["id"]]
        word, remark = verdict(mutant, target, outcome)
        counts[word] = counts.get(word, 0) + 1
        label = f"{mutant['chapter']} / {mutant['name']}"
        show_progress(
            f"{word:9}  {label:44} cell {changed.index:2} → {target.index:2}  "
            f"{outcome['seconds']:5.1f} s  {remark}"[:200]
        )
        if word.isupper():
            problems.append(
                f"{label} ({word}): {mutant['find']!r} → {mutant['replace']!r}: {remark}"
            )
    if options.seconds:
        show_progress(
            f"seed {options.seed}: {sum(counts.values())} of {len(plans)} faults fitted into "
            f"{options.seconds:.0f} s"
        )
        if plans and not counts:
            problems.append(f"no fault fits into {options.seconds:.0f} s: give --seconds more")
    show_progress(
        ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        + f"; {time.monotonic() - began:.0f} s"
    )
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bookkit mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--chapter", action="append", help="only this chapter (repeatable)")
    parser.add_argument("--name", help="only faults of this name")
    parser.add_argument("--seconds", type=float, help="a sample that ends within this time")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    parser.add_argument("--list", action="store_true", help="only check that the list fits")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    books = {
        name: chapter
        for name, chapter in by_name().items()
        if not options.chapter or name in options.chapter
    }
    if not books:
        print("no such chapter; there are: " + ", ".join(by_name()))
        return 1
    mutants = [
        mutant
        for mutant in listed_faults()
        if (not options.chapter or mutant["chapter"] in options.chapter)
        and (not options.name or mutant["name"] == options.name)
    ]
    if options.list:
        problems = []
        for mutant in mutants:
            try:
                fit_to_chapter(mutant, books[mutant["chapter"]])
            except (BadEntry, KeyError) as error:
                problems.append(str(error))
    else:
        problems = check_listed(mutants, books, options)
    if problems:
        print("\nTo mend:")
        print("\n".join("  " + problem for problem in problems))
    return int(bool(problems))
