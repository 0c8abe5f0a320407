"""What figures say is marked in their programs, carried in their drawings, and shown in every language."""

import html
import re
import sys
from xml.etree import ElementTree

import pytest

from bookkit.model.book import Book
from bookkit.sphinx_ext.figures import in_language
from bookkit.words import catalogues, report
from bookkit.words.catalogues import has_words
from bookkit.words.drawn import PLACE, Translator, messages_in_drawing
from bookkit.words.messages import code_messages, figure_messages
from toy import ROOT

sys.path.insert(0, str(ROOT / "book" / "figures"))
import kit

BOOK = Book()
FIGURES = sorted((ROOT / "book" / "figures").glob("*.svg"))
MESSAGES = code_messages(BOOK)


def drawing(*parts):
    return kit.figure(360, 90, "spoken", parts)


def texts(svg):
    return [
        "".join(text.itertext())
        for text in ElementTree.fromstring(svg).iter()
        if text.tag.endswith("text")
    ]


def translated(svg, **known):
    return texts(Translator(known).output(svg))


def test_words_say_whether_they_are_to_be_translated():
    for words in ("weights", f"{3:,} bytes", '<tspan fill="red">data</tspan>'):
        with pytest.raises(
            TypeError, match=r"say\(…\) gives it to translators, kept\(…\) keeps it"
        ):
            kit.text(0, 0, words)
    with pytest.raises(TypeError, match="'model': say"):
        kit.say("along {axis}", axis="model")
    for words in (7, "7", "h", "16 × 4", kit.kept("data"), kit.strong("80 GB")):
        assert "data-message" not in kit.text(0, 0, words)
    assert 'data-message="along {axis}"' in kit.text(
        0, 0, kit.say("along {axis}", axis=kit.kept("model"))
    )


def test_no_program_writes_a_text_that_kit_does_not_see():
    for path in (ROOT / "book" / "figures").glob("*.py"):
        assert ("<text" in path.read_text("utf-8")) == (path.name == "kit.py"), path.name


def test_messages_are_carried_as_data_whatever_signs_they_have():
    said = kit.say('"a" < {b} & ‘c’', b=kit.kept("it's"))
    svg = drawing(kit.text(0, 0, said))
    assert list(messages_in_drawing(svg)) == ['"a" < {b} & ‘c’'] and texts(svg) == [
        '"a" < it\'s & ‘c’'
    ]
    assert translated(svg, **{'"a" < {b} & ‘c’': '{b} > ‘c’ & "a"'}) == ['it\'s > ‘c’ & "a"']


def test_values_may_be_messages_and_keep_their_colour_where_a_language_puts_them():
    axis = kit.kept('<tspan fill="blue">data</tspan>')
    svg = drawing(
        kit.text(0, 0, kit.say("{what} along {axis}, now", what=kit.say("gather"), axis=axis))
    )
    assert list(messages_in_drawing(svg)) == ["{what} along {axis}, now", "gather"]
    shown = Translator({"{what} along {axis}, now": "現沿 {axis} {what}", "gather": "彙集"}).output(
        svg
    )
    assert '>現沿 <tspan fill="blue">data</tspan> 彙集</text>' in shown


def test_what_is_bold_as_a_whole_stays_bold():
    title = kit.strong(kit.say("Data parallel"), 14)
    svg = drawing(
        kit.text(0, 0, kit.say("{strategy}  {mesh}", strategy=title, mesh=kit.kept("data 8")))
    )
    shown = Translator({"Data parallel": "資料平行"}).output(svg)
    assert '><tspan font-weight="600" font-size="14">資料平行</tspan>  data 8</text>' in shown
    with pytest.raises(TypeError, match="'all of 4' has values"):  # whose tags would be whose?
        kit.strong(kit.say("all of {n}", n=4))


def test_the_lines_of_a_message_are_one_sentence():
    said = kit.say("memory\nof {size} GB", size=80)
    svg = drawing(*kit.lines(0, 12, 14, said, 12, bold=True))
    assert list(dict.fromkeys(messages_in_drawing(svg))) == ["memory\nof {size} GB"]
    assert texts(svg) == ["memory", "of 80 GB"] and ' y="26"' in svg
    assert translated(svg, **{"memory\nof {size} GB": "{size} GB\n記憶體"}) == ["80 GB", "記憶體"]
    assert translated(svg, **{"memory\nof {size} GB": "{size} GB"}) == ["80 GB", ""]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_made_up_language_reaches_every_message(path):
    known = {message.text for name in ("drawings", "figures") for message in MESSAGES[name]}
    told = {text: "\n".join(f"⟦{line}⟧" for line in text.split("\n")) for text in known}
    svg = path.read_text("utf-8")
    assert {text for text in messages_in_drawing(svg) if has_words(PLACE.sub("", text))} <= known
    shown = Translator(told).output(svg)
    for before, after in zip(
        *(re.findall(r"<text\b[^<>]*>.*?</text>", one) for one in (svg, shown)), strict=True
    ):
        was, now = (html.unescape(re.sub(r"<[^<>]+>", "", one)) for one in (before, after))
        if any(
            has_words(PLACE.sub("", said)) for said in messages_in_drawing(f"<svg>{before}</svg>")
        ):
            assert now != was and now.replace("⟦", "").replace("⟧", "") == was, was
        else:
            assert after == before


def test_every_message_says_in_which_figures_it_is():
    comments = {message.text: message.comment for message in MESSAGES["figures"]}
    assert comments["Nothing cast"] == "In a drawing. Figure: accumulate."
    assert "Names in braces" in comments["process {number}"]
    assert comments["FSDP\n× tensor"].endswith("Figures: named_grid, strategy_grid. "
                                               "Each line is one in the figure too: keep their number.")  # fmt: skip
    assert not {message.text for message in MESSAGES["drawings"]} & comments.keys()


def test_an_edited_word_of_a_figure_is_stale_and_its_program_is_named(tmp_path):
    folder = tmp_path / "book" / "figures"
    folder.mkdir(parents=True)
    for name in ("_config.yml", "_toc.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (folder / "one.py").write_text('def draw():\n    return text(0, 0, say("Nothing is cast"))\n')
    for words in ("Nothing is cast", "never seen before"):
        (folder / f"{len(words)}.svg").write_text(drawing(kit.text(0, 0, kit.say(words))))
    book = Book(tmp_path)
    messages = figure_messages(book, set())
    known = catalogues.Catalogue(ROOT / "locale" / "zh_TW" / "LC_MESSAGES" / "figures.po")
    states = known.states(message.text for message in messages)
    assert states == {"Nothing is cast": "stale", "never seen before": "missing"}
    assert report.place_of_message(book, "figures", "Nothing is cast") == "book/figures/one.py:2"


def test_a_line_more_than_the_figure_has_is_named(tmp_path):
    path = tmp_path / "figures.po"
    for told, findings in (("一張\\n記憶體", []), ("一張", []), ("一\\n張\\n記憶體", ["lines"])):
        path.write_text(
            f'msgid ""\nmsgstr "Language: ja\\n"\n\nmsgid "memory\\nof one"\nmsgstr "{told}"\n',
            "utf-8",
        )
        found = report.check_catalogue(
            tmp_path, path, "figures", report.read_house(tmp_path / "none.toml")
        )
        assert [one.finding.check for one in found] == findings


def test_figures_have_chinese_words_on_chinese_pages():
    svg = (ROOT / "book" / "figures" / "reading.svg").read_text("utf-8")
    english, chinese = BOOK.languages[0], BOOK.language("zh_TW")
    assert in_language(BOOK, english, svg) == svg
    assert {"快速入門", "1 網格", "9 FSDP"} < {*texts(in_language(BOOK, chinese, svg))}
