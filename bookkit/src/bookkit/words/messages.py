"""The messages of the book that Sphinx does not find, each found without running anything.

In code: comments. In text: the summaries of folds. In drawings of meshscope and the figures of
book/figures/: what they carry as data.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from bookkit.model.book import Book
from bookkit.model.chapter import parse
from bookkit.words.catalogues import Message, code_name, has_words
from bookkit.words.comments import FORM, Comment, comments
from bookkit.words.drawn import PLACE, messages_in_drawing, of_meshscope
from bookkit.words.notebooks import summaries

ABOUT_COMMENT = "Comment beside this code: "
ABOUT_FORM = "Name of a folded cell."
ABOUT_SUMMARY = "What is seen of a fold. Keep tags as they are."
ABOUT_DRAWING = "In a drawing. Names in braces stand for what varies: keep them as they are."


def cells_of(book: Book, page: str) -> list[str]:
    """A chapter's code cells."""
    text = book.source(page).read_text("utf-8")
    return [cell.source for cell in parse(page, text).code]


def messages_in(cells: list[str]) -> Iterator[Message]:
    for code in cells:
        for comment in comments(code):
            beside = (
                ABOUT_FORM
                if FORM.match(comment.prefix)
                else ABOUT_COMMENT + code_beside(code, comment)
            )
            yield Message(comment.text, beside)


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

    What stands in more than one chapter is shared.
    """
    own = {code_name(page): once(messages_in(cells_of(book, page))) for page in book.chapters}
    counted = Counter(message.text for messages in own.values() for message in messages)
    often = [m for messages in own.values() for m in messages if counted[m.text] > 1]
    found = {
        "drawings": once(drawn(text) for text in of_meshscope()),
        "code/shared": once(often),
    }
    elsewhere = {message.text for messages in found.values() for message in messages}
    for name, messages in own.items():
        found[name] = [message for message in messages if message.text not in elsewhere]
    found["figures"] = figure_messages(book, {message.text for message in found["drawings"]})
    return found


def figure_messages(book: Book, drawn_by_meshscope: Collection[str]) -> list[Message]:
    """The messages of book/figures/, in the order of the drawings; each says where it is seen."""
    seen: dict[str, dict[str, None]] = {}
    for path in sorted((book.root / "book" / "figures").glob("*.svg")):
        for text in messages_in_drawing(path.read_text("utf-8")):
            seen.setdefault(text, {})[path.stem] = None
    return [
        in_figures(text, list(names))
        for text, names in seen.items()
        if text not in drawn_by_meshscope and has_words(PLACE.sub("", text))
    ]


def in_figures(text: str, names: Sequence[str]) -> Message:
    message = drawn(text)
    comment = f"{message.comment} {'Figure' if len(names) == 1 else 'Figures'}: {', '.join(names)}."
    if "\n" in text:
        comment += " Each line is one in the figure too: keep their number."
    return Message(text, comment, message.flags)


def once(messages: Iterable[Message]) -> list[Message]:
    found: dict[str, Message] = {}
    for message in messages:
        found.setdefault(message.text, message)
    return list(found.values())


# In the text of pages.


def messages_of_page(book: Book, page: str, texts: Sequence[str]) -> list[Message]:
    """The messages of a page: those that Sphinx found, and among them what it may leave out."""
    source = book.source(page).read_text("utf-8")
    about: dict[str, str] = {}
    lines: dict[str, int] = {}
    for cell in parse(page, source).cells:
        markdown = cell.source if cell.kind == "markdown" else ""
        found = dict.fromkeys(summaries(markdown), ABOUT_SUMMARY)
        for text in found:
            before = cell.source[: max(cell.source.find(text), 0)].count("\n")
            lines.setdefault(text, cell.line + before)
        about = {**found, **about}
    messages = [Message(text, about.get(text, "")) for text in texts]
    places = Lines(source)
    for text, line in lines.items():
        if text not in texts:
            after = (n for n, one in enumerate(messages) if places.of(one.text) > line)
            messages.insert(next(after, len(messages)), Message(text, about[text]))
    return messages


class Lines:
    """Where messages begin in a file, marks at the beginning of its lines (> - #) left out."""

    def __init__(self, source: str) -> None:
        self.joined, self.starts = "", list[int]()
        for line in source.split("\n"):
            self.starts.append(len(self.joined))
            words = re.sub(r"^(?:[\s>#|]|[-*] |\d+\. |\[!\w+\])*", "", line).strip()
            self.joined += f"{words} "

    def of(self, text: str) -> int:
        """The line (from 1) of a message; 0: nowhere."""
        sought = " ".join(re.sub(r"^(?:[-*] |\d+\. )", "", text).split())
        for piece in (sought, re.split(r"\{\w*\}", sought)[0]):
            at = self.joined.find(piece) if len(piece) > 2 else -1
            if at >= 0:
                return bisect.bisect_right(self.starts, at)
        return 0
