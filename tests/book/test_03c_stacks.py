"""Deeper page to chapter 3, "A stack of layers: how to make it, and which dimension to shard"."""

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import misplaced
from many_devices.compiled import stored_payload
from many_devices.helpers import put
from many_devices.stack import small
from pages import check_exercise, compiled_for_cpu, exercises_of
from stored_moves import assert_each_step_of_the_scan_gathers

PAGE = "03c-stacks"


def test_the_stack_shards_features_and_not_layers(page):
    """L is whole, data shards D and model shards F, in both weights, as they are annotated."""
    assert page.stack.w_DF.sharding.shard_shape((6, 64, 512)) == (6, 32, 128)
    assert page.stack.w_FD.sharding.shard_shape((6, 512, 64)) == (6, 128, 32)
    assert misplaced(page.stack, page.mesh) == []


def test_the_stack_has_an_entry_for_the_layers(page):
    """Its annotations begin with None, its arrays are sharded so, and it is six blocks in size."""
    stack = page.stack
    assert stack.w_DF.out_sharding == (None, "data", "model") == (None, *small.axes_DF)
    assert stack.w_FD.out_sharding == (None, "model", "data")
    assert stack.w_DF.shape == (6, 64, 512) and misplaced(stack, page.mesh) == []
    assert ms.memory(stack).bytes_per_device == 6 * 32_768
    assert not np.array_equal(stack.w_DF[0], stack.w_DF[1])


def test_the_scan_gives_what_a_loop_over_the_layers_gives(page):
    """To float32 rounding: six layers, each a product, tanh and a product."""
    x_BD = page.x_host
    for w_DF, w_FD in zip(np.asarray(page.stack.w_DF), np.asarray(page.stack.w_FD)):
        x_BD = np.tanh(x_BD @ w_DF) @ w_FD
    np.testing.assert_allclose(page.y_BD, x_BD, rtol=1e-3, atol=1e-5)


def all_gathers(page, model):
    x_BD = put(np.ones((512, 64), "float32"), page.mesh, "data", None)
    program = jax.jit(page.run_stack).lower(model, x_BD).compile()
    table = ms.collectives(program, page.mesh)
    return program, x_BD, [row for row in table if row.kind == "all-gather"]


def test_a_device_holds_as_much_either_way(page):
    """Layers or features over data: one eighth of the stack on each device."""
    layers = ms.memory(page.by_layers)
    assert layers.bytes_per_device == ms.memory(page.stack).bytes_per_device == 6 * 32_768
    assert page.by_layers.w_DF.sharding.shard_shape((6, 64, 512)) == (3, 64, 128)
    assert page.by_layers.w_FD.sharding.shard_shape((6, 512, 64)) == (3, 128, 64)


def test_the_stack_gives_the_same_numbers_either_way(page):
    """The sharding of the stack changes what is gathered, and no value."""
    (layers, x_BD, _), (features, _, _) = [
        all_gathers(page, m) for m in (page.by_layers, page.stack)
    ]
    found = layers(page.by_layers, x_BD), features(page.stack, x_BD)
    np.testing.assert_allclose(*found, atol=1e-5)
    assert ms.memory(layers).arguments == ms.memory(features).arguments


@compiled_for_cpu
def test_for_cpu_layers_are_gathered_all_at_once(page):
    """With layers over data the whole stack, 393,216 bytes, is gathered before the loop."""
    program, _, rows = all_gathers(page, page.by_layers)
    assert not any(row.inside_loop for row in rows)
    assert sum(row.payload_bytes for row in rows) == 6 * 2 * 4 * 64 * 512 // 4 == 393_216
    assert ms.memory(program).temporaries > 393_216


@compiled_for_cpu
def test_for_cpu_features_are_gathered_a_layer_at_a_time(page):
    """With features over data one layer, 65,536 bytes, is gathered in each step of the loop."""
    program, _, rows = all_gathers(page, page.stack)
    assert all(row.inside_loop for row in rows) and {row.executions for row in rows} == {6}
    assert sum(row.payload_bytes for row in rows) == 393_216 // 6 == 65_536
    at_once, _, _ = all_gathers(page, page.by_layers)
    assert ms.memory(at_once).temporaries - ms.memory(program).temporaries > 393_216 / 2


@pytest.mark.parametrize("compiler, size", [("gpu", 4), ("tpu", 2)])
def test_for_h100_and_tpu_layers_are_gathered_in_each_step(compiler, size):
    """Layers over data: six times six layers are gathered; features: six. TPU gathers in bfloat16."""
    assert_each_step_of_the_scan_gathers(compiler, size)


@compiled_for_cpu
def test_the_table_of_gathers_as_printed(page):
    """For H100 and TPU v5e layers over data gather six times the bytes; for CPU as many."""
    told = []
    for name, model in page.stacks.items():
        rows = all_gathers(page, model)[2]
        cpu = sum(row.payload_bytes * row.executions for row in rows)
        stored = [stored_payload(f"init-{name}", other, "all-gather") for other in ("gpu", "tpu")]
        told.append([*stored, cpu])
    assert list(page.stacks) == ["layers", "features"]
    assert told == [[2_359_296, 1_179_648, 393_216], [393_216, 196_608, 393_216]]
    assert [page.gpu, page.tpu, page.cpu] == told[1]  # the last line of the table


@compiled_for_cpu
def test_the_gathered_shapes_tell_the_two_stacks_apart(page):
    """With layers over data both gathered arrays have six layers; with features each has one."""
    shapes = {
        name: sorted(row.shape for row in all_gathers(page, model)[2])
        for name, model in page.stacks.items()
    }
    assert [shape[0] for shape in shapes["layers"]] == [6, 6]
    assert not any(6 in shape for shape in shapes["features"])
    assert sorted(page.shapes) == shapes["features"]  # printed last


def test_plain_vmap_leaves_the_annotations_behind(page):
    """Of jax.vmap, and nnx.vmap without metadata, arrays are right and annotations have two entries."""
    make = jax.jit(nnx.vmap(page.make_layer))
    with jax.set_mesh(page.mesh):
        without_metadata = make(nnx.Rngs(0).split(small.L))
    for stack in (page.by_jax_vmap, without_metadata):
        assert stack.w_DF.out_sharding == small.axes_DF
        assert len(misplaced(stack, page.mesh)) == 2
        assert stack.w_DF.sharding.is_equivalent_to(page.stack.w_DF.sharding, 3)
        np.testing.assert_array_equal(stack.w_DF, page.stack.w_DF)


def test_readers_of_such_annotations_shard_the_wrong_dimensions(page):
    """From the annotations L and D would be sharded, in place of D and F."""
    state = nnx.state(page.by_jax_vmap)
    read = nnx.get_named_sharding(state, page.mesh)["w_DF"].get_value()
    assert read.shard_shape((6, 64, 512)) == (3, 16, 512)
    assert page.stack.w_DF.sharding.shard_shape((6, 64, 512)) == (6, 32, 128)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
