"""Follow the book's own addresses on the built site: every page and every anchor must be there.

    bookkit links          after `make site`: chapters, README and notebooks against _build/html

The tests check the same addresses against the sources; this is the proof on what is published.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat

from bookkit.model.book import Book, Problem

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


def page_target(url: str, book: Book) -> tuple[str, str, str] | None:
    """(page, anchor, language path) of an address on the book's site, else None."""
    if not (url + "/").startswith(book.site):
        return None
    parts = urlsplit(url[len(book.site) :])
    path = unquote(parts.path)
    language = next(
        (one.path for one in book.languages if one.path and path.startswith(one.path)), ""
    )
    path = path[len(language) :].removesuffix(".html")
    return path.strip("/"), unquote(parts.fragment), language


def github_target(url: str, book: Book) -> str | None:
    """The file in the repository that a GitHub or Colab address names, else None."""
    name = re.escape(book.repo.removeprefix("https://github.com/"))
    found = re.match(
        rf"https://(?:github\.com|colab\.research\.google\.com/github)/{name}"
        rf"/(?:blob|tree|raw)/{re.escape(book.ref)}/([^#?]+)",
        url,
    )
    return unquote(found[1]) if found else None


def ids(page: Path) -> set[str]:
    return set(re.findall(r"\s(?:id|name)=[\"']([^\"']+)", page.read_text("utf-8")))


def dead_addresses(text: str, shown: str, book: Book, site: Path) -> Iterator[str]:
    for url in addresses(text):
        target = page_target(url, book)
        if target is None:
            continue
        page, anchor, language = target
        folder = site / language
        candidates = [folder / f"{page}.html", folder / page, folder / page / "index.html"]
        there = next((path for path in candidates if path.is_file()), None)
        if there is None:
            yield f"{shown}: {url} is not on the built site; make site, then correct the address"
        elif anchor and anchor not in ids(there):
            yield f"{shown}: {url}: that page has no anchor #{anchor}"


def texts_with_addresses(book: Book) -> Iterator[tuple[str, str]]:
    for path in [*sorted((book.root / "book").glob("*.md")), book.root / "README.md"]:
        if path.exists():
            yield str(path.relative_to(book.root)), path.read_text("utf-8")
    for path in sorted((book.root / "notebooks").rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts:
            cells = nbformat.read(path, 4).cells
            yield str(path.relative_to(book.root)), "\n\n".join(cell.source for cell in cells)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="bookkit links", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    book = Book()
    site = book.root / "_build" / "html"
    if not site.is_dir():
        raise Problem("_build/html is missing: run `make site` first")
    problems = [
        line
        for shown, text in texts_with_addresses(book)
        for line in dead_addresses(text, shown, book, site)
    ]
    if problems:
        raise Problem("\n".join(problems))
    print("every address of the book's own pages leads somewhere")
