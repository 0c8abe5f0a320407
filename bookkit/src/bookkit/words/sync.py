"""Bring everything that is made from book/*.md and the packages up to date.

    bookkit sync            write what changed
    bookkit sync --check    write nothing; name what is out of date and fail

1. companion/pyproject.toml gets the sha256 of the wheel that the source of meshscope gives, and the
   setup cell, companion/setup_cell.py, that of the companion (both are built here, in two seconds).
2. The first cell of each page with code gets the setup cell.
3. The first page says how many minutes each chapter takes. A page ends in a line that counts its
   claims, the tests in tests/book, and links them. book/messages/messages.md lists all messages.
4. notebooks/*.ipynb are written from book/*.md, without outputs. Always in this direction: file
   times play no part, and the same source gives the same bytes.
5. notebooks/LANGUAGE/*.ipynb are written from those and the translations in locale/.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jupytext
import nbformat

from bookkit.model.book import Book, Problem, find_root
from bookkit.model.chapter import load_chapter
from bookkit.model.entries import INDEX, with_index
from bookkit.model.package import (
    CELL,
    CELL_HASH,
    COMPANION,
    REQUIRED,
    REQUIREMENT,
    Wheel,
    build_wheel,
    has_package,
)
from bookkit.words.catalogues import catalogue_of
from bookkit.words.notebooks import translate_notebook

CLAIMS = re.compile(r"\n*^✓ \d+ claims? on this page[^\n]*\n*\Z", re.M)
SETUP_CELL = re.compile(r"(?ms)(^:tags: \[setup, hide-cell\]\n\n).*?(?=^```$)")


def with_requirement(text: str, meshscope: Wheel) -> str:
    """The text, which names this wheel: as the companion's requirement, or in a command."""
    return REQUIRED.sub(f"{meshscope.path}#sha256={meshscope.sha256}", text)


def requirement(root: Path, meshscope: Wheel) -> tuple[Path, str]:
    """The companion's pyproject.toml, which requires the meshscope of this source."""
    path = root / REQUIREMENT
    return path, with_requirement(path.read_text("utf-8"), meshscope)


def pinned(root: Path) -> tuple[Path, str]:
    """The setup cell, which installs the companion of this source and no other."""
    cell, wheel = root / CELL, build_wheel(root, COMPANION)
    return cell, CELL_HASH.sub(wheel.sha256, cell.read_text("utf-8"))


def as_notebook(text: str) -> nbformat.NotebookNode:
    """A chapter as the notebook that is published: no outputs, and the same ids each time."""
    notebook = jupytext.reads(text, fmt="md:myst")
    notebook.metadata.pop("jupytext", None)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, -1) + 1
        cell["id"] = digest + (f"-{seen[digest]}" if seen[digest] else "")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def files_to_write(book: Book) -> Iterator[tuple[Path, str]]:
    """Each file that is made, with what it should hold."""
    setup, meshscope = "", None
    if has_package(book.root):
        meshscope = build_wheel(book.root)
        yield requirement(book.root, meshscope)
        path, setup = pinned(book.root)
        yield path, setup
    for page in book.pages:
        source = book.source(page)
        if not source.exists():
            continue  # another check says so
        text = source.read_text("utf-8")
        if meshscope:
            text = SETUP_CELL.sub(lambda found: found[1] + setup, text)
            text = with_requirement(text, meshscope)  # where readers install it by hand
        if page == book.pages[0]:
            text = with_minutes(text, book)
        if page == INDEX:
            text = with_index(text, book)
        text = with_claims(text, book, page)
        yield source, text
        if page not in book.chapters:
            continue
        notebook = as_notebook(text)
        yield book.notebook(page), nbformat.writes(notebook) + "\n"
        for language in book.languages[1:]:
            known = catalogue_of(book, language).translations
            translated = translate_notebook(notebook, book, page, language, known)
            yield book.notebook(page, language), nbformat.writes(translated) + "\n"


def with_minutes(text: str, book: Book) -> str:
    """The first page, whose table of chapters ends in the minutes that each one takes."""

    def row(found: re.Match[str]) -> str:
        path = book.source(f"book/{found['page']}")
        return f"{found['row']}| {load_chapter(path).minutes} |" if path.exists() else found[0]

    return re.sub(r"(?m)^(?P<row>\| \[.*\]\((?P<page>[\w-]+)\.md\) \|.*)\| \d+ \|$", row, text)


def with_claims(text: str, book: Book, page: str) -> str:
    """The page, which ends in a line that counts and links its tests."""
    name = page.rsplit("/", 1)[-1]
    path = book.root / "tests" / "book" / f"test_{name.replace('-', '_')}.py"
    text = CLAIMS.sub("", text).rstrip("\n") + "\n"
    if not path.exists():
        return text
    tree = ast.parse(path.read_text("utf-8"))
    count = sum(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in tree.body)
    told = "1 claim on this page is" if count == 1 else f"{count} claims on this page are"
    file = path.relative_to(book.root).as_posix()
    where = f"[{file}]({book.repo}/blob/{book.ref}/{file})"
    return f"{text}\n✓ {told} tested: {where}, run by `make test PAGE={name}`.\n"


def leftovers(book: Book) -> list[Path]:
    """Notebooks whose chapter is gone."""
    made = {book.notebook(page, language) for page in book.chapters for language in book.languages}
    there = set((book.root / "notebooks").rglob("*.ipynb")) - made
    return sorted(path for path in there if ".ipynb_checkpoints" not in path.parts)


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit sync", description=__doc__.split("\n")[0])
    options.add_argument("--check", action="store_true", help="only say what is out of date")
    check, root = options.parse_args(arguments).check, root or find_root()
    book = Book(root)
    stale = []
    for path, text in files_to_write(book):  # one by one: the companion's wheel holds the first
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    gone = leftovers(book)
    names = [path.relative_to(root).as_posix() for path in [*stale, *gone]]
    if check and names:
        raise Problem(f"Out of date: {', '.join(names)}. Run `make sync` and commit.")
    for path in gone:
        path.unlink()
    print("\n".join(f"wrote or removed {name}" for name in names) or "all up to date")
