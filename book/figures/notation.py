"""Figures of the page about notation: a drawing explained, colours of axes, five collectives.

The drawing is what `ms.show` makes, with numbers beside its parts. It needs JAX with eight CPU
devices, as every program of the book; nothing is computed.
"""

import os
import re

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")

import jax  # noqa: E402
from kit import DATA, INK, arrow, figure, frame, kept, line, rect, text, write  # noqa: E402

import meshscope as ms  # noqa: E402

AXES = ["data", "model", "fsdp", "stage", "seq", "expert"]


def mark(x, y, number):
    """A number in a ring."""
    ring = f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="none" stroke="{INK}" stroke-width="1.2"/>'
    return [ring, text(x, y + 4, str(number), 12, "middle", True)]


def explained():
    """A drawing by `ms.show`, with a number at each part that the page explains."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    drawing = ms.show(jax.ShapeDtypeStruct((8, 16), "float32", sharding=sharding))
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing.svg).groups())
    inner = re.sub(r' (role|aria-label|style|xmlns)="[^"]*"', "", drawing.svg, count=4)
    left, right = 10, 340  # of the drawing; of the column of numbers
    parts = [inner.replace("<svg ", f'<svg x="{left}" y="0" ', 1)]
    ends = [  # where a leader ends in the drawing, and the height of its number
        ((left + 226, 12), 12),  # 1 type and spec
        ((left + 166, 32), 36),  # 2 what an axis does to a dimension
        ((left + 256, 45), 60),  # 3 bars
        ((left + 230, 92), 88),  # 4 a block
        ((left + 241, 108), 116),  # 5 device ids
        ((left + 260, 134), 144),  # 6 the axis of the copies
        ((left + 156, 185), 185),  # 8 a device's piece
    ]
    for number, ((x, y), height_of_mark) in zip([1, 2, 3, 4, 5, 6, 8], ends, strict=True):
        parts.append(line([(x, y), (right - 11, height_of_mark)], INK, 0.8))
        parts += mark(right, height_of_mark, number)
    bar = left + 15.5
    parts.append(line([(bar, 152), (bar, 196)], INK, 0.8))  # 7 the bar of a whole dimension
    parts += mark(bar, 206, 7)
    says = (
        f"The drawing of {drawing.text.splitlines()[0]} on a mesh of 2 by 4 devices, with numbers "
        "at eight of its parts; the list below the figure explains them."
    )
    return figure(360, height + 22, says, parts)


def axis_colours():
    """One swatch for each mesh axis that the book names."""
    parts, step = [], 120
    for number, axis in enumerate(AXES):
        x, y = step * (number % 3), 4 + 34 * (number // 3)
        parts.append(rect(x, y, 40, 20, f"var(--ms-{axis},{ms.PALETTE[axis]})", radius=3))
        parts.append(text(x + 48, y + 15, kept(axis), 13, bold=True))
    return figure(360, 62, f"Colours of the mesh axes: {', '.join(AXES)}.", parts)


CELL, ARROW = 11, 26
N = 4
ALL = {(device, piece) for device in range(N) for piece in range(N)}
OWN = {(device, device) for device in range(N)}
NEXT = {((device + 1) % N, device) for device in range(N)}
SMALL = {  # name: what is held before and after; "terms" are parts of a sum
    "all_gather": (("pieces", OWN), ("pieces", ALL), "each device has its own piece", "all pieces"),
    "reduce_scatter": (("terms", ALL), ("pieces", OWN), "a term of each sum", "one whole sum"),
    "all_reduce": (("terms", ALL), ("pieces", ALL), "a term of each sum", "all whole sums"),
    "all_to_all": (("rows", ALL), ("columns", ALL), "its own row of blocks", "its own column"),
    "collective_permute": (("pieces", OWN), ("pieces", NEXT), "its own piece", "its neighbour's"),
}


def grid(x, kind, held):
    """Four devices as rows; what each holds of four pieces."""
    drawn = []
    if kind in ("rows", "columns"):  # device 1's blocks of a matrix in 4 x 4 blocks
        for step in range(N):
            column, row = (step, 1) if kind == "rows" else (1, step)
            drawn.append(rect(x + CELL * column, CELL * row, CELL, CELL, DATA))
        for device in range(1, N):
            at = CELL * device
            whole = (0, at, N * CELL, at) if kind == "rows" else (at, 0, at, N * CELL)
            drawn.append(line([(x + whole[0], whole[1]), (x + whole[2], whole[3])], INK, 0.8))
        return [*drawn, frame(x, 0, N * CELL, N * CELL, opacity=0.8)]
    for device, piece in sorted(held):
        shade = 1 if kind == "pieces" else 0.3
        drawn.append(rect(x + CELL * piece, CELL * device, CELL - 1, CELL - 1, DATA, shade))
    for device in range(N):
        drawn.append(frame(x - 0.5, CELL * device - 0.5, N * CELL, CELL, opacity=0.45, thick=0.8))
    return drawn


def small(name):
    """Before and after, without words: the table around it has them."""
    before, after, first, last = SMALL[name]
    width, height = 2 * N * CELL + ARROW + 2, N * CELL + 2
    parts = ['<g transform="translate(1 1)">', *grid(0, *before)]
    middle = N * CELL / 2
    parts.append(arrow(N * CELL + 6, middle, N * CELL + ARROW - 6, middle))
    parts += [*grid(N * CELL + ARROW, *after), "</g>"]
    says = f"{name.replace('_', '-')} on four devices: before, {first}; after, {last}."
    drawn = figure(width, height, says, parts)
    return drawn.replace(" viewBox", f' width="{width}" height="{height}" viewBox', 1)


def draw():
    drawn = {"drawing_explained": explained(), "axis_colours": axis_colours()}
    return drawn | {f"small_{name}": small(name) for name in SMALL}


if __name__ == "__main__":
    write(draw())
