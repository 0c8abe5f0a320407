"""Figure: y = tanh(x · w_in) · w_out on the four devices of one mesh row, with sizes of chapter 1.

The first weight is sharded by columns and the second by rows. Device 1 is filled; what the other
three hold is outlined. Partial sums are dashed.
"""

from kit import INK, MODEL, figure, frame, kept, line, rect, say, text, write

B, D, F = 4, 8, 24  # rows of the batch on these devices, width, hidden width
N, DEVICE = 4, 1  # devices along model, the one that is filled
UNIT = 5  # px of one row or column
AXIS = kept(f'<tspan fill="{MODEL}" font-weight="600">model</tspan>')


def block(x, y, rows, columns, divided=""):
    """A matrix; `divided` says which of its dimensions model divides: "rows" or "columns"."""
    width, height = columns * UNIT, rows * UNIT
    drawn = []
    if divided == "columns":
        part = width / N
        drawn.append(rect(x + part * DEVICE, y, part, height, MODEL, 0.5))
        for n in range(1, N):
            drawn.append(line([(x + part * n, y), (x + part * n, y + height)], MODEL, 1.2))
    elif divided == "rows":
        part = height / N
        drawn.append(rect(x, y + part * DEVICE, width, part, MODEL, 0.5))
        for n in range(1, N):
            drawn.append(line([(x, y + part * n), (x + width, y + part * n)], MODEL, 1.2))
    else:
        drawn.append(rect(x, y, width, height, INK, 0.25))
    return [*drawn, frame(x, y, width, height)]


def named(name, dims):
    """w_in[D, F_model], with the axis in its colour."""
    axis = f'<tspan fill="{MODEL}" font-weight="600" font-size="11" dy="3">model</tspan>'
    before, found, after = dims.partition("*")
    return kept(f"{name}[{before}" + (f'{axis}<tspan dy="-3">{after}]</tspan>' if found else "]"))


def first(y):
    """x · w_in = h: every device has all it needs."""
    top = y + 38
    x_at, w_at, h_at = 4, 66, 212
    return [
        text(0, y, "1", 14, bold=True),
        text(
            16,
            y,
            say(
                "{product}, then {function}: nothing moves",
                product=kept("x · w_in"),
                function=kept("tanh"),
            ),
            13,
        ),
        text(x_at, top - 8, "x[B, D]", 12),
        *block(x_at, top, B, D),
        text(54, top + 15, "·", 14, "middle", True),
        text(w_at, top - 8, named("w_in", "D, F*"), 12),
        *block(w_at, top, D, F, "columns"),
        text(199, top + 15, "=", 13, "middle"),
        text(h_at, top - 8, named("h", "B, F*"), 12),
        *block(h_at, top, B, F, "columns"),
    ], top + D * UNIT


def second(y):
    """h · w_out: four partial sums."""
    top = y + 38
    h_at, w_at, p_at = 4, 146, 212
    return [
        text(0, y, "2", 14, bold=True),
        text(16, y, say("{product}: each device has a partial sum", product=kept("h · w_out")), 13),
        text(h_at, top - 8, named("h", "B, F*"), 12),
        *block(h_at, top, B, F, "columns"),
        text(135, top + 15, "·", 14, "middle", True),
        text(w_at - 8, top - 8, named("w_out", "F*, D"), 12),
        *block(w_at, top, F, D, "rows"),
        text(199, top + 15, "=", 13, "middle"),
        rect(p_at + 14, top, D * UNIT, B * UNIT, MODEL, 0.22),
        frame(p_at + 14, top, D * UNIT, B * UNIT, MODEL, 1.4, dashed=True),
        text(p_at + 62, top + 15, say("on device {number}", number=DEVICE), 12),
    ], top + F * UNIT


def third(y):
    """The all-reduce."""
    top, step = y + 16, D * UNIT + 22
    drawn = [
        text(0, y, "3", 14, bold=True),
        text(
            16,
            y,
            say(
                "{collective} along {axis}: add the partial sums",
                collective=kept("all-reduce"),
                axis=AXIS,
            ),
            13,
        ),
    ]
    for n in range(N):
        x = 4 + step * n
        if n == DEVICE:
            drawn.append(rect(x, top, D * UNIT, B * UNIT, MODEL, 0.22))
        drawn += [
            frame(x, top, D * UNIT, B * UNIT, MODEL if n == DEVICE else INK, 1.4, dashed=True),
            text(x + D * UNIT / 2, top + 15, str(n), 12, "middle", True),
            text(x + D * UNIT + 11, top + 15, "+" if n < N - 1 else "=", 13, "middle"),
        ]
    x = 4 + step * N
    return [
        *drawn,
        *block(x, top, B, D),
        text(x + D * UNIT + 8, top + 15, "y[B, D]", 12),
        text(x - 2, top + B * UNIT + 16, say("whole on all {count}", count=N), 11.5),
        text(4, top + B * UNIT + 16, say("a number is a device"), 11.5),
    ], top + B * UNIT + 16


def draw():
    parts, y = [], 14
    for step in (first, second, third):
        drawn, y = step(y)
        parts += drawn
        y += 34
    says = (
        f"Two matrix products on {N} devices along the axis model, as blocks. First, x times w_in "
        f"by columns: device {DEVICE} has all of x and a quarter of the columns of w_in, and gets "
        f"a quarter of the columns of h. Second, h times w_out by rows: device {DEVICE} has a "
        "quarter of the columns of h and the same quarter of the rows of w_out, and gets a partial "
        f"sum in the shape of y. Third, the {N} partial sums are added, and y is whole on all {N} "
        "devices."
    )
    return {"two_matmuls": figure(360, y - 28, says, parts)}


if __name__ == "__main__":
    write(draw())
