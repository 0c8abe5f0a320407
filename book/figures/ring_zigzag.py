"""Figure of the balanced ring: which pairs of half blocks each device computes."""

from kit import DATA, INK, figure, line, rect, say, text, write

N = 4  # devices on the ring
CELL = 17
LEFT, TOP = 22, 40


def contiguous(device):
    return [2 * device, 2 * device + 1]


def zigzag(device):
    return [device, 2 * N - 1 - device]


def grid(left, held, title):
    """Rows and columns in the order in which devices hold half blocks."""
    order = [(device, half) for device in range(N) for half in held(device)]
    parts = [text(left, 14, title, 12, bold=True)]
    counts = [0] * N
    for row, (device, query) in enumerate(order):
        for column, (source, key) in enumerate(order):
            x, y = left + column * CELL, TOP + row * CELL
            if query < key:
                parts.append(rect(x, y, CELL - 1.5, CELL - 1.5, INK, 0.08, 1))
                continue
            counts[device] += 1
            parts.append(rect(x, y, CELL - 1.5, CELL - 1.5, DATA, 0.35, 1))
            number = str((device - source) % N)
            parts.append(text(x + CELL / 2 - 0.75, y + 12, number, 11, "middle"))
    for device in range(N):
        middle = TOP + (2 * device + 1) * CELL
        parts.append(text(left - 5, middle + 3, str(device), 11, "end"))
        parts.append(text(left + 2 * N * CELL + 4, middle + 3, str(counts[device]), 12, bold=True))
        at = left + (2 * device + 1) * CELL
        parts.append(text(at, TOP - 6, str(device), 11, "middle"))
        if device:
            y, x = TOP + 2 * device * CELL - 0.75, left + 2 * device * CELL - 0.75
            parts.append(line([(left, y), (left + 2 * N * CELL, y)], INK))
            parts.append(line([(x, TOP), (x, TOP + 2 * N * CELL)], INK))
    return parts, counts


def both():
    first, slow = grid(LEFT, contiguous, say("contiguous"))
    second, even = grid(LEFT + 2 * N * CELL + 44, zigzag, say("zigzag"))
    bottom = TOP + 2 * N * CELL + 18
    words = say("rows: device of the queries; columns: of the keys; right: pairs")
    parts = [*first, *second, text(LEFT, bottom, words, 11)]
    says = (
        f"Work of {N} devices in a causal ring. In contiguous order they compute {slow} pairs of "
        f"half blocks, in zigzag order {even}. A number is the step of the ring."
    )
    return figure(368, bottom + 8, says, parts)


def draw():
    return {"ring_zigzag": both()}


if __name__ == "__main__":
    write(draw())
