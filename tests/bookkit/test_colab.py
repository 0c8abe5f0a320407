"""Colab: its package lists, the stand-in's parts, and where each Colab button leads.

The notebooks themselves run there with `make colab`, which takes half an hour.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from bookkit.model.addresses import meaning_of_url
from bookkit.model.book import Book, Problem
from bookkit.model.package import Wheel, known_files, unlike_pin
from bookkit.stacks import colab
from bookkit.stacks.attempt import Checkout, Outcome, checkout, clean_environment, run_notebook
from bookkit.stacks.environments import find_python, make_environment
from bookkit.stacks.notebook import at_site, pins, unlike_colab
from bookkit.stacks.notebook import main as run_one
from rules import BOOK

LISTS = sorted(colab.LISTS.glob("*.txt"))
SETUP = (BOOK.root / "book" / "cells" / "setup.py").read_text("utf-8")


def packages(path):
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_a_list_says_when_it_was_published_and_where(path):
    head = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    assert colab.python_of(path) == "3.13" and re.search(r"(August|September) 2026", head[0])
    assert "https://github.com/googlecolab/backend-info" in head[1]
    found = packages(path)
    for name in "jax jaxlib flax optax orbax-checkpoint numpy ipykernel nbclient pip".split():
        assert re.fullmatch(r"[\w.]+", found[name]), name
    assert any(line.startswith(f"# The {len(found)} lines") for line in head)


def test_the_stand_in_starts_from_an_older_jax_beside_its_cuda_plugin():
    found = packages(colab.list_path(BOOK, colab.NEWEST_GPU_LIST))
    assert found["jax"] == found["jax-cuda12-plugin"] == found["jax-cuda12-pjrt"] == "0.7.2"
    assert (found["flax"], found["numpy"]) == ("0.11.2", "2.1.3")


WITHOUT_OTHERS = """
import importlib.metadata, re, sys
known = {re.sub("[-_.]+", "-", name).lower() for name in sys.argv[1:]}
for module, names in importlib.metadata.packages_distributions().items():
    if not known & {re.sub("[-_.]+", "-", name).lower() for name in names}:
        sys.modules[module] = None  # cannot be imported
import bookkit.stacks.notebook
"""


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_what_runs_a_notebook_needs_nothing_that_colab_lacks(path):
    command = [sys.executable, "-c", WITHOUT_OTHERS, "bookkit", *packages(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_list_that_is_not_there():
    with pytest.raises(Problem, match="no list tpu-1999.*gpu-2026-08"):
        colab.list_path(BOOK, "tpu-1999")


# Buttons.


@pytest.mark.parametrize("language", BOOK.languages, ids=lambda language: language.code)
@pytest.mark.parametrize("page", BOOK.chapters)
def test_a_button_opens_its_own_notebook_in_its_own_language(page, language):
    path = BOOK.notebook(page, language)
    first = nbformat.read(path, 4).cells[0].source
    buttons = re.findall(r"colab-badge\.svg\)\]\(([^)]+)\)", first)
    assert len(buttons) == 1, f"{path}: one Colab badge in the first cell"
    assert meaning_of_url(buttons[0], BOOK).name == path.relative_to(BOOK.root).as_posix()
    owner = BOOK.repo.removeprefix("https://github.com/")
    assert buttons[0] == (
        f"https://colab.research.google.com/github/{owner}/blob/{BOOK.ref}/notebooks/"
        f"{language.path}{Path(page).name}.ipynb"
    )
    assert buttons[0] == BOOK.colab_url(page, language)  # what the site's pages use
    assert path.is_file()


# What the setup cell has to leave behind.

BEFORE = {"jax": "0.7.2", "flax": "0.11.2", "numpy": "2.1.3", "jax-cuda12-plugin": "0.7.2"}
WANTED = {"jax": "0.11.2", "flax": "0.12.12"}
AFTER = {**WANTED, "numpy": "2.1.3"}


def test_the_pins_of_the_setup_cell_are_read_from_a_notebook():
    notebook = nbformat.read(BOOK.notebook("book/01-mesh"), 4)
    found = pins(notebook)
    assert set(found) == {"jax", "jaxlib", "flax"}
    assert all(f"{name}=={version}" in SETUP for name, version in found.items())


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({}, None),
        ({"numpy": "2.2.0"}, "numpy was 2.1.3 and is 2.2.0"),
        ({"jax": "0.12.0"}, "jax is 0.12.0, the setup cell installs 0.11.2"),
        ({"flax": "0.11.2"}, "flax is 0.11.2"),
        ({"jax-cuda12-plugin": "0.7.2"}, "jax-cuda12-plugin is still there"),
    ],
)
def test_what_the_setup_cell_left_is_compared(change, complaint):
    problems = unlike_colab(BEFORE, AFTER | change, WANTED)
    assert [complaint in problem for problem in problems] == ([True] if complaint else [])


def test_a_colab_that_is_new_enough_is_left_as_it_is():
    assert unlike_colab(AFTER, AFTER, {"jax": "0.11.1"}) == []


def test_one_line_of_a_notebook_is_changed_and_no_other():
    before = nbformat.read(BOOK.notebook("book/01-mesh"), 4)
    after = at_site(nbformat.read(BOOK.notebook("book/01-mesh"), 4), "file:///site/")
    lines = [
        (one, other)
        for cell, changed in zip(before.cells, after.cells)
        for one, other in zip(cell.source.split("\n"), changed.source.split("\n"), strict=True)
        if one != other
    ]
    assert lines == [(f'SITE = "{BOOK.site}"', 'SITE = "file:///site/"')]
    before.cells[1].source = "import jax"
    with pytest.raises(Problem, match="no line SITE"):
        at_site(before, "file:///site/")


# A changed wheel.

SENTENCE = (
    "AssertionError: Nothing was installed: file:///x/wheels/meshscope-0.1.0-py3-none-any.whl "
    "is not the wheel that this notebook was made with. Open it anew"
)


@pytest.mark.parametrize(
    "outcome, complaint",
    [
        (Outcome("n", "failed", cell=2, error=SENTENCE, before=BEFORE, versions=BEFORE), ""),
        (
            Outcome("n", "passed", before=BEFORE, versions=AFTER),
            "installed a wheel that somebody had changed",
        ),
        (
            Outcome("n", "failed", error="CalledProcessError: pip", before=BEFORE, versions=BEFORE),
            "without saying so: Called",
        ),
        (
            Outcome("n", "failed", error=SENTENCE, before=BEFORE, versions=AFTER),
            "after installing: .*0.7.2.*, then .*0.11.2",
        ),
    ],
    ids=["refused", "installed", "silent", "late"],
)
def test_how_a_changed_wheel_is_met(outcome, complaint):
    found = colab.not_refused(outcome)
    assert re.search(complaint, found) and bool(found) == bool(complaint)


# The clone that runs, and the site beside it.


def git(folder, *command):
    about = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(["git", *about, *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "root"
    (root / "src").mkdir(parents=True)
    (root / "src" / "x.py").write_text("first")
    (root / ".gitignore").write_text("*.pyc\n")
    shutil.copyfile(BOOK.root / "_config.yml", root / "_config.yml")
    git(root, "init", "-q", "-b", "other")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    return Book(root)


def test_what_runs_is_the_commit_and_not_what_was_written_since(repository):
    (repository.root / "src" / "x.py").write_text("second, not committed")
    with checkout(repository) as copy:
        assert (copy.path / "src" / "x.py").read_text() == "first"
        assert copy.modified == ["src/x.py"]


def test_the_site_beside_the_clone_serves_the_wheel_of_the_commit(repository):
    for path in known_files(BOOK.root):
        target = repository.root / path.relative_to(BOOK.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    git(repository.root, "add", ".")
    git(repository.root, "commit", "-q", "-m", "two")
    (repository.root / "src" / "meshscope" / "_hlo.py").write_text("not committed")
    with checkout(repository) as copy:
        [good], [changed] = (
            list((site / "wheels").iterdir()) for site in (copy.site, copy.other_site)
        )
        assert unlike_pin(SETUP, Wheel(good.name, good.read_bytes())) == ""
        assert changed.name == good.name
        assert unlike_pin(SETUP, Wheel(changed.name, changed.read_bytes())) != ""
        assert copy.written() == ""


def test_whatever_is_written_in_the_clone_is_noticed(repository):
    with checkout(repository) as copy:
        assert copy.written() == ""
        (copy.path / "src" / "x.pyc").write_text("ignored files too")
        assert "src/x.pyc" in copy.written()


def test_a_fresh_copy_is_cheap_and_the_first_environment_stays_as_it_was(tmp_path):
    first = tmp_path / "environment"
    (first / "lib").mkdir(parents=True)
    (first / "lib" / "jax.py").write_text("old")
    (first / "python").symlink_to(sys.executable)
    with colab.fresh_copy(first) as python:
        copy = python.parent.parent
        assert (copy / "lib" / "jax.py").stat().st_ino == (first / "lib" / "jax.py").stat().st_ino
        assert (copy / "python").is_symlink()
        (copy / "lib" / "jax.py").unlink()  # as pip does
        (copy / "lib" / "jax.py").write_text("new")
    assert (first / "lib" / "jax.py").read_text() == "old" and not copy.exists()


def test_a_notebook_meets_nobodys_settings(monkeypatch, tmp_path):
    for name in (
        "JAX_PLATFORMS",
        "XLA_FLAGS",
        "BOOK_DEVICES",
        "PYTHONPATH",
        "GIT_DIR",
        "MAKEFLAGS",
    ):
        monkeypatch.setenv(name, "mine")
    found = clean_environment(tmp_path / "home", tmp_path / "bin")
    assert "mine" not in found.values()
    assert found["HOME"] == str(tmp_path / "home")
    assert found["PATH"].startswith(f"{tmp_path / 'bin'}{os.pathsep}")


# One notebook.


def notebook(path, *cells):
    made = [nbformat.v4.new_markdown_cell("# A title")]
    made += [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


def outcome_of(command, tmp_path, seconds=60):
    result = tmp_path / "result.json"
    command = [part if part != "RESULT" else str(result) for part in command]
    return run_notebook(command, "notebooks/x.ipynb", result, os.environ, BOOK.root, seconds)


def test_a_failing_cell_is_named_with_the_first_lines_of_its_error(tmp_path):
    path = notebook(tmp_path / "x.ipynb", "a = 1", "# why\nassert a == 2, 'a is %s' % a")
    command = [sys.executable, "-m", "bookkit", "run-notebook", str(path), "--result", "RESULT"]
    outcome = outcome_of(command, tmp_path)
    assert (outcome.passed, outcome.cell, outcome.first) == (False, 3, "# why")
    said = outcome.says("floor")
    assert said.startswith("floor: notebooks/x.ipynb FAILED, cell 3, after ")
    assert "AssertionError: a is 1" in said and "jax" in outcome.versions


def test_a_notebook_that_passes_is_kept_with_its_outputs(tmp_path):
    path = notebook(tmp_path / "x.ipynb", "import os\nprint(os.listdir())")
    executed = tmp_path / "executed.ipynb"
    assert run_one([str(path), "--result", str(tmp_path / "r"), "--executed", str(executed)]) == 0
    assert (
        nbformat.read(executed, 4).cells[1].outputs[0].text == "[]\n"
    )  # alone, in an empty folder


HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
json.dump({"status": "running", "cell": 7, "versions": {"jax": "1"}}, open(sys.argv[1], "w"))
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_a_hang_is_ended_with_all_it_started_and_names_its_cell(tmp_path):
    started = time.monotonic()
    outcome = outcome_of([sys.executable, "-c", HANGS, "RESULT"], tmp_path, seconds=2)
    assert time.monotonic() - started < 30
    assert (outcome.status, outcome.cell) == ("failed", 7) and "still running" in outcome.error
    child = int(re.search(r"child (\d+)", outcome.trace)[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_is_stopped_stops_what_it_started(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from bookkit.stacks.attempt import *\n"
        "from bookkit.__main__ import end_with_order\n"
        "end_with_order(); here = Path(sys.argv[1])\n"
        f"sleep = [sys.executable, '-c', {HANGS!r}, here / 'result']\n"
        "run_notebook(sleep, 'x', here / 'result', os.environ, here, 600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=BOOK.root)
    while not (tmp_path / "result").exists():
        assert run.poll() is None
        time.sleep(0.1)
    started = psutil.Process(run.pid).children(recursive=True)
    run.terminate()
    assert run.wait(30) == 143 and len(started) >= 2
    assert not [one for one in started if one.is_running() and one.status() != "zombie"]


def test_a_process_that_dies_is_a_failure_and_its_last_words_are_shown(tmp_path):
    code = "print('Check failed: threads'); import os; os._exit(134)"
    outcome = outcome_of([sys.executable, "-c", code, "RESULT"], tmp_path)
    assert not outcome.passed and "status 134" in outcome.error
    assert "Check failed: threads" in outcome.says("floor")


def test_a_process_that_writes_success_and_then_fails_has_not_passed(tmp_path):
    code = "import sys; open(sys.argv[1], 'w').write('{\"status\": \"passed\"}'); sys.exit(3)"
    assert not outcome_of([sys.executable, "-c", code, "RESULT"], tmp_path).passed


# Interpreters and environments.


def test_an_interpreter_is_tried_before_it_is_taken(tmp_path, monkeypatch):
    (tmp_path / "python3.99").write_text("#!/bin/sh\nexit 127\n")  # a shim of pyenv
    (tmp_path / "python3.99").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    with pytest.raises(Problem, match=r"Python 3.99 was not found.*uv python install 3.99"):
        find_python("3.99")
    usual = tmp_path / "pyenv" / "versions" / "3.99.1" / "bin"
    usual.mkdir(parents=True)
    (usual / "python").write_text(f"#!/bin/sh\necho 3.99 {usual}/python\n")
    (usual / "python").chmod(0o755)
    assert find_python("3.99") == f"{usual}/python"


def test_an_environment_is_complete_or_made_again(tmp_path):
    folder, calls = tmp_path / "stack", []

    def broken(python):
        raise Problem("no network")

    for _ in range(2):
        with pytest.raises(Problem, match="no network"):
            make_environment(folder, lambda: sys.executable, "a", broken)
    for key in ("a", "a", "b"):
        make_environment(folder, lambda: sys.executable, key, calls.append)
    assert calls == [folder / "environment" / "bin" / "python"] * 2


def test_an_image_needs_docker(monkeypatch):
    monkeypatch.setattr(colab.shutil, "which", lambda name: None)
    with pytest.raises(Problem, match="needs docker"):
        colab.main(["--image", "x"])


def test_in_a_container_the_clone_is_read_only_and_fresh_each_time(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(colab, "run_notebook", lambda command, *rest: ran.append(command))
    copy = Checkout(tmp_path / "book", "abc", [])
    colab.in_container(BOOK, copy, "notebooks/01-mesh.ipynb", "image", tmp_path)
    line = " ".join(ran[0])
    assert line.startswith("docker run --rm ") and f"--volume {tmp_path}/book:/book:ro" in line
    assert f"--volume {copy.site}:/site:ro" in line and "--site file:///site/" in line
    assert (
        "--entrypoint python3 image bookkit/src/bookkit run-notebook /book/notebooks/01-mesh.ipynb"
        in line
    )
    assert "--colab" in line


def test_notebooks_are_those_of_all_languages_or_the_ones_named():
    assert len(colab.notebooks_named(BOOK)) == len(BOOK.chapters) * len(BOOK.languages)
    assert colab.notebooks_named(BOOK, ["notebooks/zh-TW/01-mesh.ipynb"]) == [
        "notebooks/zh-TW/01-mesh.ipynb"
    ]
    with pytest.raises(Problem, match="No notebook of this book: x.ipynb"):
        colab.notebooks_named(BOOK, ["x.ipynb"])
