"""Messages of Explicit mode: each program raises what its heading quotes, and each fix is right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, Mesh

from many_devices.helpers import put, traffic
from pages import compiled_for_cpu
from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-types"
P = jax.P

ENTRIES = quoted_in_headings(PAGE)
NO_MESH = Mesh(np.empty((), object), ())
OLDER = {"scatter": ["Length of device assignment 1 is not equal to the size of the mesh"]}
BEFORE = {  # a piece: the first release that says it, and what those before it say
    "cannot be sharded on the axis being rolled over": ((0, 11), "slicing on sharded dims"),
    "Cannot apply nonzero over sharded axes": (
        (0, 12),
        "The input should be fully replicated when axis is not specified to cumsum",
    ),
    "Collective across axis 'model' is forbidden by `no_collectives`": (
        (0, 12),
        "AttributeError: module 'jax.sharding' has no attribute 'no_collectives'",
    ),
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once; its Explicit mesh stays set."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def type_of(x):
    return str(jax.typeof(x))


def rows():
    """What x_BD holds."""
    return np.arange(128.0).reshape(8, 16)


@pytest.mark.parametrize("slug", ENTRIES)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    older = OLDER.get(slug, [])
    today = [piece for piece in ENTRIES[slug] if piece not in older]
    assert today
    assert_raised(page, slug, today, BEFORE, older)


def test_all_messages_have_an_entry():
    """No heading of the page is left out above."""
    assert len(ENTRIES) == 28


# Arrays and constraints on the wrong kind of mesh


def test_a_constraint_names_auto_axes_only(page):
    """On an Explicit mesh a constraint by a NamedSharding raises, and proposes reshard."""
    with jax.set_mesh(NO_MESH):
        raised = said(page.constrained, page.x_BD)
    assert "with_sharding_constraint can only refer to Auto axes of the mesh" in raised
    assert raised.endswith("You probably meant to use `reshard` API?")


def test_reshard_moves_to_columns(page):
    """jax.reshard by a NamedSharding shards the columns, and changes no value."""
    columns_BD = page.after("auto-axes-fixed").columns_BD
    assert type_of(columns_BD) == "float32[8,16@model]"
    np.testing.assert_array_equal(columns_BD, rows())


def test_on_a_mesh_with_auto_axes_the_same_constraint_is_met(page):
    """With axis_types of Auto the constraint shards the columns in four."""
    auto_BD = put(np.asarray(page.x_BD), page.auto_mesh, "data", None)
    by_columns = jax.NamedSharding(page.auto_mesh, P(None, "model"))
    with jax.set_mesh(NO_MESH):
        constrained = jax.lax.with_sharding_constraint(auto_BD, by_columns)
    assert constrained.addressable_shards[0].data.shape == (8, 16 // 4)


def test_make_mesh_makes_explicit_axes_by_default():
    """Without axis_types= both axes of jax.make_mesh are Explicit."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    assert set(mesh.axis_types) == {AxisType.Explicit}


def test_arrays_of_an_auto_and_an_explicit_mesh_do_not_add_up(page):
    """Without a mesh in context the message names both modes."""
    with jax.set_mesh(NO_MESH):
        raised = said(jnp.add, page.x_BD, page.auto_BD)
    assert raised.startswith("ValueError: Mesh for all inputs should be equal. Got one mesh")
    assert "(Explicit, Explicit)" in raised and "(Auto, Auto)" in raised


def test_moved_to_the_explicit_mesh_it_adds_up(page):
    """By device_put the array gets the type of the other, and the sum is right."""
    assert type_of(page.typed_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.x_BD + page.typed_BD, rows() + 1)


def test_in_explicit_mode_a_bare_constraint_compares(page):
    """It raises an AssertionError if the type differs, and returns the array if it does not."""
    raised = said(jax.lax.with_sharding_constraint, page.x_BD, P(None, "model"))
    assert raised.startswith("AssertionError: `with_sharding_constraint` acts as an")
    assert type_of(page.checked) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.checked, rows())


def test_in_explicit_mode_reshard_moves(page):
    """By a bare spec reshard shards the columns in four, and changes no value."""
    assert page.moved.addressable_shards[0].data.shape == (8, 16 // 4)
    np.testing.assert_array_equal(page.moved, rows())


def test_types_name_explicit_axes_only(page):
    """On an Auto mesh reshard and out_sharding= raise; on an Explicit mesh reshard gives the type."""
    with jax.set_mesh(page.auto_mesh):
        for typed in (
            lambda: jax.reshard(jnp.ones(8), P("data")),
            lambda: jnp.zeros(8, out_sharding=P("data")),
        ):
            assert "cannot contain axis names that are of type Auto or Manual" in said(typed)
    assert type_of(jax.reshard(jnp.ones(8), P("data"))) == "float32[8@data]"


def test_on_auto_axes_a_constraint_or_device_shards_and_the_type_does_not_say_so(page):
    """Both fixes shard eight values in two; their type is float32[8]."""
    for x in (page.kept, page.made):
        assert {shard.data.shape for shard in x.addressable_shards} == {(8 // 2,)}
        assert type_of(x) == "float32[8]"


def test_an_array_of_another_mesh_than_the_contexts_raises(page):
    """jnp.sin of an array of the Auto mesh raises in the context of the Explicit one."""
    raised = said(jnp.sin, page.auto_BD)
    assert raised.startswith("ValueError: For primitive sin, context mesh AbstractMesh(")
    assert "should match the aval mesh" in raised


def test_moved_to_the_mesh_in_context_or_in_its_own_context_it_passes(page):
    """The sine is right after the move, and in the context of the array's own mesh."""
    sine = np.sin(np.ones((8, 16)))
    np.testing.assert_allclose(page.sine_BD, sine, rtol=1e-6)
    assert type_of(page.sine_BD) == "float32[8@data,16]"
    with jax.set_mesh(page.auto_mesh):
        np.testing.assert_allclose(jnp.sin(page.auto_BD), sine, rtol=1e-6)


# Products, sums and lookups


def test_a_sum_over_a_dimension_that_both_operands_shard_is_ambiguous(page):
    """jnp.dot raises, and so do @ and jnp.einsum without out_sharding=."""
    h_BF, w_FD = page.h_BF, page.w_FD
    for product in (jnp.dot, lambda h, w: h @ w, lambda h, w: jnp.einsum("bf,fd->bd", h, w)):
        raised = said(product, h_BF, w_FD)
        assert raised.startswith("ShardingTypeError: Contracting dimensions are sharded")
        assert "and it is ambiguous how the output should be sharded" in raised


def test_with_out_sharding_the_product_is_right(page):
    """jnp.dot, einsum and a layer of Flax that take out_sharding= give NumPy's values."""
    assert type_of(page.y_BD) == "float32[8@data,16]"
    expected = np.asarray(page.h_BF) @ np.asarray(page.w_FD)
    by_rows = P("data", None)
    einsum = jnp.einsum("bf,fd->bd", page.h_BF, page.w_FD, out_sharding=by_rows)
    layer = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(page.w_FD)
    for found in (page.y_BD, einsum, layer(page.h_BF, out_sharding=by_rows)):
        np.testing.assert_array_equal(found, expected)


def test_a_lookup_asks_for_the_sharding_of_its_result(page):
    """Indices in an array raise, and so does a slice outside jax.jit."""
    words = "Use `.at[...].get(out_sharding=)` to provide output PartitionSpec for"
    raised = said(lambda: page.table_VD[page.ids_B])
    assert raised.startswith(f"ShardingTypeError: {words} the gather indexing")
    assert "gather indexing" in said(lambda: put(np.ones(8), page.mesh, "data")[2:4])


def test_at_get_looks_up_with_the_sharding_named(page):
    """The rows are NumPy's, sharded along both axes."""
    assert type_of(page.rows_BD) == "float32[8@data,16@model]"
    np.testing.assert_array_equal(page.rows_BD, np.arange(1024.0).reshape(64, 16)[:8])


def test_two_axes_for_one_dimension_raise(page):
    """x_BD along data and r_BD along model do not add up."""
    raised = said(jnp.add, page.x_BD, page.r_BD)
    assert "add got incompatible shardings for broadcasting: ('data', None), (" in raised


def test_resharded_the_residual_adds_up(page):
    """The sum is right, and its rows are along data."""
    assert type_of(page.total_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.total_BD, rows() + 1)


def test_a_result_with_one_axis_twice_is_illegal(page):
    """A batch along data times a weight with columns along data raises."""
    raised = said(jnp.dot, page.x_BD, page.after("twice").w_DF)
    assert "produces an illegally sharded result: f32[8@data,32@data]" in raised


def test_out_sharding_or_a_gathered_weight_keeps_the_batch_along_data(page):
    """Both fixes give sums of rows, for the weight is all ones, of one type."""
    gathered = page.x_BD @ jax.reshard(page.after("twice").w_DF, P(None, None))
    sums = rows().sum(1, keepdims=True)
    for found in (page.out_BF, gathered):
        assert type_of(found) == "float32[8@data,32]"
        np.testing.assert_array_equal(found, np.broadcast_to(sums, (8, 32)))


def test_a_reshape_asks_if_the_first_part_is_not_divisible(page):
    """2 × 16 over four devices raises; 4 × 8 asks nothing."""
    raised = said(page.q_BF.reshape, (8, 2, 16))
    assert raised.startswith("ShardingTypeError: This reshape is not supported. Please")
    assert "specify the sharding of the output via the `out_sharding` argument" in raised
    assert type_of(page.q_BF.reshape(8, 4, 8)) == "float32[8@data,4@model,8]"


def test_a_reshape_with_out_sharding_is_right(page):
    """Named, the heads are whole and their features are along model."""
    assert type_of(page.heads) == "float32[8@data,2,16@model]"
    np.testing.assert_array_equal(page.heads, np.arange(256.0).reshape(8, 2, 16))


def test_a_batch_dimension_of_a_product_is_sharded_alike(page):
    """Heads along model and heads along data raise."""
    raised = said(jnp.einsum, "hsc,htc->hst", page.q_HSC, page.k_HTC)
    assert "dot_general requires lhs batch dimensions and rhs batch dimensions" in raised
    assert "('model',) and ('data',)" in raised


def test_resharded_the_scores_of_each_head_are_right(page):
    """The scores of ones are 16, the size of a head, and heads are along model."""
    assert type_of(page.scores_HST) == "float32[4@model,8,8]"
    np.testing.assert_array_equal(page.scores_HST, np.full((4, 8, 8), 16.0))


# Loops


def test_scan_and_map_want_their_first_dimension_whole(page):
    """Rows that are sharded raise in both."""
    raised = said(jax.lax.scan, page.step, jnp.zeros(16), page.x_BD)
    assert "0th dimension of all xs should be replicated. Got P('data', None)" in raised
    assert "0th dimension of all xs" in said(jax.lax.map, jnp.sin, page.x_BD)


def test_scan_over_whole_rows_with_sharded_columns_adds_up(page):
    """The sum over the rows is NumPy's, and its columns are along model."""
    total_D = page.after("scan-fixed").total_D
    assert type_of(total_D) == "float32[16@model]"
    np.testing.assert_array_equal(total_D, rows().sum(0))


def loops(page):
    """Three kinds of loop, each a function of its first carry."""
    x_D = jax.reshard(jnp.ones(16), P("model"))
    return {
        "scan": lambda start: jax.lax.scan(page.add, start, page.x_TD)[0],
        "fori_loop": lambda start: jax.lax.fori_loop(0, 4, lambda _, c: c + x_D, start),
        "while_loop": lambda start: jax.lax.while_loop(
            lambda c: c.max() < 4, lambda c: c + x_D, start
        ),
    }


@pytest.mark.parametrize("kind", ["scan", "fori_loop", "while_loop"])
def test_a_loop_returns_the_type_that_it_was_given(page, kind):
    """A start of float32[16] raises if the carry becomes float32[16@model]."""
    raised = said(loops(page)[kind], jnp.zeros(16))
    assert "carry input and carry output must have equal types" in raised
    assert "has type float32[16] but the corresponding output carry" in raised
    assert "has type float32[16@model]" in raised


def test_branches_of_cond_have_equal_types():
    """A branch of float32[16] and one of float32[16@model] raise."""
    x_D, zeros_D = jax.reshard(jnp.ones(16), P("model")), jnp.zeros(16)
    raised = said(jax.lax.cond, True, lambda: x_D, lambda: zeros_D)
    assert "cond branches must have equal output types but they differ" in raised


def test_a_start_of_the_right_type_passes_every_loop(page):
    """With zeros sharded along model each loop gives four, sharded along model."""
    assert type_of(page.total_D) == "float32[16@model]"
    np.testing.assert_array_equal(page.total_D, np.full(16, 4.0))
    for loop in loops(page).values():
        np.testing.assert_array_equal(loop(page.marked_D), np.full(16, 4.0))


def test_the_fix_inside_shard_map_does_not_work_outside():
    """jax.lax.pcast raises outside shard_map."""
    raised = said(lambda: jax.lax.pcast(jnp.zeros(16), "model", to="varying"))
    assert "should be called under jax.shard_map" in raised


# Caches, maps over rows, repeated heads


def test_an_update_of_the_caches_sharding_is_written_at_its_position(page):
    """Resharded like the cache, the update lands at position 3, and nothing else changes."""
    written = page.append(page.cache_BTKC, page.sharded_BTKC, 3)
    assert type_of(written) == "float32[2@data,16,4@model,8]"
    expected = np.zeros((2, 16, 4, 8))
    expected[:, 3] = 1
    np.testing.assert_array_equal(written, expected)


def test_attention_that_decodes_raises_until_its_cache_is_sharded_as_the_batch(page):
    """nnx.MultiHeadAttention: init_cache makes an unsharded cache; sharded, two steps decode what
    they decode on one device."""
    tokens_BSD = np.random.default_rng(0).normal(size=(8, 2, 16)).astype("float32")

    def decode(shard):
        layer = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
        layer.init_cache((8, 16, 16))
        for cache in (layer.cached_key, layer.cached_value):
            assert type_of(cache[...]) == "float32[8,16,4,4]"
            cache.set_value(shard(cache[...], P("data")))
        return [layer(shard(tokens_BSD[:, i : i + 1], P("data"))) for i in (0, 1)]

    unsharded = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
    unsharded.init_cache((8, 16, 16))
    assert "dynamic_update_slice operand sharding must" in said(unsharded, page.token_BSD)
    sharded, alone = decode(jax.reshard), decode(lambda x, _: jnp.asarray(x))
    assert type_of(sharded[1]) == "float32[8@data,1,16]"
    np.testing.assert_allclose(sharded[1], alone[1], rtol=1e-4, atol=1e-5)


def test_a_gathered_weight_and_an_equally_sharded_factor_pass_vmap(page):
    """The scores are the product with the weight, and each row is multiplied by its own factor."""
    x_BD, w_D = np.asarray(page.x_BD), np.arange(16.0)
    assert type_of(page.scores_B) == "float32[8@data]"
    np.testing.assert_allclose(page.scores_B, x_BD @ w_D, rtol=1e-6)
    assert type_of(page.scaled_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.scaled_BD, x_BD * np.arange(8.0)[:, None])


def test_vmap_is_refused_in_gradients_of_each_example_and_inside_searchsorted_and_interp(page):
    """Under FSDP vmap(grad) raises it, and so do two functions of jax.numpy that use vmap."""

    def loss(w_D, x_D):
        return x_D @ w_D

    by_example = jax.vmap(jax.grad(loss), (None, 0))
    x_B = put(np.arange(8.0, dtype="float32"), page.mesh, "data")
    for function, inputs in [
        (by_example, (page.w_D, page.x_BD)),
        (jnp.searchsorted, (x_B, x_B)),
        (jnp.interp, (x_B, x_B, x_B)),
    ]:
        assert "Unmapped values passed to vmap cannot be sharded" in said(function, *inputs)
    gathered = by_example(jax.reshard(page.w_D, P(None)), page.x_BD)
    np.testing.assert_array_equal(gathered, page.x_BD)


def test_repeated_heads_are_sharded_as_named_and_attention_needs_no_repeat(page):
    """With out_sharding= each head is repeated in place. dot_product_attention with fewer key heads
    equals attention with repeated ones."""
    k_BTKC = put(
        np.random.default_rng(0).normal(size=(2, 8, 4, 16)).astype("float32"),
        page.mesh,
        *("data", None, "model"),
    )
    repeated = jnp.repeat(k_BTKC, 2, axis=2, out_sharding=page.by_heads)
    assert type_of(repeated) == type_of(page.k_BTHC) == "float32[2@data,8,8@model,16]"
    np.testing.assert_array_equal(repeated, np.repeat(np.asarray(k_BTKC), 2, axis=2))
    attend = jax.nn.dot_product_attention
    np.testing.assert_allclose(
        attend(page.q_BSHC, k_BTKC, k_BTKC), attend(page.q_BSHC, repeated, repeated), rtol=1e-5
    )
    whole = jnp.repeat(k_BTKC, 2, axis=1)  # this dimension is not sharded
    assert type_of(whole) == "float32[2@data,16,4@model,16]"


# Slices, joined arrays, updates


def test_a_slice_of_a_sharded_dimension_is_divisible_by_the_devices(page):
    """One row on two devices raises inside jax.jit; two rows stay sharded."""
    raised = said(jax.jit(lambda x_BD: x_BD[0]), page.x_BD)
    assert raised.startswith("ShardingTypeError: slicing on sharded dims where")
    assert "on sharded dims where out dim (1) is not divisible by mesh axes (2)" in raised
    assert type_of(jax.jit(lambda x_BD: x_BD[2:4])(page.x_BD)) == "float32[2@data,16]"


def test_a_row_of_a_whole_dimension_is_the_row(page):
    """Resharded first, the first row is 0 to 15."""
    assert type_of(page.row_D) == "float32[16]"
    np.testing.assert_array_equal(page.row_D, np.arange(16.0))


def test_a_convolution_over_sharded_channels_asks(page):
    """nnx.Conv raises and names conv_general_dilated, which takes out_sharding= too."""
    raised = said(page.layer, page.image_BHWC)
    assert raised.startswith("ShardingTypeError: Please specify the output sharding via")
    assert "`out_sharding` parameter of `conv_general_dilated`" in raised
    kernel = jnp.ones((3, 3, 8, 16))
    found = jax.lax.conv_general_dilated(
        page.image_BHWC,
        kernel,
        *((1, 1), "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        out_sharding=P("data", None, None, None),
    )
    np.testing.assert_array_equal(found, page.y_BHWF)


def test_a_convolution_with_out_sharding_sums_over_all_channels(page):
    """Inside the border each value is the size of the kernel, 3 × 3 × 8, for all is one."""
    assert type_of(page.y_BHWF) == "float32[8@data,4,4,16]"
    inside_BHWF = np.full((8, 2, 2, 16), 3 * 3 * 8)
    np.testing.assert_array_equal(page.y_BHWF[:, 1:-1, 1:-1], inside_BHWF)


def test_a_convolution_of_a_sharded_batch_asks_nothing_nor_does_its_gradient(page):
    """Each value of the gradient's centre is the number of positions, 8 × 4 × 4."""
    batch_BHWC = put(np.ones((8, 4, 4, 8), "float32"), page.mesh, "data")
    grads = nnx.grad(lambda layer: layer(batch_BHWC).sum())(page.layer)
    np.testing.assert_allclose(grads.kernel[1, 1], np.full((8, 16), 8 * 4 * 4))


def test_arrays_are_joined_if_they_are_sharded_alike(page):
    """concatenate and stack raise for rows along data and rows along model."""
    for join in (jnp.concatenate, jnp.stack):
        assert "All operands should have the same sharding" in said(join, [page.x_BD, page.r_BD])


def test_resharded_arrays_are_joined(page):
    """Sixteen rows along data, those of x_BD and then ones."""
    assert type_of(page.both_BD) == "float32[16@data,16]"
    np.testing.assert_array_equal(page.both_BD, np.concatenate([rows(), np.ones((8, 16))]))


def test_where_wants_both_cases_alike(page):
    """A sharded and a whole case raise; adding the two does not."""
    raised = said(lambda: jnp.where(page.x_BD > 9, page.x_BD, page.whole_BD))
    assert raised.startswith("ShardingTypeError: select cases must have the same shardings")
    assert type_of(page.x_BD + page.whole_BD) == "float32[8@data,16]"


def test_a_resharded_case_or_a_number_fits(page):
    """Both fixes give NumPy's values, with rows along data."""
    for found in (page.large_BD, page.number_BD):
        assert type_of(found) == "float32[8@data,16]"
        np.testing.assert_array_equal(found, np.where(rows() > 9, rows(), 0))


def test_an_update_at_positions_asks_for_the_sharding_of_its_result(page):
    """It raises; without a mesh in context JAX 0.10 raises other words."""
    words = "Use `.at[...].set/add/mul/...(out_sharding=)`"
    assert f"{words} to provide output" in said(page.count, page.counts_V, page.ids_B)
    with jax.set_mesh(NO_MESH):
        raised = said(page.count, page.counts_V, page.ids_B)
    if jax.__version_info__ >= (0, 12):
        assert words in raised
    elif jax.__version_info__ < (0, 11):
        older = "Length of device assignment 1 is not equal to the size of the mesh"
        assert f"{older} 8" in raised


def test_named_the_update_counts(page):
    """Each of the first eight is counted once, along model."""
    assert type_of(page.counted_V) == "float32[64@model]"
    np.testing.assert_array_equal(page.counted_V, np.bincount(np.arange(8), minlength=64))


def test_a_lookup_whose_result_would_be_sharded_twice_is_named(page):
    """get and set with out_sharding= give NumPy's values; set without it raises the same message;
    take_along_axis takes one column for each row and asks nothing."""
    x_BD = np.asarray(page.x_BD)
    assert type_of(page.chosen_BB) == "float32[8@data,8]"
    np.testing.assert_array_equal(page.chosen_BB, x_BD[:, :8])
    assert type_of(page.cleared_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.cleared_BD, np.where(np.arange(16) < 8, 0, x_BD))
    assert type_of(page.one_each_B1) == "float32[8@data,1]"
    np.testing.assert_array_equal(page.one_each_B1[:, 0], np.diag(x_BD[:, :8]))
    update = said(lambda: page.x_BD.at[:, page.columns_B].set(0.0))
    assert update.startswith("DuplicateSpecError")


# What wants a whole dimension


def test_sort_cumsum_and_top_k_want_their_dimension_whole(page):
    """All three raise along a sharded dimension, in words of their own."""
    assert "must be unsharded over the sorting dimension" in said(jnp.sort, page.x_BD, 0)
    assert "unsharded over the axis being reduced" in said(jnp.cumsum, page.x_BD, 0)
    assert "unsharded over the axis along which" in said(jax.lax.top_k, page.x_BD.T, 2)


def test_rows_are_sorted_where_columns_are_sharded(page):
    """The result is NumPy's, and its columns are along model."""
    assert type_of(page.sorted_BD) == "float32[8,16@model]"
    np.testing.assert_array_equal(page.sorted_BD, np.sort(rows(), 0))


@pytest.mark.parametrize("name", ["cumsum", "roll", "tile"])
def test_along_a_whole_dimension_each_operation_gives_numpys_values(page, name):
    """Resharded to whole columns, cumsum, roll and tile are right and keep the other sharding."""
    result = getattr(page, name)(page.columns_BD)
    assert type_of(result).endswith("16@model]")
    x_BD = np.asarray(page.x_BD)
    by_numpy = {
        "cumsum": np.cumsum(x_BD, 0),
        "roll": np.roll(x_BD, 1, 0),
        "tile": np.tile(x_BD, (2, 1)),
    }
    np.testing.assert_array_equal(result, by_numpy[name])


def test_auto_axes_rolls_along_the_sharded_dimension(page):
    """The result is NumPy's and keeps its rows along data."""
    assert type_of(page.rolled_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.rolled_BD, np.roll(np.asarray(page.x_BD), 1, 0))


TABLE = {  # words of the table: the functions of their row
    "must be unsharded over the sorting dimension": {
        "sort": lambda x, v: jnp.sort(x, 0),
        "argsort": lambda x, v: jnp.argsort(x, 0),
        "lexsort": lambda x, v: jnp.lexsort((v, v)),
        "median": lambda x, v: jnp.median(x, 0),
        "quantile": lambda x, v: jnp.quantile(x, 0.5, axis=0),
        "unique": lambda x, v: jnp.unique(v, size=8),
        "random.permutation": lambda x, v: jax.random.permutation(jax.random.key(0), v),
    },
    "should be unsharded over the axis being reduced": {
        "cumsum": lambda x, v: jnp.cumsum(x, 0),
        "cumprod": lambda x, v: jnp.cumprod(x, 0),
        "cummax": lambda x, v: jax.lax.cummax(x, 0),
        "cumlogsumexp": lambda x, v: jax.lax.cumlogsumexp(x, 0),
    },
    "should be unsharded over the axis along which to compute the top_k values": {
        "top_k": lambda x, v: jax.lax.top_k(v, 2),
        "partition": lambda x, v: jnp.partition(v, 2),
    },
    "should be unsharded i.e. the spec of that dim should be `None`": {
        "approx_max_k": lambda x, v: jax.lax.approx_max_k(v, 2),
        "approx_min_k": lambda x, v: jax.lax.approx_min_k(v, 2),
    },
    "on sharded dims where out dim": {
        "x[0]": lambda x, v: jax.jit(lambda x: x[0])(x),
        "diff": lambda x, v: jax.jit(jnp.diff)(v),
        "pad": lambda x, v: jnp.pad(v, (1, 0)),
        "split": lambda x, v: jax.jit(lambda x: jnp.split(x, 8))(x),
        "associative_scan": lambda x, v: jax.jit(lambda x: jax.lax.associative_scan(jnp.add, x))(x),
    },
    "Use `.at[...].get(out_sharding=)`": {
        "diag": lambda x, v: jnp.diag(x),
        "x[mask]": lambda x, v: v[v > 3],
    },
    "Use `.at[...].set/add/mul/...(out_sharding=)`": {
        "bincount": lambda x, v: jnp.bincount(v.astype(int), length=8),
        "segment_sum": lambda x, v: jax.ops.segment_sum(v, v.astype(int), 8),
    },
    "select `which` must be scalar or have the same sharding as cases": {
        "trace": lambda x, v: jnp.trace(x),
        "einsum": lambda x, v: jnp.einsum("ii", x[:, :8]),
    },
    "produces an illegally sharded result": {
        "outer": lambda x, v: jnp.outer(v, v),
        "cov": lambda x, v: jnp.cov(x),
        "isin": lambda x, v: jnp.isin(v, v),
    },
}
ROWS = [(words, name) for words, functions in TABLE.items() for name in functions]


@pytest.mark.parametrize("words, name", ROWS, ids=[name for _, name in ROWS])
def test_the_table_says_what_each_function_raises_along_a_sharded_dimension(page, words, name):
    """Each function of a row raises the words of its row."""
    v_B = put(np.arange(8, dtype="float32"), page.mesh, "data")
    assert words in said(TABLE[words][name], page.x_BD, v_B)


@compiled_for_cpu
def test_what_asks_nothing_communicates_unless_a_pad_is_the_same_at_both_ends(page):
    """Each of the functions moves something, and a pad only if its ends differ; a roll that is
    handed to the compiler is an exchange between neighbours."""
    for function in (
        lambda x: x.sum(0),
        lambda x: x.max(0),
        lambda x: jnp.argmax(x, 0),
        lambda x: x.var(0),
        lambda x: jax.nn.logsumexp(x, 0),
        lambda x: jax.nn.softmax(x, 0),
        lambda x: jnp.fft.fft(x, axis=0),
        lambda x: jnp.flip(x, 0),
        lambda x: jnp.pad(x, ((2, 0), (0, 0))),
    ):
        assert traffic(function, page.x_BD, mesh=page.mesh).kinds
    both_ends = traffic(lambda x: jnp.pad(x, ((1, 1), (0, 0))), page.x_BD, mesh=page.mesh)
    assert not both_ends.kinds
    roll = jax.sharding.auto_axes(page.roll, out_sharding=P("data", None))
    assert traffic(roll, page.x_BD, mesh=page.mesh).kinds == {"collective-permute"}


def test_these_ask_nothing_along_a_sharded_dimension(page):
    """sum, max, argmax, var, logsumexp, softmax, fft, flip and pad give NumPy's values."""
    x_BD, host = page.x_BD, np.asarray(page.x_BD)
    for found, expected in [
        (x_BD.sum(0), host.sum(0)),
        (x_BD.max(0), host.max(0)),
        (jnp.argmax(x_BD, 0), host.argmax(0)),
        (x_BD.var(0), host.var(0)),
        (jax.nn.logsumexp(x_BD, 0), np.log(np.exp(host - 127).sum(0)) + 127),
        (jax.nn.softmax(x_BD, 0)[:, 0], np.exp(host[:, 0] - 112) / np.exp(host[:, 0] - 112).sum()),
        (jnp.fft.fft(x_BD, axis=0), np.fft.fft(host, axis=0)),
        (jnp.flip(x_BD, 0), host[::-1]),
        (jnp.pad(x_BD, ((1, 1), (0, 0))), np.pad(host, ((1, 1), (0, 0)))),
    ]:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_what_calls_nonzero_raises_its_message(page):
    """argwhere, flatnonzero, where with one argument and BCOO.fromdense raise as nonzero does."""
    mask_B = page.loss_B > 4
    for function in (
        lambda: jnp.nonzero(mask_B, size=3),
        lambda: jnp.argwhere(mask_B, size=3),
        lambda: jnp.flatnonzero(mask_B, size=3),
        lambda: jnp.where(mask_B, size=3),
        lambda: BCOO.fromdense(page.loss_B, nse=8),
    ):
        raised = said(function)
        assert any(words in raised for words in ("nonzero over sharded axes", "cumsum")), raised


def test_a_whole_mask_has_positions_and_where_needs_none(page):
    """The positions are those of NumPy; jnp.where of three arguments keeps the sharding."""
    np.testing.assert_array_equal(page.positions, [5, 6, 7])
    assert type_of(page.large_B) == "float32[8@data]"
    np.testing.assert_array_equal(page.large_B, [0, 0, 0, 0, 0, 5, 6, 7])


def test_a_matrix_is_factorised_whole_and_a_batch_where_it_is_sharded(page):
    """The inverse of the whole matrix and the factors of the batch are right, the batch sharded."""
    np.testing.assert_array_equal(page.inverse, np.eye(8) / 2)
    factors = page.factorise(page.batch_BXX)
    assert type_of(factors) == "float32[8@data,3,3]"
    np.testing.assert_array_equal(factors, np.stack([2 * np.eye(3)] * 8))


def test_which_factorisations_accept_a_sharded_batch(page):
    """svd, eigh, pinv and det accept it; cholesky and qr raise one message, inv one of vmap."""
    for name in ("svd", "eigh", "pinv", "det"):
        first = jax.tree.leaves(getattr(jnp.linalg, name)(page.batch_BXX))[0]
        assert type_of(first).startswith("float32[8@data"), name
    for name in ("cholesky", "qr"):
        assert "select `which` must be scalar" in said(getattr(jnp.linalg, name), page.batch_BXX)
    assert "Mapped away dimension of inputs" in said(jnp.linalg.inv, page.batch_BXX)


@pytest.mark.parametrize("name", ["inv", "det", "qr", "svd", "eig", "schur"])
def test_factorisations_of_one_sharded_matrix_say_the_first_words(page, name):
    """lu, inside inv, det and solve, qr, svd, eig and schur want the whole matrix."""
    words = "must be unsharded on non-batch dimensions"
    function = getattr(jnp.linalg, name, None) or getattr(jax.scipy.linalg, name)
    assert words in said(function, page.matrix_BB)
    assert words in said(jnp.linalg.solve, page.matrix_BB, page.b_B)


@pytest.mark.parametrize("name", ["cholesky", "eigh"])
def test_those_that_add_the_transpose_raise_another_message(page, name):
    """cholesky and eigh of one sharded matrix would shard both dimensions of a sum alike."""
    illegal = said(getattr(jnp.linalg, name), page.matrix_BB)
    assert "produces an illegally sharded result" in illegal


def test_auto_axes_multiplies_each_group_by_its_expert_and_has_a_gradient(page):
    """Rows 0 to 2 meet the first expert, the others the second, forwards and backwards."""
    experts_EDF = np.stack([np.ones((16, 4)), np.full((16, 4), 2)]).astype("float32")
    placed = put(experts_EDF, page.mesh, None, None, "model")
    found = page.ragged_dot(page.x_BD, placed, page.tokens_of_each_E)
    assert type_of(found) == "float32[8@data,4@model]"
    x_BD = np.asarray(page.x_BD)
    expected = np.concatenate([x_BD[:3] @ experts_EDF[0], x_BD[3:] @ experts_EDF[1]])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    grads = jax.grad(lambda w: page.ragged_dot(page.x_BD, w, page.tokens_of_each_E).sum())(placed)
    for group, rows in enumerate((x_BD[:3], x_BD[3:])):
        np.testing.assert_allclose(np.asarray(grads)[group, :, 0], rows.sum(0), rtol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is how JAX lowers it for CPU")
def test_the_out_sharding_that_ragged_dot_asks_for_raises_on_cpu(page):
    """Its own advice leads to the message about `which`."""
    inputs = page.x_BD, page.experts_EDF, page.tokens_of_each_E
    named = said(lambda: jax.lax.ragged_dot(*inputs, out_sharding=P("data", "model")))
    assert "select `which` must be scalar or have the same sharding as cases" in named


# Entries whose advice was corrected


def test_a_product_inside_a_library_is_handed_to_the_compiler(page):
    """cg has no out_sharding=: it raises the message about contracting dimensions, and inside
    auto_axes it solves the system; the solution is sharded as named."""
    raised = said(page.solve, page.matrix_BB, page.b_B)
    assert "Contracting dimensions are sharded" in raised
    assert type_of(page.solution_B) == "float32[8@data]"
    np.testing.assert_allclose(page.solution_B, np.arange(8) / 2, rtol=1e-6)


def test_auto_axes_wants_every_array_by_position(page):
    """An array from outside, or one by keyword, keeps its Explicit type and raises."""
    words = "should match the aval mesh"
    auto = jax.sharding.auto_axes(page.solve, out_sharding=P("data"))
    assert words in said(lambda: auto(page.matrix_BB, b_B=page.b_B))
    outside = jax.sharding.auto_axes(lambda b_B: page.matrix_BB @ b_B, out_sharding=P("data"))
    assert words in said(outside, page.b_B)


def test_an_update_of_muon_is_handed_to_the_compiler_whole(page):
    """Muon multiplies inside `update`: it raises the message. Inside auto_axes, with the specs of
    its results, the update is that of one device, and keeps its sharding."""
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    weights = {"w": put(weight, page.mesh, "data", "model")}
    muon = optax.contrib.muon(1e-3)
    state = muon.init(weights)
    assert "Contracting dimensions" in said(muon.update, weights, state, weights)
    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (weights, state))
    auto = jax.sharding.auto_axes(muon.update, out_sharding=specs)
    update, _ = auto(weights, state, weights)
    assert type_of(update["w"]) == "float32[16@data,16@model]"
    whole = {"w": jnp.asarray(weight)}
    alone, _ = muon.update(whole, muon.init(whole), whole)
    np.testing.assert_allclose(update["w"], alone["w"], atol=1e-7)


def test_an_embedding_is_looked_up_with_the_sharding_of_its_result(page):
    """nnx.Embed raises the message about gather; embed(ids, out_sharding=) gives the rows."""
    embed = nnx.Embed(64, 16, rngs=nnx.Rngs(0))
    ids_BS = put(np.arange(32).reshape(8, 4), page.mesh, "data")
    assert "Use `.at[...].get(out_sharding=)`" in said(embed, ids_BS)
    rows = embed(ids_BS, out_sharding=P("data", None, None))
    assert type_of(rows) == "float32[8@data,4,16]"
    np.testing.assert_array_equal(rows.reshape(32, 16), np.asarray(embed.embedding[...])[:32])


def test_batch_dimensions_are_sharded_alike_since_0_11_1(page):
    """A batch dimension that only one operand shards raises since 0.11.1, and passed before."""
    k_HTC = put(np.ones((4, 8, 16), "float32"), page.mesh)
    scores = jax.tree_util.Partial(jnp.einsum, "hsc,htc->hst", page.q_HSC, k_HTC)
    if jax.__version_info__ >= (0, 11, 1):
        assert "dot_general requires lhs batch dimensions" in said(scores)
    else:
        assert type_of(scores()) == "float32[4@model,8,8]"


# Collectives that the program forbids


def test_the_sum_that_is_left_unreduced_is_not_forbidden(page):
    """It has the sums once its terms are added up, and the guard lets it pass."""
    assert type_of(page.terms_B) == "float32[8@data]{U:model}"
    summed_B = jax.reshard(page.terms_B, P("data"))
    np.testing.assert_allclose(summed_B, np.asarray(page.h_BF).sum(1))
    if jax.__version_info__ >= (0, 12):
        with jax.sharding.no_collectives({"model"}):
            jax.lax.reduce_sum(page.h_BF, (1,), out_sharding=page.unreduced)
        assert said(page.sum_of_rows, page.h_BF).startswith("ForbiddenCollectiveError: ")
