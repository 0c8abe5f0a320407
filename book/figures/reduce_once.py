"""Figure of chapter 7: when gradients are summed over devices in one step of four microbatches.

Computed from the sizes of the chapter's capstone. A grey box is the backward pass of one layer of
one microbatch; a blue box is an all-reduce over `data`, as wide as its bytes.
"""

from kit import DATA, INK, figure, kept, line, rect, say, text, write

L, D, F, M = 4, 96, 384, 4  # layers, width, hidden width, microbatches
DEVICES = 4  # along model: a device has this part of each weight
LAYER = 2 * D * F * 4 // DEVICES  # bytes of the gradients of one layer on one device
WORK, UNIT = 13.0, 8.5  # widths: a layer's backward pass; the bytes of one layer
HIGH = 22


def lane(top, every_time):
    """Boxes in order of time, and where they end."""
    x, parts, total = 4.0, [], 0
    for microbatch in range(M):
        first = x
        for _ in range(L):
            parts.append(rect(x, top, WORK - 1.5, HIGH, INK, 0.22, 2))
            x += WORK
            if every_time:
                parts.append(rect(x, top, UNIT - 1.5, HIGH, DATA, 1, 1))
                x, total = x + UNIT, total + LAYER
        parts.append(line([(first, top + HIGH + 5), (x - 3, top + HIGH + 5)], INK))
        words = say("microbatch {number}", number=microbatch) if every_time else str(microbatch)
        parts.append(text((first + x - 3) / 2, top + HIGH + 18, words, 11, "middle", opacity=0.85))
    if not every_time:
        parts.append(rect(x, top, L * UNIT - 1.5, HIGH, DATA, 1, 1))
        total += L * LAYER
        x += L * UNIT
    return parts, x, total


def timelines():
    parts = []
    for top, every_time in [(24, True), (108, False)]:
        drawn, end, total = lane(top, every_time)
        words = say("every time") if every_time else say("once")
        parts += [text(4, top - 9, words, 12, bold=True), *drawn]
        if every_time:
            words = say("{sums} sums, {count} bytes", sums=L * M, count=f"{total:,}")
            parts.append(text(end - 2, top - 9, words, 12, "end"))
        else:
            parts.append(text(end + 6, top + 9, say("1 sum"), 12))
            parts.append(text(end + 6, top + 23, f"{total:,}", 12))
    parts.append(rect(4, 168, WORK - 1.5, 12, INK, 0.22, 2))
    parts.append(text(20, 178, say("backward pass of one layer"), 11))
    parts.append(rect(180, 168, UNIT - 1.5, 12, DATA, 1, 1))
    words = say("{what}, {count} bytes", what=kept("all-reduce"), count=f"{LAYER:,}")
    parts.append(text(192, 178, words, 11))
    says = (
        f"Two timelines of one step of {M} microbatches of {L} layers. Above, an all-reduce over "
        f"data follows each layer of each microbatch: {L * M} of them, {M * L * LAYER:,} bytes. "
        f"Below, all backward passes come first and one all-reduce of {L * LAYER:,} bytes follows."
    )
    return figure(360, 186, says, parts)


def draw():
    return {"reduce_once": timelines()}


if __name__ == "__main__":
    write(draw())
