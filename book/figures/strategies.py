"""Figures of the page about strategies: memory in training, what is divided, what is moved."""

from kit import DATA, INK, MODEL, figure, frame, kept, line, lines, rect, say, shape, text, write
from page_cells import run_cells

PAGE = run_cells("strategies", "models", "state", "activations")
MACHINES = run_cells("communication-bound", "machines")["machines"]
DASHED = ' stroke-dasharray="3 3"'
LAYER = 218_112_000  # weights in one layer of the 8B model
SHADES = {"weights": 0.9, "gradients": 0.66, "masters": 0.44, "moments": 0.25, "activations": 0.1}
DEVICES = {80: "H100", 192: "MI300X"}  # GB


def training_memory():
    """A stacked bar, two lines, and a key that is also the table of numbers."""
    left, right, most, tall = 6, 356, 200, 34
    scale = (right - left) / most
    stored = {name: size * PAGE["N"] / 1e9 for name, size in PAGE["STATE"].items()}
    stored["activations"] = PAGE["activations"] / 1e9
    total = sum(stored.values())
    drawn = []
    for gb, device in DEVICES.items():
        x, end = (left + gb * scale, "middle") if gb < 100 else (left + gb * scale + 8, "end")
        drawn.append(line([(left + gb * scale, 34), (left + gb * scale, 88)], more=DASHED))
        drawn += [
            text(x, 12, kept(f"{gb} GB"), 12, end, bold=True),
            text(x, 27, kept(device), 11, end),
        ]
    x = left
    for part, size in stored.items():
        drawn.append(rect(x, 44, size * scale, tall, INK, SHADES[part]))
        x += size * scale
    drawn.append(frame(left, 44, x - left, tall, opacity=0.7))
    y = 98
    for part, shade in SHADES.items():
        y += 18
        drawn += [rect(left, y - 10, 12, 12, INK, shade), frame(left, y - 10, 12, 12, opacity=0.7)]
        drawn.append(text(left + 19, y, say(part), 12))
        drawn.append(text(220, y, kept(f"{stored[part]:.1f} GB"), 12, "end"))
    y += 20
    drawn.append(text(left + 19, y, say("total"), 12, bold=True))
    drawn.append(text(220, y, kept(f"{total:.1f} GB"), 12, "end", True))
    spoken = ", ".join(f"{part} {size:.1f}" for part, size in stored.items())
    says = (
        "A stacked bar of memory in GB, with lines at 80 and 192 GB. "
        f"In total it is {total:.1f} GB, of which {spoken}. "
        "So the 8B model needs more than 80 GB and less than 192."
    )
    return figure(360, y + 8, says, drawn)


COLUMNS = ["batch", "weights", "gradients", "optimizer"]
SIDE, GAP, LEFT, TOP = 42, 23, 72, 34
DIVISORS = {  # of each column, on eight devices
    "data parallel": (8, 1, 1, 1),
    "ZeRO-1": (8, 1, 1, 8),
    "FSDP": (8, 8, 8, 8),
    "tensor": (1, 8, 8, 8),
    "FSDP x tensor": (2, 8, 8, 8),
}
HEADINGS = {
    "data parallel": say("Data\nparallel"),
    "ZeRO-1": kept("ZeRO-1"),
    "FSDP": kept("FSDP"),
    "tensor": say("Tensor\nparallel"),
    "FSDP x tensor": say("FSDP\n× tensor"),
}


def pieces(strategy, column):
    """Into how many rows and columns a strategy divides what is stored."""
    examples, share = DIVISORS[strategy][0], DIVISORS[strategy][COLUMNS.index(column)]
    if column == "batch":
        return examples, 1
    if share > 1 and strategy == "FSDP x tensor":
        return examples, share // examples
    return (1, share) if strategy == "tensor" else (share, 1)


def gb_of(strategy):
    """State and activations on one device, with eight sequences: logits always in eight pieces."""
    examples, weights, gradients, optimizer = DIVISORS[strategy]
    parts = {"weights": weights, "gradients": gradients, "masters": optimizer, "moments": optimizer}
    state = sum(size / parts[name] for name, size in PAGE["STATE"].items()) * PAGE["N"]
    inputs = 8 * PAGE["layer_inputs"] / examples
    return (state + inputs + PAGE["activations"] - PAGE["layer_inputs"]) / 1e9


def tile(x, y, rows, columns):
    """A stored thing with its cuts, and the piece of device 0."""
    drawn, w, h = [], SIDE / columns, SIDE / rows
    if rows == columns == 1:
        drawn.append(rect(x, y, SIDE, SIDE, INK, 0.4))
    elif columns == 1:
        drawn.append(rect(x, y, w, h, DATA))
    elif rows == 1:
        drawn.append(rect(x, y, w, h, MODEL))
    else:  # divided along both axes: half of the piece in the colour of each
        drawn.append(shape([(x, y), (x + w, y), (x, y + h)], DATA))
        drawn.append(shape([(x + w, y), (x + w, y + h), (x, y + h)], MODEL))
    for i in range(1, rows):
        drawn.append(line([(x, y + h * i), (x + SIDE, y + h * i)], DATA, 0.9))
    for j in range(1, columns):
        drawn.append(line([(x + w * j, y), (x + w * j, y + SIDE)], MODEL, 0.9))
    drawn.append(frame(x, y, SIDE, SIDE, opacity=0.6))
    share = say("all") if rows * columns == 1 else f"1/{rows * columns}"
    drawn.append(text(x + SIDE / 2, y + SIDE + 13, share, 11, "middle"))
    return drawn


def strategy_grid():
    """Rows are strategies, columns are what training stores; on the right the sum in GB."""
    drawn, spoken = [text(360, 16, kept("GB"), 12, "end", True)], []
    for number, column in enumerate(COLUMNS):
        x = LEFT + (SIDE + GAP) * number + SIDE / 2
        drawn.append(text(x, 16, say(column), 11, "middle", True))
    for row, name in enumerate(DIVISORS):
        y = TOP + (SIDE + 26) * row
        drawn += lines(0, y + 18, 14, HEADINGS[name], 12, bold=True)
        for number, column in enumerate(COLUMNS):
            drawn += tile(LEFT + (SIDE + GAP) * number, y, *pieces(name, column))
        total = gb_of(name)
        drawn.append(text(360, y + 25, f"{total:.1f}", 13, "end", True))
        shares = [rows * columns for rows, columns in (pieces(name, c) for c in COLUMNS)]
        held = ", ".join(
            f"{column} {'all' if share == 1 else f'1/{share}'}"
            for column, share in zip(COLUMNS, shares, strict=True)
        )
        spoken.append(f"{' '.join(HEADINGS[name].splitlines())}: {held}, in total {total:.1f} GB")
    says = (
        "A grid of small squares: rows are strategies on eight devices, columns are what training "
        "stores, and each square shows how it is divided and what device 0 holds. "
        f"{'. '.join(spoken)}."
    )
    return figure(360, TOP + (SIDE + 26) * len(DIVISORS) - 6, says, drawn)


def communication_bound():
    """For three numbers of tokens: the communication's time, which stays, and the arithmetic's."""
    h100 = MACHINES["H100, in a node"]
    limit = round(h100.flops / h100.bandwidth)
    wire = 2 * LAYER / h100.bandwidth * 1e3  # ms
    left, scale = 66, 294 / 2.0  # px for a millisecond
    drawn = [text(0, 12, say("tokens per device"), 12), text(360, 12, say("time →"), 11, "end")]
    spoken = []
    for number, tokens in enumerate((1024, limit, 4096)):
        y = 30 + 62 * number
        arithmetic = 2 * LAYER * tokens / h100.flops * 1e3
        drawn.append(text(0, y + 20, f"{tokens:,}", 14, bold=True))
        for i, (name, ms, fill, opacity) in enumerate(
            [("communication", wire, DATA, 1), ("arithmetic", arithmetic, INK, 0.4)]
        ):
            drawn.append(rect(left, y + 21 * i, ms * scale, 17, fill, opacity))
            inside = ms * scale > 200
            words = say("{name} {time} ms", name=say(name), time=f"{ms:.2f}")
            x = left + 6 if inside else left + max(ms, wire) * scale + 5
            drawn.append(text(x, y + 13 + 21 * i, words, 11))
        if wire > arithmetic * 1.01:
            x, to = left + arithmetic * scale, left + wire * scale
            drawn.append(frame(x, y + 21, to - x, 17, opacity=0.8, dashed=True))
            drawn.append(text((x + to) / 2, y + 34, say("waits"), 11, "middle"))
        spoken.append(
            f"{tokens:,} tokens: communication {wire:.2f} ms, arithmetic {arithmetic:.2f} ms"
        )
    says = (
        "Bars of time for one layer of the 8B model with FSDP on H100s, for three numbers of "
        f"tokens per device. {'. '.join(spoken)}. The communication takes the same time in all "
        "three. With 1,024 tokens the arithmetic is shorter, so the device waits. From "
        f"{limit:,} tokens on, the arithmetic takes at least as long."
    )
    return figure(360, 30 + 62 * 3 - 14, says, drawn)


def draw():
    return {
        "training_memory": training_memory(),
        "strategy_grid": strategy_grid(),
        "communication_bound": communication_bound(),
    }


if __name__ == "__main__":
    write(draw())
