"""One attempt at a notebook: in a clean copy of the book, by another Python, and what it said."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bookkit.model.book import Book, Problem
from bookkit.model.package import Wheel, build_wheel, has_package

TRIED = "notebooks src bookkit book/cells pyproject.toml LICENSE requirements.txt".split()
OF_THE_CALLER = re.compile(  # of the caller's environment: a notebook meets what a reader's would
    r"(JAX|JAXLIB|XLA|TF|LIBTPU|TPU|BOOK|GIT|JUPYTER|IPYTHON|XDG)_|"
    r"PYTHON|IPYTHONDIR|VIRTUAL_ENV|MAKE|MFLAGS|OLDPWD"
)


def git(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(["git", *map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"git {' '.join(map(str, command))} failed in {cwd}:\n{done.stderr}")
    return done.stdout.rstrip()


@dataclass(frozen=True)
class Checkout:
    """A clone of the commit that is checked out: what runs, and, beside it, what its site serves."""

    path: Path
    commit: str
    modified: list[str]  # files with changes that are not committed, so not tried

    @property
    def site(self) -> Path:
        """Stands in for the book's site, with nothing but the wheel of meshscope."""
        return self.path.with_name("site")

    @property
    def other_site(self) -> Path:
        """The same, after somebody changed the wheel."""
        return self.path.with_name("other-site")

    def written(self) -> str:
        """What appeared in the clone, or changed; empty if nothing did."""
        return git("status", "--porcelain", "--ignored", cwd=self.path)


@contextlib.contextmanager
def checkout(book: Book) -> Iterator[Checkout]:
    changed = git("status", "--porcelain", "--", *TRIED, cwd=book.root).splitlines()
    with tempfile.TemporaryDirectory(prefix="book-clone-") as folder:
        path = Path(folder, "book")
        git("clone", "--quiet", "--no-hardlinks", book.root, path, cwd=book.root)
        commit = git("rev-parse", "--short", "HEAD", cwd=path)
        copy = Checkout(path, commit, [line[3:] for line in changed])
        if has_package(path):
            wheel = build_wheel(path)
            put(wheel, copy.site)
            put(Wheel(wheel.name, wheel.data + b"\0"), copy.other_site)  # still a sound archive
        yield copy


def put(wheel: Wheel, site: Path) -> None:
    path = site / wheel.path
    path.parent.mkdir(parents=True)
    path.write_bytes(wheel.data)


def announce(copy: Checkout) -> None:
    print(f"running commit {copy.commit}", flush=True)
    if copy.modified:
        print(f"not tried, since not committed: {', '.join(copy.modified)}", flush=True)


def clean_environment(home: Path, folder: Path) -> dict[str, str]:
    """A user who has just arrived: nobody's settings, an empty home, `folder` first in PATH."""
    kept = {name: value for name, value in os.environ.items() if not OF_THE_CALLER.match(name)}
    kept |= {"HOME": str(home), "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@dataclass
class Outcome:
    """What one notebook did. Cells are counted from 1, Markdown and code together."""

    name: str  # "notebooks/zh-TW/01-mesh.ipynb"
    status: str  # "passed" or "failed"
    seconds: float = 0
    cell: int = 0
    first: str = ""  # line of that cell
    error: str = ""
    trace: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)  # in Colab, what it had preinstalled

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def says(self, where: str) -> str:
        if self.passed:
            return f"{where}: {self.name} passed in {self.seconds:.0f} s"
        cell = f"cell {self.cell}" if self.cell else "before or after its cells"
        lines = [f"{where}: {self.name} FAILED, {cell}, after {self.seconds:.0f} s"]
        if self.first:
            lines.append(f"    {self.first}")
        lines += [f"    {line}" for line in self.error.splitlines()[:8]]
        if "AssertionError" in self.error or len(self.error.splitlines()) < 2:
            lines += [f"    | {line}" for line in self.trace.splitlines()[-12:]]
        return "\n".join(lines)


def notebook_command(book: Book, notebook: Path, out: Path, *options: str) -> list[str]:
    """What a stack's Python is called with to run one notebook; the outcome goes below `out`."""
    timeout = str(book.config["execute"]["timeout"])
    results = ["--result", str(out / "result.json"), "--executed", str(out / "run.ipynb")]
    run = ["bookkit/src/bookkit", "run-notebook", str(notebook)]  # a folder: nothing is installed
    return [*run, "--timeout", timeout, *results, *options]


def end(pid: int) -> None:
    """End a process and all that it started: kernels are in sessions of their own."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        started = process.children(recursive=True)
        for one in [process, *started]:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(started, timeout=10)


def run_notebook(
    command: Sequence[str | Path],
    name: str,
    result: Path,
    environment: Mapping[str, str],
    cwd: Path,
    seconds: float,
) -> Outcome:
    """Run `bookkit run-notebook …`; a process that hangs is ended with all it started."""
    result.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
        )
        try:
            process.wait(seconds)
            why = f"its process ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"still running after {seconds:.0f} s: it hangs, or the machine is too slow"
        finally:
            end(process.pid)
            process.wait()
        said.seek(0)
        printed = said.read()
    found: dict[str, Any] = json.loads(result.read_text("utf-8")) if result.exists() else {}
    if found.pop("status", "running") != "running":
        status = "passed" if process.returncode == 0 else "failed"
        return Outcome(name, status, **found)
    return Outcome(name, "failed", **{**found, "error": why, "trace": printed})
