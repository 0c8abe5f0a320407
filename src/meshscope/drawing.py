"""Draw where an array lies: which block of it is held by which device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr
from zlib import crc32

from .placement import Axes, Edge, Placement, leaves, times

# One colour per mesh axis, in every drawing. A page may set the variables --ms-data
# to --ms-axis-3; these fallbacks differ to colour-blind eyes and keep a contrast of
# at least 3 on white and on #121212.
COLOURS = {
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
OTHERS = ("axis-1", "axis-2", "axis-3")
MOST_PARTS = 16  # of one dimension; the middle of more is left out
MOST_LEAVES = 12  # drawn one by one; more make a table
MOST_ROWS = 60  # of that table
EM = 0.61  # width of a character of the font, in font sizes


@dataclass(frozen=True)
class Drawing:
    """A picture of a placement: ``svg`` in notebooks, ``text`` in terminals.

    ``svg`` is one element that stands alone, in a page or in a file; its colours
    come from ``currentColor`` and the page's ``--ms-…`` variables. ``_repr_svg_()``
    is for files: it also turns light where the reader prefers a dark page. ``pieces``
    are the drawings of a tree's leaves, which flow beside each other in a notebook.
    """

    svg: str
    text: str
    pieces: tuple[str, ...]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        if len(self.pieces) == 1:
            return self.svg
        flow = "display:flex;flex-wrap:wrap;gap:20px 32px;align-items:flex-start"
        return f'<div style="{flow}">{"".join(self.pieces)}</div>'

    def _repr_svg_(self) -> str:
        ink = "svg{color:#1a1a1a}@media(prefers-color-scheme:dark){svg{color:#eee}}"
        head, end, rest = self.svg.partition(">")
        return f"{head}{end}<style>{ink}</style>{rest}"

    def _ipython_display_(self) -> None:
        # Asked one by one, both _repr_html_ and _repr_svg_ would be stored.
        from IPython.display import display

        bundle = {"text/html": self._repr_html_(), "text/plain": self.text}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]


def show(x: Any, title: str | None = None) -> Drawing:
    """Draw how ``x`` lies on its mesh.

    Each block of the array is labelled with the ids of the devices that hold it.
    Each dimension is labelled with its size, the mesh axes that split it and the
    size of a part, all in elements: ``16 ÷ model(4) = 4``. Mesh axes that split
    nothing hold copies, and are named below the blocks.

    Args:
      x: a ``jax.Array`` of any rank; a ``jax.ShapeDtypeStruct`` with a sharding; a
        tuple ``(shape, sharding)``; an ``nnx.Variable`` of one of these; an array
        traced by ``jax.jit`` over Explicit axes (its blocks are labelled with mesh
        coordinates, ``:`` for all: a traced array is on no device yet); a ``Mesh``
        or ``AbstractMesh``; or a pytree of these, drawn leaf by leaf, or as a table
        where there are more than 12.
      title: a line above the drawing.

    Raises:
      ValueError: a dimension that its mesh axes do not divide, with names and sizes;
        an array traced over Auto axes or without a mesh; a shape without a sharding;
        an empty mesh or tree.
      TypeError: what lies on no device (a host array, a function, a program, a
        spec), with what to pass instead.
    """
    named = leaves(x)
    if len(named) > MOST_LEAVES:
        drawn = [_table(named, title)]
    else:
        heads = [[title or named[0][0]]] if len(named) == 1 else [[n] for n, _ in named]
        if len(named) > 1:
            heads[0].insert(0, title or "")
        scenes = [_Scene(p, list(filter(None, h))) for (_, p), h in zip(named, heads)]
        drawn = [(_picture(s), _words(s)) for s in scenes]
    pens = [pen for pen, _ in drawn]
    pieces = tuple(_svg([pen]) for pen in pens)
    return Drawing(_svg(pens), "\n\n".join(text for _, text in drawn), pieces)


# What both renderings say.

Run = tuple[str, str]  # text, and the mesh axis whose colour it has, or ""
Line = list[Run]
Cells = list[list[list[str] | None]]  # rows of labels; None where one is left out


def _plain(line: Line) -> str:
    return "".join(text for text, _ in line)


def _sum(axes: Axes, between: str) -> Line:
    """``data(2) × model(4)``, or ``8`` for an axis without a name."""
    line: Line = []
    for name, size in axes:
        line += [(between, "")] if line else []
        line += [(name, name), (f"({size})" if name else str(size), "")]
    return line


def _flat(lines: list[Line]) -> Line:
    return [run for line in lines for run in [(" ", ""), *line]][1:]


def _seen(parts: int) -> list[int]:
    """The parts that are drawn; -1 stands for those left out."""
    if parts <= MOST_PARTS:
        return list(range(parts))
    return [*range(MOST_PARTS - 5), -1, *range(parts - 4, parts)]


def _range(held: Sequence[str]) -> str:
    """Many devices in few characters: 0–15, or first, second and last of a row."""
    steps = {int(b) - int(a) for a, b in itertools.pairwise(held)}
    if steps == {1}:
        return f"{held[0]}–{held[-1]}"
    return f"{held[0]},{held[1]}" + (f"…{held[-1]}" if len(steps) == 1 else "…")


class _Scene:
    """A placement cut into panels of rows and columns, with every label it needs."""

    def __init__(self, p: Placement, heading: list[str]) -> None:
        rank, self.p, self.heading = len(p.edges), p, heading
        split = [d for d in range(rank) if p.edges[d].parts > 1]
        # The last two split dimensions make the grid; any before them, panels.
        row, col = rank - 2, rank - 1
        if len(split) > 1:
            row, col = split[-2:]
        elif split:
            row = min(split[0], row)
        self.has = (row >= 0, col >= 0)  # labels on the left, on top
        self.edges = [p.edges[d] if d >= 0 else Edge(1) for d in (row, col)]
        self.labels = [self.label(d) if d >= 0 else [] for d in (row, col)]
        self.seen = [_seen(edge.parts) for edge in self.edges]
        rest = [d for d in range(rank) if d not in (row, col)]
        lead = [d for d in rest if d in split]
        self.above = [_flat(self.label(d)) for d in rest]
        self.few = sum(map(len, p.blocks.values())) <= MOST_PARTS
        every = list(itertools.product(*(range(p.edges[d].parts) for d in lead)))
        self.panels: list[tuple[Line, Cells]] = []
        drawn = 0
        for index in every[: max(2, 2 * MOST_PARTS // len(self.seen[0]))]:
            cells: Cells = []
            for r in self.seen[0]:
                cells.append([])
                for c in self.seen[1]:
                    at = dict(zip(lead, index)) | {row: r, col: c}
                    held = p.blocks.get(tuple(at.get(d, 0) for d in range(rank)), ())
                    short = self.few or len(held) < 3
                    labels = list(held) if short else [_range(held)]
                    cells[-1].append(labels or None)
                    drawn += bool(labels)
            name = _flat([self.panel(d, i) for d, i in zip(lead, index)])
            self.panels.append((name, cells))
        self.foot: list[Line] = []
        for verb, axes in p.notes:
            over = f"{verb} over " if axes[0][0] else f"{verb} × "
            self.foot.append([(over, ""), *_sum(axes, " × ")])
        if drawn < len(p.blocks):
            left_out = f"⋯ {len(p.blocks) - drawn} of {len(p.blocks)} not drawn"
            self.foot.append([(left_out, "")])
        if not p.is_mesh:
            self.foot.append([(f"each {p.keys}: {times(p.local)}", "")])

    def label(self, dim: int) -> list[Line]:
        """A dimension, one line per step: 16, ÷ model(4), = 4."""
        edge, p = self.p.edges[dim], self.p
        if p.is_mesh:
            return [_sum(edge.axes, ""), [(edge.mark, "")]]
        name = f"dim {dim}: " if len(p.edges) > 2 else ""
        axes = edge.axes or ((("", edge.parts),) if edge.parts > 1 else ())
        lines = [[(f"{name}{edge.size}", "")]]
        lines += [[("÷ ", ""), *_sum((axis,), "")] for axis in axes]
        return lines + ([[(f"= {p.local[dim]}", "")]] if axes else [])

    def panel(self, dim: int, part: int) -> Line:
        """Which part of a leading dimension a panel is: dim 0 [0:2] stage 0."""
        edge, step, line = self.p.edges[dim], self.p.local[dim], list[Run]()
        if not self.p.is_mesh:
            line.append((f"dim {dim} [{part * step}:{(part + 1) * step}] ", ""))
        for n, (name, size) in enumerate(edge.axes):
            position = part // math.prod(s for _, s in edge.axes[n + 1 :]) % size
            line += [(name, name), (f" {position} ", "")]
        return line

    def ticks(self, side: int) -> list[str]:
        """Numbers along an edge: elements at every cut, or coordinates of a mesh."""
        edge, seen = self.edges[side], self.seen[side]
        step = 1 if self.p.is_mesh else edge.size // edge.parts
        ends = [] if self.p.is_mesh else [edge.parts]
        return [str(i * step) if i >= 0 else "" for i in [*seen, *ends]]

    def spec(self) -> Line:
        """The spec, with the names of mesh axes in their colours."""
        names = dict(self.p.mesh)
        words = self.p.spec.replace("'", "\0'\0").split("\0")
        return [(w, w if w in names else "") for w in words if w]

    def says(self) -> str:
        """What is drawn, along which axes, and what follows, in one sentence."""
        p, parts = self.p, []
        for d, e in enumerate(p.edges):
            if p.is_mesh:
                parts.append(f"axis {e.axes[0][0]} of size {e.size}, {e.mark}")
            elif e.parts == 1:
                parts.append(f"dimension {d} of size {e.size} whole")
            else:
                over = " then ".join(a for a, _ in e.axes)
                parts.append(
                    f"dimension {d} of size {e.size} split"
                    f"{' over ' + over if over else ''} into {e.parts} of {p.local[d]}"
                )
        ids = [held[0] for held in p.blocks.values()]
        row = " ".join(ids) if len(ids) <= MOST_PARTS else f"{ids[0]} to {ids[-1]}"
        ends = [f"in order {row}"] if p.is_mesh else [_plain(f) for f in self.foot]
        head = ", ".join([*self.heading, f"{p.what} {p.spec}"])
        return f"{head}: {'; '.join([*parts, *ends])}"


# Plain text.


def _words(s: _Scene) -> str:
    mesh, (rows, columns) = s.p.is_mesh, map(len, s.seen)
    out = [*s.heading, f"{s.p.what}  {s.p.spec}", *map(_plain, s.above)]
    side, top = s.ticks(0), s.ticks(1)
    left = [_plain(line) for line in s.labels[0]] if s.has[0] else []
    gutter = max(map(len, left)) + 1 if left else 0
    scale = max(map(len, side)) + 1 if left else 0
    ruled = rows <= 8  # lines between rows, and numbers on these lines

    def short(held: list[str]) -> str:
        text = " ".join(held)  # in narrow columns, one line more
        return text if columns <= 8 else text.replace("…", "\n…").replace("–", "\n–")

    labels = [short(c) for _, cells in s.panels for r in cells for c in r if c]
    wide = max(len(line) for text in labels for line in text.split("\n"))
    wide += 2 if columns <= 8 else 0
    if columns <= 8:
        wide = max(wide, *(len(t) + mesh for t in top))
    for name, cells in s.panels:
        out += [_plain(name).strip()] if name else []
        if s.has[1]:
            out.append(" " * (gutter + scale) + _plain(_flat(s.labels[1])))
            line = ""
            for n, tick in enumerate(top):
                at = n * (wide + 1) + (1 + (wide - len(tick)) // 2 if mesh else 0)
                if at > len(line) or not n:
                    line = f"{line:<{at}}{tick}"
            out.append(" " * (gutter + scale) + line)
        body: list[tuple[str, str]] = []
        rule = ["─" * wide] * columns
        for n, row in enumerate(cells):
            if ruled or n == 0:
                a, b, c = "┌┬┐" if n == 0 else "├┼┤"
                body.append(("" if mesh or not ruled else side[n], a + b.join(rule) + c))
            texts = ["⋯" if c is None else short(c) for c in row]
            tick = "" if not mesh and ruled else side[n]
            for layer in itertools.zip_longest(*(t.split("\n") for t in texts)):
                body.append((tick, f"│{'│'.join((t or '').center(wide) for t in layer)}│"))
                tick = ""
        body.append(("" if mesh else side[-1], f"└{'┴'.join(rule)}┘"))
        skip = max(0, (len(body) - len(left)) // 2)
        words = [""] * skip + left
        body += [("", "")] * (len(words) - len(body))
        words += [""] * (len(body) - len(words))
        for word, (tick, line) in zip(words, body):
            mark = f"{tick:>{scale - 1}} " if left else ""
            out.append(f"{word:<{gutter}}{mark}{line}")
    out += map(_plain, s.foot)
    return "\n".join(line.rstrip() for line in out)


# SVG.

_INK = 'fill="currentColor"'
_BLOCK = f'class="ms-blocks" {_INK} fill-opacity=".07" stroke="currentColor"'
_BLOCK += ' stroke-opacity=".45"'
_CHIP = 'class="ms-chips" fill="none" stroke="currentColor" stroke-opacity=".6"'
_BOLD = 'font-weight="700"'
_MARK = 'class="ms-marks" font-size="10" fill-opacity=".75"'
_ANCHOR = {"start": 0.0, "middle": 0.5, "end": 1.0}


class _Pen:
    """Collects SVG elements in groups that share attributes; knows their extent."""

    def __init__(self, mesh: Axes, says: str) -> None:
        self.groups: dict[str, list[str]] = {}
        self.right = self.bottom = 0.0
        self.says = says
        # Its own colour for a known axis; else one that its name chooses.
        self.colour = {a: a for a, _ in mesh if a in COLOURS}
        for axis, _ in mesh:
            start = crc32(axis.encode()) % len(OTHERS)
            order = [*OTHERS[start:], *OTHERS[:start], *COLOURS]
            free = [c for c in order if c not in self.colour.values()]
            self.colour.setdefault(axis, (free or order)[0])

    def ink(self, axis: str) -> str:
        name = self.colour.get(axis)
        return f"var(--ms-{name},{COLOURS[name]})" if name else "currentColor"

    def put(self, group: str, element: str, right: float, bottom: float) -> None:
        self.groups.setdefault(group, []).append(element)
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def rect(self, x: float, y: float, w: float, h: float, group: str, more: str = "") -> None:
        at = f'x="{x:.4g}" y="{y:.4g}" width="{w:.4g}" height="{h:.4g}"'
        self.put(group, f"<rect {at}{more}/>", x + w, y + h)

    def text(
        self, x: float, y: float, line: Line, group: str = "", anchor: str = "start",
        size: int = 12, more: str = "",
    ) -> None:  # fmt: skip
        spans = ""
        for text, axis in line:
            mix = f"color-mix(in srgb,currentColor 30%,{self.ink(axis)})"
            bold = f'<tspan {_BOLD} fill="{mix}">{escape(text)}</tspan>'
            spans += bold if axis else escape(text)
        if anchor != "start":
            group += f' text-anchor="{anchor}"'
        if size != 12 and "size" not in group:
            group += f' font-size="{size}"'
        reach = 0 if more else len(_plain(line)) * EM * size * (1 - _ANCHOR[anchor])
        at = f'x="{x:.4g}" y="{y:.4g}"'
        self.put(group, f"<text {at}{more}>{spans}</text>", x + reach, y + 4)

    def body(self) -> str:
        return "".join(
            f"<g {group.strip()}>{''.join(made)}</g>" if group else "".join(made)
            for group, made in self.groups.items()
        )


def _svg(pens: list[_Pen]) -> str:
    """One element of all the drawings, one under the other."""
    body, high = "", 0
    for pen in pens:
        inside = pen.body()
        body += f'<g transform="translate(0 {high})">{inside}</g>' if high else inside
        high += math.ceil(pen.bottom) + (2 if pen is pens[-1] else 16)
    wide = math.ceil(max(pen.right for pen in pens)) + 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f"aria-label={quoteattr('. '.join(pen.says for pen in pens))} "
        f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'style="max-width:100%;height:auto" {_INK} font-size="12" '
        f'font-family="ui-monospace,Menlo,Consolas,monospace">{body}</svg>'
    )


def _picture(s: _Scene) -> _Pen:
    pen, p = _Pen(s.p.mesh, s.says()), s.p
    y = 0.0
    for text in s.heading:
        pen.text(0, y := y + 16, [(text, "")], _BOLD, size=13)
    what: Line = [(p.what, "")]
    one = [[*what, ("\xa0 ", ""), *s.spec()]]
    for line in (one if len(p.what + p.spec) < 45 else [what, s.spec()]) + s.above:
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
        gutter = max(len(_plain(line)) for line in s.labels[0]) * EM * 12
        x0 = gutter + 6 + 8 * max(1, len(s.edges[0].axes))
        x0 = round(x0 + max(map(len, s.ticks(0))) * EM * 10 + 5)
    spots = [[x0 + n * (cell + gap) for n in range(columns)]]

    for name, cells in s.panels:
        if name:
            pen.text(x0, y := y + 14, name, f'class="ms-panel" {_BOLD}')
        if s.has[1]:
            if name is s.panels[0][0]:
                pen.text(x0, y := y + (16 if name else 12), _flat(s.labels[1]))
            y = _edge(s, pen, 1, spots[0], cell, gap, y + 6) + 16
        spots[1:] = [[y + n * (high + gap) for n in range(rows)]]
        for (top, row), (left, n) in itertools.product(
            zip(spots[1], cells), zip(spots[0], range(columns))
        ):
            held, middle = row[n], (left + cell / 2, top + high / 2)
            if held is None:
                pen.text(middle[0], middle[1] + 4, [("⋯", "")], anchor="middle")
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
                pen.text(x, base, [(text, "")], 'class="ms-ids"', "middle", size, turned)
        bottom, right = spots[1][-1] + high, spots[0][-1] + cell
        if s.has[0]:
            _edge(s, pen, 0, spots[1], high, gap, round(gutter + 6))
            middle_y = y + (bottom - y - 15 * len(s.labels[0])) / 2 + 11
            for n, line in enumerate(s.labels[0]):
                at = max(y + 9, middle_y) + 15 * n
                pen.text(gutter, at, line, 'class="ms-side"', "end")
        copied = [a for verb, axes in p.notes if verb == "copied" for a, _ in axes]
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
    s: _Scene, pen: _Pen, side: int, spots: list[float], long: float, gap: float, at: float
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
            pen.text(at + reach + 1, down, [(tick, "")], _MARK, "end", 10)
        elif n == last or (n % every == 0 and last - n >= every):
            anchor = ("middle", "end", "start")[end]
            inward = half - end * gap / 2
            pen.text(x + inward, at + 8, [(tick, "")], _MARK, anchor, 10)
    return at


# Many leaves.


def _table(named: list[tuple[str, Placement]], title: str | None) -> tuple[_Pen, str]:
    """Path, shape, spec and local shape of each leaf, in four columns."""
    rows = [[name, p.what, p.spec, times(p.local)] for name, p in named[:MOST_ROWS]]
    rows.insert(0, ["leaf", "array", "spec", "each device"])
    widths = [max(len(row[c]) for row in rows) + 2 for c in range(4)]
    more = [f"⋯ {len(named) - MOST_ROWS} more leaves"] * (len(named) > MOST_ROWS)
    lines = ["".join(f"{t:<{w}}" for t, w in zip(r, widths)).rstrip() for r in rows]
    mesh = tuple(dict(axis for _, p in named for axis in p.mesh).items())
    says = "; ".join(" ".join(row) for row in [*rows[1:], *([more] if more else [])])
    pen = _Pen(mesh, f"{title or 'Table'}, {len(named)} leaves: {says}")
    y = 0.0
    if title:
        pen.text(0, y := y + 16, [(title, "")], _BOLD, size=13)
    for n, row in enumerate(rows):
        y += 17
        for c, text in enumerate(row):
            spec = c == 2 and n > 0
            line = _Scene(named[n - 1][1], []).spec() if spec else [(text, "")]
            x = round(sum(widths[:c]) * EM * 12)
            pen.text(x, y, line, _BOLD if n == 0 else "")
    for text in more:
        pen.text(0, y + 17, [(text, "")])
    return pen, "\n".join([*filter(None, [title]), *lines, *more])
