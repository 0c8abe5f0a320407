"""Figures: C[I, K] = A[I, J] · B[J, K] with one mesh axis of four devices, as blocks.

One figure a case. Each row is one way to finish a product, as device 1 sees it: the pieces that
it multiplies, where they came from, and what it has of C at the end. Bytes and work are computed,
for the sizes of the page on sharded matmuls.
"""

from fractions import Fraction
from typing import NamedTuple

from kit import INK, figure, frame, kept, line, rect, say, text, write

AXIS_X = "var(--ms-axis-2,#8a6ae0)"  # the colour that meshscope gives an axis X
N, DEVICE = 4, 1
SIZE = {"I": 64, "J": 512, "K": 192}
DIMS = {"A": "IJ", "B": "JK", "C": "IK"}
BYTES = {name: 4 * SIZE[rows] * SIZE[columns] for name, (rows, columns) in DIMS.items()}
SIDE = {name: 6 * size ** (1 / 3) for name, size in SIZE.items()}  # px: the root tames J
GLYPH = {Fraction(1, 4): "¼", Fraction(3, 4): "¾"}


class Held(NamedTuple):
    """What device 1 has of a matrix."""

    cut: str = ""  # the dimension that the axis cuts, or none
    rest: str = ""  # the other pieces: "" elsewhere, "received", or "unused"
    summed: bool = False  # a sum of one term from every device


class Way(NamedTuple):
    """One way to finish the product."""

    name: str
    moves: str  # the matrix that a collective moves, or none
    rounds: int  # 2 for an all-reduce, which is two collectives
    pieces: int  # N if only one piece of the matrix is on the move: an all-to-all
    a: Held
    b: Held
    c: Held

    def sends(self):
        """Bytes that each device sends on a ring."""
        return Fraction(self.rounds * (N - 1), N * self.pieces) * BYTES[self.moves]

    def formula(self):
        part = f"{GLYPH[Fraction(1, N)]}·" if self.pieces > 1 else ""
        twice = "2·" if self.rounds == 2 else ""
        return f"{twice}{GLYPH[Fraction(N - 1, N)]}·{part}{self.moves}"

    def work(self):
        """Of the 2·I·J·K operations, those that each device does."""
        lengths = dict(SIZE)
        for held in (self.a, self.b):
            if held.cut and held.rest != "received":
                lengths[held.cut] = SIZE[held.cut] // N
        return Fraction(
            lengths["I"] * lengths["J"] * lengths["K"], SIZE["I"] * SIZE["J"] * SIZE["K"]
        )


whole, i, j, k = Held(), Held("I"), Held("J"), Held("K")
CASES = [
    (
        "J is whole",
        i,
        whole,
        [Way(say("nothing moves"), "", 0, 1, i, whole, i)],
    ),
    (
        "J sharded in one",
        j,
        whole,
        [
            Way(kept("all-gather A"), "A", 1, 1, Held("J", "received"), whole, whole),
            Way(kept("all-to-all A"), "A", 1, N, Held("I", "received piece"), whole, i),
            Way(
                say("slice {array}, {collective}", array="B", collective=kept("all-reduce C")),
                "C",
                2,
                1,
                j,
                Held("J", "unused"),
                Held("", "", True),
            ),
        ],
    ),
    (
        "J sharded in both",
        j,
        j,
        [
            Way(kept("all-reduce C"), "C", 2, 1, j, j, Held("", "", True)),
            Way(kept("reduce-scatter C"), "C", 1, 1, j, j, Held("I", "", True)),
        ],
    ),
    (
        "I and K sharded",
        i,
        k,
        [
            Way(kept("all-gather B"), "B", 1, 1, i, Held("K", "received"), i),
            Way(kept("all-gather A"), "A", 1, 1, Held("I", "received"), k, k),
        ],
    ),
]


def block(x, y, rows, columns, held):
    """A matrix as device 1 has it."""
    width, height = SIDE[columns], SIDE[rows]
    light = 0.36
    if not held.cut:
        return [rect(x, y, width, height, INK, 0.28)]
    across = held.cut == columns
    w, h = (width / N, height) if across else (width, height / N)
    drawn = []
    for piece in range(N):
        left, top = (x + w * piece, y) if across else (x, y + h * piece)
        if piece == DEVICE:
            if held.rest == "received piece":  # a quarter of it was here, the rest arrived
                drawn.append(rect(left, top, w, h, AXIS_X, light))
                own = w / N
                drawn.append(rect(left + own * DEVICE, top, own, h, AXIS_X))
            else:
                drawn.append(rect(left, top, w, h, AXIS_X))
        elif held.rest == "received":
            drawn.append(rect(left, top, w, h, AXIS_X, light))
        elif held.rest == "unused":
            drawn.append(rect(left, top, w, h, INK, 0.1))
        if piece:
            start = (left, top)
            end = (left, top + h) if across else (left + w, top)
            drawn.append(line([start, end], AXIS_X, 0.9, FAINT))
    return drawn + [frame(x, y, width, height, INK, 0.8, 0.5)]


def spec(name, held):
    """A[I_X, J], with the axis as a blue subscript."""
    axis = f'<tspan fill="{AXIS_X}" font-weight="600" font-size="9" dx=".5" dy="3">X</tspan>'
    sharded = held.cut if held.rest != "received" else ""  # what was received makes it whole
    words = ", ".join(DIMS[name])
    before, found, after = words.partition(sharded) if sharded else (words, "", "")
    if not found:
        return f"{name}[{words}]"
    return f'{name}[{before}{found}{axis}<tspan dx="1" dy="-3">{after}]</tspan>'


FAINT = ' stroke-opacity=".8"'
COLUMN = {"A": 1, "B": 76, "C": 132}
TEXT = 184


def way_row(y, way):
    drawn = []
    for name, held in zip("ABC", (way.a, way.b, way.c)):
        rows, columns = DIMS[name]
        drawn.append(text(COLUMN[name], y, kept(spec(name, held)), 11.5))
        drawn += block(COLUMN[name], y + 8, rows, columns, held)
    middle = y + 8 + SIDE["I"] / 2 + 4
    drawn += [text(62, middle, "·", 14, "middle", True), text(121, middle, "=", 13, "middle")]
    if way.c.summed:
        drawn.append(text(COLUMN["C"] + SIDE["K"] + 4, middle, "Σ", 12))
    drawn.append(text(TEXT, y + 4, way.name, 13, bold=True))
    if way.moves:
        words = say(
            "sends {share} = {count} bytes", share=way.formula(), count=f"{int(way.sends()):,}"
        )
        drawn.append(text(TEXT, y + 21, words, 12))
    else:
        drawn.append(text(TEXT, y + 21, say("sends 0 bytes"), 12))
    work = way.work()
    if work == 1:
        drawn.append(text(TEXT, y + 37, say("all the work on each device"), 12))
    else:
        drawn.append(text(TEXT, y + 37, say("{share} of the work", share=GLYPH[work]), 12))
    return drawn


def key(y, number):
    """What the colours of one figure mean, and nothing that it does not show."""
    held = [each for way in CASES[number - 1][3] for each in (way.a, way.b, way.c)]
    drawn, x = [], 0
    for shown, fill, opacity, words, width in [
        (any(each.cut for each in held), AXIS_X, 1, say("its piece"), 68),
        (any("received" in each.rest for each in held), AXIS_X, 0.36, say("received"), 72),
        (any(not each.cut for each in held), INK, 0.28, say("whole copy"), 84),
        (any(each.rest == "unused" for each in held), INK, 0.1, say("not used"), 68),
    ]:
        if shown:
            drawn += [rect(x, y - 9, 10, 10, fill, opacity), text(x + 14, y, words, 12)]
            x += width
    if any(each.summed for each in held):
        drawn.append(text(x, y, say("Σ sum of {count}", count=N), 12))
    return drawn


def only_diagonal(x, y):
    """C before anything moves: device 1 has the rows and the columns of one block."""
    w, h = SIDE["K"] / N, SIDE["I"] / N
    drawn = [
        frame(x, y, SIDE["K"], SIDE["I"], INK, 0.8, 0.5),
        rect(x + w * DEVICE, y + h * DEVICE, w, h, AXIS_X),
    ]
    for n in range(1, N):
        drawn += [
            line([(x + w * n, y), (x + w * n, y + SIDE["I"])], AXIS_X, 0.7, FAINT),
            line([(x, y + h * n), (x + SIDE["K"], y + h * n)], AXIS_X, 0.7, FAINT),
        ]
    return drawn


def case(y, number):
    """One case: how the matrices lie, and the ways to finish."""
    _, a, b, ways = CASES[number - 1]
    drawn = [text(0, y + 6, kept(f"{spec('A', a)} · {spec('B', b)}"), 14)]
    if number == 4:
        drawn += [
            text(TEXT, y + 6, say("before: 1 block of 16"), 12, opacity=0.85),
            *only_diagonal(324, y - 6),
        ]
    y += 30
    words = say("On device {device} of {count}, at the end:", device=DEVICE, count=N)
    drawn += [text(0, y, words, 12), *key(y + 20, number)]
    y += 48
    for way in ways:
        drawn += way_row(y, way)
        y += SIDE["J"] + 24
    return drawn, y + 5


def described(number):
    title, _, _, ways = CASES[number - 1]
    return (
        f"Case {number}, {title}: "
        + "; or ".join(
            way.name
            + (f", each device sends {int(way.sends()):,} bytes" if way.moves else "")
            + f" and does {'all' if way.work() == 1 else way.work()} of the work"
            for way in ways
        )
        + "."
    )


def draw():
    intro = (
        f"A times B on {N} devices, as blocks that device {DEVICE} holds, receives and computes. "
    )
    drawn = {}
    for number in range(1, len(CASES) + 1):
        parts, end = case(10, number)
        says = intro + described(number)
        drawn[f"matmul_case_{number}"] = figure(360, end - 20, says, parts)
    return drawn


if __name__ == "__main__":
    write(draw())
