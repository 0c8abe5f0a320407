"""What each of eight devices stores of the large model: data parallelism against FSDP.

Weights, gradients and Adam's two moments of the large model in float32; a bar is a device.
Grey is a copy, blue a piece, as in all figures of chapter 9.
"""

import math

from kit import DATA, INK, figure, kept, line, lines, rect, say, strong, text, write

L, D, F, PIXELS, V = 32, 4096, 16384, 64, 16
SHAPES = [(PIXELS, D), (L, D), (L, D, F), (L, F), (L, F, D), (L, D), (D, V)]
COUNT = sum(math.prod(shape) for shape in SHAPES)
DEVICES = 8
# GB in float32: a number for the weight, one for its gradient, two for Adam
PARTS = {"weights": 4 * COUNT / 1e9, "gradients": 4 * COUNT / 1e9, "moments": 8 * COUNT / 1e9}
TOTAL = sum(PARTS.values())
MEMORY = 80  # GB of a large GPU

LEFT, SCALE, BAR, STEP = 24, 3.5, 10, 13  # px: margin, per GB, height of a bar, distance


def bars(top, share, fill, opacities):
    """Eight bars, one for each device, with a part for each of weights, gradients, moments."""
    drawn = []
    for device in range(DEVICES):
        x, y = LEFT, top + STEP * device
        drawn.append(text(LEFT - 8, y + BAR - 1, str(device), 11, "end", opacity=0.75))
        for size, opacity in zip(PARTS.values(), opacities, strict=True):
            drawn.append(rect(x, y, size / share * SCALE - 1, BAR, fill, opacity))
            x += size / share * SCALE
    return drawn


def draw():
    parts, top = [], 66
    size = strong(f"{TOTAL:.1f} GB")
    parts.append(text(0, 14, say("Data parallelism: {size} on each device", size=size), 14))
    x = LEFT
    for name, size in PARTS.items():  # names over the parts
        middle = x + size * SCALE / 2
        parts += [text(middle, 38, say(name), 12, "middle")]
        parts += [text(middle, 53, kept(f"{size:.1f} GB"), 12, "middle", opacity=0.8)]
        x += size * SCALE
    parts += bars(top, 1, INK, (0.6, 0.42, 0.26))

    limit = LEFT + MEMORY * SCALE
    words = say("memory\nof an\n{size} GB\nGPU", size=MEMORY)
    parts += lines(limit + 6, top + 9, 15, words, 12)

    top += STEP * DEVICES + 46
    size = strong(f"{TOTAL / DEVICES:.1f} GB")
    words = say("{strategy}: {size} on each device", strategy=kept("FSDP"), size=size)
    parts.append(text(0, top - 12, words, 14))
    parts += bars(top, DEVICES, DATA, (0.6, 0.42, 0.26))
    x, middle = LEFT + TOTAL / DEVICES * SCALE + 10, top + STEP * DEVICES / 2
    for n, (name, size) in enumerate(PARTS.items()):
        words = say("{name} {size} GB", name=say(name), size=f"{size / DEVICES:.1f}")
        parts.append(text(x, middle - 13 + 17 * n, words, 12))

    axis = top + STEP * DEVICES + 6
    parts.append(line([(limit, 26), (limit, axis)], more=' stroke-dasharray="3 3" opacity=".7"'))
    parts.append(line([(LEFT, axis), (limit, axis)], more=' opacity=".5"'))
    for gigabytes in range(0, MEMORY + 1, 20):
        x = LEFT + gigabytes * SCALE
        parts.append(line([(x, axis), (x, axis + 4)], more=' opacity=".5"'))
        words = kept(f"{gigabytes} GB") if gigabytes == MEMORY else gigabytes
        parts.append(text(x, axis + 17, words, 11, "middle", opacity=0.8))
    says = (
        f"Bars of memory for eight devices. Data parallelism: each device holds {TOTAL:.1f} GB, "
        f"{PARTS['weights']:.1f} of weights, {PARTS['gradients']:.1f} of gradients and "
        f"{PARTS['moments']:.1f} of moments. FSDP: each device holds {TOTAL / DEVICES:.1f} GB, an "
        f"eighth of each. A line marks the {MEMORY} GB of a large GPU."
    )
    return {"fsdp_memory": figure(360, axis + 22, says, parts)}


if __name__ == "__main__":
    write(draw())
