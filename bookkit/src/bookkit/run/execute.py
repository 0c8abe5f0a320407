"""Execute the chapters whose code changed, once, for every build in every language.

    bookkit execute                     what is missing from the cache
    bookkit execute book/02-variables   one chapter
    bookkit execute --out DIR           and write what their cells put out into DIR, as text

An execution is kept in a jupyter-cache, `_build/executed/STACK/`, which Sphinx reads. It is found
again by the code cells, their metadata and the kernel (jupyter-cache's key) and by STACK, a
fingerprint of what else decides the outputs: Python, the packages in STACK_PACKAGES, the source of
meshscope, the normaliser and BOOK_DEVICES. Prose and translations never re-execute anything.

A kernel is this Python, in an empty folder, without the user's IPython settings. Variables that
change what JAX does (JAX_*, XLA_*, TF_*, …) are kept from it, since they would change what is
published. Simulated devices run code that LLVM did not optimise: the HLO, with its shardings,
collectives and memory, is the same, and a page takes a third less time.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from filelock import FileLock
from nbformat import NotebookNode

from bookkit.model.book import Book, Problem
from bookkit.run.normalise import normalise, normalise_text

STACK_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint numpy scipy ml_dtypes scikit-learn matplotlib "
    "treescope ipython ipykernel"
).split()
KEPT_STACKS = 3  # caches of earlier stacks to keep, so that going back costs nothing
AT_ONCE = 2  # chapters
KEPT_FROM_KERNELS = re.compile(
    r"(JAX|JAXLIB|XLA|TF|LIBTPU|TPU|NVIDIA|CUDA)_|PYTHON(WARNINGS|STARTUP|DEVMODE|HASHSEED)$"
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


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


def fingerprint(stack: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(stack, sort_keys=True).encode()).hexdigest()[:12]


def cache_path(book: Book) -> Path:
    return book.root / "_build" / "executed" / fingerprint(stack())


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


def from_cache(cache: Any, notebook: NotebookNode) -> NotebookNode | None:
    """The executed notebook, or None. What a killed run left half-written counts as missing."""
    try:
        _, executed = cache.merge_match_into_notebook(notebook)
    except (KeyError, ValueError, nbformat.reader.NotJSONError):
        return None
    return executed


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


# One chapter.


class CellFailed(Exception):
    """A cell of a page failed: where, and what it said."""

    def __init__(self, page: str, notebook: NotebookNode, index: int, said: str) -> None:
        line = notebook.metadata.get("source_map", [0] * (index + 1))[index]
        super().__init__(f"{page}.md:{line}: cell {index + 1} failed\n{said}")


def kernel_environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not KEPT_FROM_KERNELS.match(name)}
    if os.environ.get("BOOK_DEVICES") != "real":
        kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return {**kept, "IPYTHONDIR": str(folder)}


def new_client(notebook: NotebookNode, folder: Path, timeout: int, **hooks: Any) -> Any:
    """An nbclient whose kernel is this Python, whatever kernels the user has installed."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(AsyncKernelManager):
        launch = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f"]
        kernel_spec = KernelSpec(argv=[*launch, "{connection_file}"], language="python")

    cwd = folder / "empty"
    cwd.mkdir()
    manager = ThisPython(
        # Sockets are files, so nobody else on the machine can listen. Windows has only ports.
        transport="tcp" if sys.platform == "win32" else "ipc",
        connection_file=str(folder / "kernel.json"),
        kernel_name="python3",
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=timeout,
        startup_timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(cwd)}},
        **hooks,
    )
    client.owns_km = True  # end the kernel with the notebook
    return client


async def execute_notebook(page: str, notebook: NotebookNode, timeout: int) -> NotebookNode:
    """A copy of a notebook, executed and normalised. Raises CellFailed."""
    notebook, now = copy.deepcopy(notebook), 0

    def started(cell_index: int, **_: Any) -> None:
        nonlocal now
        now = cell_index

    with tempfile.TemporaryDirectory(prefix="book-") as folder:
        client = new_client(notebook, Path(folder), timeout, on_cell_start=started)
        try:
            await client.async_execute(env=kernel_environment(Path(folder, "ipython")))
        except Exception as error:  # a cell raised or took too long, or the kernel died
            said = normalise_text(ANSI.sub("", f"{type(error).__name__}: {error}")).strip()
            raise CellFailed(page, notebook, now, said) from None
    return normalise(notebook)


# All chapters.


def execute(book: Book, pages: Sequence[str] | None = None) -> dict[str, NotebookNode]:
    """Executed, normalised notebooks by page; runs only what the cache lacks.

    Raises Problem after the other pages are done and cached.
    """
    from jupyter_cache import get_cache

    every = book.chapters if pages is None else pages
    notebooks = {page: read_as_sphinx(book, page) for page in every}
    lock = book.root / "_build" / "executed.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):  # a second process waits, and then finds everything cached
        cache = get_cache(cache_path(book))
        done = {page: from_cache(cache, notebook) for page, notebook in notebooks.items()}
        missing = {page: notebooks[page] for page, found in done.items() if found is None}
        execute_all(book, cache, missing)
        done |= {page: from_cache(cache, notebook) for page, notebook in missing.items()}
        prune(book)
    return {page: executed for page, executed in done.items() if executed is not None}


def execute_all(book: Book, cache: Any, notebooks: Mapping[str, NotebookNode]) -> None:
    """Execute all, and keep what passes. Raises Problem with each cell that failed."""
    from jupyter_cache.base import CacheBundleIn

    timeout = int(book.config["execute"]["timeout"])
    failures: dict[str, str] = {}

    async def one(page: str, turn: asyncio.Semaphore) -> None:
        async with turn:
            start = time.perf_counter()
            try:
                executed = await execute_notebook(page, notebooks[page], timeout)
            except CellFailed as failed:
                failures[page] = str(failed)
            seconds = time.perf_counter() - start
        if page not in failures:
            about = {"execution_seconds": seconds}  # the name that myst-nb wants
            bundle = CacheBundleIn(executed, str(book.source(page)), data=about)
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
        outcome = "FAILED after" if page in failures else "executed in"
        print(f"{page}: {outcome} {seconds:.1f} s", flush=True)

    async def everything() -> None:
        turn = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(one(page, turn) for page in notebooks))

    in_thread(everything)
    if failures:
        said = [failures[page] for page in notebooks if page in failures]
        count = f"{len(said)} chapter" + "s" * (len(said) > 1)
        raise Problem("\n\n".join([*said, f"{count} failed; nothing was built."]))


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


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit execute", description=__doc__.split("\n")[0])
    options.add_argument(
        "pages", nargs="*", metavar="PAGE", help="such as book/01-mesh; default: all"
    )
    options.add_argument("--out", type=Path, metavar="DIR", help="write the outputs here, as text")
    chosen, book = options.parse_args(arguments), Book()
    pages = [re.sub(r"\.md$", "", page) for page in chosen.pages] or None
    unknown = set(pages or ()) - set(book.chapters)
    if unknown:
        raise Problem(f"No chapters: {', '.join(unknown)}. _toc.yml has {', '.join(book.chapters)}")
    executed = execute(book, pages)
    if chosen.out:
        write_outputs(executed, chosen.out)
