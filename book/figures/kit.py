"""A few words of SVG, shared by the figures of the book.

One small program a figure (or a family of figures), beside this file: its `draw()` returns the
drawings by name, and each is committed as `NAME.svg`. `python book/figures/ring.py` writes them.
Rules: text and greys are `currentColor`; colours are the book's mesh axes, with the same fallbacks
as meshscope; no background, no style sheet; a viewBox about 360 wide, so that one unit is one CSS
pixel on a phone; names and numbers in the drawing, sentences in the caption. The `color` attribute
is for the file alone (a grey that is legible on white and on black); a page that inlines the file
overrides it with `svg { color: inherit }`.

Words are given with `say` if they are for translators, with `kept` if they are names of the code,
units or proper names, which every language keeps; `text` refuses other words. A text that says
something carries its message and its values as data, as those of meshscope do, and pages in another
language show the same drawing with the words of locale/LANGUAGE/LC_MESSAGES/book.po in it.
"""

import json
import re
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr, unescape

DATA = "var(--ms-data,#0072b2)"  # the mesh axis `data`
MODEL = "var(--ms-model,#d55e00)"  # the mesh axis `model`
INK = "currentColor"

PLACE = re.compile(r"\{(\w+)\}")
TAG = re.compile(r"<[^<>]+>")
WORD = re.compile(r"[^\W\d_]{2}")  # a single letter is a name


class Words(str):
    """Markup; `said` is its plain text, or [message, {place: what is said there}]."""

    said: "str | list"
    line: "int | None" = None  # which line of the message it is, of several


def kept(markup):
    """Words that are the same in every language: code, units, names."""
    words = Words(markup)
    words.said = unescape(TAG.sub("", words))
    return words


def say(message, **values):
    """Words for translators; a value is a number, or made by `kept`, `strong` or `say`.

    A message of several lines is drawn by `lines`.
    """
    given = {place: words_of(value) for place, value in values.items()}
    parts = PLACE.split(message)
    words = Words("".join(given[part] if n % 2 else escape(part) for n, part in enumerate(parts)))
    words.said = [message, {place: value.said for place, value in given.items()}]
    return words


def words_of(words):
    """Numbers and signs need not be marked; whether words are to be translated has to be said."""
    if isinstance(words, Words):
        return words
    if WORD.search(TAG.sub("", str(words))):
        raise TypeError(f"{words!r}: say(…) gives it to translators, kept(…) keeps it as it is")
    return kept(words)


def data(words):
    """Attributes with what a text says, if translators have it; as meshscope writes them."""
    if isinstance(words.said, str):
        return ""
    message, values = words.said
    quoted = escape(message, {'"': "&quot;", "\n": "&#10;"})
    told = f' data-message="{quoted}"'
    if values:
        compact = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        quoted = escape(compact, {"'": "&#39;"})  # JSON is full of the other quotes
        told += f" data-values='{quoted}'"
    return told if words.line is None else f'{told} data-line="{words.line}"'


def text(x, y, words, size=12, anchor="start", bold=False, opacity=1.0):
    """One line of text."""
    words = words_of(words)
    more = ' font-weight="600"' if bold else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' opacity="{opacity}"' if opacity < 1 else ""
    more += data(words)
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{more}>{words}</text>'


def lines(x, y, step, words, *more, **and_more):
    """One message on as many lines of text as it has, `step` apart."""
    drawn = []
    for n, line_of_it in enumerate(words.split("\n")):
        part = Words(line_of_it)
        part.said, part.line = words.said, n
        drawn.append(text(x, y + step * n, part, *more, **and_more))
    return drawn


def strong(words, size=None):
    """The same words in bold; a string is a name, or a number with its unit."""
    words = words if isinstance(words, Words) else kept(escape(words))
    if not isinstance(words.said, str) and words.said[1]:
        raise TypeError(f"{words!r} has values: make its text bold, or the values")
    larger = f' font-size="{size}"' if size else ""
    bold = Words(f'<tspan font-weight="600"{larger}>{words}</tspan>')
    bold.said = words.said
    return bold


def key_of_pieces():
    """What the two fills mean where an array is drawn as what a device holds of it; 12 high."""
    parts = [text(0, 12, say("A device holds:"), 12)]
    key = [(102, DATA, 1, say("a piece")), (180, INK, 0.4, say("the whole array"))]
    for x, fill, opacity, words in key:
        parts += [rect(x, 3, 10, 10, fill, opacity), text(x + 14, 12, words, 12)]
    return parts


def rect(x, y, width, height, fill=INK, opacity=1.0, radius=0, more=""):
    more += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    more += f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def line(points, colour=INK, width=1.0, more=""):
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{more}/>'


def shape(points, fill=INK, opacity=1.0, more=""):
    """A filled polygon."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + "Z"
    more += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<path d="{path}" fill="{fill}"{more}/>'


def frame(x, y, width, height, colour=INK, thick=1.0, opacity=1.0, dashed=False):
    """An empty rectangle."""
    more = f' stroke="{colour}" stroke-width="{thick:g}"'
    more += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    more += ' stroke-dasharray="2 2"' if dashed else ""
    return rect(x, y, width, height, "none", 1, 0, more)


def arrow(x1, y1, x2, y2, colour=INK, width=1.4):
    """Straight, horizontal or vertical, with an open head."""
    if y1 == y2:
        way = 5 if x2 > x1 else -5
        head = [(x2 - way, y2 - 4), (x2, y2), (x2 - way, y2 + 4)]
    else:
        way = 5 if y2 > y1 else -5
        head = [(x2 - 4, y2 - way), (x2, y2), (x2 + 4, y2 - way)]
    more = ' stroke-linecap="round" stroke-linejoin="round"'
    return line([(x1, y1), (x2, y2)], colour, width, more) + line(head, colour, width, more)


def figure(width, height, says, parts):
    """One element, ready to be inlined; `says` is what a reader who cannot see it hears."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" role="img" '
        f"aria-label={quoteattr(says)} "
        f'viewBox="0 0 {width:g} {height:g}" color="#777" fill="currentColor" '
        'style="font-family:var(--sans,ui-sans-serif,system-ui,Helvetica,Arial,sans-serif)">'
    )
    return head + "\n" + "\n".join(parts) + "\n</svg>\n"


def write(drawn):
    """Write each figure beside this file: `write(draw())`, with {name: SVG}."""
    for name, svg in drawn.items():
        path = Path(__file__).with_name(f"{name}.svg")
        path.write_text(svg, "utf-8")
        print(path.name, f"{path.stat().st_size:,} bytes")
