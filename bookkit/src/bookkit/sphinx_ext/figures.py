"""Figures and captioned tables: inlined, numbered, with an anchor each.

A paragraph with nothing but one of the book's own images, …/_static/figures/NAME.svg, is a figure:
the drawing book/figures/NAME.svg stands in the page, where it sees the theme, with its words in the
page's language. A paragraph all in *…* that follows a figure or a table is its caption, and one that
follows an output looks like one. Readers of Colab see the same as an image with a line below. Images
in a table are inlined too, without a caption.
"""

from __future__ import annotations

import html
import re
import shutil
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

from bookkit.model.addresses import meaning_of_url
from bookkit.model.book import Book, Language
from bookkit.words.catalogues import catalogue_of
from bookkit.words.drawn import Translator

logger = logging.getLogger(__name__)

FIGURES = "figures/"  # of _static, and of book/
WORDS_OF_ANCHOR = 6


class Figure(nodes.figure):
    """A drawing, or a table, with what is said below it."""


class Caption(nodes.caption):
    """The sentences below; `number` is "Figure 9.1"."""


class Captions(SphinxTransform):
    default_priority = 6  # before messages are collected (10) and translated (20)

    def apply(self, **_: Any) -> None:
        book = Book(self.app.srcdir)
        for paragraph in list(self.document.findall(nodes.paragraph)):
            if name := figure_in(paragraph, book):
                image = next(paragraph.findall(nodes.image))
                made = Figure(name=name, ids=[f"fig-{name}"])
                paragraph.parent.replace(paragraph, made)
                fill(made, image)
        alike: Counter[str] = Counter()
        for table in list(self.document.findall(nodes.table)):
            if caption := caption_after(table):
                anchor = f"table-{anchor_words(caption.astext())}"
                alike[anchor] += 1
                anchor += f"-{alike[anchor]}" * (alike[anchor] > 1)
                made = Figure(name="", ids=[anchor], classes=["tabled"])
                table.parent.replace(table, made)
                fill(made, table)
        for paragraph in self.document.findall(nodes.paragraph):
            if is_emphasised(paragraph):  # said of the output above it
                paragraph["classes"].append("said-of-output")
        number_captions(self.document, Book.number(self.env.docname))


def without_blanks(node: nodes.Element) -> list[nodes.Node]:
    return [child for child in node.children if child.astext() or not isinstance(child, nodes.Text)]


def figure_in(paragraph: nodes.paragraph, book: Book) -> str | None:
    """The name of the figure that is all of this paragraph."""
    children = without_blanks(paragraph)
    if len(children) == 1 and isinstance(children[0], nodes.image):
        if not isinstance(paragraph.parent, nodes.entry):
            return figure_name(children[0], book)
    return None


def figure_name(image: nodes.image, book: Book) -> str | None:
    """NAME, if an image is book/figures/NAME.svg by its published address."""
    found = meaning_of_url(image["uri"], book)
    if found and found.kind == "static" and found.name.startswith(FIGURES):
        return found.name.removeprefix(FIGURES).removesuffix(".svg")
    return None


def caption_after(node: nodes.Element) -> nodes.paragraph | None:
    """The paragraph after a node, if it is emphasised as a whole."""
    after = node.next_node(descend=False, siblings=True, ascend=False)
    return after if isinstance(after, nodes.paragraph) and is_emphasised(after) else None


def is_emphasised(paragraph: nodes.paragraph) -> bool:
    """Is all of it between two asterisks?"""
    children = without_blanks(paragraph)
    return len(children) == 1 and isinstance(children[0], nodes.emphasis)


def fill(made: Figure, content: nodes.Element) -> None:
    """Put in the drawing or table and its caption, whose raw source stays what translators see."""
    made += content
    made.source, made.line = content.source, content.line
    if paragraph := caption_after(made):
        caption = Caption(paragraph.rawsource, "", *paragraph.children, number="")
        caption.source, caption.line = paragraph.source, paragraph.line
        paragraph.parent.remove(paragraph)
        made += caption


def anchor_words(text: str) -> str:
    """The first words of the first sentence, as an anchor."""
    sentence = re.split(r"[.:;?!](?:\s|$)", text)[0]
    return "-".join(re.findall(r"[a-z0-9]+", sentence.lower())[:WORDS_OF_ANCHOR])


def number_captions(document: nodes.document, chapter: int | None) -> None:
    """Figure 9.1, Table 9.1; on a page without a number, Figure 1."""
    figures, tables = count(1), count(1)
    before = f"{chapter}." if chapter else ""
    for caption in document.findall(Caption):
        if caption.parent["name"]:
            caption["number"] = _("Figure {number}").format(number=f"{before}{next(figures)}")
        else:
            caption["number"] = _("Table {number}").format(number=f"{before}{next(tables)}")


def draw(app: Sphinx, doctree: nodes.document) -> None:
    """Put drawings where their images stand, and captions out of their emphasis."""
    for caption in doctree.findall(Caption):
        unwrap(caption)
    if app.builder.format != "html":
        return
    book, seen = Book(app.srcdir), count(1)
    language = book.language(app.config.language)
    for image in list(doctree.findall(nodes.image)):
        name = figure_name(image, book)
        if name is None:
            continue
        path = Path(app.srcdir, "book", FIGURES, f"{name}.svg")
        app.env.note_dependency(str(path))
        if not path.exists():
            what = "there is no book/figures/%s.svg: `bookkit figures` draws it"
            logger.warning(what, name, location=image)
            continue
        svg = in_language(book, language, path.read_text("utf-8"))
        svg = inlined(svg, image.get("alt", ""), f"d{next(seen)}-")
        image.parent.replace(image, nodes.raw("", svg, format="html"))


def unwrap(caption: Caption) -> None:
    """Of *…*, which says that it is a caption, only what is inside is shown."""
    for child in without_blanks(caption)[:1]:
        if isinstance(child, nodes.emphasis):
            child.replace_self(child.children)


def in_language(book: Book, language: Language, svg: str) -> str:
    """A figure with the words of a language: it carries its messages, and its other words stay."""
    if language == book.languages[0]:
        return svg
    return Translator(catalogue_of(book, language).translations).output(svg)


def inlined(svg: str, alt: str, prefix: str) -> str:
    """A drawing as a part of a page: the page's ink, its translated alternative, ids of its own."""
    svg = svg[svg.find("<svg") :].strip()
    root, end, rest = svg.partition(">")
    root = re.sub(r'\s(?:color|role|aria-label|xmlns|width|height)="[^"]*"', "", root)
    label = f' role="img" aria-label="{html.escape(alt)}"' if alt else ' aria-hidden="true"'
    if size := re.search(r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+) ([\d.]+)"', root):
        label += f' width="{size[1]}" height="{size[2]}"'
    for name in re.findall(r'\bid="([^"]+)"', rest):
        rest = re.sub(
            rf'(\bid="|url\(#|href="#){re.escape(name)}(?=["\)])', rf"\g<1>{prefix}{name}", rest
        )
    return f"{root}{label}{end}{rest}"


def visit_figure(self: HTML5Translator, node: Figure) -> None:
    self.body.append(self.starttag(node, "figure", CLASS="drawn" if node["name"] else ""))


def depart_figure(self: HTML5Translator, node: Figure) -> None:
    self.body.append("</figure>\n")


def visit_caption(self: HTML5Translator, node: Caption) -> None:
    self.body.append(self.starttag(node, "figcaption", ""))
    self.body.append(f'<span class="caption-number">{html.escape(node["number"])}</span> ')


def depart_caption(self: HTML5Translator, node: Caption) -> None:
    title = _("Link to this figure") if node.parent["name"] else _("Link to this table")
    anchor = node.parent["ids"][0]
    self.body.append(
        f'<a class="headerlink" href="#{anchor}" title="{html.escape(title)}">#</a></figcaption>\n'
    )


def offer(app: Sphinx, exception: Exception | None) -> None:
    """The files themselves, which notebooks in Colab load."""
    if exception or app.builder.format != "html":
        return
    book = Book(app.srcdir)
    language = book.language(app.config.language)
    target = Path(app.outdir, "_static", FIGURES)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(Path(app.srcdir, "book", FIGURES).glob("*.svg")):
        svg = in_language(book, language, path.read_text("utf-8"))
        if language != book.languages[0]:  # Chinese and Japanese write some signs differently
            svg = svg.replace("<svg ", f'<svg xml:lang="{language.web}" ', 1)
        target.joinpath(path.name).write_text(svg, "utf-8", newline="\n")


def setup(app: Sphinx) -> None:
    app.add_node(Figure, html=(visit_figure, depart_figure))
    app.add_node(Caption, html=(visit_caption, depart_caption))
    app.add_transform(Captions)
    app.connect("doctree-read", draw, priority=870)  # after alternatives are translated
    app.connect("build-finished", offer)
