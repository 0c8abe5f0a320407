"""What figures say is marked in their programs, carried in their drawings, and shown in every language."""

import html
import re
import sys
from xml.etree import ElementTree

import pytest

from bookkit.model.book import Book
from bookkit.words.catalogues import has_words
from bookkit.words.drawn import PLACE, Translator, messages_in_drawing
from bookkit.words.messages import drawn_messages
from toy import ROOT

sys.path.insert(0, str(ROOT / "book" / "figures"))
import kit

BOOK = Book()
FIGURES = sorted((ROOT / "book" / "figures").glob("*.svg"))
MESSAGES = list(drawn_messages(BOOK))


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


def test_the_lines_of_a_message_are_one_sentence():
    said = kit.say("memory\nof {size} GB", size=80)
    svg = drawing(*kit.lines(0, 12, 14, said, 12, bold=True))
    assert list(dict.fromkeys(messages_in_drawing(svg))) == ["memory\nof {size} GB"]
    assert texts(svg) == ["memory", "of 80 GB"] and ' y="26"' in svg
    assert translated(svg, **{"memory\nof {size} GB": "{size} GB\n記憶體"}) == ["80 GB", "記憶體"]
    assert translated(svg, **{"memory\nof {size} GB": "{size} GB"}) == ["80 GB", ""]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_made_up_language_reaches_every_message(path):
    known = {message.msgid for message in MESSAGES}
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
