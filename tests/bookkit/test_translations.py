"""Translations keep what their English says; and each check sees what it is there for.

A real message is broken in one way, and the check must name it.
"""

import re
import shutil

import polib
import pytest
from sphinx.config import Config

from bookkit import sphinx_ext
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import parse
from bookkit.words import report
from bookkit.words.catalogues import Catalogue, catalogue_of, catalogue_path, has_words
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
from bookkit.words.messages import ABOUT_LINES, is_plain
from bookkit.words.notebooks import BADGE, messages_in_markdown
from bookkit.words.po import template
from bookkit.words.report import BROKEN, check_file, check_language, check_messages
from toy import ROOT

BOOK = Book()
LANGUAGES = BOOK.languages[1:]
CHINESE = catalogue_of(BOOK, BOOK.language("zh_TW"))
HOUSE = read_house(ROOT / "locale" / "zh_TW" / "terms.toml")
PO = CHINESE.path.relative_to(ROOT)


# The catalogues as they are.


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.code)
def test_no_translation_lost_anything_and_words_are_the_books_own(language):
    found = check_language(BOOK, language)
    assert not found, "\n".join(["", *map(str, found)])


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.code)
def test_gettext_accepts_the_catalogue(language):  # by msgfmt, where it is installed
    assert not list(check_file(catalogue_path(BOOK, language), ROOT))


def test_all_that_notebooks_say_is_in_the_catalogue():
    known = {entry.msgid for entry in template(BOOK)}
    for page in BOOK.chapters:
        for cell in parse(page, BOOK.source(page).read_text("utf-8")).cells:
            texts = messages_in_markdown(BADGE.sub("", cell.source)) * (cell.kind == "markdown")
            assert not [text for text in texts if has_words(text) and text not in known], page


# A message broken on purpose.


def finished(kind):
    """Each finished message of text or of code."""
    for text in CHINESE.translations:
        if is_plain(CHINESE.entries[text]) == (kind == "code"):
            yield CHINESE.entries[text]


def catalogue(*entries):
    known = {entry.msgid: entry for entry in entries}
    return Catalogue(PO, known, {entry.msgid: entry.msgstr for entry in entries})


CODE_SPAN = r"(?<!`)`[^`]+`(?!`)"
BREAKS = {  # how: (what, by what, of which kind, check, what it says, in which English)
    "a link dropped": (r"\[([^\]]+)\]\(http[^)]+\)", r"\1", "text", "link", "lacks http", ""),
    "a link's address": (r"\]\(https?://", "](https://x.", "text", "link", "lacks http", ""),
    "a number changed": (r"(?<!-)\b2026\b", "2025", "text", "number", "2026", "2026"),
    "a small number": (r"(?<= )8(?= 個裝置)", "7", "text", "number", "7 is not in", "eight devices"),
    "a word's number": (r"(?<= )8(?= 個裝置)", "幾",
        "text", "number", "says 8 in words", "^[^8]*eight devices[^8]*$"),
    "a code span changed": (CODE_SPAN, "`other`", "text", "code", "has other", ""),
    "a code span lost": (CODE_SPAN, "它", "text", "code", "lacks", ""),
    "a formula changed": (r"\$n\$", "$m$", "text", "formula", "lacks n", ""),
    "a formula lost": (r"\$[^$]+\$", "它", "text", "formula", "lacks", ""),
    "a formula of its own": (r"^(?=\\text\{)", "x = ", "text", "formula", "copy the English", ""),
    "a sign of a formula": (r"^\\frac", r"\\sqrt", "text", "formula", "copy the English", ""),
    "a placeholder renamed": (r"\{axes\}", "{軸}", "code", "placeholder", "lacks {axes}", ""),
    "a placeholder lost": (r"\{\w+\}", "某", "code", "placeholder", "lacks {", ""),
    "emphasis lost": (r"\*\*([^*]+)\*\*", r"\1", "text", "emphasis", "renders 0 times", ""),
    "emphasis that does not render": (r"\*\*([\u4e00-\u9fff][^*。：？！`]*)\*\*(?=[\u4e00-\u9fff])", r"**\1。**",
        "text", "emphasis", "put 。 outside", ""),
    "a tag": (r"(?<=[\u4e00-\u9fff])，", "<b>，", "text", "HTML", "has <b>", ""),
    "a heading made": (r"^(?=[\u4e00-\u9fff])", "# ", "text", "Markdown", "heading_open", ""),
    "a list made": (r"^(?=[\u4e00-\u9fff])", "1. ", "text", "Markdown", "ordered_list_open", ""),
    "a mainland word": ("裝置", "設備", "text", "term", "device is 裝置", ""),
    "via": ("透過", "通過", "text", "term", "via is 透過", ""),
    "a simplified sign": ("[個]", "个", "text", "term", "个 is no sign", ""),
    "a simplified sign that Big5 has": ("與", "与", "text", "term", "与 is no sign", ""),
    "a mainland word in a comment": ("裝置", "設備", "code", "term", "device is 裝置", ""),
    "no space at code": (rf"(?<=[\u4e00-\u9fff]) (?={CODE_SPAN})", "",
        "text", "punctuation", "put a space between", ""),
    "no space at digits": (r"(?<=[\u4e00-\u9fff]) (?=\d)", "",
        "text", "punctuation", "put a space between", ""),
    "a space at a Chinese link": (r"(?<=[\u4e00-\u9fff])(?=\[第 1 章\])", " ",
        "text", "punctuation", "those of a link included", ""),
    "no space at an English link": (r"(?<=[\u4e00-\u9fff]) (?=\[Megatron)", "",
        "text", "punctuation", "put a space between", ""),
    "a space in Chinese": (r"(?<=裝)(?=置)", " ",
        "text", "punctuation", "no space between Chinese", ""),
    "a space after a comma": ("，", "， ", "text", "punctuation", "no space beside", ""),
    "a half-width comma": ("，(?=[\u4e00-\u9fff])", ",", "text", "punctuation", "write ，；：！？", ""),
    "a half-width colon": ("：(?=[\u4e00-\u9fff])", ": ", "text", "punctuation", "write ，；：！？", ""),
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
    where = {"occurrences": [("book/01-mesh.md", "")], "comment": entry.comment, "linenum": 7}
    broken = polib.POEntry(msgid=entry.msgid, msgstr=text, **where)
    found = list(check_messages(catalogue(broken), HOUSE, PO))
    hits = [one for one in found if one.finding.check == check and says in one.finding.what]
    assert hits, (text, "\n".join(map(str, found)))
    assert str(hits[0]).startswith(f"locale/zh_TW/LC_MESSAGES/book.po:7: {check}: ")


def test_a_line_more_than_the_drawing_has_is_named():
    for told, checks in (("一張\n記憶體", []), ("一張", []), ("一\n張\n記憶體", ["lines"])):
        about = {"comment": f"In a drawing. {ABOUT_LINES}"}
        entry = polib.POEntry(msgid="memory\nof one", msgstr=told, **about)
        found = check_messages(catalogue(entry), House(), PO)
        assert [one.finding.check for one in found] == checks


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
    """A book of one page with these translations, and terms with an exception."""
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/01-mesh\n")
    book = Book(root)
    path = catalogue_path(book, LANGUAGES[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / "locale" / "zh_TW" / "terms.toml").write_text(TERMS, "utf-8")
    file = polib.POFile(wrapwidth=0)
    file.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "zh_TW"}
    for n, new in enumerate(translations):
        where = {"occurrences": [("book/01-mesh.md", "")]}
        file.append(polib.POEntry(msgid=f"Sentence {chr(97 + n)}.", msgstr=new, **where))
    file.save(str(path))
    return book


def test_an_exception_that_no_longer_applies_fails(tmp_path):
    [found] = check_language(small(tmp_path, "裝置。"), LANGUAGES[0])
    assert "nothing is excepted any more" in str(found) and "設備" in str(found)
    assert not check_language(small(tmp_path, "一個設備。"), LANGUAGES[0])
    assert not check_language(
        small(tmp_path, "裝置。", ""), LANGUAGES[0]
    )  # it may be of what waits


def test_a_page_that_waits_may_lack_what_only_a_whole_page_can_have(tmp_path):
    page = ("設備。", "網格。", "一個網格。", "網格有名字。")
    said = " ".join(map(str, check_language(small(tmp_path, *page), LANGUAGES[0])))
    assert "網格, 3 times on the page, and never with its English" in said
    assert not check_language(small(tmp_path, *page, ""), LANGUAGES[0])
    assert check_language(small(tmp_path, "3 个裝置。", ""), LANGUAGES[0])  # each is looked at


@pytest.mark.parametrize("bad", ["= 1", '[[exception]]\npage = "x"\ncheck = "term"\ntext = "y"\n'])
def test_terms_that_cannot_be_read_say_so(tmp_path, bad):
    book = small(tmp_path, "裝置。")
    (tmp_path / "locale" / "zh_TW" / "terms.toml").write_text(bad)
    with pytest.raises(Problem, match="terms.toml"):
        check_language(book, LANGUAGES[0])


@pytest.mark.parametrize("msgfmt", [True, False])
@pytest.mark.parametrize("line", ["no line of a catalogue", 'msgid "Sentence a."\nmsgstr "二"'])
def test_a_catalogue_that_gettext_refuses_is_named(tmp_path, monkeypatch, msgfmt, line):
    if not msgfmt:
        monkeypatch.setenv("PATH", "/nowhere")
    elif not shutil.which("msgfmt"):
        pytest.skip("msgfmt is not installed")
    path = catalogue_path(small(tmp_path, "裝置。"), LANGUAGES[0])
    path.write_text(f"{path.read_text('utf-8')}\n{line}\n", "utf-8")
    [said] = check_file(path, tmp_path)
    assert re.match(r"locale/zh_TW/LC_MESSAGES/book\.po:( the file|\d+: )", said)
    assert "orrect" in said.split("\n")[-1]


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


@pytest.mark.parametrize("english, translated", [
    ("eight devices", "8 個裝置"), ("eight devices", "八個裝置"), ("four billion", "四十億"),
    ("4 billion", "40 億"), ("1.46 million", "146 萬"), ("4.3 billion", "43 億"), ("twice", "2 倍"),
    ("an eighth", "八分之一"), ("an eighth", "1/8"), ("half of 16", "16 的一半"), ("twenty-five", "25"),
    ("a hundred and twenty-eight", "128"), ("12,345 bytes", "12345 位元組"), ("8,16", "8、16"),
    ("in 0.12.1", "0.12.1 版"), ("November 2026", "2026 年 11 月"), ("ten thousand", "一萬"),
    ("two rows, four columns", "兩列、4 行"), ("sixes", "6"), ("3 thousand", "3 千"),
    ("one trillion parameters", "one trillion parameters"),
])  # fmt: skip
def test_the_same_number_in_digits_and_words(english, translated):
    assert not list(unlike_english(english, translated))


@pytest.mark.parametrize("english, translated", [
    ("8 devices", "7 個裝置"), ("8 devices", "裝置"), ("devices", "8 個裝置"),
    ("4 billion", "4 億"), ("4.3 billion", "44 億"), ("eight devices", "四個裝置"), ("2×4", "2×2"),
    ("12,345", "1234"), ("0.12.1", "0.12"), ("half", "3 倍"), ("8 and 8", "8"),
])  # fmt: skip
def test_another_number_is_seen(english, translated):
    assert [one for one in unlike_english(english, translated) if one.check == "number"]


def test_how_numbers_are_read():
    english, chinese = english_numbers("3 million, 8,16"), translated_numbers("40 億與 3")
    assert english.digits == {"3000000": 1, "8": 1, "16": 1}
    assert chinese.digits == {"4000000000": 1, "3": 1}
    assert {"4000000000", "2026"} < translated_numbers("四十億、二〇二六").words.keys()
    assert not english_numbers("four billion, sixty-four").words  # left to the reader


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


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """What `make translations` says of a page of five messages, of which one was just written."""
    book = small(tmp_path, "一。", "設備。", "")
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
    status, out, err, _ = told("--list")
    assert status == 0 and not err
    assert "2 of 6 messages are translated" in out
    assert re.search(r"\| book/01-mesh +\| +2 \| +1 \| +2 \| +40 \|", out), out
    assert re.search(r"\| words of the site +\| +0 \| +0 \| +1 \|", out), out
    assert re.search(r"book\.po:\d+: missing: Sentence c\. \(book/01-mesh\.md\)\n", out)
    assert re.search(r"book\.po:\d+: fuzzy: Sentence d\.", out)
    assert "book.po, after `make po`: missing: Just written." in out


def test_only_a_release_asks_for_all_messages(told):
    status, _, err, _ = told("--complete")
    assert status == BROKEN and "繁體中文: 4 messages are left to translate" in err


def test_what_is_broken_exits_with_2_and_says_where(told):
    path = catalogue_path(told()[3], LANGUAGES[0])
    path.write_text(path.read_text("utf-8").replace("一。", "7 個。"), "utf-8")
    status, out, err, _ = told()
    assert status == BROKEN and "| all " in out
    assert re.search(r"book\.po:\d+: number: 7 is not in the English\n    Sentence a\.\n", err)


def test_without_msgfmt_it_says_so_or_fails(told, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "msgfmt is not installed" in told()[1]
    with pytest.raises(Problem, match="apt-get install gettext"):
        told("--msgfmt")


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
