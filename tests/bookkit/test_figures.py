"""Figures are what their programs draw; only those are drawn again whose inputs changed."""

import json

import pytest

from bookkit.model.book import Book, Problem
from bookkit.site import figures

KIT = "SIZE = 9\n"
PROGRAM = """from pathlib import Path

from kit import SIZE


def draw():
    words = Path(__file__).parents[1].joinpath("page.md").read_text()
    return {"one": f"<svg>{SIZE}{words}</svg>", "two": "<svg/>"}
"""


@pytest.fixture
def book(tmp_path):
    folder = tmp_path / "book" / "figures"
    folder.mkdir(parents=True)
    (tmp_path / "_config.yml").touch()
    (tmp_path / "_toc.yml").touch()
    (tmp_path / "book" / "page.md").write_text("words")
    (folder / "kit.py").write_text(KIT)
    (folder / "pair.py").write_text(PROGRAM)
    book = Book(tmp_path)
    assert figures.write_figures(book, fresh=False) == ["one.svg", "two.svg"]
    return book


def test_the_record_names_all_that_was_read(book):
    record = json.loads((figures.folder_of(book) / "made.json").read_text())
    assert list(record) == ["pair.py"]  # the kit draws nothing
    assert list(record["pair.py"]["from"]) == [
        "book/figures/kit.py", "book/figures/pair.py", "book/page.md"]  # fmt: skip
    assert (figures.folder_of(book) / "one.svg").read_text() == "<svg>9words</svg>"
    assert not list(book.root.rglob("__pycache__"))


def test_nothing_runs_while_nothing_changes(book, monkeypatch):
    monkeypatch.setattr(figures, "drawn_by", None)
    assert not list(figures.complaints(book)) and figures.write_figures(book, fresh=False) == []


@pytest.mark.parametrize(
    ("file", "old", "by"),
    [("figures/kit.py", "9", "8"), ("figures/pair.py", "<svg>", "<svg >"), ("page.md", "words", "other")],
)  # fmt: skip
def test_a_change_of_anything_that_was_read_is_noticed(book, file, old, by):
    path = book.root / "book" / file
    path.write_text(path.read_text().replace(old, by))
    (said,) = figures.complaints(book)
    assert said == "book/figures/one.svg is not what pair.py draws: run `make figures`"
    assert figures.write_figures(book, fresh=False) == ["one.svg"]
    assert not list(figures.complaints(book))


def test_a_drawing_edited_by_hand_is_noticed(book):
    (figures.folder_of(book) / "two.svg").write_text("<svg>mine</svg>")
    (said,) = figures.complaints(book)
    assert said.startswith("book/figures/two.svg is not what pair.py draws")


def test_a_fresh_check_trusts_no_record(book):
    path = figures.folder_of(book) / "made.json"
    (figures.folder_of(book) / "one.svg").write_text("<svg>old</svg>")
    record = json.loads(path.read_text())
    record["pair.py"]["made"]["one.svg"] = figures.digest(b"<svg>old</svg>")
    path.write_text(json.dumps(record))
    assert not list(figures.complaints(book))
    assert len(list(figures.complaints(book, fresh=True))) == 1


def test_drawings_of_no_program_and_of_two_are_named(book):
    folder = figures.folder_of(book)
    (folder / "orphan.svg").write_text("<svg/>")
    (folder / "twin.py").write_text("def draw():\n    return {'two': '<svg/>'}\n")
    said = "\n".join(figures.complaints(book))
    assert "orphan.svg is drawn by no program" in said
    assert "two.svg is drawn by pair.py and twin.py: rename one" in said


def test_a_program_that_fails_is_named_with_what_it_said(book):
    (figures.folder_of(book) / "broken.py").write_text(
        "def draw():\n    raise ValueError('no ink')\n"
    )
    with pytest.raises(Problem, match=r"(?s)book/figures/broken\.py failed:.*no ink"):
        figures.write_figures(book, fresh=False)


def test_the_figures_of_the_book_are_current():
    assert not list(figures.complaints(Book()))
