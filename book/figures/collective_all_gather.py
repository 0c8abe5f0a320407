"""all_gather on eight devices, before and after.

A row is a device, as in the printed output of the cell beside the figure. Blue is a piece, grey a copy
that all devices have.
"""

from kit import DATA, INK, arrow, figure, rect, say, text, write

N, CELL, HIGH, STEP = 8, 25, 17, 19  # devices; px of a cell across and down; distance of rows
LEFT, TOP, GAP = 36, 24, 54
START = LEFT + 34 + GAP  # of what a device holds afterwards


def row(x, device, numbers, wide, colour, opacity):
    """The numbers that one device holds, as cells."""
    y, drawn = TOP + STEP * device, []
    for n, number in enumerate(numbers):
        left = x + wide * n
        drawn.append(rect(left, y, wide - 2, HIGH, colour, opacity, 2))
        drawn.append(text(left + wide / 2 - 1, y + 12.7, str(number), 11.5, "middle"))
    return drawn


def draw():
    parts = [
        text(0, TOP - 9, say("device"), 11, opacity=0.8),
        text(LEFT + 6, TOP - 9, say("before"), 12),
        text(START, TOP - 9, say("after"), 12),
    ]
    for device in range(N):
        y = TOP + STEP * device + 12.7
        parts.append(text(LEFT - 10, y, str(device), 11, "end", opacity=0.8))
        parts += row(LEFT, device, [device], 34, DATA, 0.42)
        parts += row(START, device, range(N), CELL, INK, 0.22)
    middle = TOP + STEP * N / 2 - 1
    parts.append(arrow(START - GAP + 8, middle, START - 12, middle))
    alt = (
        "all_gather on eight devices: before, device i holds the number i; after, every device "
        "holds the numbers 0 to 7."
    )
    return {"collective_all_gather": figure(360, TOP + STEP * N + 2, alt, parts)}


if __name__ == "__main__":
    write(draw())
