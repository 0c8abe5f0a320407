"""What the Sphinx extension makes of addresses and docstrings, without a build."""

import pytest

from bookkit.model.addresses import Target, meaning_of_url
from bookkit.model.book import Book
from bookkit.sphinx_ext.reference import as_rst

BOOK = Book()
SITE = BOOK.site


@pytest.mark.parametrize(
    ("url", "means"),
    [
        (f"{SITE}book/01-mesh.html", Target("page", "book/01-mesh")),
        (f"{SITE}book/01-mesh.html#in-practice", Target("page", "book/01-mesh", "in-practice")),
        (f"{SITE}zh-TW/book/reference/run.html", Target("page", "book/reference/run")),
        (SITE, Target("page", "book/00-intro")),
        (SITE.rstrip("/"), Target("page", "book/00-intro")),
        (f"{SITE}zh-TW/", Target("page", "book/00-intro")),
        (f"{SITE}book/99-none.html", Target("unknown", "book/99-none")),
        (f"{SITE}book/01-mesh", Target("unknown", "book/01-mesh")),
        (f"{SITE}_static/logo.svg", Target("static", "logo.svg")),
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
