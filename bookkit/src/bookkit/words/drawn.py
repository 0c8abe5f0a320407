"""What drawings say: found in the code without running it, and translated in executed outputs.

A message is a sentence with places for what varies, "Blocks of {size} devices". In an executed
drawing it is found again by matching; what stands in its places is translated in the same way, or
stays, as names and numbers do. Translated are alternative texts (`aria-label`, `<title>`), drawn
text, and a table's caption, heads and what it prints in bold; other outputs stay as they were
executed.

In a chapter's code a drawing says
- what is given for a parameter called `says`, `say` or `title`, or assigned to `says`;
- what stands between `<text …>` and `</text>` in a string, and so for `<title>`, and for a table's
  `<caption>`, `<th>` and `<b>`.
"""

from __future__ import annotations

import ast
import functools
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bookkit.words.catalogues import has_words

# The sentences of meshscope that stand alone in a drawing or a table (those of cells do not); tests
# compare them with the list in src/meshscope/_messages.py.
MESHSCOPE = (
    # the alternative text of a drawing: all that follows is a part of it
    "{array}: {parts}",
    "{title}, {array}: {parts}",
    "{part}; {parts}",
    "axis {name} of size {size}, {type}",
    "dimension {dim} of size {size} whole",
    "dimension {dim} of size {size} split into {parts} of {each}",
    "dimension {dim} of size {size} split over {axes} into {parts} of {each}",
    "{axis} then {axes}",
    "in order {ids}",
    "in order {first} to {last}",
    # drawn below and beside
    "copied over {axes}",
    "copied × {count}",
    "reduced over {axes}",
    "partial sums over {axes}",
    "varying over {axes}",
    "left to the compiler over {axes}",
    "⋯ {count} of {all} not drawn",
    "each device: {shape}",
    "each device ({axes}): {shape}",
    "dim {dim}: {size}",
    "dim {dim} [{part}]",
    "dim {dim} [{part}] {where}",
    # a table of many leaves
    "{title}, {count} leaves: {rows}",
    "Table",
    "⋯ {count} more leaves",
    "leaf",
    "array",
    "each device",
    # the captions and heads of tables
    "{bytes} bytes per device; {unique} without copies, {total} on all devices",
    "{bytes} bytes per device and {host} in host memory; {unique} without copies, "
    "{total} on all devices",
    "{bytes} bytes per device for a compiled program",
    "{bytes} bytes per device and {host} in host memory for a compiled program",
    "{what}. {program}; another backend may choose differently",
    "{backend} program ({version})",
    "A program given as text",
    "No collectives",
    "1 collective",
    "{count} collectives",
    "Second program minus first",
    "No difference",
    "Nothing is whole on a device",
    "1 kind of value is whole on a device",
    "{count} kinds of values are whole on a device",
    "⋯ {count} more rows",
    "what",
    "shape",
    "placement",
    "bytes per device",
    "kind",
    "axes",
    "within",
    "payload bytes",
    "wire bytes per device",
    "executions",
    "in loop",
    "group size",
    "groups",
    "source",
    "operation",
    "found",
    "lines",
)
SAID = {"says", "say", "title"}  # parameters and variables
DRAWN = re.compile(r"<(text|title|caption|th|b)\b[^<>]*>([^<>]+)</\1>")
PLACE = re.compile(r"\{(\w+)\}")
# Where a place may hold less than anything.
LIMITS = {"array": r"(?:\w*\[[^\]]*\]|(?:Abstract)?Mesh)\s.*?", "part": r"[^;]*?", "axis": r"\S+"}
LIMITS |= dict.fromkeys(("dim", "count", "all", "bytes", "unique", "total", "host"), r"[\d,.]+")
LIMITS["size"] = r"[\d,.]+(?: ÷ [^;]+)?"


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
    whole = ";" in template or template.startswith(("{array}", "{title}"))
    default = ".+?" if whole else "[^;]+?"  # a part of a sentence ends at its semicolon

    def regex(n: int, part: str) -> str:
        if n % 2 == 0:
            return re.escape(part).replace(r"\ ", r"[ \xa0]+")
        if part in seen:
            return f"(?P={name_of(part)})"
        seen.add(part)
        return f"(?P<{name_of(part)}>{LIMITS.get(part, default)})"

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

    def inside(self, markup: str) -> str:
        """Text with tags in it, as drawings colour names: <text>over <tspan>data</tspan>(2)</text>."""
        tags: list[str] = []

        def hide(tag: re.Match[str]) -> str:
            tags.append(tag[0])
            return chr(0xE000 + len(tags) - 1)

        text = html.unescape(re.sub(r"<[^<>]+>", hide, markup))
        new = self.sentence(text.strip())
        if new == text.strip():
            return markup
        new = html.escape(text.replace(text.strip(), new), quote=False)
        return re.sub("[\ue000-\uf8ff]", lambda mark: tags[ord(mark[0]) - 0xE000], new)

    def output(self, markup: str) -> str:
        """An executed output, its drawings' and tables' words translated."""

        def label(found: re.Match[str]) -> str:
            new = self.sentence(html.unescape(found[2]))
            return (
                found[1] + html.escape(new) + found[3]
                if new != html.unescape(found[2])
                else found[0]
            )

        def element(found: re.Match[str]) -> str:
            return found[1] + self.inside(found[3]) + found[4]

        def drawing(found: re.Match[str]) -> str:
            return ELEMENT.sub(element, LABEL.sub(label, found[0]))

        return PICTURE.sub(drawing, markup)


LABEL = re.compile(r'(\baria-label=")([^"]*)(")')
ELEMENT = re.compile(r"(<(text|title|caption|th|b|summary)\b[^<>]*>)(.*?)(</\2>)", re.S)
PICTURE = re.compile(
    r"<svg\b.*?</svg>|<table\b.*?</table>|<summary data-message=.*?</summary>", re.S
)
