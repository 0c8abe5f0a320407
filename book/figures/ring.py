"""Figures: the five collectives on a ring of four devices, step by step.

The numbers are moved and added by the program, one message at a time, and checked at the end
against what the collective promises. A row is a device, a column is a place for one number.
"""

from fractions import Fraction
from typing import NamedTuple

from kit import INK, arrow, figure, frame, kept, line, rect, say, text, write

AXIS_X = "var(--ms-axis-2,#8a6ae0)"  # the colour that meshscope gives an axis X
N = 4
SIZE = 4 * 64 * 512  # S, the bytes of the whole array; the drawings give shares of it
GLYPH = {Fraction(1, 4): "¼", Fraction(3, 4): "¾"}
PIECE = SIZE // N  # one number of a reduce-scatter, an all-gather or an all-reduce

CELL, HIGH, GAP = 18, 18, 13  # px: a cell's width and height, between two rows
LEFT, WIDE, BETWEEN = 35, N * CELL, 11.5  # margin, width of a frame, between two frames
DOWN = HIGH + GAP
STRENGTH = {1: 0.12, 2: 0.16, 3: 0.28, 4: 0.5}  # opacity of a sum, by its number of terms


class Cell(NamedTuple):
    """A number in a place, with what its colour says."""

    number: int
    fill: str = INK
    opacity: float = STRENGTH[1]
    bold: bool = False


class Moment(NamedTuple):
    """What every device holds, and the messages that brought the new numbers."""

    held: list[list[Cell | None]]
    moves: list[tuple[int, ...]] = []  # sender, receiver, place, and its old place if another
    says: str = ""  # above the frame
    sent: int = 0  # bytes that each device sends or passes on


def summed(number, terms):
    fill = INK if terms == 1 else AXIS_X
    return Cell(number, fill, STRENGTH[terms], terms == N)


START = [[N * device + piece + 1 for piece in range(N)] for device in range(N)]
SUMS = [sum(column) for column in zip(*START, strict=True)]
ONE_EACH = [[SUMS[p] if p == device else None for p in range(N)] for device in range(N)]


def reduce_scatter():
    """In each step a device passes a partial sum on, and the next adds its own number."""
    held = [[(number, 1) for number in row] for row in START]
    moments = [Moment([[summed(*entry) for entry in row] for row in held], says=say("start"))]
    for step in range(1, N):
        after, moves = [row[:] for row in held], []
        for piece in range(N):
            sender = (piece + step) % N
            receiver = (sender + 1) % N
            (sent, terms), (own, _) = held[sender][piece], held[receiver][piece]
            after[receiver][piece] = (sent + own, terms + 1)
            after[sender][piece] = None
            moves.append((sender, receiver, piece))
        held = after
        cells = [[entry and summed(*entry) for entry in row] for row in held]
        moments.append(Moment(cells, moves, say("step {number}", number=step), PIECE))
    assert [[entry and entry[0] for entry in row] for row in held] == ONE_EACH
    return moments


def all_gather():
    """In each step a device passes a piece on and keeps it."""
    held = [row[:] for row in ONE_EACH]

    def drawn():
        return [[number and summed(number, N) for number in row] for row in held]

    moments = [Moment(drawn(), says=say("start"))]
    for step in range(1, N):
        after, moves = [row[:] for row in held], []
        for piece in range(N):
            sender = (piece + step - 1) % N
            receiver = (sender + 1) % N
            after[receiver][piece] = held[sender][piece]
            moves.append((sender, receiver, piece))
        held = after
        moments.append(Moment(drawn(), moves, say("step {number}", number=step), PIECE))
    assert held == [SUMS] * N
    return moments


def all_reduce():
    """The two above, one after the other: only the beginning, the middle and the end."""
    first, last = reduce_scatter(), all_gather()
    once = sum(moment.sent for moment in first)
    return [
        first[0],
        Moment(first[-1].held, [], kept("reduce-scatter"), once),
        Moment(last[-1].held, [], kept("all-gather"), once),
    ]


def all_to_all():
    """Number j of device i travels to device j; what is still on its way is passed on."""
    held = {device: {source: None for source in range(N)} for device in range(N)}
    travelling = {}  # (source, target): the device where the number is now
    for source in range(N):
        held[source][source] = START[source][source]
        travelling |= {(source, t): source for t in range(N) if t != source}
    moments, passed = [Moment([[Cell(x) for x in row] for row in START], says=say("start"))], 0
    for step in range(1, N):
        moves = []
        for way, device in travelling.items():
            travelling[way] = (device + 1) % N
        arrived = {way: device for way, device in travelling.items() if way[1] == device}
        for source, target in arrived:
            held[target][source] = START[source][target]
        cells = []
        for device in range(N):
            row = [
                None if number is None else Cell(number, AXIS_X, STRENGTH[4], True)
                for number in held[device].values()
            ]
            for (source, target), at in travelling.items():
                if at == device != target:  # it stays in its column until it arrives
                    assert row[target] is None
                    row[target] = Cell(START[source][target])
                    moves.append(((device - 1) % N, device, target))
            moves += [((d - 1) % N, d, s, d) for (s, d) in arrived if d == device]
            cells.append(row)
        sent = len(travelling) // N * PIECE // N
        passed += sent
        travelling = {way: at for way, at in travelling.items() if way not in arrived}
        moments.append(Moment(cells, moves, say("step {number}", number=step), sent))
    assert [list(row.values()) for row in held.values()] == [
        list(column) for column in zip(*START, strict=True)
    ]
    assert passed == 2 * (N - 1) * PIECE // N  # of its own, a device sends half of it
    return moments


def permute():
    """One step: everything goes to the next device."""
    after = [[Cell(x, AXIS_X, STRENGTH[4], True) for x in START[device - 1]] for device in range(N)]
    moves = [((device - 1) % N, device, place) for device in range(N) for place in range(N)]
    return [
        Moment([[Cell(x) for x in row] for row in START], says=say("start")),
        Moment(after, moves, say("step {number}", number=1), PIECE),
    ]


def aslant(x1, y1, x2, y2):
    """An arrow down, also to another column: then on its way sideways in the gap."""
    if x1 == x2:
        return arrow(x1, y1, x2, y2, AXIS_X, 1.5)
    way = line([(x1, y1), (x1, y1 + 2), (x2, y1 + 2)], AXIS_X, 1.5)
    return way + arrow(x2, y1 + 2, x2, y2, AXIS_X, 1.5)


def drawn_frame(x, y, moment):
    drawn = []
    for device, row in enumerate(moment.held):
        top = y + DOWN * device
        for place, cell in enumerate(row):
            left = x + CELL * place
            if cell is None:
                more = (INK, 0.8, 0.35, True)
                drawn.append(frame(left + 0.5, top + 0.5, CELL - 3, HIGH - 1, *more))
                continue
            drawn.append(rect(left, top, CELL - 2, HIGH, cell.fill, cell.opacity, 2))
            middle = left + CELL / 2 - 1
            drawn.append(text(middle, top + 13, str(cell.number), 11, "middle", bold=cell.bold))
    for sender, receiver, place, *old in moment.moves:
        middle = x + CELL * place + CELL / 2 - 1
        start = x + CELL * (old[0] if old else place) + CELL / 2 - 1
        to = y + DOWN * receiver - 1.5
        drawn.append(aslant(start if receiver else middle, to - GAP + 3, middle, to))
        if receiver == 0:  # around the ring: out at the bottom, in at the top
            bottom = y + DOWN * sender + HIGH + 1
            drawn.append(line([(start, bottom), (start, bottom + 7)], AXIS_X, 1.5))
    return drawn


def devices(y):
    """The devices' numbers, and the way around."""
    drawn, x = [], 24
    for device in range(N):
        middle = y + DOWN * device + HIGH / 2
        drawn.append(text(x, middle + 4, str(device), 12, "middle", bold=True))
        if device:
            drawn.append(arrow(x, middle - DOWN + 9, x, middle - 8, AXIS_X, 1.5))
    top, bottom = y + HIGH / 2, y + DOWN * (N - 1) + HIGH / 2
    way = [(x - 7, bottom), (8, bottom), (8, top), (x - 8, top)]
    drawn.append(line(way, AXIS_X, 1.5, ' stroke-linejoin="round"'))
    drawn.append(arrow(x - 9, top, x - 7, top, AXIS_X, 1.5))
    return drawn


def share(sent):
    """Bytes as a share of S, the bytes of the whole array."""
    part = Fraction(sent, SIZE)
    return f"{GLYPH.get(part, f'{part * N * N}/{N * N}')} S"


def total(moments):
    return sum(moment.sent for moment in moments)


def collective(moments, says, sums, label=None):
    """A row of frames, with the bytes that each device sends below."""
    y = 32
    drawn, below = devices(y), y + DOWN * N + 12
    step = WIDE + BETWEEN if len(moments) > 3 else WIDE + 40
    for number, moment in enumerate(moments):
        x = LEFT + step * number
        drawn.append(text(x, 12, moment.says, 12, opacity=0.85))
        drawn += drawn_frame(x, y, moment)
        if number:
            drawn.append(text(x, below, share(moment.sent), 12))
            if not moment.moves:  # three steps in one
                drawn.append(text(x, below + 15, say("in {count} steps", count=N - 1), 11))
                middle = y + DOWN * N / 2 - GAP / 2
                drawn.append(arrow(x - 32, middle, x - 8, middle, AXIS_X, 1.5))
    drawn.append(text(LEFT, below, label or say("each sends"), 11, opacity=0.85))
    below += 38 if any(not m.moves for m in moments[1:]) else 24
    drawn.append(text(LEFT, below, sums, 12))
    return figure(360, below + 8, says, drawn)


def draw():
    once = total(reduce_scatter())
    ring = f"{N} devices on a ring. "
    sums = ", ".join(map(str, SUMS))
    return {
        "ring_reduce_scatter": collective(
            reduce_scatter(),
            f"{ring}Reduce-scatter: each device starts with four numbers; in three steps each "
            "passes a partial sum to the next, which adds its own; then device i holds the sum of "
            f"column i: {sums}. In each step each device sends a quarter of the array.",
            say("in total {share}", share=share(once)),
        ),
        "ring_all_gather": collective(
            all_gather(),
            f"{ring}All-gather: device i starts with one number, {sums} in turn; in three steps "
            "the numbers travel around and each device keeps a copy, until all have all four. In "
            "each step each device sends a quarter of the array.",
            say("in total {share}", share=share(once)),
        ),
        "ring_all_reduce": collective(
            all_reduce(),
            f"{ring}All-reduce: each device starts with four numbers. A reduce-scatter in three "
            "steps leaves each with the sum of one column, an all-gather in three more gives all "
            f"four sums, {sums}, to every device. Each half sends three quarters of the array.",
            say("in total {share}", share=f"2 · {share(once)}"),
        ),
        "ring_all_to_all": collective(
            all_to_all(),
            f"{ring}All-to-all: device i starts with row i of a table and ends with column i. "
            "Numbers for devices further away are passed on, so that a device passes three numbers "
            "in the first step, two in the second and one in the third, "
            f"{share(total(all_to_all()))}; half of it is its own.",
            say("own bytes: {share}", share=share(once // N)),
            say("passes on"),
        ),
        "ring_permute": collective(
            permute(),
            f"{ring}Collective-permute: in one step each device sends its row of numbers, "
            "a quarter of the array, to the next device, and the last to the first.",
            say("{share} in one step", share=share(PIECE)),
        ),
    }


if __name__ == "__main__":
    write(draw())
