"""One training step of three layers with FSDP on eight GPUs, without prefetch and with it.

A roofline, not a measurement: every length is a number of operations or bytes divided by a
published speed. The schedule is ideal. The compute lane and the wire each do one thing at a time,
in order; a thing starts as soon as its inputs are there and its lane is free.
"""

from typing import NamedTuple

from kit import DATA, INK, figure, frame, kept, line, rect, say, shape, strong, text, write

# Three layers of the book's large model: two matmuls each. Eight sequences of 4,096 tokens.
L, D, F, TOKENS, DEVICES = 3, 4096, 16384, 8 * 4096, 8
# One H100 SXM: dense bfloat16, NVLink in one direction, HBM3 (NVIDIA's data sheet).
FLOPS, WIRE, MEMORY = 989e12, 450e9, 3.35e12
BF16 = 2  # bytes of a number on the wire
ADAM = 12 + 2 + 12  # bytes per weight: read w, m, v in float32 and g in bfloat16; write w, m, v

LAYER = 2 * D * F  # weights of a layer
CELL = 2 * LAYER * TOKENS / DEVICES / FLOPS * 1e3  # ms: two matmuls


class Task(NamedTuple):
    name: str  # y1, dx3, dW3, gather 1, ...
    lane: str  # "compute" or "wire"
    ms: float
    after: tuple[str, ...] = ()  # names of the tasks that it waits for


class Strategy(NamedTuple):
    title: str
    ahead: int  # layers that are gathered before they are needed


PREFETCH = [Strategy(say("No prefetch"), ahead=0), Strategy(say("One layer ahead"), ahead=1)]


def ring(size, n):
    """Milliseconds of a ring all-gather or reduce-scatter of `size` bytes over n devices."""
    return size * (n - 1) / n / WIRE * 1e3


def step(ahead):
    """The tasks of one step, each lane in order."""
    tasks = []

    def collective(name, *after):
        tasks.append(Task(name, "wire", ring(LAYER * BF16, DEVICES), after))

    def compute(name, *after):
        tasks.append(Task(name, "compute", CELL, after))

    for n in range(1, 2 + ahead):
        collective(f"gather {n}")
    for n in range(1, L + 1):
        compute(f"y{n}", f"gather {n}")
        if n + 1 + ahead <= L:
            collective(f"gather {n + 1 + ahead}", f"y{n}")
    for n in range(L, L - 1 - ahead, -1):  # freed after the forward pass, so fetched again
        collective(f"gather again {n}", f"y{L}")
    for n in range(L, 0, -1):
        compute(f"dx{n}", f"gather again {n}")
        compute(f"dW{n}")
        if n - 1 - ahead >= 1:
            collective(f"gather again {n - 1 - ahead}", f"dW{n}")
        collective(f"scatter {n}", f"dW{n}")
    held = L * LAYER / DEVICES  # weights that a device updates
    everything = tuple(task.name for task in tasks)
    tasks.append(Task("update", "compute", held * ADAM / MEMORY * 1e3, everything))
    return tasks


def schedule(tasks):
    """{name: (start, end)} in ms."""
    free, times = {"compute": 0.0, "wire": 0.0}, {}
    for task in tasks:
        ready = [times[name][1] for name in task.after if name in times]
        start = max([free[task.lane], *ready])
        times[task.name] = (start, start + task.ms)
        free[task.lane] = start + task.ms
    return times


LEFT, SCALE = 54, 20.6  # px: margin for the names of the lanes, px per ms
HIGH, LOW = 28, 17  # heights of the two lanes
KINDS = {"gather": "all-gather W", "scatter": "reduce-scatter dW"}  # and what each moves
MESH = kept(f'<tspan fill="{DATA}">data {DEVICES}</tspan>')
PHASES = [(say("forward"), "y1"), (say("backward"), f"dx{L}"), (say("update"), "update")]


def x_of(ms):
    return LEFT + SCALE * ms


def mark(kind, x, y, width):
    """A gather grows and is pale, a scatter shrinks and is dark."""
    small = 4  # px cut off above and below
    left, right = {"gather": (small, 0), "scatter": (0, small)}[kind]
    points = [(x, y + left), (x + width, y + right)]
    points += [(x + width, y + LOW - right), (x, y + LOW - left)]
    opacity = {"gather": 0.22, "scatter": 0.62}[kind]
    return shape(points, DATA, opacity, f' stroke="{DATA}" stroke-width="1"')


def lane(tasks, times, name):
    """(task, start, end) of one lane, in order."""
    return [(task, *times[task.name]) for task in tasks if task.lane == name]


def computing(tasks, y):
    """Cells of work, and dashed boxes where the device waits."""
    drawn, busy = [], 0.0
    for task, start, end in tasks:
        x, width = x_of(start), x_of(end) - x_of(start) - 1
        waits = x_of(start) - x_of(busy) - 2.5
        if waits > 0:  # what is shorter would be no box
            drawn.append(frame(x_of(busy) + 1, y + 1, waits, HIGH - 2, INK, 0.8, 0.6, True))
        busy, middle = end, x + width / 2
        lighter = task.name.startswith(("y", "dx"))
        drawn.append(rect(x, y, width, HIGH, INK, 0.18 if lighter else 0.32, 1.5))
        if task.name != "update":
            what, layer = task.name[:-1], task.name[-1]
            drawn.append(text(middle, y + 12, layer, 11, "middle", True))
            drawn.append(text(middle, y + 24, kept(what), 11, "middle"))
        elif width > 40:
            drawn.append(text(middle, y + 18, kept(f"{task.ms:.1f} ms"), 11, "middle"))
    return drawn


def moving(tasks, y):
    """Marks on the wire, and the name of each kind below the first mark with room for it."""
    drawn, free, named = [], LEFT, set()
    for task, start, end in tasks:
        kind, *_, layer = task.name.split()
        x, width = x_of(start), x_of(end) - x_of(start) - 1
        drawn.append(mark(kind, x, y, width))
        drawn.append(text(x + width / 2, y + 12.5, layer, 11, "middle"))
        if kind not in named and x >= free:
            named.add(kind)
            free = x + 6.1 * len(KINDS[kind]) + 8
            drawn.append(text(x, y + LOW + 13, kept(KINDS[kind]), 11))
    assert named == KINDS.keys(), "a kind without a name"
    return drawn


def panel(top, strategy):
    tasks = step(strategy.ahead)
    times = schedule(tasks)
    end = times["update"][1]
    waits = end - sum(task.ms for task in tasks if task.lane == "compute")
    upper, lower = top + 25, top + 25 + HIGH + 4
    name = say("{strategy}  {mesh}", strategy=strong(strategy.title, 14), mesh=MESH)
    drawn = [
        text(0, top, name, 12),
        text(284, top, kept(f"{end:.1f} ms"), 12, "end"),
        frame(290.5, top - 9, 11, 10, INK, 0.8, 0.6, True),
        text(306, top, say("waits {ms}", ms=f"{waits:.1f}"), 12),
        text(0, upper + HIGH / 2 + 4, say("compute"), 12),
        text(0, lower + 13, say("links"), 12),
    ]
    for phase, first in PHASES:
        x = x_of(times[first][0])
        room = x + 7 * len(phase) < 360  # or it ends at the right edge
        anchor = "start" if room else "end"
        drawn.append(text(x if room else 360, upper - 5, phase, 11, anchor, opacity=0.85))
    drawn += computing(lane(tasks, times, "compute"), upper)
    drawn += moving(lane(tasks, times, "wire"), lower)
    said = f"{strategy.title} {end:.1f} milliseconds, of which {waits:.1f} waiting"
    return drawn, lower + LOW, said


def draw():
    parts, y, said = [], 13, []
    for strategy in PREFETCH:
        drawn, bottom, words = panel(y, strategy)
        said.append(words)
        parts += drawn
        y = bottom + 42
    axis = y - 20
    parts.append(line([(LEFT, axis), (x_of(14), axis)], more=' opacity=".5"'))
    for ms in range(0, 15, 2):
        parts.append(line([(x_of(ms), axis), (x_of(ms), axis + 4)], more=' opacity=".5"'))
        words = ms if ms else kept("0 ms")
        parts.append(text(x_of(ms), axis + 16, words, 11, "middle", opacity=0.8))
    speeds = say(
        "one H100: {flops} Tflop/s, links {links} GB/s, memory {memory} TB/s",
        flops=f"{FLOPS / 1e12:.0f}",
        links=f"{WIRE / 1e9:.0f}",
        memory=f"{MEMORY / 1e12:.2f}",
    )
    parts.append(text(0, axis + 38, speeds, 11, opacity=0.85))
    says = (
        "One training step of three layers with FSDP on eight devices as two timelines, time to "
        f"the right, with a lane for compute and a lane for the links. {'; '.join(said)}. Without "
        "prefetch the device waits for every gather; one layer ahead, it waits for the first "
        "gather, for the one at the turn and for the last scatter."
    )
    return {"fsdp_overlap": figure(360, axis + 42, says, parts)}


if __name__ == "__main__":
    write(draw())
