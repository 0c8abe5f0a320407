"""The table of contents, the files and every address of the book's own pages agree.

Addresses are checked against the sources, which are always there. `bookkit links` checks
them against the built site, page and anchor, after `make site`.
"""
import html
import pathlib
import re

import nbformat
import pytest

from bookkit.model.book import is_notebook
from bookkit.site.links import addresses, github_target, page_target
from rules import BOOK, verify

SOURCES = sorted((BOOK.root / "book").glob("*.md"))
TEXTS = [*SOURCES, BOOK.root / "README.md", BOOK.root / "CONTRIBUTING.md",
         *sorted((BOOK.root / "notebooks").rglob("*.ipynb"))]
TEXTS = [path for path in TEXTS if path.exists() and ".ipynb_checkpoints" not in path.parts]


def contents_and_files(pages, files):
    """pages as in _toc.yml ("book/01-mesh"), files below the root ("book/01-mesh.md")."""
    listed, there = set(pages), {name.removesuffix(".md") for name in files}
    for name in sorted(listed - there):
        yield f"_toc.yml lists {name}, but there is no {name}.md"
    for name in sorted(there - listed):
        yield f"{name}.md is not in _toc.yml: add it, or delete the file"
    for name in sorted({name for name in pages if pages.count(name) > 1}):
        yield f"_toc.yml lists {name} twice"


def test_contents_and_files():
    verify(contents_and_files(BOOK.pages, [f"book/{path.name}" for path in SOURCES]))


def test_chapters_in_order():
    names = [page for page in BOOK.pages if re.match(r"book/\d\d-", page)]
    assert names == sorted(names), f"_toc.yml lists chapters out of order: {names}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_chapters_have_a_kernel(path):
    """A page with a kernel starts one, even without code; a page with code needs one."""
    code = re.search(r"(?m)^`{3,}\s*\{code-cell", path.read_text("utf-8"))
    if is_notebook(path):
        assert code, f"book/{path.name}: a kernel but no code; take the front matter away"
        assert BOOK.notebook(f"book/{path.stem}").exists(), (
            f"book/{path.name} has no notebooks/{path.stem}.ipynb: run `make sync`")
    else:
        assert not code, f"book/{path.name}: code cells but no kernelspec; see another chapter"


def slug(heading):
    """A heading's anchor as Sphinx makes it, from Markdown."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[*`$]", "", html.unescape(text)).strip().lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def anchors(path):
    text = re.sub(r"(?ms)^(`{3,}|~{3,}).*?^\1\s*$", "", path.read_text("utf-8"))
    found = {slug(heading) for heading in re.findall(r"(?m)^#{1,6} (.+)$", text)}
    return found | set(re.findall(r"(?m)^\(([\w-]+)\)=\s*$", text))


def broken(text, shown, book=BOOK):
    """Own addresses in a text that lead nowhere in the sources."""
    for url in addresses(text):
        if target := page_target(url, book):
            page, anchor, language = target
            if page.startswith(("_static/", "_downloads/", "_images/")) or page in ("", "genindex"):
                continue
            source = book.source(page)
            if page == "index":
                continue
            if not source.exists():
                yield f"{shown}: {url} names a page that no book/*.md makes"
            elif anchor and slug(anchor) not in anchors(source) and page != "book/instruments":
                yield (f"{shown}: {url} names a heading that {page}.md does not have; it has "
                       + ", ".join(sorted(anchors(source))))
        elif path := github_target(url, book):
            if not (book.root / path).exists():
                yield f"{shown}: {url} names {path}, which is not in the repository"


def texts_of(path):
    if path.suffix != ".ipynb":
        return path.read_text("utf-8")
    return "\n\n".join(cell.source for cell in nbformat.read(path, 4).cells)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(BOOK.root)))
def test_own_addresses(path):
    verify(broken(texts_of(path), path.relative_to(BOOK.root)))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(BOOK.root)))
def test_one_address(path):
    """No trace of another publisher's address (`make publish-as` rewrites them all)."""
    owner = re.escape(BOOK.repo.removeprefix("https://github.com/"))
    project = re.escape(pathlib.PurePosixPath(BOOK.repo).name)
    found = set(re.findall(rf"https://(?:colab\.research\.google\.com/)?github(?:\.com)?/"
                           rf"([\w.-]+/{project})\b", texts_of(path)))
    wrong = {name for name in found if not re.fullmatch(owner, name)}
    assert not wrong, f"{path.name} names {wrong}, but _config.yml {BOOK.repo}"
