"""Translated notebooks: each message replaced, everything else byte for byte."""

import nbformat

from bookkit.model.book import Book
from bookkit.words.notebooks import translate_markdown, translate_notebook

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


def test_links_and_badge_lead_to_the_translation_and_only_comments_change_in_code():
    book = Book()
    chinese = book.language("zh-TW")
    page = book.chapters[0]
    badge = (
        f"[![Open in Colab]({book.site}_static/colab-badge.svg)]({book.colab_url(page)}) "
        f"[Read this chapter on the site]({book.page_url(page)})"
    )
    text = f"# A claim\n\n{badge}\n\nSee [there]({book.site}book/reference/run.html#x)."
    source = f"url = '{book.site}book/reference/run.html # item'  # item"
    english = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(source)]
    )
    known = MESSAGES | {"Open in Colab": "在 Colab 開啟"}
    made = translate_notebook(english, book, page, chinese, known)
    assert made.cells[0].source == (
        f"# 主張\n\n[![在 Colab 開啟]({book.site}_static/colab-badge.svg)]"
        f"({book.colab_url(page, chinese)}) [Read this chapter on the site]"
        f"({book.page_url(page, chinese)})\n\n"
        f"See [there]({book.site}zh-TW/book/reference/run.html#x)."
    )
    assert "/notebooks/zh-TW/" in book.colab_url(page, chinese)
    assert made.cells[1].source == source.removesuffix("item") + "項目"
    assert english.cells[0].source == text and english.cells[1].source == source


def test_summaries_of_folds_are_messages():
    text = """\
<details class="predict">
<summary>Answer</summary>

item

</details>
"""
    messages = {
        "Answer": "答案",
        "item": "項目",
    }
    made = translate_markdown(text, messages)
    assert made == text.replace("Answer", "答案").replace("item", "項目")
    assert translate_markdown(text, {}) == text
