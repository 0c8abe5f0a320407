"""Notebooks and shared cells are made from book/, the same bytes each time."""

import shutil

import nbformat
import pytest

from bookkit.model.book import Book, Problem
from bookkit.model.entries import LIST_BEGINS, LIST_ENDS
from bookkit.model.package import Wheel
from bookkit.words import sync
from toy import FRONT, ROOT

BOOK = Book()
HEAD = FRONT + "\n# A claim\n"
CELL = """
```{code-cell} ipython3
:cellView: form
:tags: [setup, hide-cell]

old = 1
```

```{code-cell} ipython3
own = 3
```
"""


@pytest.fixture
def book(tmp_path):
    shutil.copyfile(ROOT / "_config.yml", tmp_path / "_config.yml")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/00-intro\nchapters: [file: book/01-toy]\n"
    )
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "00-intro.md").write_text("# Intro\n")
    (tmp_path / "book" / "01-toy.md").write_text(HEAD + CELL)
    return Book(tmp_path)


def test_pages_get_the_setup_cell_and_notebooks_follow(book, monkeypatch):
    cell = book.root / "setup_cell.py"
    monkeypatch.setattr(sync, "has_package", lambda root: True)
    monkeypatch.setattr(
        sync, "build_wheel", lambda root: Wheel("meshscope-9-py3-none-any.whl", b"")
    )
    monkeypatch.setattr(sync, "requirement", lambda root, wheel: (root / "requires", wheel.name))
    asked = f"{'0' * 64}/meshscope-1-py3-none-any.whl#sha256={'1' * 64}"
    book.source("book/00-intro").write_text(f"# Intro\n\npip install {book.site}wheels/{asked}\n")
    monkeypatch.setattr(sync, "pinned", lambda root: (cell, "# @title Setup\nnew = 1\n"))
    sync.main([], book.root)
    setup, own = nbformat.read(book.notebook("book/01-toy"), 4).cells[1:]
    assert setup.source == "# @title Setup\nnew = 1" and setup.metadata.cellView == "form"
    assert own.source == "own = 3" and cell.read_text() == "# @title Setup\nnew = 1\n"
    installed = book.source("book/00-intro").read_text()
    assert "/meshscope-9-py3-none-any.whl#sha256=e3b0c44298fc" in installed
    sync.main(["--check"], book.root)


def test_the_index_lists_every_entry_of_every_group(book):
    def group(name, title, *entries):
        cells = [
            f"## {heading}\n\n```{{code-cell}} ipython3\n:tags: [id-{slug}]\n\n1\n```"
            for heading, slug in entries
        ]
        (folder / f"messages-{name}.md").write_text(
            "\n\n".join([f"{FRONT}\n# {title}", *cells]) + "\n"
        )

    folder = book.root / "book" / "messages"
    folder.mkdir()
    index = folder / "messages.md"
    index.write_text(f"# All\n\nFirst.\n\n{LIST_BEGINS}gone\n{LIST_ENDS}\nLast.\n")
    (book.root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/00-intro\nchapters:\n- file: book/messages/messages\n- file: book/messages/messages-b\n"
        "- file: book/messages/messages-a\n"
    )
    group("a", "About a", ("`AError … 8`", "eight"))
    group("b", "About `b`", ("`BError`", "bad"), ("`B … C`", "c"))
    sync.main([], book.root)
    b, a = (book.page_url(f"book/messages/messages-{name}") for name in "ba")
    wanted = (f"## [About `b`]({b})\n\n- [`BError`]({b}#bad)\n- [`B … C`]({b}#c)\n\n"
              f"## [About a]({a})\n\n- [`AError … 8`]({a}#eight)")  # fmt: skip
    assert (
        index.read_text() == f"# All\n\nFirst.\n\n{LIST_BEGINS}\n{wanted}\n\n{LIST_ENDS}\nLast.\n"
    )
    sync.main(["--check"], book.root)
    index.write_text(index.read_text().replace("BError", "Error"))
    with pytest.raises(Problem, match="Out of date: book/messages/messages.md"):
        sync.main(["--check"], book.root)
    index.write_text("# All\n")
    with pytest.raises(Problem, match="lacks <!-- written by bookkit sync -->"):
        sync.main([], book.root)


def test_a_second_run_changes_nothing(book):
    sync.main([], book.root)
    before = {path: path.read_bytes() for path in book.root.rglob("*") if path.is_file()}
    sync.main([], book.root)
    sync.main(["--check"], book.root)
    assert before == {path: path.read_bytes() for path in book.root.rglob("*") if path.is_file()}


def test_check_names_what_is_out_of_date_and_writes_nothing(book):
    sync.main([], book.root)
    book.source("book/01-toy").write_text((HEAD + CELL).replace("own = 3", "own = 4"))
    (book.root / "notebooks" / "00-gone.ipynb").write_text("{}")
    with pytest.raises(Problem, match=r"notebooks/01-toy\.ipynb.*zh-TW.*00-gone.*make sync"):
        sync.main(["--check"], book.root)
    assert "own = 3" in book.notebook("book/01-toy").read_text()
    sync.main([], book.root)
    assert "own = 4" in book.notebook("book/01-toy").read_text()
    assert not (book.root / "notebooks" / "00-gone.ipynb").exists()


def test_notebooks_have_no_outputs_and_steady_ids():
    one, two = (sync.as_notebook(HEAD + CELL + CELL) for _ in range(2))
    assert [cell.id for cell in one.cells] == [cell.id for cell in two.cells]
    assert len({cell.id for cell in one.cells}) == len(one.cells)
    nbformat.validate(one)
    assert all(not cell.outputs for cell in one.cells if cell.cell_type == "code")


def test_the_book_is_in_sync():
    try:
        sync.main(["--check"])
    except Problem as problem:
        pytest.fail(str(problem), pytrace=False)
