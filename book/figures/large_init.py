"""Figure: the large model on one of eight devices, under three annotations, beside 16.9 GB."""

from kit import INK, figure, kept, line, rect, say, text, write

L, D, F = 32, 4096, 16384
PARAMETERS = 2 * L * D * F
STATES = 4  # float32 numbers a weight needs in training with Adam: itself, gradient, two moments
LIMIT = 16.9  # GB that a program can use of a TPU v5e
WAYS = [
    (say("Replicated"), 1),
    (say("Sharded along {axis}", axis=kept("model")), 4),
    (say("Sharded along both axes"), 8),
]
LEFT, SCALE, BAR, STEP = 4, 4.4, 16, 58  # px: margin, per GB, height of a bar, between rows


def draw():
    parts, told = [], []
    for n, (name, parts_of) in enumerate(WAYS):
        y = 14 + STEP * n
        weights = 4 * PARAMETERS / parts_of / 1e9
        training = STATES * weights
        told.append(f"{name}: {weights:.1f} GB of weights, {training:.1f} to train")
        parts += [
            text(LEFT, y, name, 12.5, bold=True),
            rect(LEFT, y + 8, training * SCALE, BAR, INK, 0.26),
            rect(LEFT, y + 8, weights * SCALE, BAR, INK, 0.8),
        ]
        words = say(
            "{weights} GB of weights, {training} to train",
            weights=f"{weights:.1f}",
            training=f"{training:.1f}",
        )
        beside = LEFT + training * SCALE + 6
        if beside < 150:
            parts.append(text(max(beside, LEFT + LIMIT * SCALE + 8), y + 21, words, 12))
        else:
            parts.append(text(LEFT + LIMIT * SCALE + 8, y + 38, words, 12))
        x = LEFT + LIMIT * SCALE  # the limit, beside each bar
        parts.append(line([(x, y + 4), (x, y + 30)], more=' stroke-dasharray="4 2"'))
    bottom = 14 + STEP * (len(WAYS) - 1) + 30
    parts.append(text(x, bottom + 14, kept(f"{LIMIT} GB"), 12, "middle"))
    says = f"Bars with a line at {LIMIT} GB. " + ". ".join(told) + "."
    return {"large_init": figure(360, bottom + 22, says, parts)}


if __name__ == "__main__":
    write(draw())
