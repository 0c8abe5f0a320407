"""Translate what Sphinx leaves out: comments in code, drawings, and the site's own words.

Comments and drawings are translated when a page is read, after its execution came from the cache:
no translation changes a cache's key. Text that is not translated, or was edited since, stays
English, and a banner at the top of its page says how much does.
"""

import gettext
import io
from collections.abc import Mapping

import polib
import sphinx.locale
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.nodes import extract_messages

from bookkit.model.book import Book
from bookkit.words.catalogues import Catalogue, catalogue_of
from bookkit.words.comments import with_comments
from bookkit.words.drawn import Translator
from bookkit.words.messages import comments_of_page

PYTHON = {"ipython3", "ipython", "python", "python3"}


def catalogue(app: Sphinx) -> Catalogue:
    book = Book(app.srcdir)
    return catalogue_of(book, book.language(app.config.language))


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
    if page not in book.pages:
        return
    known = catalogue(app)
    translate_comments(doctree, known.translations)
    translate_drawings(doctree, Translator(known.translations))
    slant_latin(doctree)
    app.env.metadata[page]["book_translation"] = count_english(book, page, known, doctree)


def translate_comments(doctree: nodes.document, messages: Mapping[str, str]) -> None:
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") in PYTHON:
            new = with_comments(block.astext(), messages)
            if new != block.astext():
                block.rawsource, block.children = new, []
                block += nodes.Text(new)


def slant_latin(doctree: nodes.document) -> None:
    """Chinese words are stressed by weight; names in Latin letters are slanted, as in English."""
    for node in doctree.findall(nodes.emphasis):
        # A caption is emphasised as a whole in Markdown only.
        if node.astext().isascii() and not isinstance(node.parent, nodes.caption):
            node["classes"].append("latin")


def translate_drawings(doctree: nodes.document, translator: Translator) -> None:
    for raw in doctree.findall(nodes.raw):
        if "html" in raw.get("format", "").split():
            new = translator.output(raw.astext())
            if new != raw.astext():
                raw.rawsource, raw.children = new, []
                raw += nodes.Text(new)


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


def setup(app: Sphinx) -> None:
    app.connect("config-inited", words_of_site)
    app.connect("doctree-read", translate_page, priority=850)  # before anchors are remembered
