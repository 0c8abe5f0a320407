"""One weight, eight devices, one training step of FSDP: gather, use, scatter.

Two figures: the matrix of chapter 9's `fsdp_mean_error`, which the backward pass does not need whole;
a weight of a layer, freed after use and gathered again, as with jax.checkpoint. A column is a device,
a stripe one eighth of the weight or of its gradient. Blue is a piece, grey a copy that all devices
have, an outline a device's own term of a sum.
"""

from kit import DATA, INK, figure, kept, line, rect, say, text, write

N, LEFT, COLUMN, WIDE, STRIPE = 8, 2, 45, 37, 4.4  # devices; px
HIGH = N * STRIPE
HALF = 17  # px: w and dw side by side
COPY, PIECE = (INK, 0.3), (DATA, 0.85)


def dashes(x, y, wide, opacity=0.35):
    """Where the whole weight would be."""
    more = f' stroke="currentColor" stroke-opacity="{opacity}" stroke-width=".8"'
    return rect(
        x - 1.5, y - 1.5, wide + 3, HIGH + 2.2, "none", 1, 2, more + ' stroke-dasharray="2 2"'
    )


def named(x, y, wide, name):
    """The name of an array under its box."""
    return text(x + wide / 2, y + HIGH + 12, kept(name), 11, "middle")


def weight(device, y, others=False, wide=WIDE):
    """One weight on one device: its own piece, and copies of the others if they are there."""
    x, drawn = LEFT + COLUMN * device, []
    for stripe in range(N):
        if stripe == device or others:
            fill, opacity = PIECE if stripe == device else COPY
            drawn.append(rect(x, y + STRIPE * stripe, wide, STRIPE - 0.8, fill, opacity))
    return [*drawn, dashes(x, y, wide)]


def gradient(device, y, summed):
    """The stored piece; its gradient: all of it from own rows, or one piece of the sum."""
    x, drawn = LEFT + COLUMN * device, weight(device, y, wide=HALF)
    drawn.append(named(x, y, HALF, "w"))
    x += WIDE - HALF
    for stripe in range(N):
        top = y + STRIPE * stripe
        if summed and stripe == device:
            drawn.append(rect(x, top, HALF, STRIPE - 0.8, *PIECE))
        if not summed:
            more = ' stroke="currentColor" stroke-opacity=".65" stroke-width=".8"'
            drawn.append(rect(x + 0.4, top + 0.2, HALF - 0.8, STRIPE - 1.2, "none", 1, 0, more))
    return [*drawn, named(x, y, HALF, "dw"), *([dashes(x, y, HALF)] if summed else [])]


def frames(y, one, *options):
    """The same drawing for every device, each in its column."""
    return [part for device in range(N) for part in one(device, y, *options)]


def drawing(forward, backward, says):
    """Devices and stored pieces, then the steps of both passes: what is done, and a drawing of it."""
    y, parts = 26, [text(LEFT - 2, 12, say("Stored"), 14, bold=True)]
    for device in range(N):
        middle = LEFT + COLUMN * device + WIDE / 2
        parts.append(text(middle, y, str(device), 11, "middle", opacity=0.8))
    y += 7
    parts += frames(y, weight)
    phases = {0: say("forward"), len(forward): say("backward")}  # and where each begins
    names = 0  # px that they take under the last boxes
    for n, (name, one, *options) in enumerate([*forward, *backward]):
        y += HIGH + 25 + names
        if n in phases:
            y += 10
            parts.append(
                line([(LEFT - 2, y - 18), (LEFT + COLUMN * N - 6, y - 18)], more=' opacity=".4"')
            )
            parts.append(text(LEFT + COLUMN * N - 8, y - 3, phases[n], 12, "end", opacity=0.8))
        parts += [text(LEFT - 2, y, name, 14, bold=True), *frames(y + 9, one, *options)]
        y += 9
        names = 11 if one is gradient else 0
    return figure(360, y + HIGH + 18, says, parts)


def draw():
    w, dw = kept("w"), kept("dw")
    scatter = (say("Sum {array}, scatter the pieces", array=dw), gradient, True)
    one_matrix = drawing(
        [(say("Gather {array}, use it", array="w"), weight, True)],
        [(say("{gradient} from own examples", gradient=dw), gradient, False), scatter],
        "One matrix on eight devices through one gradient. Stored: each device has one of eight "
        "pieces. Forward, gather: every device has its piece and copies of the seven others, and "
        "multiplies its own rows of the batch by the whole matrix. Backward: every device has its "
        "piece, and computes a whole gradient from its own rows. Scatter: the eight gradients are "
        "added up and each device keeps one piece of the sum, beside its piece of the matrix.",
    )
    use = say("Use {array}, free the copies; {gradient} from own rows", array=w, gradient=dw)
    freed = drawing(
        [
            (say("Gather {array}", array="w"), weight, True),
            (say("Use {array}, free the copies", array="w"), weight, False),
        ],
        [
            (say("Gather {array} again", array="w"), weight, True),
            (use, gradient, False),
            scatter,
        ],
        "One weight on eight devices through one training step. Stored: each device has one of "
        "eight pieces. Gather: every device has its piece and copies of the seven others. Use, "
        "free: it multiplies its own rows of the batch by the whole weight and drops the copies. "
        "Backward, gather again. Use, free: every device computes a whole gradient from its own "
        "rows and drops the copies of the weight. Scatter: the eight gradients are added up and "
        "each device keeps one piece of the sum, beside its piece of the weight.",
    )
    return {"gather_use_scatter": one_matrix, "gather_use_free_scatter": freed}


if __name__ == "__main__":
    write(draw())
