"""What a drawing shows: a placement cut into panels, rows and columns, with their labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ._messages import Line, Said, joined
from ._placement import COPIES, Axes, Edge, Placement, times

MOST_PARTS = 16  # of one dimension; the middle of more is left out

Cells = list[list[list[str] | None]]  # rows of labels; None where one is left out


def sum_of(axes: Axes, between: str) -> Line:
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


class Scene:
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
            self.foot.append(Said(message, **{key: sum_of(axes, " × ")}))
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
            return [sum_of(edge.axes, ""), [(edge.mark, "")]]
        axes = edge.axes or ((("", edge.parts),) if edge.parts > 1 else ())
        lines: list[Line] = [[(str(edge.size), "")]]
        lines += [[("÷ ", ""), *sum_of((axis,), "")] for axis in axes]
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
