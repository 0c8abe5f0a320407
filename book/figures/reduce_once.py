"""Figure of 07g-sum-once: when gradients are summed over devices in one step of four microbatches.

Computed from the page's sizes. A grey box is the backward pass of one layer of one microbatch; a blue
box is a sum over devices, as wide as its bytes.
"""

from kit import DATA, INK, figure, line, rect, say, text, write

L, D, M = 2, 192, 4  # layers, width, microbatches
LAYER = D * D * 4  # bytes of the gradient of one layer
WORK, UNIT = 24.0, 19.0  # widths: a layer's backward pass; the bytes of one layer
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
            words = say("{sums} times, {count} bytes", sums=L * M, count=f"{total:,}")
            parts.append(text(end - 2, top - 9, words, 12, "end"))
        else:
            words = say("once, {count} bytes", count=f"{total:,}")
            parts.append(text(end - 2, top - 9, words, 12, "end"))
    parts.append(rect(4, 168, WORK - 1.5, 12, INK, 0.22, 2))
    parts.append(text(32, 178, say("backward pass of one layer"), 11))
    parts.append(rect(186, 168, UNIT - 1.5, 12, DATA, 1, 1))
    words = say("its sum, {count} bytes", count=f"{LAYER:,}")
    parts.append(text(209, 178, words, 11))
    says = (
        f"Two timelines of one step of {M} microbatches of {L} layers. Above, the gradient of a "
        f"layer is summed over devices after each layer of each microbatch: {L * M} times, "
        f"{M * L * LAYER:,} bytes. Below, all backward passes come first and both gradients are "
        f"summed once, {L * LAYER:,} bytes."
    )
    return figure(360, 186, says, parts)


def draw():
    return {"reduce_once": timelines()}


if __name__ == "__main__":
    write(draw())
