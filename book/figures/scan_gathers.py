"""Figure: which layers a device gathers in each step of a scan over a stack of six.

Chapter 3's small layers, as compiled for H100 and TPU v5e: sharded by layers, all are gathered in each
step; sharded by features, one.
"""

from kit import DATA, figure, frame, kept, rect, say, text, write

L = 6
CELL, LEFT = 19, 34


def panel(x, heading, count, all_layers):
    detail = say("{count} layers gathered", count=count)
    drawn = [text(x, 14, heading, 12.5, bold=True), text(x, 31, detail, 11.5)]
    grid = x + LEFT
    for layer in range(L):
        y = 58 + CELL * layer
        drawn.append(text(grid - 4, y + 14, str(layer), 11.5, "end"))
        for step in range(L):
            at = grid + CELL * step
            drawn.append(frame(at, y, CELL, CELL, opacity=0.3))
            if all_layers or step == layer:
                opacity = 0.95 if step == layer else 0.35
                drawn.append(rect(at + 1.5, y + 1.5, CELL - 3, CELL - 3, DATA, opacity))
    bottom = 58 + CELL * L
    for step in range(L):
        drawn.append(text(grid + CELL * (step + 0.5), bottom + 15, str(step), 11.5, "middle"))
    drawn.append(text(grid, bottom + 31, say("step of the scan"), 11.5, opacity=0.8))
    drawn.append(text(x, 50, say("layer"), 11.5, opacity=0.8))
    return drawn


def draw():
    parts = panel(2, say("Layers over {axis}", axis=kept("data")), L * L, True)
    parts += panel(188, say("Features over {axis}", axis=kept("data")), L, False)
    key = 58 + CELL * L + 52
    parts += [
        rect(36, key - 9, 10, 10, DATA, 0.95),
        text(52, key, say("gathered and in use"), 11.5),
    ]
    parts += [
        rect(188, key - 9, 10, 10, DATA, 0.35),
        text(204, key, say("gathered, not used"), 11.5),
    ]
    says = (
        f"Layers gathered in each of {L} steps. Layers over data: all {L} in every step, "
        f"{L * L} in all. Features over data: only the layer in use, {L} in all."
    )
    return {"scan_gathers": figure(360, key + 8, says, parts)}


if __name__ == "__main__":
    write(draw())
