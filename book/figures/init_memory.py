"""Figure: arrays on one device while the large model is made, in three ways.

Chapter 3's large config: two matrices, each with all 32 layers in one array, float32, on a 2×4
mesh. Scratch space of the programs is left out; it belongs to a compiler.
"""

from kit import DATA, INK, figure, kept, line, rect, say, text, write

L, D, F, DEVICES = 32, 4096, 16384, 8
WHOLE = 4 * L * D * F / 1e9  # GB of one matrix, all layers: 8.6
PIECE = WHOLE / DEVICES
LIMIT = 16.9  # GB that a program can use of a TPU v5e
WAYS = [  # heading, where, [(moment, GB that are whole, GB in pieces)]
    (
        say("One device"),
        say("on device 0"),
        [(say("fill"), WHOLE, 0.0), (say("fill"), 2 * WHOLE, 0.0)],
    ),
    (
        say("Eager sharding"),
        say("on every device"),
        [
            (say("fill"), WHOLE, 0.0),
            (say("shard"), 0.0, PIECE),
            (say("fill"), WHOLE, PIECE),
            (say("shard"), 0.0, 2 * PIECE),
        ],
    ),
    (
        say("Under {function}", function=kept("jax.jit")),
        say("on every device"),
        [(say("create"), 0.0, 2 * PIECE)],
    ),
]
FLOOR, SCALE, BAR, STEP = 168, 6.6, 28, 36  # px: zero, per GB, a bar, from bar to bar


def draw():
    parts, x = [], 4
    for heading, where, moments in WAYS:
        wide = max(STEP * len(moments), 84)
        parts += [text(x, 14, heading, 12.5, bold=True), text(x, 30, where, 11.5, opacity=0.8)]
        parts.append(line([(x - 2, FLOOR), (x + wide - 6, FLOOR)], more=' stroke-opacity=".6"'))
        for n, (moment, whole, pieces) in enumerate(moments):
            left, base = x + STEP * n, FLOOR
            for size, colour, opacity in [(pieces, DATA, 0.9), (whole, INK, 0.45)]:
                if size:
                    base -= size * SCALE
                    parts.append(rect(left, base, BAR, size * SCALE, colour, opacity))
            middle = left + BAR / 2
            above = base - 5
            if abs(above - (FLOOR - LIMIT * SCALE)) < 12:
                above = FLOOR - LIMIT * SCALE - 14
            parts.append(text(middle, above, f"{whole + pieces:.1f}", 12, "middle", True))
            parts.append(text(middle, FLOOR + 15, moment, 11.5, "middle"))
        x += wide + 14
    limit = FLOOR - LIMIT * SCALE
    parts.append(line([(2, limit), (358, limit)], more=' stroke-dasharray="4 3" opacity=".75"'))
    parts.append(text(358, limit - 4, kept(f"{LIMIT} GB"), 11.5, "end"))
    key = FLOOR + 38
    parts += [rect(4, key - 9, 10, 10, INK, 0.45), text(20, key, say("whole"), 11.5)]
    parts += [rect(70, key - 9, 10, 10, DATA, 0.9), text(86, key, say("pieces"), 11.5)]
    parts.append(text(140, key, say("GB of arrays on a device"), 11.5, opacity=0.8))
    says = (
        f"GB on one device while the large model is made. On one device: {WHOLE:.1f}, then "
        f"{2 * WHOLE:.1f}, above {LIMIT}. Eager sharding: {WHOLE:.1f}, {PIECE:.1f}, "
        f"{WHOLE + PIECE:.1f}, {2 * PIECE:.1f}. Under jax.jit: {2 * PIECE:.1f}."
    )
    return {"init_memory": figure(360, FLOOR + 46, says, parts)}


if __name__ == "__main__":
    write(draw())
