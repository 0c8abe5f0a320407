"""One site per language: addresses, and three things that Sphinx's translated builds lose."""

from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.writers.html5 import HTML5Translator

from bookkit.model.book import Book


def address(app: Sphinx, config: Config) -> None:
    """A translated site lies below the source language's."""
    book = Book(app.srcdir)
    config.html_baseurl = book.site + book.language(config.language).path


def mend(app: Sphinx, doctree: nodes.document) -> None:
    page = app.env.docname
    # 1. Links to headings inside a page ([x](#slug)): each parsed translation overwrites the
    #    page's table of headings.
    slugs = {
        node["slug"]: (node.line or 0, node["ids"][0], node[0].astext() if len(node) else "")
        for node in doctree.findall(nodes.section)
        if node.get("slug")
    }
    if slugs:
        app.env.metadata[page]["myst_slugs"] = slugs
    # 2. Captions in _toc.yml: they are inserted after the translation.
    for tree in doctree.findall(toctree):
        if tree.get("caption"):
            tree["caption"] = app.translator.gettext(tree["caption"])


# 3. The colon after a label such as "Parameters", which HTML writers put there as it is in English.


def visit_label(self: HTML5Translator, node: nodes.field_name) -> None:
    HTML5Translator.visit_field_name(self, node)


def depart_label(self: HTML5Translator, node: nodes.field_name) -> None:
    colon = "：" if self.config.language.startswith(("zh", "ja")) else ":"
    self.body.append(f'<span class="colon">{colon}</span></dt>\n')


def setup(app: Sphinx) -> None:
    app.add_node(nodes.field_name, override=True, html=(visit_label, depart_label))
    app.connect("config-inited", address)
    app.connect("doctree-read", mend, priority=900)
