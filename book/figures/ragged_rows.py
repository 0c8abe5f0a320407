"""Figure of the page on ragged experts: rows of three devices, before and after an exchange.

The numbers of rows, and where they begin, are those of the page's example.
"""

import numpy as np
from kit import DATA, INK, MODEL, figure, line, rect, say, text, write
from page_cells import run_cells

PAGE = run_cells("13a-ragged-experts", "imports", "starts")
SIZES, ON_SENDER, ON_RECEIVER = (
    np.array(PAGE[name]) for name in ("sizes", "on_sender", "on_receiver")
)
N, LEFT, CELL, HIGH, STEP = 3, 4, 25, 22, 124  # devices; px
FILL = [(DATA, 0.4), (MODEL, 0.4), (INK, 0.15)]  # of the rows that a device sends
ABOVE, BELOW = 56, 146  # px: the top of the senders' rows, and of the receivers'


def block(device, first, count, y, sender, other):
    """Rows that lie one after another, each with the number of the other device."""
    drawn = []
    for n in range(first, first + count):
        x = LEFT + STEP * device + CELL * n
        drawn += [
            rect(x, y, CELL - 2, HIGH, *FILL[sender]),
            text(x + CELL / 2 - 1, y + 16, str(other), 13, "middle", True),
        ]
    return drawn


def counted(device, count, y):
    """The numbers of a device's rows, from 0."""
    x = LEFT + STEP * device + CELL / 2 - 1
    return [text(x + CELL * n, y, str(n), 10, "middle", opacity=0.8) for n in range(count)]


def middle(device, first, count):
    return LEFT + STEP * device + CELL * (first + count / 2) - 1


def draw():
    parts = [text(0, 12, say("On the sender, with the receiver's number"), 12, bold=True)]
    for device in range(N):
        x = LEFT + STEP * device
        parts.append(text(x, 33, say("device {number}", number=device), 12))
        parts += counted(device, SIZES[device].sum(), ABOVE - 5)
        parts += counted(device, SIZES[:, device].sum(), BELOW + HIGH + 13)
    for sender in range(N):
        for receiver in range(N):
            count = SIZES[sender, receiver]
            if not count:
                continue
            begin, put = ON_SENDER[sender, receiver], ON_RECEIVER[sender, receiver]
            parts += block(sender, begin, count, ABOVE, sender, receiver)
            parts += block(receiver, put, count, BELOW, sender, sender)
            ends = [
                (middle(sender, begin, count), ABOVE + HIGH + 2),
                (middle(receiver, put, count), BELOW - 2),
            ]
            parts.append(line(ends, FILL[sender][0], 1.6))
    parts.append(
        text(0, BELOW + HIGH + 34, say("On the receiver, with the sender's number"), 12, bold=True)
    )
    rows = "; ".join(
        f"device {sender} sends {', '.join(map(str, SIZES[sender]))}" for sender in range(N)
    )
    says = (
        f"Rows of three devices before and after an exchange. To devices 0, 1 and 2, {rows}. On the "
        "receiver, rows are ordered by sender: those of device 0 come first, then those of device 1, "
        "then those of device 2. Lines lead from each block of rows to where it arrives."
    )
    return {"ragged_rows": figure(372, BELOW + HIGH + 40, says, parts)}


if __name__ == "__main__":
    write(draw())
