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

logger = logging.getLogger(__name__)


def slug_of(section: nodes.section) -> str | None:
    """SLUG of id-SLUG, the tag of a section's first code cell; not of a section below it."""
    for child in section.children:
        if isinstance(child, nodes.container) and child.get("nb_element") == "cell_code":
            tags = child["cell_metadata"].get("tags", [])
            return next((tag.removeprefix("id-") for tag in tags if tag.startswith("id-")), None)
    return None


class EntryAnchors(SphinxTransform):
    default_priority = 4

    def apply(self, **_: Any) -> None:
        if not Book(self.app.srcdir).is_reference(self.env.docname):
            return
        for section in self.document.findall(nodes.section):
            slug = slug_of(section)
            if slug is None:
                continue
            if self.document.ids.get(slug, section) is not section:
                what = "#%s is the anchor of another heading too: name the cell otherwise"
                logger.warning(what, slug, location=section)
                continue
            self.document.ids[slug] = section
            # The first id is the one that the heading, the contents and the search link to.
            section["ids"] = [slug, *(name for name in section["ids"] if name != slug)]


def setup(app: Sphinx) -> None:
    app.add_transform(EntryAnchors)
