"""Links and images by published URL: checked, and internal to the site that is being built.

Chapters name the book's pages by full URL, because they are read in Colab and on GitHub too. Here
such a link becomes a relative one (in a Chinese page, to the Chinese page), and a page or an anchor
that does not exist is a warning, which fails the build. All links are checked on each build, also
those of pages that did not change.
"""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from bookkit.model.addresses import Target, meaning_of_url
from bookkit.model.book import Book

logger = logging.getLogger(__name__)


class OwnUrls(SphinxTransform):
    default_priority = 25  # after the translation (20)

    def apply(self, **_: Any) -> None:
        book = Book(self.app.srcdir)
        for image in self.document.findall(nodes.image):
            found = meaning_of_url(image["uri"], book)
            if found and found.kind == "static" and not found.name.startswith("figures/"):
                image["uri"] = f"/site/static/{found.name}"
        for link in self.document.findall(nodes.reference):
            found = meaning_of_url(link.get("refuri", ""), book)
            if found and found.kind == "unknown":
                logger.warning("the book has no page %s", link["refuri"], location=link)
            elif found and found.kind != "repository":
                self.keep_inside(link, found)

    def keep_inside(self, link: nodes.reference, to: Target) -> None:
        """Make a link relative: it leads to the page in the language that is being built."""
        page = self.env.docname
        if to.kind == "page":
            links = self.env.metadata[page].setdefault("book_links", [])
            links.append((to.name, to.anchor, link.line or link.parent.line))
        if self.app.builder.format != "html":
            return
        if to.kind == "page":
            anchor = f"#{to.anchor}" if to.anchor else ""
            link["refuri"] = self.app.builder.get_relative_uri(page, to.name) + anchor
            link["internal"] = True
        else:
            folder = "_static/" if to.kind == "static" else ""
            link["refuri"] = "../" * page.count("/") + folder + to.name


def remember_anchors(app: Sphinx, doctree: nodes.document) -> None:
    """Every id that the page's HTML will have."""
    ids = {name for node in doctree.findall(nodes.Element) for name in node["ids"]}
    app.env.metadata[app.env.docname]["book_anchors"] = ids


def warn_of_dead_links(app: Sphinx, env: BuildEnvironment) -> None:
    for page in sorted(env.found_docs):
        for other, anchor, line in env.metadata[page].get("book_links", []):
            if other not in env.found_docs:
                logger.warning("the book has no page %s", other, location=(page, line))
            elif anchor and anchor not in env.metadata[other].get("book_anchors", ()):
                what = "page %s has no heading #%s"
                logger.warning(what, other, anchor, location=(page, line))


def setup(app: Sphinx) -> None:
    app.add_transform(OwnUrls)
    app.connect("doctree-read", remember_anchors, priority=900)
    app.connect("env-check-consistency", warn_of_dead_links)
