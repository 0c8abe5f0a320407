"""Figure: 49 products of sharded matrices in Explicit mode, as JAX types them.

A row is a sharding of A, a column a sharding of B, a cell the sharding of A · B. JAX answers on an
abstract mesh, so no device is needed. Something moves where one contracted dimension is sharded.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kit import DATA, INK, MODEL, figure, kept, line, rect, say, text, write

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
COLOUR = {"data": DATA, "model": MODEL}
SPECS = [
    (None, None),
    ("data", None),
    ("model", None),
    (None, "data"),
    (None, "model"),
    ("data", "model"),
    ("model", "data"),
]
BOX, STEP, LEFT, TOP = 30, 43, 62, 70  # px


def product(a_spec, b_spec):
    """The spec of A · B, or None where JAX raises an error."""

    def abstract(spec):
        sharding = NamedSharding(MESH, P(*spec))
        return jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)

    try:
        with jax.sharding.use_abstract_mesh(MESH):
            return tuple(jax.eval_shape(jnp.dot, abstract(a_spec), abstract(b_spec)).sharding.spec)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":
            raise
        return None


def moves(a_spec, b_spec):
    """An accepted product whose contraction is sharded in one matrix."""
    return a_spec[1] is not None or b_spec[0] is not None


def matrix(x, y, spec):
    """A square with stripes: rows in the colour of their axis, columns in theirs."""
    rows, columns = spec
    drawn = [rect(x, y, BOX, BOX, INK, 0.1, 2)]
    for n in range(1, 4):
        if rows and (n == 2 or MESH.shape[rows] == 4):
            at = y + BOX * n / 4
            drawn.append(line([(x, at), (x + BOX, at)], COLOUR[rows], 3))
        if columns and (n == 2 or MESH.shape[columns] == 4):
            at = x + BOX * n / 4
            drawn.append(line([(at, y), (at, y + BOX)], COLOUR[columns], 3))
    return drawn


def cross(x, y):
    a, b, more = BOX * 0.3, BOX * 0.7, ' stroke-opacity=".55" stroke-linecap="round"'
    return [
        line([(x + a, y + a), (x + b, y + b)], INK, 2, more),
        line([(x + a, y + b), (x + b, y + a)], INK, 2, more),
    ]


def dot(x, y):
    return f'<circle cx="{x + BOX + 5:g}" cy="{y + 3:g}" r="3.2" fill="currentColor"/>'


def key(y):
    data = kept(f'<tspan fill="{DATA}" font-weight="600">data</tspan>')
    model = kept(f'<tspan fill="{MODEL}" font-weight="600">model</tspan>')
    return [
        text(0, 12, say("halves by {data}, quarters by {model}", data=data, model=model), 12),
        text(LEFT - 16, 50, "B", 14, bold=True),
        text(10, TOP + BOX / 2 + 5, "A", 14, bold=True),
        *cross(-4, y - 19),
        text(22, y, say("raises an error"), 12),
        dot(120, y - 7),
        text(166, y, say("no error, but something moves"), 12),
    ]


def draw():
    answers = {(a, b): product(a, b) for a in SPECS for b in SPECS}
    accepted = [pair for pair, spec in answers.items() if spec is not None]
    costly = [pair for pair in accepted if moves(*pair)]
    parts = []
    for i, spec in enumerate(SPECS):
        parts += matrix(LEFT + STEP * i, TOP - BOX - 12 + 4, spec)
        parts += matrix(LEFT - BOX - 12, TOP + STEP * i, spec)
    bottom = TOP + STEP * len(SPECS) - STEP + BOX
    parts += [
        line([(LEFT - 6, TOP - 4), (LEFT - 6, bottom)], more=' stroke-opacity=".5"'),
        line([(LEFT - 6, TOP - 4), (358, TOP - 4)], more=' stroke-opacity=".5"'),
    ]
    for i, a_spec in enumerate(SPECS):
        for j, b_spec in enumerate(SPECS):
            x, y = LEFT + STEP * j, TOP + 2 + STEP * i
            spec = answers[a_spec, b_spec]
            parts += cross(x, y) if spec is None else matrix(x, y, spec)
            if (a_spec, b_spec) in costly:
                parts.append(dot(x, y))
    says = (
        f"{len(answers)} products of two matrices, each sharded in one of {len(SPECS)} ways by "
        f"data and model. {len(accepted) - len(costly)} need no communication, "
        f"for {len(costly)} something moves, and {len(answers) - len(accepted)} raise an error. "
        "The rows of a product are sharded like the rows of A, its columns like the columns of B. "
        "An error is raised if the contraction is sharded in both, or if one axis appears twice."
    )
    return {"explicit_products": figure(362, bottom + 30, says, parts + key(bottom + 24))}


if __name__ == "__main__":
    write(draw())
