"""Training of the stacked model: the step, batches of digits, twenty steps, the step from shapes."""

import functools
from collections import namedtuple
from functools import partial

import jax
import numpy as np
from flax import nnx

import meshscope as ms
from many_devices.data import images_BI, labels_B
from many_devices.model import adamw, compiled_step
from many_devices.stacked import Model, loss_of, strategies, tiny

P = jax.P
data_parallel, fsdp = strategies["data parallel"], strategies["FSDP"]
mesh = data_parallel.mesh()


def make(config, strategy):
    """A new model and its optimizer."""
    model = Model(config, strategy, nnx.Rngs(0))
    return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)  # trains the Params


def step(model, optimizer, batch):
    """One training step: everything that changed, and the loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return model, optimizer, loss


def batch_of(rows, mesh, size=64):
    """These rows of the data as a sharded batch; padded rows have weight 0."""
    weights_B = np.arange(size) < len(rows)
    rows = np.pad(rows, (0, size - len(rows)))
    arrays = images_BI[rows], labels_B[rows], weights_B.astype("float32")
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("data")))


def shuffled(epoch, size=64):
    """The training rows in random order, in pieces of `size`; the last is shorter."""
    rows = np.random.default_rng(epoch).permutation(1437)
    return np.split(rows, range(size, 1437, size))


@functools.cache
def first_weights():
    """The same first weights for every strategy, as arrays on the host, in the order of the tree."""
    with jax.set_mesh(mesh):
        made = jax.jit(partial(make, tiny, data_parallel))()
    return jax.device_get(jax.tree.leaves(made))


def place(strategy, make=make):
    """The first weights and a new optimizer, sharded as the strategy says."""
    build = partial(make, tiny, strategy)
    graphdef, state = nnx.get_abstract_model(build, strategy.mesh())
    leaves, tree = jax.tree.flatten(state)
    arrays = jax.device_put(first_weights(), [leaf.sharding for leaf in leaves])
    return nnx.merge(graphdef, jax.tree.unflatten(tree, arrays))


Trained = namedtuple("Trained", "program model optimizer losses")
QUICK = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower


def train(strategy, make=make):
    """Twenty steps of the tiny model: the compiled step, the model, the optimizer, the losses."""
    model, optimizer = place(strategy, make)
    mesh, losses = strategy.mesh(), []
    batches = [batch_of(rows, mesh) for rows in shuffled(0)[:20]]
    with jax.set_mesh(mesh):
        jitted = compiled_step(step, model, optimizer)
        program = jitted.lower(model, optimizer, batches[0]).compile(QUICK)
    for batch in batches:
        model, optimizer, loss = program(model, optimizer, batch)
        losses.append(float(loss))
    return Trained(program, model, optimizer, losses)


def shapes(config, strategy, B, make=make):
    """Model, optimizer and batch as shapes with shardings."""
    by_rows = jax.NamedSharding(strategy.mesh(), P("data"))
    build = partial(make, config, strategy)
    model, optimizer = nnx.merge(*nnx.get_abstract_model(build, strategy.mesh()))
    batch = (
        jax.ShapeDtypeStruct((B, config.I), "float32", sharding=by_rows),
        jax.ShapeDtypeStruct((B,), "int32", sharding=by_rows),
        jax.ShapeDtypeStruct((B,), "float32", sharding=by_rows),
    )
    return model, optimizer, batch


def step_program(config, strategy, B, make=make, step=step):
    """The step for a batch of B rows, compiled and not run."""
    model, optimizer, batch = shapes(config, strategy, B, make)
    with jax.set_mesh(strategy.mesh()):
        jitted = compiled_step(step, model, optimizer)
        return jitted.lower(model, optimizer, batch).compile(QUICK)


def sent_mb(program):
    """What one device sends in a run of the program, in MB."""
    table = ms.collectives(program).by("kind")
    return sum(totals.wire_bytes for totals in table.values()) / 1e6
