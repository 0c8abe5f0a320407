"""Figures of the pages about logical axes: names and two tables; weights by tables, as grids.

Tables and names are the pages' own: their cells are run. The dimensions of each weight are listed
here; tests of the pages compare the specs that follow with every weight of their models.
"""

import jax
from kit import DATA, INK, MODEL, arrow, figure, frame, kept, line, lines, rect, say, text, write
from page_cells import run_cells

STRATEGIES = run_cells("06-logical-axes", "imports", "rules", "tables")["strategies"]
OF_MLP = {name: rules for name, (rules, _) in STRATEGIES.items()}
OF_TRANSFORMER = {
    name: rules
    for name, (rules, _) in run_cells("06a-choosing-tables", "tables")["strategies"].items()
}
COLOUR = {"data": DATA, "model": MODEL}
NAME_OF = {"B": "batch", "D": "embed", "F": "hidden", "H": "heads", "C": "head_size", "V": "vocab"}

SIZE = {"rows": 8, "columns": 16}
PIECES = {"data": 2, "model": 4}


def matrix(x, y, rows_axis, columns_axis):
    """An 8 × 16 array with its cuts, and the piece of the first device."""
    wide, high = 96, 48
    rows, columns = PIECES.get(rows_axis, 1), PIECES.get(columns_axis, 1)
    colour = COLOUR[rows_axis or columns_axis]
    drawn = [rect(x, y, wide / columns, high / rows, colour, 0.85)]
    for i in range(1, rows):
        drawn.append(line([(x, y + high * i / rows), (x + wide, y + high * i / rows)], colour, 1.2))
    for j in range(1, columns):
        at = x + wide * j / columns
        drawn.append(line([(at, y), (at, y + high)], colour, 1.2))
    return [*drawn, frame(x, y, wide, high, opacity=0.6)]


def logical_axes():
    """One weight with names, two tables, two placements."""
    left, table, right = 0, 118, 262
    drawn = [
        text(left + 42, 14, say("the weight"), 12.5, "middle", True),
        text(table + 60, 14, say("the table"), 12.5, "middle", True),
        text(right + 48, 14, say("its sharding"), 12.5, "middle", True),
    ]
    middle = 112  # of the weight, between the two tables
    drawn += [
        frame(left + 18, middle - 20, 66, 40, opacity=0.8),
        text(left + 51, middle + 4, kept("w_DF"), 13, "middle", True),
        text(left + 51, middle - 27, kept("hidden"), 12, "middle"),
        f'<g transform="rotate(-90 {left + 10} {middle})">'
        + text(left + 10, middle + 4, kept("embed"), 12, "middle")
        + "</g>",
    ]
    ways = [("by_columns", None, "model", 44), ("by_rows", "model", None, 136)]
    for name, embed, hidden, y in ways:
        drawn.append(text(table, y - 2, kept(name), 11.5, opacity=0.85))
        drawn.append(frame(table, y + 4, 120, 46, opacity=0.5))
        for row, (logical, axis) in enumerate([("embed", embed), ("hidden", hidden)]):
            at = y + 22 + 20 * row
            drawn.append(text(table + 8, at, kept(logical), 12))
            drawn.append(arrow(table + 54, at - 4, table + 66, at - 4, width=1.1))
            word = text(table + 72, at, kept(axis or "None"), 12, bold=axis is not None)
            drawn.append(f'<g fill="{COLOUR[axis]}">{word}</g>' if axis else word)
        drawn.append(arrow(table + 124, y + 27, right - 8, y + 27))
        drawn += matrix(right, y + 3, embed, hidden)
        spec = str(jax.P(embed, hidden)).replace("PartitionSpec", "P")
        drawn.append(text(right + 48, y + 66, kept(spec), 11.5, "middle"))
        turn = 104 if y < middle - 20 else middle + 8
        drawn.append(
            line([(88, turn), (100, turn), (100, y + 27)], more=' stroke-linejoin="round"')
        )
        drawn.append(arrow(100, y + 27, table - 5, y + 27))
    says = (
        "One weight, w_DF, with its dimensions named embed and hidden. The table by_columns maps "
        "embed to None and hidden to model, and the array is sharded into four groups of columns. "
        "The table by_rows maps embed to model and hidden to None, and it is sharded into four "
        "groups of rows."
    )
    return figure(360, 208, says, drawn)


# What it is called, its dimensions. A small letter: this dimension is not named.
SMALL = [
    (kept("w_DF"), "DF"),
    (kept("b_F"), "F"),
    (kept("w_FD"), "FD"),
    None,  # from here on activations
    (kept("x_BD"), "Bd"),
]
ROWS = [
    (kept("w_ID"), "ID"),
    (kept("place_SD"), "SD"),
    (say("two scales"), "D"),
    (kept("w_q, w_k, w_v"), "DHC"),
    (kept("w_o"), "HCD"),
    (kept("w_DF"), "DF"),
    (kept("b_F"), "F"),
    (kept("w_FD"), "FD"),
    (kept("b_D"), "D"),
    (kept("w_DV"), "DV"),
    None,
    (kept("x_BSD"), "BSd"),
    (kept("logits_BV"), "BV"),
]
COLUMNS = {
    "data parallel": say("data\nparallel"),
    "FSDP": kept("FSDP"),
    "tensor parallel": say("tensor\nparallel"),
    "FSDP x tensor": say("FSDP\n× tensor"),
}
SIDE, LEFT, WIDE, TOP, HIGH = 17, 98, 66, 42, 23


def boxes(x, y, dimensions, rules):
    """A box for each dimension, in the colour of the axis that shards it."""
    names = [NAME_OF.get(letter) for letter in dimensions]
    drawn = []
    for number, (letter, axis) in enumerate(zip(dimensions, rules(*names), strict=True)):
        at, middle = x + (SIDE + 2) * number, SIDE / 2
        if axis:
            drawn.append(rect(at, y, SIDE, SIDE, COLOUR[axis], radius=2))
            word = text(at + middle, y + 13, letter.upper(), 12, "middle", True)
            drawn.append(f'<g fill="#fff">{word}</g>')
        else:
            drawn.append(frame(at, y, SIDE, SIDE, INK, opacity=0.4))
            drawn.append(text(at + middle, y + 13, letter.upper(), 12, "middle", opacity=0.75))
    return drawn


def grid(rows, tables, says):
    """Rows are weights and activations, columns are tables."""
    drawn = []
    for number, words in enumerate(COLUMNS.values()):
        x = LEFT + WIDE * number
        y = 14 if "\n" in words else 21
        drawn += lines(x, y, 14, words, 11.5, bold=True)
    y = TOP
    for entry in rows:
        if entry is None:
            drawn.append(line([(0, y + 1), (360, y + 1)], more=' stroke-opacity=".35"'))
            y += 8
            continue
        name, dimensions = entry
        drawn.append(text(0, y + 13, name, 12))
        for number, table in enumerate(COLUMNS):
            drawn += boxes(LEFT + WIDE * number, y, dimensions, tables[table])
        y += HIGH
    key = [
        ("data", say("sharded along {axis}", axis=kept("data")), 0),
        ("model", say("along {axis}", axis=kept("model")), 152),
        (None, say("whole"), 258),
    ]
    y += 4
    for axis, words, x in key:
        if axis:
            drawn.append(rect(x, y, SIDE, SIDE, COLOUR[axis], radius=2))
        else:
            drawn.append(frame(x, y, SIDE, SIDE, INK, opacity=0.4))
        drawn.append(text(x + SIDE + 6, y + 13, words, 12))
    return figure(360, y + SIDE + 4, says, drawn)


def mlp_grid():
    """The MLP of the chapter, and the batch."""
    says = (
        "A grid. Rows are the three weights of the MLP and, below a line, the batch, each with a "
        "box for every dimension. Columns are four tables. Data parallel: only B of the batch is "
        "blue. FSDP: every D of a weight is blue, and B of the batch. Tensor parallel: every F is "
        "orange. FSDP with tensor: both. D of the batch is always whole."
    )
    return grid(SMALL, OF_MLP, says)


def named_grid():
    """The transformer of the page about choosing a table, and two activations."""
    says = (
        "A grid. Rows are the weights of the model and, below a line, two activations, each with a "
        "box for every dimension. Columns are four tables. Data parallel: only B of activations is "
        "blue. FSDP: every D of a weight is blue, and B of activations. Tensor parallel: every F, "
        "H and V is orange. FSDP with tensor: both. D of an activation, and C, are always whole."
    )
    return grid(ROWS, OF_TRANSFORMER, says)


def letters(x, y, dimensions, cut):
    """A box for each dimension; the one that is cut has the colour of `model`."""
    drawn = []
    for number, letter in enumerate(dimensions):
        at, middle = x + (SIDE + 2) * number, SIDE / 2
        if letter == cut:
            drawn.append(rect(at, y, SIDE, SIDE, MODEL, radius=2))
            word = text(at + middle, y + 13, letter, 12, "middle", True)
            drawn.append(f'<g fill="#fff">{word}</g>')
        else:
            drawn.append(frame(at, y, SIDE, SIDE, INK, opacity=0.4))
            drawn.append(text(at + middle, y + 13, letter, 12, "middle", opacity=0.75))
    return drawn


def head_size():
    """Queries times keys, with heads or features of a head along `model`."""
    ways = [
        (
            say("{name} along {axis}", name=kept("heads"), axis=kept("model")),
            "H",
            say("whole scores of its own heads"),
        ),
        (
            say("{name} along {axis}", name=kept("head_size"), axis=kept("model")),
            "C",
            say("partial scores of all heads: {collective}", collective=kept("all-reduce")),
        ),
    ]
    drawn = []
    for number, (title, cut, outcome) in enumerate(ways):
        y = 14 + 84 * number
        drawn.append(text(0, y, title, 12.5, bold=True))
        top = y + 24
        for x, name, dimensions in [(0, say("queries"), "BSHC"), (112, say("keys"), "BTHC")]:
            drawn.append(text(x, top - 5, name, 11.5))
            drawn += letters(x, top, dimensions, cut)
        drawn.append(text(93, top + 14, "·", 16, "middle", True))
        drawn.append(arrow(194, top + 9, 218, top + 9))
        drawn.append(text(226, top - 5, say("scores"), 11.5))
        drawn += letters(226, top, "BHST", cut)
        drawn.append(text(360, top + 36, outcome, 12, "end"))
    says = (
        "Queries with the dimensions B, S, H and C are multiplied with keys, B, T, H and C, to "
        "scores, B, H, S and T. With heads along model, H is coloured in all three, and each "
        "device has the scores of its heads. With head_size along model, C is coloured in queries "
        "and keys only, and each device has a part of every score."
    )
    return figure(360, 162, says, drawn)


def draw():
    return {
        "logical_axes": logical_axes(),
        "mlp_grid": mlp_grid(),
        "named_grid": named_grid(),
        "head_size": head_size(),
    }


if __name__ == "__main__":
    write(draw())
