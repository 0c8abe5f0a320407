"""Translations keep what their English says; and each check sees what it is there for.

A real message is broken in one way, and the check must name it. That the checks pass what is right is
seen in the catalogue, in which `make translations` finds nothing.
"""

import re
import shutil

import polib
import pytest

from bookkit.model.book import Book, Problem
from bookkit.model.chapter import parse
from bookkit.words import report
from bookkit.words.catalogues import catalogue_of, catalogue_path, has_words
from bookkit.words.checks import Style, as_signs, read_style, unlike_english
from bookkit.words.messages import ABOUT_LINES, is_plain
from bookkit.words.notebooks import BADGE, translate_markdown
from bookkit.words.po import template
from bookkit.words.report import BROKEN, check_message, refused_by_gettext
from toy import ROOT

BOOK = Book()
LANGUAGES = BOOK.languages[1:]
CHINESE = catalogue_of(BOOK, BOOK.language("zh_TW"))
STYLE = read_style(ROOT / "locale" / "zh_TW" / "terms.toml")


# All that is read.


class Asked(dict):
    """Translations that are looked for; there are none."""

    def get(self, text, default=None):
        self[text] = default
        return default


def test_all_that_notebooks_say_is_in_the_catalogue():
    known = {entry.msgid for entry in template(BOOK)}
    for page in BOOK.chapters:
        asked = Asked()
        for cell in parse(page, BOOK.source(page).read_text("utf-8")).markdown:
            translate_markdown(BADGE.sub("", cell.source), asked)
        assert asked and not [one for one in asked if has_words(one) and one not in known], page


# A message broken on purpose.


def finished(kind):
    """Each finished message of text or of code."""
    for text in CHINESE.translations:
        if is_plain(CHINESE.entries[text]) == (kind == "code"):
            yield CHINESE.entries[text]


CODE_SPAN = r"(?<!`)`[^`]+`(?!`)"
BREAKS = {  # how: (what, by what, of which kind, check, what it says, in which English)
    "a link dropped": (r"\[([^\]]+)\]\(http[^)]+\)", r"\1", "text", "link", "lacks http", ""),
    "a link's address": (r"\]\(https?://", "](https://x.", "text", "link", "lacks http", ""),
    "a number changed": (r"(?<!-)\b2026\b", "2025", "text", "number", "2026", "2026"),
    "a word's number": (r"(?<= )8(?= 個裝置)", "幾",
        "text", "number", "says 8 in words", "^[^8]*eight devices[^8]*$"),
    "a code span changed": (CODE_SPAN, "`other`", "text", "code", "has other", ""),
    "a formula lost": (r"\$[^$]+\$", "它", "text", "formula", "lacks", ""),
    "a formula of its own": (r"^(?=\\frac)", "x = ", "text", "formula", "has x", ""),
    "a sign of a formula": (r"^\\frac", r"\\sqrt", "text", "formula", "has \\sqrt", ""),
    "a placeholder lost": (r"\{\w+\}", "某", "code", "placeholder", "lacks {", ""),
    "emphasis lost": (r"\*\*([^*]+)\*\*", r"\1", "text", "emphasis", "lacks **…**", ""),
    "emphasis that does not render": (r"\*\*([\u4e00-\u9fff][^*。：？！`]*)\*\*(?=[\u4e00-\u9fff])", r"**\1。**",
        "text", "emphasis", "put 。 outside", ""),
    "a tag": (r"(?<=[\u4e00-\u9fff])，", "<b>，", "text", "HTML", "has <b>", ""),
    "a heading made": (r"^(?=[\u4e00-\u9fff])", "# ", "text", "Markdown", "has <h1>", ""),
    "a mainland word": ("裝置", "設備", "text", "term", "device is 裝置", ""),
    "a simplified sign": ("[個]", "个", "text", "term", "个 is no sign", ""),
    "no space at code": (rf"(?<=[\u4e00-\u9fff]) (?={CODE_SPAN})", "",
        "text", "punctuation", "put a space between", ""),
    "a space at a Chinese link": (r"(?<=[\u4e00-\u9fff])(?=\[第 1 章\])", " ",
        "text", "punctuation", "those of a link included", ""),
    "no space at an English link": (r"(?<=[\u4e00-\u9fff]) (?=\[Megatron)", "",
        "text", "punctuation", "put a space between", ""),
    "a space in Chinese": (r"(?<=裝)(?=置)", " ",
        "text", "punctuation", "no space between Chinese", ""),
    "a space after a comma": ("，", "， ", "text", "punctuation", "no space beside", ""),
    "a half-width comma": ("，(?=[\u4e00-\u9fff])", ",", "text", "punctuation", "write ，；：！？", ""),
    "a half-width full stop": ("(?<=[\u4e00-\u9fff])。$", ".", "text", "punctuation", "write 。", ""),
    "half-width parentheses": (r"（([^（）]*)）", r"(\1)", "text", "punctuation", "write （）", ""),
    "one parenthesis": ("）", "", "text", "punctuation", "（） do not come in pairs", ""),
    "other quotes": (r"「([^「」]*)」", r"“\1”", "text", "punctuation", "quote with 「」", ""),
    "a space before %": (r"(?<=\d)%", " %", "text", "punctuation", "without a space", ""),
    "no space before a unit": (r"(?<=\d) (?=GB)", "", "text", "punctuation", "before the unit", ""),
    "half an ellipsis": ("，", "…", "text", "punctuation", "ellipsis", ""),
    "half a dash": ("，", "—", "text", "punctuation", "dash", ""),
    "a heading with a full stop": (r"(?<=[\u4e00-\u9fff])$", "。",
        "text", "punctuation", "no full stop", r"[a-z]$"),
}  # fmt: skip


@pytest.mark.parametrize("how", BREAKS)
def test_breaking_a_message_is_seen(how):
    old, new, kind, check, says, english = BREAKS[how]
    entry = next(
        one
        for one in finished(kind)
        if re.search(old, one.msgstr) and re.search(english, one.msgid)
    )
    text = re.sub(old, new, entry.msgstr, count=1)
    where = {"occurrences": entry.occurrences, "comment": entry.comment}
    broken = polib.POEntry(msgid=entry.msgid, msgstr=text, **where)
    found = list(check_message(broken, STYLE))
    assert [one for one in found if one.startswith(f"{check}: ") and says in one], (text, found)


@pytest.mark.parametrize(
    "told, fits", [("一張\n記憶體", True), ("一張", True), ("一\n張\n記憶體", False)]
)
def test_a_line_more_than_the_drawing_has_is_named(told, fits):
    about = {"comment": f"In a drawing. {ABOUT_LINES}"}
    entry = polib.POEntry(msgid="memory\nof one", msgstr=told, **about)
    found = list(check_message(entry, Style()))
    assert not found if fits else found[0].startswith("lines: ")


def small(root, *translations):
    """A book of one page with these translations."""
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/01-mesh\n")
    book = Book(root)
    path = catalogue_path(book, LANGUAGES[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    file = polib.POFile(wrapwidth=0)
    file.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "zh_TW"}
    for n, new in enumerate(translations):
        where = {"occurrences": [("book/01-mesh.md", "")]}
        file.append(polib.POEntry(msgid=f"Sentence {chr(97 + n)}.", msgstr=new, **where))
    file.save(str(path))
    return book


def test_terms_that_cannot_be_read_say_so(tmp_path):
    (tmp_path / "terms.toml").write_text("= 1")
    with pytest.raises(Problem, match="terms.toml"):
        read_style(tmp_path / "terms.toml")


def test_a_catalogue_that_cannot_be_read_is_named(tmp_path):
    book = small(tmp_path, "裝置。")
    path = catalogue_path(book, LANGUAGES[0])
    path.write_text(f"{path.read_text('utf-8')}\nno line of a catalogue\n", "utf-8")
    with pytest.raises(Problem, match=r"book\.po.*Correct that line"):
        catalogue_of(book, LANGUAGES[0])
    if shutil.which("msgfmt"):
        said = refused_by_gettext(path, tmp_path)
        assert re.match(r"locale/zh_TW/LC_MESSAGES/book\.po:\d+: ", said)
        assert "Correct that line" in said


# Numbers.


@pytest.mark.parametrize("english, translated", [
    ("8 devices", "7 個裝置"), ("8 devices", "裝置"), ("devices", "80 個裝置"),
    ("4 billion", "4 億"), ("4.3 billion", "44 億"), ("eight devices", "四個裝置"), ("2×4", "2×2"),
    ("12,345", "1234"), ("0.12.1", "0.12"),
])  # fmt: skip
def test_another_number_is_seen(english, translated):
    assert [one for one in unlike_english(english, translated) if one.startswith("number: ")]


def test_a_name_may_become_code_and_emphasis_may_stand_before_a_space():
    assert not list(unlike_english("a jitted constructor", "經 `jit` 編譯的建構子"))
    assert not list(unlike_english("**Predict.** Then run.", "**先預測。** 再執行。"))
    assert list(unlike_english("**Predict.** Then run.", "**先預測。**再執行。"))
    assert punctuation("**先預測**。再執行。") == punctuation("**先預測？** 再執行。") == []


def punctuation(text, markdown=True):
    """What is said of the signs and spaces of a translation, without the place."""
    found = Style(chinese=True).punctuation("A.", as_signs(text, markdown))
    return [one.partition("”: ")[2] for one in found]


HAN_HAN, HAN_LATIN = (
    "no space between Chinese signs, those of a link included",
    "put a space between Chinese and Latin, code or formulas",
)


@pytest.mark.parametrize("text, says", [
    ("請查 [術語表](a.md)。", HAN_HAN), ("叫做 [**分片**](a.md)。", HAN_HAN), ("這是 *網格*（mesh）。", HAN_HAN),
    ("用[Flax 的文件](a.md)。", HAN_LATIN), ("見[`jax.jit`](a.md)。", HAN_LATIN),
    ("見 「[術語表](a.md)」。", "no space beside full-width signs"),
])  # fmt: skip
def test_a_link_that_is_spaced_otherwise_is_seen(text, says):
    assert punctuation(text) == [says]


@pytest.mark.parametrize("english, translated, markdown, check", [
    ("The $a$ of {kind}.", "的 $a$。", True, "placeholder"), (r"The $\text{loss}_i$.", r"$\text{損失}_j$。", True, "formula"),
    (r"\frac{\text{loss}}{8}", r"\frac{\text{損失}}{9}", True, "formula"), (r"\frac{\text{loss}}{A}", r"\frac{}{A}", True, "formula"),
    (r"\text{eight parts}", r"\text{九塊}", True, "number"), ("$n$ of {kind}", "$n$", False, "placeholder"),
    (r"$n$ of {kind}", r"{kind} 的 $m$", False, "formula"), ("\nS = T + n", "\nS = T - n", True, "formula"),
])  # fmt: skip
def test_a_formula_that_lost_something_is_seen(english, translated, markdown, check):
    found = unlike_english(english, translated, markdown)
    assert [one.partition(":")[0] for one in found] == [check]


# The report.


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """What `make translations` says of a page of five messages, of which one was just written."""
    book = small(tmp_path, "一。", "二。", "")
    file = polib.pofile(str(catalogue_path(book, LANGUAGES[0])), wrapwidth=0)
    file.append(polib.POEntry(msgid="Sentence d.", msgstr="四。", flags=["fuzzy"]))
    file.save()
    pot = polib.POFile()
    for text in ("Sentence a.", "Sentence b.", "Sentence c.", "Sentence d.", "Just written."):
        pot.append(polib.POEntry(msgid=text, occurrences=[("book/01-mesh.md", "")]))
    pot.append(polib.POEntry(msgid="Search", occurrences=[("site/templates/search.html", "")]))
    monkeypatch.setattr(report, "template", lambda book: pot)

    def run(*options):
        return report.main(options, book.root), *capsys.readouterr(), book

    return run


def test_what_is_left_is_counted_and_listed_and_fails_nothing(told):
    status, out, err, _ = told()
    assert status == 0 and not err
    assert "2 of 6 messages are translated\n" in out
    assert re.search(r"book\.po:\d+: missing: Sentence c\. \(book/01-mesh\.md\)\n", out)
    assert re.search(r"book\.po:\d+: fuzzy: Sentence d\.", out)
    assert "book.po, after `make po`: missing: Just written." in out


def test_only_a_release_asks_for_all_messages(told):
    status, _, err, _ = told("--complete")
    assert status == BROKEN and "繁體中文: 4 messages are left to translate" in err


def test_what_is_broken_exits_with_2_and_says_where(told):
    path = catalogue_path(told()[3], LANGUAGES[0])
    path.write_text(path.read_text("utf-8").replace("一。", "70 個。"), "utf-8")
    status, out, err, _ = told()
    assert status == BROKEN and "2 of 6" in out
    assert re.search(r"book\.po:\d+: number: 70 is not in the English\n    Sentence a\.\n", err)


def test_without_msgfmt_it_says_so(told, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "msgfmt is not installed" in told()[1]
