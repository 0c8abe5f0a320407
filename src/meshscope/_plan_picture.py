"""A picture of a plan: memory against time, one mark for each candidate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ._messages import Said, attributes, joined, plain
from ._plan_outcome import digits
from ._show import Drawing
from ._svg import PALETTE

# number in the table, name of the table, mesh, bytes per device, seconds of a step
Mark = tuple[int, str, str, int, float]

WIDTH, HEIGHT = 420, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 20, 44  # around the field
ROW = 18  # of the legend
SIZE = 5  # of a mark, from its middle
SAID = 5  # of the alternative text
MOST = 40  # marks with a number; more would cover each other
_STEPS = (1, 2, 5)


def picture(marks: Sequence[Mark], hbm: float, chip: str, text: str) -> Drawing:
    """Draw bytes per device to the right and seconds of a step upwards, both on log scales.

    Args:
      marks: those that have a program.
      hbm: bytes of one device; what is beyond does not fit.
      chip: its name.
      text: what is shown where there are no pictures.
    """
    tables = list(dict.fromkeys(mark[1] for mark in marks))
    across = _Scale([mark[3] / 1e9 for mark in marks] + [hbm / 1e9], LEFT, WIDTH - RIGHT)
    up = _Scale([1e3 * mark[4] for mark in marks] or [1], HEIGHT - BOTTOM, TOP)
    edge = across.at(hbm / 1e9)
    parts = [
        f'<rect x="{edge:.1f}" y="{TOP}" width="{WIDTH - RIGHT - edge:.1f}" '
        f'height="{HEIGHT - BOTTOM - TOP}" fill="currentColor" fill-opacity=".09"/>',
        f'<path d="M{edge:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="currentColor" stroke-width="1.5"/>',
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" '
        'stroke="currentColor" stroke-opacity=".5"/>',
    ]
    limit = Said("{memory} GB of {chip}", memory=digits(hbm / 1e9), chip=chip)
    middle = min(max(edge, LEFT + 50), WIDTH - 60)
    parts.append(_text(middle, TOP - 7, limit, "middle"))
    for value in across.ticks():
        parts.append(_tick(f"M{across.at(value):.1f} {HEIGHT - BOTTOM}v4"))
        parts.append(_text(across.at(value), HEIGHT - BOTTOM + 17, f"{value:g}", "middle"))
    for value in up.ticks():
        parts.append(_tick(f"M{LEFT} {up.at(value):.1f}h-4"))
        parts.append(_text(LEFT - 7, up.at(value) + 4, f"{value:g}", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, Said("GB per device"), "middle"))
    parts.append(_text(4, TOP - 7, Said("step ms"), "start"))
    places = [(across.at(mark[3] / 1e9), up.at(1e3 * mark[4])) for mark in marks]
    labels = list(places)
    for mark, (x, y) in zip(marks, places, strict=True):
        parts.append(_mark(x, y, tables.index(mark[1])))
        if len(labels) - len(places) < MOST:
            at = _free(x, y, labels)
            labels.append(at)
            parts.append(_text(at[0], at[1] + 4, str(mark[0]), "middle"))
    for row, (n, table) in enumerate(enumerate(tables)):
        y = HEIGHT + ROW * row + ROW / 2
        parts += [_mark(LEFT, y, n), _text(LEFT + 14, y + 4, table, "start")]
    said = _says(marks)
    height = HEIGHT + ROW * len(tables) + 4
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'style="max-width:100%;height:auto" font-family="sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(plain(said), _QUOTES)}"{attributes(said)}>{"".join(parts)}</svg>'
    )
    return Drawing(svg, text, (svg,))


_QUOTES = {'"': "&quot;"}


def _says(marks: Sequence[Mark]) -> Said:
    """The alternative text."""
    if not marks:
        return Said("Memory and time of no candidate")
    each = [
        Said(
            "{number} {table}, {mesh}: {memory} GB, {time} ms",
            number=number,
            table=table,
            mesh=mesh,
            memory=digits(size / 1e9),
            time=digits(1e3 * seconds),
        )
        for number, table, mesh, size, seconds in marks[:SAID]
    ]
    rows = joined("{part}; {parts}", each)
    return Said("Memory and time of {count} candidates: {rows}", count=len(marks), rows=rows)


class _Scale:
    """A log scale from values to places of the picture."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        self.low, self.high = min(values) / 1.4, max(values) * 1.4
        self.start, self.stop = start, stop

    def at(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round values inside: 1, 2, 5, 10 …, of those so few that they have room."""
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        for steps in (_STEPS, (1, 3), (1,)):
            found = [
                step * 10.0**power for power in range(first, last + 1) for step in steps
                if self.low < step * 10.0**power < self.high
            ]  # fmt: skip
            gaps = [abs(self.at(b) - self.at(a)) for a, b in itertools.pairwise(found)]
            if min(gaps, default=math.inf) >= 30:
                return found
        return found


def _tick(path: str) -> str:
    return f'<path d="{path}" stroke="currentColor" stroke-opacity=".5"/>'


def _text(x: float, y: float, text: str | Said, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"'
        f"{attributes(text)}>{escape(plain(text))}</text>"
    )


def _mark(x: float, y: float, n: int) -> str:
    """The nth table's mark, which its shape and its colour tell apart."""
    name = list(PALETTE)[n % len(PALETTE)]
    s = SIZE
    paths = (
        f"M{x - s:.1f} {y:.1f}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z",
        f"M{x - s:.1f} {y - s:.1f}h{2 * s}v{2 * s}h{-2 * s}z",
        f"M{x:.1f} {y - s - 1:.1f}l{s + 1} {2 * s}h{-2 * s - 2}z",
        f"M{x:.1f} {y - s - 1:.1f}l{s + 1} {s + 1}l{-s - 1} {s + 1}l{-s - 1} {-s - 1}z",
        f"M{x:.1f} {y + s + 1:.1f}l{s + 1} {-2 * s}h{-2 * s - 2}z",
    )
    return f'<path d="{paths[n % len(paths)]}" fill="var(--ms-{name},{PALETTE[name]})"/>'


def _free(x: float, y: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A place beside a mark where no other mark or number is near, if there is one."""
    around = [(12, 0), (-12, 0), (0, -13), (0, 13), (12, -10), (-12, -10), (12, 10), (-12, 10)]
    around += [(24, 0), (-24, 0), (0, -25), (0, 25)]
    for right, down in around:
        at = x + right, y + down
        inside = LEFT < at[0] < WIDTH - RIGHT + 4 and TOP < at[1] < HEIGHT - BOTTOM
        if inside and all(abs(at[0] - a) > 10 or abs(at[1] - b) > 10 for a, b in taken):
            return at
    return x + 12, y
