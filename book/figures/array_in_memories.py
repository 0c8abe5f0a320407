"""Figure: one 8 × 8 array on a 2 × 4 mesh, whole on the left and in eight memories on the right.

The numbers are those of chapter 1: entry (i, j) is 8 i + j, and the spec is P("data", "model").
"""

from kit import DATA, INK, MODEL, figure, frame, kept, line, rect, say, text, write

SIDE = 8  # rows and columns of the array
ROWS, COLUMNS = 2, 4  # the mesh: data, model
HIGH, WIDE = SIDE // ROWS, SIDE // COLUMNS  # rows and columns of a shard
SHOWN = 6  # the device that the text follows

CELL = 18
LEFT, TOP = 20, 46  # of the array
BOXES = LEFT + SIDE * CELL + 19  # where the memories begin
GAP = 8  # between two memories


def shard(device):
    """First row and first column of the shard of a device."""
    row, column = divmod(device, COLUMNS)
    return row * HIGH, column * WIDE


def numbers(x, y, first_row, first_column, rows, columns, marked=False):
    drawn = []
    for i in range(rows):
        for j in range(columns):
            number = SIDE * (first_row + i) + first_column + j
            at = x + CELL * j + CELL / 2, y + CELL * i + 13
            drawn.append(text(*at, str(number), 11, "middle", bold=marked))
    return drawn


def axis(name, colour):
    return kept(f'<tspan fill="{colour}" font-weight="600">{name}</tspan>')


def array():
    """The whole array, with the lines along which the mesh axes divide it."""
    row, column = shard(SHOWN)
    drawn = [
        rect(LEFT + CELL * column, TOP + CELL * row, CELL * WIDE, CELL * HIGH, INK, 0.2),
        *numbers(LEFT, TOP, 0, 0, SIDE, SIDE),
        frame(LEFT, TOP, CELL * SIDE, CELL * SIDE),
    ]
    for part in range(1, COLUMNS):
        x = LEFT + CELL * WIDE * part
        drawn.append(line([(x, TOP - 5), (x, TOP + CELL * SIDE)], MODEL, 2))
    for part in range(1, ROWS):
        y = TOP + CELL * HIGH * part
        drawn.append(line([(LEFT - 5, y), (LEFT + CELL * SIDE, y)], DATA, 2))
    middle = TOP + CELL * SIDE / 2
    return [
        *drawn,
        text(LEFT, 12, say("one array"), 13, bold=True),
        text(
            LEFT + CELL * SIDE / 2,
            TOP - 10,
            say("{dimension} along {axis}", dimension="D", axis=axis("model", MODEL)),
            12,
            "middle",
        ),
        f'<g transform="rotate(-90 {LEFT - 9} {middle})">'
        + text(
            LEFT - 9,
            middle,
            say("{dimension} along {axis}", dimension="B", axis=axis("data", DATA)),
            12,
            "middle",
        )
        + "</g>",
    ]


def memories():
    drawn = [text(BOXES, 12, say("eight memories"), 13, bold=True)]
    for device in range(ROWS * COLUMNS):
        row, column = divmod(device, COLUMNS)
        x = BOXES + (CELL * WIDE + GAP) * column
        y = TOP + (CELL * HIGH + 30) * row - 12
        marked = device == SHOWN
        if marked:
            drawn.append(rect(x, y, CELL * WIDE, CELL * HIGH, INK, 0.2, 3))
        drawn += [
            text(x + CELL * WIDE / 2, y - 5, str(device), 12, "middle", True),
            frame(x, y, CELL * WIDE, CELL * HIGH),
            *numbers(x, y, *shard(device), HIGH, WIDE),
        ]
    drawn.append(text(BOXES, TOP + CELL * SIDE + 36, say("bold: device number"), 11))
    return drawn


def draw():
    first_row, first_column = shard(SHOWN)
    says = (
        f"On the left one array with {SIDE} rows and {SIDE} columns of numbers, 0 to "
        f"{SIDE * SIDE - 1}, divided by the axis data into {ROWS} halves of the rows and by the "
        f"axis model into {COLUMNS} quarters of the columns. On the right the memories of eight "
        f"devices; each holds {HIGH} rows and {WIDE} columns of it. Device {SHOWN} holds rows "
        f"{first_row} to {first_row + HIGH - 1} and columns {first_column} to "
        f"{first_column + WIDE - 1}."
    )
    return {"array_in_memories": figure(360, TOP + CELL * SIDE + 42, says, array() + memories())}


if __name__ == "__main__":
    write(draw())
