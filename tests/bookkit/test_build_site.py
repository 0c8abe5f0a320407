"""A toy book of two pages, built as the real one is: both languages, then with mistakes in it."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from bookkit.model.book import Book, Problem
from bookkit.site import build
from bookkit.words import sync
from toy import FRONT, ROOT, link_site

PO = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n'


CATALOGUE = "locale/zh_TW/LC_MESSAGES/book.po"


def message(english, chinese):
    return f'msgid "{english}"\nmsgstr "{chinese}"\n\n'


LINKS = (
    "Sharding specs are [there]({0}book/00-intro.html#second-claim), all [here]({0}notebooks.zip)."
)


def chapter(book):
    page = "book/01-toy"
    return f"""{FRONT}
# A toy is a claim

[![Open in Colab]({book.site}_static/colab-badge.svg)]({book.colab_url(page)}) [Read it]({book.page_url(page)})

> [!WARNING]
> **Mind** the gap.

{LINKS.format(book.site)}

## An equation

The cost is $n - 1$.

```{{code-cell}} ipython3
class Drawing:
    def _repr_svg_(self):
        return "<?xml version='1.0'?><svg aria-label='toy'><title>toy</title></svg>"

Drawing()
```

```{{code-cell}} ipython3
print((lambda: 0).__code__.co_filename)
```
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    root = tmp_path_factory.mktemp("toy")
    link_site(root)
    for name in ("_config.yml", "conf.py"):
        shutil.copyfile(ROOT / name, root / name)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/00-intro\nparts:\n"
        "  - caption: Foundations\n    chapters:\n      - file: book/01-toy\n"
    )
    book = Book(root)
    catalogue = root / CATALOGUE
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text(
        PO
        + message("Foundations", "基礎")
        + message("Start reading", "開始閱讀")
        + message("A toy is a claim", "玩具就是主張")
        + message("**Mind** the gap.", "**小心** *axis* *重新*分片規格。")
        + message(LINKS.format(book.site), LINKS.format(book.site).replace("there", "那裡")),
        "utf-8",
    )
    (root / "book").mkdir()
    (root / "book" / "00-intro.md").write_text(
        "# Intro\n\nText.\n\n**How long? One *meter*.** **All in bold.**\n\n## Second claim\n\nText.\n"
    )
    (root / "book" / "01-toy.md").write_text(chapter(book))
    sync.main([], root)
    build.main([], root)
    return book


def html(book, file):
    return (book.root / "_build" / "html" / file).read_text("utf-8")


def article(book, file):
    return html(book, file).split("<main", 1)[1].split("</main>")[0]


ENGLISH, CHINESE = "book/01-toy.html", "zh-TW/book/01-toy.html"


def test_every_page_is_there_in_both_languages(book):
    files = ["notebooks.zip", "notebooks/01-toy.ipynb", *(f"{page}.html" for page in book.pages)]
    for language in book.languages:
        for file in files:
            assert (book.root / "_build" / "html" / language.path / file).is_file()
    assert '<html lang="en"' in html(book, ENGLISH)
    assert '<html lang="zh-TW"' in html(book, CHINESE)
    assert "book/00-intro.html" in html(book, "index.html")


def test_what_is_translated_is_chinese_and_the_rest_is_english(book):
    assert "玩具就是主張" in article(book, CHINESE) and "玩具" not in article(book, ENGLISH)
    assert "小心" in article(book, CHINESE) and "The cost is" in article(book, CHINESE)
    assert "基礎" in html(book, CHINESE) and "Foundations" in html(book, ENGLISH)
    first = html(book, "zh-TW/book/00-intro.html")  # words of the site: ours, then Sphinx's own
    assert "開始閱讀" in first and "搜尋" in first and "Chapters" in first


def test_a_page_has_a_markdown_twin_that_llms_txt_lists(book):
    for language in book.languages:
        listed = html(book, f"{language.path}llms.txt")
        address = book.page_url("book/01-toy", language).removesuffix("html") + "md"
        assert f"]({address})" in listed and listed.startswith(f"# {book.config['title']}\n")
        twin = html(book, f"{language.path}book/01-toy.md")
        assert "```python\nclass Drawing:" in twin and "Open in Colab" not in twin
        assert "```text\n" in twin  # what its cells printed
        assert twin in html(book, f"{language.path}llms-full.txt")
    assert "玩具就是主張" in html(book, "zh-TW/book/01-toy.md")


def test_a_page_says_how_long_it_takes(book):
    assert "1 minute</p>" in article(book, ENGLISH)


def test_links_to_the_book_stay_in_the_site_and_in_the_language(book):
    for file in (ENGLISH, CHINESE):
        assert 'href="00-intro.html#second-claim"' in article(book, file)
        assert 'href="../notebooks.zip"' in article(book, file)
    assert "那裡" in article(book, CHINESE)
    assert 'id="second-claim"' in html(book, "zh-TW/book/00-intro.html")


def test_pages_know_their_translations_and_their_notebook(book):
    for file in (ENGLISH, CHINESE):
        for code, address in (("en", ENGLISH), ("zh-TW", CHINESE)):
            assert re.search(rf'hreflang="{code}" href="{book.site}{address}"', html(book, file))
    assert 'href="../zh-TW/book/01-toy.html"' in html(book, ENGLISH)
    assert 'href="../../book/01-toy.html"' in html(book, CHINESE)
    page = "book/01-toy"
    assert book.colab_url(page) in html(book, ENGLISH)
    assert book.colab_url(page, book.language("zh_TW")) in html(book, CHINESE)
    assert 'href="../notebooks/01-toy.ipynb"' in html(book, ENGLISH)


def test_pages_say_what_they_are_about_and_where_to_mend_them(book):
    for file, source, words in (
        (ENGLISH, "book/01-toy.md", "Sharding specs are there, all here."),
        (CHINESE, "TRANSLATING.md", "Sharding specs are 那裡, all here."),
        ("book/00-intro.html", "book/00-intro.md", "How long? One meter. All in bold."),
    ):
        assert f'<meta name="description" content="{words}">' in html(book, file)
        how = "blob" if source == "TRANSLATING.md" else "edit"
        assert f'href="{book.repo}/{how}/{book.ref}/{source}"' in html(book, file)
        [report] = re.findall(rf'href="({re.escape(book.repo)}/issues/new[^"]+)"', html(book, file))
        asked = parse_qs(urlsplit(unescape(report)).query)
        assert asked["title"] == [f"{file.removeprefix('zh-TW/').removesuffix('.html')}: "]
        assert asked["where"] == [f"{book.site}{file}"]
        assert html(book, file).count('aria-current="page"') == 1
    assert "<time" not in html(book, ENGLISH)  # not a clone: no commit to name


def test_one_page_answers_every_address_that_leads_nowhere(book):
    page = html(book, "404.html")
    assert '<section lang="en">' in page and '<section lang="zh-TW">' in page
    assert page.index('<base href="/one-program/">') < page.index("_static/")
    assert not (book.root / "_build" / "html" / "zh-TW" / "404.html").exists()


def test_alerts_badges_and_pictures(book):
    page = article(book, ENGLISH)
    assert re.search(r'class="admonition warning"', page) and "[!WARNING]" not in page
    assert "colab-badge" not in page
    assert "<svg aria-label='toy'>" in page and "<?xml" not in page and "<img" not in page


def test_what_is_published_is_normalised(book):
    assert re.search(r"<span[^>]*>\s*</span>cell\.py\n|>cell\.py\n", article(book, ENGLISH))


def test_pages_load_nothing_from_another_host(book):
    for path in (book.root / "_build" / "html").rglob("*.html"):
        page = re.sub(r"<a\b[^>]*>", "", path.read_text("utf-8"))
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', page)
        others = [url for url in loaded if url.startswith(("http:", "https:", "//"))]
        assert not [url for url in others if not url.startswith(book.site)]


def test_notebooks_are_offered_one_by_one_and_as_one_zip(book):
    for language in book.languages:
        folder = book.root / "_build" / "html" / language.path
        with zipfile.ZipFile(folder / "notebooks.zip") as archive:
            assert archive.namelist() == ["notebooks/", "notebooks/01-toy.ipynb"]
            offered = archive.read("notebooks/01-toy.ipynb")
        assert offered == book.notebook("book/01-toy", language).read_bytes()
        assert offered == (folder / "notebooks" / "01-toy.ipynb").read_bytes()
    assert "玩具就是主張" in offered.decode()


def test_the_sections_of_a_page_are_what_is_searched(book):
    index = html(book, "zh-TW/searchindex.js").removeprefix("const SECTIONS = ")
    toy = [one for one in json.loads(index.rstrip(";\n")) if one["page"] == "book/01-toy"]
    assert [(one["anchor"], one["heading"]) for one in toy] == [
        ("", "玩具就是主張"),
        ("an-equation", "An equation"),
    ]
    assert "分片規格" in toy[0]["text"] and "class Drawing" in toy[1]["code"]
    assert not (book.root / "_build" / "html" / "_static" / "searchtools.js").exists()


def test_dots_stress_chinese_words_only(book):
    page = html(book, "zh-TW/book/01-toy.html")
    assert '<em class="latin">axis</em>' in page and "<em>重新</em>" in page


# Mistakes. Each starts from the built site and must leave it as it was.


@pytest.fixture
def mistaken(book):
    """Edit the chapter and build, as often as asked: each build must fail and leave the site."""
    page, built = book.source("book/01-toy"), html(book, ENGLISH)
    text = page.read_text()

    def attempt(edits, times=1):
        new = text
        for old, by in edits.items():
            assert old in new
            new = new.replace(old, by)
        page.write_text(new)
        for _ in range(times):
            with pytest.raises(Problem) as problem:
                build.main([], book.root)
            assert html(book, ENGLISH) == built
        return str(problem.value)

    yield attempt
    page.write_text(text)


def test_every_warning_fails_the_build_each_time(book, mistaken):
    edits = {
        "00-intro.html#second-claim": "00-intro.html#third-claim",
        "The cost is": f"The [cost]({book.site}book/07-none.html) is",
        "print((": "import sys; print('oh', file=sys.stderr); print((",
    }
    said = mistaken(edits, times=2)
    for complaint in (
        r"book/01-toy\.md:\d+: WARNING: page book/00-intro has no heading #third-claim",
        r"book/01-toy\.md:\d+: WARNING: the book has no page \S+/book/07-none\.html",
        r"book/01-toy\.md:\d+: WARNING: stderr was found in the cell outputs",
    ):
        assert len(re.findall(complaint, said)) == 2, complaint  # once in each language
    assert "English site was not built" in said and "繁體中文 site was not built" in said


def test_a_failing_cell_fails_the_build(book, mistaken):
    said = mistaken({"Drawing()\n```": "Drawing(1)\n```"})
    assert re.search(
        r"book/01-toy\.md:\d+: cell 2 failed\n(.|\n)*class Drawing:(.|\n)*\nTypeError", said
    )


def test_a_page_without_its_file_fails_the_build(book):
    page = book.source("book/01-toy")
    text = page.read_text()
    page.unlink()
    try:
        with pytest.raises(Problem, match=r"_toc\.yml names book/01-toy\.md"):
            build.main([], book.root)
    finally:
        page.write_text(text)


def test_jupyter_book_builds_the_english_site(book, tmp_path):
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [jupyter_book, "build", "--path-output", tmp_path, "."]
    done = subprocess.run(command, cwd=book.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A toy is a claim" in (tmp_path / "_build" / "html" / ENGLISH).read_text("utf-8")


def test_an_edit_of_prose_and_a_translation_execute_nothing(book, capsys):
    page = book.source("book/01-toy")
    page.write_text(page.read_text().replace("The cost is", "The price is"))
    catalogue = book.root / CATALOGUE
    catalogue.write_text(catalogue.read_text("utf-8").replace("玩具就是主張", "玩具"), "utf-8")
    earlier = book.root / "_build" / "en" / "html" / "book" / "a-page-that-is-no-more.html"
    earlier.write_text("of an earlier build")
    build.main([], book.root)
    assert not (book.root / "_build" / "html" / "book" / earlier.name).exists()
    assert "executed in" not in capsys.readouterr().out
    assert "The price is" in article(book, ENGLISH) and "The price is" in article(book, CHINESE)
    assert "玩具就是主張" not in article(book, CHINESE)
    assert "玩具就是主張" not in html(book, "zh-TW/book/00-intro.html")  # nor in its contents
