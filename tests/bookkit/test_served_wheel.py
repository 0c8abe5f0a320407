"""The wheels that the site serves are those that its notebooks ask for, or it is not built.

How they are built and installed is tested in tests/companion/test_wheels.py.
"""

import shutil

import pytest

from bookkit.model.book import Book, Problem
from bookkit.site.build import wheels_of
from toy import ROOT


def test_a_notebook_that_asks_for_another_wheel_is_named(tmp_path):
    for name in ("src", "companion", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    companion = wheels_of(Book(tmp_path))[1]
    notebook = tmp_path / "notebooks" / "01-mesh.ipynb"
    notebook.write_text(notebook.read_text("utf-8").replace(companion.sha256, "0" * 64), "utf-8")
    with pytest.raises(Problem, match=r"asked for by notebooks/01-mesh\.ipynb: run `make sync`"):
        wheels_of(Book(tmp_path))
