"""Draw where an array is: which device holds which block of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._in_characters import as_text
from ._messages import Said, in_memory, joined, plain
from ._placement import Placement, leaves, times
from ._scene import Scene
from ._svg import BOLD, EM, Pen, picture, svg

MOST_LEAVES = 12  # drawn one by one; more make a table
MOST_ROWS = 60  # of that table


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
        scenes = [Scene(p, list(filter(None, h))) for (_, p), h in zip(named, heads)]
        drawn = [(picture(s, colours), as_text(s)) for s in scenes]
    pens = [pen for pen, _ in drawn]
    pieces = tuple(svg([pen]) for pen in pens)
    return Drawing(svg(pens), "\n\n".join(text for _, text in drawn), pieces)


def _table(
    named: list[tuple[str, Placement]], title: str | None, palette: Mapping[str, str]
) -> tuple[Pen, str]:
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
    pen = Pen(mesh, says, palette)
    y = 0.0
    if title:
        pen.text(0, y := y + 16, title, BOLD, size=13)
    starts = [round(sum(widths[:c]) * EM * 12) for c in range(4)]
    y += 17
    for head, x in zip(heads, starts):
        pen.text(x, y, head, BOLD)
    for row, each, (_, p) in zip(rows, last, shown):
        y += 17
        for x, cell in zip(starts, [*row[:2], Scene(p, []).spec(), each]):
            pen.text(x, y, cell)
    for said in more:
        pen.text(0, y + 17, said)
    return pen, "\n".join([*filter(None, [title]), *lines, *map(plain, more)])
