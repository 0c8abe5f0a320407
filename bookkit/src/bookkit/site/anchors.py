"""Links that others made to the book keep leading somewhere: the list of published anchors.

    bookkit anchors             say which published address the built site no longer has
    bookkit anchors --complete  the same; and fail too where the list lacks an anchor of the site
    bookkit anchors --update    add the anchors of the built site to the list; nothing is taken away

site/anchors.txt has a line for each page and each anchor of a heading, term, figure, table, strip or
instrument. What moved is named in site/redirects.toml; bookkit/site/redirects.py honours it.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from bookkit.model.book import Book, Problem
from bookkit.site.redirects import REDIRECTS, read_redirects

LIST = "site/anchors.txt"
HEAD = """\
# Every address of the book that was published: others may have linked to it. One line each, sorted.
# `bookkit anchors --update` adds what is new. No line is ever taken away: what moves gets a line in
# site/redirects.toml, and `bookkit anchors` says which.
"""
# What Sphinx and myst-nb number in passing: nobody can rely on these.
PASSING = re.compile(r"(?:id|index-|cell-|equation-)\d*(?:$|-)")
WITH_OWN_IDS = {"svg", "math"}  # their ids are for themselves


class Ids(HTMLParser):
    """The ids inside <main>, in order; those of drawings and formulas apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.drawn = 0
        self.found: list[str] = []
        self.moved: set[str] = set()  # places that only lead on to another page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        if self.inside and not self.drawn and (name := about.get("id")):
            self.found.append(name)
            if "moved" in (about.get("class") or "").split():
                self.moved.add(name)
        self.inside += tag == "main"
        self.drawn += tag in WITH_OWN_IDS

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag == "main"
        self.drawn -= tag in WITH_OWN_IDS


def ids_inside(path: Path) -> Ids:
    ids = Ids()
    ids.feed(path.read_text("utf-8"))
    return ids


def addresses_of_site(book: Book, site: Path) -> list[str]:
    """What the source language's site offers to link to; the other languages have the same ids."""
    found = []
    for page in book.pages:
        file = f"{page}.html"
        names = ids_inside(site / file).found
        found += [file, *(f"{file}#{name}" for name in names if not PASSING.match(name))]
    return found


def published(book: Book) -> list[str]:
    """The committed list."""
    path = book.root / LIST
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def broken(book: Book, site: Path) -> Iterator[str]:
    """Published addresses that lead nowhere, in any language, each with what to do."""
    redirects, now = read_redirects(book), addresses_of_site(book, site)
    offered = {language.code: offers(book, site, language.path) for language in book.languages}
    for address in published(book):
        gone = [code for code in offered if not leads(address, offered[code], redirects)]
        if gone and address in now:
            where = ", ".join(gone)
            yield f"{address} leads nowhere in {where}: pages have the same ids in all languages"
        elif gone:
            yield (
                f"{address} was published and leads nowhere: add to {REDIRECTS}\n"
                f'    "{address}" = "{nearest(address, now)}"'
            )


def offers(book: Book, site: Path, folder: str) -> set[str]:
    """Every address that answers in one language, redirects included."""
    found = set()
    for file in {*(f"{page}.html" for page in book.pages), *pages_of(published(book))}:
        path = site / folder / file
        if path.is_file():
            found |= {file, *(f"{file}#{name}" for name in ids_inside(path).found)}
    return found


def pages_of(addresses: Sequence[str]) -> set[str]:
    return {address.partition("#")[0] for address in addresses}


def leads(address: str, offered: set[str], redirects: dict[str, str]) -> bool:
    """Is it there? An anchor of a page that moved as a whole is sought where the page went."""
    page, _, anchor = address.partition("#")
    if address in offered or redirects.get(address) in offered:
        return True
    there = redirects.get(page, "")
    return bool(anchor and there and "#" not in there) and f"{there}#{anchor}" in offered


def nearest(address: str, now: Sequence[str]) -> str:
    """The likeliest new place: the same anchor elsewhere, a similar one, else the page."""
    page, _, anchor = address.partition("#")
    same = [one for one in now if anchor and one.partition("#")[2] == anchor]
    own = {one.partition("#")[2]: one for one in now if one.startswith(f"{page}#")}
    alike = [own[name] for name in difflib.get_close_matches(anchor, own, 1, 0.6)]
    return [*same, *alike, *([page] if page in now else now[:1])][0]


def add_new(book: Book, site: Path) -> int:
    """Add to the list what the site offers; how many lines that were."""
    known = set(published(book))
    new = set(addresses_of_site(book, site)) - set(read_redirects(book)) - known
    lines = sorted(known | new)
    (book.root / LIST).write_text(HEAD + "\n".join(lines) + "\n", "utf-8")
    return len(new)


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    options = argparse.ArgumentParser(prog="bookkit anchors", description=__doc__.split("\n")[0])
    options.add_argument("--update", action="store_true", help="add what is new to the list")
    options.add_argument("--complete", action="store_true", help="fail where the list lacks some")
    chosen, book = options.parse_args(arguments), Book(root) if root else Book()
    site = book.root / "_build" / "html"
    if absent := [page for page in book.pages if not (site / f"{page}.html").is_file()]:
        raise Problem(f"The built site has no {absent[0]}.html: run `make site` first")
    if chosen.update:
        print(f"{add_new(book, site)} new in {LIST}, which has {len(published(book))}")
    if wrong := list(broken(book, site)):
        print("\n".join(wrong))
        print(f"{len(wrong)} published addresses lead nowhere; where each went is only a guess")
    lacking = set(addresses_of_site(book, site)) - set(published(book)) - set(read_redirects(book))
    if lacking:
        print(f"{LIST} lacks {len(lacking)}, such as {min(lacking)}: `bookkit anchors --update`")
    elif not wrong:
        print(f"{len(published(book))} published addresses, and each leads somewhere")
    return bool(wrong or (chosen.complete and lacking))
