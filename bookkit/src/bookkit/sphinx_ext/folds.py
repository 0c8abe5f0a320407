"""What is folded: answers and asides; cells, by their titles.

The `summary` of a `details` that an author wrote is a node of its own before Sphinx looks for messages,
so that it stands in the page's catalogue like any paragraph.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.writers.html5 import HTML5Translator

TITLE = re.compile(r"#\s*@title\s+(.+)\n?")
OPENING = re.compile(r"<details class=\"([\w -]+)\">\s*<summary>([^<]+)</summary>\s*")
CLOSING = "</details>"


class Fold(nodes.container):
    """What an author put into a `details`: the answer to a prediction, an aside."""


class Summary(nodes.caption):
    """What is seen of a fold: a message of the page."""


def code_cells(doctree: nodes.document) -> Iterator[tuple[nodes.container, nodes.literal_block]]:
    for cell in list(doctree.findall(nodes.container)):
        if cell.get("nb_element") == "cell_code":
            if code := next(cell.findall(nodes.literal_block), None):
                yield cell, code


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
        for parent in {raw.parent for raw in self.document.findall(nodes.raw)}:
            fold_children(parent)


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


def visit_fold(self: HTML5Translator, node: Fold) -> None:
    self.body.append(self.starttag(node, "details"))


def depart_fold(self: HTML5Translator, node: Fold) -> None:
    self.body.append("</details>\n")


def visit_summary(self: HTML5Translator, node: Summary) -> None:
    self.body.append(self.starttag(node, "summary", ""))


def depart_summary(self: HTML5Translator, node: Summary) -> None:
    self.body.append("</summary>\n")


def setup(app: Sphinx) -> None:
    app.add_node(Fold, html=(visit_fold, depart_fold))
    app.add_node(Summary, html=(visit_summary, depart_summary))
    app.add_transform(Folds)
    app.connect("doctree-read", name_folds, priority=860)  # after comments are translated (850)
