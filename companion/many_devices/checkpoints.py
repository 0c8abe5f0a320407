"""Chapter 5: a training run that is saved while it trains, and resumes on any mesh."""

import contextlib
import gc
import logging
import sys
import textwrap
import warnings

import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from many_devices.helpers import silence_orbax
from many_devices.logical import mesh_of  # noqa: F401, chapter 5 shows it
from many_devices.model import batch_of, compiled_step, make, step, strategies, tiny


def make_run():
    """Make a new model and its optimizer."""
    return make(tiny, strategies["FSDP x tensor"])


def new_run(mesh):
    """Make a new run on this mesh, sharded by its annotations."""
    with jax.set_mesh(mesh):
        return jax.jit(make_run)()


def restore(path, mesh):
    """Load the run of a checkpoint onto this mesh."""
    graphdef, target = nnx.get_abstract_model(make_run, mesh)
    return nnx.merge(graphdef, ocp.load(path, target))


def batch_at(number, mesh):
    """Return the batch of this step, the same on every mesh and in every run."""
    rows = np.random.default_rng(number).choice(1437, 64, replace=False)
    return batch_of(rows, mesh)


def train(run, mesh, first, last, saver=None):
    """Take steps first to last - 1: return the new run and the losses."""
    model, optimizer = run
    losses = []
    with jax.set_mesh(mesh):
        train_step = compiled_step(step, model, optimizer)
        for number in range(first, last):
            batch = batch_at(number, mesh)
            model, optimizer, loss = train_step(model, optimizer, batch)
            losses.append(loss)
            if saver is not None:
                state = nnx.state((model, optimizer))
                saver.save_async(number + 1, state, force=(number + 1 == last))
    return (model, optimizer), [float(loss) for loss in losses]


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
    """Return the run: from the newest checkpoint, or a new one."""
    if saver.latest is None:
        return new_run(mesh)
    return restore(saver.latest.path, mesh)


def train_until(last, folder, mesh):
    """Train until `last` steps are taken, from the newest checkpoint, if any."""
    with open_series(folder) as saver:
        run = start(saver, mesh)
        taken = int(run[1].step[...])  # run[1] is the optimizer
        print("starts with step", taken, flush=True)
        return train(run, mesh, taken, last, saver)


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
