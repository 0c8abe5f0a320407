"""Figure: the large weights of a transformer, sharded along D and along the other dimension.

FSDP × tensor on the 2 × 4 mesh: every D is divided along `data`, hidden units, heads and words
along `model`. Boxes are not to scale; what device 0 holds is filled.
"""

from kit import DATA, INK, MODEL, figure, frame, kept, line, rect, say, text, write

PARTS = {"D": (2, DATA), "F": (4, MODEL), "H": (4, MODEL), "V": (4, MODEL)}  # by dimension
SHORT = 40  # px of D
WEIGHTS = {  # name: rows, columns, px of the other dimension, left, top
    "up": ("D", "F", 104, 24, 34),
    "query, key, value": ("D", "H", 64, 24, 124),
    "down": ("F", "D", 104, 166, 34),
    "out": ("H", "D", 64, 252, 34),
    "embed": ("V", "D", 128, 318, 34),
}


def letter(dimension):
    """The dimension in the colour of its axis; a head has C features, which stay whole."""
    colour = PARTS[dimension][1]
    return kept(f'<tspan fill="{colour}" font-weight="600">{dimension}</tspan>')


def weight(name, rows, columns, long, x, y):
    wide, high = (SHORT, long) if columns == "D" else (long, SHORT)
    down, across = PARTS[rows][0], PARTS[columns][0]
    drawn = [rect(x, y, wide / across, high / down, INK, 0.35)]
    for part in range(1, across):
        at = x + wide * part / across
        drawn.append(line([(at, y), (at, y + high)], PARTS[columns][1], 2))
    for part in range(1, down):
        at = y + high * part / down
        drawn.append(line([(x, at), (x + wide, at)], PARTS[rows][1], 2))
    return [
        *drawn,
        frame(x, y, wide, high, opacity=0.8),
        text(x + wide / 2, y - 6, letter(columns), 12, "middle"),
        text(x - 5, y + high / 2 + 4, letter(rows), 12, "end"),
        text(x + wide / 2, y + high + 16, kept(name), 12, "middle"),
    ]


def draw():
    parts = [text(0, 12, say("FSDP and tensor parallelism on 2 × 4 devices"), 13, bold=True)]
    for name, row in WEIGHTS.items():
        parts += weight(name, *row)
    for y, colour, words in [
        (204, DATA, say("D along {axis}: FSDP", axis=kept("data"))),
        (222, MODEL, say("F, H, V along {axis}: tensor parallelism", axis=kept("model"))),
    ]:
        parts += [line([(0, y - 4), (18, y - 4)], colour, 3), text(24, y, words, 12)]
    says = (
        "Five weights as boxes on the 2 × 4 mesh: up, with D rows and F columns; query, key and "
        "value, with D rows and heads as columns; down, out and embed, with F, H or V rows and D "
        "columns. Each D is divided in two along data, each other dimension in four along model."
    )
    return {"layer_rule": figure(360, 228, says, parts)}


if __name__ == "__main__":
    write(draw())
