"""Messages of shard_map: each program raises what its heading quotes, and each fix is right."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from many_devices.helpers import put, traffic
from pages import compiled_for_cpu
from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-shard-map"
P = jax.P

ENTRIES = quoted_in_headings(PAGE)
MANUAL = "so the manual axis types do not match"
ORDER = (
    "Make sure that the axis_name passed to jax.lax.ppermute is in the same order as the"
    " axis_names declared on the mesh"
)


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


ORDER_BEFORE = {ORDER: ((0, 11, 1), "no message, and the order of the mesh")}


@pytest.mark.parametrize("slug", ENTRIES)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert ENTRIES[slug]
    assert_raised(page, slug, ENTRIES[slug], ORDER_BEFORE)


def test_all_messages_have_an_entry():
    """No heading of the page is left out above."""
    assert len(ENTRIES) == 22


# What varies and what does not


def test_a_mean_of_a_block_is_not_the_same_on_all_devices(page):
    """With out_specs=P() it raises, and the message names the axis along which it varies."""
    promised = jax.shard_map(page.mean_of_block, mesh=page.mesh, in_specs=P("data"), out_specs=P())
    raised = said(promised, page.x_BD)
    assert "out_specs which require replication which can't be statically inferred" in raised
    assert "varying over {data}" in raised and "check_vma=False" in raised


def test_averaged_over_data_the_mean_is_numpys(page):
    """pmean gives 63.5."""
    mean = page.after("replication-fixed").mean
    assert float(mean(page.x_BD)) == page.x_BD.mean() == 63.5


def test_without_the_check_the_mean_of_the_first_block_comes_back(page):
    """check_vma=False raises nothing and returns 31.5, the mean of the first four rows."""
    unchecked = partial(jax.shard_map, mesh=page.mesh, in_specs=P("data"), out_specs=P())
    found = unchecked(page.mean_of_block, check_vma=False)(page.x_BD)
    assert float(found) == page.x_BD[:4].mean() == 31.5


def test_what_all_gather_returns_varies_by_its_type(page):
    """Its result is the same everywhere, and yet the check raises."""
    gather = partial(jax.lax.all_gather, axis_name="data", tiled=True)
    on_blocks = partial(jax.shard_map, gather, mesh=page.mesh, in_specs=P("data"), out_specs=P())
    np.testing.assert_array_equal(on_blocks(check_vma=False)(page.x_BD), page.x_BD)
    assert "statically" in said(on_blocks(), page.x_BD)


def loops():
    """Three kinds of loop, each adding what varies to zeros that do not."""
    return {
        "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(16), x)[0][None],
        "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + x.sum(), 0.0)[None],
        "while_loop": lambda x: jax.lax.while_loop(lambda c: c < 9, lambda c: c + x.sum(), 0.0)[
            None
        ],
    }


@pytest.mark.parametrize("kind", ["scan", "fori_loop", "while_loop"])
def test_a_loop_returns_the_type_that_it_was_given(page, kind):
    """A start that is the same on all devices raises if the carry varies."""
    raised = said(page.by_rows(loops()[kind]), page.x_BD)
    assert "carry input and carry output must have equal types" in raised and MANUAL in raised


def test_the_message_about_a_carry_proposes_the_cast(page):
    """It names pcast, the axis, and both types."""
    raised = said(page.by_rows(page.sums), page.x_BD)
    assert "jax.lax.pcast(..., ('data',), to='varying')" in raised
    assert "float32[16] but" in raised and "float32[16]{V:data}" in raised


def test_with_a_cast_start_each_device_adds_up_its_rows(page):
    """The two sums of four rows are NumPy's."""
    expected = page.x_BD.reshape(2, 4, 16).sum(axis=1)
    np.testing.assert_array_equal(page.by_rows(page.cast_sums)(page.x_BD), expected)


def test_branches_of_two_types_raise(page):
    """cond and switch raise; JAX 0.10 to 0.12 propose a cast without axes."""
    raised = said(page.by_rows(page.ones_if_large), page.x_BD)
    assert "branches must have equal output types but they differ" in raised and MANUAL in raised
    if jax.__version_info__ < (0, 13):
        assert "pcast(..., (), to='varying')" in raised
    branches = [lambda x: x, lambda x: jnp.ones((4, 16))]
    assert MANUAL in said(page.by_rows(lambda x: jax.lax.switch(1, branches, x)), page.x_BD)


def test_with_the_ones_cast_each_device_takes_its_own_branch(page):
    """The first block stays, and the second becomes ones."""
    expected = np.concatenate([page.x_BD[:4], np.ones((4, 16))])
    found = page.by_rows(page.cast_ones_if_large)(page.x_BD)
    np.testing.assert_array_equal(found, expected)


def test_check_rep_is_called_check_vma(page):
    """jax.shard_map does not take check_rep."""
    raised = said(partial(page.by_rows, page.doubled, check_rep=False))
    assert "shard_map() got an unexpected keyword argument 'check_rep'" in raised


def test_the_new_check_knows_cond_and_scan(page):
    """Without the argument the program is right; a cond and a scan of equal types pass too."""
    np.testing.assert_array_equal(page.by_rows(page.doubled)(page.x_BD), 2 * page.x_BD)

    def doubled_if_large(x):
        return jax.lax.cond(x.sum() > 3000, page.doubled, lambda x: x, x)

    expected = np.concatenate([page.x_BD[:4], 2 * page.x_BD[4:]])
    np.testing.assert_array_equal(page.by_rows(doubled_if_large)(page.x_BD), expected)

    def doubled_row_by_row(x):
        return jax.lax.scan(lambda carry, row: (carry, 2 * row), 0, x)[1]

    np.testing.assert_array_equal(page.by_rows(doubled_row_by_row)(page.x_BD), 2 * page.x_BD)


def test_without_the_check_gradients_of_weights_are_not_summed(page):
    """The gradient of a weight that all devices share is that of one block with check_vma=False."""

    def gradient(**options):
        def of_block(w, x_block_BD):
            return jax.grad(lambda w: (w * x_block_BD).sum())(w)

        specs = dict(in_specs=(P(), P("data")), out_specs=P())
        return jax.shard_map(of_block, mesh=page.mesh, **specs, **options)(2.0, page.x_BD)

    assert float(gradient()) == page.x_BD.sum()
    assert float(gradient(check_vma=False)) == page.x_BD[:4].sum()


# Collectives outside, sizes and specs


def test_collectives_work_inside_shard_map_only(page):
    """pmean and axis_index raise under jax.jit, and with a mesh in context as well."""
    placed = put(page.x_BD, page.mesh, "data")
    for outside in (jax.jit(page.mean_over_data), page.mean_over_data):
        assert "unbound axis name: data" in said(outside, placed)
    with jax.set_mesh(page.mesh):
        assert "unbound axis name: data" in said(jax.jit(page.mean_over_data), page.x_BD)
    assert "unbound axis name: data" in said(partial(jax.lax.axis_index, "data"))


def test_under_jit_the_mean_of_the_whole_and_under_shard_map_pmean_give_the_mean(page):
    """Both fixes give 63.5."""
    assert float(jax.jit(jnp.mean)(put(page.x_BD, page.mesh, "data"))) == 63.5
    assert float(page.after("unbound-axis-fixed").mean(page.x_BD)) == 63.5


def test_seven_rows_on_two_devices_raise(page):
    """The message names the dimension, its size and the mesh axis."""
    raised = said(page.by_rows(page.doubled), page.x_BD[:7])
    assert "axis sizes that are not evenly divisible by the corresponding" in raised
    assert "array axis 0 (of size 7) to mesh axis 'data' (of size 2)" in raised


def test_padded_rows_are_dropped_from_the_result(page):
    """Seven rows are doubled."""
    np.testing.assert_array_equal(page.after("not-evenly-fixed").doubled_BD, 2 * page.x_BD[:7])
    assert page.after("not-evenly-fixed").doubled_BD.shape == (7, 16)


def test_a_scalar_cannot_be_joined_along_an_axis(page):
    """The message says that the value has rank 0."""
    raised = said(page.by_rows(page.mean_of_block), page.x_BD)
    assert "out_specs entry which is too long to be compatible with the" in raised
    assert "has rank 0 (and 0 < 1)" in raised


def test_arrays_of_one_element_are_joined(page):
    """There is a mean for each block."""
    expected = page.x_BD.reshape(2, -1).mean(axis=1)
    np.testing.assert_array_equal(page.by_rows(page.block_mean_B)(page.x_BD), expected)


def test_one_spec_of_two_entries_does_not_fit_a_bias(page):
    """The message says that the value has rank 1."""
    one_spec = page.after("spec-too-long").add_bias
    raised = said(one_spec, page.x_BD, page.b_D)
    assert "in_specs entry which is too long to be compatible with the" in raised
    assert "has rank 1 (and 1 < 2)" in raised


def test_a_spec_for_each_argument_is_right(page):
    """The sum is NumPy's, and a device has a quarter of the bias."""
    add_bias = page.after("spec-too-long-fixed").add_bias
    np.testing.assert_array_equal(add_bias(page.x_BD, page.b_D), page.x_BD + page.b_D)


def test_an_empty_spec_fits_scalars_and_keys(page):
    """in_specs=P() takes a key and a number."""

    def noise(key, scale):
        return scale * jax.random.normal(key)

    on_each = jax.shard_map(noise, mesh=page.mesh, in_specs=P(), out_specs=P())
    assert jax.eval_shape(on_each, jax.random.key(0), 2.0).shape == ()


# Constraints and meshes


def test_a_manual_axis_cannot_be_constrained(page):
    """A bare spec of data raises where both axes are manual."""
    with jax.set_mesh(page.mesh):
        raised = said(page.by_rows(page.pinned), page.x_BD)
    assert "can only refer to Auto axes of the mesh" in raised
    assert "axis_types=(Manual, Manual)" in raised


def test_an_auto_axis_beside_a_manual_one_can_be_constrained(page):
    """The result is sharded along both, and right."""
    wanted = jax.NamedSharding(page.mesh, P("data", "model"))
    assert page.pinned_BD.sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_array_equal(page.pinned_BD, 2 * page.x_BD)


@pytest.mark.parametrize("layer", ["pinned_by_spec", "pinned_on_mesh_inside"])
def test_a_constraint_inside_names_axes_of_the_mesh_inside(page, layer):
    """A bare spec, and a NamedSharding on the mesh inside, shard by the axis that is not manual."""
    result = page.by_rows(getattr(page, layer), axis_names={"data"})(page.x_BD)
    wanted = jax.NamedSharding(page.mesh, P("data", "model"))
    assert result.sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_array_equal(result, 2 * page.x_BD)


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P()])
@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}])
def test_a_named_sharding_of_the_outer_mesh_raises_whatever_it_names(page, spec, manual):
    """It raises the first message for each spec and each set of manual axes. With check_vma=False
    it raises the second one if the spec names a manual axis, and else it passes."""

    def layer(x):
        return jax.lax.with_sharding_constraint(2 * x, jax.NamedSharding(page.mesh, spec))

    first = "Axes mentioned in `manual_axis_type` field of ShapedArray should be of type"
    assert first in said(page.by_rows(layer, axis_names=manual), page.x_BD)
    unchecked = page.by_rows(layer, axis_names=manual, check_vma=False)
    if manual & set(spec):
        assert "contains a manual axes" in said(unchecked, page.x_BD)
    else:
        np.testing.assert_array_equal(unchecked(page.x_BD), 2 * page.x_BD)


def test_a_mesh_in_context_or_as_an_argument_is_enough(page):
    """Both give twice the rows, sharded along data."""
    for result in (page.in_context_BD, page.passed_BD):
        np.testing.assert_array_equal(result, 2 * page.x_BD)
        assert result.addressable_shards[0].data.shape == (4, 16)


def test_two_meshes_raise_and_so_does_shard_map_inside_shard_map(page):
    """The mesh of the context and the one passed differ; inside, axes of the context are manual."""
    with jax.set_mesh(page.row_mesh):
        raised = said(page.by_rows(page.doubled), page.x_BD)
    words = "should match the mesh passed to shard_map"
    assert "The context mesh" in raised and words in raised
    assert words in said(page.by_rows(page.by_rows(page.doubled)), page.x_BD)


def test_without_mesh_the_context_decides(page):
    """Eight devices have a row each."""
    doubled_BD = page.after("context-mesh-fixed").doubled_BD
    np.testing.assert_array_equal(doubled_BD, 2 * page.x_BD)
    assert doubled_BD.sharding.mesh.shape == {"data": 8}
    assert doubled_BD.addressable_shards[0].data.shape == (1, 16)


def test_without_mesh_one_shard_map_fits_inside_another(page):
    """The inner one makes model manual, the outer one data."""
    columns = P(None, "model")
    inner = jax.shard_map(page.doubled, axis_names={"model"}, in_specs=columns, out_specs=columns)
    rows = dict(in_specs=P("data"), out_specs=P("data"))
    with jax.set_mesh(page.mesh):
        outer = jax.jit(jax.shard_map(inner, axis_names={"data"}, **rows))
        np.testing.assert_array_equal(outer(page.x_BD), 2 * page.x_BD)


def test_specs_name_manual_axes_only(page):
    """A spec of model raises where data alone is manual, and a psum over model is unbound."""
    blocks = P("data", "model")
    raised = said(page.partly(in_specs=blocks, out_specs=blocks), page.x_BD)
    assert "in_specs argument must refer to an axis marked as manual" in raised
    assert "in_specs refers to 'model'" in raised
    over_model = page.by_rows(lambda x: jax.lax.psum(x, "model"), axis_names={"data"})
    assert "unbound axis name: model" in said(over_model, page.x_BD)


def test_along_the_other_axis_an_array_stays_sharded(page):
    """What came in sharded along both axes is so at the end."""
    wanted = jax.NamedSharding(page.mesh, P("data", "model"))
    assert page.kept_BD.sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_array_equal(page.kept_BD, 2 * page.x_BD)


# Explicit mode


def test_in_explicit_mode_in_specs_are_checked_and_move_nothing(page):
    """A whole array raises with in_specs of data; in Auto mode it is moved without a word."""
    with jax.set_mesh(page.explicit_mesh):
        raised = said(page.on_rows, page.copies_BD)
    assert "in_specs passed to shard_map: P('data', None) does not match the specs" in raised
    moved = page.by_rows(page.doubled)(put(page.x_BD, page.mesh))
    np.testing.assert_array_equal(moved, 2 * page.x_BD)


def test_resharded_it_needs_no_in_specs(page):
    """The result has the type that out_specs says, and is right."""
    doubled_BD = page.after("other-specs-fixed").doubled_BD
    assert str(jax.typeof(doubled_BD)) == "float32[8@data,16]"
    np.testing.assert_array_equal(doubled_BD, 2 * page.x_BD)


def test_a_sharded_weight_from_outside_raises_in_explicit_mode(page):
    """The message asks to pass it as an argument."""
    with jax.set_mesh(page.explicit_mesh):
        raised = said(jax.shard_map(page.product, out_specs=P("data")), page.rows_BD)
    assert raised.startswith("NotImplementedError: Closing over inputs to shard_map where")
    assert "sharded on `Explicit` axes is not implemented" in raised


def test_as_an_argument_a_weight_comes_in_blocks(page):
    """The product is NumPy's, and a device holds a block of 4 × 8."""
    assert page.y_BF.addressable_shards[0].data.shape == (4, 8)
    np.testing.assert_array_equal(page.y_BF, page.x_BD @ np.ones((16, 32), "float32"))


@compiled_for_cpu
def test_in_auto_mode_a_weight_from_outside_is_copied_to_each_device(page):
    """No message: one all-gather brings the whole weight of 16 × 32 numbers."""
    w_DF = put(np.ones((16, 32), "float32"), page.mesh, None, "model")

    def with_weight_outside(w_DF, x_BD):
        return page.by_rows(lambda x_block_BD: x_block_BD @ w_DF)(x_BD)

    x_BD = put(page.x_BD, page.mesh, "data")
    moves = traffic(with_weight_outside, w_DF, x_BD, mesh=page.mesh)
    assert [(move.kind, move.payload_bytes) for move in moves] == [("all-gather", 4 * 512)]


# Kernels and gradients


def test_a_kernel_without_a_type_raises(page):
    """The message asks for manual_axis_type."""
    raised = said(page.by_rows(page.call), page.x_16_BD)
    assert "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be `None`" in raised


def test_with_a_type_a_kernel_is_lowered_for_tpu(page):
    """There is one custom call of 8 × 128 for TPU; interpreted here, the kernel doubles."""
    assert page.text.count("@tpu_custom_call") == 1 and "tensor<8x128xf32>" in page.text
    like = jax.ShapeDtypeStruct((8, 128), "float32")
    interpreted = page.pl.pallas_call(page.kernel, out_shape=like, interpret=True)
    found = page.by_rows(interpreted, check_vma=False)(page.x_16_BD)
    np.testing.assert_array_equal(found, 2 * np.ones((16, 128)))


def test_what_is_the_same_everywhere_cannot_be_pulled_back(page):
    """A VJP function of what varies wants what varies."""
    raised = said(page.by_rows(page.gradient_of_block), page.x_BD)
    assert "unexpected JAX type (e.g. shape/dtype) for argument to VJP function" in raised
    assert "but expected float32[]{V:data}" in raised


def test_cast_or_by_grad_the_gradient_of_a_mean_is_one_in_64(page):
    """Both give 1/64 for each of the 64 numbers of a block."""
    for gradient in (page.cast_gradient, jax.grad(jnp.mean)):
        found = page.by_rows(gradient)(page.x_BD)
        np.testing.assert_array_equal(found, np.full((8, 16), 1 / 64))


def test_linearized_at_a_cast_point_it_gives_the_directional_derivative(page):
    """Of the square at one, along the first row of each block: twice that row."""
    found = page.by_rows(page.at_cast_one)(page.x_BD)
    np.testing.assert_array_equal(found, 2 * page.x_BD[::4])


def test_a_cast_along_what_is_missing_takes_both_kinds(page):
    """Of a block, which varies, and of ones, which do not; the sum is right."""
    np.testing.assert_array_equal(page.by_rows(page.added)(page.x_BD), page.x_BD + 1)


def test_the_gradient_of_a_cast_scale_is_the_sum_over_all_blocks(page):
    """Cast before the call, or summed in the rule: the gradient is the sum of x."""
    assert float(jax.grad(page.total)(2.0, page.cast_and_scaled)) == page.x_BD.sum() == 8128

    @jax.custom_vjp
    def scaled(x_block_BD, scale):
        return x_block_BD * scale

    def backward(kept, g_block_BD):
        x_gradient, scale_gradient = page.backward(kept, g_block_BD)
        return x_gradient, jax.lax.psum(scale_gradient, "data")

    scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), backward)
    assert float(jax.grad(page.total)(2.0, scaled)) == 8128


def test_a_stopped_maximum_leaves_the_gradient_of_log_sum_exp_a_softmax(page):
    """Stopped before pmax, value and gradient equal those on one device; stopped behind it, JAX
    asks for the rule as before. pmin has none either."""
    stable = page.over_blocks(page.stable_log_sum_exp)
    np.testing.assert_allclose(stable(page.x_BD), jax.nn.logsumexp(page.x_BD), rtol=1e-6)
    alone = jax.grad(jax.nn.logsumexp)(jnp.array(page.x_BD))
    np.testing.assert_allclose(page.gradient_BD, alone, atol=1e-6)

    def stopped_behind(x_block_BD):
        return jax.lax.stop_gradient(jax.lax.pmax(x_block_BD.max(), "data"))

    def smallest(x_block_BD):
        return jax.lax.pmin(x_block_BD.min(), "data")

    for function, name in [(stopped_behind, "pmax"), (smallest, "pmin")]:
        gradient = jax.grad(page.over_blocks(function))
        assert f"Differentiation rule for '{name}' not implemented" in said(gradient, page.x_BD)


# The order of axes


def test_ppermute_in_another_order_raises_since_0_11_1_and_before_is_silent(page):
    """Since 0.11.1 the message is that of the heading. Before, the pairs count in the mesh's order."""
    assert quoted_in_headings(PAGE)["order-of-axes"] == [ORDER]
    wrong_order = page.shift(("model", "data"), page.ring)
    if jax.__version_info__ >= (0, 11, 1):
        assert ORDER in said(wrong_order, page.x_8_B)
        assert "".join(ORDER.split()) in page.printed["order-of-axes"]
    else:
        np.testing.assert_array_equal(wrong_order(page.x_8_B), np.roll(page.x_8_B, 1))


def test_translated_pairs_shift_along_data_first(page):
    """Counted along data first, then along model, every number moves to the next place."""
    found = page.shift(("data", "model"), page.pairs)(page.x_8_B)
    by_axes = np.asarray(found).reshape(2, 4), page.x_8_B.reshape(2, 4)  # data, model
    after, before = (numbers.T.ravel() for numbers in by_axes)  # model, data: data runs first
    np.testing.assert_array_equal(after, np.roll(before, 1))


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 1), reason="there is no check to turn off")
def test_with_the_check_off_pairs_count_in_the_order_that_is_named(page):
    """With the switch of jax.config off, the axes in the other order give what translated pairs
    give. jax has no attribute of the name in the message."""
    assert not hasattr(jax, "raise_on_ppermute_sort_diff")
    jax.config.update("jax_raise_on_ppermute_sort_diff", False)
    try:
        found = page.shift(("model", "data"), page.ring)(page.x_8_B)
    finally:
        jax.config.update("jax_raise_on_ppermute_sort_diff", True)
    translated = page.shift(("data", "model"), page.pairs)(page.x_8_B)
    np.testing.assert_array_equal(found, translated)
