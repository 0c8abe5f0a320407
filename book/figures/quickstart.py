"""Figure: what each of eight devices holds in the three runs of the quick start."""

from kit import DATA, INK, figure, frame, kept, key_of_pieces, rect, say, text, write

DEVICES, EXAMPLES, ROWS = 8, 64 * 8, 96  # as on the page
RUNS = {  # heading: (devices that work, is the batch sharded?, is the weight sharded?)
    say("One device"): (1, False, False),
    say("Data parallel"): (DEVICES, True, False),
    kept("FSDP"): (DEVICES, True, True),
}
LEFT, STEP, WIDE, STRIPE, PANEL = 52, 38.5, 30, 4, 126


def array(x, y, device, sharded, held=True):
    """An array of eight stripes, and those that this device holds."""
    drawn = [frame(x, y, WIDE, STRIPE * DEVICES, opacity=0.35, dashed=not held)]
    if held and sharded:
        drawn.append(rect(x, y + STRIPE * device, WIDE, STRIPE, DATA))
    elif held:
        drawn.append(rect(x, y, WIDE, STRIPE * DEVICES, INK, 0.4))
    return drawn


def panel(y, heading, devices, batch, weight):
    """One run: devices side by side, the batch above and the weight below."""
    words = say(
        "device 0: {examples} of {all_examples} examples, {rows} of {all_rows} rows",
        examples=EXAMPLES // (DEVICES if batch else 1),
        all_examples=EXAMPLES,
        rows=ROWS // (DEVICES if weight else 1),
        all_rows=ROWS,
    )
    drawn = [
        text(0, y, heading, 13, bold=True),
        text(360, y, words, 11, "end", opacity=0.85),
        text(0, y + 44, say("batch"), 12),
        text(0, y + 86, kept("w_DF"), 12),
    ]
    for device in range(DEVICES):
        x, works = LEFT + STEP * device, device < devices
        drawn.append(text(x + WIDE / 2, y + 19, str(device), 11, "middle", opacity=0.85))
        drawn += array(x, y + 24, device, batch, works)
        drawn += array(x, y + 66, device, weight, works)
    return drawn


def draw():
    parts = key_of_pieces()
    for number, (heading, (devices, batch, weight)) in enumerate(RUNS.items()):
        parts += panel(40 + PANEL * number, heading, devices, batch, weight)
    says = (
        "Eight devices side by side in three runs, the batch above and the weight w_DF below. "
        f"One device: device 0 holds {EXAMPLES} examples and {ROWS} rows of the weight, the other "
        f"seven hold nothing. Data parallel: each device holds its own {EXAMPLES // DEVICES} "
        f"examples and all {ROWS} rows. FSDP: each device holds its own {EXAMPLES // DEVICES} "
        f"examples and its own {ROWS // DEVICES} rows."
    )
    return {"quickstart": figure(360, 40 + PANEL * len(RUNS) - 22, says, parts)}


if __name__ == "__main__":
    write(draw())
