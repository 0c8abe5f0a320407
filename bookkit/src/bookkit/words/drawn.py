"""Translate the words of drawings, which carry their messages as data.

What meshscope draws (src/meshscope/_messages.py) and the figures of book/figures/ say beside each
text which message it was made from, "Blocks of {size} devices", and what its places hold: names,
numbers or further messages. A line of a message of several lines says which it is (`data-line`).
Words of charts that pages draw themselves stay English.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree

PLACE = re.compile(r"\{(\w+)\}")
MARK = re.compile("[\ue000-\uf8ff]")  # in place of a tag
MARKS = f"{MARK.pattern}*"
LINE_OF = re.compile(r'\bdata-line="(\d+)"')
DATA = re.compile(r"""\bdata-message="([^"]*)"(?: data-values='([^']*)')?""")
LABEL = re.compile(r'<[^<>]*\baria-label="(?P<label>[^"]*)"[^<>]*>')
ELEMENT = re.compile(
    r"(<(text|title|caption|th|td|b|summary)\b[^<>]* data-message[^<>]*>)(.*?)(</\2>)", re.S
)
# What a text carries as data: its message, and what its places hold, names or further sentences.
Sentence = tuple[str, Mapping[str, "str | Sentence"]]


def messages_in_drawing(svg: str) -> Iterator[str]:
    """What the texts of a drawing carry as data, the messages that their values hold included."""
    for element in ElementTree.fromstring(svg).iter():
        if message := element.get("data-message"):
            yield from messages_in_sentence((message, json.loads(element.get("data-values", "{}"))))


def messages_in_sentence(said: Sentence) -> Iterator[str]:
    message, values = said
    yield message
    for value in values.values():
        if not isinstance(value, str):
            yield from messages_in_sentence(value)


class Translator:
    """Makes the texts of drawings again in another language."""

    def __init__(self, translations: Mapping[str, str]) -> None:
        self.translations = translations

    def said(self, said: str | Sentence) -> str:
        """A message with its places filled; a string is a name or a number, and stays."""
        if isinstance(said, str):
            return said
        message, values = said
        return filled(self.message(message), {name: self.said(values[name]) for name in values})

    def message(self, message: str) -> str:
        """A message in this language, or as it was where its translation has other places."""
        new = self.translations.get(message, message)
        return new if set(PLACE.findall(new)) == set(PLACE.findall(message)) else message

    def coloured(self, text: str, said: str | Sentence) -> str:
        """The same for a text with the marks of tags in it, which surround values or parts of them."""
        if isinstance(said, str):
            return text
        message, values = said
        parts = PLACE.split(message)  # words, place, words, place, words
        names = parts[1::2]
        parts[1::2] = [f"({with_marks(ENGLISH.said(values[name]))})" for name in names]
        parts[::2] = map(re.escape, parts[::2])
        found = re.fullmatch(f"({MARKS}?){''.join(parts)}({MARKS})", text)  # tags around all of it
        assert found is not None, f"{text!r} is not {message!r}"
        head, *pieces, tail = found.groups()
        done = {n: self.coloured(piece, values[n]) for n, piece in zip(names, pieces)}
        return head + filled(self.message(message), done) + tail

    def inside(self, markup: str, said: Sentence, line: int | None) -> str:
        """Text with tags in it, as drawings colour names: <text>over <tspan>data</tspan>(2)</text>."""
        tags: list[str] = []

        def hide(tag: re.Match[str]) -> str:
            tags.append(tag[0])
            return chr(0xE000 + len(tags) - 1)

        text = html.unescape(re.sub(r"<[^<>]+>", hide, markup))
        old = text.strip()
        if MARK.sub("", old) != line_of(ENGLISH.said(said), line):
            return markup  # another text than its data say: not a drawing of ours
        new = line_of(self.said(said), line) if line is not None else self.coloured(old, said)
        if new == old:
            return markup
        new = html.escape(text.replace(old, new), quote=False)
        return MARK.sub(lambda mark: tags[ord(mark[0]) - 0xE000], new)

    def output(self, markup: str) -> str:
        """An executed output or a figure, the words of its drawings and tables translated."""

        def label(found: re.Match[str]) -> str:
            said = data(found[0])
            if said is None:
                return found[0]
            new = html.escape(self.said(said))
            return found[0].replace(f'aria-label="{found["label"]}"', f'aria-label="{new}"', 1)

        def element(found: re.Match[str]) -> str:
            said, line = data(found[1]), LINE_OF.search(found[1])
            if said is None:
                return found[0]
            which = int(line[1]) if line else None
            return found[1] + self.inside(found[3], said, which) + found[4]

        return ELEMENT.sub(element, LABEL.sub(label, markup))


def data(tag: str) -> Sentence | None:
    """What a tag says of its text, if anything."""
    found = DATA.search(tag)
    if found is None:
        return None
    return html.unescape(found[1]), json.loads(html.unescape(found[2] or "{}"))


def line_of(text: str, line: int | None) -> str:
    """One of its lines; a translation may have fewer."""
    if line is None:
        return text
    return dict(enumerate(text.split("\n"))).get(line, "")


def with_marks(text: str) -> str:
    """A regular expression for a text that may have tags in and around it."""
    return MARKS + "".join(re.escape(sign) + MARKS for sign in text)


def filled(message: str, values: Mapping[str, str]) -> str:
    return PLACE.sub(lambda place: values[place[1]], message)


ENGLISH = Translator({})
