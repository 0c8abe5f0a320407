"""One layer of FSDP with freed weights on one device, in the order of the traced program.

The order is that which chapter 9 reads from the traced program and asserts; time runs downwards,
one operation a line. Grey bars are weights whole in memory, outlines a device's own gradients.
"""

from typing import NamedTuple

from kit import DATA, INK, figure, frame, kept, line, rect, say, text, write


class Operation(NamedTuple):
    lane: str  # "wire" or "compute"
    name: str


FORWARD = [
    Operation("wire", say("gather {array}", array=kept("w_DF"))),
    Operation("wire", say("gather {array}", array=kept("w_FD"))),
    Operation("compute", "h"),
    Operation("compute", "y"),
]
BACKWARD = [
    Operation("wire", say("gather {array}", array=kept("w_DF"))),
    Operation("wire", say("gather {array}", array=kept("w_FD"))),
    Operation("compute", say("{array}, again", array="h")),
    Operation("compute", kept("dw_FD")),
    Operation("compute", kept("dh")),
    Operation("compute", kept("dw_DF")),
    Operation("compute", kept("dx")),
    Operation("wire", say("scatter {array}", array=kept("dw_FD"))),
    Operation("wire", say("scatter {array}", array=kept("dw_DF"))),
]
# What is whole, from its first line to its last, counted over both lists
WHOLE = {
    "w_DF": [(0, 2), (4, 10)],
    "w_FD": [(1, 3), (5, 8)],
    "dw_FD": [(7, 11)],
    "dw_DF": [(9, 12)],
}
STEP, HIGH, TOP = 21, 17, 46  # px: distance and height of lines
LANES = {"wire": (20, 96), "compute": (124, 70)}  # where a lane begins, how wide it is
BARS, BAR, COLUMN = 205, 20, 41  # whole arrays: where they begin, width, distance
GAP = 16  # between forward and backward


def y_of(n):
    return TOP + STEP * n + (GAP if n >= len(FORWARD) else 0)


def draw():
    operations = [*FORWARD, *BACKWARD]
    parts = [
        text(LANES["wire"][0], 13, say("links"), 12, bold=True),
        text(LANES["compute"][0], 13, say("arithmetic"), 12, bold=True),
        text(BARS - 4, 13, say("whole in memory"), 12, bold=True),
    ]
    for n, operation in enumerate(operations):
        x, wide = LANES[operation.lane]
        fill = (DATA, 0.4) if operation.lane == "wire" else (INK, 0.2)
        parts.append(rect(x, y_of(n), wide, HIGH, *fill, 2))
        parts.append(text(x + wide / 2, y_of(n) + 12.7, operation.name, 12, "middle"))
    for column, (name, lives) in enumerate(WHOLE.items()):
        x = BARS + COLUMN * column
        parts.append(text(x + BAR / 2, 34, kept(name), 11, "middle"))
        for first, last in lives:
            top, bottom = y_of(first), y_of(last) + HIGH
            if name.startswith("d"):
                parts.append(frame(x + 0.5, top, BAR - 1, bottom - top, INK, 1, 0.7))
            else:
                parts.append(rect(x, top, BAR, bottom - top, INK, 0.32, 2))
    edge = y_of(len(FORWARD)) - GAP / 2 - 2
    parts.append(line([(0, edge), (360, edge)], more=' opacity=".4"'))
    for first, last, phase in [
        (0, len(FORWARD), say("forward")),
        (len(FORWARD), len(operations), say("backward")),
    ]:
        middle = (y_of(first) + y_of(last - 1) + HIGH) / 2
        words = text(0, 0, phase, 12, "middle", opacity=0.85)
        parts.append(f'<g transform="translate(11 {middle:g}) rotate(-90)">{words}</g>')
    names = ", ".join(operation.name for operation in FORWARD)
    names_back = ", ".join(operation.name for operation in BACKWARD)
    says = (
        f"One layer, time downwards. Forward: {names}. Backward: {names_back}. Bars show from when "
        "to when w_DF and w_FD are whole in memory, once in each direction, and the gradients of "
        "both from their computation to their scatter."
    )
    return {"fsdp_layer": figure(360, y_of(len(operations)), says, parts)}


if __name__ == "__main__":
    write(draw())
