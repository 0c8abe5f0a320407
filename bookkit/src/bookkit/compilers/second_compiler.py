"""Compile the programs that the book makes claims of for TPU and GPU too, and store what became of them.

    bookkit second-compiler --compilers DIR   compile all, write companion/many_devices/compiled.json
    bookkit second-compiler --compilers DIR --only NAME …    some programs, by name
    bookkit second-compiler --compilers DIR --compare  write nothing; list what differs, by claim
    bookkit second-compiler --page          write the page's numbers and the table from what is stored
    bookkit second-compiler --check         without them: is each stored program still the page's?
    bookkit second-compiler --check --note  and write down which code makes the same program

book/compiled/claims.toml lists programs and claims. A page's cells are run on eight simulated devices
up to the cell that a program follows; the program is lowered for TPU, which needs no TPU compiler, and
its text is hashed. `--check` runs no page whose code is as it was when its programs were stored.
DIR is where requirements-compilers.txt was installed (`make second-compiler` does so).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bookkit.compilers.two_programs import ENDED, OTHERS
from bookkit.model.book import Book, Problem
from bookkit.model.compiled import (
    COMPILERS,
    Asked,
    Judged,
    Program,
    as_shown,
    cells_before,
    digest_of_code,
    judge,
    load_rows,
    load_table,
    rows_path,
)

CLAIMS_PAGE = "book/reference/two-compilers"
LOWERED_BY = ("jax", "jaxlib", "flax", "optax")
OTHER_COMPILERS = ("libtpu", "jax-cuda13-pjrt")  # as they are installed
TOPOLOGY = "v5e:2x4"  # with eight devices; the shared cell compilers.py has the others
COMMAND = "make second-compiler"
COMPILER_NAMES = {"cpu": "CPU", "tpu": "TPU", "gpu": "GPU"}


def releases() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LOWERED_BY}


def version_of(compiler: str, folder: Path) -> str:
    found = sorted(folder.glob(f"{compiler.replace('-', '_')}-*.dist-info"))
    if not found:
        raise Problem(
            f"{folder} holds no {compiler}: `{COMMAND}` installs it there, or give --compilers"
        )
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2]


def job(book: Book, programs: Sequence[Program], folder: Path) -> dict[str, Any]:
    """The cells of the programs' page, and the programs that follow some of them."""
    cells = max((cells_before(book, program) for program in programs), key=len)
    return {
        "root": str(book.root),
        "cells": [
            {
                "where": f"{programs[0].page}, cell {cell.index}",
                "source": cell.source,
                "programs": [
                    {
                        "name": program.name,
                        "code": program.make,
                        "target": str(folder / f"{program.name}.json"),
                        "with_schedule": program.schedule,
                        "switches": dict(program.switches),
                        "machine": program.machine,
                    }
                    for program in programs
                    if program.after == cell.slug
                ],
            }
            for cell in cells
            if "setup" not in cell.tags  # its devices are made here, and may be more than eight
        ],
    }


def run_page(book: Book, programs: Sequence[Program], folder: Path, others: Path | None) -> str:
    """Run the page of these programs in a process of its own; what failed, line by line."""
    page, devices = programs[0].page, programs[0].devices
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "NPROC": "16",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONWARNINGS": "ignore",
        OTHERS: str(others.resolve()) if others else "",
    }
    environment = {**os.environ, **settings}
    environment.pop("XLA_FLAGS", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-m", "bookkit.compilers.two_programs"],
            input=json.dumps(job(book, programs, folder)),
            cwd=empty,
            env=environment,
            text=True,
            capture_output=True,
            timeout=1500,
        )
    print(f"{page}: {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"{page}: {last[-1]}"
    return done.stdout.rpartition(ENDED)[2].strip()


def noted(
    book: Book, programs: Sequence[Program], others: Path | None, workers: int = 2
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run the pages of these programs; by program what each compiler made of it, and what failed."""
    together: dict[tuple[str, int, str], list[Program]] = {}  # in one process
    for program in programs:
        alone = program.name if program.machine and others else ""  # its memory is measured
        together.setdefault((program.page, program.devices, alone), []).append(program)
    found = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        runs = [pool.submit(run_page, book, some, Path(name), others) for some in together.values()]
        problems = [line for run in runs for line in run.result().splitlines()]
        for program in programs:
            path = Path(name, f"{program.name}.json")
            if path.exists():
                found[program.name] = json.loads(path.read_text("utf-8"))
    return found, problems


def compile_all(
    book: Book, asked: Asked, others: Path, only: Sequence[str], workers: int
) -> tuple[dict[str, Any], list[str]]:
    """What compiled.json should hold, and what failed; of that it keeps what was stored."""
    versions = {name: version_of(name, others) for name in OTHER_COMPILERS}
    stored, here = load_rows(book), releases()
    unknown = set(only) - set(asked.programs)
    if unknown:
        raise Problem(
            f"No programs: {', '.join(sorted(unknown))}; claims.toml has {[*asked.programs]}"
        )
    chosen = [program for name, program in asked.programs.items() if not only or name in only]
    about = {**here, **versions, "topology": TOPOLOGY}
    if only and stored["about"] and {**stored["about"], "date": ""} != {**about, "date": ""}:
        raise Problem(f"The rest was compiled with other releases: `{COMMAND}` compiles all anew.")
    found, problems = noted(book, chosen, others, workers)
    programs = {
        name: {
            "page": program.page,
            "after": program.after,
            "code": digest_of_code(book, program),
            **found[name],
        }
        if name in found
        else stored["programs"][name]
        for name, program in asked.programs.items()
        if name in found or name in stored["programs"]
    }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"about": {**about, "date": today}, "programs": programs}, problems


def as_text(data: dict[str, Any]) -> str:
    """JSON with a line for each row, so that a difference can be read."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    of_two = r"\[[^\[\]{}]*(?:\[[^\[\]{}]*\][^\[\]{}]*)*\]"  # a list with lists
    short = re.compile(r"[\[{][^\[\]{}]*[\]}]|\{[^{}\[\]]*(?:\[[^\[\]]*\][^{}\[\]]*)*\}|" + of_two)
    return short.sub(lambda part: re.sub(r"\n\s*", " ", part[0]), text) + "\n"


# The page, and the table of all claims


def table(book: Book, asked: Asked, stored: dict[str, Any]) -> str:
    """All claims as CSV, in the order of the book."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["page", "claim", "CPU", "TPU v5e", "H100", "elsewhere"])
    judged = judge(asked, stored["programs"])
    for one in sorted(judged, key=lambda one: book.pages.index(one.claim.page)):
        values = [as_shown(one.values[name]) if name in one.values else "" for name in COMPILERS]
        page = one.claim.page.rsplit("/", 1)[-1]
        rows.writerow([page, one.claim.says, *values, where_it_holds(one)])
    return out.getvalue()


def table_path(book: Book) -> Path:
    return book.root / "book" / "compiled" / "claims.csv"


def where_it_holds(one: Judged) -> str:
    """Where a claim holds, and why not elsewhere."""
    claim, found = one.claim, one.holds
    if all(found.values()):
        return f"holds. GPU: {claim.not_for_gpu}" if claim.not_for_gpu else "holds"
    if not found["cpu"]:
        holding = [COMPILER_NAMES[name] for name, held in found.items() if held]
        return f"holds on {' and '.join(holding)} only"
    if claim.why == claim.why_gpu:
        return f"differs. {claim.why}"
    differing = [name for name, held in found.items() if not held]
    return " ".join(f"{COMPILER_NAMES[name]}: differs. {claim.reason(name)}" for name in differing)


def summary(judged: Sequence[Judged], about: dict[str, str], count: int) -> str:
    holding = [sum(one.holds.get(compiler, False) for one in judged) for compiler in COMPILERS]
    everywhere = sum(list(one.holds.values()) == [True] * len(COMPILERS) for one in judged)
    return (
        f"Of {len(judged)} claims about {count} programs, {everywhere} hold on all three compilers; in "
        f"all, {holding[1]} hold on TPU and {holding[2]} on GPU. Compiled on {about['date']} with JAX "
        f"{about['jax']} for CPU; for TPU v5e with libtpu {about['libtpu']}, 16 chips as 4×4, 8 as 2×4, "
        f"4 as 2×2; for H100 with jax-cuda13-pjrt {about['jax-cuda13-pjrt']}, eight in one server."
    )


def page_text(book: Book, asked: Asked, stored: dict[str, Any]) -> str:
    """The page, with a paragraph of numbers between the two lines that name it."""
    path = book.source(CLAIMS_PAGE)
    text = path.read_text("utf-8")
    begin, end = "<!-- made by bookkit second-compiler -->", "<!-- end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise Problem(f"{path.name} needs the lines {begin} and {end}, once each")
    before, rest = text.split(begin)
    judged = judge(asked, stored["programs"])
    count = sum(not program.machine for program in asked.programs.values())
    made = summary(judged, stored["about"], count)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"


def main_page(book: Book) -> None:
    """Write the page and the table from what is stored."""
    asked, stored = load_table(book), load_rows(book)
    book.source(CLAIMS_PAGE).write_text(page_text(book, asked, stored), "utf-8")
    table_path(book).write_text(table(book, asked, stored), "utf-8")


def out_of_date(book: Book, asked: Asked, stored: dict[str, Any]) -> list[str]:
    """The files that were not written from what is stored."""
    made = {
        book.source(CLAIMS_PAGE): page_text(book, asked, stored),
        table_path(book): table(book, asked, stored),
    }
    return [
        f"{path.relative_to(book.root)} is out of date: run `bookkit second-compiler --page`."
        for path, text in made.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]


# Checks


def misjudged(judged: Sequence[Judged]) -> list[str]:
    """Claims that do not even hold for CPU, or whose reason fits no difference."""
    problems = []
    for one in judged:
        about, says = one.claim.about, f"{one.claim.page}: {one.claim.says!r}"
        if not one.holds[about]:
            value = as_shown(one.values[about])
            problems.append(f"{says} does not hold for {about.upper()}: {value}")
            continue
        for compiler in ("tpu", "gpu"):
            if compiler not in one.holds:
                continue
            name, reason = COMPILER_NAMES[compiler], one.claim.reason(compiler)
            field = "why_gpu" if compiler == "gpu" else "why"
            if one.holds[compiler] and reason:
                problems.append(f"{says} holds for {name} as well: take its `{field}` out")
            elif not one.holds[compiler] and not reason and about == "cpu":
                value = as_shown(one.values[compiler])
                problems.append(
                    f"{says} does not hold for {name} ({value}): say `{field}` in one sentence"
                )
    return problems


def stale(book: Book, asked: Asked, stored: dict[str, Any]) -> list[Program]:
    """Programs whose code is another than that which was compiled; they may be the same yet."""
    return [
        program
        for name, program in asked.programs.items()
        if stored["programs"].get(name, {}).get("code") != digest_of_code(book, program)
    ]


def check(book: Book, workers: int = 2, note: bool = False) -> str:
    """Problem if a stored program is no longer the page's; else what was looked at, in words."""
    asked, stored = load_table(book), load_rows(book)
    missing = [name for name in asked.programs if name not in stored["programs"]]
    gone = [name for name in stored["programs"] if name not in asked.programs]
    if missing or gone:
        names = ", ".join(missing + gone)
        raise Problem(
            f"claims.toml and compiled.json list other programs ({names}): run `{COMMAND}`."
        )
    problems = misjudged(judge(asked, stored["programs"]))
    problems += out_of_date(book, asked, stored)
    doubtful, here = stale(book, asked, stored), releases()
    pinned = {name: stored["about"].get(name) for name in LOWERED_BY}
    said = f"{len(asked.programs)} programs, {len(asked.claims)} claims; of changed code: "
    if doubtful and here != pinned:
        was = ", ".join(f"{name} {version}" for name, version in pinned.items())
        said += f"{len(doubtful)}, not checked here: their programs were stored with {was}"
    elif doubtful:
        found, failed = noted(book, doubtful, None, workers)
        doubtful = [one for one in doubtful if one.name in found]
        same = [one for one in doubtful if found[one.name]["hash"] == stored_hash(stored, one)]
        problems += failed
        problems += [
            f"{one.page}.md: the program {one.name} (after the cell id-{one.after}) is another than "
            f"the one that was compiled for TPU and GPU: run `{COMMAND}`, read what differs, commit "
            "companion/many_devices/compiled.json"
            for one in doubtful
            if one not in same
        ]
        said += f"{len(doubtful)}, of which {len(same)} make the same program"
        said += "" if note else " (--note writes that down)"
    else:
        said += "none"
    if problems:
        raise Problem("\n".join(problems))
    if note and here == pinned:
        for name, program in asked.programs.items():
            stored["programs"][name]["code"] = digest_of_code(book, program)
        rows_path(book).write_text(as_text(stored), "utf-8")
    return said


def stored_hash(stored: dict[str, Any], program: Program) -> str:
    return stored["programs"][program.name]["hash"]


def changed_since(asked: Asked, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a new compilation changed: first releases, then claims, then programs without a claim."""
    lines = [
        f"{name}: {old['about'].get(name)} → {new['about'][name]}"
        for name in new["about"]
        if name != "date" and old["about"].get(name) != new["about"][name]
    ]
    before = {(one.claim.page, one.claim.says): one for one in judge(asked, old["programs"])}
    for one in judge(asked, new["programs"]):
        was = before[one.claim.page, one.claim.says]
        for compiler in COMPILERS:
            if one.values.get(compiler) != was.values.get(compiler):
                turned = "" if one.holds == was.holds else " — it holds no longer as stored"
                lines.append(
                    f"claim: {one.claim.page}: {one.claim.says} {compiler.upper()}: "
                    f"{as_shown(was.values.get(compiler))} → "
                    f"{as_shown(one.values.get(compiler))}{turned}"
                )
    for name, entry in new["programs"].items():
        for part in ("hash", *COMPILERS):
            if old["programs"].get(name, {}).get(part) != entry.get(part):
                lines.append(f"program {name}: its {part} is another")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="bookkit second-compiler", description=__doc__.split("\n")[0]
    )
    options.add_argument(
        "--compilers", type=Path, metavar="DIR", help="where those for TPU and GPU are installed"
    )
    options.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these programs")
    options.add_argument("--compare", action="store_true", help="write nothing, say what differs")
    options.add_argument("--page", action="store_true", help="write the page from what is stored")
    options.add_argument(
        "--check", action="store_true", help="without compiling: is all up to date?"
    )
    options.add_argument("--note", action="store_true", help="with --check: keep what was seen")
    options.add_argument("--workers", type=int, default=2, help="pages at a time (2)")
    chosen, book = options.parse_args(arguments), Book()
    if chosen.check:
        print(check(book, chosen.workers, chosen.note))
        return 0
    if chosen.page:
        main_page(book)
        return 0
    if chosen.compilers is None:
        raise Problem(f"Give --compilers DIR, where they are installed, or run `{COMMAND}`.")
    asked = load_table(book)
    old = load_rows(book)
    new, problems = compile_all(book, asked, chosen.compilers, chosen.only, chosen.workers)
    if not chosen.compare:
        rows_path(book).write_text(as_text(new), "utf-8")  # minutes of compiling
    if problems:
        raise Problem("\n".join(problems))
    lines = changed_since(asked, old, new) if set(old["programs"]) >= set(new["programs"]) else []
    print("\n".join(lines) or "nothing differs from what is stored")
    if chosen.compare:
        return 1 if lines else 0
    problems = misjudged(judge(asked, new["programs"]))
    if problems:
        raise Problem("\n".join(problems))
    main_page(book)
    return 0
