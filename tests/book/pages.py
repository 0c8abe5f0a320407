"""Run the code cells of a page of the book in this process, and keep what they leave.

    with run("02-variables") as page:
        page.held                  # a variable, as the last cell of the page leaves it
        page.after("moved").held   # the same, as the cell tagged id-moved left it
    with run("02-variables", until="moved") as page:
        page.model                 # an object that later cells change in place

A page starts with no mesh set and JAX's usual settings, in an empty folder. What it changes for the
whole process is undone at the end of the `with` block.
"""

import contextlib
import functools
import linecache
import logging
import os
import sys
import tempfile
import tomllib
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jupytext
import pytest
from flax import nnx

compiled_for_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="it is the CPU compiler that chooses this"
)
BOOK = Path(__file__).parents[2] / "book"
NO_SETUP = {"quickstart"}  # it is a program for JAX alone, and its first cell makes the devices


class Cell(NamedTuple):
    id: str
    source: str
    tags: list

    @property
    def in_view(self):
        """Is its code seen without opening a fold? The setup cell is not part of the lesson."""
        return not {"setup", "hide-cell"} & set(self.tags)


class Page:
    """The variables of a page that ran, as attributes."""

    def __init__(self, variables, states):
        self.variables, self._states = variables, states

    def __getattr__(self, name):
        if name in self.variables:
            return self.variables[name]
        raise AttributeError(f"the page has no variable {name}")

    def after(self, id):
        """The names as they were bound after this cell. What a name stands for may have changed."""
        return types.SimpleNamespace(**self._states[id])


def source_of(name):
    """The file of a page, in whichever folder of the book it is."""
    (path,) = BOOK.rglob(f"{name}.md")
    return path


@functools.cache
def cells_of(name):
    """The code cells of a page, each with the id that its tag id-… gives it, or else a number."""
    notebook = jupytext.read(source_of(name))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells = []
    for number, cell in enumerate(code, 1):
        tags = cell.metadata.get("tags", [])
        ids = [tag.removeprefix("id-") for tag in tags if tag.startswith("id-")]
        cells.append(Cell((ids or [str(number)])[0], cell.source, tags))
    return cells


def pages_with_code():
    """The names of the pages that are notebooks."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted(BOOK.rglob("*.md"))}
    return [name for name, text in texts.items() if "\nkernelspec:" in text[:1000]]


@functools.cache
def tables():
    """The table of each page in tests/pages: its planted faults, and wrong answers to exercises."""
    folder = BOOK.parent / "tests" / "pages"
    paths = sorted(folder.glob("*.toml"))
    return {path.stem: tomllib.loads(path.read_text("utf-8")) for path in paths}


def check_exercise(page, name, exercise):
    """The check of an exercise says "not yet" to the stub and a wrong answer, else "correct"."""
    cells = {tag: cell.source for cell in cells_of(name) for tag in cell.tags}
    wrong = tables()[name]["exercise"][exercise]["wrong"]
    answers = [
        (cells[f"exercise-{exercise}"], "not yet"),
        (wrong, "not yet"),
        (cells[f"solution-{exercise}"], "correct"),
    ]
    for answer, said in answers:
        variables = dict(page.variables)
        exec(answer, variables)
        check, given = (variables[f"{what}_{exercise}"] for what in ("check", "answer"))
        assert check(given).startswith(said), f"{check(given)!r} to {answer}"


def exercises_of(name):
    """The names of a page's exercises."""
    tags = [tag for cell in cells_of(name) for tag in cell.tags]
    return [tag.removeprefix("exercise-") for tag in tags if tag.startswith("exercise-")]


def run_again(page, name, id):
    """Run one cell once more, with the page's variables, which stay as they are."""
    (cell,) = [cell for cell in cells_of(name) if cell.id == id]
    exec(cell.source, dict(page.variables))


def with_fault(cells, find, replace):
    """The cells with one line changed, which must stand on the page exactly once."""
    count = sum(cell.source.count(find) for cell in cells)
    assert count == 1, f"{find!r} stands {count} times in the code of the page, not once"
    return [cell._replace(source=cell.source.replace(find, replace)) for cell in cells]


@contextlib.contextmanager
def run(name, until=None, cells=None):
    """Run a page, or only as far as the cell `until`, or with other cells."""
    cells = cells or cells_of(name)
    if until:
        cells = cells[: 1 + [cell.id for cell in cells].index(until)]
    module = types.ModuleType("page_" + name.replace("-", "_"))
    states = {}
    with undone(), importable(module):
        for cell in cells:
            file = f"<{name}, cell {cell.id}>"  # named in tracebacks, which show the lines
            linecache.cache[file] = len(cell.source), None, cell.source.splitlines(True), file
            execute(cell, file, module.__dict__)
            states[cell.id] = dict(module.__dict__)
        yield Page(module.__dict__, states)


@contextlib.contextmanager
def importable(module):
    """Dataclasses look for their module. Afterwards nothing keeps its arrays and compiled programs."""
    earlier = sys.modules.get(module.__name__)  # the same page, of a fixture, which goes on
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if earlier:
            sys.modules[module.__name__] = earlier


def execute(cell, file, variables):
    """Run a cell. An error remembers in which cell it was raised."""
    try:
        exec(compile(cell.source, file, "exec"), variables)
    except Exception as error:
        error.cell = cell.id
        raise


@contextlib.contextmanager
def undone():
    """Afterwards the mesh, JAX's and Flax's settings, the environment and the folder are as before."""
    settings = dict(jax.config.values)
    unraisable, disabled = sys.unraisablehook, logging.root.manager.disable
    with (
        jax.set_mesh(None),
        nnx.use_eager_sharding(True),
        mock.patch.dict(os.environ),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
    ):
        try:
            yield
        finally:
            sys.unraisablehook = unraisable
            logging.disable(disabled)
            for name, value in settings.items():
                if jax.config.values[name] != value:
                    jax.config.update(name, value)
