"""The messages of the book that Sphinx does not find, each found without running anything.

In code: comments and docstrings. In drawings of meshscope and the figures of book/figures/: what
they carry as data. Each entry of the template names the file where it is seen, and its comment says
what it is: it is plain text, and what Sphinx finds is Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator

import polib

from bookkit.model.book import Book
from bookkit.model.chapter import parse
from bookkit.words.catalogues import has_words
from bookkit.words.comments import FORM, Comment, comments
from bookkit.words.drawn import PLACE, messages_in_drawing

ABOUT_COMMENT = "Comment beside this code: "
ABOUT_FORM = "Name of a folded cell."
ABOUT_DRAWING = "In a drawing."
ABOUT_PLACES = "Names in braces stand for what varies: keep them as they are."
ABOUT_LINES = "Each line is one in the drawing too: keep their number."
OF_MESHSCOPE = "src/meshscope/_messages.py"


def is_plain(entry: polib.POEntry) -> bool:
    """Is it a comment, a text in a drawing or a word of the site, and not Markdown?"""
    site = all(file.endswith(".html") for file, _ in entry.occurrences)
    return site or entry.comment.startswith((ABOUT_COMMENT, ABOUT_FORM, ABOUT_DRAWING))


def comments_of_page(book: Book, page: str) -> Iterator[polib.POEntry]:
    """The comments and docstrings in a page's cells."""
    source = book.source(page)
    for cell in parse(page, source.read_text("utf-8")).code:
        for comment in comments(cell.source):
            about = ABOUT_FORM if FORM.match(comment.prefix) else ABOUT_COMMENT
            beside = "" if about == ABOUT_FORM else code_beside(cell.source, comment)
            place = (source.relative_to(book.root).as_posix(), cell.line + comment.first)
            yield polib.POEntry(msgid=comment.text, comment=about + beside, occurrences=[place])


def code_beside(code: str, comment: Comment) -> str:
    """The line that a comment is about, for translators."""
    lines = code.split("\n")
    before = lines[comment.first][: comment.column].strip()
    after = (line.strip() for line in lines[comment.last + 1 :])
    return before or next(filter(None, after), "")


def drawn_messages(book: Book) -> Iterator[polib.POEntry]:
    """What drawings say: those of meshscope, and the figures with their names."""
    from meshscope._messages import MESSAGES  # which imports JAX: not for every page

    for text in MESSAGES:
        yield drawn(text, OF_MESHSCOPE)
    for path in sorted((book.root / "book" / "figures").glob("*.svg")):
        for text in messages_in_drawing(path.read_text("utf-8")):
            if has_words(PLACE.sub("", text)):
                yield drawn(text, path.relative_to(book.root).as_posix())


def drawn(text: str, file: str) -> polib.POEntry:
    about, flags = [ABOUT_DRAWING], []
    if PLACE.search(text):
        about.append(ABOUT_PLACES)
        flags.append("python-brace-format")
    if "\n" in text:
        about.append(ABOUT_LINES)
    return polib.POEntry(msgid=text, comment=" ".join(about), flags=flags, occurrences=[(file, "")])


def unseen_by_sphinx(book: Book) -> Iterator[polib.POEntry]:
    for page in book.chapters:
        yield from comments_of_page(book, page)
    yield from drawn_messages(book)
