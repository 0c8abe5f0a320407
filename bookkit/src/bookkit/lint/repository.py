"""Rules of the addresses in any committed text, and of the book as a whole: contents, notebooks."""

from __future__ import annotations

import ast
from itertools import zip_longest
from pathlib import Path

import nbformat

from bookkit.lint.rules import TEXT, WHOLE, Said, SaidOfBook, rule
from bookkit.model.addresses import addresses, meaning_of_url
from bookkit.model.book import Book
from bookkit.model.chapter import load_chapter, page_files
from bookkit.words.comments import FUNCTIONS_AND_CLASSES

# Text.


def line_at_position(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def static_file(book: Book, name: str) -> Path:
    """Where a file that is published below _static/ lies in the repository."""
    parent, _, own = name.rpartition("/")
    return book.root / ("book/figures" if parent == "figures" else f"site/static/{parent}") / own


@rule(TEXT)
def own_addresses(name: str, text: str, book: Book) -> Said:
    """An address of the book's own leads to a page or a file that there is; Sphinx sees to headings."""
    if not name.endswith(".md") or name.startswith("tests/"):
        return
    for url in addresses(text):
        target, what = meaning_of_url(url, book), ""
        if target is None:
            continue
        if target.kind == "repository" and not (book.root / target.name).exists():
            what = f"{target.name} is not in the repository"
        elif target.kind == "static" and not (file := static_file(book, target.name)).exists():
            folder = file.parent.relative_to(book.root).as_posix()
            what = f"{folder} has no {file.name}"
        elif target.kind == "unknown":
            what = "the book has no such page or file"
        if what:
            yield line_at_position(text, text.find(url)), f"{url}: {what}: correct the address"


# The book as a whole.


@rule(WHOLE)
def contents(book: Book) -> SaidOfBook:
    """_toc.yml lists every page that there is."""
    there = {
        path.relative_to(book.root).with_suffix("").as_posix() for path in page_files(book.root)
    }
    for page in sorted(set(book.pages) - there):
        yield "_toc.yml", 1, f"it lists {page}, but there is no {page}.md: write it, or take it out"
    for page in sorted(there - set(book.pages)):
        yield f"{page}.md", 1, "not in _toc.yml: add it there, or delete the file"


def syntax_tree(code: str) -> str:
    """What a cell does, whatever its comments and docstrings of functions and classes say."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # IPython's own syntax, or wrong on purpose: nothing may change
        return code
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS_AND_CLASSES) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.dump(tree)


@rule(WHOLE)
def pairs(book: Book) -> SaidOfBook:
    """Notebooks say what their chapters say, in every language, and carry no outputs."""
    made = {book.notebook(page, one): page for page in book.chapters for one in book.languages}
    there = (book.root / "notebooks").rglob("*.ipynb")
    for path in sorted({*made, *(one for one in there if ".ipynb_checkpoints" not in one.parts)}):
        name, page = path.relative_to(book.root).as_posix(), made.get(path)
        if page is None:
            yield name, 1, "it belongs to no chapter: `make sync` deletes it"
        elif not path.exists():
            yield name, 1, "it is missing: run `make sync` and commit it"
        else:
            if what := unlike_chapter(book, page, path, translated=path != book.notebook(page)):
                yield name, 1, f"{what}: run `make sync` and commit"


def unlike_chapter(book: Book, page: str, path: Path, translated: bool) -> str:
    """Where a notebook first differs from its page; a translation may change words."""
    cells = load_chapter(book.source(page)).cells
    for number, (cell, other) in enumerate(
        zip_longest(cells, nbformat.read(path, as_version=4).cells), 1
    ):
        if cell is None or other is None:
            return f"it has {'more' if cell is None else 'fewer'} cells than {page}.md"
        same = cell.source == other.source
        if translated:
            markdown = cell.kind == "markdown"
            same = markdown or syntax_tree(cell.source) == syntax_tree(other.source)
        if (cell.kind, cell.metadata) != (other.cell_type, dict(other.metadata)) or not same:
            return f"cell {number} is not that of {cell.where}"
        if other.get("outputs") or other.get("execution_count") is not None:
            return f"cell {number} carries what an execution left"
    return ""
