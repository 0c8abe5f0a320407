"""Figure: the gradient that crosses between two nodes in HSDP, with the cast late or early.

The matrix is that of book/deeper/09d-fsdp-two-axes.md, whose tests find both numbers of bytes
in the compiled program. Bars are what a device adds up with its partner in the other node.
"""

from kit import DATA, arrow, figure, frame, kept, rect, say, text, write

ROWS, COLUMNS, BYTES = 32, 16, 4  # of the matrix; float32
NODES, DEVICES = 2, 4  # along `data`; along `fsdp`, in each node
WHOLE = ROWS * COLUMNS * BYTES

NODE, GAP = 136, 88  # px: width of a node, the network between two
BAR, HIGH, STEP = 20, 48, 32  # px: a whole gradient, and from bar to bar


def panel(top, title, order, pieces):
    """Two nodes; each device's gradient is whole, or one of `pieces`, when it is reduced."""
    size = WHOLE // pieces
    parts = [text(0, top, title, 13, bold=True), text(0, top + 17, order, 12, opacity=0.85)]
    upper = top + 28
    for node in range(NODES):
        left = node * (NODE + GAP)
        parts.append(frame(left + 0.5, upper, NODE - 1, HIGH + 34, opacity=0.5))
        name = say("node {number}", number=node)
        parts.append(text(left + NODE / 2, upper + HIGH + 48, name, 11, "middle", opacity=0.85))
        for device in range(DEVICES):
            x = left + 10 + STEP * device
            place = device % pieces * HIGH / pieces
            parts.append(frame(x, upper + 10, BAR, HIGH, opacity=0.35))
            parts.append(rect(x, upper + 10 + place, BAR, HIGH / pieces, DATA))
            number = str(node * DEVICES + device)
            parts.append(text(x + BAR / 2, upper + HIGH + 25, number, 11, "middle", opacity=0.8))
    middle, centre = NODE + GAP / 2, upper + 10 + HIGH / 2
    parts += [
        arrow(middle + 1, centre, NODE + 6, centre, DATA),
        arrow(middle - 1, centre, NODE + GAP - 6, centre, DATA),
        text(middle, centre - 10, say("{count} bytes", count=f"{size:,}"), 12, "middle", True),
        text(middle, centre + 20, say("per device"), 11, "middle", opacity=0.85),
    ]
    said = f"{title}: each device reduces {size:,} bytes with its partner in the other node"
    return parts, upper + HIGH + 52, said


def draw():
    late, bottom, first = panel(
        13,
        say("{jax} casts, after the gather", jax=kept("JAX")),
        say("backward: reduce, scatter"),
        1,
    )
    early, bottom, second = panel(
        bottom + 28, say("You cast, before the gather"), say("backward: scatter, reduce"), DEVICES
    )
    says = (
        "Two nodes of four devices each, twice, with a slow network between them; a bar is a "
        f"device's gradient when it is reduced over the network. {first}. {second}."
    )
    return {"hsdp_cast": figure(360, bottom + 4, says, late + early)}


if __name__ == "__main__":
    write(draw())
