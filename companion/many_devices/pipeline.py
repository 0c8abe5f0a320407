"""The model of chapter 12, and the bookkeeping of the schedules on its pages 12b and 12c.

Letters: L layers, M microbatches, B examples of one, D width, F hidden width. A schedule is a list of
rows, one for each tick; a row has what each stage does, an `Op` or None.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Op(NamedTuple):
    """One operation of a stage."""

    kind: str  # F: the forward pass, B: the gradient of the input, W: of the weights
    stage: int
    microbatch: int


def make_params():
    """The weights of eight layers."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "in_LDF": 0.2 * jax.random.normal(keys[0], (8, 32, 64)),
        "out_LFD": 0.2 * jax.random.normal(keys[1], (8, 64, 32)),
    }


def make_batch(M=8):
    """M microbatches of eight examples, (M, 8, 32), and their targets."""
    keys = jax.random.split(jax.random.key(0), 3)
    x_MBD = jax.random.normal(keys[2], (M, 8, 32))
    return x_MBD, jnp.sin(x_MBD)


def run_layers(weights, x_BD):
    def layer(x_BD, weight):
        h_BF = jnp.tanh(x_BD @ weight["in_LDF"])  # L is gone: one layer
        return x_BD + h_BF @ weight["out_LFD"], None

    y_BD, _ = jax.lax.scan(layer, x_BD, weights)
    return y_BD


def error(y_BD, target_BD):
    return jnp.mean((y_BD - target_BD) ** 2)


def single_loss(params, x_MBD, target_MBD):
    """The loss of the whole batch on one device."""
    y_MBD = jax.vmap(run_layers, in_axes=(None, 0))(params, x_MBD)
    return error(y_MBD, target_MBD)


def place_inputs(rows):
    """The slot for the input of each (stage, microbatch).

    A slot is taken from the tick on which the input arrives until both B and W are done. An input
    takes the lowest free slot.
    """
    when = {op: tick for tick, row in enumerate(rows) for op in row if op}
    arrivals = []
    for kind, stage, m in when:
        if kind == "F":
            # Stage 0 reads its input from the batch; others get it on the tick after it is made
            arrival = when["F", stage - 1, m] + 1 if stage > 0 else when["F", stage, m]
            arrivals.append((arrival, stage, m))
    slot_of = {}
    last_use = np.full((len(rows[0]), len(arrivals)), -1)  # tick on which each slot was last used
    for arrival, stage, m in sorted(arrivals):
        slot = int(np.argmax(last_use[stage] < arrival))  # the first that is free
        last_use[stage, slot] = max(when["B", stage, m], when["W", stage, m])
        slot_of[stage, m] = slot
    return slot_of


def schedule_table(rows):
    """The schedule as numbers, (tick, stage, 5): kind, m, slot, put_x, put_dy.

    kind is 0 if the stage is idle, then 1, 2, 3 for F, B, W, which work on microbatch m, whose input
    is in `slot`. put_x and put_dy are the slots for an input and a gradient that arrive on this
    tick, or -1.
    """
    stages = len(rows[0])
    slot_of = place_inputs(rows)
    table = np.zeros((len(rows), stages, 5), "int32")
    table[..., 3:] = -1
    for tick, row in enumerate(rows):
        for op in row:
            if op is None:
                continue
            kind, stage, m = op
            table[tick, stage, :3] = "-FBW".index(kind), m, slot_of[stage, m]
            # What it sends arrives at the neighbour on the next tick
            if kind == "F" and stage + 1 < stages:
                table[tick + 1, stage + 1, 3] = slot_of[stage + 1, m]
            if kind == "B" and stage > 0:
                table[tick + 1, stage - 1, 4] = slot_of[stage - 1, m]
    return table
