"""Figure: columns, then rows, and the other order, as one of four devices along `model` sees it.

Sizes are chapter 2's: 8 rows of the batch on a device, D = 64, F = 256, float32. Boxes are not
to scale; the bytes are computed.
"""

from kit import INK, MODEL, arrow, figure, frame, kept, rect, say, strong, text, write

ROWS, D, F, PARTS = 8, 64, 256, 4
SUM_OF_Y, SUM_OF_H = 4 * ROWS * D, 4 * ROWS * F  # bytes of what is all-reduced
B_PX, D_PX, F_PX = 22, 24, 64  # drawn sizes


def block(x, middle, width, height, name, columns=None, rows=None, partial=False):
    """A matrix: grey if whole on the device, orange where it is the device's piece."""
    y = middle - height / 2
    drawn = []
    if partial:
        drawn += [rect(x, y, width, height, MODEL, 0.22)]
        drawn += [frame(x, y, width, height, MODEL, 1.4, dashed=True)]
    elif columns:
        drawn += [rect(x, y, width / columns, height, MODEL, 0.85)]
        drawn += [frame(x, y, width, height, opacity=0.55)]
    elif rows:
        drawn += [rect(x, y, width, height / rows, MODEL, 0.85)]
        drawn += [frame(x, y, width, height, opacity=0.55)]
    else:
        drawn += [rect(x, y, width, height, INK, 0.4), frame(x, y, width, height, opacity=0.55)]
    return drawn + [text(x + width / 2, y - 5, name, 12, "middle")]


def chain(top, heading, columns_first):
    """x · w1 = h, tanh, h · w2 = y, from left to right."""
    middle = top + 62
    first = {"columns": PARTS} if columns_first else {"rows": PARTS}
    second = {"rows": PARTS} if columns_first else {"columns": PARTS}
    drawn = [text(0, top, heading, 13, bold=True)]
    x = 1
    drawn += block(x, middle, D_PX, B_PX, "x")
    if not columns_first:  # the columns of x that meet the rows of w_DF
        drawn.append(frame(x, middle - B_PX / 2, D_PX / PARTS, B_PX, MODEL, 1.6))
    x += D_PX + 7
    drawn.append(text(x, middle + 4, "·", 13, "middle"))
    x += 6
    drawn += block(x, middle, F_PX, D_PX, kept("w_DF"), **first)
    x += F_PX + 8
    drawn.append(text(x, middle + 4, "=", 13, "middle"))
    x += 8
    if columns_first:
        drawn += block(x, middle, F_PX, B_PX, "h", columns=PARTS)
    else:
        drawn += block(x, middle, F_PX, B_PX, say("{array}, partial", array="h"), partial=True)
    x += F_PX
    zone = 44 if columns_first else 76
    drawn.append(arrow(x + 6, middle, x + zone - 9, middle))
    if columns_first:
        drawn.append(text(x + zone / 2, middle - 7, kept("tanh"), 12, "middle"))
    else:
        drawn.append(text(x + zone / 2, middle - 23, strong("all-reduce"), 12, "middle"))
        size = say("{count} bytes", count=f"{SUM_OF_H:,}")
        drawn.append(text(x + zone / 2, middle - 8, size, 11.5, "middle"))
        drawn.append(
            text(
                x + zone / 2,
                middle + 17,
                say("then {function}", function=kept("tanh")),
                12,
                "middle",
            )
        )
    x += zone
    drawn.append(text(x - 1, middle + 4, "·", 13, "middle"))
    x += 4
    drawn += block(x, middle, D_PX, F_PX, kept("w_FD"), **second)
    x += D_PX + 8
    drawn.append(text(x, middle + 4, "=", 13, "middle"))
    x += 8
    if columns_first:
        drawn += block(x, middle, D_PX, B_PX, say("{array}, partial", array="y"), partial=True)
        x += D_PX
        drawn.append(arrow(x + 5, middle, x + 33, middle))
        drawn.append(text(x + 20, middle + 34, strong("all-reduce"), 12, "middle"))
        size = say("{count} bytes", count=f"{SUM_OF_Y:,}")
        drawn.append(text(x + 20, middle + 49, size, 11.5, "middle"))
        drawn += block(x + 38, middle, D_PX, B_PX, "y")
    else:
        drawn += block(x, middle, D_PX, B_PX, "y", columns=PARTS)
    return drawn


def draw():
    says = (
        "Two chains for one device of four along model. Columns, then rows: finished columns of "
        f"h, tanh, a partial sum of y, one all-reduce of {SUM_OF_Y:,} bytes. Rows, then columns: "
        f"partial sums of h, an all-reduce of {SUM_OF_H:,} bytes before the tanh."
    )
    parts = chain(14, say("Columns, then rows"), True) + chain(
        150, say("Rows, then columns"), False
    )
    key, x = 274, 1
    for shade, opacity, words, wide in [
        (MODEL, 0.85, say("the device’s piece"), 125),
        (INK, 0.4, say("whole along {axis}", axis=kept("model")), 143),
    ]:
        parts += [
            rect(x, key - 9, 10, 10, shade, opacity),
            text(x + 15, key, words, 11.5),
        ]
        x += wide
    parts += [rect(x, key - 9, 10, 10, MODEL, 0.22)]
    parts += [frame(x, key - 9, 10, 10, MODEL, 1.2, dashed=True)]
    parts += [text(x + 15, key, say("partial sum"), 11.5)]
    return {"column_then_row": figure(360, 280, says, parts)}


if __name__ == "__main__":
    write(draw())
