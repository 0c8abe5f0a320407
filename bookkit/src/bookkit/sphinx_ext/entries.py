"""Short, lasting anchors on reference pages: a section is called by its first code cell's id.

A heading that quotes a message, then a cell tagged id-indivisible: the section is at #indivisible,
whatever the next release says. The anchor made of the heading's words stays beside it.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from bookkit.model.book import Book
from bookkit.sphinx_ext.folds import is_translation

logger = logging.getLogger(__name__)


def first_cell(section: nodes.section) -> nodes.container | None:
    """The first code cell of a section, not of one below it."""
    for child in section.children:
        if isinstance(child, nodes.container) and child.get("nb_element") == "cell_code":
            return child
    return None


class EntryAnchors(SphinxTransform):
    default_priority = 4

    def apply(self, **_: Any) -> None:
        page = self.env.docname
        if is_translation(self.document) or Book(self.app.srcdir).kind(page) != "reference":
            return
        for section in self.document.findall(nodes.section):
            cell = first_cell(section)
            tags = cell["cell_metadata"].get("tags", []) if cell else []
            slug = next((tag.removeprefix("id-") for tag in tags if tag.startswith("id-")), None)
            if cell is None or slug is None:
                continue
            other = self.document.ids.get(slug)
            if other is not None and other is not section:
                what = "#%s is the anchor of another heading too: name the cell otherwise"
                logger.warning(what, slug, location=cell)
                continue
            self.document.ids[slug] = section
            # The first id is the one that the heading, the contents and the search link to.
            section["ids"] = [slug, *(name for name in section["ids"] if name != slug)]


def setup(app: Sphinx) -> None:
    app.add_transform(EntryAnchors)
