"""Figure: a block with 16 rows, and where a pin changes what is gathered along `data`.

Chapter 3's small block, 64 × 512 and 512 × 64, sharded over both axes of a 2×4 mesh. What is
gathered is what the CPU's compiler chose; a strip of the chapter checks it.
"""

from kit import DATA, INK, arrow, figure, frame, kept, rect, say, shape, strong, text, write

B, D, F, DATA_SIZE, MODEL_SIZE = 16, 64, 512, 2, 4
WAYS = [  # heading, what is pinned, the second gather, is y in rows?
    (say("No pin"), None, "h", False),
    (say("Pin on {array}", array="y"), "y", "w_FD", True),
]
HIGH, WIDE = 32, {"x": 44, "h": 76, "y": 44}
AT = {"x": 2, "h": 132, "y": 304}


def value(name, top, rows, columns):
    """A matrix, and the piece of it on device 0: 1/rows of the rows, 1/columns of the columns."""
    x, wide = AT[name], WIDE[name]
    sizes = {"x": (B, D), "h": (B, F), "y": (B, D)}[name]
    piece = f"{sizes[0] // rows} × {sizes[1] // columns}"
    return [
        text(x + wide / 2, top - 6, name, 12.5, "middle", True),
        rect(x, top, wide / columns, HIGH / rows, INK, 0.55),
        frame(x, top, wide, HIGH, opacity=0.55),
        text(x + wide / 2, top + HIGH + 14, piece, 11.5, "middle"),
    ]


def product(left, right, top, weight, name):
    """An arrow with the weight of a matmul on it, and what is gathered for it below."""
    middle = (left + right) / 2
    gathered = say("gather {array}", array=kept(name))
    blue = f'<g fill="{DATA}">'
    return [
        arrow(left + 6, top + HIGH / 2, right - 6, top + HIGH / 2),
        text(middle, top + 9, strong(f"@ {weight}"), 12, "middle"),
        blue + text(middle, top + 31, gathered, 11.5, "middle", True) + "</g>",
    ]


def pin(name, top):
    x = AT[name] + WIDE[name] / 2 - 19
    blue = f'<g fill="{DATA}">'
    return [
        shape([(x, top - 17), (x + 11, top - 17), (x + 5.5, top - 5)], DATA),
        blue + text(x - 3, top - 7, say("pin"), 11.5, "end", True) + "</g>",
    ]


def draw():
    parts = []
    for n, (heading, pinned, second, rows) in enumerate(WAYS):
        top = 44 + 100 * n
        parts.append(text(2, top - 26, heading, 12.5, bold=True))
        parts += value("x", top, DATA_SIZE, 1) + value("h", top, DATA_SIZE, MODEL_SIZE)
        parts += value("y", top, DATA_SIZE, 1) if rows else value("y", top, 1, DATA_SIZE)
        parts += product(AT["x"] + WIDE["x"], AT["h"], top, "w_DF", "w_DF")
        parts += product(AT["h"] + WIDE["h"], AT["y"], top, "w_FD", second)
        if pinned:
            parts += pin(pinned, top)
    says = (
        f"The block in two versions with {B} rows. No pin: w_DF and h are gathered, "
        "and y ends with all rows of half its features. "
        "Pin on y: w_DF and w_FD are gathered, and y keeps its rows."
    )
    return {"pins": figure(360, 44 + 100 * (len(WAYS) - 1) + HIGH + 22, says, parts)}


if __name__ == "__main__":
    write(draw())
