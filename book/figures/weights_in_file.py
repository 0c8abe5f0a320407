"""Figure: a matrix in its safetensors file, and the bytes of it that one device or one host needs.

The matrix is q_proj of the page's small model, 128 × 64 in float32, on a 2 × 4 mesh. Rows are drawn
as many as fit; the numbers are computed from the sizes.
"""

from kit import DATA, INK, MODEL, arrow, figure, frame, kept, line, rect, say, strong, text, write

ROWS, COLUMNS, BYTES = 128, 64, 4
DATA_SIZE, MODEL_SIZE = 2, 4
WIDE, HIGH = 128, 128  # of a matrix, drawn
DRAWN = 4  # rows of the device that are drawn in the file
CASES = [  # heading, parts of the rows, parts of the columns
    (say("divided by both axes"), MODEL_SIZE, DATA_SIZE),
    (say("divided by {axis} alone", axis=kept("model")), MODEL_SIZE, 1),
]


def matrix(left, top, rows, columns):
    """The matrix with the piece of device 0, and the axes that divide it."""
    parts = [rect(left, top, WIDE / columns, HIGH / rows, INK, 0.45)]
    parts += [frame(left, top, WIDE, HIGH)]
    for row in range(1, rows):
        y = top + row * HIGH / rows
        parts.append(line([(left, y), (left + WIDE, y)], INK, 0.8, ' stroke-opacity="0.6"'))
    for column in range(1, columns):
        x = left + column * WIDE / columns
        parts.append(line([(x, top), (x, top + HIGH)], INK, 0.8, ' stroke-opacity="0.6"'))
    parts.append(rect(left - 8, top, 4, HIGH, MODEL))
    parts.append(text(left - 8, top + HIGH + 14, kept("model"), 11, "start"))
    if columns > 1:
        parts.append(rect(left, top - 8, WIDE, 4, DATA))
        parts.append(text(left + WIDE, top - 12, kept("data"), 11, "end"))
    return parts


def in_file(left, top, columns):
    """The first rows of device 0 as they are in the file: one after another."""
    row = 156 / DRAWN
    parts = [rect(left, top, 156, 18, INK, 0.08)]
    for number in range(DRAWN):
        x = left + number * row
        parts.append(rect(x, top, row / columns, 18, INK, 0.45))
        parts.append(line([(x, top), (x, top + 18)], INK, 0.8, ' stroke-opacity="0.6"'))
    parts.append(frame(left, top, 156, 18))
    parts.append(text(left + 162, top + 13, kept("…"), 12))
    return parts


def draw():
    parts = []
    for number, (heading, rows, columns) in enumerate(CASES):
        top = 40 + 196 * number
        count, run = ROWS // rows, COLUMNS // columns * BYTES
        if columns == 1:
            count, run = 1, run * count
        parts.append(text(0, top - 24, heading, 13, bold=True))
        parts += matrix(10, top, rows, columns)
        parts.append(arrow(146, top + HIGH / rows / 2, 176, top + HIGH / rows / 2))
        parts.append(text(184, top - 6, say("device 0, in the file:"), 12))
        parts += in_file(184, top + 6, columns)
        runs = strong(f"{count} × {run:,} B")
        parts.append(text(184, top + 44, runs, 13))
        more = say("runs, with gaps between") if columns > 1 else say("one run")
        parts.append(text(184, top + 61, more, 12))
    says = (
        "A matrix of 128 rows and 64 columns, twice. Above, model divides its rows by four and "
        "data its columns by two: the piece of device 0 is 32 runs of 128 bytes in the file, with "
        "gaps between them. Below, model alone divides the rows: the piece is one run of 8,192 "
        "bytes."
    )
    return {"weights_in_file": figure(360, 40 + 196 + HIGH + 20, says, parts)}


if __name__ == "__main__":
    write(draw())
