"""What the book proves: the foot of each page, the page "Everything this book proves", claims.json.

The claims are those of the strips that stand on the pages, in their language; the list is filled
when all pages were read, since it links to every one of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from bookkit.model.book import Book
from bookkit.sphinx_ext.strips import ClaimText, tick

PROVES = "book/proves"
COMPILED_FOR = re.compile(r"compiled for (\w+)")


@dataclass(frozen=True)
class Shown:
    """A claim as a page shows it."""

    slug: str  # of its anchor, checked-SLUG
    claim: str  # in the language of the site
    compiler: str | None  # the one that it names: CPU, TPU
    stored: bool


def collect(app: Sphinx, doctree: nodes.document) -> None:
    found = []
    for claim in doctree.findall(ClaimText):
        if claim.parent["ids"]:
            slug = claim.parent["ids"][0].removeprefix("checked-")
            named = COMPILED_FOR.search(claim.rawsource)
            compiler = named[1] if named else None
            found.append(Shown(slug, claim.astext().strip(), compiler, claim.parent["stored"]))
    app.env.metadata[app.env.docname]["book_claims"] = found


def claims_by_page(app: Sphinx) -> dict[str, list[Shown]]:
    env = app.env
    pages = [page for page in Book(app.srcdir).pages if page in env.found_docs]
    found = {page: env.metadata[page].get("book_claims", []) for page in pages}
    return {page: claims for page, claims in found.items() if claims}


def heading(app: Sphinx, page: str) -> list[nodes.Node]:
    """A page's title, with the number of its chapter."""
    number = Book.number(page)
    title = app.env.titles[page].deepcopy().children
    return [nodes.Text(f"{number} · "), *title] if number else title


def anchor_of(page: str) -> str:
    return page.rsplit("/", 1)[-1]


def list_contents(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """The page's own contents name the pages that claim something; it is written each time."""
    if PROVES not in env.found_docs:
        return []
    entries = nodes.bullet_list()
    by_page = claims_by_page(app)
    for page in by_page:
        where = {"refuri": PROVES, "anchorname": f"#{anchor_of(page)}", "internal": True}
        link = nodes.reference("", "", *heading(app, page), **where)
        entries += nodes.list_item("", addnodes.compact_paragraph("", "", link))
    top = env.tocs[PROVES][0]
    del top[1:]
    if by_page:
        top += entries
    env.toc_num_entries[PROVES] = 1 + len(by_page)
    anchors = env.metadata[PROVES].setdefault("book_anchors", set())
    anchors |= {anchor_of(page) for page in by_page}
    return [PROVES]


def list_claims(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Every claim, by page, each linked to its strip."""
    if docname != PROVES:
        return
    top = next(doctree.findall(nodes.section))
    for page, claims in claims_by_page(app).items():
        title = nodes.title("", "", *heading(app, page))
        section = nodes.section("", title, ids=[anchor_of(page)])
        items = nodes.bullet_list(classes=["claims-list"])
        for claim in claims:
            there = f"{app.builder.get_relative_uri(PROVES, page)}#checked-{claim.slug}"
            link = nodes.reference("", claim.claim, refuri=there, internal=True)
            item = nodes.list_item(classes=["stored"] if claim.stored else [])
            item += nodes.raw("", tick(claim.stored), format="html")
            item += addnodes.compact_paragraph("", "", link)
            items += item
        section += items
        top += section


def foot(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """How many claims the page checks."""
    claims = app.env.metadata.get(pagename, {}).get("book_claims", [])
    if not claims:
        return
    context["book_claims"] = len(claims)
    if PROVES in app.env.found_docs:
        up = app.builder.get_relative_uri(pagename, PROVES)
        context["book_proves_url"] = f"{up}#{anchor_of(pagename)}"


def write_json(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    book = Book(app.srcdir)
    language = book.language(app.config.language)
    found = []
    for page, claims in claims_by_page(app).items():
        url = book.page_url(page, language)
        found += [{"page": url, "url": f"{url}#checked-{one.slug}"} | asdict(one) for one in claims]
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    Path(app.outdir, "claims.json").write_text(text, "utf-8")


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", collect, priority=880)  # in the page's language
    app.connect("env-updated", list_contents)
    app.connect("doctree-resolved", list_claims)
    app.connect("html-page-context", foot)
    app.connect("build-finished", write_json)
