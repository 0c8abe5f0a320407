"""The page "One matmul in Auto, Explicit and Manual mode"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from many_devices.compiled import stored_program
from many_devices.helpers import attempt, traffic
from pages import compiled_for_cpu

PAGE = "01d-modes"
P = jax.P


@compiled_for_cpu
def test_h_is_sharded_along_both_axes(page):
    """h is divided along data and model, and w_out by rows along model."""
    assert page.h_BF.sharding == jax.NamedSharding(page.mesh, P("data", "model"))
    assert page.w_out_FD.sharding == jax.NamedSharding(page.mesh, P("model", None))
    assert page.h_BF.addressable_shards[0].data.shape == (4, 6)
    assert page.mesh.axis_types == (AxisType.Auto,) * 2


def test_three_modes_give_one_result(page):
    """Auto, Explicit and Manual compute NumPy's y."""
    for y_BD in (page.y_auto_BD, page.y_explicit_BD, page.y_manual_BD):
        np.testing.assert_allclose(y_BD, page.y_host, rtol=0, atol=0.2)  # at worst in bfloat16

    def explicit_dot(h_BF, w_FD):
        return jnp.dot(h_BF, w_FD, out_sharding=page.y_sharding)

    with jax.default_matmul_precision("highest"):
        for y_BD in (
            jnp.dot(page.h_BF, page.w_out_FD),
            explicit_dot(page.h_typed_BF, page.w_typed_FD),
            jax.jit(page.dot_by_hand)(page.h_BF, page.w_out_FD),
        ):
            np.testing.assert_allclose(y_BD, page.y_host, rtol=1e-4, atol=1e-4)


@compiled_for_cpu
def test_three_modes_have_the_same_all_reduce(page):
    """In all three modes one all-reduce along model adds the partial sums, 128 bytes."""

    def explicit_dot(h_BF, w_FD):
        return jnp.dot(h_BF, w_FD, out_sharding=page.y_sharding)

    manual = traffic(page.dot_by_hand, page.h_BF, page.w_out_FD, mesh=page.mesh)
    assert manual.by("kind", "axes").bytes("all-reduce", ("model",)) == 128
    wanted = manual.by("kind", "axes")
    assert traffic(jnp.dot, page.h_BF, page.w_out_FD).by("kind", "axes") == wanted
    explicit = traffic(explicit_dot, page.h_typed_BF, page.w_typed_FD)
    assert explicit.by("kind", "axes") == wanted


@compiled_for_cpu
def test_in_auto_mode_the_compiler_chose_the_batch_along_data(page):
    """The compiler's result is sharded as P("data", None); the type does not say so."""
    wanted = jax.NamedSharding(page.mesh, P("data", None))
    assert page.y_auto_BD.sharding.is_equivalent_to(wanted, 2)
    assert str(jax.typeof(page.h_BF)) == "float32[8,24]"


def test_on_an_explicit_mesh_the_type_shows_the_sharding(page):
    """The types of h and y name the axes; 24@model is six columns on each device."""
    assert str(jax.typeof(page.h_typed_BF)) == "float32[8@data,24@model]"
    assert str(jax.typeof(page.y_explicit_BD)) == "float32[8@data,8]"
    assert page.h_typed_BF.addressable_shards[0].data.shape[1] == 6


def test_explicit_axes_are_the_default(page):
    """jax.make_mesh without axis_types makes Explicit axes, as explicit_mesh has."""
    default = jax.make_mesh((2, 4), ("data", "model"))
    assert default.axis_types == (AxisType.Explicit,) * 2 == page.explicit_mesh.axis_types


def test_an_ambiguous_product_raises_in_explicit_mode(page):
    """Summing over a dimension that is sharded in both inputs raises; the error names the fix."""
    raised = attempt(jnp.dot, page.h_typed_BF, page.w_typed_FD)
    assert "Contracting dimensions are sharded" in raised and "`out_sharding`" in raised


def without_the_sum(page, **more):
    def product(h_block_BF, w_block_FD):
        return h_block_BF @ w_block_FD

    specs = {"in_specs": page.in_specs, "out_specs": page.out_specs}
    return jax.shard_map(product, mesh=page.mesh, **specs, **more)


def test_a_forgotten_sum_raises(page):
    """If you forget the sum, JAX raises an error that names model and replication."""
    with pytest.raises(ValueError) as error:
        without_the_sum(page)(page.h_BF, page.w_out_FD)
    beginning, *rest = str(error.value).split("\n\n")
    assert "out_specs which require replication" in beginning
    assert "model" in " ".join(rest) and "mesh axis" in " ".join(rest)


def test_until_the_partial_sums_are_added_the_result_is_wrong(page):
    """Without the check, the product of blocks is wrong, and with the sum it is right."""
    wrong = without_the_sum(page, check_vma=False)(page.h_BF, page.w_out_FD)
    right = page.dot_by_hand(page.h_BF, page.w_out_FD)
    assert abs(wrong - right).max() > 0.1
    assert abs(right - page.y_host).max() < 0.1


def test_the_compilers_for_h100_and_tpu_make_the_same_all_reduce():
    """In all three modes the other compilers make one all-reduce along model, of 128 bytes."""
    for compiler in ("gpu", "tpu", "cpu"):
        for mode in ("auto", "explicit", "manual"):
            (move,) = stored_program(f"mesh-{mode}")[compiler]["moves"]
            found = move["kind"], move["axes"], move["payload"], move["executions"]
            assert found == ("all-reduce", ["model"], 128, 1)
