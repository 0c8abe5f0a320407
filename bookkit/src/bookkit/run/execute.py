"""Execute the chapters whose code changed, once, for every build in every language.

    bookkit execute                     what is missing from the cache
    bookkit execute book/02-variables   one chapter
    bookkit execute --list              say which are missing, run nothing
    bookkit execute --out DIR           and write what their cells put out into DIR, as text

An execution is kept in a jupyter-cache, `_build/executed/STACK/`, which Sphinx reads. It is found
again by the code cells, their metadata and the kernel (jupyter-cache's key) and by STACK, a
fingerprint of what else decides the outputs: Python, the packages in STACK_PACKAGES, the source of
meshscope, the normaliser and BOOK_DEVICES. Prose and translations never re-execute anything.

A kernel is this Python, in an empty folder, without the user's IPython settings. Variables that
change what JAX does (JAX_*, XLA_*, TF_*, …) are kept from it, since they would change what is
published; with BOOK_DEVICES=real they pass through, because real devices may need them.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from bookkit.model.book import Book, Problem
from bookkit.run.normalise import normalise, normalise_text

STACK_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint numpy scipy ml_dtypes scikit-learn matplotlib "
    "treescope ipython ipykernel"
).split()
KEPT_STACKS = 3  # caches of earlier stacks to keep, so that going back costs nothing
KEPT_FROM_KERNELS = re.compile(r"(JAX|JAXLIB|XLA|TF|LIBTPU|TPU|NVIDIA|CUDA)_")
ALWAYS_KEPT_FROM_KERNELS = ("PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONDEVMODE", "PYTHONHASHSEED")


# What an execution depends on.


@functools.cache
def stack() -> dict[str, str]:
    """Everything but the code cells that decides the outputs, by name."""
    found = {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }
    for name in STACK_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    spec = importlib.util.find_spec("meshscope")
    if spec is None or spec.origin is None:
        raise Problem(
            "The chapters use meshscope, which this Python lacks: "
            f"run `{sys.executable} -m pip install --no-deps -e .` in the repository's root"
        )
    found["meshscope"] = hash_of(sorted(Path(spec.origin).parent.rglob("*.py")))
    if companion := importlib.util.find_spec("many_devices"):
        found["many_devices"] = hash_of(sorted(Path(str(companion.origin)).parent.glob("*.*")))
    found["normaliser"] = hash_of([Path(__file__).with_name("normalise.py")])
    found["BOOK_DEVICES"] = os.environ.get("BOOK_DEVICES", "")
    return found


def hash_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def fingerprint(of: dict[str, str] | None = None) -> str:
    text = json.dumps(stack() if of is None else of, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_path(book: Book) -> Path:
    return book.root / "_build" / "executed" / fingerprint()


def read_as_sphinx(book: Book, page: str) -> NotebookNode:
    """A chapter as Sphinx reads it: the same reader, so the same key in the cache."""
    from myst_nb.core.read import read_myst_markdown_notebook

    path = book.source(page)
    text = path.read_text("utf-8")
    notebook = read_myst_markdown_notebook(text, add_source_map=True, path=path)
    for number, cell in enumerate(notebook.cells, 1):
        cell["id"] = f"cell-{number}"  # instead of a random one
    return notebook


# The cache.


def open_cache(book: Book) -> Any:
    from jupyter_cache import get_cache

    path = cache_path(book)
    if not path.exists():
        path.mkdir(parents=True)
        (path / "stack.json").write_text(json.dumps(stack(), indent=1) + "\n", "utf-8")
    return get_cache(path)


def from_cache(cache: Any, notebook: NotebookNode) -> NotebookNode | None:
    """The executed notebook, or None. What a killed run left half-written counts as missing."""
    try:
        _, executed = cache.merge_match_into_notebook(notebook)
    except (KeyError, ValueError, nbformat.reader.NotJSONError):
        return None
    return executed


def keep_in_cache(
    cache: Any, book: Book, page: str, executed: NotebookNode, seconds: float
) -> None:
    from jupyter_cache.base import CacheBundleIn

    about = {"execution_seconds": seconds}  # the name that myst-nb wants
    bundle = CacheBundleIn(executed, str(book.source(page)), data=about)
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def found_in_cache(book: Book, page: str) -> NotebookNode | None:
    """A chapter as its code was executed with these releases; nothing runs."""
    from jupyter_cache import get_cache

    folder = cache_path(book)
    if not (folder / "global.db").exists():
        return None
    return from_cache(get_cache(folder), read_as_sphinx(book, page))


def prune(book: Book) -> None:
    """Forget the stacks that were not used for longest."""
    caches = [path for path in cache_path(book).parent.iterdir() if path.is_dir()]
    os.utime(cache_path(book))
    for path in sorted(caches, key=lambda path: path.stat().st_mtime)[:-KEPT_STACKS]:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def alone(book: Book, say: Callable[[str], None]) -> Iterator[None]:
    """One process executes at a time; a second one waits, and then finds everything cached."""
    from filelock import FileLock, Timeout  # not where one notebook runs, as in Colab

    path = book.root / "_build" / "executed.lock"
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("waiting for another process that executes chapters")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# One chapter.


@dataclass
class Failure:
    """A cell that failed. Cells are counted from 1, Markdown and code together."""

    page: str
    cell: int
    line: int  # of page.md
    source: str
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        first = next((line for line in self.source.splitlines() if line.strip()), "")
        text = f"{self.page}.md:{self.line}: cell {self.cell} failed\n    {first}\n{self.error}"
        return text + (f"\n{self.traceback}" if self.traceback else "")


class ExecutionFailed(Problem):
    def __init__(self, failures: list[Failure]):
        self.failures = failures
        count = f"{len(failures)} chapter" + "s" * (len(failures) > 1)
        super().__init__(
            "\n\n".join(map(str, failures)) + f"\n\n{count} failed; nothing was built."
        )


def kernel_environment(folder: Path) -> dict[str, str]:
    real = os.environ.get("BOOK_DEVICES") == "real"
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ALWAYS_KEPT_FROM_KERNELS and (real or not KEPT_FROM_KERNELS.match(name))
    }
    return {**kept, "IPYTHONDIR": str(folder)}


def new_client(
    notebook: NotebookNode,
    folder: Path,
    timeout: int,
    launcher: Sequence[str] = ("-m", "ipykernel_launcher"),
    **hooks: Any,
) -> Any:
    """An nbclient whose kernel is this Python, whatever kernels the user has installed."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            launch = [sys.executable, "-Xfrozen_modules=off", *launcher]
            return KernelSpec(
                argv=[*launch, "-f", "{connection_file}"],
                display_name="Python 3",
                language="python",
            )

    # Sockets are files, so nobody else on the machine can listen. Windows has only ports.
    transport = "tcp" if sys.platform == "win32" else "ipc"
    sockets = str(folder / "kernel.json")
    cwd = folder / "empty"
    cwd.mkdir()
    return NotebookClient(
        notebook,
        km=ThisPython(transport=transport, connection_file=sockets, kernel_name="python3"),
        timeout=timeout,
        startup_timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(cwd)}},
        **hooks,
    )


ANSI = re.compile(r"\x1b\[[0-9;]*m")


def failure(page: str, notebook: NotebookNode, index: int, error: BaseException | str) -> Failure:
    from nbclient.exceptions import CellExecutionError

    cell = notebook.cells[index]
    line = notebook.metadata.get("source_map", [0] * (index + 1))[index]
    if isinstance(error, CellExecutionError):
        outputs = [output for output in cell.outputs if output.output_type == "error"]
        trace = "\n".join(outputs[-1].traceback) if outputs else ""
        trace = "\n".join(normalise_text(ANSI.sub("", trace)).splitlines()[-40:])
        return Failure(page, index + 1, line, cell.source, f"{error.ename}: {error.evalue}", trace)
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {error}"
    return Failure(page, index + 1, line, cell.source, error)


async def execute_notebook(
    page: str,
    notebook: NotebookNode,
    timeout: int,
    **options: Any,
) -> Failure | NotebookNode:
    """Execute a copy of a notebook; normalised, or what went wrong."""
    from nbclient.exceptions import CellTimeoutError

    notebook, now = copy.deepcopy(notebook), 0

    def started(cell_index: int, **_: Any) -> None:
        nonlocal now
        now = cell_index

    hooks: dict[str, Any] = {"on_cell_start": started, **options}
    with tempfile.TemporaryDirectory(prefix="book-") as folder:
        client = new_client(notebook, Path(folder), timeout, **hooks)
        client.owns_km = True  # end the kernel with the notebook
        try:
            await client.async_execute(env=kernel_environment(Path(folder, "ipython")))
        except CellTimeoutError:
            return failure(page, notebook, now, f"TimeoutError: still running after {timeout} s")
        except Exception as error:
            return failure(page, notebook, now, error)
    for index, cell in enumerate(notebook.cells):
        expected = "raises-exception" in cell.metadata.get("tags", [])
        if expected and not any(output.output_type == "error" for output in cell.outputs):
            return failure(page, notebook, index, "Tagged raises-exception, but it did not raise")
    return normalise(notebook)


# All chapters.


def execute(
    book: Book,
    pages: Sequence[str] | None = None,
    *,
    workers: int = 2,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, NotebookNode]:
    """Executed, normalised notebooks by page; runs only what the cache lacks.

    With `fresh`, runs every page and leaves the cache alone. Raises ExecutionFailed after the other
    pages are done and cached.
    """
    every = book.chapters if pages is None else pages
    notebooks = {page: read_as_sphinx(book, page) for page in every}
    timeout = int(book.config["execute"]["timeout"])
    if fresh:
        return execute_all(notebooks, timeout, workers, say, lambda *_: None)
    with alone(book, say):
        cache = open_cache(book)
        done = {page: from_cache(cache, notebook) for page, notebook in notebooks.items()}
        missing = {page: notebooks[page] for page, found in done.items() if found is None}

        def keep(page: str, executed: NotebookNode, seconds: float) -> None:
            keep_in_cache(cache, book, page, executed, seconds)

        if missing:
            execute_all(missing, timeout, workers, say, keep)
            done |= {page: from_cache(cache, notebook) for page, notebook in missing.items()}
        prune(book)
    return {page: executed for page, executed in done.items() if executed is not None}


def execute_all(
    notebooks: Mapping[str, NotebookNode],
    timeout: int,
    workers: int,
    say: Callable[[str], None],
    keep: Callable[[str, NotebookNode, float], None],
) -> dict[str, NotebookNode]:
    executed: dict[str, NotebookNode] = {}
    failures: list[Failure] = []

    async def one(page: str, turn: asyncio.Semaphore) -> None:
        async with turn:
            start = time.perf_counter()
            result = await execute_notebook(page, notebooks[page], timeout)
            seconds = time.perf_counter() - start
        if isinstance(result, Failure):
            failures.append(result)
        else:
            executed[page] = result
            keep(page, result, seconds)
        outcome = "FAILED after" if isinstance(result, Failure) else "executed in"
        say(f"{page}: {outcome} {seconds:.1f} s")

    async def everything() -> None:
        turn = asyncio.Semaphore(workers)
        await asyncio.gather(*(one(page, turn) for page in notebooks))

    in_thread(everything)
    if failures:
        raise ExecutionFailed(
            sorted(failures, key=lambda failure: list(notebooks).index(failure.page))
        )
    return executed


def in_thread(work: Callable[[], Any]) -> None:
    """Run a coroutine beside the main thread, where nbclient would take all signals for itself."""
    loop = asyncio.new_event_loop()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        task = loop.create_task(work())
        future = thread.submit(loop.run_until_complete, task)
        try:
            future.result()
        except (KeyboardInterrupt, SystemExit):  # the kernels end with the task
            loop.call_soon_threadsafe(task.cancel)
            with contextlib.suppress(asyncio.CancelledError, concurrent.futures.CancelledError):
                future.result()
            raise
        finally:
            loop.close()


def write_outputs(executed: Mapping[str, NotebookNode], folder: Path) -> None:
    """PAGE.txt for each page, for `diff`. Cells tagged `timing` differ each time, and are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for page, notebook in executed.items():
        lines = []
        for number, cell in enumerate(notebook.cells, 1):
            if cell.cell_type != "code" or "timing" in cell.metadata.get("tags", []):
                continue
            first, *_ = cell.source.strip().split("\n")
            lines.append(f"# cell {number}: {first}")
            for output in cell.outputs:
                lines += output.get("traceback", [output.get("text", "")])
                lines += [str(data) for _, data in sorted(output.get("data", {}).items())]
        (folder / f"{Path(page).name}.txt").write_text("\n".join(lines) + "\n", "utf-8")


def missing(book: Book) -> list[str]:
    """The chapters that a build would execute now."""
    cache = open_cache(book)
    return [page for page in book.chapters if from_cache(cache, read_as_sphinx(book, page)) is None]


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit execute", description=__doc__.split("\n")[0])
    options.add_argument(
        "pages", nargs="*", metavar="PAGE", help="such as book/01-mesh; default: all"
    )
    options.add_argument("--workers", type=int, default=2, help="chapters at a time (2)")
    options.add_argument("--fresh", action="store_true", help="run all anew, leave the cache alone")
    options.add_argument("--list", action="store_true", help="name the chapters that would run")
    options.add_argument("--out", type=Path, metavar="DIR", help="write the outputs here, as text")
    chosen, book = options.parse_args(arguments), Book()
    pages = [re.sub(r"\.md$", "", page) for page in chosen.pages] or None
    unknown = set(pages or ()) - set(book.chapters)
    if unknown:
        raise Problem(f"No chapters: {', '.join(unknown)}. _toc.yml has {', '.join(book.chapters)}")
    if chosen.list:
        print(*missing(book), sep="\n")
        return
    executed = execute(book, pages, workers=chosen.workers, fresh=chosen.fresh)
    if chosen.out:
        write_outputs(executed, chosen.out)
