"""Figure of "One sum per step": eight rows on two devices, split into microbatches in two orders.

A shard is a run of neighbours, so the drawing needs the position of each row only.
"""

from kit import DATA, INK, figure, frame, kept, lines, rect, say, text, write

HIGH = 20  # of a cell


def cells(x, y, numbers, width, piece, colour, tints):
    """One row of cells; `piece` numbers in a row belong to a device, with a tint of its own."""
    drawn = []
    for position, number in enumerate(numbers):
        left = x + width * position
        drawn.append(rect(left, y, width - 1.5, HIGH - 1.5, colour, tints[number // piece], 2))
        drawn.append(text(left + width / 2 - 1, y + 13.5, str(number), 11, "middle"))
    return drawn


def microbatches():
    devices, rows, count = 2, 8, 2  # devices along data, rows, microbatches
    piece, tints, width, top = rows // devices, (0.16, 0.46), 30, 54
    each = rows // count
    parts = [text(56, top - 8, say("rows"), 11, opacity=0.8)]
    for device in range(devices):
        y = top + HIGH * piece * (device + 0.5)
        parts.append(text(26, y + 2, say("device {number}", number=device), 11, "middle"))
    for row in range(rows):
        parts += cells(56, top + HIGH * row, [row], width, piece, DATA, tints)
    # rows by microbatches
    one, other, small = 140, 268, 22
    parts.append(text(one - 8, 14, kept("reshape(4, 2)"), 12, bold=True))
    parts.append(text(one - 8, 30, say("microbatch"), 11, opacity=0.8))
    for column in range(count):
        middle = one + width * (column + 0.5)
        parts.append(text(middle, top - 8, str(column), 11, "middle", opacity=0.8))
    for row in range(each):
        numbers = range(count * row, count * row + count)
        parts += cells(one, top + HIGH * row, numbers, width, piece, DATA, tints)
    parts.append(frame(one - 2, top - 2, width + 1.5, HIGH * each + 2, INK, 1.4))
    words = say("each has rows\nof both devices")
    parts += lines(one - 8, top + 102, 14, words, 11, opacity=0.8)
    # microbatches by rows
    parts.append(text(other - 14, 14, kept("reshape(2, 4)"), 12, bold=True))
    parts.append(text(other - 14, 30, say("microbatch"), 11, opacity=0.8))
    for row in range(count):
        numbers = range(each * row, each * row + each)
        y = top + HIGH * row
        parts += cells(other, y, numbers, small, piece, DATA, tints)
        parts.append(text(other - 6, y + 13.5, str(row), 11, "end", opacity=0.8))
    parts.append(frame(other - 2, top - 2, small * each + 1.5, HIGH + 2, INK, 1.4, dashed=True))
    words = say("microbatch 0 is\nonly on device 0")
    parts += lines(other - 14, top + 62, 14, words, 11, opacity=0.8)
    says = (
        "Eight rows, four on each of two devices along data, into two microbatches. Reshaped to "
        "4 by 2, a microbatch is a column, with rows of both devices. Reshaped to 2 by 4, a "
        "microbatch is a row, and microbatch 0 is only on device 0."
    )
    return figure(360, top + HIGH * rows + 4, says, parts)


def draw():
    return {"microbatches": microbatches()}


if __name__ == "__main__":
    write(draw())
