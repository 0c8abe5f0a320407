"""What the Sphinx extension does to text, links and queries, without a build."""

import shutil

import pytest
from sphinx.application import Sphinx

from bookkit.model.addresses import Target, addresses, meaning_of_url
from bookkit.model.book import Book
from bookkit.sphinx_ext.markdown import for_the_site
from bookkit.sphinx_ext.reference import as_rst

BOOK = Book()
SITE = BOOK.site


@pytest.mark.parametrize("language, label", [("zh_TW", "引數："), ("en", "引數:")])
def test_the_colon_after_a_label_is_that_of_the_language(tmp_path, language, label):
    shutil.copyfile(BOOK.root / "_config.yml", tmp_path / "_config.yml")
    (tmp_path / "index.rst").write_text("T\n=\n\n:引數: x\n", "utf-8")
    options = {
        "extensions": ["bookkit.sphinx_ext.languages"],
        "language": language,
        "html_theme": "basic",
    }
    folders = tmp_path, None, tmp_path / "out", tmp_path / "trees", "html"
    Sphinx(*folders, confoverrides=options, status=None, freshenv=True).build()
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert label in page.replace('<span class="colon">', "").replace("</span>", "")


def test_an_alert_becomes_an_admonition_and_no_line_moves():
    text = "Before.\n\n> [!NOTE]\n> **Mind** this.\n> And\n>\n> - that\n\nAfter.\n"
    site = for_the_site(text)
    assert site == "Before.\n\n:::{note}\n**Mind** this.\nAnd\n\n- that\n:::\nAfter.\n"
    assert site.split("\n").index("After.") == text.split("\n").index("After.")


def test_an_alert_at_the_end_of_the_file():
    assert for_the_site("> [!WARNING]\n> x") == ":::{warning}\nx\n:::"


@pytest.mark.parametrize("fence", ["```python", "~~~", "````{code-cell} ipython3"])
def test_code_is_left_alone(fence):
    end = fence.split("p")[0].split("{")[0].strip()
    code = f'{fence}\ntext = """\n> [!NOTE]\n> not an alert\n"""\n[![b](x/colab-badge.svg)](y)\n{end}\n'
    assert for_the_site(code) == code
    assert ":::{tip}" in for_the_site(code + "\n> [!TIP]\n> after the code\n")


def test_a_quotation_stays_a_quotation():
    assert for_the_site("> [!SHOUT]\n> x\n\n> plain\n") == "> [!SHOUT]\n> x\n\n> plain\n"


def test_the_badge_line_goes_and_leaves_its_line():
    badge = f"[![Open in Colab]({SITE}_static/colab-badge.svg)](https://c/x.ipynb) [Read]({SITE})"
    assert for_the_site(f"# T\n\n{badge}\n\nText\n") == "# T\n\n\n\nText\n"


@pytest.mark.parametrize(
    ("url", "means"),
    [
        (f"{SITE}book/01-mesh.html", Target("page", "book/01-mesh")),
        (f"{SITE}book/01-mesh.html#in-practice", Target("page", "book/01-mesh", "in-practice")),
        (f"{SITE}zh-TW/book/reference/run.html", Target("page", "book/reference/run", "", "zh_TW")),
        (SITE, Target("page", "book/00-intro")),
        (SITE.rstrip("/"), Target("page", "book/00-intro")),
        (f"{SITE}zh-TW/", Target("page", "book/00-intro", "", "zh_TW")),
        (f"{SITE}book/99-none.html", Target("unknown", "book/99-none")),
        (f"{SITE}book/01-mesh", Target("unknown", "book/01-mesh")),
        (f"{SITE}_static/logo.svg", Target("static", "logo.svg")),
        (f"{SITE}_images/mesh.svg", Target("image", "mesh.svg")),
        (f"{SITE}notebooks.zip", Target("file", "notebooks.zip")),
        (f"{SITE}notebooks/01-mesh.ipynb", Target("file", "notebooks/01-mesh.ipynb")),
        (f"{SITE}notebooks/none.ipynb", Target("unknown", "notebooks/none.ipynb")),
        (f"{BOOK.repo}/blob/{BOOK.ref}/src/x.py#L3", Target("repository", "src/x.py")),
        (BOOK.colab_url("book/01-mesh"), Target("repository", "notebooks/01-mesh.ipynb")),
        (f"{BOOK.repo}/issues/3", None),
        ("https://docs.jax.dev/en/latest/", None),
        ("book/01-mesh.html", None),
        (SITE.replace("one-program", "one-program-2"), None),
    ],
)
def test_what_an_address_means(url, means):
    assert meaning_of_url(url, BOOK) == means


@pytest.mark.parametrize(
    "written, found",
    [
        ("[a](https://a.b/c) and", ["https://a.b/c"]),
        ("<https://a.b/c>.", ["https://a.b/c"]),
        ("[![x](https://a.b/c.svg)](https://d.e/f)", ["https://a.b/c.svg", "https://d.e/f"]),
        ("[a](https://a.b/c_(d))", ["https://a.b/c_(d)"]),
        ("at https://a.b/c.", ["https://a.b/c"]),
    ],
)
def test_addresses_are_found(written, found):
    assert addresses(written) == found


def test_docstrings_written_for_a_terminal_become_restructuredtext():
    docstring = """\
What `f` takes, and *only* that:

    >>> f(*x, `y`)
    '*'

End, with two  spaces."""
    assert list(as_rst(docstring.split("\n"))) == [
        "What ``f`` takes, and \\*only\\* that:",
        "",
        "    >>> f(*x, `y`)",
        "    '*'",
        "",
        "End, with two  spaces.",
    ]
