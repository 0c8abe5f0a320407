"""Compile the programs that the book makes claims of for TPU and GPU too, and store what became of them.

    bookkit second-compiler --compilers DIR   compile all, write companion/many_devices/compiled.json
    bookkit second-compiler --compilers DIR --only NAME …    some programs, by name
    bookkit second-compiler --check         without them: is each stored program still the page's?
    bookkit second-compiler --check --note  and write what needs no compilers: the page's numbers, the
                                            table, and which changed code makes the same program

book/compiled/claims.toml lists programs and claims. A page's cells are run on eight simulated devices
up to the cell that a program follows; the program is lowered for TPU, which needs no TPU compiler, and
its text is hashed. `--check` runs no page whose code is as it was when its programs were stored.
DIR is where requirements-compilers.txt was installed (`make second-compiler` does so).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bookkit.compilers.claims import (
    COMPILERS,
    Judged,
    Program,
    cells_before,
    codes_path,
    digest_of_code,
    judge,
    load_rows,
    load_table,
    rows_path,
)
from bookkit.model.book import Book, Problem

CLAIMS_PAGE = "book/reference/two-compilers"
LOWERED_BY = ("jax", "jaxlib", "flax", "optax")
OTHER_COMPILERS = ("libtpu", "jax-cuda13-pjrt")  # as they are installed
TOPOLOGY = "v5e:2x4"  # with eight devices; many_devices.compiled has the others
COMMAND = "make second-compiler"
AT_ONCE = 2  # pages that run at a time


def releases() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LOWERED_BY}


def releases_of_compilers(folder: Path) -> dict[str, str]:
    installed = importlib.metadata.distributions(path=[str(folder)])
    found = {one.name: one.version for one in installed}
    if missing := [name for name in OTHER_COMPILERS if name not in found]:
        raise Problem(
            f"{folder} holds no {', '.join(missing)}: `{COMMAND}` installs it there, or give --compilers"
        )
    return {name: found[name] for name in OTHER_COMPILERS}


# Programs


def run_page(
    book: Book, programs: Sequence[Program], others: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Run the page of these programs in a process of its own.

    What each compiler made of them, by program, and what failed.
    """
    page = programs[0].page
    cells = max((cells_before(book, program) for program in programs), key=len)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(programs[0].devices),
        "NPROC": "16",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONWARNINGS": "ignore",
    }
    environment.pop("XLA_FLAGS", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        job = {
            "root": str(book.root),
            "others": str(others.resolve()) if others else "",
            "cells": [(f"{page}, cell {cell.index}", cell.slug, cell.source) for cell in cells],
            "programs": [dataclasses.asdict(program) for program in programs],
            "result": str(result),
        }
        done = subprocess.run(
            [sys.executable, "-m", "bookkit.compilers.two_programs"],
            input=json.dumps(job),
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
            timeout=1500,
        )
        print(f"{page}: {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {}, [f"{page}: {last[-1]}"]
        found = json.loads(result.read_text("utf-8"))
    return found["made"], found["failed"]


def compiled(
    book: Book, programs: Iterable[Program], others: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Run the pages of these programs; by program what each compiler made of it, and what failed."""
    together: dict[tuple[str, int, str], list[Program]] = {}  # in one process
    for program in programs:
        alone = program.name if program.machine and others else ""  # its memory is measured
        together.setdefault((program.page, program.devices, alone), []).append(program)
    made: dict[str, Any] = {}
    problems: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found, failed in pool.map(lambda some: run_page(book, some, others), together.values()):
            made |= found
            problems += failed
    return made, problems


def compile_all(book: Book, others: Path, only: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What compiled.json should hold, and what failed; of that it keeps what was stored."""
    (programs, _), stored = load_table(book), load_rows(book)
    if unknown := set(only) - set(programs):
        names = ", ".join(sorted(unknown))
        raise Problem(f"No programs: {names}; claims.toml has {', '.join(programs)}")
    about = {**releases(), **releases_of_compilers(others), "topology": TOPOLOGY}
    if only and {**about, "date": stored["about"]["date"]} != stored["about"]:
        raise Problem(f"The rest was compiled with other releases: `{COMMAND}` compiles all anew.")
    chosen = [program for name, program in programs.items() if not only or name in only]
    made, problems = compiled(book, chosen, others)
    new = {}
    for name, program in programs.items():
        if name in made:
            new[name] = {**made[name], "code": digest_of_code(book, program)}
        elif name in stored["programs"]:
            new[name] = stored["programs"][name]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"about": {**about, "date": today}, "programs": new}, problems


def write_rows(book: Book, data: dict[str, Any]) -> None:
    """JSON with a line for each row, so that a difference can be read; the digests apart."""
    programs = {name: dict(entry) for name, entry in data["programs"].items()}
    codes = {name: entry.pop("code") for name, entry in programs.items()}
    codes_path(book).write_text(json.dumps(codes, indent=1) + "\n", "utf-8")
    text = json.dumps({**data, "programs": programs}, indent=1, ensure_ascii=False)
    of_two = r"\[[^\[\]{}]*(?:\[[^\[\]{}]*\][^\[\]{}]*)*\]"  # a list with lists
    short = re.compile(r"[\[{][^\[\]{}]*[\]}]|\{[^{}\[\]]*(?:\[[^\[\]]*\][^{}\[\]]*)*\}|" + of_two)
    text = short.sub(lambda part: re.sub(r"\n\s*", " ", part[0]), text)
    rows_path(book).write_text(text + "\n", "utf-8")


# The page, and the table of all claims


def as_shown(value: Any) -> str:
    """A measured value as the page has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(as_shown, value))
    return "unknown" if value is None else str(value)


def where_it_holds(one: Judged) -> str:
    """Where a claim holds, and why not elsewhere."""
    claim, found = one.claim, one.holds
    if all(found.values()):
        return f"holds. GPU: {claim.not_for_gpu}" if claim.not_for_gpu else "holds"
    if not found["cpu"]:
        holding = [COMPILERS[name] for name, held in found.items() if held]
        return f"holds on {' and '.join(holding)} only"
    if claim.why == claim.why_gpu:
        return f"differs. {claim.why}"
    differing = [name for name, held in found.items() if not held]
    return " ".join(f"{COMPILERS[name]}: differs. {claim.reason(name)}" for name in differing)


def table(book: Book, judged: Sequence[Judged]) -> str:
    """All claims as CSV, in the order of the book."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["page", "claim", "CPU", "TPU v5e", "H100", "elsewhere"])
    for one in sorted(judged, key=lambda one: book.pages.index(one.claim.page)):
        values = [as_shown(one.values[name]) if name in one.values else "" for name in COMPILERS]
        page = one.claim.page.rsplit("/", 1)[-1]
        rows.writerow([page, one.claim.says, *values, where_it_holds(one)])
    return out.getvalue()


def summary(judged: Sequence[Judged], about: dict[str, str], count: int) -> str:
    on_tpu, on_gpu = (sum(one.holds.get(name, False) for one in judged) for name in ("tpu", "gpu"))
    everywhere = sum(list(one.holds.values()) == [True] * len(COMPILERS) for one in judged)
    return (
        f"Of {len(judged)} claims about {count} programs, {everywhere} hold on all three compilers; in "
        f"all, {on_tpu} hold on TPU and {on_gpu} on GPU. Compiled on {about['date']} with JAX "
        f"{about['jax']} for CPU; for TPU v5e with libtpu {about['libtpu']}, 16 chips as 4×4, 8 as 2×4, "
        f"4 as 2×2; for H100 with jax-cuda13-pjrt {about['jax-cuda13-pjrt']}, eight in one server."
    )


def files_to_write(book: Book, stored: dict[str, Any]) -> dict[Path, str]:
    """The page, with a paragraph of numbers between the two lines that name it, and the table."""
    programs, claims = load_table(book)
    judged = judge(claims, stored["programs"])
    page = book.source(CLAIMS_PAGE)
    begin, end = "<!-- made by bookkit second-compiler -->", "<!-- end -->"
    before, _, rest = page.read_text("utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise Problem(f"{page.name} needs the lines {begin} and {end}: put them back")
    count = sum(not program.machine for program in programs.values())
    made = summary(judged, stored["about"], count)
    return {
        page: f"{before}{begin}\n\n{made}\n\n{end}{after}",
        book.root / "book" / "compiled" / "claims.csv": table(book, judged),
    }


def write_files(book: Book, stored: dict[str, Any]) -> None:
    for path, text in files_to_write(book, stored).items():
        path.write_text(text, "utf-8")


# Checks


def misjudged(judged: Sequence[Judged]) -> list[str]:
    """Claims that do not even hold for CPU, or whose reason fits no difference."""
    problems = []
    for one in judged:
        claim, says = one.claim, f"{one.claim.page}: {one.claim.says!r}"
        if not one.holds[claim.about]:
            value = as_shown(one.values[claim.about])
            problems.append(f"{says} does not hold for {COMPILERS[claim.about]}: {value}")
            continue
        for compiler in ("tpu", "gpu"):
            name, reason = COMPILERS[compiler], claim.reason(compiler)
            field = "why_gpu" if compiler == "gpu" else "why"
            holds = one.holds.get(compiler)
            if holds and reason:
                problems.append(f"{says} holds for {name} as well: take its `{field}` out")
            elif holds is False and not reason and claim.about == "cpu":
                value = as_shown(one.values[compiler])
                problems.append(
                    f"{says} does not hold for {name} ({value}): say `{field}` in one sentence"
                )
    return problems


def check(book: Book, note: bool = False) -> str:
    """Problem if a stored program is no longer the page's; else what was looked at, in words."""
    (programs, claims), stored = load_table(book), load_rows(book)
    if names := ", ".join(sorted(programs.keys() ^ stored["programs"].keys())):
        raise Problem(
            f"claims.toml and compiled.json list other programs ({names}): run `{COMMAND}`."
        )
    problems = misjudged(judge(claims, stored["programs"]))
    entries = stored["programs"]
    codes = {name: digest_of_code(book, program) for name, program in programs.items()}
    doubtful = [programs[name] for name, code in codes.items() if entries[name]["code"] != code]
    said = f"{len(programs)} programs, {len(claims)} claims; of changed code: "
    pinned = {name: stored["about"][name] for name in LOWERED_BY}
    if not doubtful:
        said += "none"
    elif releases() != pinned:
        was = ", ".join(f"{name} {version}" for name, version in pinned.items())
        said += f"{len(doubtful)}, not checked here: their programs were stored with {was}"
    else:
        made, failed = compiled(book, doubtful, None)
        same = [name for name in made if made[name]["hash"] == entries[name]["hash"]]
        problems += failed
        problems += [
            f"{one.page}.md: the program {one.name} (after the cell id-{one.after}) is another than "
            f"the one that was compiled for TPU and GPU: run `{COMMAND}`, read what differs, commit "
            "companion/many_devices/compiled.json"
            for one in doubtful
            if one.name in made and one.name not in same
        ]
        said += f"{len(doubtful)}, of which {len(same)} make the same program"
        said += "" if note else " (--note writes that down)"
        for name in same:
            entries[name]["code"] = codes[name]
    if not note:
        problems += [
            f"{path.relative_to(book.root)} is out of date: run `bookkit second-compiler --check --note`"
            for path, text in files_to_write(book, stored).items()
            if path.read_text("utf-8") != text
        ]
    if problems:
        raise Problem("\n".join(problems))
    if note:
        write_rows(book, stored)
        write_files(book, stored)
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="bookkit second-compiler", description=__doc__.split("\n")[0]
    )
    options.add_argument(
        "--compilers", type=Path, metavar="DIR", help="where those for TPU and GPU are installed"
    )
    options.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these programs")
    options.add_argument(
        "--check", action="store_true", help="without compiling: is all up to date?"
    )
    options.add_argument("--note", action="store_true", help="with --check: write what it can")
    chosen, book = options.parse_args(arguments), Book()
    if chosen.check:
        print(check(book, chosen.note))
        return 0
    if chosen.compilers is None:
        raise Problem(f"Give --compilers DIR, where they are installed, or run `{COMMAND}`.")
    new, problems = compile_all(book, chosen.compilers, chosen.only)
    write_rows(book, new)  # minutes of compiling
    if problems := problems or misjudged(judge(load_table(book)[1], new["programs"])):
        raise Problem("\n".join(problems))
    write_files(book, new)
    print("`git diff book/compiled/claims.csv` shows what differs, by claim")
    return 0
