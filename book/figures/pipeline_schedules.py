"""The four schedules of chapter 12 on one scale: a row is a stage, a box an operation.

The rows come from the page's own cells. Blue is F, orange B, grey W, a gap an idle tick; the second
chunk of an interleaved stage is darker.
"""

from kit import DATA, INK, MODEL, figure, kept, rect, say, text, write
from page_cells import run_cells

LEFT, TICK, HIGH, ROW = 14, 10.3, 15, 17  # px: margin, width of a tick, height of a box, of a row
FILL = {"F": (DATA, 0.45), "B": (MODEL, 0.45), "W": (INK, 0.2)}
CELLS = ["imports", "orders", "one-f-one-b", "zero-bubble", "interleaved"]
CELLS += ["needs", "ticks", "schedules"]


def draw():
    schedules = run_cells("12-pipeline", *CELLS)["schedules"]
    parts, x = [], 0
    words = {"F": say("forward"), "B": say("input gradient"), "W": say("weight gradient")}
    for kind, wide in [("F", 84), ("B", 124), ("W", 0)]:
        parts.append(rect(x, 2, 11, 11, *FILL[kind]))
        parts.append(text(x + 15, 12, kept(kind), 12, bold=True))
        parts.append(text(x + 29, 12, words[kind], 12))
        x += wide
    y = 22
    for name, rows in schedules.items():
        wide = TICK / 2 if name == "interleaved" else TICK
        parts.append(text(0, y + 14, kept(name), 13, bold=True))
        parts.append(text(356, y + 14, say("{n} ticks", n=len(rows)), 12, "end"))
        y += 20
        for stage in range(len(rows[0])):
            parts.append(text(8, y + 12, str(stage), 11, "end", opacity=0.8))
            for tick, row in enumerate(rows):
                op, left = row[stage], LEFT + wide * tick
                if op is None:
                    continue
                colour, opacity = FILL[op.kind]
                if op.part >= len(row):  # the second chunk of a stage
                    opacity *= 2
                parts.append(rect(left, y, wide - 0.7, HIGH, colour, opacity))
                if name != "interleaved":
                    middle = left + wide / 2 - 0.3
                    parts.append(text(middle, y + 11.5, str(op.microbatch), 10, "middle"))
            y += ROW
        y += 8
    says = (
        "Four timelines of a pipeline with four stages and eight microbatches. GPipe and 1F1B take "
        "33 ticks, interleaved 57 ticks of half the length, zero bubble 27. Every stage works for "
        "24 ticks, and the gaps are idle time."
    )
    return {"pipeline_schedules": figure(360, y, says, parts)}


if __name__ == "__main__":
    write(draw())
