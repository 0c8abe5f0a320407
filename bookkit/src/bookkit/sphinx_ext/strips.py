"""What is folded: proofs as strips (✓ Checked …), answers and asides, cells by their titles.

Three folded cells in a row, or more, stand in one drawer, since a reader passes them by together.

A proof cell becomes a `details` with the anchor checked-SLUG. Its claim is a node of its own before
Sphinx looks for messages, so that it stands in the page's catalogue like any paragraph; so does the
`summary` of a `details` that an author wrote.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.transforms import SphinxTransform
from sphinx.writers.html5 import HTML5Translator

from bookkit.model.addresses import report_url
from bookkit.model.book import Book
from bookkit.model.chapter import CHECKED

TITLE = re.compile(r"#\s*@title\s+(.+)\n?")
OPENING = re.compile(r"<details class=\"([\w -]+)\">\s*<summary>([^<]+)</summary>\s*")
CLOSING = "</details>"
DRAWER = 3  # so many folded cells in a row
TICKS = {  # a bare tick ran in this very build; one on a sheet rests on rows that were stored
    False: '<path d="M20 6 9 17l-5-5"/>',
    True: '<path d="M19 13V4H5v16h7"/><path d="m8.5 9.5 2 2 4-4"/><path d="m14.5 18.5 2 2 4-4"/>',
}


class Strip(nodes.container):
    """A proof: its claim, then its code and what it printed."""


class Fold(nodes.container):
    """What an author put into a `details`: the answer to a prediction, an aside."""


class Drawer(Fold):
    """Folded cells that stand in a row."""


class Summary(nodes.caption):
    """What is seen of a fold: a message of the page."""


class ClaimText(Summary):
    """What a proof says that it checked."""


def code_cells(doctree: nodes.document) -> Iterator[tuple[nodes.container, nodes.literal_block]]:
    for cell in list(doctree.findall(nodes.container)):
        if cell.get("nb_element") == "cell_code":
            if code := next(cell.findall(nodes.literal_block), None):
                yield cell, code


def tags_of(cell: nodes.container) -> list[str]:
    return list(cell["cell_metadata"].get("tags", []))


def take_title(code: nodes.literal_block) -> None:
    """The title stands on the fold; it is not repeated in the code."""
    text = TITLE.sub("", code.astext(), count=1)
    code.rawsource, code.children = text, []
    code += nodes.Text(text)


def is_translation(document: nodes.document) -> bool:
    """One message of a catalogue, which Sphinx parses as a document of its own."""
    return str(document["source"]).endswith("<translated>")


class Folds(SphinxTransform):
    default_priority = 5  # before messages are collected (10) and translated (20)

    def apply(self, **_: Any) -> None:
        if is_translation(self.document):
            return
        for cell, code in code_cells(self.document):
            title = TITLE.match(code.astext())
            if "proof" in tags_of(cell) and title and title[1].startswith(CHECKED):
                take_title(code)
                cell.replace_self(strip(cell, code, title[1].removeprefix(CHECKED).strip()))
        for parent in {raw.parent for raw in self.document.findall(nodes.raw)}:
            fold_children(parent)


def strip(cell: nodes.container, code: nodes.literal_block, words: str) -> Strip:
    slugs = [tag.removeprefix("id-") for tag in tags_of(cell) if tag.startswith("id-")]
    claim = ClaimText(words, words)
    claim.source, claim.line = code.source, cell.line
    made = Strip("", claim, *cell.children, stored="stored" in tags_of(cell))
    made["ids"] = [f"checked-{slug}" for slug in slugs]
    made.source, made.line = code.source, cell.line
    return made


def fold_children(parent: nodes.Element) -> None:
    """Put what stands between <details …> and </details> into one node."""
    into: list[list[nodes.Node]] = [[]]
    for child in parent.children:
        text = child.astext().strip() if isinstance(child, nodes.raw) else ""
        if opening := OPENING.fullmatch(text):
            name = html.unescape(opening[2]).strip()
            summary, fold = Summary(name, name), Fold(classes=opening[1].split())
            summary.source, summary.line = child.source, child.line
            fold.source, fold.line = child.source, child.line
            fold += summary
            into[-1].append(fold)
            into.append([])
        elif text == CLOSING and len(into) > 1:
            inside = into.pop()
            fold = into[-1][-1]
            assert isinstance(fold, Fold)
            fold.extend(inside)
        else:
            into[-1].append(child)
    if len(into) == 1:  # else an end is missing, and the browser's own rule is as good as any
        parent.children = []
        parent.extend(into[0])


def name_folds(app: Sphinx, doctree: nodes.document) -> None:
    """Folded cells are called by their titles, which were translated with the comments."""
    for cell, code in code_cells(doctree):
        title = TITLE.match(code.astext())
        if cell.get("hide_mode") and title:
            cell["prompt_show"] = cell["prompt_hide"] = title[1].strip()
            take_title(code)


def passed_by(node: nodes.Node) -> bool:
    """Is this a cell of folded code, and no part of an exercise?"""
    if not isinstance(node, nodes.container) or node.get("hide_mode") != "all":
        return False
    return not any(tag.startswith(("setup", "check-", "solution-")) for tag in tags_of(node))


def put_in_drawers(app: Sphinx, doctree: nodes.document) -> None:
    for parent in {cell.parent for cell, code in code_cells(doctree)}:
        rows = [(by, list(row)) for by, row in itertools.groupby(parent.children, passed_by)]
        parent.children = []
        for folded, row in rows:
            if folded and len(row) >= DRAWER:
                words = _("Code that this page builds on, in {number} cells").format(
                    number=len(row)
                )
                row = [Drawer("", Summary(words, words), *row, classes=["drawer"])]
            parent.extend(row)


def tick(stored: bool) -> str:
    return f'<svg class="tick" viewBox="0 0 24 24" aria-hidden="true">{TICKS[stored]}</svg>'


def visit_strip(self: HTML5Translator, node: Strip) -> None:
    kind = "checked stored" if node["stored"] else "checked"
    ids = f' id="{node["ids"][0]}"' if node["ids"] else ""
    self.body.append(f'<div class="strip"><details class="{kind}"{ids}>\n')


def depart_strip(self: HTML5Translator, node: Strip) -> None:
    self.body.append(f"{report_link(self, node)}</details>")
    if node["ids"]:
        title = html.escape(_("Link to this claim"))
        self.body.append(f'<a class="headerlink" href="#{node["ids"][0]}" title="{title}">#</a>')
    self.body.append("</div>\n")


def report_link(self: HTML5Translator, node: Strip) -> str:
    """Below the unfolded proof: a report that names the strip and quotes its claim."""
    page, book = self.builder.current_docname, Book(self.builder.srcdir)
    claim = next(node.findall(ClaimText)).astext()
    here = book.page_url(page, book.language(self.config.language))
    url = report_url(book, page, f"{here}#{node['ids'][0]}" if node["ids"] else here, claim)
    words = html.escape(_("Report a mistake"))
    return f'<p class="report"><a href="{html.escape(url)}">{words}</a></p>\n'


def visit_claim(self: HTML5Translator, node: ClaimText) -> None:
    stored = node.parent["stored"]
    word = _("Checked against a record") if stored else _("Checked")
    self.body.append(
        f'<summary>{tick(stored)}<span class="line">'
        f'<span class="word">{html.escape(word)}</span> '
        + self.starttag(node, "span", "", CLASS="claim")
    )


def depart_claim(self: HTML5Translator, node: ClaimText) -> None:
    more = html.escape(_("code"))
    self.body.append(
        f'</span></span><span class="more" aria-hidden="true">{more}</span></summary>\n'
    )


def visit_fold(self: HTML5Translator, node: Fold) -> None:
    self.body.append(self.starttag(node, "details"))


def depart_fold(self: HTML5Translator, node: Fold) -> None:
    self.body.append("</details>\n")


def visit_summary(self: HTML5Translator, node: Summary) -> None:
    self.body.append(self.starttag(node, "summary", ""))


def depart_summary(self: HTML5Translator, node: Summary) -> None:
    self.body.append("</summary>\n")


def setup(app: Sphinx) -> None:
    app.add_node(Strip, html=(visit_strip, depart_strip))
    app.add_node(ClaimText, html=(visit_claim, depart_claim))
    app.add_node(Fold, html=(visit_fold, depart_fold))
    app.add_node(Drawer, html=(visit_fold, depart_fold))
    app.add_node(Summary, html=(visit_summary, depart_summary))
    app.add_transform(Folds)
    app.connect("doctree-read", name_folds, priority=860)  # after comments are translated (850)
    app.connect("doctree-read", put_in_drawers, priority=870)
