"""Comments and drawings in other languages: the code is the same, and every sentence is found."""
import html
import json
import re
import shutil

import pytest

from bookkit.lint.outputs import outputs
from bookkit.lint.repository import syntax_tree as tree
from bookkit.lint.rules import CHAPTER, Page
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import CHECKED, load_chapter, parse, shared_cells
from bookkit.sphinx_ext.figures import in_language
from bookkit.words import catalogues
from bookkit.words.comments import comments, with_comments
from bookkit.words.drawn import (
    ELEMENT,
    LABEL,
    PICTURE,
    Translator,
    data,
    drawn_messages,
    labels,
    of_meshscope,
    signatures,
)
from bookkit.words.messages import code_messages, found_by_matching
from meshscope._messages import MESSAGES as OF_MESHSCOPE
from toy import ROOT

BOOK = Book()
NAMES = [page.rsplit("/", 1)[-1] for page in BOOK.chapters]
MESSAGES = code_messages(BOOK)


def cells(name):
    return parse(name, BOOK.source(f"book/{name}").read_text("utf-8")).code


def texts(name):
    return [message.text for part in catalogues.names_for_code(name) for message in MESSAGES[part]]


class Marked(dict):
    """A language in which every message is ⟦message⟧."""

    def get(self, text, default=None):
        return f"⟦{text}⟧"


@pytest.mark.parametrize("name", NAMES)
def test_a_translated_cell_has_the_same_syntax_tree(name):
    languages = [catalogues.for_code(BOOK, one, f"book/{name}") for one in BOOK.languages[1:]]
    for messages in [Marked(), *languages]:
        for cell in cells(name):
            assert tree(with_comments(cell.source, messages)) == tree(cell.source), cell.where


@pytest.mark.parametrize("name", NAMES)
def test_every_comment_has_a_message(name):
    known = set(texts(name))
    for cell in cells(name):
        known |= {CHECKED + cell.claim} if cell.claim else set()  # in the catalogue of the page's text
        for comment in comments(cell.source):
            assert comment.text in known, f"{cell.where}: {comment.text}"


def test_comments_at_line_ends_in_runs_in_strings_and_of_forms():
    code = '''\
# @title Setup: versions
# one line
# and another
x = "# no comment"  # at the end
url = f"{x}#anchor"  # it's here
def f():
    """Docstrings are code. # as this"""
    # indented
    #   more
    return """
# inside a string
"""  # type: ignore
y = 1  # noqa: E501
#
'''
    assert [comment.text for comment in comments(code)] == [
        "Setup: versions", "one line\nand another", "at the end", "it's here", "indented\n  more",
    ]
    messages = {
        "Setup: versions": "設定：版本",
        "one line\nand another": "一行\n兩行\n三行",
        "at the end": "在\n行末",
        "indented\n  more": "縮排",
    }
    made = with_comments(code, messages)
    assert made == (
        code.replace("Setup: versions", "設定：版本")
        .replace("# one line\n# and another", "# 一行\n# 兩行\n# 三行")
        .replace("at the end", "在 行末")
        .replace("# indented\n    #   more", "# 縮排")
    )
    assert tree(made) == tree(code)


def test_a_cell_that_is_no_python_stays():
    code = "x = (1,  # open\n"
    assert with_comments(code, Marked()) == code


def test_a_shared_comment_is_one_message():
    # a figure's word may be another word in Chinese than a label of code: they have no catalogue in common
    of_code = (messages for name, messages in MESSAGES.items() if name != "figures")
    everywhere = [message.text for messages in of_code for message in messages]
    assert len(everywhere) == len(set(everywhere))
    for code in shared_cells(BOOK).values():
        for comment in comments(code):
            assert comment.text in {message.text for message in MESSAGES["code/shared"]}


# Drawings.


def drawn(markup):
    """Every text of a drawing or of a table of meshscope that has words, and what its tag says of it."""
    for picture in PICTURE.findall(markup):
        for label in LABEL.finditer(picture):
            yield html.unescape(label["label"]), data(label[0])
        for tag, _, inside, _ in ELEMENT.findall(picture):
            yield html.unescape(re.sub(r"<[^<>]+>", "", inside)), data(tag)


def named(said):
    """The names and titles in what a tag says."""
    if isinstance(said, str):
        yield said
    else:
        for value in said[1].values():
            yield from named(value)


def executed(name):
    """Every text that a page's executed outputs draw, and what its tag says of it."""
    page = Page(load_chapter(BOOK.source(f"book/{name}")), CHAPTER, BOOK)
    assert page.executed, f"run `bookkit execute book/{name}`"
    for _, output in outputs(page):
        for mime, markup in output.get("data", {}).items():
            if mime in ("text/html", "image/svg+xml"):
                yield from drawn(markup)


@pytest.mark.parametrize("name", labels(BOOK))
def test_every_label_of_drawn_toml_is_drawn(name):
    used, translator = set(), Translator(found_by_matching(MESSAGES, name), {})

    def use(text):
        if found := translator.find(text):
            used.add(found[0])
            for part in found[1].values():
                use(part)

    for text, said in executed(name):
        for part in named(said) if said else [text]:
            use(part)
    assert used >= {*labels(BOOK)[name]}


def test_a_label_for_a_page_that_is_not_there_is_refused(tmp_path):
    shutil.copytree(ROOT / "book", tmp_path / "book")
    for name in ("_config.yml", "_toc.yml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "book" / "drawn.toml").write_text('04-trane = ["loss"]\n', "utf-8")
    with pytest.raises(Problem, match="no page with code is called 04-trane"):
        labels(Book(tmp_path))


# What charts write in Chinese, by page: text as it was executed, and as it is shown.
SHOWN = {
    "04-train": {"loss": "損失",
                 "all-gather over data": "沿 data 的 all-gather", "tensor parallel": "tensor parallel"},
    "train-checks": {"pinned: weights move": "有約束：權重移動"},
    "restarts": {
        "life 2": "第 2 條命",
        "life 1: from step 0, killed at 4, complete [2]; life 2: from step 2, killed at None, complete [4, 6]":
            "第 1 條命：從第 0 步開始，終止於第 4 步，完成 [2]；第 2 條命：從第 2 步開始，沒有強制終止，完成 [4, 6]",
    },
    "process-failures": {"-9, killed": "-9，強制終止", "killed": "killed"},
    "memory": {"activations and scratch": "活化值與暫存記憶體", "FSDP": "FSDP"},
    "activations": {"activations and scratch": "活化值與暫存記憶體", "FSDP, remat": "FSDP, remat",
                    "FSDP, eight parts": "FSDP，八份"},
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_labels_of_charts_are_shown_in_chinese(name):
    known = catalogues.for_code(BOOK, BOOK.language("zh_TW"), f"book/{name}")
    translator = Translator(found_by_matching(MESSAGES, name), known)
    for text, chinese in SHOWN[name].items():
        old = f'<svg role="img"><text x="0">{text}</text></svg>'
        assert translator.output(old) == old.replace(text, chinese)


def test_a_figure_that_meshscope_drew_is_shown_in_chinese():
    svg = (ROOT / "book" / "figures" / "drawing_explained.svg").read_text("utf-8")
    english, chinese = BOOK.languages[0], BOOK.language("zh_TW")
    assert in_language(BOOK, english, svg) == svg
    shown = [text for text, _ in drawn(in_language(BOOK, chinese, svg))]
    assert {"沿 data(2) 各有副本", "每個裝置：8×4"} < {*shown}


def test_a_spec_that_a_drawing_shows_keeps_its_comma():
    known = catalogues.for_code(BOOK, BOOK.language("zh_TW"), "book/04-train")
    svg = "<svg><text>float32[8,16] P('data', 'model')</text></svg>"
    assert Translator(found_by_matching(MESSAGES, "04-train"), known).output(svg) == svg


def test_messages_of_meshscope_are_read_from_its_list():
    assert of_meshscope() == OF_MESHSCOPE


def test_a_drawing_is_translated_and_keeps_names_and_numbers():
    translator = Translator(["pixels of a batch"], {
        "{title}, {array}: {parts}": "{title}，{array}：{parts}",
        "{part}; {parts}": "{part}；{parts}",
        "dimension {dim} of size {size} whole": "第 {dim} 維大小 {size}，不切",
        "copied over {axes}": "沿 {axes} 複製",
        "each device: {shape}": "每個裝置：{shape}",
        "pixels of a batch": "一個批次的像素",
    })  # fmt: skip
    parts = ["{part}; {parts}", {"part": ["dimension {dim} of size {size} whole", {"dim": "1", "size": "16"}],
                                 "parts": ["copied over {axes}", {"axes": "c(2)"}]}]  # fmt: skip
    values = {"title": "pixels of a batch", "array": "float32[8,16] P('a', None)", "parts": parts}
    says = "pixels of a batch, float32[8,16] P('a', None): dimension 1 of size 16 whole; copied over c(2)"
    kept = " data-message=\"{title}, {array}: {parts}\" data-values='" + html.escape(json.dumps(values)) + "'>"
    copied = "<text data-message=\"copied over {axes}\" data-values='{\"axes\":\"c(2)\"}'>"
    colour = '<tspan fill="red">c</tspan>(2)'
    svg = (f'<svg role="img" aria-label="{html.escape(says)}"{kept}<text x="1">pixels of a batch</text>'
           f"{copied}copied over {colour}</text><text>each device: 2×16</text></svg>")  # fmt: skip
    assert translator.output(f"<p>each device: 1</p>{svg}") == (
        '<p>each device: 1</p><svg role="img" aria-label="一個批次的像素，float32[8,16] '
        f'P(&#x27;a&#x27;, None)：第 1 維大小 16，不切；沿 c(2) 複製"{kept}<text x="1">一個批次的像素</text>'
        f"{copied}沿 {colour} 複製</text><text>each device: 2×16</text></svg>"  # the last has no data: not ours
    )


def test_a_table_is_translated_by_its_data_and_its_other_cells_stay():
    translator = Translator([], {"{part}, {parts}": "{part}，{parts}", "sharded": "已切分", "{count} copies": "{count} 份"})
    values = '{"part":["sharded",{}],"parts":["{count} copies",{"count":"4"}]}'
    cell = f"<td data-message=\"{{part}}, {{parts}}\" data-values='{values}'>"
    table = f"<table><tr>{cell}sharded, 4 copies</td><td>sharded</td></tr></table>"
    assert translator.output(table) == f"<table><tr>{cell}已切分，4 份</td><td>sharded</td></tr></table>"


def test_a_text_that_is_not_what_its_data_say_stays():
    translator = Translator([], {"copied over {axes}": "沿 {axes} 複製"})
    svg = "<svg><text data-message=\"copied over {axes}\" data-values='{\"axes\":\"c\"}'>changed</text></svg>"
    assert translator.output(svg) == svg


def test_a_table_of_a_chapter_says_its_heads_and_what_is_bold_in_the_language():
    translator = Translator(["who", "nobody"], {"who": "誰", "nobody": "沒有人"})
    table = '<table><th scope="col">who</th><td>{}</td><td><b>nobody</b></td></table>'
    done = '<table><th scope="col">誰</th><td>{}</td><td><b>沒有人</b></td></table>'
    assert translator.output(table.format("who")) == done.format("who")
    assert translator.output("<b>nobody</b>") == "<b>nobody</b>"  # not in a table


def test_a_translation_that_lost_a_place_is_not_used():
    translator = Translator(["each device: {shape}"], {"each device: {shape}": "每個裝置"})
    assert translator.sentence("each device: 2×16") == "each device: 2×16"
    assert translator.said(("each device: {shape}", {"shape": "2×16"})) == "each device: 2×16"


def test_what_a_chapter_draws_is_found_in_its_code():
    code = '''
def bars(rows, says): return f'<svg aria-label="{says}"><text>loss</text><title>Top</title></svg>'
bars(x, f"Bytes of {mesh.size} and {len(x)} devices")
ms.show(x, "pixels")
ms.show(x, title="by name" if y else "12")
HTML(f'<table><tr><th scope="col">who</th></tr><tr><td>all-gather</td><td><b>nobody</b></td></tr>')
print("not drawn")
'''
    found = drawn_messages(code, signatures([code]))
    assert list(found) == ["loss", "Top", "Bytes of {size} and {1} devices", "pixels", "by name",
                           "who", "nobody"]  # fmt: skip
