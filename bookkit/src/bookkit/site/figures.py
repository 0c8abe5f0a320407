"""Draw the book's figures: every program book/figures/NAME.py that has a draw() -> {name: SVG}.

    bookkit figures            write the drawings that changed
    bookkit figures --check    write nothing; name what is out of date and fail

Drawings are committed. All are drawn each time, which takes a quarter of a minute.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Problem, find_root

AT_ONCE = 2
EIGHT_CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}
DRAW = """import pathlib, runpy, sys
program, into = map(pathlib.Path, sys.argv[1:])
sys.path.insert(0, str(program.parent))
for name, svg in runpy.run_path(str(program), run_name=program.stem)["draw"]().items():
    (into / f"{name}.svg").write_text(svg, "utf-8", newline="\\n")
"""


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


def drawn_by(book: Book, program: Path) -> dict[str, bytes]:
    """{file name: drawing} of one program, in a process of its own."""
    environment = {**os.environ, **EIGHT_CPUS, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="book-figures-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", DRAW, str(program), folder],
            cwd=book.root,
            env=environment,
            capture_output=True,
            encoding="utf-8",
        )
        if done.returncode:
            where = program.relative_to(book.root).as_posix()
            raise Problem(f"{where} failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")
        return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.svg"))}


def drawings(book: Book) -> dict[str, bytes]:
    """{file name: drawing} of all programs. Problem if one fails, or a drawing has no program."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        drawn = list(pool.map(lambda one: drawn_by(book, one), drawing_programs(book)))
    made = {name: svg for one in drawn for name, svg in one.items()}
    if orphans := {path.name for path in folder_of(book).glob("*.svg")} - made.keys():
        names = ", ".join(sorted(orphans))
        raise Problem(f"book/figures: no program there draws {names}: delete it, or add one")
    return made


def changed(book: Book) -> dict[Path, bytes]:
    """The drawings that differ from the committed ones, by file."""
    files = {folder_of(book) / name: svg for name, svg in drawings(book).items()}
    return {
        path: svg
        for path, svg in files.items()
        if not path.exists() or path.read_bytes().replace(b"\r\n", b"\n") != svg
    }


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bookkit figures", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args(arguments).check
    found = changed(Book(root or find_root()))
    names = ", ".join(path.name for path in found)
    if found and check:
        raise Problem(f"Not what their programs draw: {names}. Run `bookkit figures`.")
    for path, svg in found.items():
        path.write_bytes(svg)
    print(f"drew {names}" if found else "all figures are up to date")
