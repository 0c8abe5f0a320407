"""The messages of the book's code: comments, and what drawings say, each found without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from bookkit.model.book import Book
from bookkit.model.chapter import parse, shared_cells
from bookkit.words.catalogues import Message, code_name
from bookkit.words.comments import Comment, comments
from bookkit.words.drawn import MESHSCOPE, PLACE, drawn_messages, signatures

ABOUT_COMMENT = "Comment beside this code: "
ABOUT_FORM = "Name of a folded cell."
ABOUT_DRAWING = "In a drawing. Names in braces stand for what varies: keep them as they are."


def cells_of(book: Book, page: str) -> list[str]:
    """A chapter's code cells, without those that it shares with others, as they stand."""
    text = book.source(page).read_text("utf-8")
    shared = set(shared_cells(book).values())
    name = page.rsplit("/", 1)[-1]
    return [cell.source for cell in parse(name, text).code if cell.source.strip("\n") not in shared]


def messages_in(cells: list[str], signatures: dict[str, list[str]]) -> Iterator[Message]:
    for code in cells:
        for comment in comments(code):
            beside = (
                ABOUT_FORM
                if "@title" in comment.prefix
                else ABOUT_COMMENT + code_beside(code, comment)
            )
            yield Message(comment.text, beside)
    for code in cells:
        for text in drawn_messages(code, signatures):
            yield drawn(text)


def code_beside(code: str, comment: Comment) -> str:
    """The line that a comment is about, for translators."""
    lines = code.split("\n")
    before = lines[comment.first][: comment.column].strip()
    after = (line.strip() for line in lines[comment.last + 1 :])
    return before or next(filter(None, after), "")


def drawn(text: str) -> Message:
    flags = ("python-brace-format",) if PLACE.search(text) else ()
    return Message(text, ABOUT_DRAWING if flags else "In a drawing.", flags)


def code_messages(book: Book) -> dict[str, list[Message]]:
    """Messages by catalogue: drawings, code/shared, code/01-mesh and so on, each text once.

    What stands in book/cells/ or in more than one chapter is shared.
    """
    shared = list(shared_cells(book).values())
    known = signatures(shared)
    own: dict[str, list[Message]] = {}
    for page in book.chapters:
        cells = cells_of(book, page)
        made = messages_in(cells, known | signatures(cells))
        own[code_name(page)] = once(made)
    counted = Counter(message.text for messages in own.values() for message in messages)
    often = [m for messages in own.values() for m in messages if counted[m.text] > 1]
    found = {
        "drawings": once(drawn(text) for text in MESHSCOPE),
        "code/shared": once([*messages_in(shared, known), *often]),
    }
    elsewhere = {message.text for messages in found.values() for message in messages}
    for name, messages in own.items():
        found[name] = [message for message in messages if message.text not in elsewhere]
    return found


def once(messages: Iterable[Message]) -> list[Message]:
    found: dict[str, Message] = {}
    for message in messages:
        found.setdefault(message.text, message)
    return list(found.values())
