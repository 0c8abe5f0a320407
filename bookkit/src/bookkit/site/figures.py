"""Draw the book's figures: every program book/figures/NAME.py that has a draw() -> {name: SVG}; the
other modules there are what these have in common.

    bookkit figures            write the drawings that changed
    bookkit figures --check    write nothing; name what is out of date and fail

Drawings are committed. All are drawn each time, which takes a quarter of a minute.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Problem, find_root

EIGHT_CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}
DRAW = """import pathlib, runpy, sys
folder, into = map(pathlib.Path, sys.argv[1:])
sys.path.insert(0, str(folder))
for program in sorted(folder.glob("*.py")):
    draw = runpy.run_path(str(program), run_name=program.stem).get("draw", dict)
    for name, svg in draw().items():
        (into / f"{name}.svg").write_text(svg, "utf-8", newline="\\n")
"""


def changed(book: Book) -> dict[Path, bytes]:
    """The drawings that differ from the committed ones, by file.

    Problem if a program fails, or a drawing has no program.
    """
    folder = book.root / "book" / "figures"
    environment = {**os.environ, **EIGHT_CPUS, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="book-figures-") as into:
        done = subprocess.run(
            [sys.executable, "-c", DRAW, str(folder), into],
            cwd=book.root,
            env=environment,
            capture_output=True,
            encoding="utf-8",
        )
        if done.returncode:
            raise Problem(f"A figure was not drawn:\n{done.stderr.strip()[-2000:]}")
        made = {folder / path.name: path.read_bytes() for path in sorted(Path(into).glob("*.svg"))}
    if orphans := set(folder.glob("*.svg")) - made.keys():
        names = ", ".join(sorted(path.name for path in orphans))
        raise Problem(f"book/figures: no program there draws {names}: delete it, or add one")
    return {
        path: svg
        for path, svg in made.items()
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
