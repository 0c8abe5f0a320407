"""Messages of shard_map: each program raises what its heading quotes, and each fix is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-shard-map"
P = jax.P

RAISED = {
    "constraint-named": [
        "Axes mentioned in `manual_axis_type` field of ShapedArray should be of type `Manual`",
        "contains a manual axes",
    ],
    "empty-context": [
        "The context mesh cannot be empty. Use `jax.set_mesh(mesh)` to enter into a mesh context"
    ],
    "linearized": [
        "linearized function called on tangent values inconsistent with the original primal values"
    ],
    "cast-twice": ["Unsupported pcast from=varying, to='varying'"],
    "custom-vjp": [
        "Custom VJP bwd rule",
        "must produce an output with the same type as the args tuple of the primal function",
        "so the manual axis types do not match",
    ],
    "pmax": ["Differentiation rule for 'pmax' not implemented"],
}
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


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug])


def test_ppermute_in_another_order_raises_since_0_11_1_and_before_is_silent(page):
    """Since 0.11.1 the message is that of the heading. Before, the pairs count in the mesh's order."""
    assert quoted_in_headings(PAGE)["order-of-axes"] == [ORDER]
    wrong_order = page.passed_on(("model", "data"), page.ring)
    if jax.__version_info__ >= (0, 11, 1):
        assert ORDER in said(wrong_order, page.x_8_B)
        assert "".join(ORDER.split()) in page.printed["order-of-axes"]
    else:
        np.testing.assert_array_equal(wrong_order(page.x_8_B), np.roll(page.x_8_B, 1))


def test_translated_pairs_shift_along_data_first(page):
    """Counted along data first, then along model, every number moves to the next place."""
    found = page.passed_on(("data", "model"), page.pairs)(page.x_8_B)
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
        found = page.passed_on(("model", "data"), page.ring)(page.x_8_B)
    finally:
        jax.config.update("jax_raise_on_ppermute_sort_diff", True)
    translated = page.passed_on(("data", "model"), page.pairs)(page.x_8_B)
    np.testing.assert_array_equal(found, translated)


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
