"""What an address means that stands in a text: a page of the book, a file of its repository, or neither.

Chapters name the book's own pages by their published address, because they are read in Colab and
on GitHub too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlencode

from bookkit.model.book import Book
from bookkit.model.package import FILE, FOLDER

ADDRESS = re.compile(r"https?://[^\s<>\"'`\]}]+")


def addresses(text: str) -> list[str]:
    """Every address in a text, in order, each once; brackets that are not its own are left out."""
    found = []
    for url in ADDRESS.findall(text):
        while url.endswith((")", ".", ",", ";", ":", "*", "|")):
            if url.endswith(")") and url.count("(") >= url.count(")"):
                break
            url = url[:-1]
        if ")" in url and "(" not in url:  # [text](url)more
            url = url[: url.index(")")]
        found.append(url)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Target:
    """What an address of the book means."""

    kind: str  # page, file (made by the build), static, image, repository, or unknown
    name: str
    anchor: str = ""
    language: str = ""  # as the address names it, "" for the source language


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
    language = ""
    for other in book.languages[1:]:
        if path.startswith(other.path) or path == other.path.rstrip("/"):
            language, path = other.code, path[len(other.path) :]
    if path in ("", "index.html"):
        return Target("page", book.pages[0], anchor, language)
    if path.endswith(".html"):
        page = path.removesuffix(".html")
        return Target("page" if page in book.pages else "unknown", page, anchor, language)
    for kind, folder in (("static", "_static/"), ("image", "_images/")):
        if path.startswith(folder):
            return Target(kind, path.removeprefix(folder), anchor, language)
    made = {f"notebooks/{book.notebook(page).name}" for page in book.chapters}
    made |= {"notebooks.zip"}
    wheel = path.startswith(FOLDER) and not language and FILE.fullmatch(path, len(FOLDER))
    return Target("file" if wheel or path in made else "unknown", path, anchor, language)


def report_url(book: Book, about: str, url: str) -> str:
    """Where a mistake is reported: a new issue that says where."""
    asked = {"template": "1-wrong.yml", "title": f"{about}: ", "where": url}
    return f"{book.repo}/issues/new?{urlencode(asked)}"


@functools.lru_cache
def beginnings(
    site: str, repo: str, ref: str, pages: tuple[str, ...]
) -> list[tuple[re.Pattern[str], str]]:
    """What to look for, and what it has to begin with."""
    anywhere, slug = r"https?://[^\s\"'<>()\[\]\\]*?", repo.removeprefix("https://github.com/")
    notebooks = "https://colab.research.google.com/github/{}/blob/{}/notebooks/"
    begins = {
        rf"{anywhere}/(?:{'|'.join(map(re.escape, pages))})\.html": site,
        rf"{anywhere}/_static/colab-badge\.svg": site,
        rf"{anywhere}/{FOLDER}{FILE.pattern}": site,
        r"(?<=\bSITE = \")https?://[^\"]+": site,  # in the setup cell
        r"(?<=\bSITE = \\\")https?://[^\\\"]+": site,  # and in a notebook's JSON
        notebooks.format(r"[\w.-]+/[\w.-]+", r"[\w.-]+"): notebooks.format(slug, ref),
        rf"https://github\.com/[\w.-]+/{re.escape(PurePosixPath(slug).name)}\b": repo,
        r"meshscope @ git\+[^\s\"']+": f"meshscope @ {site}{FOLDER}",
    }
    return [(re.compile(pattern), beginning) for pattern, beginning in begins.items()]


def foreign(line: str, book: Book) -> Iterator[tuple[str, str]]:
    """What names this book's pages, notebooks or package elsewhere, and what it should begin with."""
    if "http" not in line:
        return
    for pattern, beginning in beginnings(book.site, book.repo, book.ref, tuple(book.pages)):
        for found in pattern.findall(line):
            if not found.startswith(beginning):
                yield found, beginning
