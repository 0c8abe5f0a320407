"""The order of devices in a mesh: what the page says is true."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from many_devices.compiled import stored_program
from many_devices.helpers import attempt, traffic
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "01a-mesh-order"
P = jax.P


# Which devices are neighbours


def test_in_shuffled_each_group_along_model_spans_two_nodes(page):
    """A row of mesh is in one node, a row of shuffled in two; the devices are the same."""
    mesh, shuffled = page.mesh, page.shuffled
    assert page.nodes_in_rows(mesh) == [1, 1] and page.nodes_in_rows(shuffled) == [2, 2]
    assert shuffled.shape == mesh.shape and shuffled != mesh
    assert set(shuffled.devices.flat) == set(mesh.devices.flat)


def test_a_group_of_shuffled_crosses_twice(page):
    """A ring of four in shuffled changes the node twice, once to close the ring."""
    for row in page.shuffled.devices:
        ring = [page.node_of(device) for device in row]
        crossings = [a != b for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
        assert sum(crossings) == 2 and crossings[-1]
        assert ring.count(0) == ring.count(1) == 2
    first = [device.id for device in page.shuffled.devices[0]]
    assert (first[-1], first[0]) == (6, 0)


def test_values_do_not_show_a_bad_order(page):
    """In both orders the program gives NumPy's values."""
    for mesh in (page.mesh, page.shuffled):
        with jax.default_matmul_precision("highest"):
            y_BD = page.run(*page.place(mesh))
        np.testing.assert_allclose(y_BD, page.y_host, rtol=1e-4, atol=1e-4)


@compiled_for_cpu
def test_the_same_program_for_both_orders(page):
    """Both orders are lowered to the same text; all three compilers make the same of it."""
    meshes = page.mesh, page.shuffled
    texts = [page.run.lower(*page.place(mesh)).as_text() for mesh in meshes]
    assert texts[0] == texts[1] and "sdy.mesh" in texts[0]
    moves = [
        traffic(page.run, *page.place(mesh), mesh=mesh).by("kind", "axes", "dtype")
        for mesh in meshes
    ]
    assert moves[0] == moves[1] and moves[0].bytes("all-reduce", ("model",), "float32") == 128
    for compiler in ("gpu", "tpu", "cpu"):
        moves = [
            stored_program(name)[compiler]["moves"] for name in ("order-mesh", "order-shuffled")
        ]
        assert moves[0] == moves[1] and len(moves[0]) == 1


@compiled_for_cpu
def test_the_bytes_of_one_all_reduce(page):
    """Each of four devices sends 2 S (n-1)/n bytes of a sum of S = 134 MB."""

    def summed(x_block):
        return jax.lax.psum(x_block, "model")

    by_hand = jax.shard_map(summed, mesh=page.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    tokens = jax.ShapeDtypeStruct((8192, 4096), "float32")  # as many bytes as in bfloat16
    (move,) = traffic(by_hand, tokens, mesh=page.mesh)
    assert (move.payload_bytes, move.wire_bytes) == (page.payload, page.ring_bytes)


def test_a_ring_between_nodes_is_nine_times_slower(page):
    """By the published speeds an all-reduce takes 0.45 ms inside a node and 4.03 ms between nodes."""
    inside, between = page.milliseconds.values()
    assert f"{inside:.2f} {between:.2f}" == "0.45 4.03"
    assert np.isclose(between / inside, 450 / 50) and 450 / 50 == 9


# Two nodes


def test_make_mesh_raises_for_two_slices(page):
    """jax.make_mesh raises an error for two slices, and names create_hybrid_device_mesh."""
    raised = attempt(page.one_call).replace("\n", " ")
    assert "does not support multi-slice" in raised and "create_hybrid_device_mesh" in raised


def test_make_mesh_sorts_gpus_of_one_slice_by_id(page):
    """Within one slice of GPUs jax.make_mesh sorts the devices by their ids."""
    one_node = [page.Gpu(i, 0, 0) for i in (3, 1, 0, 2, 7, 5, 6, 4)]
    mesh = jax.make_mesh((2, 4), ("data", "model"), devices=one_node, axis_types=page.auto)
    assert [gpu.id for gpu in mesh.devices.flat] == list(range(8))


def test_the_hybrid_mesh_keeps_model_in_a_node(page):
    """(1, 8) inside a node times (2, 1) nodes: each row of the mesh is one node."""
    assert page.grid.shape == (2, 8)
    assert [{gpu.slice_index for gpu in row} for row in page.grid] == [{0}, {1}]


# A mesh that is checked before use


def test_the_right_mesh_passes(page):
    """checked returns the mesh itself if nothing is wrong."""
    assert page.checked(page.mesh, page.wanted, 8) is page.mesh


@pytest.mark.parametrize(
    "name, says",
    [
        ("default", "axis types are"),
        ("too_small", "4 devices are idle"),
        ("swapped", "the axes are"),
        ("shuffled", "spans 2 nodes"),
    ],
)
def test_each_mistake_is_named(page, name, says):
    """Each of the four meshes raises the error that names its mistake."""
    raised = attempt(page.checked, getattr(page, name), page.wanted, 8)
    assert raised.startswith("ValueError") and says in raised


def test_idle_devices_are_named(page):
    """A mesh over four of eight devices leaves four idle, and checked says so."""
    idle = set(jax.devices()[:8]) - set(page.too_small.devices.flat)
    assert len(idle) == 4 and page.too_small.size < jax.device_count()
    assert "idle" in attempt(page.checked, page.too_small, {"data": 2, "model": 2}, 8)


def test_the_order_of_the_axes_is_compared(page):
    """The same names and sizes in the other order raise an error: the rows would be another axis."""
    turned = jax.make_mesh((4, 2), ("model", "data"), axis_types=page.auto)
    assert dict(turned.shape) == page.wanted and set(page.nodes_in_rows(turned)) == {1}
    assert "axes are" in attempt(page.checked, turned, page.wanted, 8)


def test_a_mesh_that_is_too_large_raises(page):
    """A mesh of more devices than there are is an error by itself."""
    large = (2, jax.device_count())
    assert attempt(jax.make_mesh, large, ("data", "model")).startswith("ValueError")


def test_without_axis_types_the_error_comes_later(page):
    """On the mesh without axis_types, arrays are placed, and the second matmul raises."""
    assert page.default.axis_types == (AxisType.Explicit,) * 2
    inputs = page.place(page.default)
    assert attempt(page.run, *inputs).startswith("ShardingTypeError")


def test_swapped_names_put_the_weights_in_two_pieces(page):
    """With the names swapped the batch is in four pieces, the weights in two; values are right."""
    pieces = {}
    for name in ("mesh", "swapped"):
        x, w, _ = [a.addressable_shards[0].data.shape for a in page.place(getattr(page, name))]
        pieces[name] = (page.B // x[0], page.F // w[1])
    assert pieces == {"mesh": (2, 4), "swapped": (4, 2)}


def test_three_of_the_wrong_meshes_give_right_results(page):
    """Too small, swapped and shuffled compute NumPy's values without an error."""
    for mesh in (page.too_small, page.swapped, page.shuffled):
        with jax.default_matmul_precision("highest"):
            y_BD = page.run(*page.place(mesh))
        np.testing.assert_allclose(y_BD, page.y_host, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
