"""Figure: what one of eight devices holds of a batch and of two weights, by strategy.

The sizes are those of chapter 4's tiny model; a strip of the chapter compares the shapes below
with the arrays of the page.
"""

from typing import NamedTuple

from kit import DATA, INK, MODEL, figure, frame, kept, line, rect, say, shape, strong, text, write

D, F, ROWS, PIXELS = 96, 384, 64, 64


class Strategy(NamedTuple):
    title: str
    data: int
    model: int
    weights: str | None  # the axis that shards D as well


STRATEGIES = [
    Strategy(say("Data parallel"), 8, 1, None),
    Strategy(kept("FSDP"), 8, 1, "data"),
    Strategy(say("Tensor parallel"), 1, 8, None),
    Strategy(say("FSDP × tensor"), 2, 4, "data"),
]
COLOUR = {"data": DATA, "model": MODEL}
COLUMNS = [
    (0, say("batch")),
    (90, kept("w_DF")),
    (230, kept("w_FD")),
]


def arrays(strategy):
    """(whole size in numbers, drawn size, axes) of each column."""
    rows, columns = (ROWS, PIXELS), (44, 44)
    up, down = (strategy.weights, "model"), ("model", strategy.weights)
    return [
        (rows, columns, ("data", None)),
        ((D, F), (80, 30), up),
        ((F, D), (30, 54), down),
    ]


def piece_of(size, axes, strategy):
    """The shape of one piece, and the axis of more than one device that cuts each dimension."""
    ways = [getattr(strategy, axis) if axis else 1 for axis in axes]
    cut = [axis if way > 1 else None for axis, way in zip(axes, ways, strict=True)]
    return [length // way for length, way in zip(size, ways, strict=True)], ways, cut


def array(x, y, size, drawn, axes, strategy):
    """One array with its cuts; the piece of device 0 is filled."""
    piece, ways, cut = piece_of(size, axes, strategy)
    wide, high = drawn
    w, h = wide / ways[1], high / ways[0]
    colours = [COLOUR[axis] for axis in cut if axis]
    parts = []
    if not colours:
        parts.append(rect(x, y, wide, high, INK, 0.35))
    elif len(colours) == 1:
        parts += [rect(x, y, wide, high, colours[0], 0.12), rect(x, y, w, h, colours[0])]
    else:
        parts += [
            rect(x, y, wide, high, INK, 0.06),
            shape([(x, y), (x + w, y), (x, y + h)], colours[0]),
            shape([(x + w, y), (x + w, y + h), (x, y + h)], colours[1]),
        ]
    for n in range(1, ways[0]):
        parts.append(line([(x, y + h * n), (x + wide, y + h * n)], COLOUR[cut[0]], 0.8))
    for n in range(1, ways[1]):
        parts.append(line([(x + w * n, y), (x + w * n, y + high)], COLOUR[cut[1]], 0.8))
    parts.append(frame(x, y, wide, high, opacity=0.6))
    parts.append(text(x, y + high + 13, f"{piece[0]} × {piece[1]}", 11))
    return parts, f"{piece[0]} by {piece[1]}"


def mesh(strategy):
    sizes = [("data", strategy.data), ("model", strategy.model)]
    return kept(
        ", ".join(
            f'<tspan fill="{COLOUR[name]}">{name} = {size}</tspan>'
            for name, size in sizes
            if size > 1
        )
    )


def draw():
    parts, said, y = [], [], 12
    for strategy in STRATEGIES:
        name = strong(strategy.title, 13)
        words = say("{strategy}  {mesh}", strategy=name, mesh=mesh(strategy))
        parts.append(text(0, y, words, 12))
        pieces = []
        for (x, heading), (size, drawn, axes) in zip(COLUMNS, arrays(strategy), strict=True):
            if strategy is STRATEGIES[0]:
                parts.append(text(x, y + 20, heading, 11, opacity=0.85))
            top = y + (28 if strategy is STRATEGIES[0] else 10)
            made, spoken = array(x, top, size, drawn, axes, strategy)
            parts += made
            pieces.append(f"{heading} {spoken}")
        said.append(f"{strategy.title}: {', '.join(pieces)}")
        y += 110 if strategy is STRATEGIES[0] else 92
    says = (
        "What device 0 of eight holds, by strategy: a batch of 64 by 64, w_DF of 96 by 384 and "
        "w_FD of 384 by 96. " + ". ".join(said) + "."
    )
    return {"train_shards": figure(360, y - 8, says, parts)}


if __name__ == "__main__":
    write(draw())
