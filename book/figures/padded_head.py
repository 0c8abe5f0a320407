"""Figure: ten columns do not divide by four devices; twelve do, and two of them are masked."""

from kit import INK, MODEL, figure, frame, kept, line, rect, say, text, write

CLASSES, PARTS = 10, 4
PADDED = PARTS * -(-CLASSES // PARTS)  # 12
CELL, HIGH, LEFT = 28, 30, 12


def cells(y, count):
    """One box a column; padding is empty and dashed."""
    drawn = []
    for n in range(count):
        x = LEFT + CELL * n
        if n < CLASSES:
            drawn += [rect(x, y, CELL, HIGH, INK, 0.22), frame(x, y, CELL, HIGH, opacity=0.5)]
            drawn.append(text(x + CELL / 2, y + 20, str(n), 12, "middle"))
        else:
            drawn.append(frame(x + 1, y + 1, CELL - 2, HIGH - 2, opacity=0.8, dashed=True))
    return drawn


def cuts(y, count):
    """Where four equal parts would end."""
    drawn = []
    for n in range(PARTS + 1):
        x = LEFT + CELL * count / PARTS * n
        gap = (8, HIGH - 6) if n * count % PARTS else (HIGH / 2, HIGH / 2)  # spares a number
        drawn.append(line([(x, y - 6), (x, y + gap[0])], MODEL, 2))
        drawn.append(line([(x, y + gap[1]), (x, y + HIGH + 6)], MODEL, 2))
    return drawn


def draw():
    sizes = {"columns": CLASSES, "devices": PARTS}
    words = say("{columns} columns ÷ {devices}: borders fall inside columns", **sizes)
    parts = [text(LEFT, 16, words, 12.5)]
    parts += cells(32, CLASSES) + cuts(32, CLASSES)
    sizes = {"columns": PADDED, "devices": PARTS, "each": PADDED // PARTS}
    parts.append(text(LEFT, 104, say("{columns} columns ÷ {devices} = {each} each", **sizes), 12.5))
    parts += cells(120, PADDED) + cuts(120, PADDED)
    for n in range(PARTS):
        middle = LEFT + CELL * PADDED / PARTS * (n + 0.5)
        words = say("devices {one}, {other}", one=n, other=n + PARTS)
        parts.append(text(middle, 174, words, 11.5, "middle"))
    parts.append(text(LEFT, 204, kept("logits"), 12, opacity=0.8))
    for n in range(PADDED):
        x = LEFT + CELL * (n + 0.5)
        parts.append(
            text(x, 224, kept(f"z{n}") if n < CLASSES else "−∞", 12, "middle", n >= CLASSES)
        )
    says = (
        f"A head with {CLASSES} columns on {PARTS} positions of model: equal parts would end "
        f"inside columns. Padded to {PADDED}, each device has {PADDED // PARTS} columns; the "
        "last two are padding, and their logits are minus infinity."
    )
    return {"padded_head": figure(360, 232, says, parts)}


if __name__ == "__main__":
    write(draw())
