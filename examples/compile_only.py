"""What each device would hold and send: the step, compiled from shapes, for any number of devices."""

import argparse
import functools
import os
import time
from typing import Any

import jax
from flax import nnx
from jax.experimental import topologies

import meshscope as ms
import options
import steps
import strategies
from endings import FINISHED, reason
from model import matmul_weights
from strategies import Refused


def described_devices(topology: str | None) -> list[Any]:
    """Devices of a topology that is not here; the ones that are, if none is named."""
    if topology is None:
        return jax.devices()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it looks for a TPU in this machine
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:  # libtpu is missing, or does not know the name
        raise Refused(
            f"--topology {topology} cannot be described ({reason(error)}): install libtpu (pip "
            "install libtpu), and name a topology as in v5e:4x4"
        ) from error


def compile_only(args: argparse.Namespace) -> int:
    """Print bytes per device, and collectives by kind and axis."""
    config, splits = options.config_of(args), options.splits_of(args)
    asked = {axis: getattr(args, axis) for axis in strategies.AXES}
    mesh = strategies.make_mesh(args.strategy, asked, splits, described_devices(args.topology))
    strategies.check_sizes(args.strategy, mesh, splits)
    tx = steps.optimizer_of(options.recipe_of(args))
    make = functools.partial(steps.make_run, config, args.strategy, tx, args.seed)
    with jax.set_mesh(mesh), jax.default_matmul_precision("float32"):
        run = nnx.merge(*nnx.get_abstract_model(make, mesh))
        places = jax.tree.map(lambda leaf: leaf.sharding, run)
        step = steps.compiled_step(places, mesh, args.accumulate)
        began = time.perf_counter()
        try:
            program = step.lower(run, steps.batch_shape(mesh, args.batch, args.S)).compile()
        except jax.errors.JaxRuntimeError as error:
            raise Refused(f"the compiler raised an error: {reason(error)}") from error
    shown = strategies.flags_of(args.strategy, strategies.sizes_of(mesh))
    kind = mesh.devices.flat[0].device_kind
    weights, seconds = matmul_weights(config) + config.V * config.D, time.perf_counter() - began
    print(
        f"{weights:,} weights in matrices, strategy {args.strategy}: {shown} of {kind}; compiled "
        f"in {seconds:.0f} s"
    )
    print(f"{steps.bytes_held(run):,} bytes of weights and moments on each device\n")
    print(ms.memory(program), "\n")
    print(ms.collectives(program).by("kind", "axes"))
    return FINISHED
