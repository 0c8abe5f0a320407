"""Figure: which page needs which. An arrow leads from a page to one that builds on it."""

from kit import INK, arrow, figure, frame, line, say, text, write

# name: (column, row, pages it needs, pages that only its second half needs)
PAGES = {
    "Quick start": (0, 0, [], []),
    "Strategies": (2, 0, [], []),
    "1 Mesh": (1, 1, [], []),
    "Four matmuls": (0, 2, ["1 Mesh"], []),
    "2 Variables": (1, 2, ["1 Mesh"], []),
    "9 FSDP": (2, 2, ["1 Mesh"], ["4 Train"]),
    "8 Arrays": (0, 3, ["Four matmuls"], []),
    "3 Initialise": (1, 3, ["2 Variables"], []),
    "4 Train": (1, 4, ["3 Initialise"], []),
    "7 Explicit": (0, 5, ["Four matmuls", "4 Train"], []),
    "5 Checkpoint": (1, 5, ["4 Train"], []),
    "6 Logical axes": (2, 5, ["4 Train"], []),
}
LEFT, WIDE, HIGH, COLUMN, ROW = 14, 104, 26, 120, 52


def corner(name):
    column, row, *_ = PAGES[name]
    return LEFT + column * COLUMN, 2 + row * ROW


def link(start, end, dashed):
    """From the border of one box to that of another, in straight pieces."""
    (x1, y1), (x2, y2) = corner(start), corner(end)
    half = " stroke-dasharray='4 3'" if dashed else ""
    if x1 == x2:  # straight down
        return arrow(x1 + WIDE / 2, y1 + HIGH, x2 + WIDE / 2, y2 - 2)
    side = 1 if x2 > x1 else -1
    if y2 > y1 and abs(y2 - y1) == ROW:  # out of the side, then down
        out = (x1 + (WIDE if side > 0 else 0), y1 + 19)
        turn = (x2 + WIDE / 2, out[1])
        return line([out, turn], INK, 1.4, half) + arrow(turn[0], turn[1], turn[0], y2 - 2)
    if y2 < y1:  # up again: along the side of the target's column
        out = (x1 + WIDE, y1 + 7)
        turn = (x2 + WIDE / 2, out[1])
        head = arrow(turn[0], y2 + HIGH + 8, turn[0], y2 + HIGH + 2)
        return line([out, turn, (turn[0], y2 + HIGH + 4)], INK, 1.4, half) + head
    raise SystemExit(f"no way is drawn from {start} to {end}")


def draw():
    parts = []
    for name, (_, _, needs, half_needs) in PAGES.items():
        x, y = corner(name)
        parts.append(frame(x + 0.5, y, WIDE - 1, HIGH, opacity=0.6))
        parts.append(text(x + WIDE / 2, y + 17.5, say(name), 12, "middle", True))
        for other in needs + half_needs:
            if (other, name) == ("Four matmuls", "7 Explicit"):  # on the left of chapter 8
                top, bottom = corner(other)[1] + HIGH / 2, y + HIGH / 2
                parts.append(line([(x, top), (3, top), (3, bottom)], INK, 1.4))
                parts.append(arrow(3, bottom, x - 2, bottom))
                continue
            parts.append(link(other, name, other in half_needs))
    spoken = "; ".join(
        f"{name} needs {' and '.join(needs)}"
        + (f", and {half_needs[0]} for its second half" if half_needs else "")
        for name, (_, _, needs, half_needs) in PAGES.items()
        if needs
    )
    says = (
        "The pages of the book as boxes, with arrows from what is needed to what needs it. "
        f"Quick start, Strategies and 1 Mesh need nothing; {spoken}."
    )
    return {"reading": figure(360, 2 + 5 * ROW + HIGH + 2, says, parts)}


if __name__ == "__main__":
    write(draw())
