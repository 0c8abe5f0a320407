"""Chapter 1, "A mesh is a grid of devices with named axes": what the page says is true."""

import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "01-mesh"
P = jax.P


def stored_rows(name, compiler):
    """What a stored program of this page moves: kind, axes, payload."""
    moves = stored_program(name)[compiler]["moves"]
    return [(row["kind"], tuple(row["axes"]), row["payload"]) for row in moves]


# The devices


def count_devices(code="pass", **settings):
    """CPU devices that a fresh Python process finds, with these variables and this code first."""
    unset = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"JAX_PLATFORMS": "cpu"} | settings
    command = [sys.executable, "-c", f"import jax; {code}; print(jax.device_count())"]
    return int(subprocess.check_output(command, env=env, text=True))


@compiled_for_cpu
def test_the_setup_cell_makes_eight_simulated_devices(page):
    """There are eight devices, and they are simulated: all are on the CPU of this process."""
    assert len(page.devices) == 8 == jax.device_count()
    assert {device.platform for device in page.devices} == {"cpu"}
    assert {device.process_index for device in page.devices} == {0}


def test_one_line_makes_eight_devices_before_jax_is_used():
    """jax.config.update("jax_num_cpu_devices", 8) makes eight devices, where there was one."""
    assert count_devices() == 1
    assert count_devices('jax.config.update("jax_num_cpu_devices", 8)') == 8


def test_the_line_comes_too_late_after_jax_was_used(page):
    """After JAX was used, the same setting raises a RuntimeError."""
    too_late = attempt(jax.config.update, "jax_num_cpu_devices", 4)
    assert too_late.startswith("RuntimeError") and "before" in too_late


def test_the_older_flag_and_the_variable_make_eight_devices():
    """JAX_NUM_CPU_DEVICES=8 and the older XLA flag do the same."""
    flag = "--xla_force_host_platform_device_count=8"
    assert count_devices(JAX_NUM_CPU_DEVICES="8") == count_devices(XLA_FLAGS=flag) == 8


# The mesh


def test_the_mesh_is_the_first_eight_devices_with_auto_axes(page):
    """The mesh has the first eight devices, each once, in two rows and four columns, in Auto mode."""
    mesh = page.mesh
    assert set(mesh.devices.flat) == set(jax.devices()[:8]) and mesh.devices.shape == (2, 4)
    assert mesh.axis_names == ("data", "model")
    assert mesh.axis_types == (AxisType.Auto,) * 2


# A sharded array


def test_each_device_holds_the_block_of_its_coordinates(page):
    """With P("data", "model"), data halves the rows, model quarters the columns."""
    x_BD = page.after("first-array").x_BD
    rows, columns = 4, 2
    for shard in x_BD.addressable_shards:
        (i,), (j,) = np.nonzero(page.mesh.devices == shard.device)
        block = page.x_host[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        assert np.array_equal(shard.data, block)
    assert x_BD.sharding == jax.NamedSharding(page.mesh, P("data", "model"))
    assert x_BD.shape == page.x_host.shape and len(x_BD.addressable_shards) == 8


@compiled_for_cpu
def test_device_6_has_the_second_half_of_the_rows_and_the_third_quarter_of_the_columns(page):
    """The block that the picture shows in grey is on device 6."""
    (shard,) = [
        shard for shard in page.after("first-array").x_BD.addressable_shards if shard.device.id == 6
    ]
    np.testing.assert_array_equal(shard.data, page.x_host[4:, 4:6])


def test_an_axis_that_the_spec_leaves_out_means_copies(page):
    """With P("data", None) a device holds four rows, and four devices hold the first row."""
    x_BD = page.after("copies").x_BD
    assert {shard.data.shape for shard in x_BD.addressable_shards} == {(4, 8)}
    assert page.rows_held == 4 and len(page.holders) == 4
    (row,) = {np.argwhere(page.mesh.devices == device)[0][0] for device in copies_of_row_0(x_BD)}
    assert sorted(page.holders) == sorted(device.id for device in page.mesh.devices[row])


def copies_of_row_0(array):
    """The devices whose piece begins with the array's first row."""
    return [shard.device for shard in array.addressable_shards if shard.index[0].start == 0]


def test_a_missing_entry_means_the_same_as_none(page):
    """P("data") and P("data", None) shard a matrix alike."""
    short, long = put(page.x_host, page.mesh, "data"), put(page.x_host, page.mesh, "data", None)
    assert short.sharding.is_equivalent_to(long.sharding, 2)


def test_copies_take_memory(page):
    """Of 256 bytes, four copies take 1,024."""
    shards = page.after("copies").x_BD.addressable_shards
    assert page.x_host.nbytes == 256
    assert page.held.total_bytes == sum(shard.data.nbytes for shard in shards) == 1024


def test_two_names_give_each_device_one_row(page):
    """With ("data", "model") the pieces run through the mesh row by row."""
    in_order = list(page.mesh.devices.flat)
    for shard in page.x_rows_BD.addressable_shards:
        k = in_order.index(shard.device)
        assert np.array_equal(shard.data, page.x_host[k : k + 1])


# Strategies


def parts_of(array):
    """In how many parts each dimension is divided."""
    piece = array.sharding.shard_shape(array.shape)
    return tuple(whole // part for whole, part in zip(array.shape, piece, strict=True))


def products(page):
    return {
        "data": (page.x_data_BD, page.w_copied_DF),
        "tensor": (page.x_copied_BD, page.w_columns_DF),
        "fsdp": (page.x_data_BD, page.w_pieces_DF),
        "both": (page.x_data_BD, page.w_blocks_DF),
    }


def test_each_strategy_divides_what_it_says(page):
    """Which of batch and weight, and along which dimension, data and model divide."""
    divided = {name: (*parts_of(x), *parts_of(w)) for name, (x, w) in products(page).items()}
    assert divided == {
        "data": (2, 1, 1, 1),
        "tensor": (1, 1, 1, 4),
        "fsdp": (2, 1, 2, 1),
        "both": (2, 1, 2, 4),
    }
    for _, w in products(page).values():
        assert ms.memory(w).bytes_per_device == page.w_in_host.nbytes // np.prod(parts_of(w))


def test_all_four_products_are_numpys(page):
    """A strategy does not decide the result: all four are NumPy's, up to rounding."""
    for x, w in products(page).values():
        with jax.default_matmul_precision("highest"):  # float32 on every backend
            np.testing.assert_allclose(x @ w, page.x_host @ page.w_in_host, rtol=1e-5, atol=1e-5)


@compiled_for_cpu
def test_only_a_weight_in_pieces_along_data_makes_devices_communicate(page):
    """Data and tensor parallelism move nothing in x @ w; FSDP alone or with tensor does."""
    for x, w in products(page).values():
        moves = traffic(jnp.dot, x, w, mesh=page.mesh)
        assert (len(moves) > 0) == (parts_of(w)[0] > 1)
    for compiler in ("gpu", "tpu", "cpu"):
        for name in ("mesh-copies", "mesh-columns"):
            assert not stored_rows(name, compiler)
        assert stored_rows("mesh-rows", compiler)
        assert {axes for _, axes, _ in stored_rows("mesh-blocks", compiler)} == {("data",)}


def test_with_both_axes_a_device_fetches_the_other_half_of_its_columns(page):
    """An eighth of the weight each; along data its columns are completed, without a constraint."""
    w_DF = page.w_blocks_DF
    held, columns = ms.memory(w_DF).bytes_per_device, w_DF.nbytes // page.mesh.shape["model"]
    assert held == w_DF.nbytes // 8 == columns // 2
    for compiler in ("gpu", "cpu"):
        assert stored_rows("mesh-blocks", compiler) == [("all-gather", ("data",), columns)]
    ((kind, axes, _),) = stored_rows("mesh-blocks", "tpu")  # two devices: they exchange halves
    assert (kind, axes) == ("collective-permute", ("data",))


@compiled_for_cpu
def test_without_a_constraint_partial_results_are_added(page):
    """For this product no compiler fetches the weight: each adds up parts of x @ w."""
    F = page.F
    moves = traffic(jnp.dot, page.x_data_BD, page.w_pieces_DF, mesh=page.mesh)
    sizes = {move.kind: move.payload_bytes for move in moves}
    assert sizes == {"collective-permute": 2 * F * 4, "all-reduce": 4 * F * 4}
    assert all(move.payload_bytes < page.w_in_host.nbytes for move in moves)
    for compiler in ("gpu", "tpu", "cpu"):
        kinds = {kind: axes for kind, axes, _ in stored_rows("mesh-rows", compiler)}
        assert kinds.keys() == {"all-reduce", "collective-permute"}
        assert kinds["all-reduce"] == ("model",)


@compiled_for_cpu
def test_with_the_constraint_the_weight_is_fetched(page):
    """Constrained to be whole where it is used, the weight is gathered along data.

    A constraint on the product is not enough on this mesh.
    """

    def fetched(x_BD, w_DF):
        whole = jax.NamedSharding(page.mesh, P())
        return x_BD @ jax.lax.with_sharding_constraint(w_DF, whole)

    moves = traffic(fetched, page.x_data_BD, page.w_pieces_DF, mesh=page.mesh)
    assert [(move.kind, move.axes, move.payload_bytes) for move in moves] == [
        ("all-gather", ("data",), page.w_in_host.nbytes)
    ]

    # Kept rows of x @ w are enough on a mesh with data alone, but not while model is idle.
    kinds = {}
    for mesh in (page.mesh, jax.make_mesh((2,), ("data",), axis_types=page.auto[:1])):
        rows = jax.NamedSharding(mesh, P("data", None))

        def product(x_BD, w_DF, rows=rows):
            return jax.lax.with_sharding_constraint(x_BD @ w_DF, rows)

        inputs = put(page.x_host, mesh, "data", None), put(page.w_in_host, mesh, "data", None)
        kinds[mesh.size] = traffic(product, *inputs, mesh=mesh).kinds
    assert kinds[2] == {"all-gather"} and "all-gather" not in kinds[8]


# One program


def test_one_trace_and_one_program_for_all_devices(page):
    """Two calls trace once and compile once, and the result is on all eight devices."""
    traces = []

    @jax.jit
    def traced(*inputs):
        traces.append("traced")
        return page.run(*inputs)

    for _ in range(2):
        traced(*page.place(page.mesh))
    assert len(traces) == traced._cache_size() == page.run._cache_size() == 1
    assert page.y_BD.sharding.device_set == set(page.mesh.devices.flat)


def test_the_program_computes_what_numpy_does(page):
    """On the mesh the two matmuls and the tanh give the numbers of NumPy."""
    with jax.default_matmul_precision("highest"):
        y_BD = page.mlp(*page.place(page.mesh))
    np.testing.assert_allclose(y_BD, page.y_host, rtol=1e-4, atol=1e-4)


def test_the_compiled_program_is_about_shards(page):
    """Its first line has eight partitions, and the shapes of shards of x, w_in, w_out and y."""
    assert int(re.search(r"num_partitions=(\d+)", page.first_line)[1]) == page.mesh.size == 8
    found = re.findall(r"f32\[(\d+),(\d+)\]", page.first_line.split("}->")[0].split("->")[0])
    shards = [array.addressable_shards[0].data.shape for array in page.place(page.mesh)]
    assert [(int(m), int(n)) for m, n in found] == shards == [(4, 8), (8, 6), (6, 8)]


@compiled_for_cpu
def test_the_first_matmul_moves_nothing(page):
    """x @ w_in and the tanh need no other device, and leave h sharded along both axes."""

    def first(x_BD, w_in_DF):
        return jnp.tanh(x_BD @ w_in_DF)

    inputs = page.place(page.mesh)[:2]
    assert not traffic(first, *inputs, mesh=page.mesh)
    wanted = jax.NamedSharding(page.mesh, P("data", "model"))
    assert first(*inputs).sharding.is_equivalent_to(wanted, 2)


@compiled_for_cpu
def test_each_device_sends_192_bytes(page):
    """One all-reduce along model of S = 128 bytes: on n = 4 devices each sends 2 S (n-1)/n."""
    (move,) = page.moved
    n, piece = page.mesh.shape["model"], page.y_BD.addressable_shards[0].data
    assert (move.kind, move.axes) == ("all-reduce", ("model",))
    assert move.payload_bytes == piece.nbytes == 4 * 8 * 4 == 128
    assert move.wire_bytes == 2 * piece.nbytes * (n - 1) / n == page.sent == 192
    for compiler in ("gpu", "tpu", "cpu"):
        assert stored_rows("mesh-mlp", compiler) == [("all-reduce", ("model",), 128)]


# Three modes


def test_without_axis_types_a_mesh_is_explicit(page):
    """Auto is not the default: jax.make_mesh without axis_types makes Explicit axes."""
    default = jax.make_mesh((2, 4), ("data", "model"))
    assert default.axis_types == (AxisType.Explicit,) * 2 != page.mesh.axis_types


def test_inside_shard_map_all_axes_are_manual_or_only_those_that_are_named(page):
    """Without axis_names both axes are Manual; with it the other one stays Auto."""

    def types_inside(spec, **axis_names):
        types = []

        def block(x_BD):
            types.extend(jax.sharding.get_abstract_mesh().axis_types)
            return x_BD

        with jax.set_mesh(page.mesh):
            jax.jit(jax.shard_map(block, in_specs=spec, out_specs=spec, **axis_names))(page.x_host)
        return types

    assert types_inside(P("data", "model")) == [AxisType.Manual, AxisType.Manual]
    assert types_inside(P("data"), axis_names={"data"}) == [AxisType.Manual, AxisType.Auto]


# On your own model


def test_the_lines_to_copy_use_all_devices(page):
    """With pieces = 1 every device has its own rows of the batch."""
    assert set(page.own_mesh.devices.flat) == set(jax.devices())
    assert dict(page.own_mesh.shape) == {"data": jax.device_count(), "model": 1}
    assert len({str(shard.index) for shard in page.batch.addressable_shards}) == page.own_mesh.size


def test_a_bare_spec_needs_a_current_mesh(page):
    """A bare spec raises outside jax.set_mesh, and is enough inside it."""
    raised = attempt(jax.device_put, page.x_host, P("data", None))
    assert "Please set a mesh via `jax.set_mesh`" in raised.replace("\n", " ")
    assert page.x_BD.sharding == jax.NamedSharding(page.mesh, P("data", None))


# Older code


def test_an_older_mesh_has_auto_axes(page):
    """Mesh(np.array(jax.devices()).reshape(2, 4), axis_names=…) has Auto axes."""
    grid = np.array(jax.devices()[:8]).reshape(2, 4)
    old = jax.sharding.Mesh(grid, axis_names=("data", "model"))
    assert old.axis_types == (AxisType.Auto,) * 2 and np.array_equal(old.devices, grid)


def test_with_mesh_is_deprecated(page):
    """`with mesh:` warns, and device_put does not accept the bare spec inside it either."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        with page.mesh:
            attempt(jax.device_put, page.x_host, P("data", None))
    assert caught[0].category is DeprecationWarning


def test_names_that_are_gone(page):
    """use_mesh and PositionalSharding were removed; PartitionSpec is jax.P."""
    assert jax.sharding.PartitionSpec is jax.P
    for removed in ("use_mesh", "PositionalSharding"):
        assert not hasattr(jax.sharding, removed)


# Exercises


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
