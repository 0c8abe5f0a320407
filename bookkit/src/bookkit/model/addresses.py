"""What an address means that stands in a text: a page of the book, a file of its repository, or neither.

Chapters name the book's own pages by their published address, because they are read in Colab and
on GitHub too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlencode

from bookkit.model.book import Book
from bookkit.model.package import FILE, FOLDER


@dataclass(frozen=True)
class Target:
    """What an address of the book means."""

    kind: str  # page, file (made by the build), static, repository, or unknown
    name: str
    anchor: str = ""


def meaning_of_url(url: str, book: Book) -> Target | None:
    """What an address means in the book, or None if it is not the book's."""
    site = book.site
    slug = re.escape(book.repo.removeprefix("https://github.com/"))
    hosts = rf"https://(?:github\.com|colab\.research\.google\.com/github)/{slug}"
    if found := re.match(rf"{hosts}/(?:blob|tree|raw)/{re.escape(book.ref)}/([^#?]+)", url):
        return Target("repository", unquote(found[1]))
    if url.rstrip("/") == site.rstrip("/"):
        return Target("page", book.pages[0])
    if not url.startswith(site):
        return None
    path, _, anchor = url[len(site) :].partition("#")
    path, anchor = unquote(path.partition("?")[0]), unquote(anchor)
    for translation in book.languages[1:]:
        path = path.removeprefix(translation.path)
    if path in ("", "index.html"):
        return Target("page", book.pages[0], anchor)
    if path.endswith(".html"):
        page = path.removesuffix(".html")
        return Target("page" if page in book.pages else "unknown", page, anchor)
    if path.startswith("_static/"):
        return Target("static", path.removeprefix("_static/"), anchor)
    made = {f"notebooks/{book.notebook(page).name}" for page in book.chapters}
    made |= {"notebooks.zip"}
    wheel = path.startswith(FOLDER) and FILE.fullmatch(path, len(FOLDER))
    return Target("file" if wheel or path in made else "unknown", path, anchor)


def report_url(book: Book, about: str, url: str) -> str:
    """Where a mistake is reported: a new issue that says where."""
    asked = {"template": "1-wrong.yml", "title": f"{about}: ", "where": url}
    return f"{book.repo}/issues/new?{urlencode(asked)}"
