"""Figure of the page on the price of a token: arithmetic and reading in a step of decode on an H100.

The times are computed by the page's `arithmetic_seconds` and `reading_seconds`.
"""

from kit import DATA, INK, MODEL, figure, kept, rect, say, strong, text, write
from page_cells import run_cells

PAGE = run_cells("15b-token-price", "sizes", "reading", "price", "operations", "one-more")
FULL = 8192
STEPS = [(295, 0), (295, 1024), (PAGE["price"](FULL)[0], FULL)]  # rows, tokens of context
PX, BAR, STEP, TOP = 11.5, 13, 58, 52  # px per ms, height of a bar, distance


def milliseconds(rows, context):
    """Arithmetic, reading the weights, reading the caches."""
    arithmetic = PAGE["arithmetic_seconds"](rows, context)
    weights = PAGE["reading_seconds"](0, context)
    caches = PAGE["reading_seconds"](rows, context) - weights
    return 1e3 * arithmetic, 1e3 * weights, 1e3 * caches


def draw():
    parts, told = [], []
    keys = [
        (0, MODEL, 0.9, say("arithmetic")),
        (96, INK, 0.5, say("reading weights")),
        (218, DATA, 0.75, say("reading the cache")),
    ]
    for x, colour, opacity, words in keys:
        parts += [rect(x, 3, 11, 11, colour, opacity), text(x + 16, 13, words, 12)]
    for n, (rows, context) in enumerate(STEPS):
        y = TOP + STEP * n
        words = say("{rows} rows, context {tokens}", rows=rows, tokens=f"{context:,}")
        arithmetic, weights, caches = milliseconds(rows, context)
        read = weights + caches
        parts.append(text(0, y - 7, words, 13))
        parts.append(rect(0, y, arithmetic * PX, BAR, MODEL, 0.9))
        parts.append(text(arithmetic * PX + 6, y + 11, kept(f"{arithmetic:.1f} ms"), 12))
        below = y + BAR + 2
        parts.append(rect(0, below, weights * PX - 1, BAR, INK, 0.5))
        if caches:
            parts.append(rect(weights * PX, below, caches * PX, BAR, DATA, 0.75))
        parts.append(text(read * PX + 6, below + 11, strong(kept(f"{read:.1f} ms")), 12))
        told.append(
            f"{rows} rows with a context of {context:,} tokens: {arithmetic:.1f} ms of arithmetic, "
            f"{read:.1f} ms of reading, of which {caches:.1f} are for the cache."
        )
    says = "Pairs of bars for a step of decode on an H100. " + " ".join(told)
    return {"token_price": figure(360, TOP + STEP * (len(STEPS) - 1) + 2 * BAR + 8, says, parts)}


if __name__ == "__main__":
    write(draw())
