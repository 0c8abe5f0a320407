"""What the search page searches: the text of every section, in searchindex.js.

Sphinx's own index holds pages, setup cells and folded code alike, and finds a page only where all words
of a query stand. Here a section is what is found, by what a reader sees of it: its prose, the code in
view and what it printed. site/static/search.js ranks sections with MiniSearch.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from bookkit.model.book import Book
from bookkit.model.chapter import FOLDED

INDEX = "searchindex.js"
NOT_SEEN = (nodes.raw, nodes.comment, nodes.title, nodes.image, nodes.Invisible)
HAS_AN_ADDRESS = (nodes.section, addnodes.desc)  # a section, or an object of the reference


def is_folded(node: nodes.Node) -> bool:
    if not isinstance(node, nodes.container) or node.get("nb_element") != "cell_code":
        return False
    return bool({FOLDED, "setup"} & set(node["cell_metadata"].get("tags", ())))


def pieces(node: nodes.Element) -> Iterator[tuple[str, str]]:
    """The text of a section without what is below it: ("text", …) and ("code", …)."""
    for child in node.children:
        if isinstance(child, NOT_SEEN + HAS_AN_ADDRESS) or is_folded(child):
            continue
        if isinstance(child, nodes.literal_block):
            yield "code", child.astext()
        elif isinstance(child, nodes.TextElement):
            yield "text", child.astext()
        elif isinstance(child, nodes.Element):
            yield from pieces(child)


def sections(document: nodes.document) -> Iterator[dict[str, str]]:
    """Anchor, heading, text and code of each section and of each described object."""
    for node in document.findall(lambda one: isinstance(one, HAS_AN_ADDRESS)):
        if isinstance(node, nodes.section):
            heading, content, anchor = node[0].astext(), node, node["ids"][0]
        else:
            heading, content = node[0].get("fullname", node[0].astext()), node[-1]
            anchor = next(iter(node[0]["ids"]), "")
        found: dict[str, list[str]] = {"text": [], "code": []}
        for kind, text in pieces(content):
            found[kind].append(re.sub(r"\s+", " ", text).strip())
        top = isinstance(node.parent, nodes.document)
        yield {
            "anchor": "" if top else anchor,
            "heading": heading,
            "text": "\n".join(found["text"]),
            "code": "\n".join(found["code"]),
        }


def write(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    pages = [page for page in Book(app.srcdir).pages if page in app.env.found_docs]
    index = [
        {"page": page, "title": app.env.titles[page].astext(), **section}
        for page in pages
        for section in sections(app.env.get_doctree(page))
    ]
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    Path(app.outdir, INDEX).write_text(f"const SECTIONS = {text};\n", "utf-8")


def without_sphinx_search(app: Sphinx) -> None:
    app.builder.search = False  # type: ignore[attr-defined] # of builders that write HTML


def search_page(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "search", {}, "search.html"


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", without_sphinx_search)
    app.connect("html-collect-pages", search_page)
    app.connect("build-finished", write)
