"""sitemap.xml: every page in every language, when it last changed, and where its translations are."""

from __future__ import annotations

import subprocess
from pathlib import Path
from xml.etree import ElementTree

from bookkit.model.book import Book, Language
from bookkit.words.catalogues import catalogue_folder

MAPS = "http://www.sitemaps.org/schemas/sitemap/0.9"
XHTML = "http://www.w3.org/1999/xhtml"


def changed(book: Book, page: str, language: Language) -> str:
    """When the page, or its translation, was last committed; "" where the history is not there."""
    catalogues = catalogue_folder(book, language)
    paths = [book.source(page), *(catalogues / f"{name}.po" for name in (page, f"code/{page}"))]
    there = [str(path) for path in paths if path.exists()]
    command = ["git", "log", "-1", "--format=%cI", "--", *there]
    try:
        done = subprocess.run(command, cwd=book.root, capture_output=True, text=True)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def whole_history(book: Book) -> bool:
    """A shallow clone would say that everything changed today."""
    command = ["git", "rev-parse", "--is-shallow-repository"]
    try:
        done = subprocess.run(command, cwd=book.root, capture_output=True, text=True)
    except OSError:
        return False
    return done.stdout.strip() == "false"


def sitemap(book: Book) -> bytes:
    ElementTree.register_namespace("", MAPS)
    ElementTree.register_namespace("xhtml", XHTML)
    urls, dated = ElementTree.Element(f"{{{MAPS}}}urlset"), whole_history(book)
    alternates = [(one.web, one) for one in book.languages] + [("x-default", book.languages[0])]
    for page in book.pages:
        for language in book.languages:
            url = ElementTree.SubElement(urls, f"{{{MAPS}}}url")
            ElementTree.SubElement(url, f"{{{MAPS}}}loc").text = book.page_url(page, language)
            if dated and (day := changed(book, page, language)):
                ElementTree.SubElement(url, f"{{{MAPS}}}lastmod").text = day
            for code, other in alternates:
                where = {"rel": "alternate", "hreflang": code, "href": book.page_url(page, other)}
                ElementTree.SubElement(url, f"{{{XHTML}}}link", where)
    ElementTree.indent(urls)
    return ElementTree.tostring(urls, encoding="utf-8", xml_declaration=True) + b"\n"


def write_sitemap(book: Book, site: Path) -> None:
    (site / "sitemap.xml").write_bytes(sitemap(book))
