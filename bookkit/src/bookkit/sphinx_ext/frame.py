"""What templates are told: what stands around a page, and 404.html.

Their words are in site/templates, and those that stand in several languages on one page, in
templates/words.html beside this file.
"""

import datetime
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from babel.dates import format_date
from docutils import nodes
from sphinx.application import Sphinx

from bookkit.model.addresses import report_url
from bookkit.model.book import Book, Language
from bookkit.model.chapter import load_chapter
from bookkit.run.execute import stack
from bookkit.words.catalogues import catalogue_of
from bookkit.words.drawn import Translator

NOT_FOUND = "404"
EMPTY_HEADER = re.compile(r"<th\b([^>]*)>\s*(?:<p>\s*</p>)?\s*</th>")  # it heads nothing: a cell


def tell(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    book = Book(app.srcdir)
    here = book.language(app.config.language)
    up = "../" * pagename.count("/")  # to this language's root
    context |= {
        "book_base_url": book.site,
        "book_repo_url": book.repo,
        "book_zip_url": f"{up}notebooks.zip",
        "book_stack": executed_with(),
        "book_changes_url": f"{book.repo}/blob/{book.ref}/CHANGELOG.md",
        "book_langs": list(translations(book, here, pagename)),
        "book_description": description(doctree),  # else the template's own
    }
    if pagename in app.env.found_docs:
        context |= about_page(app, book, here, pagename)
    if pagename in book.chapters:
        context["book_colab_url"] = book.colab_url(pagename, here)
        context["book_kaggle_url"] = book.kaggle_url(pagename, here)
        context["book_ipynb_url"] = f"{up}notebooks/{book.notebook(pagename).name}"
    if pagename == book.pages[0]:
        first = book.chapters[0]
        context["book_first_url"] = f"{up}{first}.html"
        context["book_first_colab"] = book.colab_url(first, here)
        svg = (book.root / "site" / "templates" / "hero-drawing.svg").read_text("utf-8")
        known = catalogue_of(book, here).translations
        context["book_hero_drawing"] = Translator(known).output(svg)
    if pagename == NOT_FOUND:
        context["book_root"] = urlsplit(book.site).path
        context["book_not_found"] = [words_when_lost(book, one) for one in book.languages]
    if "body" in context:
        context["body"] = EMPTY_HEADER.sub(r"<td\1></td>", context["body"])


def translations(book: Book, here: Language, page: str) -> Iterator[dict[str, Any]]:
    """This page in every language; there is one 404.html, whose menu leads to each first page."""
    root = "../" * (page.count("/") + here.path.count("/"))
    page = "index" if page == NOT_FOUND else page
    for language in book.languages:
        yield {
            "code": language.web,
            "name": language.name,
            "current": language == here,
            "rel": f"{root}{language.path}{page}.html",
            "abs": book.page_url(page, language),
        }


def executed_with() -> str:
    versions = stack()
    names = {"jax": "JAX", "flax": "Flax", "python": "Python"}
    return ", ".join(f"{names[key]} {versions[key]}" for key in names if key in versions)


# What only a page of the book has.


def about_page(app: Sphinx, book: Book, here: Language, page: str) -> dict[str, Any]:
    """Pages before, after and below it; where it is mended; how long it takes, when it changed."""

    def link(other: str | None) -> dict[str, str] | None:
        if other is None:
            return None
        title = app.builder.render_partial(app.env.titles[other])["title"]  # type: ignore[attr-defined]
        return {"link": app.builder.get_relative_uri(page, other), "title": title}

    before, after = neighbours(book, page)
    source = book.source(page).relative_to(book.root).as_posix()
    blob = f"{book.repo}/blob/{book.ref}"
    about: dict[str, Any] = {
        "prev": link(before),
        "next": link(after),
        "book_deeper": [link(below) for below in book.sections(page)],
        "book_report_url": report_url(book, page, book.page_url(page, here)),
        "book_source_url": f"{blob}/{source}",
        # GitHub edits no file as large as a catalogue in the browser.
        "book_edit_url": f"{book.repo}/edit/{book.ref}/{source}"
        if here == book.languages[0]
        else f"{blob}/TRANSLATING.md",
    }
    if not book.is_reference(page):
        about["book_minutes"] = load_chapter(book.source(page)).minutes
    if changed := last_change(book.root, source):
        day = datetime.date.fromisoformat(changed)
        about["book_changed"] = {"day": changed, "date": format_date(day, "long", here.code)}
        about["book_history_url"] = f"{book.repo}/commits/{book.ref}/{source}"
    english, total = app.env.metadata[page].get("book_translation", (0, 0))
    if english:
        how = f"{blob}/TRANSLATING.md"
        about["book_translation"] = {"left": english, "total": total, "how": how}
    return about


def last_change(root: Path, path: str) -> str:
    """The day of the last commit that changed a file; nothing outside a clone."""
    command = ["git", "log", "-1", "--format=%cs", "--", path]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return ""
    return done.stdout.strip()


def neighbours(book: Book, page: str) -> tuple[str | None, str | None]:
    """Previous and Next: from chapter to chapter, the top level of the parts in _toc.yml.

    Sphinx would go depth first, so that whoever only turns pages met every deeper page before the next
    chapter. A deeper page leads back to its chapter and on to the chapter after it.
    """
    chapter = book.parents.get(page)
    before = chapter or dict(zip(book.path[1:], book.path)).get(page)
    return before, dict(zip(book.path, book.path[1:])).get(chapter or page)


# A description, for search engines and where a link is shared.


def description(doctree: nodes.document | None) -> str:
    """A page's question and answer, all in bold; else its first paragraph. No tables, no outputs."""
    paragraphs = [
        paragraph
        for paragraph in (doctree.findall(nodes.paragraph) if doctree else [])
        if isinstance(paragraph.parent, nodes.section) and paragraph.astext().strip()
    ]
    for paragraph in paragraphs:
        if all(isinstance(part, nodes.strong) for part in paragraph if part.astext().strip()):
            return " ".join(paragraph.astext().split())
    return " ".join(paragraphs[0].astext().split()) if paragraphs else ""


# 404.html: one page for every address that leads nowhere, however deep.


def not_found(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """GitHub Pages has one for the whole site: the source language's build makes it."""
    if app.config.language == Book(app.srcdir).languages[0].code:
        yield NOT_FOUND, {}, "404.html"


def words_when_lost(book: Book, language: Language) -> dict[str, str]:
    known = catalogue_of(book, language).translations
    words = {
        "title": "There is no page at this address",
        "why": "The address may have a mistake, or the page has moved.",
        "first": "Introduction",
        "search": "Search",
    }
    return {name: known.get(text, text) for name, text in words.items()} | {
        "code": language.web,
        "first_url": f"{language.path}{book.pages[0]}.html",
        "search_url": f"{language.path}search.html",
    }


def setup(app: Sphinx) -> None:
    app.connect("html-collect-pages", not_found)
    app.connect("html-page-context", tell, priority=450)
