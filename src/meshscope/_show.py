"""Draw where an array is: which device holds which block of it."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr
from zlib import crc32

from ._messages import Line, Said, Text, attributes, in_memory, joined, plain, runs
from ._placement import COPIED, COPIES, REDUCED, Axes, Edge, Placement, leaves, times

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
MOST_PARTS = 16  # of one dimension; the middle of more is left out
MOST_LEAVES = 12  # drawn one by one; more make a table
MOST_ROWS = 60  # of that table
EM = 0.61  # width of a character of the font, in font sizes


@dataclass(frozen=True)
class Drawing:
    """A picture of a placement, which a notebook shows and ``print`` writes as text.

    >>> import jax, meshscope
    >>> drawing = meshscope.show(jax.make_mesh((2, 4), ("data", "model")), "eight devices")
    >>> drawing.svg[:4], drawing.text.split("\\n")[0]
    ('<svg', 'eight devices')

    Attributes:
      svg: one ``<svg>`` element that can be alone in a page. Its ink is the page's
        (``currentColor``), and so are its colours where the page sets ``--ms-data`` and
        so on. Elements that show a sentence carry it as ``data-message`` and
        ``data-values``.
      text: the same in characters, for a terminal.
      pieces: one ``<svg>`` for each leaf of a tree, which a notebook shows side by side.
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an SVG file, whose ink turns light where the reader prefers a dark page.

        >>> import jax, meshscope, pathlib, tempfile
        >>> drawing = meshscope.show(jax.make_mesh((8,), ("data",)))
        >>> file = pathlib.Path(tempfile.mkdtemp(), "mesh.svg")
        >>> drawing.save(file)
        >>> "prefers-color-scheme:dark" in file.read_text("utf-8")
        True

        Args:
          path: of the file; it should end in ``.svg``. A file that is there is replaced.
        """
        ink = "svg{color:#1a1a1a}@media(prefers-color-scheme:dark){svg{color:#eee}}"
        head, end, rest = self.svg.partition(">")
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(f"{head}{end}<style>{ink}</style>{rest}\n")


def show(x: Any, title: str | None = None, *, palette: Mapping[str, str] | None = None) -> Drawing:
    """Draw how ``x`` is sharded over its mesh.

    Each block of the array is labelled with the ids of the devices that hold it.
    Each dimension is labelled with its size, the mesh axes that split it and the
    size of a part, all in elements: ``16 ÷ model(4) = 4``. Mesh axes that split
    nothing hold copies, or partial sums, and are named below the blocks; an axis
    over which a sum is finished (``{R:…}``) is called reduced. An array in the
    host's memory says so in the last line.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> meshscope.show(((8, 16), jax.NamedSharding(mesh, jax.P("data"))))
    [8,16]  P('data')
                16
                0         16
              0 ┌─────────┐
    8           │ 0 1 2 3 │
    ÷ data(2) 4 ├─────────┤
    = 4         │ 4 5 6 7 │
              8 └─────────┘
    copied over model(4)
    each device: 4×16

    Args:
      x: a ``jax.Array`` of any rank; a ``jax.ShapeDtypeStruct`` with a sharding; a
        tuple ``(shape, sharding)``; an ``nnx.Variable`` of one of these; an array
        traced by ``jax.jit`` over Explicit axes (its blocks are labelled with mesh
        coordinates, ``:`` for all: a traced array is on no device yet); a ``Mesh``
        or ``AbstractMesh``; or a pytree of these, drawn leaf by leaf, or as a table
        where there are more than 12.
      title: a line above the drawing.
      palette: colours of mesh axes by name, such as ``{"tp": "#d55e00"}``, beside
        those of ``meshscope.PALETTE`` or in their place. An axis that is in neither
        has one of three further colours.

    Raises:
      ValueError: a dimension that its mesh axes do not divide, with names and sizes;
        an array traced over Auto axes or without a mesh; a deleted (donated) array;
        a shape without a sharding; an empty mesh or tree; a colour that is none.
      TypeError: anything else (a NumPy array, a function, a program, a spec), with
        what to pass instead.
    """
    colours = dict(palette or {})
    for axis, colour in colours.items():
        if not re.fullmatch(r"[\w#(),.%/ -]+", colour):
            raise ValueError(f"{colour!r} is no colour for {axis}: pass one such as '#d55e00'")
    named = leaves(x)
    if len(named) > MOST_LEAVES:
        drawn = [_table(named, title, colours)]
    else:
        heads = [[title or named[0][0]]] if len(named) == 1 else [[n] for n, _ in named]
        if len(named) > 1:
            heads[0].insert(0, title or "")
        scenes = [_Scene(p, list(filter(None, h))) for (_, p), h in zip(named, heads)]
        drawn = [(_picture(s, colours), _words(s)) for s in scenes]
    pens = [pen for pen, _ in drawn]
    pieces = tuple(_svg([pen]) for pen in pens)
    return Drawing(_svg(pens), "\n\n".join(text for _, text in drawn), pieces)


# What both renderings say.

Cells = list[list[list[str] | None]]  # rows of labels; None where one is left out


def _sum(axes: Axes, between: str) -> Line:
    """``data(2) × model(4)``, or ``8`` for an axis without a name."""
    line: Line = []
    for name, size in axes:
        line += [(between, "")] if line else []
        line += [(name, name), (f"({size})" if name else str(size), "")]
    return line


def _flat(lines: Sequence[Line]) -> Line:
    return [run for line in lines for run in [(" ", ""), *line]][1:]


def _seen(parts: int) -> list[int]:
    """The parts that are drawn; -1 means those left out."""
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
        self.side = self.beside(row) if row >= 0 else []
        self.top = self.over(col) if col >= 0 else []
        self.seen = [_seen(edge.parts) for edge in self.edges]
        rest = [d for d in range(rank) if d not in (row, col)]
        lead = [d for d in rest if d in split]
        self.above = [self.over(d) for d in rest]
        self.few = sum(map(len, p.blocks.values())) <= MOST_PARTS
        every = list(itertools.product(*(range(p.edges[d].parts) for d in lead)))
        self.panels: list[tuple[Line | Said, Cells]] = []
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
            self.panels.append((self.panel(dict(zip(lead, index))), cells))
        self.foot: list[Said] = []
        for message, axes in p.notes:
            key = "count" if message == COPIES else "axes"
            self.foot.append(Said(message, **{key: _sum(axes, " × ")}))
        if drawn < len(p.blocks):
            counts = {"count": len(p.blocks) - drawn, "all": len(p.blocks)}
            self.foot.append(Said("⋯ {count} of {all} not drawn", **counts))
        if p.keys:
            message = "each device ({axes}): {shape}"
            self.foot.append(Said(message, axes=p.keys, shape=times(p.local)))
        elif not p.is_mesh:
            self.foot.append(Said("each device: {shape}", shape=times(p.local)))
        if p.memory:
            self.foot.append(Said("in host memory ({memory})", memory=p.memory))

    def steps(self, dim: int) -> list[Line]:
        """A dimension, one line per step: 16, ÷ model(4), = 4."""
        edge, p = self.p.edges[dim], self.p
        if p.is_mesh:
            return [_sum(edge.axes, ""), [(edge.mark, "")]]
        axes = edge.axes or ((("", edge.parts),) if edge.parts > 1 else ())
        lines: list[Line] = [[(str(edge.size), "")]]
        lines += [[("÷ ", ""), *_sum((axis,), "")] for axis in axes]
        return lines + ([[(f"= {p.local[dim]}", "")]] if axes else [])

    def beside(self, dim: int) -> list[Line | Said]:
        """The lines of a dimension one under the other, numbered where there are many."""
        first, *more = self.steps(dim)
        return [self.numbered(dim, first), *more]

    def over(self, dim: int) -> Line | Said:
        """A dimension in one line."""
        return self.numbered(dim, _flat(self.steps(dim)))

    def numbered(self, dim: int, size: Line) -> Line | Said:
        if self.p.is_mesh or len(self.p.edges) < 3:
            return size
        return Said("dim {dim}: {size}", dim=dim, size=size)

    def panel(self, at: Mapping[int, int]) -> Line | Said:
        """Which parts of leading dimensions a panel is: dim 0 [0:2] stage 0."""
        said: list[Said] = []
        lines: list[Line] = []
        for dim, part in at.items():
            edge, step, where = self.p.edges[dim], self.p.local[dim], list[Line]()
            for n, (name, size) in enumerate(edge.axes):
                position = part // math.prod(s for _, s in edge.axes[n + 1 :]) % size
                where.append([(name, name), (f" {position}", "")])
            rows = f"{part * step}:{(part + 1) * step}"
            if where:
                lines += where
                message = "dim {dim} [{part}] {where}"
                said.append(Said(message, dim=dim, part=rows, where=_flat(where)))
            else:
                said.append(Said("dim {dim} [{part}]", dim=dim, part=rows))
        if self.p.is_mesh or not said:
            return _flat(lines)
        return joined("{part}, {parts}", said)

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

    def says(self) -> Said:
        """What is drawn, along which axes, and what follows, in one sentence."""
        p, parts = self.p, list[Said]()
        for dim, edge in enumerate(p.edges):
            if p.is_mesh:
                (name, size), kind = edge.axes[0], edge.mark
                message = "axis {name} of size {size}, {type}"
                parts.append(Said(message, name=name, size=size, type=kind))
                continue
            message, whole = "dimension {dim} of size {size} whole", {"dim": dim, "size": edge.size}
            if edge.parts == 1:
                parts.append(Said(message, **whole))
                continue
            split: dict[str, Any] = {**whole, "parts": edge.parts, "each": p.local[dim]}
            message = "dimension {dim} of size {size} split into {parts} of {each}"
            if edge.axes:
                message = message.replace("split into", "split over {axes} into")
                split["axes"] = joined("{axis} then {axes}", [name for name, _ in edge.axes])
            parts.append(Said(message, **split))
        ids = [held[0] for held in p.blocks.values()]
        if not p.is_mesh:
            parts += self.foot
        elif len(ids) <= MOST_PARTS:
            parts.append(Said("in order {ids}", ids=" ".join(ids)))
        else:
            parts.append(Said("in order {first} to {last}", first=ids[0], last=ids[-1]))
        values: dict[str, Any] = {"array": f"{p.what} {p.spec}"}
        values["parts"] = joined("{part}; {parts}", parts)
        if not self.heading:
            return Said("{array}: {parts}", **values)
        return Said("{title}, {array}: {parts}", title=", ".join(self.heading), **values)


# Plain text.


def _words(s: _Scene) -> str:
    mesh, (rows, columns) = s.p.is_mesh, map(len, s.seen)
    out = [*s.heading, f"{s.p.what}  {s.p.spec}", *map(plain, s.above)]
    side, top = s.ticks(0), s.ticks(1)
    left = [plain(line) for line in s.side]
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
        out += [plain(name)] if name else []
        if s.has[1]:
            out.append(" " * (gutter + scale) + plain(s.top))
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
    out += map(plain, s.foot)
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
            bold = f'<tspan {_BOLD} fill="{mix}">{escape(text)}</tspan>'
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


def _svg(pens: list[_Pen]) -> str:
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


def _picture(s: _Scene, palette: Mapping[str, str]) -> _Pen:
    pen, p = _Pen(s.p.mesh, s.says(), palette), s.p
    y = 0.0
    for text in s.heading:
        pen.text(0, y := y + 16, text, _BOLD, size=13)
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
            pen.text(x0, y := y + 14, name, f'class="ms-panel" {_BOLD}')
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
            pen.text(at + reach + 1, down, tick, _MARK, "end", 10)
        elif n == last or (n % every == 0 and last - n >= every):
            anchor = ("middle", "end", "start")[end]
            inward = half - end * gap / 2
            pen.text(x + inward, at + 8, tick, _MARK, anchor, 10)
    return at


# Many leaves.


def _table(
    named: list[tuple[str, Placement]], title: str | None, palette: Mapping[str, str]
) -> tuple[_Pen, str]:
    """Path, shape, spec and local shape of each leaf, in four columns."""
    shown = named[:MOST_ROWS]
    heads = [Said(head) for head in ("leaf", "array", "spec", "each device")]
    rows = [[name, p.what, p.spec, times(p.local)] for name, p in shown]
    left_out = len(named) - len(shown)
    more = [Said("⋯ {count} more leaves", count=left_out)] if left_out else []
    # A leaf that is not in its devices' own memory says so in its last column.
    parts = [in_memory(" ".join(row), p.memory) for row, (_, p) in zip(rows, shown)]
    last = [in_memory(row[3], p.memory) for row, (_, p) in zip(rows, shown)]
    texts = [list(map(plain, heads)), *([*row[:3], plain(t)] for row, t in zip(rows, last))]
    widths = [max(len(row[c]) for row in texts) + 2 for c in range(4)]
    lines = ["".join(f"{t:<{w}}" for t, w in zip(row, widths)).rstrip() for row in texts]
    mesh = tuple(dict(axis for _, p in named for axis in p.mesh).items())
    message, every = "{title}, {count} leaves: {rows}", joined("{part}; {parts}", [*parts, *more])
    says = Said(message, title=title or Said("Table"), count=len(named), rows=every)
    pen = _Pen(mesh, says, palette)
    y = 0.0
    if title:
        pen.text(0, y := y + 16, title, _BOLD, size=13)
    starts = [round(sum(widths[:c]) * EM * 12) for c in range(4)]
    y += 17
    for head, x in zip(heads, starts):
        pen.text(x, y, head, _BOLD)
    for row, each, (_, p) in zip(rows, last, shown):
        y += 17
        for x, cell in zip(starts, [*row[:2], _Scene(p, []).spec(), each]):
            pen.text(x, y, cell)
    for said in more:
        pen.text(0, y + 17, said)
    return pen, "\n".join([*filter(None, [title]), *lines, *map(plain, more)])
