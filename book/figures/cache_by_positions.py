"""Figure of the page on a divided cache: each row's positions on the two devices of a group.

A line is a row of the batch, a square a position. The rows' positions are those of the page's example.
"""

from kit import DATA, INK, figure, line, rect, say, text, write
from page_cells import run_cells

PAGE = run_cells("15a-divide-cache", "imports", "mesh", "example")
LAST = PAGE["position_BS"][:, 0].tolist()  # of each row: the position of its new token
T, DEVICES = PAGE["T"], PAGE["serving"].shape["group"]
SIZE_HERE = T // DEVICES  # positions on each device
NEW = "var(--ms-model,#d55e00)"
LEFT, SIZE, STEP, ROW, GAP, TOP = 22, 8, 9.4, 12, 16, 46  # px


def left_of(position):
    return LEFT + STEP * position + GAP * (position // SIZE_HERE)


def fill(position, last):
    if position > last:
        return INK, 0.13
    return (NEW, 0.9) if position == last else (DATA, 0.85)


def draw():
    parts, bottom = [], TOP + ROW * len(LAST)
    for row, last in enumerate(LAST):
        y = TOP + ROW * row
        parts.append(text(LEFT - 7, y + 8, str(row), 11, "end", opacity=0.8))
        for position in range(T):
            parts.append(rect(left_of(position), y, SIZE, SIZE, *fill(position, last)))
    for device in range(DEVICES):
        first, end = SIZE_HERE * device, SIZE_HERE * (device + 1) - 1
        left, right = left_of(first), left_of(end) + SIZE
        name = say("device {number}", number=device)  # of the first group
        parts.append(text((left + right) / 2, 14, name, 12, "middle", True))
        for position in (first, end):
            x = left_of(position) + SIZE / 2
            parts.append(text(x, TOP - 8, str(position), 11, "middle", opacity=0.8))
            slot = str(position - first)
            parts.append(text(x, bottom + 11, slot, 11, "middle", opacity=0.8))
        for y, words in ((TOP - 8, say("positions")), (bottom + 11, say("slots"))):
            parts.append(text((left + right) / 2, y, words, 11, "middle", opacity=0.8))
    x = left_of(SIZE_HERE) - GAP / 2 - (STEP - SIZE) / 2
    parts.append(line([(x, TOP - 4), (x, bottom)], more=' stroke-dasharray="4 3"'))
    y = bottom + 24
    keys = [
        (0, DATA, 0.85, say("earlier tokens")),
        (122, NEW, 0.9, say("new token")),
        (216, INK, 0.13, say("not seen yet")),
    ]
    for x, colour, opacity, words in keys:
        parts += [rect(x, y, 10, 10, colour, opacity), text(x + 15, y + 9, words, 12)]
    says = (
        f"A cache with {len(LAST)} rows and {T} positions, divided between {DEVICES} devices: "
        f"positions 0 to {SIZE_HERE - 1} are in slots 0 to {SIZE_HERE - 1} of the first, positions "
        f"{SIZE_HERE} to {T - 1} in the same slots of the second. The new tokens of the rows are at "
        f"positions {', '.join(map(str, LAST))}: two of them on the second device, the others on "
        "the first."
    )
    return {"cache_by_positions": figure(360, y + 14, says, parts)}


if __name__ == "__main__":
    write(draw())
