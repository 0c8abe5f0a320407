"""The sentences that drawings and tables show, with places for what varies.

All of them stand here, and every element that shows one carries it as data, so that another
language, or a test, finds it without taking a sentence apart:

- ``data-message`` is the message, for example ``copied over {axes}``;
- ``data-values`` is a JSON object with what its places hold, for example ``{"axes":"model(4)"}``:
  a string, or, where a place holds a sentence of its own, a pair of that sentence's message and
  its values.

A place that holds a string shows it as it is: it is a name, a number or the caller's own title.
The text of an element is exactly its message with the values in their places; so is the
``aria-label`` of an ``<svg>``, whose attributes carry it in the same way. Text without
``data-message`` has nothing to translate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, overload
from xml.sax.saxutils import escape, quoteattr

PLACE = re.compile(r"\{(\w+)\}")

MESSAGES = (
    # the alternative text of a drawing: all that follows is a part of it
    "{array}: {parts}",
    "{title}, {array}: {parts}",
    "{part}; {parts}",
    "{drawing}. {drawings}",
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
    "in host memory ({memory})",
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
    "spec",
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
    "{title}\n{note}",
    "CPU sends {types}",
    "If compiled for CPU, it sends {types}",
    "{dtype} as {wide} ({times} times the bytes)",
    "No collectives",
    "1 collective",
    "{count} collectives",
    "Beside a matmul: {hidden} of {count} collectives; unknown: {unknown}",
    "XLA for CPU starts no collective early: compile for the device that you use",
    "Second program minus first",
    "No difference",
    "Nothing is whole on a device",
    "{count} kinds of values are whole on a device",
    "1 kind of value is whole on a device",
    "what",
    "shape",
    "dtype",
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
    "loop",
    "trips",
    "beside it",
    "beside a matmul",
    "matmuls",
    "FLOPs of matmuls",
    "other bytes",
    "groups",
    "source",
    "operation",
    "found",
    "lines",
    "⋯ {count} more rows",
    # a plan: its tables, and its picture
    "Fits into {memory} GB: {devices} devices, {chip}",
    "Nothing fits into {memory} GB: {devices} devices, {chip}",
    "Memory as compiled for {compiler}, bytes in closed form; {estimate}",
    "Memory and bytes as compiled for {compiler}, which another may not do; {estimate}",
    "Memory and bytes as compiled for {compiler}; {estimate}",
    "times at published peaks, to rank by and not to expect",
    "Not as in closed form: what the {compiler} program sends",
    "Does not fit",
    "#",
    "table",
    "mesh",
    "why",
    "GB per device",
    "compute ms",
    "wire ms",
    "step ms",
    "GB sent",
    "as compiled",
    "GB in closed form",
    "GB as compiled",
    "{memory} GB of {chip}",
    "{number} {table}, {mesh}: {memory} GB, {time} ms",
    "Memory and time of {count} candidates: {rows}",
    "Memory and time of no candidate",
    # what cells of tables say
    "{part}, {parts}",
    "sharded",
    "replicated",
    "{count} copies",
    "one device",
    "in {memory}",
    "deleted",
    "the buffers of {path}",
    "one layer of {path}",
    "{path}, or a piece of {other}",
    "{axes} within {others}",
    "unknown",
    "matmul",
    "kernel",
    "other work",
    "nothing",
    "synchronous",
    "yes",
    "no",
)
_KNOWN = frozenset(MESSAGES)

# A run is text with the mesh axis whose colour it has, or ""; a line is a row of them.
Run = tuple[str, str]
Line = list[Run]


def plain(text: Text) -> str:
    """Text without its colours."""
    return "".join(words for words, _ in runs(text))


class Said:
    """A message with its values: strings, coloured lines, or further messages.

    >>> said = Said("in {memory}", memory="pinned_host")
    >>> str(said)
    'in pinned_host'
    >>> print(said.attributes())
     data-message="in {memory}" data-values='{"memory":"pinned_host"}'
    """

    def __init__(self, message: str, **values: str | int | Line | Said) -> None:
        if message not in _KNOWN:
            raise KeyError(f"no such message: {message!r}")
        self.message = message
        self.values = {k: str(v) if isinstance(v, int) else v for k, v in values.items()}

    def __str__(self) -> str:
        return plain(self)

    def line(self) -> Line:
        """What is shown, with the colours of axes."""
        line: Line = []
        for n, part in enumerate(PLACE.split(self.message)):
            if n % 2 == 0:
                line += [(part, "")] if part else []
                continue
            line += runs(self.values[part])
        return line

    def data(self) -> list[Any]:
        """The message and its values, as JSON has them."""
        values = {
            key: value.data() if isinstance(value, Said) else plain(value)
            for key, value in self.values.items()
        }
        return [self.message, values]

    def attributes(self) -> str:
        """For an element that shows this."""
        message, values = self.data()
        told = f" data-message={quoteattr(message)}"
        if values:
            compact = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
            quoted = escape(compact, {"'": "&#39;"})  # JSON is full of the other quotes
            told += f" data-values='{quoted}'"
        return told


Text = str | Line | Said


def runs(text: Text) -> Line:
    """Text as a line."""
    if isinstance(text, Said):
        return text.line()
    return [(text, "")] if isinstance(text, str) else text


def attributes(text: Text) -> str:
    """For an element that shows this: nothing if it is no sentence of ours."""
    return text.attributes() if isinstance(text, Said) else ""


def html(text: Text) -> str:
    """For the inside of an element of a page."""
    return escape(plain(text))


@overload
def joined(message: str, parts: Iterable[Said]) -> Said: ...
@overload
def joined(message: str, parts: Iterable[str | Said]) -> str | Said: ...
def joined(message: str, parts: Iterable[str | Said]) -> str | Said:
    """One, two; three: folded from the right into a message with two places."""
    first, *rest = parts
    if not rest:
        return first
    one, others = PLACE.findall(message)
    return Said(message, **{one: first, others: joined(message, rest)})


def in_memory(text: str, kind: str | None) -> str | Said:
    """What is said of an array, and after it its memory, unless that is the devices' own."""
    if kind is None:
        return text
    return joined("{part}, {parts}", [text, Said("in host memory ({memory})", memory=kind)])


def filled(message: str, values: dict[str, Any]) -> str:
    """The text that a message and its data stand for, as a reader of the attributes makes it."""

    def value(match: re.Match[str]) -> str:
        found = values[match[1]]
        return found if isinstance(found, str) else filled(*found)

    return PLACE.sub(value, message)
