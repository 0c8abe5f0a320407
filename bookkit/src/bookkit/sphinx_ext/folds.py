"""What is folded: answers and asides; cells, by their titles.

The `summary` of a `details` that an author wrote is a node of its own before Sphinx looks for messages,
so that it stands in the page's catalogue like any paragraph.
"""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.writers.html5 import HTML5Translator

from bookkit.sphinx_ext.translation import replace_text

TITLE = re.compile(r"#\s*@title\s+(.+)\n?")
OPENING = re.compile(r"(<details class=\"[\w -]+\">\s*)<summary>([^<]+)</summary>\s*")


class Summary(nodes.caption):
    """What is seen of a fold: a message of the page."""


class Summaries(SphinxTransform):
    default_priority = 5  # before messages are collected (10) and translated (20)

    def apply(self, **_: Any) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            if opening := OPENING.fullmatch(raw.astext()):
                name = html.unescape(opening[2]).strip()
                summary = Summary(name, name)
                summary.source, summary.line = raw.source, raw.line
                raw.replace_self([nodes.raw("", opening[1], format="html"), summary])


def name_folds(app: Sphinx, doctree: nodes.document) -> None:
    """Folded cells are called by their titles, which were translated with the comments."""
    for cell in doctree.findall(nodes.container):
        code = next(cell.findall(nodes.literal_block), None)
        title = TITLE.match(code.astext()) if code and cell.get("hide_mode") else None
        if code and title:  # it stands on the fold, and is not repeated in the code
            cell["prompt_show"] = cell["prompt_hide"] = title[1].strip()
            replace_text(code, code.astext()[title.end() :])


def visit_summary(self: HTML5Translator, node: Summary) -> None:
    self.body.append(self.starttag(node, "summary", ""))


def depart_summary(self: HTML5Translator, node: Summary) -> None:
    self.body.append("</summary>\n")


def setup(app: Sphinx) -> None:
    app.add_node(Summary, html=(visit_summary, depart_summary))
    app.add_transform(Summaries)
    app.connect("doctree-read", name_folds, priority=860)  # after comments are translated (850)
