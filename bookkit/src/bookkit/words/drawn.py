"""What drawings say: found in the code without running it, and translated in executed outputs.

A message is a sentence with places for what varies, "Blocks of {size} devices". What meshscope
draws carries its messages and their values as data, beside each text (src/meshscope/_messages.py).
What a chapter draws itself is a string in its code, and in an executed drawing it is found again
by matching; what stands in its places is translated in the same way, or stays, as names and numbers
do. Translated are alternative texts (`aria-label`, `<title>`), drawn text, and a table's caption,
heads and what it prints in bold; other outputs stay as they were executed.

In a chapter's code a drawing says
- what is given for a parameter called `says`, `say` or `title`, or assigned to `says`;
- what stands between `<text …>` and `</text>` in a string, and so for `<title>`, and for a table's
  `<caption>`, `<th>` and `<b>`.

Labels that reach a chart as data, such as the keys of a table, stand in book/drawn.toml.

The figures of book/figures/ carry their messages as data, as what meshscope draws does; a line of
a message of several lines says which it is (`data-line`).
"""

from __future__ import annotations

import ast
import functools
import html
import importlib.util
import json
import re
import runpy
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bookkit.model.book import Book, Problem
from bookkit.words.catalogues import has_words

SAID = {"says", "say", "title"}  # parameters and variables
DRAWN = re.compile(r"<(text|title|caption|th|b)\b[^<>]*>([^<>]+)</\1>")
PLACE = re.compile(r"\{(\w+)\}")
# What a sentence carries as data: its message, and what its places hold, names or further sentences.
Sentence = tuple[str, Mapping[str, "str | Sentence"]]


@functools.cache
def messages_of_meshscope() -> dict[str, Any]:
    """The names of src/meshscope/_messages.py, without importing what else meshscope needs."""
    package = importlib.util.find_spec("meshscope")
    if package is None or package.origin is None:
        raise Problem("meshscope is not installed: run `make venv`")
    return runpy.run_path(str(Path(package.origin).with_name("_messages.py")))


def of_meshscope() -> tuple[str, ...]:
    """All messages of meshscope, from its list."""
    return tuple(messages_of_meshscope()["MESSAGES"])


def labels_path(book: Book) -> Path:
    return book.root / "book" / "drawn.toml"


def labels(book: Book) -> dict[str, list[str]]:
    """What charts write that reaches them as data, by page."""
    path = labels_path(book)
    found = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    if unknown := found.keys() - {page.rsplit("/", 1)[-1] for page in book.chapters}:
        raise Problem(f"book/drawn.toml: no page with code is called {', '.join(sorted(unknown))}")
    return found


# Finding messages in drawings.


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


# Finding messages in code.


def drawn_messages(code: str, signatures: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What the drawings of a cell say. `signatures`: parameters of the book's functions, by name."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    found: list[tuple[int, int, str]] = []

    def note(value: ast.expr) -> None:
        for text in templates(value):
            if has_words(PLACE.sub("", text)):
                found.append((value.lineno, value.col_offset, text))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            if any(isinstance(name, ast.Name) and name.id == "says" for name in node.targets):
                note(node.value)
        elif isinstance(node, ast.Call):
            for name, value in arguments(node, signatures):
                if name in SAID:
                    note(value)
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            for text in templates(node):
                for said in DRAWN.finditer(text):
                    words = html.unescape(said[2])
                    if has_words(PLACE.sub("", words)):
                        found.append((node.lineno, node.col_offset, words))
    yield from dict.fromkeys(text for _, _, text in sorted(found, key=lambda one: one[:2]))


def arguments(
    call: ast.Call, signatures: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ast.expr]]:
    """(parameter, value) of a call, as far as names tell."""
    if isinstance(call.func, ast.Attribute):
        names: tuple[str, ...] = ("x", "title") if call.func.attr == "show" else ()
    else:
        names = tuple(signatures.get(call.func.id, ())) if isinstance(call.func, ast.Name) else ()
    yield from zip(names, call.args)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def signatures(cells: Iterable[str]) -> dict[str, list[str]]:
    """The parameters of each function that cells define."""
    found = {}
    for code in cells:
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name] = [argument.arg for argument in node.args.args]
    return found


def templates(value: ast.expr) -> Iterator[str]:
    """A string as a template: what varies becomes {name}. Nothing for what is no string."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from templates(value.body)
        yield from templates(value.orelse)
    elif isinstance(value, ast.JoinedStr):
        text, seen = "", list[str]()
        for part in value.values:
            if isinstance(part, ast.FormattedValue):
                name = placeholder(part.value)
                name = str(len(seen)) if not name or name in seen else name
                seen.append(name)
                text += f"{{{name}}}"
            elif isinstance(part, ast.Constant):
                text += str(part.value)
        yield text


def placeholder(value: ast.expr) -> str:
    if isinstance(value, ast.Name):
        return value.id
    return value.attr if isinstance(value, ast.Attribute) else ""


# Translating what was executed.


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    parts = PLACE.split(template)
    seen: set[str] = set()
    anything = ".+?" if ";" in template else "[^;]+?"  # a part of a sentence ends at its semicolon

    def regex(n: int, part: str) -> str:
        if n % 2 == 0:
            return re.escape(part).replace(r"\ ", r"[ \xa0]+")
        if part in seen:
            return f"(?P={name_of(part)})"
        seen.add(part)
        return f"(?P<{name_of(part)}>{anything})"

    return re.compile("".join(regex(n, part) for n, part in enumerate(parts)), re.S)


def name_of(part: str) -> str:
    return f"_{part}"


def rank(template: str) -> tuple[int, int]:
    """Templates that say more are tried first."""
    return (-len(PLACE.sub("", template)), PLACE.search(template) is not None)


class Translator:
    """Finds which template a sentence was made from, and makes it again in another language."""

    def __init__(self, texts: Iterable[str], translations: Mapping[str, str]) -> None:
        self.translations = translations
        self.ranked = sorted(dict.fromkeys(texts), key=rank)

    def find(self, text: str) -> tuple[str, dict[str, str]] | None:
        for template in self.ranked:
            if found := pattern(template).fullmatch(text):
                places = {name: found[name_of(name)] for name in PLACE.findall(template)}
                return template, places
        return None

    def sentence(self, text: str) -> str:
        found = self.find(text)
        if found is None:
            return text
        template, places = found
        new = self.translations.get(template, template)
        if set(PLACE.findall(new)) != set(places):
            new = template
        done = {name: self.sentence(value) for name, value in places.items()}
        if new == template and done == places:
            return text
        return PLACE.sub(lambda match: done[match[1]], new)

    def said(self, said: str | Sentence) -> str:
        """What carries its message as data; a string is a name, a number or an author's own title."""
        if isinstance(said, str):
            return self.sentence(said)
        message, values = said
        return filled(self.message(message), {name: self.said(values[name]) for name in values})

    def message(self, message: str) -> str:
        """A message in this language, or as it was where its translation has other places."""
        new = self.translations.get(message, message)
        return new if set(PLACE.findall(new)) == set(PLACE.findall(message)) else message

    def coloured(self, text: str, said: str | Sentence) -> str:
        """The same for a text with the marks of tags in it, which surround values or parts of them."""
        if isinstance(said, str):
            return text if MARK.search(text) else self.sentence(text)
        message, values = said
        parts = PLACE.split(message)
        outside = re.fullmatch(f"({MARK.pattern}*)(.*?)({MARK.pattern}*)", text, re.S)
        assert outside is not None  # every text is some marks, others, and some marks
        head, tail = outside[1] if parts[0] else "", outside[3] if parts[-1] else ""
        text = text[len(head) : len(text) - len(tail)]  # tags around all of it, not around a value
        done, at = {}, 0
        for n, part in enumerate(parts):
            if n % 2 == 0:
                at += len(part)
                continue
            start, left = at, len(as_executed(values[part]))
            while at < len(text) and (left or MARK.match(text[at])):
                left -= not MARK.match(text[at])
                at += 1
            done[part] = self.coloured(text[start:at], values[part])
        return head + filled(self.message(message), done) + tail

    def inside(self, markup: str, said: Sentence | None, line: int | None = None) -> str:
        """Text with tags in it, as drawings colour names: <text>over <tspan>data</tspan>(2)</text>."""
        tags: list[str] = []

        def hide(tag: re.Match[str]) -> str:
            tags.append(tag[0])
            return chr(0xE000 + len(tags) - 1)

        text = html.unescape(re.sub(r"<[^<>]+>", hide, markup))
        old = text.strip()
        if said and MARK.sub("", old) != line_of(as_executed(said), line):
            said = None  # another text than its data say: not a drawing of ours
        if said and line is not None:
            new = line_of(self.said(said), line)
        else:
            new = self.coloured(old, said) if said else self.sentence(old)
        if new == old:
            return markup
        new = html.escape(text.replace(old, new), quote=False)
        return MARK.sub(lambda mark: tags[ord(mark[0]) - 0xE000], new)

    def output(self, markup: str) -> str:
        """An executed output, its drawings' and tables' words translated."""

        def label(found: re.Match[str]) -> str:
            old = html.unescape(found["label"])
            said = data(found[0])
            new = self.said(said) if said else self.sentence(old)
            return found[0] if new == old else found[0].replace(found["label"], html.escape(new), 1)

        def element(found: re.Match[str]) -> str:
            line = LINE_OF.search(found[1])
            which = int(line[1]) if line else None
            return found[1] + self.inside(found[3], data(found[1]), which) + found[4]

        def drawing(found: re.Match[str]) -> str:
            return ELEMENT.sub(element, LABEL.sub(label, found[0]))

        return PICTURE.sub(drawing, markup)


def data(tag: str) -> Sentence | None:
    """What a tag says of its text, if anything."""
    found = DATA.search(tag)
    if found is None:
        return None
    return html.unescape(found[1]), json.loads(html.unescape(found[2] or "{}"))


def as_executed(said: str | Sentence) -> str:
    return said if isinstance(said, str) else str(messages_of_meshscope()["filled"](*said))


def line_of(text: str, line: int | None) -> str:
    """One of its lines; a translation may have fewer."""
    if line is None:
        return text
    return dict(enumerate(text.split("\n"))).get(line, "")


def filled(message: str, values: Mapping[str, str]) -> str:
    return PLACE.sub(lambda place: values[place[1]], message)


MARK = re.compile("[\ue000-\uf8ff]")  # in place of a tag
LINE_OF = re.compile(r'\bdata-line="(\d+)"')
DATA = re.compile(r"""\bdata-message="([^"]*)"(?: data-values='([^']*)')?""")
LABEL = re.compile(r'<[^<>]*\baria-label="(?P<label>[^"]*)"[^<>]*>')
ELEMENT = re.compile(
    r"(<(text|title|caption|th|td(?=[^<>]* data-message)|b|summary)\b[^<>]*>)(.*?)(</\2>)", re.S
)
PICTURE = re.compile(
    r"<svg\b.*?</svg>|<table\b.*?</table>|<summary data-message=.*?</summary>", re.S
)
