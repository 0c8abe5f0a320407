"""The KV cache of chapter 15: rows of unequal lengths, after prefill and after six steps of decode.

A line is a row of the cache, a square a position. Blue positions are prompts, orange ones are new.
Grey outlines are values of padding, which no token sees.
"""

from kit import DATA, INK, figure, frame, rect, say, text, write

LENGTHS = [5, 9, 3, 12, 7, 10, 4, 8]  # of the prompts
PADDED, T, STEPS = 12, 32, 6
NEW = "var(--ms-model,#d55e00)"
LEFT, SIZE, STEP, ROW = 22, 8, 9.4, 12  # px


def grid(top, steps):
    """The cache after so many steps of decode, and the query of each row's last token."""
    parts = []
    for row, length in enumerate(LENGTHS):
        y = top + ROW * row
        parts.append(text(LEFT - 7, y + 8, str(row), 11, "end", opacity=0.8))
        for position in range(T):
            x = LEFT + STEP * position
            if position < length:
                parts.append(rect(x, y, SIZE, SIZE, DATA, 0.85))
            elif position < length + steps:
                parts.append(rect(x, y, SIZE, SIZE, NEW, 0.9))
            elif position < PADDED:
                parts.append(frame(x + 0.5, y + 0.5, SIZE - 1, SIZE - 1, INK, 0.9, 0.7, True))
            else:
                parts.append(rect(x, y, SIZE, SIZE, INK, 0.13))
    return parts


def axis(y):
    parts = []
    for position in (0, PADDED, 24, T - 1):
        middle = LEFT + STEP * position + SIZE / 2
        parts.append(text(middle, y, str(position), 11, "middle", opacity=0.8))
    return parts


def draw():
    high = ROW * len(LENGTHS) - 4
    parts = [text(0, 14, say("After prefill"), 14, bold=True), *grid(24, 0), *axis(24 + high + 13)]
    second = 24 + high + 46
    words = say("After {count} steps of decode", count=STEPS)
    parts += [text(0, second - 10, words, 14, bold=True), *grid(second, STEPS)]
    parts += axis(second + high + 13)
    y = second + high + 26
    keys = [
        (0, rect(0, y, 10, 10, DATA, 0.85), say("prompt")),
        (76, rect(76, y, 10, 10, NEW, 0.9), say("new")),
        (134, frame(134.5, y + 0.5, 9, 9, INK, 0.9, 0.7, True), say("padding")),
        (216, rect(216, y, 10, 10, INK, 0.13), say("empty")),
    ]
    for x, drawn, words in keys:
        parts += [drawn, text(x + 15, y + 9, words, 12)]
    ends = [length + STEPS for length in LENGTHS]
    says = (
        f"A cache with {len(LENGTHS)} rows and {T} positions, drawn twice. After prefill, the rows "
        f"hold prompts of {', '.join(map(str, LENGTHS))} positions, and padding up to position "
        f"{PADDED - 1}. After {STEPS} steps of decode they hold {', '.join(map(str, ends))} "
        f"positions: each row has grown by {STEPS} new positions at its own end, over the padding."
    )
    return {"kv_cache": figure(360, y + 14, says, parts)}


if __name__ == "__main__":
    write(draw())
