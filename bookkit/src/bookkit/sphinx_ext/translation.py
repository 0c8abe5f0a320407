"""Translate what Sphinx leaves out: comments in code, drawings, and summaries of folds.

Comments and drawings are translated when a page is read, after its execution came from the cache:
no translation changes a cache's key. Text that is not translated, or was edited since, stays
English, and a banner at the top of its page says how much does.
"""

import functools
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import extract_messages

from bookkit.model.book import Book
from bookkit.words import catalogues
from bookkit.words.comments import with_comments
from bookkit.words.drawn import Translator
from bookkit.words.messages import code_messages, messages_of_page
from bookkit.words.notebooks import with_summaries

PYTHON = {"ipython3", "ipython", "python", "python3"}


def translate_page(app: Sphinx, doctree: nodes.document) -> None:
    book = Book(app.srcdir)
    language = book.language(app.config.language)
    if language == book.languages[0] or app.builder.format != "html":
        return
    page = app.env.docname
    if page not in book.pages:
        return
    folder = catalogues.catalogue_folder(book, language)
    for path in [
        folder / "sphinx.po",
        folder / f"{page}.po",
        *catalogues.paths_of_code(folder, page),
    ]:
        if path.exists():
            app.env.note_dependency(str(path))
    translate_comments(doctree, catalogues.for_code(book, language, page))
    translate_drawings(doctree, translator(app, page))
    translate_summaries(doctree, catalogues.Catalogue(folder / f"{page}.po").translations)
    slant_latin(doctree)
    app.env.metadata[page]["book_translation"] = count_english(app, page, doctree)


@functools.lru_cache(maxsize=1)
def messages_of_build(app: Sphinx) -> dict[str, list[catalogues.Message]]:
    """The messages of all code: every chapter is parsed for them, so once in a build."""
    return code_messages(Book(app.srcdir))


def translator(app: Sphinx, page: str) -> Translator:
    book = Book(app.srcdir)
    return Translator(catalogues.for_code(book, book.language(app.config.language), page))


def translate_comments(doctree: nodes.document, messages: dict[str, str]) -> None:
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") in PYTHON:
            new = with_comments(block.astext(), messages)
            if new != block.astext():
                block.rawsource, block.children = new, []
                block += nodes.Text(new)


def slant_latin(doctree: nodes.document) -> None:
    """Dots below stress Chinese words; names in Latin letters are slanted, as in English."""
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


def translate_summaries(doctree: nodes.document, messages: dict[str, str]) -> None:
    """The summaries of folds, where they are HTML as an author wrote it."""
    for raw in doctree.findall(nodes.raw):
        if "html" in raw.get("format", "").split() and "<summary>" in raw.astext():
            new = with_summaries(raw.astext(), messages)
            if new != raw.astext():
                raw.rawsource, raw.children = new, []
                raw += nodes.Text(new)


def count_english(app: Sphinx, page: str, doctree: nodes.document) -> tuple[int, int]:
    """How many of a page's messages are shown in English, and how many there are."""
    book = Book(app.srcdir)
    language = book.language(app.config.language)
    own = catalogues.catalogues_of_page(book, language, page)
    back = {new: old for old, new in own["text"].translations.items()}
    # Labels such as "Parameters" are Sphinx's own words, which it has translated already.
    found = [(node, words) for node, words in extract_messages(doctree)
             if not isinstance(node, nodes.field_name)]  # fmt: skip
    texts = [back.get(words, words) if isinstance(node, nodes.image) else words
             for node, words in found]  # fmt: skip
    texts += [message.text for message in messages_of_page(book, page, [])]  # claims, summaries
    states = list(own["text"].states(texts).values())
    if code := own.get("code"):
        messages = messages_of_build(app)[catalogues.code_name(page)]
        states += code.states(message.text for message in messages).values()
    return sum(state != "translated" for state in states), len(states)


def banner(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    english, total = app.env.metadata.get(pagename, {}).get("book_translation", (0, 0))
    if english:
        book = Book(app.srcdir)
        context["book_translation"] = {
            "left": english,
            "total": total,
            "how": f"{book.repo}/blob/{book.ref}/TRANSLATING.md",
        }


def hero(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """The drawing of the first page, which no cell made."""
    if pagename == app.config.root_doc:
        svg = Path(app.srcdir, "site", "templates", "hero-drawing.svg").read_text("utf-8")
        context["book_hero_drawing"] = translator(app, pagename).output(svg)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", translate_page, priority=850)  # before anchors are remembered
    app.connect("html-page-context", banner)
    app.connect("html-page-context", hero)
