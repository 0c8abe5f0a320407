"""Four microbatches in data parallelism: an all-reduce for each, or one for all.

A roofline, as in step_timelines.py: lengths are operations and bytes over published speeds. The
compute lane and the wire each do one thing at a time; an all-reduce starts when its gradient is
there and the wire is free. Layers and tokens are those of step_timelines, in four parts. As in the
page's code, jax.grad goes around the loop: first all forward passes, then all backward passes in
reverse, each of which computes its forward pass again (jax.checkpoint).
"""

from kit import DATA, INK, figure, frame, kept, line, rect, say, text, write
from step_timelines import BF16, CELL, DEVICES, FLOPS, LAYER, WIRE, L, ring

M = 4  # microbatches
FORWARD, BACKWARD = L * CELL / M, 2 * L * CELL / M  # ms of one microbatch: y; dx and dW
REDUCE = 2 * L * ring(LAYER * BF16, DEVICES)  # ms of an all-reduce of all gradients

LEFT, SCALE, HIGH, LOW = 54, 14.5, 26, 17  # px: margin, per ms, heights of the lanes


def x_of(ms):
    return LEFT + SCALE * ms


def panel(top, title, reductions):
    """One step; after the backward pass of each of `reductions` an all-reduce follows."""
    upper, lower = top + 12, top + 12 + HIGH + 4
    drawn, now, wire = [], 0.0, 0.0
    forward = [(n, [(FORWARD, 0.18)]) for n in range(1, M + 1)]
    again = [(n, [(FORWARD, 0.18), (BACKWARD, 0.32)]) for n in range(M, 0, -1)]
    for n, passes in forward + again:
        for ms, opacity in passes:
            drawn.append(rect(x_of(now), upper, SCALE * ms - 1, HIGH, INK, opacity, 1.5))
            now += ms
        middle = x_of(now - ms / 2)  # of the last pass
        drawn.append(text(middle, upper + HIGH / 2 + 4, str(n), 12, "middle", True))
        if len(passes) == 2 and n in reductions:
            start = max(now, wire)
            wire = start + REDUCE
            drawn.append(rect(x_of(start), lower, SCALE * REDUCE - 1, LOW, DATA, 0.45, 1.5))
            label = f"1–{M}" if len(reductions) == 1 else str(n)
            drawn.append(text(x_of(start + REDUCE / 2), lower + 12.5, label, 11, "middle"))
    waits = x_of(wire) - x_of(now) - 2
    drawn.append(frame(x_of(now) + 1, upper + 1, waits, HIGH - 2, INK, 0.8, 0.6, True))
    drawn += [
        text(0, top, title, 14, bold=True),
        text(360, top, kept(f"{wire:.1f} ms"), 12, "end"),
        text(0, upper + HIGH / 2 + 4, say("compute"), 12),
        text(0, lower + 13, say("links"), 12),
    ]
    return drawn, lower + LOW, f"{title} {wire:.1f} milliseconds"


def draw():
    first, bottom, careless = panel(13, say("Nothing cast"), range(1, M + 1))
    second, bottom, once = panel(bottom + 30, say("Cast before the loop"), [1])
    axis = bottom + 14
    parts = [*first, *second]
    parts.append(line([(LEFT, axis), (x_of(20.5), axis)], more=' opacity=".5"'))
    for ms in range(0, 21, 5):
        parts.append(line([(x_of(ms), axis), (x_of(ms), axis + 4)], more=' opacity=".5"'))
        words = str(ms) if ms else kept("0 ms")
        parts.append(text(x_of(ms), axis + 16, words, 11, "middle", opacity=0.8))
    speeds = say(
        "one H100: {flops} Tflop/s, links {links} GB/s",
        flops=f"{FLOPS / 1e12:.0f}",
        links=f"{WIRE / 1e9:.0f}",
    )
    parts.append(text(0, axis + 38, speeds, 11, opacity=0.85))
    says = (
        "Two timelines of one training step with four microbatches, each with a lane for compute "
        "and a lane for the links: first the forward passes 1 to 4, then the backward passes 4 to 1. "
        f"{careless}: an all-reduce follows each backward pass. "
        f"{once}: one all-reduce follows the last."
    )
    return {"accumulate": figure(360, axis + 42, says, parts)}


if __name__ == "__main__":
    write(draw())
