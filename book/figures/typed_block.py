"""Figure of chapter 7: a block of the tiny model as a flow of values, with a type on every edge.

The types are those that JAX gives to the chapter's block on an abstract 2 by 4 mesh; here they
are computed by the rules that the chapter states, from the sizes of the tiny model.
"""

from html import escape

from kit import DATA, INK, MODEL, arrow, figure, frame, kept, line, rect, say, text, write

COLOUR = {"data": DATA, "model": MODEL}
B, D, F = 64, 96, 384


def typed(*dimensions):
    """`[64@data, 96]` with each sharded dimension in the colour of its axis."""
    parts = []
    for size, axis in dimensions:
        words = f"{size}@{axis}" if axis else str(size)
        if axis:
            words = f'<tspan fill="{COLOUR[axis]}" font-weight="600">{words}</tspan>'
        parts.append(words)
    return f"[{', '.join(parts)}]"


def block():
    rows, hidden = typed((B, "data"), (D, None)), typed((B, "data"), (F, "model"))
    # (name of the operation, what enters from the right, type that leaves, whether it raises an error)
    steps = [
        ("norm, × scale_D", typed((D, None)), rows, False),
        ("@ w_DF", typed((D, "data"), (F, "model")), hidden, False),
        ("+ b_F, silu", typed((F, "model")), hidden, False),
        ("jnp.dot w_FD", typed((F, "model"), (D, "data")), rows, True),
        ("+ x_BD + b_D", typed((D, None)), rows, False),
    ]
    middle, wide, high, gap = 104, 128, 26, 36
    parts = [text(middle + 12, 14, kept(f"x_BD {rows}"), 12), arrow(middle, 4, middle, 24)]
    y = 26
    for name, enters, leaves, ambiguous in steps:
        parts.append(rect(middle - wide / 2, y, wide, high, INK, 0.1, 4))
        parts.append(text(middle, y + 17, kept(escape(name)), 12, "middle", True))
        parts.append(arrow(middle + wide / 2 + 20, y + 13, middle + wide / 2 + 3, y + 13))
        parts.append(text(middle + wide / 2 + 24, y + 17, kept(enters), 11.5))
        low = y + high
        parts.append(arrow(middle, low + 1, middle, low + gap - 2))
        parts.append(text(middle + 12, low + 21, kept(leaves), 12))
        if ambiguous:
            parts.append(frame(middle + 7, low + 7, 86, 20, INK, 1.2, dashed=True))
            parts.append(text(middle + 98, low + 15, say("an error without"), 11))
            parts.append(text(middle + 98, low + 28, kept("out_sharding="), 11, bold=True))
        y = low + gap
    # the residual, around four operations on the left
    left = 22
    last = 26 + 4 * (high + gap) + high / 2
    parts.append(line([(middle, 8), (left, 8), (left, last), (middle - wide / 2 - 3, last)], INK))
    parts.append(arrow(left, last, middle - wide / 2 - 2, last))
    says = (
        "One block of the tiny model. x_BD, of type [64@data, 96], passes a norm; the product "
        "with w_DF has the type [64@data, 384@model], and so has the result of bias and silu. "
        "The product with w_FD raises an error without out_sharding, and with it has the type "
        "[64@data, 96], as the sum with x_BD has."
    )
    return figure(360, y + 2, says, parts)


def draw():
    return {"typed_block": block()}


if __name__ == "__main__":
    write(draw())
