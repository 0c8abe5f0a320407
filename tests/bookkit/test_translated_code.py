"""Comments and drawings in other languages: the code is the same, and every message is found."""

import ast
import html
import json
from xml.etree import ElementTree

import pytest

from bookkit.model.book import Book
from bookkit.model.chapter import parse
from bookkit.sphinx_ext.figures import in_language
from bookkit.words.catalogues import catalogue_of
from bookkit.words.comments import FUNCTIONS_AND_CLASSES, comments, with_comments
from bookkit.words.drawn import Translator
from toy import ROOT

BOOK = Book()
NAMES = BOOK.chapters


def cells(name):
    return parse(name, BOOK.source(name).read_text("utf-8")).code


def tree(code):
    """What a cell does, whatever its comments and docstrings say."""
    try:
        parsed = ast.parse(code)
    except SyntaxError:  # IPython's own syntax, or wrong on purpose: nothing may change
        return code
    for node in ast.walk(parsed):
        if isinstance(node, FUNCTIONS_AND_CLASSES) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.dump(parsed)


class Marked(dict):
    """A language in which every message is ⟦message⟧."""

    def get(self, text, default=None):
        return f"⟦{text}⟧"


@pytest.mark.parametrize("name", NAMES)
def test_a_translated_cell_has_the_same_syntax_tree(name):
    languages = [catalogue_of(BOOK, one).translations for one in BOOK.languages[1:]]
    for messages in [Marked(), *languages]:
        for cell in cells(name):
            assert tree(with_comments(cell.source, messages)) == tree(cell.source), cell.where


def test_comments_at_line_ends_in_runs_in_strings_and_of_forms():
    code = '''\
# @title Setup: versions
# one line
# and another
x = "# no comment"  # at the end
url = f"{x}#anchor"  # it's here
def f():
    """A line. # as this"""
    def g():
        r"""No plain one."""
        """And a string."""
    # indented
    #   more
    return """
# inside a string
"""  # type: ignore
y = 1  # noqa: E501
#
'''
    assert [comment.text for comment in comments(code)] == [
        "Setup: versions",
        "one line\nand another",
        "at the end",
        "it's here",
        "A line. # as this",
        "indented\n  more",
    ]
    messages = {
        "Setup: versions": "設定：版本",
        "one line\nand another": "一行\n兩行\n三行",
        "at the end": "在\n行末",
        "A line. # as this": "一行。",
        "indented\n  more": "縮排",
    }
    made = with_comments(code, messages)
    assert made == (
        code.replace("Setup: versions", "設定：版本")
        .replace("# one line\n# and another", "# 一行\n# 兩行\n# 三行")
        .replace("at the end", "在 行末")
        .replace("A line. # as this", "一行。")
        .replace("# indented\n    #   more", "# 縮排")
    )
    assert tree(made) == tree(code)


def test_a_cell_that_is_no_python_stays():
    code = "x = (1,  # open\n"
    assert with_comments(code, Marked()) == code


# Drawings.


def test_a_figure_that_meshscope_drew_is_shown_in_chinese():
    svg = (ROOT / "book" / "figures" / "drawing_explained.svg").read_text("utf-8")
    english, chinese = BOOK.languages[0], BOOK.language("zh_TW")
    assert in_language(BOOK, english, svg) == svg
    shown = [
        "".join(text.itertext())
        for text in ElementTree.fromstring(in_language(BOOK, chinese, svg)).iter()
    ]
    assert {"沿 data(2) 各有副本", "每個裝置：8×4"} < {*shown}


def test_a_drawing_is_translated_and_keeps_names_and_numbers():
    translator = Translator({
        "{title}, {array}: {parts}": "{title}，{array}：{parts}",
        "{part}; {parts}": "{part}；{parts}",
        "dimension {dim} of size {size} whole": "第 {dim} 維大小 {size}，不切",
        "copied over {axes}": "沿 {axes} 複製",
        "each device: {shape}": "每個裝置：{shape}",
    })  # fmt: skip
    parts = ["{part}; {parts}", {"part": ["dimension {dim} of size {size} whole", {"dim": "1", "size": "16"}],
                                 "parts": ["copied over {axes}", {"axes": "c(2)"}]}]  # fmt: skip
    values = {"title": "pixels of a batch", "array": "float32[8,16] P('a', None)", "parts": parts}
    says = "pixels of a batch, float32[8,16] P('a', None): dimension 1 of size 16 whole; copied over c(2)"
    kept = (
        ' data-message="{title}, {array}: {parts}" data-values=\''
        + html.escape(json.dumps(values))
        + "'>"
    )
    copied = '<text data-message="copied over {axes}" data-values=\'{"axes":"c(2)"}\'>'
    colour = '<tspan fill="red">c</tspan>(2)'
    svg = (f'<svg role="img" aria-label="{html.escape(says)}"{kept}<text x="1">pixels of a batch</text>'
           f"{copied}copied over {colour}</text><text>each device: 2×16</text></svg>")  # fmt: skip
    assert (
        translator.output(f"<p>each device: 1</p>{svg}")
        == (
            '<p>each device: 1</p><svg role="img" aria-label="pixels of a batch，float32[8,16] '
            f'P(&#x27;a&#x27;, None)：第 1 維大小 16，不切；沿 c(2) 複製"{kept}<text x="1">pixels of a batch</text>'
            f"{copied}沿 {colour} 複製</text><text>each device: 2×16</text></svg>"  # the last has no data: not ours
        )
    )


def test_a_table_is_translated_by_its_data_and_its_other_cells_stay():
    translator = Translator(
        {"{part}, {parts}": "{part}，{parts}", "sharded": "已切分", "{count} copies": "{count} 份"}
    )
    values = '{"part":["sharded",{}],"parts":["{count} copies",{"count":"4"}]}'
    cell = f"<td data-message=\"{{part}}, {{parts}}\" data-values='{values}'>"
    table = f"<table><tr>{cell}sharded, 4 copies</td><td>sharded</td></tr></table>"
    assert (
        translator.output(table)
        == f"<table><tr>{cell}已切分，4 份</td><td>sharded</td></tr></table>"
    )


def test_a_text_that_is_not_what_its_data_say_stays():
    translator = Translator({"copied over {axes}": "沿 {axes} 複製"})
    svg = '<svg><text data-message="copied over {axes}" data-values=\'{"axes":"c"}\'>changed</text></svg>'
    assert translator.output(svg) == svg


def test_a_translation_that_lost_a_place_is_not_used():
    translator = Translator({"each device: {shape}": "每個裝置"})
    assert translator.said(("each device: {shape}", {"shape": "2×16"})) == "each device: 2×16"
