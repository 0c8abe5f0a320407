"""Figures of chapter 16: what a step takes on a chip, as compiled, and two orders of a mesh.

The sizes of the first are those that the compilers' results have (companion/many_devices/compiled.json);
a test of the chapter holds them. The groups of the second are computed from the order of the mesh.
"""

from kit import DATA, INK, MODEL, figure, frame, kept, line, rect, say, strong, text, write

AVAILABLE = 15.75 * 2**30 / 1e9  # GB that a program can use of a v5e
STATE = 6.03  # GB of weights, moments and tokens on each of 16 chips
STEPS = [  # GB at the peak, state included, and GB on the host
    (say("2 sequences for each chip"), 18.32 * 2**30 / 1e9, 0),
    (say("1 sequence"), 14.75, 0),
    (say("2 sequences, layer inputs on the host"), 16.52, 2.15),
]
PX, LEFT, BAR, STEP = 10.5, 0, 24, 62  # px per GB, margin, height of a bar, distance

NODES, PER_NODE, CELL = 8, 8, 15


def memory():
    parts, top = [], 58
    limit = LEFT + AVAILABLE * PX
    parts += [rect(0, 3, 11, 11, INK, 0.5), text(16, 13, say("weights and moments"), 12)]
    parts += [rect(156, 3, 11, 11, DATA, 0.75), text(172, 13, say("everything else"), 12)]
    parts += [frame(276, 3.5, 10, 10, DATA, 1.2), text(291, 13, say("on the host"), 12)]
    for n, (name, peak, host) in enumerate(STEPS):
        y = top + STEP * n
        parts.append(text(LEFT, y - 7, name, 13))
        parts.append(rect(LEFT, y, STATE * PX - 1, BAR, INK, 0.5))
        parts.append(rect(LEFT + STATE * PX, y, (peak - STATE) * PX, BAR, DATA, 0.75))
        end = LEFT + peak * PX
        parts.append(line([(limit, y - 2), (limit, y + BAR + 2)], more=' stroke-dasharray="4 3"'))
        end = max(end, limit)  # so that the line is beside the words
        size = kept(f"{peak:.1f} GB")
        parts.append(text(end + 6, y + 17, strong(size), 13))
        if host:
            parts.append(frame(end + 68, y + 0.5, host * PX, BAR - 1, DATA, 1.2))
            parts.append(text(end + 74 + host * PX, y + 17, kept(f"{host:.1f} GB"), 12))
    bottom = top + STEP * (len(STEPS) - 1) + BAR + 20
    words = say("available: {size} GB", size=f"{AVAILABLE:.1f}")
    parts.append(text(limit, bottom, words, 12, "middle"))
    says = (
        "Three bars of memory on one TPU v5e chip, and a line at 16.9 GB. Two sequences for each "
        "chip: 6.0 GB of weights and moments and 13.6 GB of everything else, far over the line. One "
        "sequence: 6.0 and 8.7 GB, below the line. Two sequences with layer inputs on the host: "
        "6.0 and 10.5 GB, just below the line, and 2.1 GB on the host."
    )
    return figure(360, bottom + 6, says, parts)


def grid(x, y, title, in_model, in_data):
    """A row for each node; the groups of device 0 along model and along data."""
    parts = [text(x, y - 10, title, 12)]
    for device in range(NODES * PER_NODE):
        left, top = x + device % PER_NODE * CELL, y + device // PER_NODE * (CELL + 3)
        parts.append(rect(left, top, CELL - 3, CELL - 3, INK, 0.16, 2))
        if device in in_model and device in in_data:  # device 0 is in both
            parts.append(rect(left, top, (CELL - 3) / 2, CELL - 3, MODEL))
            parts.append(rect(left + (CELL - 3) / 2, top, (CELL - 3) / 2, CELL - 3, DATA))
        elif device in in_model or device in in_data:
            colour = MODEL if device in in_model else DATA
            parts.append(rect(left, top, CELL - 3, CELL - 3, colour, 1, 2))
    return parts


def order():
    row, column = range(PER_NODE), range(0, NODES * PER_NODE, PER_NODE)
    top = 68
    names = [kept(f'<tspan fill="{MODEL}" font-weight="600">model</tspan>')]
    names += [kept(f'<tspan fill="{DATA}" font-weight="600">data</tspan>')]
    parts = [text(0, 13, say("A row is a node of eight GPUs"), 12)]
    words = say(
        "the group of device 0 along {model} and along {data}", model=names[0], data=names[1]
    )
    parts.append(text(0, 30, words, 12))
    parts += grid(44, top, kept("data, model"), row, column)
    parts += grid(216, top, kept("model, data"), column, row)
    for node in range(NODES):
        y = top + node * (CELL + 3) + CELL - 5
        parts.append(text(38, y, say("node {n}", n=node), 11, "end", opacity=0.75))
    bottom = top + NODES * (CELL + 3) + 12
    parts.append(text(44, bottom, say("sums inside a node"), 12))
    parts.append(text(216, bottom, say("sums between nodes"), 12))
    says = (
        "Two grids of 64 GPUs, a row for each node of eight. With the axes data, model the group "
        "of device 0 along model is one row, inside a node. With model, data it is one column, "
        "with one device in each node."
    )
    return figure(360, bottom + 8, says, parts)


def draw():
    return {"compile_ahead_memory": memory(), "compile_ahead_order": order()}


if __name__ == "__main__":
    write(draw())
