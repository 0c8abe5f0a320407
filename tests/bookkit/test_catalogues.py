"""`make po` is gettext's msgmerge: an edit makes exactly one message fuzzy, and nothing is lost."""

import difflib
import re
import shutil

import polib
import pytest

from bookkit.model.book import Book, Problem
from bookkit.words import po
from bookkit.words.catalogues import catalogue_of, catalogue_path, has_words
from bookkit.words.messages import is_plain
from toy import FRONT, ROOT, code

ONE = [
    "A mesh is a grid of devices with names",
    "Eight devices stand in two rows and four columns.",
    "Two matmuls run on eight devices, and `jax.jit` compiles one program.",
    "Nothing moves.",
]
DRAWN = '<svg xmlns="http://www.w3.org/2000/svg"><text data-message="{n} devices&#10;here">8</text></svg>'


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of two pages: book.say(one=[…], two=[…]) sets their paragraphs and runs `make po`."""
    if not shutil.which("msgmerge"):
        pytest.skip(po.GET_GETTEXT)
    shutil.copyfile(ROOT / "_config.yml", tmp_path / "_config.yml")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/two\nchapters: [file: book/one]\n"
    )
    (tmp_path / "book" / "figures").mkdir(parents=True)
    (tmp_path / "_build" / "gettext").mkdir(parents=True)
    for name in ("one", "two"):
        (tmp_path / "book" / f"{name}.md").write_text(f"# {name}\n")

    class Toy(Book):
        def say(self, **pages):
            found = [
                polib.POEntry(msgid=text, occurrences=[(f"../../../book/{name}.md", str(line))])
                for name, texts in pages.items()
                for line, text in enumerate(texts, 1)
            ]
            monkeypatch.setattr(po, "collected_by_sphinx", lambda book: found)
            po.main([], self.root)

        @property
        def file(self):
            return catalogue_path(self, self.languages[1])

        @property
        def known(self):
            return catalogue_of(self, self.languages[1])

        def translate(self):
            catalogue = polib.pofile(str(self.file), wrapwidth=0)
            for entry in catalogue:
                entry.msgstr, entry.flags, entry.previous_msgid = f"（{entry.msgid}）", [], None
            catalogue.save(str(self.file))

    return Toy(tmp_path)


@pytest.fixture
def translated(book):
    book.say(one=ONE, two=["Other words."])
    book.translate()
    book.say(one=ONE, two=["Other words."])
    return book


def test_a_second_run_changes_no_byte(translated):
    before = translated.file.read_bytes()
    translated.say(one=ONE, two=["Other words."])
    assert translated.file.read_bytes() == before
    assert {translated.known.state(text) for text in ONE} == {"translated"}


def test_an_edit_marks_its_own_message_and_keeps_the_earlier_english(translated):
    before = translated.file.read_text("utf-8").split("\n")
    edited = ONE[2].replace("eight", "8")
    translated.say(one=[*ONE[:2], edited, ONE[3]], two=["Other words."])
    after = translated.file.read_text("utf-8").split("\n")
    changed = [one for one in difflib.ndiff(before, after) if one[0] in "+-"]
    assert sorted(changed) == sorted(
        ["+ #, fuzzy", f'+ #| msgid "{ONE[2]}"', f'- msgid "{ONE[2]}"', f'+ msgid "{edited}"']
    )
    known = translated.known
    assert known.state(edited) == "fuzzy" and edited not in known.translations
    assert known.entries[edited].msgstr == f"（{ONE[2]}）"
    assert known.state("Something new.") == "missing" and known.state("$n = 0$") == "translated"
    again = edited.replace("Two", "2")  # the translator sees what the translation was made from
    translated.say(one=[*ONE[:2], again, ONE[3]], two=["Other words."])
    assert translated.known.entries[again].previous_msgid == ONE[2]


def test_what_the_book_no_longer_says_is_kept_and_found_again(translated):
    translated.say(one=ONE[:1], two=["Other words."])
    assert f'#~ msgid "{ONE[3]}"' in translated.file.read_text("utf-8")
    assert ONE[3] not in translated.known.entries
    translated.say(one=ONE[:1], two=[ONE[3], "Other words."])  # on another page
    assert translated.known.translations[ONE[3]] == f"（{ONE[3]}）"


def test_a_new_language_begins_with_a_catalogue_that_gettext_accepts(book):
    book.say(one=ONE, two=["Other words."])
    assert '"Language: zh_TW\\n"' in book.file.read_text("utf-8")
    po.run_gettext("msgfmt", "--check", "-o", "/dev/null", book.file)


def test_messages_stand_once_in_the_order_of_the_book_with_their_files(book):
    source = f"{FRONT}\n# one\n\n{code('# @title Setup', 'setup')}\n\n{code('x = 1  # a grid')}\n"
    (book.root / "book" / "one.md").write_text(source)
    (book.root / "book" / "figures" / "grid.svg").write_text(DRAWN)
    book.say(one=["one", "Last.", "Both."], two=["two", "Both."])
    found = {entry.msgid: entry for entry in po.template(book)}
    ours = [text for text in found if "_messages.py" not in str(found[text].occurrences)]
    assert ours == ["two", "Both.", "one", "Last.", "Setup", "a grid", "{n} devices\nhere"]
    files = [[file for file, _ in found[text].occurrences] for text in ours]
    assert files[1] == ["book/two.md", "book/one.md"] and files[5] == ["book/one.md"]
    assert files[6] == ["book/figures/grid.svg"] and not re.search(r"#:.*\.md:\d", str(found))
    assert [is_plain(found[text]) for text in ours] == [False] * 4 + [True] * 3
    assert found["a grid"].comment == "Comment beside this code: x = 1"
    assert "python-brace-format" in found["{n} devices\nhere"].flags
    assert found["{n} devices\nhere"].comment.endswith("keep their number.")


def test_without_gettext_one_sentence_says_how_to_get_it(book, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Problem, match=r"msginit was not found: install gettext \(apt-get install "):
        book.say(one=ONE)


@pytest.mark.parametrize("text", ["[`a` and more](https://x.org)", "`P` and `Q`", "bytes", "JAX", "$n$ devices"])  # fmt: skip
def test_what_needs_a_translation(text):
    assert has_words(text)
