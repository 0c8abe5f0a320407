"""Draw the book's figures: every program book/figures/NAME.py that has a draw() -> {name: SVG}.

    bookkit figures            draw those whose program, or what it reads, changed
    bookkit figures --check    write nothing; name what is out of date and fail
    bookkit figures --fresh    all of them; with --check too

Drawings are committed. book/figures/made.json says from which files of the repository each program
made them (its own, what it imports, what it opens), so that a check takes no time until one changes.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bookkit.model.book import Book, Problem, find_root

AT_ONCE = 2
MINUTES_TO_DRAW = 10  # for one program
READS = "reads.json"
NOT_INPUTS = (".git", ".venv", "_build", "bookkit", "__pycache__", "site-packages")
EIGHT_CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}


@dataclass(frozen=True)
class Drawn:
    """What a program made, and from what: file names with the digests of their bytes."""

    svg: dict[str, bytes]
    reads: dict[str, str]

    @property
    def record(self) -> dict[str, dict[str, str]]:
        return {"from": self.reads, "made": {name: digest(svg) for name, svg in self.svg.items()}}


def digest(content: bytes) -> str:
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()[:16]


def folder_of(book: Book) -> Path:
    return book.root / "book" / "figures"


def drawing_programs(book: Book) -> list[Path]:
    """The programs with a draw(); the others are what these have in common."""
    return [
        path
        for path in sorted(folder_of(book).glob("*.py"))
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "draw"
            for node in ast.parse(path.read_text("utf-8")).body
        )
    ]


def recorded(book: Book) -> dict[str, Any]:
    path = folder_of(book) / "made.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def is_current(book: Book, record: dict[str, Any] | None) -> bool:
    """Are a program's inputs and drawings the bytes that the record names?"""
    if not record:
        return False
    files = {book.root / name: wanted for name, wanted in record["from"].items()}
    files |= {folder_of(book) / name: wanted for name, wanted in record["made"].items()}
    return all(path.is_file() and digest(path.read_bytes()) == it for path, it in files.items())


# One program, in a process of its own.


def draw_here(program: Path, into: Path, root: Path) -> None:
    """Run draw(), write what it returns, and note which files of the repository were read."""
    opened: set[str] = set()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            opened.add(os.fspath(arguments[0]))

    known = set(sys.modules)
    sys.path.insert(0, str(program.parent))
    sys.addaudithook(hear)
    for name, svg in runpy.run_path(str(program), run_name=program.stem)["draw"]().items():
        (into / f"{name}.svg").write_text(svg, "utf-8", newline="\n")
    modules = [module for name, module in list(sys.modules.items()) if name not in known]
    files = [getattr(module, "__file__", None) for module in modules]
    paths = {str(program), *opened, *filter(None, files)}
    (into / READS).write_text(json.dumps(sorted(inputs_among(paths, root, into))), "utf-8")


def inputs_among(paths: set[str], root: Path, into: Path) -> Iterator[str]:
    for path in map(Path, paths):
        where = path.resolve()
        if where.is_file() and where.is_relative_to(root) and not where.is_relative_to(into):
            parts = where.relative_to(root).parts
            if not any(part.startswith(NOT_INPUTS) for part in parts) and where.suffix != ".svg":
                yield Path(*parts).as_posix()


def drawn_by(book: Book, program: Path) -> Drawn:
    """Raises Problem with what the program said."""
    where = program.relative_to(book.root).as_posix()
    with tempfile.TemporaryDirectory(prefix="book-figures-") as folder:
        command = [sys.executable, "-m", "bookkit", "figures", "--into", folder, str(program)]
        environment = {**os.environ, **EIGHT_CPUS, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command,
                cwd=book.root,
                env=environment,
                capture_output=True,
                encoding="utf-8",
                timeout=60 * MINUTES_TO_DRAW,
            )
        except subprocess.TimeoutExpired:
            said = f"{where} drew nothing in {MINUTES_TO_DRAW} minutes: make it smaller"
            raise Problem(said) from None
        if done.returncode:
            raise Problem(f"{where} failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")
        out = Path(folder)
        reads = json.loads((out / READS).read_text("utf-8"))
        return Drawn(
            {path.name: path.read_bytes() for path in sorted(out.glob("*.svg"))},
            {name: digest((book.root / name).read_bytes()) for name in reads},
        )


# All of them.


def drawn_anew(book: Book, fresh: bool = False) -> tuple[dict[str, Drawn], list[str]]:
    """What the programs that are not current make, by program; and what those said that failed."""
    known = recorded(book)
    wanted = [
        program
        for program in drawing_programs(book)
        if fresh or not is_current(book, known.get(program.name))
    ]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        made = {program.name: pool.submit(drawn_by, book, program) for program in wanted}
    failed = [str(one.exception()) for one in made.values() if one.exception()]
    return {name: one.result() for name, one in made.items() if not one.exception()}, failed


def complaints(book: Book, fresh: bool = False) -> Iterator[str]:
    """What is wrong with the committed drawings."""
    made, failed = drawn_anew(book, fresh)
    yield from failed
    for program, drawn in made.items():
        for name, svg in drawn.svg.items():
            path = folder_of(book) / name
            if not path.exists() or digest(path.read_bytes()) != digest(svg):
                yield f"book/figures/{name} is not what {program} draws: run `make figures`"
    if not failed:
        yield from left_over(book, records_after(book, made))


def left_over(book: Book, records: dict[str, Any]) -> Iterator[str]:
    """Drawings of no program, or of two."""
    by: dict[str, str] = {}
    for program, record in records.items():
        for name in record["made"]:
            if name in by:
                yield f"book/figures/{name} is drawn by {by[name]} and {program}: rename one"
            by[name] = program
    for path in sorted(folder_of(book).glob("*.svg")):
        if path.name not in by:
            yield f"book/figures/{path.name} is drawn by no program there: delete it, or add one"


def records_after(book: Book, made: dict[str, Drawn]) -> dict[str, Any]:
    known = recorded(book) | {program: drawn.record for program, drawn in made.items()}
    names = [program.name for program in drawing_programs(book)]
    return {name: known[name] for name in names if name in known}


def write_figures(book: Book, fresh: bool) -> list[str]:
    """Draw what is not current; the names of the files that changed."""
    (made, failed), changed = drawn_anew(book, fresh), []
    records = records_after(book, made)
    for drawn in made.values():
        for name, svg in drawn.svg.items():
            path = folder_of(book) / name
            if not path.exists() or path.read_bytes() != svg:
                path.write_bytes(svg)
                changed.append(name)
    if records != recorded(book):
        text = json.dumps(records, indent=1, sort_keys=True) + "\n"
        (folder_of(book) / "made.json").write_text(text, "utf-8")
    if wrong := failed or list(left_over(book, records)):
        raise Problem("\n".join(wrong))
    return changed


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bookkit figures", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    parser.add_argument("--fresh", action="store_true", help="draw all, also what did not change")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("program", type=Path, nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    root = root or find_root()
    if options.into:
        return draw_here(options.program, options.into.resolve(), root.resolve())
    book = Book(root)
    if options.check:
        if wrong := list(complaints(book, options.fresh)):
            raise Problem("\n".join(wrong))
        print(f"{len(drawing_programs(book))} programs: every figure is what they draw")
    else:
        changed = write_figures(book, options.fresh)
        print("\n".join(f"drew {name}" for name in changed) or "all figures are up to date")
