"""Run every notebook on every stack the book supports, and write down what ran.

    bookkit matrix                          all stacks but nightly, one notebook at a time
    bookkit matrix --only floor newest      some stacks
    bookkit matrix --chapter 01-mesh        one chapter, to try; nothing is recorded
    bookkit matrix --fresh                  also what passed before with the same everything
    bookkit matrix --only nightly --report issue.txt

What runs is the commit that is checked out. Environments are under _build/matrix, results beside them;
what has passed with the same notebook, instruments and environment is not run again, so a run that
was cut off goes on where it stopped. Each finished stack is recorded in book/matrix.json, and the page
and the README's summary are made from that. A cell that fails, a timeout, a process that hangs or a
Python that is missing is reported; the other stacks go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import load_chapter
from bookkit.model.claims import code_digest
from bookkit.run.compare import differences
from bookkit.stacks import colab
from bookkit.stacks.attempt import (
    Checkout,
    Outcome,
    announce,
    checkout,
    clean_environment,
    notebook_command,
    run_notebook,
)
from bookkit.stacks.environments import find_python, make_environment
from bookkit.stacks.record import load_record, write_record

MINUTES = 30  # for one notebook
NIGHTLY_INDEX = "https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/"


@dataclass(frozen=True)
class Stack:
    name: str
    python: str
    kind: str  # "pinned": requirements.txt; "newest", "nightly": no pins; "colab": colab.py


STACKS = {
    stack.name: stack
    for stack in (
        Stack("floor", "3.11", "pinned"),
        Stack("pinned", "3.12", "pinned"),
        Stack("py313", "3.13", "pinned"),
        Stack("colab", "3.13", "colab"),
        Stack("newest", "3.13", "newest"),
        Stack("nightly", "3.13", "nightly"),
    )
}
LOCAL = [name for name in STACKS if name != "nightly"]
COMPARED_WITH = "pinned"  # outputs of the other stacks are compared with this one's


# Environments.


def subject(text: str) -> list[str]:
    """The packages under the first heading of requirements.in: what the book runs on."""
    part = text.split("# the subject", 1)[1].split("\n#", 1)[0]
    return [line for line in part.splitlines() if line.strip()]


def pip(python: Path, *what: str, cwd: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


def stack_environment(book: Book, stack: Stack, copy: Checkout) -> Path:
    """The stack's environment, with meshscope from the commit."""
    if stack.kind == "pinned":
        key = (copy.path / "requirements.txt").read_text("utf-8")
    else:
        key = f"newest on {datetime.date.today()}"

    def install(python: Path) -> None:
        if stack.kind == "pinned":
            return pip(python, "-r", "requirements.txt", cwd=copy.path)
        wanted = subject((copy.path / "requirements.in").read_text("utf-8"))
        pip(python, "--upgrade", *wanted, "ipykernel", "nbclient", "pyyaml", ".", cwd=copy.path)
        if stack.kind == "nightly":
            nightly = ["--upgrade", "--pre", "--no-deps", "--index-url", NIGHTLY_INDEX]
            pip(python, *nightly, "jax", "jaxlib", cwd=copy.path)

    folder = book.root / "_build" / "matrix" / stack.name
    environment = make_environment(folder, lambda: find_python(stack.python), key, install)
    pip(environment / "bin" / "python", "--no-deps", "--force-reinstall", ".", cwd=copy.path)
    return environment


# Results, which are kept so that a run can go on.


def key_of(book: Book, stack: Stack, copy: Checkout, notebook: str) -> str:
    """What decides a result: the notebook, the instruments, what is installed, how it is run."""
    parts = [
        copy.tree(notebook),
        copy.tree("src"),
        copy.tree("bookkit/src/bookkit/stacks/notebook.py"),
    ]
    if stack.kind == "colab":
        parts.append(colab.list_path(book, colab.NEWEST_GPU_LIST).read_text("utf-8"))
    else:
        folder = book.root / "_build" / "matrix" / stack.name
        parts.append((folder / "installed.txt").read_text("utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def result_path(book: Book, stack: str, notebook: str) -> Path:
    """Where a notebook's result is kept, as .json and .ipynb."""
    flat = Path(notebook).relative_to("notebooks").with_suffix("").as_posix().replace("/", "-")
    return book.root / "_build" / "matrix" / "results" / stack / flat


def earlier(book: Book, stack: Stack, notebook: str, key: str) -> tuple[Outcome, str] | None:
    """(outcome, date) of the same notebook with the same everything, if it passed."""
    path = result_path(book, stack.name, notebook).with_suffix(".json")
    if not path.exists():
        return None
    found = json.loads(path.read_text("utf-8"))
    return (Outcome(**found["outcome"]), found["date"]) if found["key"] == key else None


def keep_result(book: Book, stack: Stack, outcome: Outcome, key: str, executed: Path) -> str:
    path = result_path(book, stack.name, outcome.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    if outcome.passed:
        path.with_suffix(".ipynb").write_bytes(executed.read_bytes())
        about = {"key": key, "date": date, "outcome": dataclasses.asdict(outcome)}
        path.with_suffix(".json").write_text(json.dumps(about, indent=1), "utf-8")
    return date


# Running.


def run_stack(
    book: Book, stack: Stack, copy: Checkout, names: Sequence[str], fresh: bool
) -> Iterator[tuple[Outcome, str]]:
    """(outcome, date) of each notebook, one at a time."""
    if stack.kind == "colab":
        environment = colab.colab_environment(book, colab.NEWEST_GPU_LIST)
    else:
        environment = stack_environment(book, stack, copy)
    for name in names:
        key = key_of(book, stack, copy, name)
        if not fresh and (found := earlier(book, stack, name, key)):
            yield found
            continue
        with tempfile.TemporaryDirectory(prefix="book-out-") as out:
            if stack.kind == "colab":
                outcome = colab.in_stand_in(book, copy, name, environment, Path(out))
            else:
                outcome = in_environment(book, copy, name, environment, Path(out))
            yield outcome, keep_result(book, stack, outcome, key, Path(out, "run.ipynb"))


def in_environment(book: Book, copy: Checkout, name: str, environment: Path, out: Path) -> Outcome:
    folder = environment / "bin"
    command = [str(folder / "python"), *notebook_command(book, copy.path / name, out)]
    with tempfile.TemporaryDirectory(prefix="book-home-") as home:
        variables = clean_environment(Path(home), folder)
        return run_notebook(command, name, out / "result.json", variables, copy.path, MINUTES * 60)


def notebooks_to_run(book: Book, stack: Stack, chapters: Sequence[str]) -> list[str]:
    """The notebooks that a stack runs: English, and in Colab every language."""
    languages = book.languages if stack.kind == "colab" else book.languages[:1]
    pages = [f"book/{Path(name).stem}" for name in chapters] or book.chapters
    if unknown := set(pages) - set(book.chapters):
        raise Problem(f"No chapters: {', '.join(unknown)}. There are {', '.join(book.chapters)}")
    paths = [book.notebook(page, language) for language in languages for page in pages]
    return [path.relative_to(book.root).as_posix() for path in paths]


# The record.


def summary_of_stack(
    book: Book, copy: Checkout, results: Sequence[tuple[Outcome, str]]
) -> dict[str, Any]:
    """What the page says about one stack."""
    chapters: dict[str, Any] = {}
    for outcome, _ in results:
        path = Path(outcome.name).relative_to("notebooks")
        about: dict[str, Any] = {"seconds": round(outcome.seconds)}
        if not outcome.passed:
            error = outcome.error.splitlines()[0][:200] if outcome.error else ""
            about |= {"failed": outcome.cell, "error": error}
        elif len(path.parts) == 1:  # the source language: whose proofs say where they were checked
            about["code"] = code_digest(load_chapter(copy.path / f"book/{path.stem}.md").code)
        chapters[path.with_suffix("").as_posix()] = about
    first = results[0][0]
    return {
        "date": min(date for _, date in results),
        "commit": copy.commit,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "before": first.before,
        "versions": first.versions,
        "notebooks": chapters,
    }


def without_release(notebook: NotebookNode) -> NotebookNode:
    """A notebook whose captions name no release of JAX: every stack has another one."""
    return nbformat.reads(re.sub(r"\bjax \d+(?:\.\w+)+", "jax", nbformat.writes(notebook)), 4)


def unlike(book: Book, stack: str) -> dict[str, list[int]] | None:
    """Cells, by chapter, whose outputs differ from the reference's; what differs is printed.

    None if one of the two was not run here.
    """
    found: dict[str, list[int]] | None = None
    for page in book.chapters:
        name = book.notebook(page).relative_to(book.root).as_posix()
        paths = [
            result_path(book, one, name).with_suffix(".ipynb") for one in (COMPARED_WITH, stack)
        ]
        if not all(path.exists() for path in paths):
            continue
        found = {} if found is None else found
        before, after = (without_release(nbformat.read(path, as_version=4)) for path in paths)
        for number, line, how in differences(before, after):
            if "setup" in after.cells[number - 1].metadata.get("tags", []):
                continue  # it prints the versions
            if how in ("the code of this cell changed", "this cell is gone"):
                continue  # the two ran at different commits
            found.setdefault(Path(name).stem, []).append(number)
            print(f"{stack} against {COMPARED_WITH}: {name}, cell {number}: {line}\n{how}\n")
    return found


def write_issue(path: Path, outcomes: Sequence[Outcome]) -> None:
    """What an issue says about the notebooks that failed: the first failing cell first."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if not failed:
        return
    first, versions = failed[0], failed[0].versions
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"{first.name}, cell {first.cell} is the first that fails with jax {versions.get('jax')}.",
        f"With {found}.",
        "",
        *(outcome.says("nightly") for outcome in failed),
        "",
        f"{len(failed)} of {len(outcomes)} notebooks fail. To try it: "
        "`bookkit matrix --only nightly`.",
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit matrix", description=__doc__.split("\n")[0])
    options.add_argument("--only", nargs="+", choices=STACKS, default=LOCAL, metavar="STACK")
    options.add_argument("--chapter", nargs="+", default=[], help="such as 01-mesh; not recorded")
    options.add_argument("--fresh", action="store_true", help="run again what has passed")
    options.add_argument("--report", type=Path, help="write what fails here, for an issue")
    chosen, book = options.parse_args(arguments), Book()
    notebooks_to_run(book, STACKS[COMPARED_WITH], chosen.chapter)  # or it says which there are
    problems, everything = [], []
    with checkout(book) as copy:
        announce(copy)
        for stack in (STACKS[name] for name in chosen.only):
            results = []
            try:
                names = notebooks_to_run(book, stack, chosen.chapter)
                for outcome, date in run_stack(book, stack, copy, names, chosen.fresh):
                    results.append((outcome, date))
                    print(outcome.says(stack.name), flush=True)
            except Problem as problem:  # a Python or a package that cannot be had: others go on
                print(f"{stack.name}: {problem}", file=sys.stderr, flush=True)
                problems.append(f"{stack.name} did not run")
                continue
            everything += [outcome for outcome, _ in results]
            failed = [outcome.name for outcome, _ in results if not outcome.passed]
            problems += [f"{stack.name}: {', '.join(failed)}"] if failed else []
            if stack.name in LOCAL and not chosen.chapter:
                data = load_record(book) | {stack.name: summary_of_stack(book, copy, results)}
                write_record(book, data)
    if not chosen.chapter:
        data = load_record(book)
        for name in (name for name in LOCAL if name in data and name != COMPARED_WITH):
            if (found := unlike(book, name)) is not None:
                data[name]["differs"] = found
        write_record(book, data)
    if chosen.report:
        write_issue(chosen.report, everything)
    if problems:
        raise Problem("The matrix is not whole:\n" + "\n".join(problems))
    print(f"{len(everything)} notebooks passed on {len(chosen.only)} stacks")
