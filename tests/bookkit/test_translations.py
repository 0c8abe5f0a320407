"""Translations keep what their English says; and each check sees what it is there for.

A real catalogue is copied, one message is broken in one way, and the check must name it.
"""

import functools
import re
import shutil

import polib
import pytest
from sphinx.config import Config

from bookkit import sphinx_ext
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import parse
from bookkit.words import catalogues, po
from bookkit.words import report as translations
from bookkit.words.checks import (
    House,
    Term,
    as_signs,
    english_numbers,
    read_house,
    translated_numbers,
    unlike_english,
    without_english,
)
from bookkit.words.messages import Lines, messages_of_page
from bookkit.words.notebooks import BADGE, messages_in_markdown
from bookkit.words.report import (
    BROKEN,
    check_catalogue,
    check_files,
    check_language,
    is_markdown,
)
from toy import FRONT, ROOT

BOOK = Book()
LANGUAGES = BOOK.languages[1:]
HOUSE = read_house(ROOT / "locale" / "zh_TW" / "terms.toml")
MSGFMT = shutil.which("msgfmt")


# The catalogues as they are.


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.code)
def test_no_translation_lost_anything_and_words_are_the_books_own(language):
    found = check_language(BOOK, language)
    assert not found, "\n".join(["", *map(str, found)])


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.code)
def test_gettext_accepts_every_catalogue(language):  # with msgfmt -c too, where it is installed
    found = list(check_files(BOOK, language, MSGFMT))
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.code)
def test_what_is_excepted_is_of_a_catalogue_that_there_is(language):
    folder = catalogues.catalogue_folder(BOOK, language)
    for known in read_house(
        folder.parent / "terms.toml"
    ).exceptions:  # each is asked for with its page
        assert (folder / f"{known['page']}.po").exists(), known


@pytest.fixture(scope="module")
def messages():
    """The messages of the book as it is."""
    return po.every_message(BOOK)


@pytest.mark.parametrize("page", BOOK.chapters)
def test_all_that_a_notebook_says_is_in_the_pages_catalogue(messages, page):
    known = {message.text for message in messages[page]}
    for cell in parse(page, BOOK.source(page).read_text("utf-8")).cells:
        if cell.kind == "markdown":
            texts = messages_in_markdown(BADGE.sub("", cell.source))
            assert not [text for text in texts if catalogues.has_words(text) and text not in known]


# A copy of some, broken on purpose.


def a_copy(root, *names):
    """The book's settings and words, and these of its catalogues."""
    for name in ("_config.yml", "_toc.yml"):
        shutil.copyfile(ROOT / name, root / name)
    for name in ("../terms.toml", *(f"{name}.po" for name in names)):
        path = catalogues.catalogue_folder(Book(root), LANGUAGES[0]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(catalogues.catalogue_folder(BOOK, LANGUAGES[0]) / name, path)
    return Book(root)


@pytest.fixture
def book(tmp_path):
    return a_copy(tmp_path, "book/01-mesh", "code/01-mesh")


def finished(book, kind):
    """(name of its catalogue, message) of each finished message of text or of code, read once.

    What the book said once comes last: whatever is being rewritten, there are messages to break.
    """
    folder = catalogues.catalogue_folder(book, LANGUAGES[0])
    names = {
        path: path.relative_to(folder).with_suffix("").as_posix()
        for path in sorted(folder.rglob("*.po"))
    }
    memory = catalogues.memory_path(book, LANGUAGES[0])
    for path, name in {**names, memory: "book/once" if kind == "text" else "code/once"}.items():
        if path.exists() and (kind == "text") == is_markdown(name):
            for entry in read_once(path):
                if entry.msgstr and not entry.obsolete and not entry.fuzzy:
                    yield name, entry


read_once = functools.cache(catalogues.read_catalogue)


def change(book, old, new, kind="text", english=""):
    """The first finished message that has a pattern: its catalogue's name, itself, it with that replaced."""
    for name, entry in finished(book, kind):
        if re.search(old, entry.msgstr) and re.search(english, entry.msgid):
            return name, entry, re.sub(old, new, entry.msgstr, count=1)
    raise AssertionError(f"no message of {kind} has {old}")


CODE_SPAN = r"(?<!`)`[^`]+`(?!`)"
BREAKS = {  # how: (what, by what, catalogues, check, what it says, in which English)
    "a link dropped": (r"\[([^\]]+)\]\(http[^)]+\)", r"\1", "text", "link", "lacks http", ""),
    "a link's address": (r"\]\(https?://", "](https://x.", "text", "link", "lacks http", ""),
    "a number changed": (r"\b2026\b", "2025", "text", "number", "2026", "2026"),
    "a small number": (
        r"(?<= )8(?= 個裝置)",
        "7",
        "text",
        "number",
        "7 is not in",
        "eight devices",
    ),
    "a word's number": (
        r"(?<= )8(?= 個裝置)",
        "幾",
        "text",
        "number",
        "says 8 in words",
        "^[^8]*eight devices[^8]*$",
    ),
    "a code span changed": (CODE_SPAN, "`other`", "text", "code", "has other", ""),
    "a code span lost": (CODE_SPAN, "它", "text", "code", "lacks", ""),
    "a formula changed": (r"\$n\$", "$m$", "text", "formula", "lacks n", ""),
    "a formula lost": (r"\$[^$]+\$", "它", "text", "formula", "lacks", ""),
    "a formula of its own": (r"(?<=^\n)", "x = ", "text", "formula", "copy the English", ""),
    "a sign of a formula": (r"^\\frac", r"\\sqrt", "text", "formula", "copy the English", ""),
    "a placeholder renamed": (r"\{axes\}", "{軸}", "code", "placeholder", "lacks {axes}", ""),
    "a placeholder lost": (r"\{\w+\}", "某", "code", "placeholder", "lacks {", ""),
    "emphasis lost": (r"\*\*([^*]+)\*\*", r"\1", "text", "emphasis", "renders 0 times", ""),
    "emphasis that does not render": (
        r"\*\*([^*。：？！`]+)\*\*(?=[\u4e00-\u9fff])",
        r"**\1。**",
        "text",
        "emphasis",
        "put 。 outside",
        "",
    ),
    "a tag": (r"(?<=[\u4e00-\u9fff])，", "<b>，", "text", "HTML", "has <b>", ""),
    "a heading made": (r"^(?=[\u4e00-\u9fff])", "# ", "text", "Markdown", "heading_open", ""),
    "a list made": (r"^(?=[\u4e00-\u9fff])", "1. ", "text", "Markdown", "ordered_list_open", ""),
    "a mainland word": ("裝置", "設備", "text", "term", "device is 裝置", ""),
    "via": ("透過", "通過", "text", "term", "via is 透過", ""),
    "a simplified sign": ("[個]", "个", "text", "term", "个 is no sign", ""),
    "a simplified sign that Big5 has": ("與", "与", "text", "term", "与 is no sign", ""),
    "a mainland word in a comment": ("裝置", "設備", "code", "term", "device is 裝置", ""),
    "no space at code": (
        rf"(?<=[\u4e00-\u9fff]) (?={CODE_SPAN})",
        "",
        "text",
        "punctuation",
        "put a space between",
        "",
    ),
    "no space at digits": (
        r"(?<=[\u4e00-\u9fff]) (?=\d)",
        "",
        "text",
        "punctuation",
        "put a space between",
        "",
    ),
    "a space at a Chinese link": (
        r"(?<=[\u4e00-\u9fff])(?=\[第 1 章\])",
        " ",
        "text",
        "punctuation",
        "those of a link included",
        "",
    ),
    "no space at an English link": (
        r"(?<=[\u4e00-\u9fff]) (?=\[Megatron)",
        "",
        "text",
        "punctuation",
        "put a space between",
        "",
    ),
    "a space in Chinese": (
        r"(?<=裝)(?=置)",
        " ",
        "text",
        "punctuation",
        "no space between Chinese",
        "",
    ),
    "a space after a comma": ("，", "， ", "text", "punctuation", "no space beside", ""),
    "a half-width comma": (
        "，(?=[\u4e00-\u9fff])",
        ",",
        "text",
        "punctuation",
        "write ，；：！？",
        "",
    ),
    "a half-width colon": (
        "：(?=[\u4e00-\u9fff])",
        ": ",
        "text",
        "punctuation",
        "write ，；：！？",
        "",
    ),
    "a half-width full stop": (
        "(?<=[\u4e00-\u9fff])。$",
        ".",
        "text",
        "punctuation",
        "write 。",
        "",
    ),
    "half-width parentheses": (r"（([^（）]*)）", r"(\1)", "text", "punctuation", "write （）", ""),
    "one parenthesis": ("）", "", "text", "punctuation", "（） do not come in pairs", ""),
    "other quotes": (r"「([^「」]*)」", r"“\1”", "text", "punctuation", "quote with 「」", ""),
    "a space before %": (r"(?<=\d)%", " %", "text", "punctuation", "without a space", ""),
    "no space before a unit": (r"(?<=\d) (?=GB)", "", "text", "punctuation", "before the unit", ""),
    "half an ellipsis": ("，", "…", "text", "punctuation", "ellipsis", ""),
    "half a dash": ("，", "—", "text", "punctuation", "dash", ""),
    "a heading with a full stop": (
        r"(?<=[\u4e00-\u9fff])$",
        "。",
        "text",
        "punctuation",
        "no full stop",
        r"[a-z]$",
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_breaking_a_message_is_seen(tmp_path, how):
    old, new, kind, check, says, english = BREAKS[how]
    name, entry, text = change(BOOK, old, new, kind, english)
    path = catalogues.catalogue_folder(Book(tmp_path), LANGUAGES[0]) / f"{name}.po"
    catalogues.write_catalogue(
        path, [polib.POEntry(msgid=entry.msgid, msgstr=text)], "Broken: 中文", "zh_TW"
    )
    found = list(check_catalogue(tmp_path, path, name, HOUSE))
    hits = [
        one
        for one in found
        if (one.finding.check, one.translated) == (check, text) and says in one.finding.what
    ]
    assert hits, (text, "\n".join(map(str, found)))
    assert re.match(rf"locale/zh_TW/LC_MESSAGES/{name}\.po:\d+: {check}: ", str(hits[0]))


def test_english_beside_a_term_is_asked_for():
    terms = (Term("網格", "mesh", (), "", True), Term("軸", "axis", (), "", False))
    with_it, without = (
        ["網格（mesh）有名字。", "網格。", "網格。"],
        ["一個網格。", "網格。", "網格。"],
    )
    assert not list(without_english(terms, with_it, with_it))
    assert not list(without_english(terms, without, ["網格軸（mesh axis）", *without]))
    assert not list(without_english(terms, without[:2], without[:2]))
    [(finding, first)] = without_english(terms, ["字。", *without], without)
    assert first == 1 and "write 網格（mesh）" in finding.what


TERMS = """chinese = true
[[term]]
english = "device"
chinese = "裝置"
never = ["設備"]
[[term]]
english = "mesh"
chinese = "網格"
first = true
[[exception]]
page = "book/01-mesh"
check = "term"
text = "設備"
reason = "?"
"""


def small(root, *translations):
    """A catalogue of one page with these translations, and terms with an exception."""
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/01-mesh\n")
    path = root / "locale" / "zh_TW" / "LC_MESSAGES" / "book" / "01-mesh.po"
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / "locale" / "zh_TW" / "terms.toml").write_text(TERMS, "utf-8")
    entries = [
        polib.POEntry(msgid=f"Sentence {chr(97 + n)}.", msgstr=new)
        for n, new in enumerate(translations)
    ]
    catalogues.write_catalogue(path, entries, "Toy: 中文", "zh_TW")
    return Book(root)


def test_an_exception_that_no_longer_applies_fails(tmp_path):
    [found] = check_language(small(tmp_path, "裝置。"), LANGUAGES[0])
    assert "nothing is excepted any more" in str(found) and "設備" in str(found)
    assert not check_language(small(tmp_path, "設備。"), LANGUAGES[0])


@pytest.mark.parametrize("bad", ["= 1", '[[exception]]\npage = "x"\ncheck = "term"\ntext = "y"\n'])
def test_terms_that_cannot_be_read_say_so(book, bad):
    (book.root / "locale" / "zh_TW" / "terms.toml").write_text(bad)
    with pytest.raises(Problem, match="terms.toml"):
        check_language(book, LANGUAGES[0])


@pytest.mark.parametrize("break_file, says", [
    (lambda text: text + "\nno line of a catalogue\n", "cannot be read"),
    (lambda text: text + '\nmsgid "x"\nmsgstr "一"\n\nmsgid "x"\nmsgstr "二"\n', "cannot be read"),
    (lambda text: text.replace('"Language-Team: none\\n"\n', ""), "lacks Language-Team"),
])  # fmt: skip
def test_a_catalogue_that_is_broken_is_named(book, break_file, says):
    path = catalogues.catalogue_folder(book, LANGUAGES[0]) / "book" / "01-mesh.po"
    path.write_text(break_file(path.read_text("utf-8")), "utf-8")
    [found] = check_files(book, LANGUAGES[0], None)
    assert found.startswith("locale/zh_TW/LC_MESSAGES/book/01-mesh.po: ") and says in found


def test_what_msgfmt_says_is_passed_on(book, tmp_path):
    refuses = tmp_path / "msgfmt"
    refuses.write_text("#!/bin/sh\necho 'bad entry' >&2\nexit 1\n")
    refuses.chmod(0o755)
    found = list(check_files(book, LANGUAGES[0], str(refuses)))
    assert len(found) == len(list((book.root / "locale").rglob("*.po")))
    assert "msgfmt -c says:\nbad entry" in found[0]


@pytest.mark.parametrize("english, wrong, right", [
    ("layout", "配置（layout）", "不配置記憶體，記憶體排列（layout）"), ("local", "區域的梯度", "區域變數與各裝置自己的梯度"),
    ("payload", "酬載位元組", "資料量（payload）"), ("shard", "每片的形狀", "切成一片一片的，一段程式碼片段，每塊的形狀"),
    ("spec", "由名字組成的規格", "分片規格（spec），規格表所列"), ("placement", "有歧義的放置", "有歧義的擺放方式，放到裝置上"),
    ("pin", "把釘子拔掉", "拿掉約束"), ("global norm", "整體範數", "全域範數"), ("wire bytes", "線上位元組", "傳輸位元組"),
    ("network card", "8 張網卡", "8 張網路卡"), ("communication-bound", "程式是通訊受限的", "程式受限於通訊"),
    ("temporaries", "五倍的暫存區", "五倍的暫存記憶體"), ("tile", "瓦片的大小", "方塊（tile）的大小"),
    ("closed form", "封閉式公式", "封閉形式"), ("reference (to compare with)", "單一裝置是對照", "單一裝置是對照組，拿來對照"),
    ("mask", "掩碼", "遮住填補"), ("pad, padding", "填充到 12", "填補到 12"), ("training step", "三個訓練步", "三個訓練步驟，訓練步數"),
    ("master weight", "主要權重", "主權重（master）"), ("attention head", "8 個注意頭", "8 個注意力頭"),
    ("preemption", "搶占會事先通知", "先占會事先通知"), ("strip", "寫著主張的摺疊列", "摺疊的證明"),
    ("prerequisites", "**你需要**[第 2 章](a.md)", "**先備知識**：長大之後，你需要許多裝置。你需要它們"),
    ("data sheet", "數據表", "規格表"), ("you", "帶您到", "帶你到"), ("passive", "規格會遭到拒絕", "JAX 會拒絕"),
])  # fmt: skip
def test_a_wrong_form_is_told_from_what_is_like_it(english, wrong, right):
    said = [one.what for one in HOUSE.words(as_signs(wrong))]
    assert [one for one in said if f": {english} is " in one], said
    assert not list(HOUSE.words(as_signs(right)))


# Numbers.


@pytest.mark.parametrize(
    "english, translated",
    [
        ("eight devices", "8 個裝置"),
        ("eight devices", "八個裝置"),
        ("four billion", "四十億"),
        ("4 billion", "40 億"),
        ("1.46 million", "146 萬"),
        ("4.3 billion", "43 億"),
        ("twice", "2 倍"),
        ("an eighth", "八分之一"),
        ("an eighth", "1/8"),
        ("half of 16", "16 的一半"),
        ("twenty-five", "25"),
        ("a hundred and twenty-eight", "128"),
        ("12,345 bytes", "12345 位元組"),
        ("8,16", "8、16"),
        ("in 0.12.1", "0.12.1 版"),
        ("November 2026", "2026 年 11 月"),
        ("ten thousand", "一萬"),
        ("two rows, four columns", "兩列、4 行"),
        ("sixes", "6"),
        ("3 thousand", "3 千"),
        ("one trillion parameters", "one trillion parameters"),
    ],
)
def test_the_same_number_in_digits_and_words(english, translated):
    assert not list(unlike_english(english, translated))


@pytest.mark.parametrize(
    "english, translated",
    [
        ("8 devices", "7 個裝置"),
        ("8 devices", "裝置"),
        ("devices", "8 個裝置"),
        ("four billion", "四億"),
        ("4 billion", "4 億"),
        ("4.3 billion", "44 億"),
        ("eight devices", "四個裝置"),
        ("2×4", "2×2"),
        ("12,345", "1234"),
        ("0.12.1", "0.12"),
        ("half", "3 倍"),
        ("8 and 8", "8"),
    ],
)
def test_another_number_is_seen(english, translated):
    assert [one for one in unlike_english(english, translated) if one.check == "number"]


def test_how_numbers_are_read():
    assert dict(english_numbers("four hundred and two, 3 million").words) == {"402": 1}
    assert dict(english_numbers("3 million, 8,16").digits) == {"3000000": 1, "8": 1, "16": 1}
    assert (
        translated_numbers("四十億").words["4000000000"]
        and translated_numbers("二〇二六").words["2026"]
    )
    assert dict(translated_numbers("40 億與 3").digits) == {"4000000000": 1, "3": 1}


def test_a_name_may_become_code_and_emphasis_may_stand_before_a_space():
    assert not list(unlike_english("a jitted constructor", "經 `jit` 編譯的建構子"))
    assert not list(unlike_english("**Predict.** Then run.", "**先預測。** 再執行。"))
    assert list(unlike_english("**Predict.** Then run.", "**先預測。**再執行。"))
    assert punctuation("**先預測。** 再執行。") == ["put the sign outside: **…**。接著"]
    assert punctuation("**先預測**。再執行。") == punctuation("**先預測？** 再執行。") == []


def punctuation(text, markdown=True):
    """What is said of the signs and spaces of a translation, without the place."""
    found = House(chinese=True).punctuation("A.", as_signs(text, markdown))
    return [one.what.partition("”: ")[2] for one in found]


HAN_HAN, HAN_LATIN = (
    "no space between Chinese signs, those of a link included",
    "put a space between Chinese and Latin, code or formulas",
)
COLON, HALF = "write ：； in Chinese", "write ，；：！？ in Chinese"


@pytest.mark.parametrize("text", [
    "請查[術語表](a.md)；見[第 1 章](b.md)與[第 3 章](c.md)。", "叫做[**分片**](a.md)（sharding），是*網格*（mesh）。",
    "用 [Flax 的文件](a.md)說明。", "這是[論文 ZeRO](a.md) 的結果。", "見 [`jax.jit`](a.md) 的說明。", "在 [8 個裝置](a.md)上。",
    "共[裝置 8](a.md) 與 [$n$ 個](a.md)。", "見「[術語表](a.md)」。", "**[環（ring）](a.md)** 是環。", "[甲](a.md)[乙](b.md)。",
])  # fmt: skip
def test_a_link_is_spaced_as_what_it_says(text):
    assert punctuation(text) == []


@pytest.mark.parametrize("text, says", [
    ("請查 [術語表](a.md)。", HAN_HAN), ("[術語表](a.md) 裡有。", HAN_HAN), ("叫做 [**分片**](a.md)。", HAN_HAN),
    ("這是 *網格*（mesh）。", HAN_HAN), ("[甲](a.md) [乙](b.md)。", HAN_HAN), ("用[Flax 的文件](a.md)。", HAN_LATIN),
    ("這是[論文 ZeRO](a.md)的。", HAN_LATIN), ("見[`jax.jit`](a.md)。", HAN_LATIN), ("在 [8 個裝置](a.md) 上。", HAN_HAN),
    ("見 「[術語表](a.md)」。", "no space beside full-width signs"), ("[術語表](a.md) ；", "no space beside full-width signs"),
])  # fmt: skip
def test_a_link_that_is_spaced_otherwise_is_seen(text, says):
    assert punctuation(text) == [says]


@pytest.mark.parametrize("text, says, markdown", [
    ("**FSDP**: 8 個裝置。", COLON, True), ("共 `n`; 8 個。", COLON, True), ("兩個模式（mode）: Auto。", HALF, True),
    ("軸: model", HALF, False), ("（甲）:", HALF, False), ("參數:", HALF, False), ("n: 8 個", COLON, False),
])  # fmt: skip
def test_a_half_width_colon_is_seen(text, says, markdown):
    assert says in punctuation(text, markdown)


@pytest.mark.parametrize("text, markdown", [
    ("**FSDP**：8 個裝置，12:30 開始。", True), ("見 [ZeRO: memory optimizations](a.md) 與 `a: b`。", True),
    ("SPMD（one program: many data）是一個程式。", True), ("How to: a title in English.", True), ("注意力頭：heads", False),
])  # fmt: skip
def test_a_colon_may_be_half_width_in_english(text, markdown):
    assert punctuation(text, markdown) == []


@pytest.mark.parametrize("english, translated, markdown", [
    (r"The $\text{loss}$ of $W_{out}$.", r"$W_{out}$ 的 $\text{損失}$。", True),
    (r"\frac{\text{loss} \cdot A}{8}", r"\frac{A \cdot \text{損失}}{8}", True), (r"\text{bytes}", r"\text{位元組}", True),
    (r"moves $\text{payload}$ of {kind}", r"{kind}：搬動 $\text{資料量}$", False), ("\nS = T + n", "\nS = T + n", True),
])  # fmt: skip
def test_words_in_a_formula_are_no_placeholder(english, translated, markdown):
    assert not list(unlike_english(english, translated, markdown))


@pytest.mark.parametrize("english, translated, markdown, check", [
    ("The $a$ of {kind}.", "的 $a$。", True, "placeholder"), (r"The $\text{loss}_i$.", r"$\text{損失}_j$。", True, "formula"),
    (r"\frac{\text{loss}}{8}", r"\frac{\text{損失}}{9}", True, "formula"), (r"\frac{\text{loss}}{A}", r"\frac{}{A}", True, "formula"),
    (r"\text{eight parts}", r"\text{九塊}", True, "number"), ("$n$ of {kind}", "$n$", False, "placeholder"),
    (r"$n$ of {kind}", r"{kind} 的 $m$", False, "formula"), ("\nS = T + n", "\nS = T - n", True, "formula"),
])  # fmt: skip
def test_a_formula_that_lost_something_is_seen(english, translated, markdown, check):
    assert [one.check for one in unlike_english(english, translated, markdown)] == [check]


def test_words_in_a_formula_are_read_for_terms_too():
    assert [one.check for one in HOUSE.words(as_signs(r"\frac{\text{ 設備 }}{A}"))] == ["term"]


# The report.


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """A translated book with edits that `make po` has not seen; its messages, collected by Sphinx."""
    root = tmp_path_factory.mktemp("edited")
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/01-mesh\nchapters: [file: book/02-variables]\n"
    )
    for name in ("site", "src", "bookkit", "conf.py", ".github"):
        (root / name).symlink_to(ROOT / name)
    (root / "book").mkdir()
    book = Book(root)
    paragraphs = "\n\n".join(
        f"Paragraph {n} says what it says, and that it was written in 2026." for n in range(20)
    )
    old = "So a mesh is two things, devices and names."
    book.source("book/01-mesh").write_text(
        f"{FRONT}\n# A mesh\n\n{paragraphs}\n\n{old}\n\nThe end.\n", "utf-8"
    )
    book.source("book/02-variables").write_text("# Variables\n\nNothing yet.\n", "utf-8")
    po.main([], root)
    for path in root.rglob("*.po"):  # as if Chinese were English: what it says is all there
        catalogue = catalogues.read_catalogue(path)
        for entry in catalogue:
            entry.msgstr = entry.msgid
        catalogue.save(str(path))
    path = book.source("book/01-mesh")
    text = path.read_text("utf-8")
    path.write_text(
        text.replace(old, f"{old} This was added.\n\nThis paragraph did not stand here before."),
        "utf-8",
    )
    return book, po.every_message(book), path.read_text("utf-8")


def test_only_a_page_that_changed_is_taken_apart_again(edited):
    trees = edited[0].root / "_build" / "gettext" / "doctrees" / "book"
    other, own = (
        (trees / f"{name}.doctree").stat().st_mtime_ns for name in ("02-variables", "01-mesh")
    )
    assert other < edited[0].source("book/01-mesh").stat().st_mtime_ns <= own


def test_other_code_takes_every_page_apart_again(monkeypatch, tmp_path):
    monkeypatch.setattr(sphinx_ext.bookkit, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "words").mkdir()
    noted = []
    for code in ("one = 1", "one = 2"):
        (tmp_path / "words" / "part.py").write_text(code)
        config = Config()
        sphinx_ext.note_code(None, config)
        noted.append(config.book_code)
    assert len({*noted}) == 2


def report(edited, monkeypatch, capsys, *options):
    book, messages, _ = edited
    monkeypatch.setattr(po, "every_message", lambda book: messages)
    status = translations.main(options, book.root)
    return status, *capsys.readouterr()


def test_an_edit_is_listed_before_make_po_and_after(edited, monkeypatch, capsys):
    book, messages, text = edited
    status, out, err = report(edited, monkeypatch, capsys, "--list")
    assert status == 0, err  # it is a report
    assert "not complete" in out and re.search(
        r"\| book/01-mesh +\| +\d+ \| +1 \| +1 \|.*\| +9\d \|", out
    ), out
    line = 1 + text[: text.index("This paragraph did not stand")].count("\n")
    assert f"book/01-mesh.md:{line}: missing: This paragraph" in out
    assert (
        f"book/01-mesh.md:{line - 2}: stale: So a mesh is two things" in out
        and "`make po` brings it" in out
    )

    monkeypatch.setattr(
        po,
        "page_messages",
        lambda book: {
            name: found
            for name, found in messages.items()
            if not name.startswith(("code/", "drawings"))
        },
    )
    po.main([], book.root)
    files = sorted(book.root.rglob("*.po"))
    before = [path.read_bytes() for path in files]
    po.main([], book.root)  # a second time: every byte stays
    assert [path.read_bytes() for path in files] == before
    capsys.readouterr()
    status, out, err = report(edited, monkeypatch, capsys, "--list")
    assert status == 0, err
    assert re.search(
        r"stale: So a mesh is two things.*\n    locale/zh_TW/LC_MESSAGES/book/01-mesh.po:\d+$",
        out,
        re.M,
    ), out
    assert re.search(
        r"missing: This paragraph.*\n    locale/zh_TW/LC_MESSAGES/book/01-mesh.po:\d+$", out, re.M
    )


def test_only_a_release_asks_for_all_messages(edited, monkeypatch, capsys):
    status, _, err = report(edited, monkeypatch, capsys, "--complete")
    assert status == BROKEN and "繁體中文: 2 messages are left to translate" in err
    assert report(edited, monkeypatch, capsys)[0] == 0


def test_what_is_broken_exits_with_2_and_says_where(edited, monkeypatch, capsys):
    book = edited[0]
    name, entry, text = change(book, r"\b2026\b", "2025", english="2026")
    path = catalogues.catalogue_folder(book, LANGUAGES[0]) / f"{name}.po"
    catalogue = catalogues.read_catalogue(path)
    catalogue.find(entry.msgid).msgstr = text
    catalogue.save(str(path))
    status, out, err = report(edited, monkeypatch, capsys)
    assert status == BROKEN and "| all " in out
    assert f"{name}.po:" in err and "number: the English says 2026, the translation does not" in err


def test_without_msgfmt_it_says_so_or_fails(edited, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "msgfmt is not installed" in report(edited, monkeypatch, capsys)[1]
    with pytest.raises(Problem, match="apt-get install gettext"):
        translations.main(["--msgfmt"], edited[0].root)


def test_a_page_that_waits_may_lack_what_only_a_whole_page_can_have(tmp_path):
    book = small(tmp_path, "網格。", "一個網格。", "網格有名字。")
    said = " ".join(map(str, check_language(book, LANGUAGES[0])))
    assert (
        "nothing is excepted any more" in said
        and "網格, 3 times on the page, and never with its English" in said
    )
    book = small(tmp_path, "網格。", "一個網格。", "網格有名字。", "")
    assert not check_language(book, LANGUAGES[0])
    assert check_language(
        small(tmp_path, "3 个裝置。", ""), LANGUAGES[0]
    )  # each message is still looked at


# Folds.


FOLDED = """# T

Before.

<details class="predict">
<summary>Answer, in `code`</summary>

Inside.

</details>

After.
"""


def test_summaries_stand_in_their_places(tmp_path):
    book = a_copy(tmp_path)
    (tmp_path / "book").mkdir()
    page = tmp_path / "book" / "01-mesh.md"
    page.write_text(FRONT + "\n" + FOLDED, "utf-8")
    found = messages_of_page(book, "book/01-mesh", ["T", "Before.", "Inside.", "After."])
    in_place = ["T", "Before.", "Answer, in `code`", "Inside.", "After."]
    assert [message.text for message in found] == in_place and "fold" in found[2].comment
    again = messages_of_page(book, "book/01-mesh", in_place)  # Sphinx had them
    assert [one.text for one in again] == in_place and again[2].comment


def test_the_line_of_a_message():
    source = "# Title\n\nOne line\nand another.\n\n> [!NOTE]\n> **Bold** words.\n\n| a | cell |\n|---|---|\n| b | some words |\n- an item\n  goes on\n"
    texts = [
        "Title",
        "One line and another.",
        "**Bold** words.",
        "some words",
        "an item goes on",
        "nowhere",
    ]
    assert [Lines(source).of(text) for text in texts] == [1, 3, 7, 11, 12, 0]
