"""`make po` keeps every translation: an edit makes exactly one message stale."""

import shutil

import polib
import pytest

from bookkit.model.book import Book, Problem
from bookkit.words import catalogues, po
from bookkit.words.catalogues import Catalogue, Message
from toy import ROOT

PAGE = [
    "A mesh is a grid of devices with names",
    "Eight devices stand in two rows and four columns.",
    "Two matmuls run on eight devices, and `jax.jit` compiles one program.",
    "What moves?",
    "Nothing moves: $n = 0$.",
    "`x_BD`",
]


def update(path, texts, memory=(), everywhere=()):
    old = catalogues.read_catalogue(path) if path.exists() else None
    entries = catalogues.updated(old, [Message(text) for text in texts], dict(memory), everywhere)
    return catalogues.write_catalogue(path, entries, "Toy: 中文", "zh_TW")


@pytest.fixture
def path(tmp_path):
    """A page's catalogue, all of it translated."""
    path = tmp_path / "locale" / "page.po"
    assert update(path, PAGE)
    catalogue = catalogues.read_catalogue(path)
    for number, entry in enumerate(catalogue):
        entry.msgstr = f"第 {number} 句"
    catalogue.save(str(path))
    return path


def states(path, texts=PAGE):
    return list(Catalogue(path).states(texts).values())


def test_a_second_run_changes_nothing(path):
    before = path.read_bytes()
    assert not update(path, PAGE) and path.read_bytes() == before
    assert states(path) == ["translated"] * 6


def test_a_file_as_other_editors_write_it_is_left_alone(path):
    wrapped = polib.pofile(str(path), wrapwidth=30)
    wrapped.metadata["X-Generator"] = "Poedit 3.5"
    wrapped.save(str(path))
    before = path.read_bytes()
    assert not update(path, PAGE) and path.read_bytes() == before


@pytest.mark.parametrize(
    "edited",
    [
        "Two matmuls run on eight devices, and `jax.jit` compiles one program for all of them.",
        "One program, compiled once.",  # nothing alike, but it stands in the same place
    ],
)
def test_an_edited_paragraph_is_stale_and_nothing_else_changes(path, edited):
    page = [*PAGE[:2], edited, *PAGE[3:]]
    before = path.read_text("utf-8").split("\n\n")
    assert update(path, page)
    after = path.read_text("utf-8").split("\n\n")
    assert [n for n, (one, two) in enumerate(zip(before, after, strict=True)) if one != two] == [3]
    entry = catalogues.read_catalogue(path).find(edited)
    assert entry.fuzzy and entry.previous_msgid == PAGE[2] and entry.msgstr == "第 2 句"
    assert edited not in Catalogue(path).translations
    assert states(path, page) == ["translated"] * 2 + ["stale"] + ["translated"] * 3
    assert not update(path, page)  # and stays so
    again = [*PAGE[:2], edited.replace("One", "A"), *PAGE[3:]]
    update(path, again)  # edited once more: the translator sees what the translation was made from
    assert catalogues.read_catalogue(path).find(again[2]).previous_msgid == PAGE[2]


def test_an_edit_is_noticed_before_make_po(path):
    page = [*PAGE[:2], PAGE[2].replace("eight", "8"), "Something new stands here.", *PAGE[3:]]
    found = Catalogue(path).states(page)
    assert found[page[2]] == "stale" and found[page[3]] == "missing"
    assert sum(state == "translated" for state in found.values()) == 5


def test_a_new_paragraph_takes_no_translation_from_its_neighbours(path):
    new = "Two matmuls run on eight devices, and `jax.jit` compiles one more program."
    update(path, [*PAGE[:3], new, *PAGE[3:]])
    assert states(path, [new]) == ["missing"] and states(path) == ["translated"] * 6


def test_a_paragraph_that_moved_from_another_page_is_still_translated(path, tmp_path):
    other = tmp_path / "other.po"
    update(other, ["Nothing.", PAGE[1]], Catalogue(path).translations)
    assert Catalogue(other).translations == {PAGE[1]: "第 1 句"}


def test_what_is_translated_elsewhere_finishes_a_message_that_is_not(path):
    catalogue = catalogues.read_catalogue(path)
    catalogue[1].msgstr = ""
    catalogue[2].flags, catalogue[2].previous_msgid = ["fuzzy"], "Earlier."
    catalogue[3].flags = ["fuzzy"]  # a translator's own doubt
    catalogue.save(str(path))
    update(path, PAGE, {text: "別處" for text in PAGE[:4]})
    assert [entry.msgstr for entry in catalogues.read_catalogue(path)][:4] == [
        "第 0 句",
        "別處",
        "別處",
        "第 3 句",
    ]
    assert states(path)[:4] == ["translated"] * 3 + ["stale"]


def test_a_paragraph_that_moved_and_was_edited_brings_its_translation_to_be_corrected(tmp_path):
    moved, memory = PAGE[2].replace("eight", "8"), {PAGE[2]: "第 2 句", "What else?": "還有呢？"}
    update(tmp_path / "gone.po", ["A title", moved], memory)
    entry = catalogues.read_catalogue(tmp_path / "gone.po")[1]
    assert (entry.msgstr, entry.previous_msgid, entry.fuzzy) == ("第 2 句", PAGE[2], True)
    update(
        tmp_path / "other.po", ["A title", moved], memory, {PAGE[2]}
    )  # still elsewhere: a neighbour
    assert states(tmp_path / "other.po", ["A title", moved]) == ["missing"] * 2


def test_in_the_place_of_a_text_that_moved_to_another_page_stands_a_new_one(path):
    page = [*PAGE[:2], "One program, compiled once.", *PAGE[3:]]
    update(path, page, everywhere=[*page, PAGE[2]])
    assert states(path, page)[2] == "missing"


# The whole of a language: `make po`.


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of two pages, and how to set their messages: book.say(one=[…], two=[…])."""
    shutil.copyfile(ROOT / "_config.yml", tmp_path / "_config.yml")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/one\nchapters: [file: book/two]\n"
    )
    now = {}
    monkeypatch.setattr(po, "every_message", lambda book: now)

    class Toy(Book):
        def say(self, **pages):
            now.clear()
            now.update(
                {f"book/{name}": [Message(text) for text in texts] for name, texts in pages.items()}
            )
            po.main([], self.root)

        def file(self, name):
            return self.root / "locale" / "zh_TW" / name

        def translate(self, name):
            catalogue = catalogues.read_catalogue(self.file(f"LC_MESSAGES/book/{name}.po"))
            for entry in catalogue:
                entry.msgstr, entry.flags, entry.previous_msgid = f"（{entry.msgid}）", [], None
            catalogue.save(str(catalogue.fpath))

        def known(self, name):
            return Catalogue(self.file(name)).translations

    return Toy(tmp_path)


def test_nothing_that_was_translated_is_lost(book):
    book.say(one=PAGE, two=["Other words."])
    assert not book.file("memory.po").exists()  # nothing to remember yet
    book.translate("one")
    edited = PAGE[2].replace("eight", "8")
    book.say(one=[*PAGE[:2], edited], two=["Other words."])
    was = {text: f"（{text}）" for text in PAGE}
    assert book.known("memory.po") == {text: was[text] for text in PAGE[2:]}
    book.translate("one")  # the edited one is corrected: what it was stays known
    book.say(one=[*PAGE[:2], edited], two=["Other words."])
    assert book.known("memory.po")[PAGE[2]] == was[PAGE[2]]
    book.say(one=[PAGE[0]], two=[PAGE[3], PAGE[1], edited])  # moved, and come back
    assert book.known("LC_MESSAGES/book/two.po") == {
        PAGE[3]: was[PAGE[3]],
        PAGE[1]: was[PAGE[1]],
        edited: f"（{edited}）",
    }
    assert PAGE[3] not in book.known("memory.po") and was.items() <= everything(book).items()


def test_the_catalogue_of_a_page_that_is_gone_is_remembered(book, capsys):
    book.say(one=PAGE, two=["Other words."])
    book.translate("two")
    book.say(one=PAGE)
    assert (
        "removed locale/zh_TW/LC_MESSAGES/book/two.po, of no page; memory.po has it"
        in capsys.readouterr().out
    )
    assert book.known("memory.po") == {"Other words.": "（Other words.）"}


def test_what_earlier_catalogues_kept_of_gone_text_is_moved(book):
    book.say(one=PAGE[:2], two=["Other words."])
    path = book.file("LC_MESSAGES/book/one.po")
    path.write_text(
        path.read_text("utf-8") + f'\n#~ msgid "{PAGE[4]}"\n#~ msgstr "沒有"\n', "utf-8"
    )
    book.say(one=PAGE[:2], two=["Other words."])
    assert not catalogues.read_catalogue(path).obsolete_entries()
    assert book.known("memory.po") == {PAGE[4]: "沒有"}


def test_a_second_run_writes_nothing_and_check_names_what_is_old(book, capsys):
    book.say(one=PAGE, two=["Other words."])
    book.translate("one")
    book.say(one=PAGE[:4], two=["Other words."])
    files = sorted(book.root.rglob("*.po"))
    before = [path.read_bytes() for path in files]
    po.main([], book.root)
    po.main(["--check"], book.root)
    assert "all up to date" in capsys.readouterr().out
    assert [path.read_bytes() for path in files] == before
    book.file("memory.po").unlink()
    book.file("LC_MESSAGES/book/gone.po").write_bytes(before[0])
    with pytest.raises(Problem, match=r"Out of date: locale/.*gone\.po\. Run `make po`"):
        po.main(["--check"], book.root)
    assert book.file("LC_MESSAGES/book/gone.po").exists()


def everything(book):
    return catalogues.remembered(book.root.rglob("*.po"))


def test_what_translators_write_beside_a_message_stays(path):
    catalogue = catalogues.read_catalogue(path)
    catalogue[1].tcomment, catalogue[1].flags = "see the glossary", ["no-wrap"]
    catalogue.save(str(path))
    update(path, [*PAGE, "One more."])
    entry = catalogues.read_catalogue(path)[1]
    assert entry.tcomment == "see the glossary" and entry.flags == ["no-wrap"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("`jax.jit`", False),
        ("$x[B_{data}]$", False),
        ("8 × 16", False),
        ("![alt](https://x)", False),
        ("[`a` · `` b`c ``](https://x.org/y#z)", False),
        ("(`a`)", False),
        ("[`a` and more](https://x.org)", True),
        ("tuple[str, ...] | None", False),
        ("`P` and `Q`", True),
        ("None of them", True),
        ("bytes", True),
        ("JAX", True),
        ("$n$ devices", True),
    ],
)
def test_what_needs_a_translation(text, words):
    assert catalogues.has_words(text) is words
