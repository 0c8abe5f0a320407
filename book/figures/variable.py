"""Figure: a variable is an annotation and an array, which is sharded by it once.

A weight of 64 × 256 on a 2×4 mesh, when it is made and after `set_value`.
"""

from kit import INK, MODEL, arrow, figure, frame, kept, line, rect, say, text, write

SHAPE, PARTS = (64, 256), 4
WIDE, HIGH = 136, 40  # of the drawn array
MONO = ' font-family="ui-monospace,Menlo,Consolas,monospace"'


def panel(left, heading, sharded):
    """The box of the variable: its annotation above, its array on device 0 below."""
    middle = left + 84
    array_x, array_y = left + 16, 116
    held = WIDE / PARTS if sharded else WIDE
    piece = (SHAPE[0], SHAPE[1] // PARTS if sharded else SHAPE[1])
    drawn = [
        text(left, 14, heading, 13, bold=True),
        frame(left, 24, 168, 168, opacity=0.6),
        line([(left, 76), (left + 168, 76)], more=' stroke-opacity=".6"'),
        text(middle, 44, kept("out_sharding"), 12, "middle", opacity=0.8),
        f"<g{MONO}>" + text(middle, 64, kept('(None, "model")'), 13, "middle", bold=True) + "</g>",
        rect(array_x, array_y, held, HIGH, MODEL if sharded else INK, 0.75 if sharded else 0.4),
        frame(array_x, array_y, WIDE, HIGH, opacity=0.7),
        text(
            middle,
            178,
            say("device 0 holds {shape}", shape=f"{piece[0]} × {piece[1]}"),
            12,
            "middle",
        ),
    ]
    if sharded:
        for n in range(1, PARTS):
            x = array_x + WIDE / PARTS * n
            drawn.append(line([(x, array_y), (x, array_y + HIGH)], MODEL, 1.2))
        drawn += [arrow(middle, 80, middle, 112), text(middle + 8, 100, say("shards it"), 12)]
    else:
        drawn.append(text(middle, 100, say("not compared"), 12, "middle", opacity=0.8))
    return drawn


def draw():
    says = (
        "A variable as a box: above, the annotation out_sharding = (None, 'model'); below, its "
        "array. When it is made, the array is sharded by the annotation, and device 0 holds "
        "64 × 64 of 64 × 256. After set_value the same annotation is above an array that is "
        "whole on device 0."
    )
    parts = panel(1, say("When it is made"), True)
    parts += panel(191, say("After {method}", method=kept("set_value")), False)
    return {"variable": figure(360, 196, says, parts)}


if __name__ == "__main__":
    write(draw())
