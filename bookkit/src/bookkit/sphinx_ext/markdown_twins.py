"""For programs that read: each page once more as Markdown, and llms.txt, which lists them.

A twin is what is in view: without the setup cell, folds and badges, and with the text of outputs.
llms.txt has the form of https://llmstxt.org; llms-full.txt holds the pages that *Next* leads through,
one after the other.
"""

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from sphinx.application import Sphinx

from bookkit.model.book import Book, Language
from bookkit.model.chapter import FOLD, FOLDED
from bookkit.run.execute import found_in_cache

FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.S)
NOT_READ = re.compile(r"(?s)^\[!\[Open in Colab\].*?\n|<!--.*?-->\n*", re.M)


def in_view(text: str) -> str:
    return NOT_READ.sub("", FOLD.sub("", text)).strip()


def shown(outputs: list[NotebookNode]) -> str:
    """What a cell put out, as text; of an exception, its last line."""
    found = ""
    for output in outputs:
        match output.output_type:
            case "stream":
                found += output.text
            case "error":
                found += f"{output.ename}: {output.evalue}\n"
            case _:
                found += f"{output.data.get('text/plain', '')}\n"
    return found.strip("\n")


def twin(book: Book, page: str, language: Language) -> str:
    """The page as Markdown, in its language where it has a notebook."""
    if page not in book.chapters:
        text = FRONT_MATTER.sub("", book.source(page).read_text("utf-8"))
        return in_view(text) + "\n"
    cells = nbformat.read(book.notebook(page, language), as_version=4).cells
    executed = found_in_cache(book, page)
    parts = []
    for cell, ran in zip(cells, executed.cells if executed else cells, strict=True):
        if cell.cell_type == "code" and FOLDED not in cell.metadata.get("tags", ()):
            parts.append(f"```python\n{cell.source.strip()}\n```")
            if text := shown(ran.get("outputs", [])):
                parts.append(f"```text\n{text}\n```")
        elif cell.cell_type == "markdown":
            parts.append(in_view(cell.source))
    return "\n\n".join(part for part in parts if part) + "\n"


def listed(app: Sphinx, book: Book, pages: list[str], language: Language) -> str:
    lines = []
    for page in pages:
        address = book.page_url(page, language).removesuffix(".html")
        lines.append(f"- [{app.env.titles[page].astext()}]({address}.md)")
    return "\n".join(lines)


def write(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    book, out = Book(app.srcdir), Path(app.outdir)
    language = book.language(app.config.language)
    pages = [page for page in book.pages if page in app.env.found_docs]
    twins = {page: twin(book, page, language) for page in pages}
    for page, text in twins.items():
        (out / f"{page}.md").write_text(text, "utf-8")
    core = [page for page in book.path if page in twins]
    others = [page for page in pages if page not in core]
    title, promise = book.config["title"], twins[pages[0]].split("**")[1:2]
    (out / "llms.txt").write_text(
        f"# {title}\n\n> {''.join(promise)}\n\n## Core\n\n{listed(app, book, core, language)}\n\n"
        f"## Optional\n\n{listed(app, book, others, language)}\n",
        "utf-8",
    )
    (out / "llms-full.txt").write_text("\n\n".join(twins[page] for page in core), "utf-8")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", write)
