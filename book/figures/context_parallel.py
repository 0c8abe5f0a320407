"""Figures of chapter 14: what each device holds in ring attention, and in Ulysses.

Both are drawn for the page's mesh of four devices along `seq`. What device 0 starts with is orange,
the colour of the second mesh axis; the rest is grey.
"""

from kit import INK, MODEL, arrow, figure, frame, kept, line, rect, say, text, write

N = 4  # devices that share a sequence
FOLLOWED = 0


def source_of(device, number):
    """Whose keys a device has after so many messages, as in the page's `ring`."""
    return (device - number) % N


def block(x, y, width, high, words, followed):
    fill = (MODEL, 0.42) if followed else (INK, 0.14)
    middle = x + width / 2
    return [
        rect(x, y, width, high, *fill, 2),
        text(middle, y + high / 2 + 4.5, words, 13, "middle", followed),
    ]


LEFT, COLUMN, WIDE, HIGH, ROW = 78, 72, 58, 24, 46  # px of the ring


def ring():
    parts = [text(0, 34, say("queries"), 12)]
    for device in range(N):
        x = LEFT + COLUMN * device
        name = say("device {number}", number=device)
        parts.append(text(x + WIDE / 2, 12, name, 12, "middle", True))
        parts += [frame(x, 19, WIDE, 22, opacity=0.6)]
        parts.append(text(x + WIDE / 2, 34.5, device, 13, "middle"))
    parts.append(line([(0, 51), (LEFT + COLUMN * N - COLUMN + WIDE, 51)], INK, 0.6))
    for number in range(N):
        y = 62 + ROW * number
        words = say("keys") if number == 0 else say("message {number}", number=number)
        parts.append(text(0, y + 16, words, 12))
        for device in range(N):
            source = source_of(device, number)
            x = LEFT + COLUMN * device
            parts += block(x, y, WIDE, HIGH, source, source == FOLLOWED)
            if number < N - 1:
                parts += passed_on(device, y + HIGH, source == FOLLOWED)
    says = "; ".join(
        f"after {number} messages blocks {', '.join(str(source_of(i, number)) for i in range(N))}"
        for number in range(N)
    )
    told = (
        f"Ring attention on {N} devices. Each keeps its own block of queries. Of the keys and values, "
        f"devices 0 to {N - 1} hold, {says}. Lines lead from each block to the next device."
    )
    return figure(360, 62 + ROW * (N - 1) + HIGH + 6, told, parts)


def passed_on(device, y, followed):
    """The way of a block to the next device, and from the last one back to the first."""
    below = y + ROW - HIGH - 3
    x = LEFT + COLUMN * device + WIDE / 2
    colour, width = (MODEL, 2) if followed else (INK, 1)
    if device < N - 1:
        return [line([(x, y + 3), (x + COLUMN, below)], colour, width)]
    edge, start = x + WIDE / 2 + 5, LEFT - 8
    return [
        line([(x, y + 3), (edge, y + (below - y) / 2)], colour, width, ' stroke-dasharray="3 2"'),
        line(
            [(start, y + (below - y) / 2), (LEFT + WIDE / 2, below)],
            colour,
            width,
            ' stroke-dasharray="3 2"',
        ),
    ]


TILE, GAP, GRID_TOP = 32, 104, 44  # px of Ulysses


def grid(left, owner):
    """Tokens down, heads across; each tile has the number of the device that holds it."""
    parts = []
    for row in range(N):
        for column in range(N):
            device = owner(row, column)
            x, y = left + TILE * column, GRID_TOP + TILE * row
            parts += block(x, y, TILE - 2, TILE - 2, device, device == FOLLOWED)
    return parts


def before(row, column):
    """Who has this block of tokens, with this group of heads."""
    return row


def after(row, column):
    return column


def ulysses():
    left = 0
    right = TILE * N + GAP
    middle = TILE * N + GAP / 2 - 1
    parts = [text(left, 12, say("All heads, some tokens"), 12, bold=True)]
    parts.append(text(360, 12, say("All tokens, some heads"), 12, "end", True))
    parts += grid(left, before) + grid(right, after)
    for at in (left, right):
        parts.append(text(at, 36, say("heads →"), 11, opacity=0.85))
    bottom = GRID_TOP + TILE * N
    parts.append(text(left, bottom + 14, say("tokens ↓"), 11, opacity=0.85))
    for y, way, words in [(64, 1, say("q, k, v")), (134, -1, say("output"))]:
        ends = (middle - 30 * way, y, middle + 30 * way, y)
        parts += [arrow(*ends), text(middle, y - 8, words, 11, "middle")]
        parts.append(text(middle, y + 17, kept("all_to_all"), 11, "middle"))
    told = (
        f"Two grids of {N} blocks of tokens by {N} groups of heads. Before, each of the {N} devices "
        "holds one block of tokens with all heads, which is a row of the grid. The first all_to_all, "
        "of queries, keys and values, gives each device all tokens with one group of heads, which is "
        "a column. The second, of the output, goes back."
    )
    return figure(360, bottom + 20, told, parts)


def draw():
    return {"ring_attention": ring(), "ulysses": ulysses()}


if __name__ == "__main__":
    write(draw())
