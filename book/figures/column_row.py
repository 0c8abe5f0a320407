"""Figure: two weights of an MLP, sharded by columns then rows, and in the other order.

Blocks as device 1 of four has them, for the sizes of the page on sharded matmuls. In each order one
product leaves partial sums, and the figure says which all-reduce adds them.
"""

from kit import INK, figure, frame, kept, line, rect, say, text, write

AXIS_X = "var(--ms-axis-2,#8a6ae0)"  # the colour that meshscope gives an axis X
N, DEVICE = 4, 1
B, D, F = 16, 64, 256
FLOAT = 4  # bytes
SIDE = {"B": 18, "D": 22, "F": 66}  # px, compressed
AXIS = f'<tspan fill="{AXIS_X}" font-weight="600" font-size="9" dx=".5" dy="3">X</tspan>'
LEFT, RIGHT = 0, 186  # the two orders


def sent(rows, columns):
    """Bytes that each device sends in the all-reduce of a float32 matrix."""
    return 2 * FLOAT * rows * columns * (N - 1) // N


def block(x, y, rows, columns, cut="", partial=False):
    width, height = SIDE[columns], SIDE[rows]
    drawn = []
    if partial:
        drawn.append(rect(x, y, width, height, AXIS_X, 0.22))
    elif not cut:
        drawn.append(rect(x, y, width, height, INK, 0.28))
    else:
        across = cut == columns
        w, h = (width / N, height) if across else (width, height / N)
        for n in range(N):
            left, top = (x + w * n, y) if across else (x, y + h * n)
            if n == DEVICE:
                drawn.append(rect(left, top, w, h, AXIS_X))
            if n:
                end = (left, top + h) if across else (left + w, top)
                drawn.append(line([(left, top), end], AXIS_X, 0.7, ' stroke-opacity=".6"'))
    return [*drawn, frame(x, y, width, height, INK, 0.8, 0.5)]


def named(name, rows, columns, cut=""):
    inside = []
    for dim in (rows, columns):
        inside.append(dim + (f'{AXIS}<tspan dx="1" dy="-3">' if dim == cut else ""))
    words = f"{name}[{inside[0]}, {inside[1]}]"
    return words + ("</tspan>" if cut else "")


def matrix(x, y, name, rows, columns, cut="", partial=False):
    return [
        text(x, y - 6, kept(named(name, rows, columns, cut)), 11.5),
        *block(x, y, rows, columns, cut, partial),
    ]


def result(x, y, *matrix_of):
    """A matrix that the line above computes."""
    return [text(x + 4, y + 14, "=", 13, "middle"), *matrix(x + 14, y, *matrix_of)]


def reduced(x, y, name, size):
    """An all-reduce, with a bar as long as its bytes."""
    return [
        text(x, y, kept(f"all-reduce {name}"), 12, bold=True),
        rect(x, y + 6, 172 * size / sent(B, F), 8, AXIS_X, 0.5, 2),
        text(x, y + 30, say("sends {count} bytes", count=f"{size:,}"), 12),
    ]


def columns_then_rows(x):
    y_size, steps = sent(B, D), []
    steps += [text(x, 12, say("columns, then rows"), 13, bold=True)]
    y = 44
    steps += matrix(x, y, "x", "B", "D")
    steps += [text(x + 40, y + 14, "·", 14, "middle", True)]
    steps += matrix(x + 60, y, "w_in", "D", "F", "F")
    y += 60
    steps += result(x, y, "h", "B", "F", "F")
    steps += [text(x + 92, y + 14, say("finished"), 12)]
    y += 44
    steps += [text(x, y, say("{function} on ¼ of {array}", function=kept("tanh"), array="h"), 12)]
    y += 30
    steps += matrix(x, y, "h", "B", "F", "F")
    steps += [text(x + 78, y + 14, "·", 14, "middle", True)]
    steps += matrix(x + 92, y, "w_out", "F", "D", "F")
    y += 92
    y += 12
    steps += result(x, y, "y", "B", "D", "", True)
    steps += [text(x + 48, y + 14, say("partial sums"), 12)]
    y += 42
    steps += reduced(x, y, "y", y_size)
    return steps


def rows_then_columns(x):
    h_size, steps = sent(B, F), []
    steps += [text(x, 12, say("rows, then columns"), 13, bold=True)]
    y = 44
    steps += matrix(x, y, "x", "B", "D", "D")
    steps += [text(x + 50, y + 14, "·", 14, "middle", True)]
    steps += matrix(x + 64, y, "w_in", "D", "F", "D")
    y += 60
    steps += result(x, y, "h", "B", "F", "", True)
    steps += [text(x + 92, y + 14, say("partial sums"), 12)]
    y += 44
    steps += reduced(x, y, "h", h_size)
    y += 54
    steps += [text(x, y, say("{function} on all of {array}", function=kept("tanh"), array="h"), 12)]
    y += 30
    steps += matrix(x, y, "h", "B", "F")
    steps += [text(x + 78, y + 14, "·", 14, "middle", True)]
    steps += matrix(x + 92, y, "w_out", "F", "D", "D")
    y += 92
    steps += result(x, y, "y", "B", "D", "D")
    steps += [text(x + 48, y + 14, say("finished columns"), 12)]
    return steps


def draw():
    says = (
        f"Two weights on {N} devices in two orders, as device {DEVICE} has them. Columns, then "
        "rows: x times w_in gives finished columns of h, each device takes the tanh of a quarter "
        f"of h, and the product with w_out gives partial sums of y, whose all-reduce sends "
        f"{sent(B, D):,} bytes. Rows, then columns: x times w_in gives partial sums of h, whose "
        f"all-reduce sends {sent(B, F):,} bytes, then every device takes the tanh of all of h, and "
        "the product with w_out gives finished columns of y."
    )
    parts = [
        *columns_then_rows(LEFT),
        *rows_then_columns(RIGHT),
        line([(178, 0), (178, 374)], more=' stroke-opacity=".3"'),
    ]
    return {"column_row": figure(360, 376, says, parts)}


if __name__ == "__main__":
    write(draw())
