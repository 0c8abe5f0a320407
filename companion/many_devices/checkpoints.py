"""Chapter 5: a training run that is saved while it trains, and resumes on any mesh."""

import contextlib
import functools
import gc
import logging
import sys
import textwrap
import warnings
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from many_devices.helpers import silence_orbax
from many_devices.logical import mesh_of  # noqa: F401, chapter 5 shows it
from many_devices.model import loss_of, strategies, tiny
from many_devices.training import batch_of, make


class Run(NamedTuple):
    """All arrays that training needs to go on."""

    model: nnx.Module
    optimizer: nnx.Optimizer
    rngs: nnx.Rngs


def make_run():
    """A new run: chapter 4's model and optimizer, and a key for noise."""
    model, optimizer = make(tiny, strategies["FSDP x tensor"])
    return Run(model, optimizer, nnx.Rngs(1))


def step(run, batch):
    """One training step on images with noise: the run after it, and the loss."""
    images_BI, labels_B, weights_B = batch
    key = run.rngs()  # a new key; the counter behind it goes up by one
    noisy_BI = images_BI + 0.1 * jax.random.normal(key, images_BI.shape)
    batch = noisy_BI, labels_B, weights_B
    loss, grads = nnx.value_and_grad(loss_of)(run.model, batch)
    run.optimizer.update(run.model, grads)
    return run, loss


@functools.cache
def step_on(mesh):
    """The step, compiled once for each mesh."""
    graphdef, target = nnx.get_abstract_model(make_run, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, nnx.merge(graphdef, target))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def advance(run, mesh, first, last):
    """Take steps first to last - 1: the run after them, and their losses."""
    losses = []
    with jax.set_mesh(mesh):
        for number in range(first, last):
            rows = np.random.default_rng(number).choice(1437, 64, replace=False)
            run, loss = step_on(mesh)(run, batch_of(rows, mesh))
            losses.append(loss)
    return run, [float(loss) for loss in losses]


def restore(path, mesh):
    """The run of a checkpoint, on this mesh."""
    graphdef, target = nnx.get_abstract_model(make_run, mesh)
    return nnx.merge(graphdef, ocp.load(path, target))


when = ocp.training.save_decision_policies
keep = ocp.training.preservation_policies


def open_series(folder):
    """Save every second step and at preemption; keep the last two, and every fourth."""
    to_save = [when.FixedIntervalPolicy(2), when.PreemptionCheckpointingPolicy()]
    to_keep = [keep.LatestN(2), keep.EveryNSteps(4)]
    return ocp.training.Checkpointer(
        folder,
        save_decision_policy=when.AnySavePolicy(to_save),
        preservation_policy=keep.AnyPreservationPolicy(to_keep),
        cleanup_tmp_directories=True,  # delete what a kill left unfinished
    )


def start(saver, mesh):
    """The number of steps taken, and the run: from the newest checkpoint, or new."""
    if saver.latest is None:
        with jax.set_mesh(mesh):
            return 0, jax.jit(make_run)()
    graphdef, target = nnx.get_abstract_model(make_run, mesh)
    loaded = saver.load(abstract_state=target)  # without a number: the newest
    return saver.latest.step, nnx.merge(graphdef, loaded)


def train_until(last, folder, mesh):
    """Train up to step `last`, from the newest checkpoint in the folder if it has one."""
    losses = []
    with open_series(folder) as saver:
        number, run = start(saver, mesh)
        print("starts with step", number, flush=True)
        while number < last:
            run, new = advance(run, mesh, number, number + 1)
            losses += new
            number += 1  # steps taken so far
            saver.save_async(number, nnx.state(run), force=number == last)
    return run, losses


@contextlib.contextmanager
def quiet_orbax():
    """Inside, the error of a failed save or load is raised, and not printed as well.

    Orbax also logs it, and coroutines that it left behind repeat it when they are deleted.
    """
    hook, level = sys.unraisablehook, logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            silence_orbax()
            yield
            gc.collect()
    finally:
        logging.disable(level)
        sys.unraisablehook = hook


def message_of(function, *inputs):
    """The error that function(*inputs) raises, line by line; no error is a mistake."""
    try:
        with quiet_orbax():
            function(*inputs)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return "\n".join(textwrap.fill(line, 88, subsequent_indent="      ") for line in lines)
    raise AssertionError("nothing was raised")
