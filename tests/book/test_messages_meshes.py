"""Messages about arrays and meshes: each program raises what its heading quotes; the fixes are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-meshes"
P = jax.P
ENTRIES = quoted_in_headings(PAGE)

SILENT = "no message, and sharded by"
BEFORE = {piece: ((0, 11, 2), SILENT) for piece in ENTRIES["key-error-2"]}
OLDER = {"indivisible": ["the global size of its dimension", "should be divisible by"]}


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def pieces(x):
    """The shapes of what the devices hold of x."""
    return {shard.data.shape for shard in x.addressable_shards}


def ten():
    return np.arange(10.0)


@pytest.mark.parametrize("slug", ENTRIES)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    older = OLDER.get(slug, [])
    today = [piece for piece in ENTRIES[slug] if piece not in older]
    assert today
    assert_raised(page, slug, today, BEFORE, older)


def test_all_fourteen_messages_have_an_entry():
    """No heading of the page is left out above."""
    assert len(ENTRIES) == 14


# Arrays on other devices


def test_arrays_on_other_devices_raise_and_the_message_names_both_sets(page):
    """The message names all eight devices and device 7."""
    raised = said(lambda: page.x + page.last)
    assert "Received incompatible devices for jitted computation. Got argument" in raised
    assert "device ids [0, 1, 2, 3, 4, 5, 6, 7]" in raised and "device ids [7]" in raised


def test_moved_to_the_same_mesh_arrays_add_up(page):
    """The sum of ones is two, in pieces of four, on eight devices."""
    np.testing.assert_array_equal(page.total, np.full(8, 2.0))
    assert page.total.devices() == set(jax.devices()[:8])
    assert [shard.data.shape for shard in page.total.addressable_shards] == [(4,)] * 8


def test_inside_set_mesh_one_shard_raises(page):
    """The message names the mesh of the context."""
    with jax.set_mesh(page.mesh):
        raised = said(jnp.expand_dims, page.shard, 0)
    assert raised.startswith("ValueError: Received incompatible devices")
    assert "and jit's context mesh with device ids [0, 1, 2, 3, 4, 5, 6, 7]" in raised


def test_a_mesh_of_its_device_or_numpy_takes_one_shard(page):
    """Inside set_mesh, one shard passes in a mesh of its own device, and in NumPy."""
    with jax.set_mesh(page.mesh):
        assert np.expand_dims(np.asarray(page.shard), 0).shape == (1, 8)
        with jax.set_mesh(page.one_device):
            assert jnp.expand_dims(page.shard, 0).devices() == {jax.devices()[0]}


def test_the_same_devices_in_another_order_raise(page):
    """The message names both orders, of the same devices."""
    raised = said(lambda: page.x + page.turned)
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in raised and "[7, 6, 5, 4, 3, 2, 1, 0]" in raised
    assert page.turned.devices() == page.x.devices()


def test_a_copy_gets_the_order_of_the_first_mesh(page):
    """Moved, the array is in the order 0 to 7, and adds up."""
    assert page.ids == list(range(8))
    np.testing.assert_array_equal(page.x + page.straight, np.full(8, 2.0))


# Sizes that do not divide


@pytest.mark.parametrize("slug", OLDER)
def test_older_words_stand_in_the_heading_and_are_raised_no_more(page, slug):
    """Arguments, results and device_put say today's words; the older ones are for the search."""
    today = "partitioned 4 times, but the dimension size is 10"
    assert ENTRIES[slug] == ["IndivisibleError", today, *OLDER[slug]]
    for function in (
        lambda: jax.device_put(ten(), page.by_model),
        lambda: jax.jit(jnp.negative, in_shardings=page.by_model)(ten()),
        lambda: jax.jit(jnp.negative, out_shardings=page.by_model)(ten()),
    ):
        raised = said(function)
        assert raised.startswith("IndivisibleError: ") and today in raised
        assert not any(piece in raised for piece in OLDER[slug])


def test_padded_to_twelve_ten_rows_are_sharded_and_the_mask_drops_the_padding(page):
    """Twelve rows, of which ten are real, come in pieces of three; masked, their sum is right."""
    shards = page.after("indivisible-fixed").pieces
    assert {shard.data.size for shard in shards.addressable_shards} == {12 // 4}
    counted = jnp.where(jnp.arange(12) < page.rows, shards, 0).sum()
    assert page.rows == 10 and float(counted) == sum(range(10))


def test_uneven_sizes_have_no_type(page):
    """In Explicit mode jnp.zeros and jax.reshard raise for ten on four devices."""
    with jax.set_mesh(page.explicit_mesh):
        for make in (
            lambda: jnp.zeros(10, out_sharding=P("model")),
            lambda: jax.reshard(jnp.zeros(10), P("model")),
        ):
            raised = said(make)
            assert raised.startswith("ValueError: Sharding spec ('model',) implies")
            assert "but does not evenly divide the dimension size 10" in raised


def test_twelve_on_four_devices_have_a_type(page):
    """Padded to twelve, the type is float32[12@model], in pieces of three."""
    assert str(jax.typeof(page.zeros)) == "float32[12@model]"
    assert page.zeros.addressable_shards[0].data.shape == (3,)


def test_with_numpy_1_the_bare_number_is_two(page):
    """The key of the KeyError is the number 2, so NumPy 1 writes `KeyError: 2`."""
    if jax.__version_info__ < (0, 11, 2):
        return  # silent
    with jax.set_mesh(page.mesh), pytest.raises(KeyError) as caught:
        jax.jit(lambda: page.ten_columns(None, "model"))()
    assert f"KeyError: {int(caught.value.args[0])}" == "KeyError: 2"


def test_flax_without_a_bias_meets_it_and_with_other_results_the_array_is_silently_whole(page):
    """One uneven kernel alone raises KeyError since 0.11.2; beside a bias, or before, it is whole."""

    def kernel(**options):
        metadata = {"out_sharding": (None, "model")}
        layer = nnx.Linear(64, 10, rngs=nnx.Rngs(0), kernel_metadata=metadata, **options)
        return nnx.state(layer)

    with jax.set_mesh(page.mesh):
        both = jax.jit(kernel)()
        alone = jax.jit(lambda: kernel(use_bias=False))
        if jax.__version_info__ >= (0, 11, 2):
            assert said(alone).startswith("KeyError: ")
        else:
            assert alone()["kernel"][...].sharding.is_fully_replicated
    assert both["kernel"][...].sharding.is_fully_replicated


def test_shard_shape_compares_sizes_and_twelve_columns_are_sharded(page):
    """It raises the clear message for ten columns; twelve come in pieces of three."""
    raised = said(page.by_columns.shard_shape, (64, 10))
    assert raised.startswith("IndivisibleError: ")
    assert "partitioned 4 times, but the dimension size is 10" in raised
    with jax.set_mesh(page.mesh):
        padded = jax.jit(
            lambda: jax.lax.with_sharding_constraint(jnp.ones((64, 12)), P(None, "model"))
        )()
    assert (
        padded.addressable_shards[0].data.shape == (64, 3) == page.by_columns.shard_shape((64, 12))
    )


# Specs that do not fit


def test_a_bare_spec_needs_a_mesh_in_device_put_jit_and_a_constraint(page):
    """Without a mesh in context, all three raise."""
    for function in (page.by_rows, jax.jit(lambda x: x, out_shardings=P("data"))):
        assert "requires a non-empty mesh in context" in said(function, page.x_BD)
    assert "Please set a mesh via `jax.set_mesh`" in said(jax.device_put, page.x_BD, P("data"))


def test_with_a_mesh_in_context_or_a_named_sharding_rows_are_sharded(page):
    """Both fixes shard eight rows in two, and change no value."""
    for x_BD in (page.rows_BD, page.sent_BD):
        assert pieces(x_BD) == {(4, 16)}
        np.testing.assert_array_equal(x_BD, page.x_BD)


def test_a_spec_longer_than_the_rank_of_a_leaf_raises(page):
    """Two entries do not fit a bias."""
    raised = said(jax.device_put, page.params, page.by_both)
    assert "is only valid for values of rank at least 2, but was applied" in raised
    assert raised.endswith("to a value of rank 1.")


def test_with_a_spec_for_each_leaf_a_device_holds_an_eighth_of_the_matrix_and_the_bias(page):
    """In bytes: an eighth of the matrix, and the whole bias."""
    held = sum(
        shard.data.nbytes
        for leaf in page.placed.values()
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert held == 4 * (16 // 2 * 32 // 4 + 32)


def test_a_spec_names_axes_of_the_mesh_only(page):
    """An unknown name raises and the message lists the axes; with no mesh set it lists none."""
    raised = said(page.put, page.x_BD, page.mesh, "batch")
    assert raised.startswith("ValueError: Resource axis: batch of P('batch',)")
    assert raised.endswith("is not found in mesh: ('data', 'model').")
    none = Mesh(np.empty((), object), ())
    assert "is not found in mesh: ()" in said(page.put, page.x_BD, none, "batch")


def test_a_table_of_rules_translates_a_logical_name(page):
    """By the rule, the rows are in two different parts, and no value changes."""
    assert len({str(shard.index) for shard in page.named_BD.addressable_shards}) == 2
    np.testing.assert_array_equal(page.named_BD, page.x_BD)


def test_an_axis_shards_one_dimension_only(page):
    """The same axis for two dimensions raises."""
    raised = said(page.put, page.x_BD, page.mesh, "data", "data")
    assert raised.startswith("DuplicateSpecError: ")
    assert "can map every mesh axis to at most one positional dimension" in raised


def test_two_axes_may_shard_two_dimensions_or_the_same_one(page):
    """P("data", "model") gives pieces of 4 × 4, and P(("data", "model"), None) one row each."""
    assert pieces(page.once_BD) == {(8 // 2, 16 // 4)}
    assert pieces(page.both_BD) == {(8 // 8, 16)}


# The mesh itself


def test_a_mesh_with_more_positions_than_devices_raises(page):
    """jax.make_mesh names both numbers; with Mesh it is NumPy that raises."""
    count = jax.device_count()
    raised = said(jax.make_mesh, (4, count), page.names, page.auto)
    assert f"Number of devices {count} must be >= the product" in raised
    assert f"product of mesh_shape (4, {count})" in raised
    by_hand = said(lambda: Mesh(np.array(jax.devices()[:8]).reshape(4, 4), page.names))
    assert "cannot reshape array of size 8 into shape (4,4)" in by_hand


def test_a_size_computed_from_the_other_fits(page):
    """Each of the eight devices has one position in the mesh."""
    devices = page.fitting.devices
    assert page.fitting.size == devices.size == len(set(devices.flat)) == 8
    assert page.fitting.shape["model"] == 4


def test_a_hybrid_mesh_keeps_one_axis_inside_a_node(page):
    """Each row of the grid holds the eight GPUs of one node, and each GPU stands once."""
    assert page.gpu_grid.shape == (2, 8)
    assert [{gpu.slice_index for gpu in row} for row in page.gpu_grid] == [{0}, {1}]
    assert {gpu.id for gpu in page.gpu_grid.flat} == set(range(16))


def test_mesh_wants_a_name_for_each_dimension_of_its_array(page):
    """A list of devices has one dimension; make_mesh counts names and types in the same way."""
    raised = said(Mesh, page.devices, page.names)
    assert "Mesh requires the ndim of its first argument (`devices`) to equal" in raised
    assert raised.endswith("but got devices.ndim == 1 and len(axis_names) == 2.")
    one_type = said(jax.make_mesh, (2, 4), page.names, (AxisType.Auto,))
    assert "Number of axis names should match the number of axis_types" in one_type


def test_make_mesh_arranges_all_devices_with_a_name_for_each_dimension(page):
    """The mesh has two dimensions, two names and the eight devices."""
    assert page.grid.devices.ndim == len(page.grid.axis_names) == 2
    assert set(page.grid.devices.flat) == set(page.devices)


def test_the_number_of_simulated_devices_is_read_once():
    """Changed too late, JAX's setting raises, and there are as many devices as before."""
    before = len(jax.devices())
    raised = said(jax.config.update, "jax_num_cpu_devices", 4)
    assert raised.startswith("RuntimeError: ")
    assert "jax_num_cpu_devices config should be updated before backends are" in raised
    assert len(jax.devices()) == before >= 8


def test_the_flag_of_xla_is_silent_if_it_is_changed_too_late(monkeypatch):
    """XLA_FLAGS changed after the first look raises nothing and changes nothing."""
    before = len(jax.devices())
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert len(jax.devices()) == before >= 8 and float(jnp.ones(8).sum()) == 8


def test_a_new_process_has_as_many_devices_as_its_environment_says(page):
    """With JAX_NUM_CPU_DEVICES=4 a new process has four."""
    assert page.done.stdout == "a new process has 4 devices\n"
