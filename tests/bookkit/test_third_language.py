"""A third language is one command, and reaches every string: the whole book in ⟦a made-up one⟧.

Sphinx's own words are Japanese here; each message of the book's catalogues is itself in brackets.
What a reader sees outside them is English that no translator could reach.
"""
import re
import shutil
import subprocess

import nbformat
import pytest
from bs4 import BeautifulSoup, Comment

import selection
from bookkit.model.book import Book, Problem
from bookkit.model.entries import CODE_SPAN
from bookkit.run import execute
from bookkit.site.build import build_command
from bookkit.words import catalogues, new_language, po, sync
from bookkit.words.comments import comments
from bookkit.words.untranslated import waiting
from toy import ROOT

CODE = "ja"
# What stays, and why. Everything else between brackets was in a catalogue.
STAYS = {
    "names": """Many Devices, One Program|GitHub|Colab|English|日本語|繁體中文|Language|JAX|Flax|Python|CC BY|Apache
        |meshscope|ipynb""",  # of the book, of programs, of licences and of languages
    "signs": r"\bn\b|⌘|Ctrl",
}
STAY = re.compile("|".join(re.sub(r"\s*\n\s*", "", part) for part in STAYS.values()))
# Code, outputs, formulas and what browsers do not show.
HIDDEN = """script style template pre code kbd .math math .cell_output .sig .highlight noscript
    meta[name=viewport]""".split()
ATTRIBUTES = ("alt", "aria-label", "title", "placeholder", "content", "data-copy")


@pytest.fixture(scope="module")
def book():
    """The book with its third language, built.

    It is kept: while nothing but prose changes, Sphinx reads anew only the pages that did.
    """
    root = ROOT / "_build" / "third-language"
    made_of = root / "_build" / "made-of"
    code = selection.Files(ROOT).code
    if not made_of.exists() or made_of.read_text("utf-8") != code:
        shutil.rmtree(root, ignore_errors=True)
        (root / "_build").mkdir(parents=True)
        (root / "notebooks").mkdir()
        for name in ("site", "src", ".github"):
            (root / name).symlink_to(ROOT / name)
        for name in ("_toc.yml", "conf.py", "pyproject.toml", "LICENSE"):
            shutil.copyfile(ROOT / name, root / name)
        settings = (ROOT / "_config.yml").read_text("utf-8")
        for language in Book().languages[1:]:  # others are tested as they are
            settings = re.sub(rf"\n +{language.code}: {{.*", "", settings)
        (root / "_config.yml").write_text(settings, "utf-8")
        shutil.copytree(ROOT / "book", root / "book")
        execute.execute(Book(), say=lambda text: None)
        (root / "_build" / "executed").symlink_to(ROOT / "_build" / "executed")
        new_language.main([CODE, "日本語"], root)
    else:
        made_of.unlink()
        for page in (ROOT / "book").glob("*.md"):
            if (text := page.read_bytes()) != (copy := root / "book" / page.name).read_bytes():
                copy.write_bytes(text)
        po.main([], root)
    book = Book(root)
    folder = catalogues.catalogue_folder(book, book.language(CODE))
    for path in folder.rglob("*.po"):
        catalogue = catalogues.read_catalogue(path)
        wrong = [entry for entry in catalogue if entry.msgstr != bracketed(entry.msgid)]
        for entry in wrong:
            entry.msgstr = bracketed(entry.msgid)
            entry.flags = [flag for flag in entry.flags if flag != "fuzzy"]  # `po` writes the others again
            entry.previous_msgid = None
        if wrong:
            catalogue.save(str(path))
    sync.main([], root)
    before = sorted(path.name for path in execute.cache_path(book).rglob("*"))
    command = build_command(book, book.language(CODE)) + ["-D", "nb_output_stderr=show"]
    done = subprocess.run(command, cwd=root, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in execute.cache_path(book).rglob("*")) == before
    assert "executed in" not in done.stdout  # nothing ran for this language
    made_of.write_text(code, "utf-8")
    return book


def bracketed(message):
    """Its translation, where it has words."""
    if not catalogues.has_words(message):
        return ""
    return "\n".join(f"⟦{line}⟧" for line in message.split("\n"))


def out(book, name):
    return book.root / "_build" / CODE / "html" / name


def seen(page):
    """(kind, text) of each text and attribute that a reader meets."""
    for hidden in page.select(", ".join(HIDDEN)):
        for drawing in hidden.select("svg, table.meshscope caption, table.meshscope th"):
            for part in [drawing, *drawing.select("[aria-label]")]:
                yield "drawing", part.get("aria-label", "")
        hidden.decompose()
    for element in page.find_all(True):
        for name in ATTRIBUTES:
            if element.name == "meta" and element.get("name") != "description":
                continue
            if element.get(name):
                yield name, element[name]
    # A sentence with code or links in it is several pieces of text: join what stands in one block.
    for text in page.find_all(["p", "li", "td", "th", "dt", "h1", "h2", "h3", "h4", "title", "a",
                               "summary", "button", "caption", "figcaption", "label"]):
        if text.name == "a" and text.find_parent(["p", "li", "td", "th", "dt", "h1", "h2", "h3", "h4",
                                                     "caption", "figcaption"]):
            continue
        if not text.find(["p", "li", "td", "h1", "h2", "h3", "ul", "dl", "table"]):
            words = "".join(part for part in text.find_all(string=True)
                            if not isinstance(part, Comment))
            yield text.name, re.sub(r"\s+", " ", words)


def english(text):
    """Words of a text that stand outside brackets; a description may end before its bracket does."""
    text = re.sub(r"⟦[^⟦⟧]*$", "", text)
    while "⟦" in text:
        shorter = re.sub(r"⟦[^⟦⟧]*⟧", "", text)
        if shorter == text:
            break
        text = shorter
    text = re.sub(r"^[\w*, ]+ -- ", "", text)  # a parameter or an exception of meshscope
    if re.fullmatch(r"[\w.]+\[[\w\[\]., |]+\]", text) or not catalogues.has_words(text):
        return []  # types
    return re.findall(r"[A-Za-z]{2,}", STAY.sub("", text))


def names_only(text):
    """A drawing that says nothing but names: the strategies, operations and shapes of the code."""
    return not re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", text)


# What waits for a translation is still being rewritten; it is looked at when it leaves that list.
WAITING = waiting(Book())


def settled(pages):
    return [page for page in pages if page.rsplit("/", 1)[-1] not in WAITING]


@pytest.mark.reads("{name}.md", "headings")
@pytest.mark.parametrize("name", [*settled(Book().pages), "search"])
def test_no_english_sentence_is_left(book, name):
    page = BeautifulSoup(out(book, f"{name}.html").read_text("utf-8"), "html.parser")
    left = {}
    for kind, text in seen(page):
        if (words := english(text)) and not (kind == "drawing" and names_only(" ".join(words))):
            left.setdefault((kind, " ".join(words)), text[:200])
    assert not left, "\n".join(f"{kind}: {words!r} in {text!r}" for (kind, words), text in left.items())


@pytest.mark.reads("{page}.md", "headings")
@pytest.mark.parametrize("page", settled(Book().chapters))
def test_comments_and_markdown_of_notebooks_are_translated(book, page):
    for cell in nbformat.read(book.notebook(page, book.language(CODE)), 4).cells:
        if cell.cell_type == "code":
            for comment in comments(cell.source):
                assert not english(comment.text), comment
        else:
            text = CODE_SPAN.sub("", re.sub(r"```.*?```", "", cell.source, flags=re.S))
            text = re.sub(r"\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|\[!\w+\]|</?\w+[^<>]*>", "",
                          text, flags=re.S)
            assert not english(text), text


def test_figures_say_nothing_in_english(book):
    """What they carry as messages is read out of them; test_figure_words.py has what they keep."""
    drawings = sorted(out(book, "_static/figures").glob("*.svg"))
    assert len(drawings) == len(sorted((ROOT / "book" / "figures").glob("*.svg")))
    for path in drawings:
        for text in BeautifulSoup(path.read_text("utf-8"), "html.parser").select("text[data-message]"):
            said = re.sub(r"\{\w+\}", "", text["data-message"])
            assert not english(said) or "⟦" in text.text, (path.name, text.text)


def test_the_site_knows_its_language(book):
    page = out(book, f"{book.chapters[0]}.html").read_text("utf-8")
    assert '<html lang="ja"' in page and f'href="{book.site}ja/' in page
    assert 'hreflang="en"' in page and "translation-banner" not in page
    assert "translation-note" not in page
    assert "translations.js" in out(book, "search.html").read_text("utf-8")


def test_a_language_that_is_there_or_misspelt_is_refused(tmp_path):
    shutil.copyfile(ROOT / "_config.yml", tmp_path / "_config.yml")
    for code in ("zh_TW", "zh-TW", "Japanese"):
        with pytest.raises(Problem, match=r"already|such as ja"):
            new_language.main([code, "x"], tmp_path)
