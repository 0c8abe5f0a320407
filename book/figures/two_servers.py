"""Figure: the groups along `model` of two meshes over the same eight devices in two nodes.

The groups are computed from the order of devices in each mesh, as on the page. A group is a loop
through its devices: thick where it stays in a node, thin where it crosses.
"""

from itertools import pairwise

from kit import INK, MODEL, arrow, figure, frame, kept, line, say, text, write

PER_NODE = 4
MESHES = {  # rows of the mesh: the groups along model
    "mesh": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "shuffled": [[0, 2, 4, 6], [1, 3, 5, 7]],
}
INSIDE, ACROSS = "450 GB/s", "50 GB/s"  # for each GPU, as in the text

BOX, HIGH, BETWEEN = 138, 100, 84  # px of a node, and the gap between two
THICK, THIN, RADIUS = 5, 1.3, 13
CLEAR = ' stroke-opacity=".75"'
AXIS = kept(f'<tspan fill="{MODEL}" font-weight="600">model</tspan>')


def node(device):
    return device // PER_NODE


def place(device, y):
    """Even devices above, odd ones below."""
    column = device % PER_NODE // 2
    x = node(device) * (BOX + BETWEEN) + 38 + 62 * column
    return x, y + (30 if device % 2 == 0 else 70)


def link(start, end, thick):
    """From rim to rim of two devices beside or below each other."""
    (x0, y0), (x1, y1) = start, end
    if y0 == y1:
        ends = [(x0 + RADIUS, y0), (x1 - RADIUS, y1)]
    else:
        ends = [(x0, y0 + RADIUS), (x1, y1 - RADIUS)]
    return line(ends, MODEL, THICK if thick else THIN, CLEAR)


def loop(group, y):
    """The links of one group, as a closed way through its devices."""
    places = [place(device, y) for device in sorted(group)]
    if len({node(device) for device in group}) == 1:  # round the four devices of a node
        ways = [(0, 1), (2, 3), (0, 2), (1, 3)]
        return [link(places[a], places[b], True) for a, b in ways]
    drawn = []
    for a, b in pairwise(range(len(group))):
        drawn.append(link(places[a], places[b], node(group[a]) == node(group[b])))
    (left, middle), (right, _) = places[0], places[-1]  # and back, outside of the row
    outside = -1 if group[0] % 2 == 0 else 1
    rim, far = middle + outside * RADIUS, middle + outside * (RADIUS + 8)
    drawn.append(line([(right, rim), (right, far), (left, far)], MODEL, THIN, CLEAR))
    drawn.append(arrow(left, far, left, rim, MODEL, THIN))
    return drawn


def panel(name, groups, y):
    spans = [len({node(device) for device in group}) for group in groups]
    if max(spans) == 1:
        words = say("a group along {axis} spans 1 node", axis=AXIS)
    else:
        words = say("a group along {axis} spans {count} nodes", axis=AXIS, count=max(spans))
    drawn = [
        text(0, y, kept(name), 14, bold=True),
        text(78, y, words, 12),
    ]
    top = y + 14
    for number in (0, 1):
        x = number * (BOX + BETWEEN)
        drawn += [
            frame(x + 0.5, top, BOX - 1, HIGH, INK, 1.2),
            text(x + BOX / 2, top + HIGH + 15, say("node {number}", number=number), 12, "middle"),
        ]
    for group in groups:
        drawn += loop(group, top)
    for device in range(2 * PER_NODE):
        x, middle = place(device, top)
        drawn += [
            f'<circle cx="{x:g}" cy="{middle:g}" r="{RADIUS}" fill="none" stroke="currentColor"/>',
            text(x, middle + 4, str(device), 12, "middle", True),
        ]
    return drawn, top + HIGH + 15


def draw():
    parts, y = [], 14
    for name, groups in MESHES.items():
        drawn, y = panel(name, groups, y)
        parts += drawn
        y += 32
    y -= 8
    parts += [
        line([(0, y - 4), (30, y - 4)], MODEL, THICK, CLEAR),
        text(38, y, say("inside, {speed}", speed=kept(INSIDE)), 12),
        line([(158, y - 4), (188, y - 4)], MODEL, THIN, CLEAR),
        text(196, y, say("between, {speed} per GPU", speed=kept(ACROSS)), 12),
    ]
    says = (
        "Two nodes with four devices each, twice. With the order of mesh, the group of devices "
        "0 to 3 is inside node 0 and the group of 4 to 7 inside node 1, on thick links only. "
        "With the order of shuffled, the groups 0, 2, 4, 6 and 1, 3, 5, 7 each cross between the "
        "nodes twice, on thin links."
    )
    return {"two_servers": figure(360, y + 8, says, parts)}


if __name__ == "__main__":
    write(draw())
