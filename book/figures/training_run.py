"""Figure of the page about the trainer: the loss of one run, and of one that was killed and moved."""

import csv
from pathlib import Path

from kit import DATA, INK, MODEL, figure, kept, line, rect, say, text, write

STORED = Path(__file__).parents[2] / "examples" / "data" / "tiny_run.csv"
KILLED, RESUMED = 110, 100  # the last step before the kill, and the checkpoint it resumed from
LEFT, RIGHT, TOP, BOTTOM = 30, 344, 34, 182
STEPS, LEAST, MOST = 200, 1.0, 5.0


def x_of(step):
    return LEFT + (RIGHT - LEFT) * step / STEPS


def y_of(loss):
    return BOTTOM - (BOTTOM - TOP) * (loss - LEAST) / (MOST - LEAST)


def training_run():
    rows = list(csv.DictReader(STORED.open()))
    steps = [int(row["step"]) for row in rows]
    whole, moved = ([float(row[name]) for row in rows] for name in ("loss", "loss_moved"))
    drawn = [text(0, 12, say("training loss, in nats per byte"), 12, bold=True)]
    for loss in (1, 2, 3, 4, 5):
        y = y_of(loss)
        drawn += [line([(LEFT, y), (RIGHT, y)], INK, 0.5, ' stroke-opacity="0.35"')]
        drawn.append(text(LEFT - 6, y + 4, f"{loss}", 11, "end"))
    for step in (0, 50, 100, 150, 200):
        drawn.append(text(x_of(step), BOTTOM + 15, f"{step}", 11, "middle"))
    drawn.append(text(RIGHT, BOTTOM + 30, say("step"), 11, "end"))
    drawn.append(line([(x_of(s), y_of(v)) for s, v in zip(steps, whole, strict=True)], INK, 1.2))
    for step, loss in zip(steps, moved, strict=True):
        x, y = x_of(step), y_of(loss)
        drawn.append(rect(x - 3, y - 3, 6, 6, DATA if step <= RESUMED else MODEL))
    x = x_of(KILLED)
    drawn.append(line([(x, TOP + 12), (x, y_of(2.1))], INK, 1, ' stroke-dasharray="3 3"'))
    drawn.append(text(x + 5, TOP + 22, say("killed after step {step}", step=KILLED), 11))
    y = BOTTOM + 48
    drawn += [line([(LEFT, y - 4), (LEFT + 14, y - 4)], INK, 1.2)]
    drawn.append(text(LEFT + 20, y, say("never stopped, on eight devices"), 12))
    key = [
        (DATA, say("{strategy} on {count} devices", strategy=kept("fsdp"), count=8)),
        (MODEL, say("{strategy} on {count} devices", strategy=kept("fsdp-tensor"), count=4)),
    ]
    for n, (colour, words) in enumerate(key, 1):
        drawn.append(rect(LEFT + 4, y + 18 * n - 8, 7, 7, colour))
        drawn.append(text(LEFT + 20, y + 18 * n, words, 12))
    largest = max(abs(a - b) for a, b in zip(whole, moved, strict=True))
    assert largest < 0.01, "the page says that the two runs cannot be told apart"
    says = (
        f"The training loss over {STEPS} steps falls from {whole[0]:.2f} to {whole[-1]:.2f}. "
        f"Squares of a second run, killed after step {KILLED} and resumed from step {RESUMED} "
        "on four devices with another strategy, lie on the same curve."
    )
    return figure(360, y + 42, says, drawn)


def draw():
    return {"training_run": training_run()}


if __name__ == "__main__":
    write(draw())
