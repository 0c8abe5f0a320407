"""Figures of chapter 8: how far a constraint reaches, and two shardings that collide.

`backward_spread`: argument, sine, constraint, cosine; blue is rows along `data`, grey is replicated.
`colliding_cuts`: a matrix in 2 by 4 pieces plus one in 4 by 2 pieces is whole on every device.
Sizes are those of the chapter: a 64 by 64 matrix of float32 on a 2 by 4 mesh.
"""

from kit import DATA, INK, MODEL, arrow, figure, frame, kept, line, rect, say, text, write

SIZE = 64
WHOLE = SIZE * SIZE * 4  # bytes


def value(x, y, name, sharded, width=62):
    """A value of the program; the cosine is in no program of the page, so it is dashed."""
    colour, opacity = (DATA, 0.3) if sharded else (INK, 0.16)
    dashed = name == "cos"
    return [
        frame(x + 1, y + 1, width - 2, 28, INK, 1.2, 0.6, True)
        if dashed
        else rect(x, y, width, 30, colour, opacity, 4),
        text(x + width / 2, y + 19, name, 11, "middle", True),
    ]


def gather(x, y):
    """A vertical mark: here the matrix is gathered."""
    return [
        line([(x, y - 6), (x, y + 36)], INK, 1.6, ' stroke-dasharray="3 3"'),
        text(x, y - 10, kept("all-gather"), 11, "middle"),
    ]


def spread():
    sines = SIZE * SIZE
    parts = [text(2, 14, say("one constraint"), 12, bold=True)]
    y, step = 44, 92
    xs = [2 + step * i for i in range(4)]
    names = [kept("x_BD"), kept("sin"), say("pin"), kept("cos")]
    for x, name, sharded in zip(xs, names, [True, False, False, False]):
        parts += value(x, y, name, sharded)
    for x in xs[:-1]:
        parts.append(arrow(x + 64, y + 15, x + step - 3, y + 15))
    parts += gather(xs[0] + 77, y)
    back = y + 46
    parts += [
        arrow(xs[2] + 30, back, xs[1] + 6, back),
        line([(xs[2] + 30, back), (xs[2] + 30, y + 33)], INK, 1.4),
        text((xs[1] + xs[2]) / 2 + 18, back + 15, say("spreads back"), 11, "middle"),
        arrow(xs[2] + 40, back, xs[3] + 52, back),
        line([(xs[2] + 40, back), (xs[2] + 40, y + 33)], INK, 1.4),
        text(xs[3] + 26, back + 15, say("and forward"), 11, "middle"),
        text(2, back + 15, say("{count} sines each", count=f"{sines:,}"), 11),
    ]
    low = 148
    parts.append(text(2, low, say("two constraints"), 12, bold=True))
    y, step, wide = low + 30, 74, 58
    xs = [2 + step * i for i in range(5)]
    names = [kept("x_BD"), kept("sin"), say("pin rows"), say("pin"), kept("cos")]
    for x, name, sharded in zip(xs, names, [True, True, True, False, False]):
        parts += value(x, y, name, sharded, wide)
    for x in xs[:-1]:
        parts.append(arrow(x + wide + 2, y + 15, x + step - 3, y + 15))
    parts += gather(xs[2] + 66, y)
    parts.append(text(2, y + 52, say("{count} sines each", count=f"{sines // 2:,}"), 11))
    parts.append(rect(150, y + 43, 11, 11, DATA, 0.3, 2))
    parts.append(text(165, y + 52, say("rows along {axis}", axis=kept("data")), 11))
    parts.append(rect(268, y + 43, 11, 11, INK, 0.16, 2))
    parts.append(text(283, y + 52, say("replicated"), 11))
    says = (
        f"Above: x_BD in rows, then an all-gather, then sin, pin and cos replicated; "
        f"each device takes {sines:,} sines. Below, with a second pin in front: x_BD, sin and the "
        f"first pin in rows, then the all-gather; each device takes {sines // 2:,} sines."
    )
    return figure(360, y + 58, says, parts)


def grid(x, y, side, rows, columns, ids):
    """A matrix in pieces with the device that has each; rows and columns are (count, colour)."""
    (count, across), (parts_wide, down) = rows, columns
    high, wide = side / count, side / parts_wide
    parts = [rect(x, y, side, side, INK, 0.06)]
    for i in range(1, count):
        parts.append(line([(x, y + high * i), (x + side, y + high * i)], across, 2.4))
    for j in range(1, parts_wide):
        parts.append(line([(x + wide * j, y), (x + wide * j, y + side)], down, 2.4))
    parts.append(frame(x, y, side, side))
    for i in range(count):
        for j in range(parts_wide):
            at = x + wide * (j + 0.5), y + high * (i + 0.5) + 4
            parts.append(text(*at, str(ids[i][j]), 12, "middle"))
    return parts


def collision():
    side, top, gap = 91, 44, 42
    mesh = [[4 * row + column for column in range(4)] for row in range(2)]
    turned = [[mesh[column][row] for column in range(2)] for row in range(4)]
    a, b, c = 1, 1 + side + gap, 1 + 2 * (side + gap)  # room for half a line
    data, model = "data", "model"
    parts = [
        text(a + side / 2, 14, kept("x_BD"), 12, "middle", True),
        text(a + side / 2, 30, kept(f"P({data}, {model})"), 11, "middle"),
        *grid(a, top, side, (2, DATA), (4, MODEL), mesh),
        text(a + side + gap / 2, top + side / 2 + 6, "+", 20, "middle"),
        text(b + side / 2, 14, kept("swapped_BD"), 12, "middle", True),
        text(b + side / 2, 30, kept(f"P({model}, {data})"), 11, "middle"),
        *grid(b, top, side, (4, MODEL), (2, DATA), turned),
        text(b + side + gap / 2, top + side / 2 + 6, "=", 20, "middle"),
        text(c + side / 2, 14, say("the sum"), 12, "middle", True),
        text(c + side / 2, 30, "P()", 11, "middle"),
        rect(c, top, side, side, INK, 0.16),
        frame(c, top, side, side),
        text(c + side / 2, top + side / 2 - 2, "0 1 2 3", 12, "middle"),
        text(c + side / 2, top + side / 2 + 14, "4 5 6 7", 12, "middle"),
        text(
            a + side / 2,
            top + side + 18,
            say("{count} bytes", count=f"{WHOLE // 8:,}"),
            11.5,
            "middle",
        ),
        text(
            b + side / 2,
            top + side + 18,
            say("{count} bytes", count=f"{WHOLE // 8:,}"),
            11.5,
            "middle",
        ),
        text(
            c + side / 2,
            top + side + 18,
            say("{count} bytes", count=f"{WHOLE:,}"),
            11.5,
            "middle",
            True,
        ),
        text(a, top + side + 42, say("held by each device; numbers are devices"), 11, opacity=0.85),
    ]
    says = (
        "A matrix in 2 by 4 pieces, rows along data and columns along model, plus a matrix in 4 "
        "by 2 pieces, rows along model and columns along data. The sum is whole on all eight "
        f"devices: {WHOLE:,} bytes on each, where each operand has {WHOLE // 8:,}."
    )
    return figure(360, top + side + 48, says, parts)


def draw():
    return {"backward_spread": spread(), "colliding_cuts": collision()}


if __name__ == "__main__":
    write(draw())
