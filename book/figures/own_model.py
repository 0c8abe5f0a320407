"""Figure: the weights of "Train your own Flax model", and the piece that its rules give device 0."""

from kit import DATA, INK, figure, frame, kept, key_of_pieces, line, rect, text, write
from page_cells import run_cells

PAGE = run_cells("own-model", "imports", "rules", "spec")
DEVICES = 8
SIZES = {"D": 24, "H × C": 24, "4D": 96, "V": 96}  # units of the drawing; 24 of them are 64 numbers
WEIGHTS = {  # path: (rows, columns, which of the two each dimension of the weight belongs to, x, y)
    "embed/embedding": ("V", "D", (0, 1), 0, 48),
    "query/kernel": ("D", "H × C", (0, 1, 1), 66, 48),
    "out/kernel": ("H × C", "D", (0, 0, 1), 66, 120),
    "up/kernel": ("D", "4D", (0, 1), 190, 48),
    "head/kernel": ("D", "V", (0, 1), 190, 120),
    "down/kernel": ("4D", "D", (0, 1), 318, 48),
}
NAMES = {"query/kernel": "query, key, value"}


def sharded_side(path, sides):
    """Are the rows (0) or the columns (1) of this weight in pieces, by the rules of the page?"""
    spec = PAGE["spec_of"](path.split("/"))
    (side,) = (sides[n] for n, axis in enumerate(spec) if axis == "data")
    return side


def weight(path):
    """A weight, its cuts and the piece of device 0; its name above, its dimensions below."""
    rows, columns, sides, x, y = WEIGHTS[path]
    height, width = SIZES[rows], SIZES[columns]
    by_rows = sharded_side(path, sides) == 0
    piece = (width, height / DEVICES) if by_rows else (width / DEVICES, height)
    drawn = [rect(x, y, *piece, DATA)]
    for n in range(1, DEVICES):
        if by_rows:
            cut = [(x, y + height * n / DEVICES), (x + width, y + height * n / DEVICES)]
        else:
            cut = [(x + width * n / DEVICES, y), (x + width * n / DEVICES, y + height)]
        drawn.append(line(cut, DATA, 0.6))
    drawn.append(frame(x, y, width, height, opacity=0.6))
    name = NAMES.get(path, path.split("/")[0])
    drawn.append(text(x, y - 6, kept(name), 11, bold=True))
    drawn.append(text(x, y + height + 13, kept(f"{rows} × {columns}"), 11, opacity=0.85))
    return drawn


def draw():
    parts = key_of_pieces()
    spoken = []
    for path, (rows, columns, sides, *_) in WEIGHTS.items():
        parts += weight(path)
        name = NAMES.get(path, path.split("/")[0])
        side = "rows" if sharded_side(path, sides) == 0 else "columns"
        spoken.append(f"{name}, {rows} × {columns}, by {side}")
    assert tuple(PAGE["spec_of"](("up", "bias"))) == ()
    parts += [rect(190, 184, 24, 4, INK, 0.4), text(220, 190, kept("bias, scale"), 11, bold=True)]
    says = (
        f"The weights of the model as rectangles, each cut into {DEVICES} pieces, of which device 0 "
        f"holds the first. {'; '.join(spoken)}. Biases and scales are whole on every device."
    )
    return {"own_model_rules": figure(360, 196, says, parts)}


if __name__ == "__main__":
    write(draw())
