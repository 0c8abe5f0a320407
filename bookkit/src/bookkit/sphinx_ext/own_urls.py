"""Links and images by published URL: checked, and internal to the site that is being built.

Chapters name the book's pages by full URL, because they are read in Colab and on GitHub too. Here
such a link becomes a relative one (in a Chinese page, to the Chinese page), and a page or an anchor
that does not exist is a warning, which fails the build. All links are checked on each build, also
those of pages that did not change.
"""

from collections.abc import Iterator

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

from bookkit.model.addresses import meaning_of_url
from bookkit.model.book import Book

logger = logging.getLogger(__name__)


class OwnUrls(SphinxTransform):
    default_priority = 25  # after the translation (20)

    def apply(self) -> None:
        book = Book(self.app.srcdir)
        for image in self.document.findall(nodes.image):
            found = meaning_of_url(image["uri"], book)
            if found and found.kind == "static" and found.name.startswith("figures/"):
                continue  # bookkit.sphinx_ext.figures puts the drawing itself there
            if found and found.kind == "static":
                image["uri"] = f"/site/static/{found.name}"
            elif found:
                image["uri"] = f"/book/images/{found.name}"
        for link in list(self.document.findall(nodes.reference)):
            found = meaning_of_url(link.get("refuri", ""), book)
            if not found or found.kind == "repository":
                continue
            if found.kind == "unknown":
                logger.warning("the book has no page %s", link["refuri"], location=link)
            elif found.language:  # on purpose to another language: it stays as it is
                note_link(self.env, found.name, found.anchor, link)
            elif found.kind == "page":
                note_link(self.env, found.name, found.anchor, link)
                xref = pending_xref(
                    "",
                    *link.children,
                    refdomain="",
                    reftype="book",
                    reftarget=found.name,
                    refanchor=found.anchor,
                    refdoc=self.env.docname,
                )
                link.replace_self(xref)
            elif self.app.builder.format == "html":
                up = "../" * self.env.docname.count("/")
                folder = {"static": "_static/", "image": "_images/"}.get(found.kind, "")
                link["refuri"] = up + folder + found.name


def note_link(env: BuildEnvironment, page: str, anchor: str, link: nodes.Node) -> None:
    links = env.metadata[env.docname].setdefault("book_links", [])
    links.append((page, anchor, link.line or (link.parent.line if link.parent else None)))


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    if node.get("reftype") != "book" or node["reftarget"] not in env.found_docs:
        return None
    children = nodes.inline("", "", *node.children)
    builder: Builder = app.builder
    return make_refnode(builder, node["refdoc"], node["reftarget"], node["refanchor"], children)


def remember_anchors(app: Sphinx, doctree: nodes.document) -> None:
    """Every id that the page's HTML will have."""
    ids = {name for node in doctree.findall(nodes.Element) for name in node["ids"]}
    app.env.metadata[app.env.docname]["book_anchors"] = ids


def dead_links(env: BuildEnvironment) -> Iterator[tuple[str, int | None, str]]:
    for page in sorted(env.found_docs):
        for other, anchor, line in env.metadata[page].get("book_links", []):
            if other not in env.found_docs:
                yield page, line, f"the book has no page {other}"
            elif anchor and anchor not in env.metadata[other].get("book_anchors", ()):
                yield page, line, f"page {other} has no heading #{anchor}"


def warn_of_dead_links(app: Sphinx, env: BuildEnvironment) -> None:
    for page, line, message in dead_links(env):
        logger.warning(message, location=(page, line))


def setup(app: Sphinx) -> None:
    app.add_transform(OwnUrls)
    app.connect("doctree-read", remember_anchors, priority=900)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", warn_of_dead_links)
