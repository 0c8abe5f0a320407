"""What stands around a page: description, links to mend and report it, its day; and 404.html.

A template is told; words are in site/templates, and those that stand in several languages on one
page, in templates/words.html beside this file.
"""

import datetime
import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from babel.dates import format_date
from docutils import nodes
from sphinx.application import Sphinx

from bookkit.model.addresses import report_url
from bookkit.model.book import Book, Language
from bookkit.model.history import answer, last_changes
from bookkit.words.catalogues import catalogue_of

LONGEST = 300  # characters of a description; in Chinese each counts twice
NOT_FOUND = "404"
EMPTY_HEADER = re.compile(r"<th\b([^>]*)>\s*(?:<p>\s*</p>)?\s*</th>")  # it heads nothing: a cell


def context_of_frame(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    book = Book(app.srcdir)
    here = book.language(app.config.language)
    context["book_description"] = description(doctree)  # else the template's own
    context["book_edition"] = edition(book, here)
    context["book_toctree"] = lambda: current_page_named(context["toctree"])
    if pagename in app.env.found_docs:
        context["book_edit_url"] = edit_url(book, here, pagename)
        context["book_report_url"] = report_url(book, pagename, book.page_url(pagename, here))
        source = book.source(pagename).relative_to(book.root).as_posix()
        if changed := last_changes(book.root).get(source, "")[:10]:
            day = datetime.date.fromisoformat(changed)
            context["book_changed"] = {"day": changed, "date": format_date(day, "long", here.code)}
            context["book_history_url"] = f"{book.repo}/commits/{book.ref}/{source}"
    if "body" in context:
        context["body"] = EMPTY_HEADER.sub(r"<td\1></td>", context["body"])
    if pagename == NOT_FOUND:
        with_absolute_addresses(book, context)
        context["book_not_found"] = [words_when_lost(book, one) for one in book.languages]


# A description, for search engines and where a link is shared.


def description(doctree: nodes.document | None) -> str:
    """A page's question and answer, all in bold; else its first paragraph, cut at a word."""
    paragraphs = list(own_paragraphs(doctree)) if doctree else []
    for paragraph in paragraphs:
        if all(isinstance(part, nodes.strong) for part in paragraph if part.astext().strip()):
            return shortened(paragraph.astext())
    return shortened(paragraphs[0].astext()) if paragraphs else ""


def own_paragraphs(doctree: nodes.document) -> Iterator[nodes.paragraph]:
    """Paragraphs of the page itself, in order: no tables, no outputs."""
    for paragraph in doctree.findall(nodes.paragraph):
        flowing = isinstance(paragraph.parent, (nodes.section, nodes.document))
        if flowing and paragraph.astext().strip():
            yield paragraph


def shortened(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    longest = LONGEST // 2 if re.search(r"[\u3400-\u9fff]", text) else LONGEST
    if len(text) <= longest:
        return text
    whole = re.match(
        rf".{{{longest // 3},{longest}}}[.?!](?= )|.{{{longest // 3},{longest}}}[。？！]", text
    )
    return whole[0] if whole else text[:longest].rsplit(" ", 1)[0].rstrip(" ,;:，；：") + " …"


# The edition: which version of the book a reader looks at.


@functools.lru_cache(maxsize=1)
def last_commit(root: Path) -> tuple[str, datetime.date] | None:
    """The commit that is checked out and its day; nothing where the book is not a clone."""
    asked = ["git", "log", "-1", "--format=%H %cs", "HEAD"]
    top = ["git", "rev-parse", "--show-toplevel"]
    try:
        if Path(answer(top, root)).resolve() != root.resolve():
            return None  # a folder inside somebody's repository
        commit, day = answer(asked, root).split()
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return commit, datetime.date.fromisoformat(day)


def edition(book: Book, language: Language) -> dict[str, str]:
    """Version, day and commit, and the addresses of that commit and of what changed."""
    known = {}
    citation = book.root / "CITATION.cff"
    if citation.exists():
        known["version"] = str(yaml.safe_load(citation.read_text("utf-8"))["version"])
    if found := last_commit(book.root):
        commit, day = found
        known |= {"commit": commit[:7], "commit_url": f"{book.repo}/commit/{commit}"}
        known |= {"day": day.isoformat(), "date": format_date(day, "long", language.code)}
    if (book.root / "CHANGELOG.md").exists():
        known["changes_url"] = f"{book.repo}/blob/{book.ref}/CHANGELOG.md"
    return known


def edit_url(book: Book, language: Language, page: str) -> str:
    """Where a page is corrected: its source, or how to find a message in the catalogue.

    GitHub edits no file as large as a catalogue in the browser.
    """
    if language != book.languages[0]:
        return f"{book.repo}/blob/{book.ref}/TRANSLATING.md"
    path = book.source(page).relative_to(book.root).as_posix()
    return f"{book.repo}/edit/{book.ref}/{path}"


def current_page_named(toctree: Callable[..., str]) -> str:
    """The list of pages; the one that is open is named to those who hear the page."""
    contents = toctree(maxdepth=2, collapse=False, includehidden=True, titles_only=True)
    return contents.replace('<a class="current ', '<a aria-current="page" class="current ')


# 404.html: one page for every address that leads nowhere, however deep, so its own are absolute.


def not_found(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """GitHub Pages has one for the whole site: the source language's build makes it."""
    if app.config.language == Book(app.srcdir).languages[0].code:
        yield NOT_FOUND, {}, "404.html"


def with_absolute_addresses(book: Book, context: dict[str, Any]) -> None:
    root = urlsplit(book.site).path
    relative = context["pathto"]

    def pathto(*about: Any, **more: Any) -> str:
        return absolute(root, relative(*about, **more))

    def rooted(tag: Callable[..., str]) -> Callable[..., str]:
        def made(*about: Any, **more: Any) -> str:
            href = r'(?<=\s)(href|src)="([^"]+)"'
            return re.sub(
                href, lambda found: f'{found[1]}="{absolute(root, found[2])}"', tag(*about, **more)
            )

        return made

    context |= {"pathto": pathto, "content_root": root}
    context |= {name: rooted(context[name]) for name in ("toctree", "js_tag")}
    context["book_zip_url"] = absolute(root, context["book_zip_url"])
    for item, language in zip(context["book_langs"], book.languages, strict=True):
        item["rel"] = f"{root}{language.path}index.html"


def absolute(root: str, address: str) -> str:
    return address if address.startswith(("#", "/", "http")) else root + address


def words_when_lost(book: Book, language: Language) -> dict[str, str]:
    known = catalogue_of(book, language).translations
    root = f"{urlsplit(book.site).path}{language.path}"
    words = {
        "title": "There is no page at this address",
        "why": "The address may have a mistake, or the page has moved.",
        "first": "Introduction",
        "search": "Search",
    }
    return {name: known.get(text, text) for name, text in words.items()} | {
        "code": language.web,
        "first_url": f"{root}{book.pages[0]}.html",
        "search_url": f"{root}search.html",
    }


def setup(app: Sphinx) -> None:
    app.connect("html-collect-pages", not_found)
    # after pages.context_of, before Sphinx makes the tags of scripts from `pathto`
    app.connect("html-page-context", context_of_frame, priority=450)
