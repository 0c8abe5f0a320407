"""Figure of chapter 13: the queues of tokens for experts, on eight devices, through two all-to-alls.

The lengths of the queues are those of the page's tokens. A column is a device, a row one queue of Q
slots, filled as far as tokens are in it. A row is an expert, or after the first exchange the device
that the tokens come from. Blue are the tokens of one device, grey those of the others. A number says
how many tokens are meant for a blue queue, and after the first panel how many it has, at most Q.
"""

import numpy as np
from kit import DATA, INK, MODEL, figure, frame, kept, rect, say, text, write
from page_cells import run_cells

PAGE = run_cells("13-experts", "imports", "params", "route", "capacity")
ROUTES = np.reshape(PAGE["experts_BR"], (8, -1))  # of each device
LENGTHS = np.array([np.bincount(routes, minlength=8) for routes in ROUTES])  # (devices, experts)
Q = PAGE["capacity"](64, 1.25)
N, LEFT, COLUMN, WIDE, ROW = 8, 53, 38.3, 20, 12  # devices; px: a slot is one wide
FOLLOWED = 2  # the device whose tokens are blue


def queue(x, y, length, followed, overflows):
    """One queue: the slots in use, an outline of all slots, an edge if something was dropped."""
    fill = (DATA, 0.9) if followed else (INK, 0.38)
    used = WIDE * min(length, Q) / Q
    drawn = [rect(x, y, used, ROW - 2, *fill), frame(x, y, WIDE, ROW - 2, opacity=0.35)]
    if overflows:
        drawn.append(rect(x + WIDE, y - 0.5, 3, ROW - 1, MODEL))
    return drawn


def panel(y, title, first_row, lengths, followed, overflows=False):
    """All devices: lengths[device][row], the name of row 0, and which of these queues are blue."""
    drawn = [text(0, y, title, 12, bold=True)]
    drawn.append(text(LEFT - 6, y + 16, say("device"), 11, "end", opacity=0.8))
    for row in range(N):
        name = str(row) if row else first_row
        drawn.append(text(LEFT - 6, y + 30 + ROW * row, name, 11, "end", opacity=0.8))
    for device in range(N):
        x = LEFT + COLUMN * device
        drawn.append(text(x + WIDE / 2, y + 16, str(device), 11, "middle", opacity=0.8))
        for row in range(N):
            length = lengths[device][row]
            over = overflows and length > Q
            drawn += queue(x, y + 21 + ROW * row, length, followed(device, row), over)
            if followed(device, row):
                count = kept(str(length if overflows else min(length, Q)))
                drawn.append(text(x + WIDE + 4, y + 30 + ROW * row, count, 11, bold=over))
    return drawn, y + 21 + ROW * N


def draw():
    parts, y = panel(
        14,
        say("Filled: on each device, a queue for each expert"),
        say("expert {n}", n=0),
        LENGTHS,
        lambda device, row: device == FOLLOWED,
        overflows=True,
    )
    dropped = np.maximum(LENGTHS - Q, 0).sum(1)
    for device in range(N):
        x = LEFT + COLUMN * device + WIDE / 2
        parts.append(text(x, y + 13, f"−{dropped[device]}", 12, "middle", True))
    received = say("After the first {name}: a queue from each device", name=kept("all_to_all"))
    drawn, y = panel(
        y + 42, received, say("from {n}", n=0), LENGTHS.T, lambda device, row: row == FOLLOWED
    )
    parts += drawn
    returned = say("After the second: results, back in their places")
    drawn, y = panel(
        y + 30, returned, say("expert {n}", n=0), LENGTHS, lambda device, row: device == FOLLOWED
    )
    parts += drawn
    says = (
        f"Eight devices in three states, with eight queues of {Q} slots each. Filled: a device has a "
        f"queue for each expert, some of them full and some nearly empty; the routes dropped on "
        f"devices 0 to 7 are {', '.join(map(str, dropped))}. The eight queues of device {FOLLOWED} "
        f"are blue. After the first all_to_all, each device has one blue queue, that of device "
        f"{FOLLOWED}, and seven grey ones from the others. After the second, all blue queues are on "
        f"device {FOLLOWED} again."
    )
    return {"expert_queues": figure(360, y + 6, says, parts)}


if __name__ == "__main__":
    write(draw())
