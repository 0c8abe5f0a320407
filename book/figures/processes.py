"""Figures: two processes and one mesh, and which process must load which rows of a batch.

Rows are computed from the order of devices in each mesh, as the chapter computes them from shardings.
"""

from itertools import pairwise

import numpy as np
from kit import DATA, INK, MODEL, figure, frame, kept, line, rect, say, text, write

DEVICES, PER_PROCESS, ROWS = 8, 4, 16
MESHES = [  # its shape, and what its axes are called
    ((8,), ("data",)),
    ((2, 4), ("data", "model")),
    ((2, 4), ("model", "data")),
]
COLOUR = {"data": DATA, "model": MODEL}


def axis(name):
    return kept(f'<tspan fill="{COLOUR[name]}" font-weight="600">{name}</tspan>')


def processes_mesh():
    """Two boxes with four devices each, an axis through all, and an array of 16 numbers below."""
    box, gap, drawn = 164, 32, []
    middle = box + gap / 2
    for number in range(DEVICES // PER_PROCESS):
        x = number * (box + gap)
        drawn += [
            text(x + box / 2, 14, say("process {number}", number=number), 13, "middle", bold=True),
            text(x + box / 2, 31, kept("program.py"), 12, "middle"),
            frame(x + 0.5, 40, box - 1, 116, INK, 1.2),
        ]
    wire = 78
    starts = [n // PER_PROCESS * (box + gap) + 7 + n % PER_PROCESS * 39 for n in range(DEVICES)]
    for one, other in pairwise(starts):
        drawn.append(line([(one + 33, wire), (other, wire)], DATA, 2.4))
    drawn.append(text(middle, wire - 8, axis("data"), 12, "middle"))
    for device in range(DEVICES):
        x = starts[device]
        drawn += [
            rect(x, wire - 14, 33, 28, DATA, 0.18, 3),
            frame(x, wire - 14, 33, 28, DATA, 1.2),
            text(x + 16.5, wire + 4, f"{device}", 13, "middle"),
        ]
        share = ROWS // DEVICES
        for part in range(share):
            left = x + part * 16.5
            drawn.append(frame(left, 112, 16.5, 20, INK, 0.8, 0.6))
            drawn.append(text(left + 8.2, 126, f"{device * share + part}", 11, "middle"))
    for number in range(DEVICES // PER_PROCESS):
        x = number * (box + gap) + box / 2
        drawn.append(text(x, 149, say("addressable here"), 12, "middle", opacity=0.8))
    sizes = {"devices": DEVICES, "numbers": ROWS}
    words = say("one mesh of {devices} devices, one array of {numbers} numbers", **sizes)
    drawn.append(text(0, 176, words, 12))
    says = (
        "Two boxes, process 0 and process 1, run the same program, with four devices each. One mesh "
        "axis, data, runs through all eight devices. Numbers 0 to 7 of an array are in process 0, "
        "8 to 15 in process 1."
    )
    return figure(360, 182, says, drawn)


def rows_of(shape, names):
    """For each device, the first and last row that it holds with the spec P("data")."""
    position = np.argwhere(np.ones(shape))[:, names.index("data")]
    share = ROWS // shape[names.index("data")]
    return [(place * share, (place + 1) * share - 1) for place in position.tolist()]


def processes_rows():
    drawn, y = [], 14
    for shape, names in MESHES:
        words = " × ".join(f"{axis(name)} {size}" for name, size in zip(names, shape))
        drawn.append(text(0, y, kept(words), 13))
        held, across = rows_of(shape, names), shape[-1]
        wide, high = (43, 28) if len(shape) == 1 else (56, 28)
        for device, (first, last) in enumerate(held):
            row, column = divmod(device, across)
            x, top = column * wide, y + 8 + row * high
            shade = 0.12 + 0.4 * first / ROWS
            drawn += [
                rect(x, top, wide - 3, high - 3, DATA, shade, 3),
                text(x + wide / 2 - 1.5, top + 17, f"{first}–{last}", 12, "middle"),
            ]
        if len(shape) == 1:
            border = PER_PROCESS * wide - 1.5
            ends = [(border, y + 4), (border, y + 8 + high)]
            lanes = [(0, y + 50), (PER_PROCESS * wide, y + 50)]
        else:
            border = y + 8 + high - 1.5
            ends = [(0, border), (4 * wide + 4, border)]
            lanes = [(4 * wide + 6, y + 25), (4 * wide + 6, y + 25 + high)]
        drawn.append(line(ends, INK, 1.4, ' stroke-dasharray="4 3"'))
        for process, (x, below) in enumerate(lanes):
            mine = held[process * PER_PROCESS : (process + 1) * PER_PROCESS]
            count = len({row for first, last in mine for row in range(first, last + 1)})
            words = say("process {number}: {count} rows", number=process, count=count)
            drawn.append(text(x, below, words, 12))
        y += 8 + len(shape) * high + (36 if len(shape) == 1 else 22)
    says = (
        "Three meshes of eight devices, four of each of two processes, with the rows of a batch of "
        "16 that each device holds. On data 8 and on data 2 by model 4 each process loads 8 rows, on "
        "model 2 by data 4 each loads all 16."
    )
    return figure(360, y - 8, says, drawn)


def draw():
    return {"processes_mesh": processes_mesh(), "processes_rows": processes_rows()}


if __name__ == "__main__":
    write(draw())
