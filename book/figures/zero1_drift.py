"""Figure: the weights of ZeRO-1 over three steps, with free results and with constrained ones.

Sizes are those of the tiny model of many_devices.stacked. tests/book/test_04d_zero1.py checks the
bytes and the compilations.
"""

from kit import DATA, INK, arrow, figure, frame, kept, line, rect, say, text, write

L, D, F, PIXELS, CLASSES = 4, 96, 384, 64, 16
SPLIT = PIXELS * D + 2 * L * D * F  # weights with moments in eighths
SMALL = L * (2 * D + F) + D * CLASSES  # the others
WHOLE, DRIFTED = 4 * (SPLIT + SMALL), 4 * (SPLIT // 8 + SMALL)
LEFT, STEP, SIDE = 12, 98, 40


def weight(x, y, pieces):
    """The weights of one device: all of them, or the piece of device 0."""
    parts = []
    if pieces:
        parts += [rect(x, y, SIDE, SIDE, DATA, 0.12), rect(x, y, SIDE / 8, SIDE, DATA)]
        for n in range(1, 8):
            at = x + SIDE * n / 8
            parts.append(line([(at, y), (at, y + SIDE)], DATA, 0.8))
    else:
        parts.append(rect(x, y, SIDE, SIDE, INK, 0.35))
    return [*parts, frame(x, y, SIDE, SIDE, opacity=0.6)]


def lane(y, title, pieces, compiled):
    """Four states and the three steps between them."""
    parts = [text(0, y, title, 13, bold=True)]
    for n in range(4):
        x = LEFT + STEP * n
        held = DRIFTED if n and pieces else WHOLE
        parts += weight(x, y + 14, bool(n) and pieces)
        parts.append(text(x + SIDE / 2, y + 70, f"{held:,}", 11, "middle"))
        if n < 3:
            middle = x + (SIDE + STEP) / 2
            parts.append(text(middle, y + 25, say("step {number}", number=n + 1), 11, "middle"))
            parts.append(arrow(x + SIDE + 6, y + 34, x + STEP - 6, y + 34))
            if compiled[n]:
                parts.append(text(middle, y + 50, say("compiles"), 11, "middle"))
    return parts


def draw():
    parts = lane(14, say("Results left free"), True, (True, True, False))
    parts += lane(
        116,
        say("Results constrained: {option}", option=kept("out_shardings")),
        False,
        (True, False, False),
    )
    parts.append(
        text(0, 214, say("bytes of weights on each device; of the moments it has one eighth"), 11)
    )
    says = (
        f"The weights of ZeRO-1 over three steps. Left free, each device holds {WHOLE:,} bytes "
        f"before step 1, and {DRIFTED:,}, an eighth of each large weight, after steps 1, 2 and 3; "
        "steps 1 and 2 are compiled. With constrained results they stay whole, and only step 1 is "
        "compiled."
    )
    return {"zero1_drift": figure(360, 222, says, parts)}


if __name__ == "__main__":
    write(draw())
