"""Draw where an array lies: which block of it is held by which device."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr
from zlib import crc32

from .placement import Axes, Edge, Index, Placement, leaves, times

Run = tuple[str, str]  # text, and the mesh axis whose colour it has ("" for none)
Line = list[Run]

# One colour per mesh axis. A page may set --ms-data … --ms-axis-3; these fallbacks
# keep a contrast of at least 3 on white and on #121212.
COLOURS = {
    "data": "#0072b2",
    "model": "#d55e00",
    "fsdp": "#009e73",
    "stage": "#c2659c",
    "seq": "#2a95c9",
    "expert": "#a98600",
    "axis-1": "#7f7f7f",
    "axis-2": "#8468d8",
    "axis-3": "#a8704f",
}
OTHERS = ("axis-1", "axis-2", "axis-3")
CAP = 16  # parts of a dimension drawn before the middle is left out
CAP_LEAVES = 12  # leaves drawn one by one; more make a table
CAP_ROWS = 60  # rows of that table
CHAR = 0.61  # width of a character of the monospaced font, in em


@dataclass(frozen=True)
class Drawing:
    """A picture of a placement, as SVG and as plain text.

    Notebooks show the picture, terminals the text. ``svg`` is one self-contained
    element for a page (colours from ``currentColor`` and the page's ``--ms-…``
    variables); ``_repr_svg_()`` is the same for a file, dark on white and light on
    black by the reader's own setting.
    """

    svg: str
    text: str
    pieces: tuple[str, ...]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        if len(self.pieces) == 1:
            return self.svg
        flow = "display:flex;flex-wrap:wrap;gap:16px 32px;align-items:flex-start"
        return f'<div style="{flow}">{"".join(self.pieces)}</div>'

    def _repr_svg_(self) -> str:
        style = (
            "<style>svg{color:#1a1a1a}@media(prefers-color-scheme:dark)"
            "{svg{color:#eee}}</style>"
        )
        head, angle, rest = self.svg.partition(">")
        return head + angle + style + rest

    def _ipython_display_(self) -> None:
        # With _repr_html_ and _repr_svg_ both offered, a notebook would store both.
        from IPython.display import display

        bundle = {"text/html": self._repr_html_(), "text/plain": self.text}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]


def show(x: Any, title: str | None = None) -> Drawing:
    """Draw how ``x`` lies on its mesh.

    Every block of the array is labelled with the ids of the devices that hold it;
    every dimension with its size, the mesh axes that split it and the size of a
    part, all in elements: ``16 ÷ model(4) = 4``. Mesh axes that split nothing hold
    copies, and are named as that.

    Args:
      x: a ``jax.Array`` of any rank; a ``jax.ShapeDtypeStruct`` with a sharding; a
        tuple ``(shape, sharding)``; an ``nnx.Variable`` of one of these; an array
        traced by ``jax.jit`` over Explicit mesh axes (labelled with mesh
        coordinates: a traced array is on no device yet); a ``Mesh`` or
        ``AbstractMesh`` (devices at their coordinates); or a pytree of these, drawn
        leaf by leaf, and as a table if there are more than 12.
      title: a line of text above the drawing.

    Returns:
      A ``Drawing``: a picture in notebooks, plain text elsewhere.

    Raises:
      ValueError: an uneven split (names dimension, axes and sizes), an array traced
        over Auto axes or without a mesh, a shape without a sharding, an empty mesh.
      TypeError: anything that lies on no device (host arrays, functions, programs),
        saying what to pass instead.
    """
    named = leaves(x)
    if len(named) > CAP_LEAVES:
        pieces = [_table(named, title)]
        texts = [_table_text(named, title)]
    else:
        pieces, texts = [], []
        for number, (name, place) in enumerate(named):
            heads = [title if number == 0 else None, name]
            heading = [h for h in heads if h] if len(named) > 1 else [title or name]
            heading = [h for h in heading if h]
            pieces.append(_picture(place, heading))
            texts.append(_words(place, heading))
    svgs = tuple(_svg(*piece) for piece in pieces)
    text = "\n\n".join(texts)
    return Drawing(svgs[0] if len(svgs) == 1 else _stack(pieces), text, svgs)


# What both renderings share.


def _axis(name: str, size: int) -> Line:
    return [(name, name), (f"({size})" if name else str(size), "")]


def _join(axes: Axes, between: str) -> Line:
    pairs = [_axis(*axis) for axis in axes]
    return [r for i, p in enumerate(pairs) for r in ([(between, "")] if i else []) + p]


def _label(edge: Edge, is_mesh: bool, dim: int | None = None) -> list[Line]:
    """A dimension in words, one line per step: 16, ÷ model(4), = 4."""
    if is_mesh:
        return [_join(edge.axes, ""), [(edge.mark, "")]]
    head = "" if dim is None else f"dim {dim}: "
    lines: list[Line] = [[(f"{head}{edge.size}", "")]]
    axes = edge.axes or ((("", edge.parts),) if edge.parts > 1 else ())
    lines += [[("÷ ", ""), *_axis(*axis)] for axis in axes]
    return lines + ([[(f"= {edge.size // edge.parts}", "")]] if axes else [])


def _flat(lines: list[Line]) -> Line:
    return [
        r for i, line in enumerate(lines) for r in ([(" ", "")] if i else []) + line
    ]


def _plain(line: Line) -> str:
    return "".join(text for text, _ in line)


def _layout(p: Placement) -> tuple[int | None, int | None, list[int], list[int]]:
    """Which dimension runs down, which across, which make panels, which are whole."""
    rank = len(p.edges)
    split = [d for d in range(rank) if p.edges[d].parts > 1]
    if rank < 2:
        return None, (0 if rank else None), [], []
    if len(split) >= 2:
        row, col = split[-2:]
    else:
        row, col = rank - 2, rank - 1
        if split and split[0] < row:
            row = split[0]
    rest = [d for d in range(rank) if d not in (row, col)]
    return (
        row,
        col,
        [d for d in rest if d in split],
        [d for d in rest if d not in split],
    )


def _seen(parts: int, cap: int = CAP) -> list[int]:
    """The parts that are drawn; -1 stands for the ones left out."""
    if parts <= cap:
        return list(range(parts))
    return [*range(cap - 5), -1, *range(parts - 4, parts)]


def _held(p: Placement) -> dict[Index, list[str]]:
    """Labels of each block: its devices, or their range where there are too many."""
    total = sum(map(len, p.blocks.values()))
    few = total <= CAP or max(map(len, p.blocks.values())) == 1
    return {i: list(h) if few else [_range(h)] for i, h in p.blocks.items()}


def _range(held: tuple[str, ...]) -> str:
    if len(held) < 3:
        return ",".join(held)
    if not held[0].isdecimal():
        return f"{held[0]} … {held[-1]}"
    ids = [int(h) for h in held]
    steps = {b - a for a, b in itertools.pairwise(ids)}
    if steps == {1}:
        return f"{ids[0]}–{ids[-1]}"
    if len(steps) == 1:
        return f"{ids[0]},{ids[1]}…{ids[-1]}"
    return f"{ids[0]},{ids[1]}…({len(ids)})"


def _panels(p: Placement, rows: int) -> tuple[list[tuple[str, Index]], int]:
    """Name and leading index of each panel drawn, and how many are left out."""
    lead = _layout(p)[2]
    every = list(itertools.product(*(range(p.edges[d].parts) for d in lead)))
    kept = every[: max(2, 2 * CAP // rows)]
    names = []
    for index in kept:
        words = []
        for d, i in zip(lead, index):
            n = p.local[d]
            name = p.edges[d].axes[0][0] if p.is_mesh else f"dim {d}"
            words.append(
                f"{name} {i}" if p.is_mesh else f"{name} [{i * n}:{i * n + n}]"
            )
        names.append((", ".join(words), index))
    return names, len(every) - len(kept)


def _foot(p: Placement, missing: int, panels: int) -> list[Line]:
    """The lines under the drawing: copies, what is left out, what a device holds."""
    lines: list[Line] = []
    for verb, axes in p.notes:
        if axes[0][0]:
            lines.append([(f"{verb} over ", ""), *_join(axes, " × ")])
        else:
            lines.append([(f"{axes[0][1]} copies", "")])
    if panels:
        lines.append([(f"⋯ {panels} more panels", "")])
    if missing:
        lines.append([(f"⋯ {missing} of {len(p.blocks)} blocks not drawn", "")])
    if not p.is_mesh:
        lines.append([(f"each {p.keys}: {times(p.local)}", "")])
    return lines


def _colours(mesh: Axes) -> dict[str, str]:
    """The name in ``COLOURS`` of each axis: its own, or one found from its name."""
    taken = {a: a for a, _ in mesh if a in COLOURS}
    for axis, _ in mesh:
        if axis not in taken:
            start = crc32(axis.encode()) % len(OTHERS)
            order = [*OTHERS[start:], *OTHERS[:start], *COLOURS]
            free = (c for c in order if c not in taken.values())
            taken[axis] = next(free, OTHERS[start])
    return taken


# Plain text.


def _words(p: Placement, heading: list[str]) -> str:
    row, col, lead, whole = _layout(p)
    held = {i: " ".join(h) for i, h in _held(p).items()}
    rows = p.edges[row] if row is not None else Edge(1)
    cols = p.edges[col] if col is not None else Edge(1)
    down, across = _seen(rows.parts), _seen(cols.parts)
    out = [*heading, f"{p.what}  {p.spec}"]
    dims = len(p.edges) > 2 and not p.is_mesh
    for d in [*lead, *whole]:
        out.append(_plain(_flat(_label(p.edges[d], p.is_mesh, d if dims else None))))
    left = _label(rows, p.is_mesh, row if dims else None) if row is not None else []
    gutter = max([len(_plain(line)) for line in left], default=0)
    scale = len(str(rows.size)) if left and not p.is_mesh else 1 if left else 0
    ticks = _ticks(cols, p.is_mesh)
    drawn = _panels(p, len(down))
    width = max(len(held[i]) for i in held) + 2
    width = (
        max(width, 3, *(len(t) + (0 if p.is_mesh else 1) for t in ticks.values()))
        if len(across) <= 8
        else width
    )
    pad = " " * (gutter + scale + (1 if gutter else 0) + (1 if scale else 0))
    missing = len(p.blocks)
    for name, index in drawn[0]:
        out += [name] if name else []
        if col is not None:
            top = _plain(_flat(_label(cols, p.is_mesh, col if dims else None)))
            out.append(f"{pad}{top}")
            out.append((pad + _scale(ticks, across, width, p.is_mesh)).rstrip())
        body = []
        marks = _ticks(rows, p.is_mesh)
        for n, r in enumerate(down):
            cells = []
            for c in across:
                if r < 0 or c < 0:
                    cells.append("⋯".center(width))
                    continue
                where = dict(zip(lead, index)) | {row: r, col: c}
                cells.append(
                    held[tuple(where.get(d, 0) for d in range(len(p.edges)))].center(
                        width
                    )
                )
                missing -= 1
            joint = "┌┬┐" if n == 0 else "├┼┤"
            body.append(
                (
                    joint[1].join(["─" * width] * len(across)),
                    joint,
                    marks.get(r, "") if not p.is_mesh else "",
                )
            )
            body.append(("│".join(cells), "│││", marks.get(r, "") if p.is_mesh else ""))
        body.append(
            ("┴".join(["─" * width] * len(across)), "└┴┘", marks.get(rows.parts, ""))
        )
        skip = max(0, (len(body) - len(left)) // 2)
        side = [""] * skip + [_plain(line) for line in left]
        for n in range(max(len(body), len(side))):
            text = side[n] if n < len(side) else ""
            line, joint, mark = body[n] if n < len(body) else ("", "", "")
            mark = mark if scale else ""
            start = f"{text:<{gutter}} " if gutter else ""
            start += f"{mark:>{scale}} " if scale else ""
            out.append((start + joint[:1] + line + joint[2:]).rstrip())
    shown = len(drawn[0]) and drawn[1]
    out += [_plain(line) for line in _foot(p, missing if not shown else 0, drawn[1])]
    return "\n".join(out)


def _ticks(edge: Edge, is_mesh: bool) -> dict[int, str]:
    """What stands at each cut: the element it comes before; for a mesh, coordinates."""
    step = 1 if is_mesh else edge.size // edge.parts
    return {i: str(i * step) for i in range(edge.parts + (not is_mesh))}


def _scale(ticks: dict[int, str], across: list[int], width: int, centred: bool) -> str:
    line = ""
    stops = [*across, *([] if centred else [max(ticks)])]
    for n, part in enumerate(stops):
        text = ticks.get(part, "")
        at = n * (width + 1) + (1 + (width - len(text)) // 2 if centred else 0)
        if at >= len(line) + (n > 0) or not line:
            line = line.ljust(at) + text
    return line


def _table_rows(named: list[tuple[str, Placement]]) -> tuple[list[list[str]], int]:
    rows = [[name, p.what, p.spec, times(p.local)] for name, p in named[:CAP_ROWS]]
    return [["leaf", "array", "spec", "each device"], *rows], len(named) - len(rows)


def _table_text(named: list[tuple[str, Placement]], title: str | None) -> str:
    rows, more = _table_rows(named)
    widths = [max(len(r[c]) for r in rows) for c in range(4)]
    out = ["  ".join(f"{t:<{w}}" for t, w in zip(r, widths)).rstrip() for r in rows]
    tail = [f"⋯ {more} more leaves"] if more else []
    return "\n".join([title] * bool(title) + out + tail)


# SVG.

Piece = tuple[str, int, int, str]  # elements, width, height, what it says


class _Pen:
    """Collects elements, and how much room they take."""

    def __init__(self, mesh: Axes) -> None:
        self.out: list[str] = []
        self.right = self.bottom = 0.0
        self.colours = _colours(mesh)

    def fill(self, axis: str) -> str:
        name = self.colours.get(axis, "")
        return f"var(--ms-{name},{COLOURS[name]})" if name else "currentColor"

    def text(
        self, x: float, y: float, line: Line, more: str = "", size: int = 12
    ) -> None:
        spans = ""
        for text, axis in line:
            ink = f"color-mix(in srgb,currentColor 25%,{self.fill(axis)})"
            mark = f'<tspan font-weight="700" fill="{ink}">{escape(text)}</tspan>'
            spans += mark if axis else escape(text)
        small = f' font-size="{size}"' if size != 12 else ""
        self.out.append(f'<text x="{x:g}" y="{y:g}"{small}{more}>{spans}</text>')
        reach = len(_plain(line)) * CHAR * size
        anchor = 0.5 if "middle" in more else 0 if "end" in more else 1
        self.room(x + (reach * anchor if "rotate" not in more else 0), y + 4)

    def rect(self, x: float, y: float, w: float, h: float, more: str) -> None:
        self.out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{more}/>'
        )
        self.room(x + w, y + h)

    def room(self, x: float, y: float) -> None:
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)


BLOCK = ' class="ms-block" rx="3" fill="currentColor" fill-opacity=".07" stroke="currentColor" stroke-opacity=".45"'
CHIP = ' rx="4" fill="none" stroke="currentColor" stroke-opacity=".6"'
MIDDLE = ' text-anchor="middle"'


def _picture(p: Placement, heading: list[str]) -> Piece:
    pen = _Pen(p.mesh)
    row, col, lead, whole = _layout(p)
    held = _held(p)
    rows = p.edges[row] if row is not None else Edge(1)
    cols = p.edges[col] if col is not None else Edge(1)
    down, across = _seen(rows.parts), _seen(cols.parts)
    dims = len(p.edges) > 2 and not p.is_mesh
    y = 2.0
    for text in heading:
        y += 16
        pen.text(0, y, [(text, "")], ' font-weight="700"', 13)
    y += 16
    if len(p.what + p.spec) > 44:
        pen.text(0, y, [(p.what, "")])
        y += 16
        pen.text(0, y, _spec(p))
    else:
        pen.text(0, y, [(p.what + "  ", ""), *_spec(p)])
    for d in [*lead, *whole]:
        y += 16
        pen.text(0, y, _flat(_label(p.edges[d], p.is_mesh, d if dims else None)))
    y += 8

    # How large a cell must be for what it says.
    size = 12 if max(len(across), len(down)) <= 8 else 9
    items = max(map(len, held.values()))
    chip = max(len(t) for h in held.values() for t in h) * CHAR * size + (
        10 if size == 12 else 5
    )
    gap = 4 if size == 12 else 2
    tall = 20 if size == 12 else 14
    wide = max(chip + 6 * (size == 12), 224 // len(across) - gap)
    turn = (
        wide * len(across) > 330
        and len(down) * chip <= 330
        and items == 1
        and chip > 2 * size
    )
    if turn:
        wide = 20
    per_row = max(1, min(items, int((wide - 3) // (chip + 3))))
    high = max(
        math.ceil(items / per_row) * (tall + 3) + 3 * (size == 12),
        chip if turn else 0,
        (32 if row is None else 88 // len(down) - gap),
    )
    left = _label(rows, p.is_mesh, row if dims else None) if row is not None else []
    side_axes = len(rows.axes) or 1
    gutter = max([len(_plain(line)) for line in left], default=0) * CHAR * 12
    scale = len(str(rows.size)) * CHAR * 10 + 4 if left else 0
    x0 = round(gutter + 6 + 8 * side_axes + scale) if left else 4
    panels, more = _panels(p, len(down))
    missing = len(p.blocks)
    for name, index in panels:
        if name:
            y += 14
            pen.text(x0, y, [(name, "")], ' font-weight="700"')
            y += 4
        if col is not None:
            y += 12
            pen.text(x0, y, _flat(_label(cols, p.is_mesh, col if dims else None)))
            y += 6
            spots = [(x0 + n * (wide + gap), part) for n, part in enumerate(across)]
            y = _bars(pen, cols, spots, wide, y, True) + 11
            _marks(pen, cols, spots, wide, gap, y, p.is_mesh)
            y += 4
        top = y
        spots = []
        for n, r in enumerate(down):
            y = top + n * (high + gap)
            spots.append((y, r))
            for m, c in enumerate(across):
                x = x0 + m * (wide + gap)
                if r < 0 or c < 0:
                    pen.text(x + wide / 2, y + high / 2 + 4, [("⋯", "")], MIDDLE)
                    continue
                missing -= 1
                pen.rect(x, y, wide, high, BLOCK)
                where = dict(zip(lead, index)) | {row: r, col: c}
                labels = held[tuple(where.get(d, 0) for d in range(len(p.edges)))]
                _chips(pen, labels, x, y, wide, high, chip, tall, size, per_row, turn)
        bottom = y + high
        if left:
            _bars(pen, rows, spots, high, round(gutter + 6), False)
            _side_marks(pen, rows, spots, high, gap, x0 - 4, p.is_mesh)
            start = top + (bottom - top - 15 * len(left)) / 2 + 12
            for n, line in enumerate(left):
                pen.text(
                    gutter, max(top + 10, start) + 15 * n, line, ' text-anchor="end"'
                )
        right = x0 + len(across) * (wide + gap) - gap
        sheets = [a for v, axes in p.notes if v == "copied" for a, _ in axes]
        for n, axis in enumerate(sheets, 1):
            d = 4 * n
            path = f"M{x0 + d:g} {bottom + d:g}H{right + d:g}V{top + d:g}"
            pen.out.append(
                f'<path d="{path}" fill="none" stroke="{pen.fill(axis)}" stroke-width="2"/>'
            )
            pen.room(right + d + 1, bottom + d + 1)
        y = max(pen.bottom, bottom) + 6
    for line in _foot(p, 0 if more else missing, more):
        y += 15
        pen.text(x0, y, line)
        y += 1
    return (
        "".join(pen.out),
        math.ceil(pen.right) + 2,
        math.ceil(pen.bottom) + 2,
        _aria(p, heading),
    )


def _spec(p: Placement) -> Line:
    """The spec with each mesh axis in its colour."""
    line: Line = []
    names = {a for a, _ in p.mesh}
    for n, piece in enumerate(p.spec.split("'")):
        line.append((piece, piece) if n % 2 and piece in names else (piece, ""))
        if n < p.spec.count("'"):
            line.append(("'", ""))
    return line


def _bars(
    pen: _Pen,
    edge: Edge,
    spots: list[tuple[float, int]],
    long: float,
    at: float,
    flat: bool,
) -> float:
    """Bars along an edge, one row per mesh axis, cut where that axis cuts."""
    segments = 1
    for name, size in edge.axes or (("", edge.parts),):
        segments *= size
        each = edge.parts // segments
        more = (
            f' fill="{pen.fill(name)}"'
            if name
            else ' fill="currentColor" fill-opacity=".35"'
        )
        for s in range(segments):
            inside = [x for x, part in spots if s * each <= part < (s + 1) * each]
            if inside:
                start, length = inside[0], inside[-1] + long - inside[0]
                box = (start, at, length, 5) if flat else (at, start, 5, length)
                pen.rect(*box, more)
        at += 8
    return at


def _marks(
    pen: _Pen,
    edge: Edge,
    spots: list[tuple[float, int]],
    wide: float,
    gap: float,
    y: float,
    is_mesh: bool,
) -> None:
    ticks = _ticks(edge, is_mesh)
    if is_mesh:
        places = [(x + wide / 2, ticks[i]) for x, i in spots if i >= 0]
    else:
        places = [(x - gap / 2, ticks[i]) for x, i in spots if i >= 0]
        places.append((spots[-1][0] + wide + gap / 2, ticks[edge.parts]))
    room = max(len(t) for _, t in places) * CHAR * 10 + 4
    if room > wide + gap:
        places = [places[0], places[-1]]
    for x, text in places:
        pen.text(x, y, [(text, "")], MIDDLE + ' fill-opacity=".75"', 10)


def _side_marks(
    pen: _Pen,
    edge: Edge,
    spots: list[tuple[float, int]],
    high: float,
    gap: float,
    x: float,
    is_mesh: bool,
) -> None:
    ticks = _ticks(edge, is_mesh)
    if is_mesh:
        places = [(y + high / 2, ticks[i]) for y, i in spots if i >= 0]
    else:
        places = [(y - gap / 2, ticks[i]) for y, i in spots if i >= 0]
        places.append((spots[-1][0] + high + gap / 2, ticks[edge.parts]))
    for y, text in places:
        pen.text(x, y + 3, [(text, "")], ' text-anchor="end" fill-opacity=".75"', 10)


def _chips(
    pen: _Pen,
    labels: list[str],
    x: float,
    y: float,
    wide: float,
    high: float,
    chip: float,
    tall: float,
    size: int,
    per_row: int,
    turn: bool,
) -> None:
    rows = math.ceil(len(labels) / per_row)
    for n, text in enumerate(labels):
        i, j = divmod(n, per_row)
        in_row = min(per_row, len(labels) - i * per_row)
        cx = x + wide / 2 + (j - (in_row - 1) / 2) * (chip + 3)
        cy = y + high / 2 + (i - (rows - 1) / 2) * (tall + 3)
        if size == 12:
            pen.rect(cx - chip / 2, cy - tall / 2, chip, tall, CHIP)
        more = f' transform="rotate(-90 {cx:g} {cy:g})"' if turn else ""
        pen.text(cx, cy + size * 0.35, [(text, "")], MIDDLE + more, size)


def _aria(p: Placement, heading: list[str]) -> str:
    """What is drawn, its axes and the conclusion, for those who cannot see it."""
    words = ", ".join(heading) + ": " if heading else ""
    if p.is_mesh:
        axes = ", ".join(f"{e.axes[0][0]} of size {e.size} ({e.mark})" for e in p.edges)
        ids = [h[0] for h in p.blocks.values()]
        return f"{words}{p.what}, {p.spec}. Axes: {axes}. In order: {' '.join(ids) if len(ids) <= CAP else _range(tuple(ids))}."
    split = []
    for d, e in enumerate(p.edges):
        over = f" over {' then '.join(a for a, _ in e.axes)}" if e.axes else ""
        n = e.size // e.parts
        parts = f"{e.parts} parts of {n}{over}" if e.parts > 1 else "whole"
        split.append(f"dimension {d} of {e.size}: {parts}")
    notes = [_plain(line) for line in _foot(p, 0, 0)]
    return f"{words}{p.what}, {p.spec}. {'; '.join([*split, *notes])}."


def _open(width: float, height: float, says: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label={quoteattr(says)} '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        'style="max-width:100%;height:auto" font-size="12" fill="currentColor" '
        'font-family="ui-monospace,Menlo,Consolas,monospace" xml:space="preserve">'
    )


def _svg(body: str, width: int, height: int, says: str) -> str:
    return f"{_open(width, height, says)}{body}</svg>"


def _stack(pieces: list[Piece]) -> str:
    y, out = 0, ""
    for body, _, height, _ in pieces:
        out += f'<g transform="translate(0 {y})">{body}</g>'
        y += height + 12
    width = max(w for _, w, _, _ in pieces)
    return f"{_open(width, y - 12, ' '.join(p[3] for p in pieces))}{out}</svg>"


def _table(named: list[tuple[str, Placement]], title: str | None) -> Piece:
    rows, more = _table_rows(named)
    pen = _Pen(tuple(dict(axis for _, p in named for axis in p.mesh).items()))
    y = 2.0
    if title:
        y += 16
        pen.text(0, y, [(title, "")], ' font-weight="700"', 13)
    widths = [max(len(r[c]) for r in rows) * CHAR * 12 + 16 for c in range(4)]
    for n, cells in enumerate(rows):
        y += 17
        x = 0.0
        for c, text in enumerate(cells):
            bold = ' font-weight="700"' if n == 0 else ""
            line = _spec(named[n - 1][1]) if c == 2 and n else [(text, "")]
            pen.text(round(x), y, line, bold)
            x += widths[c]
    if more:
        pen.text(0, y + 17, [(f"⋯ {more} more leaves", "")])
    says = f"{title or 'Table'}: {len(named)} leaves. " + "; ".join(
        " ".join(r) for r in rows[1:]
    )
    return "".join(pen.out), math.ceil(pen.right) + 2, math.ceil(pen.bottom) + 2, says
