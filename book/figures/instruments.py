"""Figures: what the instruments draw, for the page about them and for the README of meshscope.

The plan is that of `python -m meshscope plan examples/plan_transformer.py --devices 64 --chip h100`,
whose results are kept in book/compiled/plans.jsonl, with those of two compilers for chips.
"""

import json
import os
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")

import jax  # noqa: E402
from kit import write  # noqa: E402

import meshscope as ms  # noqa: E402
from meshscope._plan_outcome import outcome_of  # noqa: E402

RESULTS = Path(__file__).parents[1] / "compiled" / "plans.jsonl"


def plan():
    chip = ms.CHIPS["h100"]
    records = map(json.loads, RESULTS.read_text("utf-8").splitlines())
    outcomes = [outcome_of(record) for record in records if record["compiler"] == "cpu"]
    return ms.Plan(tuple(outcomes), chip, chip.hbm, "cpu", 64).ranked()


def draw():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)
    sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
    drawings = {
        "instruments_show": ms.show(jax.ShapeDtypeStruct((8, 16), "float32", sharding=sharding)),
        "instruments_mesh": ms.show(mesh),
        "instruments_plan": plan().drawing,
    }
    grey = '<svg color="#777" '  # of a file, as figure() of the kit
    return {name: drawn.svg.replace("<svg ", grey, 1) + "\n" for name, drawn in drawings.items()}


if __name__ == "__main__":
    write(draw())
