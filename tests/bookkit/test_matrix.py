"""The version matrix: what is recorded, what goes on after a failure, and what the page shows.

The matrix itself runs with `make matrix`; here stacks are made up.
"""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import load_chapter
from bookkit.model.claims import code_digest, ran_on
from bookkit.stacks import matrix
from bookkit.stacks.attempt import Checkout, Outcome
from bookkit.stacks.record import (
    MATRIX_PAGE,
    load_record,
    out_of_date,
    path_of,
    seconds_cell,
    summary_for_readme,
    version_cell,
    write_record,
)
from rules import BOOK

VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "flax": "0.12.8", "numpy": "2.4.6"}
PASSED = Outcome("notebooks/01-mesh.ipynb", "passed", 12.4, versions=VERSIONS)
FAILED = Outcome(
    "notebooks/02-variables.ipynb",
    "failed",
    3.6,
    cell=9,
    first="w = nnx.Linear(2, 3)",
    error="TypeError: no <such> thing\nmore",
    trace="Traceback",
    versions=VERSIONS,
)


@pytest.fixture
def book(tmp_path):
    """A book of two chapters with a page and a README to fill."""
    root = tmp_path / "book"
    (root / "book").mkdir(parents=True)
    for name in ("_config.yml", "README.md", "book/matrix.md", "requirements.in"):
        shutil.copyfile(BOOK.root / name, root / name)
    for name in ("01-mesh", "02-variables"):
        shutil.copyfile(BOOK.root / "book" / f"{name}.md", root / "book" / f"{name}.md")
    chapters = "chapters: [file: book/02-variables, file: book/matrix]"
    (root / "_toc.yml").write_text(f"format: jb-book\nroot: book/01-mesh\n{chapters}\n")
    return Book(root)


@pytest.fixture
def made_up(book, monkeypatch):
    """Stacks whose notebooks pass, but for `broken` and for `missing`, which has no Python."""
    trees = {"src": "1", "bookkit/stacks/notebook.py": "1"}
    monkeypatch.setattr(Checkout, "tree", lambda self, path: trees.get(path, path))

    @contextlib.contextmanager
    def checkout(book):
        yield Checkout(book.root, "abc1234", [])

    def prepare(book, stack, copy):
        if stack.name == "py313":
            raise Problem("Python 3.13 was not found: install it")
        folder = book.root / "_build" / "matrix" / stack.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "installed.txt").write_text("x")
        return folder

    ran = []

    def in_environment(book, copy, name, environment, out):
        ran.append((environment.name, name))
        if environment.name == "newest" and "02" in name:
            return dataclasses.replace(FAILED)
        made = nbformat.read(BOOK.notebook(f"book/{Path(name).stem}"), 4)
        code = [cell for cell in made.cells if cell.cell_type == "code"]
        floor = environment.name == "floor"
        for at, shown in {1: "[Gloo]" if floor else "[Mesh]", 2: f"jax 0.{10 + floor}.2)"}.items():
            code[at].outputs = [nbformat.v4.new_output("stream", name="stdout", text=shown)]
        nbformat.write(made, out / "run.ipynb")
        return dataclasses.replace(PASSED, name=name)

    monkeypatch.setattr(matrix, "Book", lambda: book)
    monkeypatch.setattr(matrix, "checkout", checkout)
    monkeypatch.setattr(matrix, "stack_environment", prepare)
    monkeypatch.setattr(matrix, "in_environment", in_environment)
    return ran


def run(*arguments):
    with pytest.raises(Problem) as problem:
        matrix.main(list(arguments))
    return str(problem.value)


def test_the_other_stacks_go_on_after_a_failure_and_without_a_python(made_up, book, capsys):
    said = run("--only", "floor", "pinned", "py313", "newest")
    assert said.splitlines()[1:] == ["py313 did not run", "newest: notebooks/02-variables.ipynb"]
    assert len(made_up) == 6
    out, err = capsys.readouterr()
    assert "py313: Python 3.13 was not found: install it" in err
    assert "newest: notebooks/02-variables.ipynb FAILED, cell 9, after 4 s" in out
    assert "TypeError: no <such> thing" in out
    data = load_record(book)
    assert list(data) == ["floor", "pinned", "newest"]
    digest = code_digest(load_chapter(book.source("book/01-mesh")).code)
    assert data["floor"]["notebooks"]["01-mesh"] == {"seconds": 12, "code": digest}
    assert "code" not in data["newest"]["notebooks"]["02-variables"]
    assert [one.stack for one in ran_on(book, "book/01-mesh")] == ["floor", "pinned", "newest"]
    assert [one.stack for one in ran_on(book, "book/02-variables")] == ["floor", "pinned"]
    assert data["newest"]["notebooks"]["02-variables"]["failed"] == 9
    assert data["newest"]["commit"] == "abc1234" and data["newest"]["versions"] == VERSIONS


def test_outputs_that_differ_from_the_pinned_ones_are_listed_by_cell(made_up, book, capsys):
    run("--only", "floor", "pinned", "newest")
    notebook = nbformat.read(BOOK.notebook("book/01-mesh"), 4)
    code = [at for at, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    data = load_record(book)
    assert data["floor"]["differs"]["01-mesh"] == [code[1]]
    assert data["newest"]["differs"] == {} and "differs" not in data["pinned"]
    assert "+[Gloo]" in capsys.readouterr().out


def test_a_run_that_was_cut_off_goes_on(made_up, book):
    run("--only", "floor", "newest")
    del made_up[:]
    run("--only", "floor", "newest")
    assert made_up == [("newest", "notebooks/02-variables.ipynb")]  # what failed is tried again
    del made_up[:]
    run("--only", "newest", "--fresh")
    assert len(made_up) == 2
    (book.root / "_build" / "matrix" / "newest" / "installed.txt").unlink()
    record = matrix.result_path(book, "floor", "notebooks/01-mesh.ipynb").with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"key": "of another notebook"}))
    del made_up[:]
    matrix.main(["--only", "floor"])
    assert made_up == [("floor", "notebooks/01-mesh.ipynb")]


def test_a_chapter_that_is_only_tried_is_not_recorded(made_up, book):
    matrix.main(["--only", "floor", "--chapter", "01-mesh"])
    assert made_up == [("floor", "notebooks/01-mesh.ipynb")] and load_record(book) == {}
    assert "No chapters: book/99" in run("--only", "floor", "--chapter", "99")


def test_an_issue_names_the_first_cell_that_fails(tmp_path):
    path = tmp_path / "issue.txt"
    matrix.write_issue(path, [PASSED])
    assert not path.exists()
    matrix.write_issue(path, [PASSED, FAILED, dataclasses.replace(FAILED, name="notebooks/03.ipynb")])
    title, *body = path.read_text().splitlines()
    assert title == "notebooks/02-variables.ipynb, cell 9 is the first that fails with jax 0.10.2."
    assert "TypeError: no <such> thing" in "\n".join(body) and "2 of 3 notebooks fail" in body[-1]


def test_colab_runs_every_language_and_the_others_the_source():
    assert len(matrix.notebooks_to_run(BOOK, matrix.STACKS["floor"], [])) == len(BOOK.chapters)
    both = matrix.notebooks_to_run(BOOK, matrix.STACKS["colab"], ["01-mesh"])
    assert both == ["notebooks/01-mesh.ipynb", "notebooks/zh-TW/01-mesh.ipynb"]


def test_without_pins_means_the_books_subject_without_versions():
    found = matrix.subject((BOOK.root / "requirements.in").read_text("utf-8"))
    assert set(found) >= set("jax flax optax orbax-checkpoint scikit-learn matplotlib".split())
    assert all(re.fullmatch(r"[\w-]+", name) for name in found) and "jupyter-book" not in found


# The page.


def test_page_and_readme_agree_with_the_record():
    assert load_record(BOOK), "book/matrix.json is missing: run `make matrix`"
    stale = out_of_date(BOOK)
    assert not stale, f"{', '.join(stale)}: run `bookkit matrix-page` and commit"


# New since the matrix was last run; `make matrix` takes them in, and then they leave this list.
NOT_YET_RUN = {"quickstart", "strategies", "matmuls", "linen", "10-autodiff", "11-processes"} | {
    "messages-meshes", "messages-types", "messages-shard-map", "messages-compiler", "messages-flax",
    "messages-checkpoints", "messages-processes", "silent-failures", "older-code", "cheat-sheet",
    "memory", "checkpoints-in-depth", "failed-loads", "choosing-tables", "annotate-third-party", "moving-to-explicit", "fsdp-in-depth",
    "mesh-order", "fsdp-bytes", "train-checks", "restarts", "three-modes", "dropout", "explicit-products", "constraints", "fsdp-two-axes", "any-module", "find-replication", "flax-layers", "collectives", "init-other-models",
    "explicit-gradients", "activations", "linen-fsdp", "fsdp-overlap",
    "process-failures", "process-restarts",
}  # fmt: skip


def test_the_pages_title_is_true():
    """Every chapter runs on five stacks, and in Colab in every language."""
    title = BOOK.source(MATRIX_PAGE).read_text("utf-8").splitlines()[0]
    assert title == "# Every chapter runs on five stacks" and len(matrix.LOCAL) == 5
    data = load_record(BOOK)
    for name in matrix.LOCAL:
        assert name in data, f"book/matrix.json says nothing of {name}: run `make matrix`"
        found = data[name]["notebooks"]
        names = {
            path.removeprefix("notebooks/").removesuffix(".ipynb")
            for path in matrix.notebooks_to_run(BOOK, matrix.STACKS[name], [])
        }
        waiting = {one for one in names if one.rsplit("/", 1)[-1] in NOT_YET_RUN}
        assert set(found) == names - waiting, f"{name}: other notebooks were run than the book has"
        failed = [one for one, about in found.items() if "failed" in about]
        assert not failed, f"{name}: {failed} failed when the matrix was last run"


def test_every_stack_is_introduced_on_the_page():
    text = BOOK.source(MATRIX_PAGE).read_text("utf-8")
    assert re.findall(r"^- `(\w+)`: Python ([\d.]+)", text, re.M) == [
        (name, matrix.STACKS[name].python) for name in matrix.LOCAL
    ]


RECORD = {
    "date": "2026-11-20",
    "commit": "abc1234",
    "before": {},
    "versions": VERSIONS,
    "notebooks": {"01-mesh": {"seconds": 4}, "02-variables": {"seconds": 3}},
}


def test_a_changed_record_makes_page_and_readme_out_of_date(book):
    data = {"floor": copy.deepcopy(RECORD)}
    assert write_record(book, data) and out_of_date(book) == []
    data["floor"]["notebooks"]["01-mesh"]["seconds"] = 987
    path_of(book).write_text(json.dumps(data, indent=1))
    assert "book/matrix.md" in out_of_date(book)
    assert write_record(book, data) == ["book/matrix.json", "book/matrix.md"]
    assert "<td>987</td>" in book.source("book/matrix").read_text()
    data["floor"]["versions"]["jax"] = "0.99"
    assert "README.md" in write_record(book, data)


def test_a_failed_cell_is_shown_and_its_error_is_text():
    shown = seconds_cell({"seconds": 4, "failed": 9, "error": 'no "<such>" thing'})
    assert shown == '<span title="no &quot;&lt;such&gt;&quot; thing">✗ cell 9</span>'
    stack = RECORD | {"notebooks": {"01-mesh": {"seconds": 4}, "02-variables": {"failed": 9}}}
    assert "| 1 of 2 pass | 2026-11-20 |" in summary_for_readme(BOOK, {"floor": stack})


def test_a_page_without_its_marks_is_refused(book):
    page = book.source("book/matrix")
    page.write_text(page.read_text().replace("<!-- end of seconds -->\n", ""))
    with pytest.raises(Problem, match="matrix.md needs the lines .*seconds"):
        write_record(book, {"floor": RECORD})


def test_in_colab_the_release_that_was_replaced_is_crossed_out():
    stack = {"versions": {"jax": "0.11.2", "numpy": "2.1.3"}, "before": {"jax": "0.7.2", "numpy": "2.1.3"}}
    assert version_cell(stack, "jax") == "<s>0.7.2</s> 0.11.2"
    assert version_cell(stack, "numpy") == "2.1.3" and version_cell(stack, "scipy") == "–"
