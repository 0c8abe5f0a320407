"""Translate what Sphinx leaves out: comments in code, drawings, and the site's own words.

Comments and drawings are translated when a page is read, after its execution came from the cache:
no translation changes a cache's key. Text that is not translated, or was edited since, stays
English, and a banner at the top of its page says how much does.
"""

import gettext
import io

import polib
import sphinx.locale
from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.nodes import extract_messages

from bookkit.model.book import Book
from bookkit.words.catalogues import Catalogue, catalogue_of
from bookkit.words.comments import with_comments
from bookkit.words.drawn import Translator
from bookkit.words.messages import comments_of_page

PYTHON = {"ipython3", "ipython", "python", "python3"}


def address(app: Sphinx, config: Config) -> None:
    """A translated site lies below the source language's."""
    book = Book(app.srcdir)
    config.html_baseurl = book.site + book.language(config.language).path


def words_of_site(app: Sphinx, config: Config) -> None:
    """The book's catalogue also has the words of templates, which Sphinx looks for in sphinx.po.

    Sphinx's own words are asked for what it does not have.
    """
    book = Book(app.srcdir)
    known = catalogue_of(book, book.language(config.language)).translations
    if known:
        file = polib.POFile()
        file.metadata = {"Content-Type": "text/plain; charset=utf-8"}
        file.extend(polib.POEntry(msgid=text, msgstr=new) for text, new in known.items())
        words = gettext.GNUTranslations(io.BytesIO(file.to_binary()))
        words.add_fallback(app.translator)
        app.translator = sphinx.locale.translators["general", "sphinx"] = words


def translate_page(app: Sphinx, doctree: nodes.document) -> None:
    book = Book(app.srcdir)
    page = app.env.docname
    if app.config.language == book.languages[0].code or app.builder.format != "html":
        return
    known = catalogue_of(book, book.language(app.config.language))
    drawings = Translator(known.translations)
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") in PYTHON:
            replace_text(block, with_comments(block.astext(), known.translations))
    for raw in doctree.findall(nodes.raw):
        replace_text(raw, drawings.output(raw.astext()))
    slant_latin(doctree)
    app.env.metadata[page]["book_translation"] = count_english(book, page, known, doctree)


def replace_text(node: nodes.Element, text: str) -> None:
    node.rawsource, node.children = text, []
    node += nodes.Text(text)


def slant_latin(doctree: nodes.document) -> None:
    """Chinese words are stressed by weight; names in Latin letters are slanted, as in English."""
    for node in doctree.findall(nodes.emphasis):
        # A caption is emphasised as a whole in Markdown only.
        if node.astext().isascii() and not isinstance(node.parent, nodes.caption):
            node["classes"].append("latin")


def count_english(
    book: Book, page: str, known: Catalogue, doctree: nodes.document
) -> tuple[int, int]:
    """How many of a page's messages are shown in English, and how many there are."""
    back = {new: old for old, new in known.translations.items()}
    # Labels such as "Parameters" are Sphinx's own words, which it has translated already.
    found = [(node, words) for node, words in extract_messages(doctree)
             if not isinstance(node, nodes.field_name)]  # fmt: skip
    texts = [back.get(words, words) if isinstance(node, nodes.image) else words
             for node, words in found]  # fmt: skip
    if page in book.chapters:
        texts += [comment.msgid for comment in comments_of_page(book, page)]
    states = [known.state(text) for text in dict.fromkeys(texts)]
    return sum(state != "translated" for state in states), len(states)


# Two things that Sphinx's translated builds lose.


def mend(app: Sphinx, doctree: nodes.document) -> None:
    # 1. Links to headings inside a page ([x](#slug)): each parsed translation overwrites the
    #    page's table of headings.
    app.env.metadata[app.env.docname]["myst_slugs"] = {
        node["slug"]: (node.line or 0, node["ids"][0], node[0].astext())
        for node in doctree.findall(nodes.section)
        if node.get("slug")
    }
    # 2. Captions in _toc.yml: they are inserted after the translation.
    for tree in doctree.findall(toctree):
        if tree.get("caption"):
            tree["caption"] = app.translator.gettext(tree["caption"])


def setup(app: Sphinx) -> None:
    app.connect("config-inited", words_of_site)
    app.connect("config-inited", address)
    app.connect("doctree-read", translate_page, priority=850)  # before anchors are remembered
    app.connect("doctree-read", mend, priority=900)
