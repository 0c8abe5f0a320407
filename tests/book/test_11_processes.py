"""Chapter 11, "Many processes, one program"."""

import time

import jax
import numpy as np
import pytest

from many_devices.processes import Auto, Job, run_together, say

SECONDS = 4


def meet_late(name, seconds):
    """A collective that compiles, and then one to which process 1 comes later."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(Auto,))
    operation = {"psum_scatter": jax.lax.psum_scatter, "all_gather": jax.lax.all_gather}[name]
    data = jax.P("data")
    mapped = jax.jit(
        jax.shard_map(
            lambda x: operation(x, "data", tiled=True), mesh=mesh, in_specs=data, out_specs=data
        )
    )
    x = jax.device_put(np.arange(64.0), jax.NamedSharding(mesh, data))
    jax.block_until_ready(mapped(x))
    if jax.process_index() == 1:
        time.sleep(seconds)
    try:
        jax.block_until_ready(mapped(x))
        say("they met")
    except jax.errors.JaxRuntimeError as error:
        say(" ".join(str(error).split()))


@pytest.fixture(scope="module")
def ends():
    """What process 0 said of each collective: process 1 came after XLA's limit of four seconds."""
    flag = {"XLA_FLAGS": f"--xla_cpu_collective_timeout_seconds={SECONDS}"}
    names = ["psum_scatter", "all_gather"]
    jobs = [
        Job(meet_late, 2, 2, given={"name": name, "seconds": 2 * SECONDS}, settings=flag, dies=True)
        for name in names
    ]
    return {name: lives[0].log[1] for name, lives in zip(names, run_together(*jobs), strict=True)}


def test_a_gather_between_processes_on_cpus_keeps_to_the_limit_of_xla(ends):
    """A gather raises when another process comes later than xla_cpu_collective_timeout_seconds."""
    assert ends["all_gather"].startswith("UNKNOWN: Gloo AllGather failed")


def test_a_reduce_scatter_keeps_to_that_limit_since_jax_0_12(ends):
    """Since JAX 0.12 a reduce-scatter keeps to XLA's limit as well; before it had a limit of its own,
    30 s, which no flag changes (jax#40831)."""
    if jax.__version_info__ >= (0, 12):
        assert "Gloo ReduceScatter timed out" in ends["psum_scatter"]
    else:
        assert ends["psum_scatter"] == "they met"  # after eight seconds: less than 30
