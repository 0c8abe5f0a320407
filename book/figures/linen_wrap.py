"""Figure: a Linen module that is wrapped; `shard` and `gather` stand between it and what is stored.

A kernel of 256 × 256 numbers on eight devices, as on the page for Linen.
"""

from kit import DATA, arrow, figure, frame, kept, rect, say, text, write

N, SIZE, STRIPE, GAP = 8, 256, 12, 5
LEFT, TOP = 30, 60  # of the whole kernel
SIDE = N * STRIPE
RIGHT = 246  # of the pieces


def draw():
    middle = TOP + SIDE / 2
    parts = [
        text(LEFT + SIDE / 2, 14, say("in the module"), 13, "middle", True),
        text(LEFT + SIDE / 2, 31, say("whole, on each device"), 11.5, "middle", opacity=0.8),
        text(RIGHT + SIDE / 2, 14, say("stored"), 13, "middle", True),
        text(RIGHT + SIDE / 2, 31, say("one piece per device"), 11.5, "middle", opacity=0.8),
        rect(LEFT, TOP, SIDE, SIDE, DATA, 0.3),
        frame(LEFT, TOP, SIDE, SIDE, opacity=0.6),
        text(LEFT + SIDE / 2, middle + 4, kept(f"{SIZE} × {SIZE}"), 12, "middle"),
    ]
    top = TOP - GAP * (N - 1) / 2
    for device in range(N):
        y = top + (STRIPE + GAP) * device
        parts.append(text(RIGHT - 7, y + 10, str(device), 11, "end", opacity=0.8))
        parts.append(rect(RIGHT, y, SIDE, STRIPE, DATA, 0.85))
    bottom = top + (STRIPE + GAP) * N - GAP
    piece = kept(f"{SIZE // N} × {SIZE}")
    parts.append(text(RIGHT + SIDE / 2, bottom + 17, piece, 12, "middle"))
    start, end = LEFT + SIDE + 10, RIGHT - 24
    ways = [(middle - 22, "shard", "init", True), (middle + 34, "gather", "apply", False)]
    for y, name, verb, right in ways:
        parts.append(arrow(start, y, end, y) if right else arrow(end, y, start, y))
        at = (start + end) / 2
        parts.append(text(at, y - 7, kept(name), 13, "middle", True))
        parts.append(text(at, y + 16, say("in {function}", function=kept(verb)), 11.5, "middle"))
    says = (
        f"A kernel of {SIZE} by {SIZE} numbers. On the left, in the module, each device sees it "
        f"whole. On the right it is stored as eight pieces of {SIZE // N} by {SIZE}, one on each "
        "device. An arrow from left to right: in init, shard. An arrow back: in apply, gather."
    )
    return {"linen_wrap": figure(360, bottom + 26, says, parts)}


if __name__ == "__main__":
    write(draw())
