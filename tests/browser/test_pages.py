"""Every page of the built site in every language: what survey.py has to say of it is nothing."""

import pytest

from built import BOOK, SITE
from survey import survey

# The source language first: of a translation that is built alike, some checks are left out.
FILES = [
    *(f"{language.path}{page}.html" for language in BOOK.languages for page in BOOK.pages),
    *(f"{language.path}search.html" for language in BOOK.languages),
    "404.html",
]


@pytest.fixture(scope="session")
def found(browsing, site):
    """All pages at once, before the first is judged: they take turns in one browser."""
    run, browser = browsing
    return run(survey(browser, site, FILES))


@pytest.mark.parametrize("file", FILES)
def test_page(file, found):
    assert not found[file], "\n" + "\n".join(f"{file}: {what}" for what in found[file])


def test_no_page_is_forgotten(site_folder):
    """What else is in the site: places that lead on, and Sphinx's own index, which no page links to."""
    there = {path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")} - set(FILES)
    unlooked = {
        path for path in there if 'http-equiv="refresh"' not in (SITE / path).read_text("utf-8")
    }
    assert {path.rsplit("/", 1)[-1] for path in unlooked} <= {
        "genindex.html",
        "py-modindex.html",
    }, sorted(unlooked)
