"""Translated notebooks: each message replaced, everything else byte for byte."""

import json

import nbformat

from bookkit.model.book import Book
from bookkit.words.catalogues import Catalogue
from bookkit.words.notebooks import (
    Translation,
    messages_in_markdown,
    translate_markdown,
    translate_notebook,
)
from bookkit.words.notes import NOTE_WORDS, Notes

MESSAGES = {
    "A claim": "主張",
    "first line second line": "第一行與第二行",
    "item": "項目",
    "a|b": "甲|乙",
    "same": "相同",
    "**Mind** the gap.": "**小心** 間隙。",
    "A drawing": "一張圖",
    "quoted": "引文",
}


def test_each_kind_of_message():
    text = """\
## A claim

first line
second line

- item
  - item
1. untranslated

| same | a\\|b |
|---|:--:|
| x | same |
| same | same |

> [!NOTE]
> **Mind** the gap.

> quoted

![A drawing](https://x/y.svg)

$$
item
$$

```python
item
```
"""
    assert (
        translate_markdown(text, MESSAGES)
        == """\
## 主張

第一行與第二行

- 項目
  - 項目
1. untranslated

| 相同 | 甲\\|乙 |
|---|:--:|
| x | 相同 |
| 相同 | 相同 |

> [!NOTE]
> **小心** 間隙。

> 引文

![一張圖](https://x/y.svg)

$$
item
$$

```python
item
```
"""
    )


def test_without_messages_nothing_changes():
    text = "# T\n\n|a|b|\n|-|-|\n|c|d|\n\n> [!TIP]\n> x\n> y\n\n![alt](u)\n\n* a\n\n  b\n"
    assert translate_markdown(text, {}) == text


def test_fuzzy_messages_fall_back_to_english(tmp_path):
    path = tmp_path / "x.po"
    path.write_text(
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n'
        'msgid "a"\nmsgstr "甲"\n\n#, fuzzy\nmsgid "b"\nmsgstr "乙"\n\nmsgid "c"\nmsgstr ""\n',
        "utf-8",
    )
    assert Catalogue(path).translations == {"a": "甲"}
    assert Catalogue(path).states("abcd") == dict.fromkeys("abcd", "translated")  # no words



def catalogue(path, entries):
    """A catalogue file with (English, translation, flag) entries."""
    lines = ['msgid ""', 'msgstr "Content-Type: text/plain; charset=utf-8\\n"', ""]
    for text, new, *flags in entries:
        lines += [f"#, {flag}" for flag in flags]
        lines += [f"msgid {json.dumps(text)}", f"msgstr {json.dumps(new, ensure_ascii=False)}", ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), "utf-8")
    return Catalogue(path)


def test_links_and_badge_lead_to_the_translation_and_only_comments_change_in_code(tmp_path):
    book = Book()
    chinese = book.language("zh-TW")
    page = book.chapters[0]
    badge = (
        f"[![Open in Colab]({book.site}_static/colab-badge.svg)]({book.colab_url(page)}) "
        f"[Read this chapter on the site]({book.page_url(page)})"
    )
    text = f"# A claim\n\n{badge}\n\nSee [there]({book.site}book/run.html#x)."
    source = f"url = '{book.site}book/run.html # item'  # item"
    english = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(source)]
    )
    known = Translation(
        catalogue(tmp_path / "x.po", MESSAGES.items()),
        words={"Open in Colab": "在 Colab 開啟", "This passage has not been translated yet.": "未譯"},
        code={"item": "項目"},
    )
    made = translate_notebook(english, book, page, chinese, known)
    assert made.cells[0].source == (
        f"# 主張\n\n[![在 Colab 開啟]({book.site}_static/colab-badge.svg)]"
        f"({book.colab_url(page, chinese)}) [Read this chapter on the site]"
        f"({book.page_url(page, chinese)})\n\n<small>未譯</small>\n\n"
        f"See [there]({book.site}zh-TW/book/run.html#x)."
    )
    assert "/notebooks/zh-TW/" in book.colab_url(page, chinese)
    assert made.cells[1].source == source.removesuffix("item") + "項目"
    assert english.cells[0].source == text and english.cells[1].source == source


def test_notes_stand_above_what_is_stale_or_missing(tmp_path):
    text = """\
# An old heading

A paragraph that was edited after it was translated.

A claim.

Never seen before,
two lines.

Nor this: its neighbour's note is enough.

## A claim

Nor this, below another heading.

- item
- a new item of a list

| same | `code` |
|---|---|
| a cell without translation | $x$ |

> [!NOTE]
> A box that nobody translated.
"""
    known = catalogue(
        tmp_path / "x.po",
        [
            ("An old heading", "舊標題", "fuzzy"),
            ("A paragraph that was edited after it was translated, a bit.", "改過的一段。"),
            ("A claim.", "主張。"),
            ("A claim", "主張"),
            ("item", "項目"),
            ("same", "相同"),
        ],
    )
    assert translate_markdown(text, known.translations, Notes(known.states(messages_in_markdown(text)), MARKS.get)) == """\
# An old heading

<small>STALE</small>

A paragraph that was edited after it was translated.

主張。

<small>MISSING</small>

Never seen before,
two lines.

Nor this: its neighbour's note is enough.

## 主張

<small>MISSING</small>

Nor this, below another heading.

- 項目
- <small>MISSING</small> a new item of a list

| 相同 | `code` |
|---|---|
| <small>MISSING</small> a cell without translation | $x$ |

> [!NOTE]
> A box that nobody translated.
"""


MARKS = {NOTE_WORDS["stale"]: "STALE", NOTE_WORDS["missing"]: "MISSING"}
