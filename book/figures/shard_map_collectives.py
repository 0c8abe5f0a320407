"""all_gather, psum and psum_scatter on eight devices, before and after.

A row is a device, as in the printed output of the cells beside the figures. Blue is a piece, grey
a copy that all devices have, an outline a device's own term of a sum.
"""

from kit import DATA, INK, arrow, figure, frame, rect, say, text, write

N, CELL, HIGH, STEP = 8, 25, 17, 19  # devices; px of a cell across and down; distance of rows
LEFT, TOP, GAP = 36, 24, 54
STYLES = {"piece": (DATA, 0.42), "copy": (INK, 0.22)}


def row(x, device, numbers, style, wide):
    """The numbers that one device holds, as cells."""
    y, drawn = TOP + STEP * device, []
    for n, number in enumerate(numbers):
        left = x + wide * n
        if style == "term":
            drawn.append(frame(left + 0.5, y + 0.5, wide - 3, HIGH - 1, INK, 0.9, 0.6))
        else:
            drawn.append(rect(left, y, wide - 2, HIGH, *STYLES[style], 2))
        drawn.append(text(left + wide / 2 - 1, y + 12.7, str(number), 11.5, "middle"))
    return drawn


def panel(before, after, styles, says):
    """before and after: for each device a list of numbers; styles: of the two sides."""
    wide_before, wide_after = (CELL if len(side[0]) > 1 else 34 for side in (before, after))
    start = LEFT + wide_before * len(before[0]) + GAP
    parts = [
        text(0, TOP - 9, say("device"), 11, opacity=0.8),
        text(LEFT + 6, TOP - 9, say("before"), 12),
        text(start, TOP - 9, say("after"), 12),
    ]
    for device in range(N):
        y = TOP + STEP * device + 12.7
        parts.append(text(LEFT - 10, y, str(device), 11, "end", opacity=0.8))
        parts += row(LEFT, device, before[device], styles[0], wide_before)
        parts += row(start, device, after[device], styles[1], wide_after)
    middle = TOP + STEP * N / 2 - 1
    parts.append(arrow(start - GAP + 8, middle, start - 12, middle))
    return figure(360, TOP + STEP * N + 2, says, parts)


def draw():
    numbers = [[device] for device in range(N)]
    table = [[10 * device + n for n in range(N)] for device in range(N)]
    sums = [[sum(line[n] for line in table)] for n in range(N)]
    total = sum(range(N))
    return {
        "collective_all_gather": panel(
            numbers,
            [list(range(N))] * N,
            ("piece", "copy"),
            "all_gather on eight devices: before, device i holds the number i; after, every "
            "device holds the numbers 0 to 7.",
        ),
        "collective_psum": panel(
            numbers,
            [[total]] * N,
            ("term", "copy"),
            "psum on eight devices: before, device i holds the number i; after, every device "
            f"holds their sum, {total}.",
        ),
        "collective_psum_scatter": panel(
            table,
            sums,
            ("term", "piece"),
            "psum_scatter on eight devices: before, device i holds the eight numbers 10 i to "
            "10 i + 7; after, device j holds one number, the sum of column j: "
            f"{sums[0][0]} on device 0, {sums[1][0]} on device 1, up to {sums[7][0]} on device 7.",
        ),
    }


if __name__ == "__main__":
    write(draw())
