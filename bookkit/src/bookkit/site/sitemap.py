"""sitemap.xml: every page in every language, when it last changed, and where its translations are."""

from __future__ import annotations

from xml.etree import ElementTree

from bookkit.model.book import Book
from bookkit.model.history import last_changes

MAPS = "http://www.sitemaps.org/schemas/sitemap/0.9"
XHTML = "http://www.w3.org/1999/xhtml"


def sitemap(book: Book) -> bytes:
    ElementTree.register_namespace("", MAPS)
    ElementTree.register_namespace("xhtml", XHTML)
    urls, changes = ElementTree.Element(f"{{{MAPS}}}urlset"), last_changes(book.root)
    alternates = [(one.web, one) for one in book.languages] + [("x-default", book.languages[0])]
    for page in book.pages:
        for language in book.languages:
            url = ElementTree.SubElement(urls, f"{{{MAPS}}}url")
            ElementTree.SubElement(url, f"{{{MAPS}}}loc").text = book.page_url(page, language)
            if day := changes.get(book.source(page).relative_to(book.root).as_posix()):
                ElementTree.SubElement(url, f"{{{MAPS}}}lastmod").text = day
            for code, other in alternates:
                where = {"rel": "alternate", "hreflang": code, "href": book.page_url(page, other)}
                ElementTree.SubElement(url, f"{{{XHTML}}}link", where)
    ElementTree.indent(urls)
    return ElementTree.tostring(urls, encoding="utf-8", xml_declaration=True) + b"\n"
