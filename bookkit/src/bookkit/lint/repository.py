"""Rules of any committed text, and of the book as a whole: contents, addresses, notebooks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import nbformat
import yaml
from docutils.nodes import make_id

from bookkit.lint.prose import headings, read_aloud, sentences
from bookkit.lint.rules import REFERENCE, TEXT, WHOLE, Said, SaidOfBook, rule
from bookkit.model.addresses import addresses, foreign, meaning_of_url
from bookkit.model.book import Book, is_notebook
from bookkit.model.chapter import load_chapter, page_files
from bookkit.model.entries import entries
from bookkit.model.package import FOLDER, SETUP, build_wheel, has_package, unlike_pin

# Text.

UNFINISHED = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "TB" + "D"])
UNFIT = {
    rf"\b(?:{UNFINISHED})\b": "is unfinished: do it, or open an issue",
    r"(?i)lorem\s+ip" "sum": "is filler: write the text",
    r"(?<![\w.:/-])/(?:home/\w+|root|Users/\w+|wo" r"rk|mnt|tmp/\w+)(?:/|\b)": (
        "is a path of one machine: make it relative"
    ),
    r"<{7} |>{7} |^={7}$": "is left of a merge: resolve it",
    r"\b(?:127\.0\.0\.1|localhost):(?!8000|\{)\d+": "is an address on one machine: take it out",
}
ABOUT_MACHINES = re.compile(
    r"^(?:tests|bookkit|\.ci|\.github)/"
)  # where such paths are the subject
NOT_TEXT = re.compile(
    r"\.(?:woff2?|png|jpe?g|gif|ico|zip|gz|pb|lock|svg)$|(?:^|/)vendor/"
    r"|\.min\.(?:js|css)$|^LICENSE"
)


def line_at_position(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


@rule(TEXT)
def finished_text(name: str, text: str, book: Book) -> Said:
    """Committed text is finished, and says nothing about one person's machine."""
    for pattern, why in UNFIT.items() if not NOT_TEXT.search(name) else ():
        if not ("machine" in why and ABOUT_MACHINES.search(name)):
            for found in re.finditer(pattern, text, re.M):
                yield line_at_position(text, found.start()), f"{found[0]!r} {why}"


FIGURE = re.compile(r"(?m)^!\[[^\]]*\]\([^)\s]*/_static/figures/([\w-]+)\.svg\)\s*$")
TABLE_WITH_CAPTION = re.compile(r"(?m)^\|[^\n]*\n\n\*(?!\*)([^\n]+)\*$")


def anchors(path: Path, book: Book) -> set[str]:
    """The anchors of a page's headings, entries, targets, figures, captioned tables and claims."""
    text = path.read_text("utf-8")
    found = {make_id(read_aloud_with_code(heading)) for _, _, heading in headings(text)}
    found |= set(re.findall(r"(?m)^\(([\w-]+)\)=\s*$", text))
    found |= {f"fig-{name}" for name in FIGURE.findall(text)}
    for caption in TABLE_WITH_CAPTION.findall(text):
        first = sentences(read_aloud_with_code(caption))[0]
        found.add(make_id(f"table {' '.join(first.split()[:6])}"))
    chapter = load_chapter(path)
    found |= {f"checked-{cell.slug}" for cell in chapter.code if cell.is_proof}
    if book.kind(f"book/{path.stem}") == REFERENCE:
        found |= {str(entry.slug) for entry in entries(chapter)}
    return found


def static_file(book: Book, name: str) -> Path:
    """Where a file that is published below _static/ lies in the repository."""
    parent, _, own = name.rpartition("/")
    return book.root / ("book/figures" if parent == "figures" else f"site/static/{parent}") / own


def read_aloud_with_code(heading: str) -> str:
    return read_aloud(re.sub(r"[`$]", "", heading))


@rule(TEXT)
def own_addresses(name: str, text: str, book: Book) -> Said:
    """An address of the book's own leads to a page, a heading or a file that there is."""
    if not name.endswith(".md") or name.startswith("tests/"):
        return
    for url in addresses(text):
        target, what = meaning_of_url(url, book), ""
        if target is None:
            continue
        page = book.source(target.name)
        if target.kind == "repository" and not (book.root / target.name).exists():
            what = f"{target.name} is not in the repository"
        elif target.kind == "static" and not (file := static_file(book, target.name)).exists():
            folder = file.parent.relative_to(book.root).as_posix()
            what = f"{folder} has no {file.name}"
        elif target.kind == "unknown":
            what = "the book has no such page or file"
        elif (
            target.kind == "page"
            and target.anchor
            and "autofunction::" not in page.read_text("utf-8")
        ):
            there = anchors(page, book)
            if target.anchor not in there and make_id(target.anchor) not in there:
                what = f"{target.name}.md has no such heading; it has {', '.join(sorted(there))}"
        if what:
            yield line_at_position(text, text.find(url)), f"{url}: {what}: correct the address"


@rule(TEXT)
def one_address(name: str, text: str, book: Book) -> Said:
    """The book's pages, notebooks and package are named under the address of _config.yml."""
    if name.split("/")[0] in ("tests", "bookkit") or NOT_TEXT.search(name):
        return  # code that makes addresses, and wrong ones on purpose
    for number, line in enumerate(text.splitlines(), 1):
        for found, beginning in foreign(line, book):
            yield number, f"{found} does not begin with {beginning}: see `make publish-as`"


# The book as a whole.


@rule(WHOLE)
def contents(book: Book) -> SaidOfBook:
    """_toc.yml lists every page once, chapters in order; pages with code have a kernel, others none."""
    there = {f"book/{path.stem}" for path in page_files(book.root)}
    for page in sorted(set(book.pages) - there):
        yield "_toc.yml", 1, f"it lists {page}, but there is no {page}.md: write it, or take it out"
    for page in sorted(there - set(book.pages)):
        yield f"{page}.md", 1, "not in _toc.yml: add it there, or delete the file"
    chapters = [page for page in book.pages if re.match(r"book/\d\d-", page)]
    if chapters != sorted(chapters):
        yield "_toc.yml", 1, f"it lists chapters out of order: {', '.join(chapters)}"
    for page in sorted(there):
        source = book.source(page)
        code = re.search(r"(?m)^`{3,}\s*\{code-cell", source.read_text("utf-8"))
        if is_notebook(source) and not code:
            yield f"{page}.md", 1, "a kernel but no code: take the front matter away"
        elif code and not is_notebook(source):
            yield f"{page}.md", 1, "code cells but no kernelspec: take it from another chapter"


def syntax_tree(code: str) -> str:
    """What a cell does, whatever its comments say."""
    try:
        return ast.dump(ast.parse(code))
    except SyntaxError:  # IPython's own syntax, or wrong on purpose: nothing may change
        return code


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
            translated = path != book.notebook(page)
            for what in unlike_chapter(book, page, path, translated):
                yield name, 1, f"{what}: run `make sync` and commit"


def unlike_chapter(book: Book, page: str, path: Path, translated: bool) -> Iterator[str]:
    """Where a notebook differs from its chapter; a translation may change words and comments."""
    cells = load_chapter(book.source(page)).cells
    for number, (cell, other) in enumerate(
        zip_longest(cells, nbformat.read(path, as_version=4).cells), 1
    ):
        if cell is None or other is None:
            yield f"it has {'more' if cell is None else 'fewer'} cells than {page}.md"
            return
        same = cell.source == other.source
        if translated:
            markdown = cell.kind == "markdown"
            same = markdown or syntax_tree(cell.source) == syntax_tree(other.source)
        if (cell.kind, cell.metadata) != (other.cell_type, dict(other.metadata)) or not same:
            yield f"cell {number} is not that of {cell.where}"
        elif other.get("outputs") or other.get("execution_count") is not None:
            yield f"cell {number} carries what an execution left"


RELEASE = re.compile(r"(?m)^## (\S+) \((.+)\)$")  # a heading of CHANGELOG.md


@rule(WHOLE)
def one_release(book: Book) -> SaidOfBook:
    """CITATION.cff, CHANGELOG.md and meshscope name the same release, and its date once it has one."""
    changes, citation = book.root / "CHANGELOG.md", book.root / "CITATION.cff"
    if not changes.exists() and not citation.exists():
        return
    newest = RELEASE.search(changes.read_text("utf-8") if changes.exists() else "")
    if newest is None:
        how = "begin its newest entry `## 0.1.0 (unreleased)`, or with the date as 2026-11-30"
        yield "CHANGELOG.md", 1, f"it names no release: {how}"
        return
    version, date = newest[1], None if newest[2] == "unreleased" else newest[2]
    cited = yaml.safe_load(citation.read_text("utf-8")) if citation.exists() else {}
    if str(cited.get("version")) != version:
        yield "CITATION.cff", 1, f"version {cited.get('version')}, but CHANGELOG.md has {version}"
    if str(cited.get("date-released")) != str(date):
        there = f"CHANGELOG.md says that {version} is {newest[2]}"
        yield "CITATION.cff", 1, f"date-released is {cited.get('date-released')}, but {there}"
    package = book.root / "src" / "meshscope" / "__init__.py"
    if package.exists():
        own = re.search(r'(?m)^__version__ = "(.+)"', package.read_text("utf-8"))
        if own is None or own[1] != version:
            what = f"__version__ is {own and own[1]}, but CHANGELOG.md has {version}"
            yield "src/meshscope/__init__.py", 1, what


@rule(WHOLE)
def pinned_wheel(book: Book) -> SaidOfBook:
    """The setup cell installs the wheel that the source of meshscope gives, and no other."""
    path = book.root / SETUP
    if not has_package(book.root) or not path.exists():
        return  # a made-up book
    if what := unlike_pin(path.read_text("utf-8"), build_wheel(book.root)):
        line = path.read_text("utf-8").partition(FOLDER)[0].count("\n") + 1
        yield SETUP, line, f"it {what}: run `make sync` and commit"
