"""The schedules of chapter 12 and of its deeper pages: a row is a stage, a box an operation.

The rows come from the pages' own cells. Blue is F, orange B, grey W, a gap an idle tick; the second
lap of an interleaved pipeline is darker.
"""

from kit import DATA, INK, MODEL, figure, frame, kept, rect, say, text, write
from page_cells import run_cells

LEFT, HIGH, ROW = 14, 15, 17  # px: margin, height of a box, of a row
FRAMED = 4  # the tick that the chapter and the page of schedules read aloud
SPOKEN = {"F": "forward pass", "B": "backward pass"}
FILL = {"F": (DATA, 0.45), "B": (MODEL, 0.45), "W": (INK, 0.2)}


def key(names):
    """What the fills mean, and the height of what follows."""
    parts, x = [], 0
    for kind, (words, wide) in names.items():
        parts.append(rect(x, 2, 11, 11, *FILL[kind]))
        parts.append(text(x + 15, 12, kept(kind), 12, bold=True))
        parts.append(text(x + 29, 12, words, 12))
        x += wide
    return parts, 22


def timeline(y, name, rows, wide):
    """One schedule, and where the next one begins."""
    parts = [text(0, y + 14, kept(name), 13, bold=True)]
    y += 20
    for stage in range(len(rows[0])):
        parts.append(text(8, y + 12, str(stage), 11, "end", opacity=0.8))
        for tick, row in enumerate(rows):
            op, left = row[stage], LEFT + wide * tick
            if op is None:
                continue
            kind, part, microbatch = op
            colour, opacity = FILL[kind]
            if part >= len(row):  # the second lap
                opacity *= 1.45
            parts.append(rect(left, y, wide - 0.7, HIGH, colour, opacity))
            middle = left + wide / 2 - 0.3
            parts.append(text(middle, y + 11.5, str(microbatch), 10, "middle"))
        y += ROW
    return parts, y + 8


def framed_tick(y, stages, wide):
    """A frame around one tick of the timeline that ends at y, and its name below."""
    left, top, high = LEFT + wide * FRAMED, y - 8 - ROW * stages, ROW * stages
    return [
        frame(left - 0.35, top - 2, wide, high + 2, thick=1.2),
        text(left + wide / 2, y + 5, say("tick {number}", number=FRAMED), 11, "middle"),
    ]


def draw_chapter():
    """GPipe and 1F1B, with F and B: for the chapter and for its page of schedules."""
    names = run_cells("12a-schedules", "imports", "gpipe", "one-f-one-b")
    parts, y = key({"F": (say("forward"), 84), "B": (say("backward"), 0)})
    for name, schedule in {"GPipe": names["gpipe"], "1F1B": names["one_f_one_b"]}.items():
        rows = [[None] * names["stages"] for _ in range(22)]
        for stage in range(names["stages"]):
            for m in range(names["M"]):
                for kind, tick in zip("FB", schedule(stage, m), strict=True):
                    rows[tick][stage] = kind, stage, m
        drawn, y = timeline(y, name, rows, 15.5)
        parts += drawn
    parts += framed_tick(y, names["stages"], 15.5)
    told = ["nothing" if op is None else f"{SPOKEN[op[0]]} {op[2]}" for op in rows[FRAMED]]
    stages = [f"stage {stage} {'does ' * (not stage)}{what}" for stage, what in enumerate(told)]
    says = (
        "Two timelines of a pipeline with four stages and eight microbatches. GPipe does all forward "
        "passes before the first backward pass, and 1F1B alternates them. Both take equally long. "
        f"On tick {FRAMED} of 1F1B, {', '.join(stages[:-1])}, and {stages[-1]}."
    )
    return figure(360, y + 8, says, parts)


def draw_zero_bubble():
    """1F1B and zero bubble, with F, B and W, on one scale."""
    cells = ["imports", "one-f-one-b", "zero-bubble", "needs", "ticks", "schedules"]
    schedules = run_cells("12b-zero-bubble", *cells)["schedules"]
    words = {"F": say("forward"), "B": say("input gradient"), "W": say("weight gradient")}
    parts, y = key({kind: (words[kind], wide) for kind, wide in [("F", 84), ("B", 124), ("W", 0)]})
    for name, rows in schedules.items():
        drawn, y = timeline(y, name, rows, 10.3)
        parts += drawn
    says = (
        "Two timelines of a pipeline with four stages and eight microbatches. In both, a stage works "
        "equally long. Zero bubble has shorter gaps than 1F1B."
    )
    return figure(360, y, says, parts)


def draw_interleaved():
    """The forward pass with one lap and with two, on one scale."""
    names = run_cells("12c-interleaved", "imports", "work", "bubble")
    stages, M = names["stages"], names["M"]
    parts, y = [], 0
    for laps in (1, 2):
        rows = [[None] * stages for _ in range(names["ticks_of"](laps))]
        for t, row in enumerate(rows):
            for s in range(stages):
                lap, m = names["work"](s, t, laps)
                if 0 <= t - s < laps * M:
                    row[s] = "F", lap * stages + s, m
        drawn, y = timeline(y, f"laps = {laps}", rows, 31 / laps)
        parts += drawn
    says = (
        "Two timelines of the forward pass of four devices and eight microbatches. With two laps, a "
        "tick is half as long, so the gaps at the beginning and at the end are half as long."
    )
    return figure(360, y, says, parts)


def draw():
    return {
        "pipeline_schedules": draw_chapter(),
        "pipeline_zero_bubble": draw_zero_bubble(),
        "pipeline_interleaved": draw_interleaved(),
    }


if __name__ == "__main__":
    write(draw())
