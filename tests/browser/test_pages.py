"""Pages of the built site: what survey.py has to say of them is nothing."""

import pytest

from built import BOOK, SITE
from survey import survey

OTHERS = BOOK.languages[1:]
# The source language first: of a translation that is built alike, some checks are left out.
EVERY = [
    *(f"{language.path}{page}.html" for language in BOOK.languages for page in BOOK.pages),
    *(f"{language.path}search.html" for language in BOOK.languages),
    "404.html",
]
# The pages that Next leads through, and one of every other kind: what axe judges each time, and what
# is looked at in other languages. Every night it is all.
KINDS = ["book/deeper/01b-collectives", "book/messages/messages-types", "book/reference/glossary"]
SAMPLE = {
    *(f"{page}.html" for page in [*BOOK.path, *KINDS, "search"]),
    *(f"{language.path}{page}.html" for language in OTHERS for page in BOOK.path),
    "404.html",
}
FILES = [file for file in EVERY if file in SAMPLE or file.startswith(("book/", "search"))]


@pytest.fixture(scope="session")
def found(browsing, site):
    """All pages at once, before the first is judged: they take turns in one browser."""
    run, browser = browsing
    return run(survey(browser, site, FILES, SAMPLE))


@pytest.mark.slow
def test_every_page_in_every_language(browsing, site):
    run, browser = browsing
    found = run(survey(browser, site, EVERY, EVERY))
    assert not any(found.values()), {file: wrong for file, wrong in found.items() if wrong}


@pytest.mark.parametrize("file", FILES)
def test_page(file, found):
    assert not found[file], "\n" + "\n".join(f"{file}: {what}" for what in found[file])


def test_no_page_is_forgotten(site_folder):
    """What else is in the site: places that lead on, and Sphinx's own index, which no page links to."""
    there = {path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")} - set(EVERY)
    unlooked = {
        path for path in there if 'http-equiv="refresh"' not in (SITE / path).read_text("utf-8")
    }
    assert {path.rsplit("/", 1)[-1] for path in unlooked} <= {
        "genindex.html",
        "py-modindex.html",
    }, sorted(unlooked)
