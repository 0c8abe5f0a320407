"""What the book does on machines that are not ours: their CI, containers, scheduled checks."""

import json
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from bookkit.__main__ import VERBS
from toy import ROOT

# `pytest --nbmake notebooks/` says what failed, and on what.


def notebook(path, *cells):
    made = [nbformat.v4.new_markdown_cell("# A page"), *map(nbformat.v4.new_code_cell, cells)]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)


def nbmake(folder, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
    )
    return done.returncode, done.stdout.split("the chapters on this installation")[-1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("01-mesh", "deeper/01a-more", "zh-TW/01-mesh"):
        notebook(tmp_path / "notebooks" / f"{name}.ipynb", "x = 1")
    shutil.copyfile(ROOT / "notebooks" / "conftest.py", tmp_path / "notebooks" / "conftest.py")
    return tmp_path


def test_a_failing_chapter_is_told_in_one_line_with_the_versions(folder):
    notebook(folder / "notebooks" / "02-bad.ipynb", "x = 1", "y = 2\nassert x == y, 'not equal'")
    notebook(folder / "notebooks" / "zh-TW" / "02-bad.ipynb", "assert False")
    status, said = nbmake(folder, "notebooks/", GITHUB_ACTIONS="true")
    assert status == 1
    assert "FAILED 02-bad.ipynb, cell 3: AssertionError: not equal\n    assert x == y, 'not" in said
    assert "2 of 3 notebooks passed" in said and "zh-TW" not in said
    assert re.search(r"^Python 3\.\d+\.\d+ \(", said, re.M)
    assert re.search(r"^jax \d.*, jaxlib \d.*, flax \d.*, numpy \d", said, re.M)
    assert re.search(r"^8 cpu devices", said, re.M)
    assert "::error title=chapter failed::02-bad.ipynb, cell 3: AssertionError" in said


def test_a_broken_jax_is_named(folder):
    notebook(folder / "notebooks" / "02-bad.ipynb", "import jax")
    (folder / "broken" / "jax").mkdir(parents=True)
    (folder / "broken" / "jax" / "__init__.py").write_text("raise ImportError('no libxla')\n")
    status, said = nbmake(folder, "notebooks/", PYTHONPATH=str(folder / "broken"))
    assert status == 1 and "02-bad.ipynb, cell 2: ImportError: no libxla\n    import jax" in said
    assert "`import jax` and asking for devices failed: ImportError: no libxla" in said


def test_another_language_runs_when_its_folder_is_named(folder):
    notebook(folder / "notebooks" / "zh-TW" / "02-bad.ipynb", "1 / 0")
    status, said = nbmake(folder, "notebooks/zh-TW")
    assert status == 1 and "FAILED zh-TW/02-bad.ipynb, cell 2: ZeroDivisionError" in said
    status, said = nbmake(folder, "notebooks/")
    assert status == 0 and "2 of 2 notebooks passed" in said


# Settings that other programs read.


def steps_called(name):
    """The steps of .ci/run that a workflow names, in its order."""
    text = (ROOT / ".github" / "workflows" / name).read_text("utf-8")
    named = re.findall(r"(?:\.ci/run|- steps:|step: \[) ?([a-z, -]+)", re.sub(r"#.*", "", text))
    return [step for line in named for step in re.findall(r"[a-z-]+", line)]


def steps_of(*which):
    done = subprocess.run(
        [ROOT / ".ci" / "run", "--list", *which], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_there_is_one_ci():
    """The pull-request workflow calls every step of .ci/run, in its order; the longer ones run later."""
    assert steps_called("ci.yml") == steps_of()
    assert set(steps_of("nightly")) <= set(steps_called("nightly.yml"))
    assert steps_called("weekly.yml") == steps_of("weekly")


def test_containers_and_binder_use_the_pinned_python():
    python = (ROOT / ".python-version").read_text().strip()
    assert (ROOT / "runtime.txt").read_text().strip() == f"python-{python}"
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    assert container["image"].endswith(f":{python}")
    for command in re.findall(r"make ([a-z-]+)", json.dumps(container)):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text("utf-8"), re.M), command
    own = [".", "./bookkit", "./companion"]  # Binder, too
    assert (ROOT / "requirements.txt").read_text().splitlines()[-3:] == own


def test_what_the_run_page_tells_of_make_and_bookkit_is_there():
    """For Windows, and for machines without make."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.M))
    page = (ROOT / "book" / "reference" / "run.md").read_text("utf-8")
    assert set(re.findall(r"`make ([a-z-]+)`", page)) <= targets
    assert set(re.findall(r"`python -m bookkit ([\w-]+)", page)) <= set(VERBS)
