"""What a chapter costs to run, what the site costs to build, what a page costs to load.

    bookkit bench [--json FILE]

Chapters run one at a time, each in a fresh kernel, without a compilation cache; memory is the
largest resident set of the kernel and its children together, looked at ten times a second. The site
is built in both languages from cached executions (first from nothing, then after one paragraph of
one page was edited, in a copy of the book). Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bookkit.model.book import Book, Problem, find_root
from bookkit.run.execute import Failure, execute, execute_notebook, read_as_sphinx, stack

COPIED = [
    "_config.yml",
    "_toc.yml",
    "conf.py",
    "book",
    "locale",
    "notebooks",
    "site",
    "src",
]


@contextmanager
def peak_of_children() -> Iterator[list[int]]:
    """The most bytes that this process's descendants held together while the block ran."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            held = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    held += process.memory_info().rss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], held)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def cost_of_chapters(book: Book) -> Iterator[dict[str, Any]]:
    timeout = int(book.config["execute"]["timeout"])
    for page in book.chapters:
        notebook = read_as_sphinx(book, page)
        with peak_of_children() as peak:
            start = time.perf_counter()
            result = asyncio.run(execute_notebook(page, notebook, timeout))
            seconds = time.perf_counter() - start
        if isinstance(result, Failure):
            raise Problem(str(result))
        yield {"chapter": page, "seconds": round(seconds, 1), "peak_bytes": peak[0]}


def seconds_of(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return round(time.perf_counter() - start, 1)


def seconds_to_build(book: Book) -> dict[str, float]:
    """Seconds of `bookkit site` in a copy: from cached executions, then after an edit."""
    execute(book)
    site = [sys.executable, "-m", "bookkit", "site"]
    with tempfile.TemporaryDirectory(prefix="book-") as folder:
        copy = Path(folder)
        for name in COPIED:
            path = book.root / name
            if path.is_dir():
                shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.exists():
                shutil.copyfile(path, copy / name)
        shutil.copytree(book.root / "_build" / "executed", copy / "_build" / "executed")
        found = {"site_seconds": seconds_of(site, copy)}
        page = Book(copy).source(book.chapters[-1])
        page.write_text(page.read_text("utf-8") + "\nOne more paragraph.\n", "utf-8")
        found["edit_seconds"] = seconds_of(site, copy)
    return found


def weight_of_pages(book: Book) -> list[dict[str, Any]]:
    found = []
    for page in book.pages:
        path = book.root / "_build" / book.languages[0].code / "html" / f"{page}.html"
        if not path.exists():
            raise Problem(f"{path.relative_to(book.root)} is missing: run `make site` first")
        html = path.read_bytes()
        found.append(
            {"page": page, "html_bytes": len(html), "gz_bytes": len(gzip.compress(html, 9))}
        )
    return found


def columns(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    cells = [
        heads,
        *(
            [f"{row[head]:,}" if isinstance(row[head], int) else str(row[head]) for head in heads]
            for row in rows
        ),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = [
        "  ".join(
            text.ljust(w) if not i else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit bench", description=__doc__.split("\n")[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    chosen, book = options.parse_args(arguments), Book(root or find_root())
    about = {
        **stack(),
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
    }
    found: dict[str, Any] = {"about": about, "chapters": list(cost_of_chapters(book))}
    print(columns(found["chapters"]) + "\n")
    found["builds"] = seconds_to_build(book)
    print(
        f"site in {len(book.languages)} languages from cached executions: "
        f"{found['builds']['site_seconds']} s\n"
        f"the same after one paragraph was edited: {found['builds']['edit_seconds']} s\n"
    )
    found["pages"] = weight_of_pages(book)
    print(columns(found["pages"]))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
