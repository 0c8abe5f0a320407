"""A drawing as SVG, in the colours of the mesh's axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from xml.sax.saxutils import escape, quoteattr
from zlib import crc32

from ._messages import Line, Said, Text, attributes, joined, plain, runs
from ._placement import COPIED, COPIES, REDUCED, Axes
from ._scene import Scene

# These differ to colour-blind eyes and keep a contrast of at least 3 on white and on #121212.
PALETTE: Mapping[str, str] = {
    "data": "#0072b2",
    "model": "#d55e00",
    "fsdp": "#08762f",
    "stage": "#d147cf",
    "seq": "#21a3a4",
    "expert": "#ac8c55",
    "axis-1": "#808080",
    "axis-2": "#8a6ae0",
    "axis-3": "#c4506a",
}
SHEETS = (COPIED, COPIES, REDUCED)  # drawn as sheets under the blocks: the values are the same
OTHERS = ("axis-1", "axis-2", "axis-3")
EM = 0.61  # width of a character of the font, in font sizes

_INK = 'fill="currentColor"'
_BLOCK = f'class="ms-blocks" {_INK} fill-opacity=".07" stroke="currentColor"'
_BLOCK += ' stroke-opacity=".45"'
_CHIP = 'class="ms-chips" fill="none" stroke="currentColor" stroke-opacity=".6"'
BOLD = 'font-weight="700"'
_MARK = 'class="ms-marks" font-size="10" fill-opacity=".75"'
_ANCHOR = {"start": 0.0, "middle": 0.5, "end": 1.0}


class Pen:
    """Collects SVG elements in groups that share attributes; knows their extent."""

    def __init__(self, mesh: Axes, says: Said, palette: Mapping[str, str]) -> None:
        self.groups: dict[str, list[str]] = {}
        self.right = self.bottom = 0.0
        self.says = says
        # The caller's colour, or its own for a known axis; else one that its name chooses.
        self.given = palette
        own = [axis for axis, _ in mesh if axis not in palette]
        self.colour = {axis: axis for axis in own if axis in PALETTE}
        for axis in own:
            start = crc32(axis.encode()) % len(OTHERS)
            order = [*OTHERS[start:], *OTHERS[:start], *PALETTE]
            free = [c for c in order if c not in self.colour.values()]
            self.colour.setdefault(axis, (free or order)[0])

    def ink(self, axis: str) -> str:
        if axis in self.given:
            return self.given[axis]
        name = self.colour.get(axis)
        return f"var(--ms-{name},{PALETTE[name]})" if name else "currentColor"

    def put(self, group: str, element: str, right: float, bottom: float) -> None:
        self.groups.setdefault(group, []).append(element)
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def rect(self, x: float, y: float, w: float, h: float, group: str, more: str = "") -> None:
        at = f'x="{x:.4g}" y="{y:.4g}" width="{w:.4g}" height="{h:.4g}"'
        self.put(group, f"<rect {at}{more}/>", x + w, y + h)

    def text(
        self, x: float, y: float, said: Text, group: str = "", anchor: str = "start",
        size: int = 12, more: str = "",
    ) -> None:  # fmt: skip
        spans = ""
        for text, axis in runs(said):
            mix = f"color-mix(in srgb,currentColor 30%,{self.ink(axis)})"
            bold = f'<tspan {BOLD} fill="{mix}">{escape(text)}</tspan>'
            spans += bold if axis else escape(text)
        if anchor != "start":
            group += f' text-anchor="{anchor}"'
        if size != 12 and "size" not in group:
            group += f' font-size="{size}"'
        reach = 0 if more else len(plain(said)) * EM * size * (1 - _ANCHOR[anchor])
        at = f'x="{x:.4g}" y="{y:.4g}"{more}{attributes(said)}'
        self.put(group, f"<text {at}>{spans}</text>", x + reach, y + 4)

    def body(self) -> str:
        return "".join(
            f"<g {group.strip()}>{''.join(made)}</g>" if group else "".join(made)
            for group, made in self.groups.items()
        )


def svg(pens: list[Pen]) -> str:
    """One element of all the drawings, one under the other."""
    body, high = "", 0
    for pen in pens:
        inside = pen.body()
        body += f'<g transform="translate(0 {high})">{inside}</g>' if high else inside
        high += math.ceil(pen.bottom) + (2 if pen is pens[-1] else 16)
    wide = math.ceil(max(pen.right for pen in pens)) + 2
    says = joined("{drawing}. {drawings}", [pen.says for pen in pens])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f"aria-label={quoteattr(str(says))}{says.attributes()} "
        f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'style="max-width:100%;height:auto" {_INK} font-size="12" '
        f'font-family="ui-monospace,Menlo,Consolas,monospace">{body}</svg>'
    )


def picture(s: Scene, palette: Mapping[str, str]) -> Pen:
    pen, p = Pen(s.p.mesh, s.says(), palette), s.p
    y = 0.0
    for text in s.heading:
        pen.text(0, y := y + 16, text, BOLD, size=13)
    what: Line = [(p.what, "")]
    one = [[*what, ("\xa0 ", ""), *s.spec()]]
    for line in [*(one if len(p.what + p.spec) < 45 else [what, s.spec()]), *s.above]:
        pen.text(0, y := y + 16, line)
    y += 8

    # How large a cell must be for what it says.
    rows, columns = map(len, s.seen)
    labels = [c for _, cells in s.panels for r in cells for c in r if c]
    longest = max(len(t) for c in labels for t in c)
    large = max(rows, columns) <= 8 and columns * (longest * EM * 12 + 20) < 360
    size, gap, tall = (12, 4, 20) if large else (9, 2, 14)
    chip = round(longest * EM * size + 5 + 5 * large)
    most = max(map(len, labels))
    turn = most == 1 and not large and columns * chip > 330 >= rows * chip
    turn = turn and chip > 2 * tall
    cell = 18 if turn else max(chip + 6 * large, 224 // columns - gap)
    across = max(1, min(most, (cell - 3) // (chip + 3)))
    high = max(-(-most // across) * (tall + 3) - 3 + 6 * large, chip if turn else 0)
    high = max(high, 88 // rows - gap if s.has[0] else 32)
    gutter, x0 = 0.0, 1.0
    if s.has[0]:
        gutter = max(len(plain(line)) for line in s.side) * EM * 12
        x0 = gutter + 6 + 8 * max(1, len(s.edges[0].axes))
        x0 = round(x0 + max(map(len, s.ticks(0))) * EM * 10 + 5)
    spots = [[x0 + n * (cell + gap) for n in range(columns)]]

    for name, cells in s.panels:
        if name:
            pen.text(x0, y := y + 14, name, f'class="ms-panel" {BOLD}')
        if s.has[1]:
            if name is s.panels[0][0]:
                pen.text(x0, y := y + (16 if name else 12), s.top)
            y = _edge(s, pen, 1, spots[0], cell, gap, y + 6) + 16
        spots[1:] = [[y + n * (high + gap) for n in range(rows)]]
        for (top, row), (left, n) in itertools.product(
            zip(spots[1], cells), zip(spots[0], range(columns))
        ):
            held, middle = row[n], (left + cell / 2, top + high / 2)
            if held is None:
                pen.text(middle[0], middle[1] + 4, "⋯", anchor="middle")
                continue
            pen.rect(left, top, cell, high, _BLOCK, ' rx="3"')
            for k, text in enumerate(held):
                i, j = divmod(k, across)
                beside = min(across, len(held) - i * across)
                x = middle[0] + (j - (beside - 1) / 2) * (chip + 3)
                at = middle[1] + (i - (-(-len(held) // across) - 1) / 2) * (tall + 3)
                if s.few and large and not p.is_mesh:
                    pen.rect(x - chip / 2, at - tall / 2, chip, tall, _CHIP, ' rx="4"')
                turned = f' transform="rotate(-90 {x:.4g} {at:.4g})"' if turn else ""
                base = at + size * 0.35
                pen.text(x, base, text, 'class="ms-ids"', "middle", size, turned)
        bottom, right = spots[1][-1] + high, spots[0][-1] + cell
        if s.has[0]:
            _edge(s, pen, 0, spots[1], high, gap, round(gutter + 6))
            middle_y = y + (bottom - y - 15 * len(s.side)) / 2 + 11
            for n, line in enumerate(s.side):
                at = max(y + 9, middle_y) + 15 * n
                pen.text(gutter, at, line, 'class="ms-side"', "end")
        copied = [a for what, axes in p.notes if what in SHEETS for a, _ in axes]
        for n, axis in enumerate(copied, 1):  # the edges of sheets underneath
            x, d = right + 4 * n, 4 * n
            path = f"M{x0 + d:.4g} {bottom + d:.4g}H{x:.4g}V{y + d:.4g}"
            line_ = f'<path d="{path}" stroke="{pen.ink(axis)}"/>'
            pen.put('fill="none" stroke-width="2"', line_, x + 1, bottom + d + 1)
        y = pen.bottom + 4
    for line in s.foot:
        pen.text(x0, y := y + 14, line)
        y += 2
    return pen


def _edge(
    s: Scene, pen: Pen, side: int, spots: list[float], long: float, gap: float, at: float
) -> float:
    """Bars along an edge, one per mesh axis, cut where it cuts; then numbers."""
    edge, segments = s.edges[side], 1
    for name, size in edge.axes or (("", edge.parts),):
        segments *= size
        each = edge.parts // segments
        grey = f'fill="{pen.ink(name)}"' + (' fill-opacity=".35"' if not name else "")
        for n in range(segments):
            inside = [v for v, i in zip(spots, s.seen[side]) if i >= 0 and i // each == n]
            if inside:
                start, length = inside[0], inside[-1] + long - inside[0]
                x, y = (start, at) if side else (at, start)
                w, h = (length, 5) if side else (5, length)
                pen.rect(x, y, w, h, grey)
        at += 8
    ticks = s.ticks(side)
    half = (long if s.p.is_mesh else -gap) / 2
    reach, last, every = max(map(len, ticks)) * EM * 10, len(ticks) - 1, 1
    while side and reach * 1.5 + 2 > (long + gap) * every and every < last:
        every *= 2
    for n, (tick, x) in enumerate(zip(ticks, [*spots, spots[-1] + long + gap])):
        end = 0 if s.p.is_mesh else (n == last) - (n == 0)
        if side == 0:
            down = x + half + 3.5 - end * min(4.5, (long + gap) / 6)
            pen.text(at + reach + 1, down, tick, _MARK, "end", 10)
        elif n == last or (n % every == 0 and last - n >= every):
            anchor = ("middle", "end", "start")[end]
            inward = half - end * gap / 2
            pen.text(x + inward, at + 8, tick, _MARK, anchor, 10)
    return at
