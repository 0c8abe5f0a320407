"""`make po` keeps every translation: an edit makes exactly one message stale."""
import polib
import pytest

from bookkit.words import catalogues
from bookkit.words.catalogues import Catalogue, Message

PAGE = [
    "A mesh is a grid of devices with names",
    "Eight devices stand in two rows and four columns.",
    "Two matmuls run on eight devices, and `jax.jit` compiles one program.",
    "What moves?",
    "Nothing moves: $n = 0$.",
    "`x_BD`",
]


def update(path, texts, memory=()):
    return catalogues.update(path, [Message(text) for text in texts], "Toy: 中文", "zh_TW", dict(memory))


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


@pytest.mark.parametrize("edited", [
    "Two matmuls run on eight devices, and `jax.jit` compiles one program for all of them.",
    "One program, compiled once.",  # nothing alike, but it stands in the same place
])
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


def test_text_that_goes_and_comes_back_is_still_translated(path):
    update(path, [*PAGE[:3], *PAGE[4:]])
    assert [entry.msgid for entry in catalogues.read_catalogue(path).obsolete_entries()] == [PAGE[3]]
    assert not update(path, [*PAGE[:3], *PAGE[4:]])
    update(path, PAGE)
    assert states(path) == ["translated"] * 6 and not catalogues.read_catalogue(path).obsolete_entries()


def test_a_paragraph_that_moved_from_another_page_is_still_translated(path, tmp_path):
    other = tmp_path / "other.po"
    update(other, ["Nothing.", PAGE[1]], Catalogue(path).translations)
    assert Catalogue(other).translations == {PAGE[1]: "第 1 句"}


def test_what_translators_write_beside_a_message_stays(path):
    catalogue = catalogues.read_catalogue(path)
    catalogue[1].tcomment, catalogue[1].flags = "see the glossary", ["no-wrap"]
    catalogue.save(str(path))
    update(path, [*PAGE, "One more."])
    entry = catalogues.read_catalogue(path)[1]
    assert entry.tcomment == "see the glossary" and entry.flags == ["no-wrap"]


@pytest.mark.parametrize("text, words", [
    ("`jax.jit`", False), ("$x[B_{data}]$", False), ("8 × 16", False), ("![alt](https://x)", False),
    ("tuple[str, ...] | None", False), ("`P` and `Q`", True), ("None of them", True), ("bytes", True), ("JAX", True), ("$n$ devices", True),
])
def test_what_needs_a_translation(text, words):
    assert catalogues.has_words(text) is words
