"""Chapter 9, "FSDP by hand with shard_map": gather, use, free, scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from layers_of_fsdp import REMATS, in_one_layer
from many_devices.compiled import stored_program
from many_devices.model import Model, Strategy, large

P = jax.P


# What FSDP costs


def sent(name, compiler):
    """Gigabytes that a device sends, to one decimal, as the table has them."""
    return f"{sum(row['wire'] for row in stored_program(name)[compiler]['moves']) / 1e9:.1f}"


def test_data_parallelism_sends_30_1_gb_for_one_gradient_of_the_large_model():
    """Data parallelism all-reduces 17.2 GB of gradients, and the loss: 2 x 7/8 of it is 30.1 GB."""
    with nnx.use_eager_sharding(False):
        weights = jax.eval_shape(lambda: Model(large, Strategy(8, 1), nnx.Rngs(0)))
    numbers = 1 + sum(weight.size for weight in jax.tree.leaves(weights))
    assert f"{2 * 7 / 8 * 4 * numbers / 1e9:.1f}" == "30.1"


@pytest.mark.parametrize("compiler, kept, freed", [
    ("gpu", "30.1", "45.1"), ("tpu", "22.9", "30.4"), ("cpu", "30.1", "45.1"),
])  # fmt: skip
def test_fsdp_sends_what_the_table_says(compiler, kept, freed):
    """In float32, H100's and CPU's FSDP send as much as data parallelism, freed half as much again;
    TPU v5e's sends three quarters as much, and freed about as much."""
    assert (sent("fsdp-kept", compiler), sent("fsdp-freed", compiler)) == (kept, freed)


def test_the_tpu_gathers_in_bfloat16_and_the_others_in_float32():
    """The compiler for TPU v5e gathers in bfloat16 what only matmuls read."""
    for compiler in ("cpu", "tpu", "gpu"):
        rows = stored_program("fsdp-freed")[compiler]["moves"]
        gathers = {row["dtype"]: row["wire"] for row in rows if row["kind"] == "all-gather"}
        in_bfloat16 = gathers.get("bfloat16", 0) / sum(gathers.values())
        assert in_bfloat16 > 0.99 if compiler == "tpu" else in_bfloat16 == 0


# If you know PyTorch


def test_reshard_after_forward_is_a_policy_and_not_plain_checkpoint():
    """`reshard_after_forward` gathers again and computes nothing again: in JAX that is
    jax.checkpoint with a policy that frees only what was gathered."""
    kept = in_one_layer(REMATS["kept"])
    assert in_one_layer(REMATS["freed by a policy"]) == kept | {"gathers": 2}
    assert in_one_layer(REMATS["jax.checkpoint"])["matmuls"] > kept["matmuls"]


# Momentum


def moment(axis_type, jitted, in_context):
    """Adam's first moment of a weight in eight pieces."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    w = jax.device_put(np.ones((64, 32), "float32"), jax.NamedSharding(mesh, P("data")))
    init = optax.adam(1e-3).init
    with jax.set_mesh(mesh if in_context else None):
        state, *_ = (jax.jit(init) if jitted else init)(w)
    return state.mu


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_context", [False, True])
def test_outside_jit_moments_are_made_in_pieces(axis_type, in_context):
    """Outside jax.jit, zeros_like inherits the sharding of the weight."""
    assert moment(axis_type, False, in_context).sharding.spec[0] == "data"


def test_inside_jit_and_without_a_mesh_zeros_are_whole_on_one_device():
    """Inside jax.jit, without a mesh in the context, zeros are made whole on one device."""
    assert len(moment(AxisType.Auto, True, False).devices()) == 1


def test_inside_jit_with_an_auto_mesh_they_are_a_copy_on_each_device():
    """While an Auto mesh is set, zeros made inside jax.jit are copies on all its devices."""
    zeros = moment(AxisType.Auto, True, True)
    assert len(zeros.devices()) == 8 and zeros.is_fully_replicated


def test_inside_jit_with_an_explicit_mesh_they_inherit_the_type():
    """While an Explicit mesh is set, zeros made inside jax.jit are in pieces, as the weight is."""
    zeros = moment(AxisType.Explicit, True, True)
    assert zeros.addressable_shards[0].data.shape == (8, 32)
    assert str(jax.typeof(zeros)) == "float32[64@data,32]" and not jnp.any(zeros)
