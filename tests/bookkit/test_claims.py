"""Which releases ran the very code of a page, from the matrix."""

import json
import shutil

from bookkit.model.book import Book
from bookkit.model.chapter import parse
from bookkit.model.claims import RanOn, code_digest, ran_on
from toy import FRONT, ROOT, code

PROVEN = code("# @title Checked: one is one\nassert True", "proof", "hide-cell", "id-one", cellView="form")
STORED = code("# @title Checked: two\nassert True", "proof", "stored", "hide-cell", "id-two", cellView="form")
TEXT = FRONT + f"\n# A `title`\n\n{code('import jax', 'setup')}\n\n{code('x = 1')}\n\n{PROVEN}\n\n{STORED}\n"
VERSIONS = {"python": "3.12.1", "jax": "0.12"}


def book_with(root, text=TEXT):
    (root / "book").mkdir()
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/intro\nchapters: [file: book/01-a]\n")
    (root / "book" / "intro.md").write_text("# Intro\n")
    (root / "book" / "01-a.md").write_text(text)
    return Book(root)


def test_a_record_counts_for_the_code_that_ran_and_for_no_other(tmp_path):
    book = book_with(tmp_path)
    assert ran_on(book, "book/01-a") == []
    digest = code_digest(parse("01-a", TEXT).code)
    runs = {
        "same": {"seconds": 1, "code": digest},
        "other": {"seconds": 1, "code": "0" * 16},
        "failed": {"seconds": 1, "code": digest, "failed": 3, "error": "no"},
        "old": {"seconds": 1},
    }
    recorded = {name: {"date": "d", "versions": VERSIONS, "notebooks": {"01-a": run}} for name, run in runs.items()}
    recorded["none"] = {"date": "d", "versions": VERSIONS, "notebooks": {}}
    (tmp_path / "book" / "matrix.json").write_text(json.dumps(recorded))
    assert ran_on(book, "book/01-a") == [RanOn("same", "d", VERSIONS)]


def test_the_digest_is_of_code_and_not_of_the_setup_cell_or_prose():
    digest = code_digest(parse("a", TEXT).code)
    assert digest == code_digest(parse("a", TEXT.replace("# A", "# B").replace("import jax", "import")).code)
    for old, new in (("x = 1", "x = 2"), ("assert True", "assert 1")):
        assert digest != code_digest(parse("a", TEXT.replace(old, new)).code)
