"""The page "Gradients in Explicit mode: reduced and unreduced types"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from many_devices.helpers import attempt, put, traffic, type_of
from pages import check_exercise, compiled_for_cpu, exercises_of
from random_arrays import numbers

PAGE = "07b-explicit-gradients"
P = jax.P
pytestmark = pytest.mark.usefixtures("explicit_row")
RELEASE = jax.__version_info__


def placed(array, *spec, **mark):
    return jax.device_put(array, jax.NamedSharding(jax.sharding.get_mesh(), P(*spec, **mark)))


def terms(sign=1):
    """An unreduced value: each device has one term of a sum."""
    h_BF, w_FD = placed(numbers(8, 32), None, "data"), placed(sign * numbers(32, 16), "data")
    return jnp.dot(h_BF, w_FD, out_sharding=P(unreduced={"data"}))


def summed(value):
    """The value after its sum was taken, as NumPy has it."""
    spec = jax.typeof(value).sharding.spec
    return np.asarray(jax.reshard(value, P(*spec.partitions)))


def unreduced(value):
    return "{U:data}" in str(jax.typeof(value))


def plain():
    return numbers(8, 32) @ numbers(32, 16)


def check(function, *values):
    """The mark stays, and the result is that of the summed values."""
    found = jax.jit(function)(*values)
    assert unreduced(found), jax.typeof(found)
    wanted = function(*[jnp.asarray(summed(value)) for value in values])
    np.testing.assert_allclose(summed(found), wanted, rtol=1e-2, atol=5e-2)  # bfloat16


LINEAR = {
    "sum": lambda u: u.sum(1),
    "transpose": lambda u: u.T,
    "reshape": lambda u: u.reshape(8, 4, 4),
    "slice": lambda u: u[:2],
    "astype": lambda u: u.astype("bfloat16").astype("float32"),
}


@pytest.mark.parametrize("name", LINEAR)
def test_these_operations_keep_the_mark_in_every_release(name):
    """Sum, transpose, reshape, astype and, inside jit, a slice keep an unreduced value unreduced."""
    check(LINEAR[name], terms())
    if name != "slice":
        assert unreduced(LINEAR[name](terms()))  # without jit as well


def test_adding_two_keeps_the_mark_in_every_release():
    """Terms can be added to terms."""
    check(jnp.add, terms(), terms(-2))


@pytest.mark.parametrize("name", ["negative", "subtract"])
def test_negation_and_subtraction_keep_the_mark_since_0_12(name):
    """Negation and subtraction have a rule in JAX 0.12, and had none before."""
    function = getattr(jnp, name)
    values = (terms(), terms(-2))[: 1 if name == "negative" else 2]
    if RELEASE >= (0, 12):
        return check(function, *values)
    with pytest.raises(NotImplementedError):
        function(*values)


def test_a_product_with_a_value_needs_that_value_marked_reduced():
    """Terms can be multiplied by a value that is marked reduced, and by no other."""
    two = jnp.float32(2)
    with pytest.raises(Exception, match="should be reduced along the same axes"):
        terms() * two
    with pytest.raises(Exception, match="reduced"):
        terms().mean()
    found = terms() * jax.reshard(two, P(reduced={"data"}))
    assert unreduced(found)
    np.testing.assert_allclose(summed(found), 2 * plain(), rtol=1e-4, atol=1e-5)


def test_a_quotient_by_a_reduced_value_has_a_rule_since_0_11_1():
    """Terms can be divided by a value that is marked reduced, since JAX 0.11.1."""
    two = jax.reshard(jnp.float32(2), P(reduced={"data"}))
    if RELEASE < (0, 11, 1):
        with pytest.raises(NotImplementedError):
            terms() / two
        return
    np.testing.assert_allclose(summed(terms() / two), plain() / 2, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="should be reduced"):
        terms() / jnp.float32(2)


@pytest.mark.parametrize("function", [jnp.cos, jnp.abs, lambda u: u @ u.T])
def test_what_is_not_linear_raises(function):
    """A cosine, an absolute value or a product of terms raises an error: in 0.12 it says why."""
    with pytest.raises(Exception) as raised:
        function(terms())
    if RELEASE >= (0, 12):
        assert type(raised.value).__name__ == "ShardingTypeError"


def test_the_maximum_of_an_unreduced_value_is_refused_or_wrong():
    """`max` of an unreduced value raises; JAX 0.11.1 and 0.11.2 return the largest term instead."""
    if not (0, 11, 1) <= RELEASE < (0, 12):
        with pytest.raises(ValueError):
            terms().max(1)
        return
    found = summed(terms().max(1))
    assert np.abs(found - plain().max(1)).max() > 1
    blocks = [numbers(8, 32)[:, i : i + 4] @ numbers(32, 16)[i : i + 4] for i in range(0, 32, 4)]
    np.testing.assert_allclose(found, np.max(blocks, axis=(0, 2)), rtol=1e-4)


def test_a_product_with_a_constant_matrix_raises():
    """It is linear, and JAX rejects it all the same, as it rejects halving."""
    with pytest.raises(Exception, match="unreduced"):
        terms() @ jnp.ones((16, 4))
    with pytest.raises((NotImplementedError, ValueError)):
        terms() / 2


def test_a_flip_has_no_rule():
    """A flip of an unreduced value raises NotImplementedError."""
    with pytest.raises(NotImplementedError):
        terms()[:, ::-1]


@pytest.mark.parametrize(
    "function",
    [lambda u: jnp.sqrt((u**2).sum()), lambda u: jnp.clip(u, -1, 1)],
    ids=["norm", "clip"],
)
def test_a_norm_and_clipping_raise(function):
    """So the sum has to be taken before."""
    if (0, 11, 1) <= RELEASE < (0, 12) and "clip" in function.__code__.co_names:
        pytest.skip("it is as wrong as the maximum")
    with pytest.raises(Exception, match="reduced"):
        function(terms())


# The page


def test_the_gradient_of_a_weight_has_the_type_of_the_weight(page):
    """Whole along data, and sharded."""
    for spec in (P(), P("data")):
        w = jax.reshard(page.w_D, spec)
        assert type_of(jax.grad(page.loss), w, page.x_BD) == str(jax.typeof(w))


def test_each_device_gets_the_whole_sum_or_its_piece(page):
    """Of a weight that is whole, all 36 of each element; of one that is sharded, its elements."""
    for spec, count in [(P(), 8), (P("data"), 1)]:
        gradient_D = jax.jit(jax.grad(page.loss))(jax.reshard(page.w_D, spec), page.x_BD)
        for shard in gradient_D.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.full(count, 36))


def test_the_gradient_of_a_reduced_weight_is_unreduced(page):
    """In place of R the type of the gradient has U."""
    assert str(jax.typeof(page.marked_w_D)) == "float32[8]{R:data}"
    assert str(jax.typeof(page.gradient_D)) == "float32[8]{U:data}"


def test_the_gradient_of_an_unreduced_value_is_reduced(page):
    """The pair the other way round."""

    def sum_of(y_D):
        return jax.reshard(y_D, P()).sum()

    assert type_of(jax.grad(sum_of), page.gradient_D) == "float32[8]{R:data}"


def test_each_device_has_its_own_row_as_its_term(page):
    """One row of the batch is on each device, and the gradient is the sum of the rows."""
    for shard, row in zip(page.gradient_D.addressable_shards, page.x_BD.addressable_shards):
        assert shard.device == row.device
        np.testing.assert_array_equal(shard.data, np.asarray(row.data)[0])
    np.testing.assert_array_equal(page.terms_ND[:, 0], np.arange(1, 9))


def test_reshard_takes_the_sum(page):
    """Whole, or each device its piece."""
    assert str(jax.typeof(page.summed_D)) == "float32[8]"
    np.testing.assert_array_equal(page.summed_D, np.full(8, 36))
    pieces_D = jax.reshard(page.gradient_D, P("data"))
    assert str(jax.typeof(pieces_D)) == "float32[8@data]"
    np.testing.assert_array_equal(pieces_D, np.full(8, 36))


@compiled_for_cpu
def test_the_sum_is_taken_by_the_reshard(page):
    """Compiled for CPU: an unreduced gradient moves nothing, and its sum is one all-reduce."""
    gradient = jax.grad(page.loss)

    def whole(gradient_D):
        return jax.reshard(gradient_D, P())

    assert traffic(gradient, page.w_D, page.x_BD).kinds == {"all-reduce"}
    assert not traffic(gradient, page.marked_w_D, page.x_BD)
    assert traffic(whole, page.gradient_D).kinds == {"all-reduce"}

    def piece(gradient_D):
        return jax.reshard(gradient_D, P("data"))

    assert traffic(piece, page.gradient_D).kinds == {"all-reduce"}  # CPU makes no reduce-scatter


def test_marking_a_weight_reduced_moves_nothing(page):
    """The weight is replicated as before."""

    def mark(w_D):
        return jax.reshard(w_D, P(reduced={"data"}))

    assert type_of(mark, page.w_D) == "float32[8]{R:data}"
    assert not traffic(mark, page.w_D)
    for shard in page.marked_w_D.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.ones(8))


def test_adding_a_reduced_bias_to_sharded_rows_raises(page):
    """Until it is broadcast with the sharding of the rows."""
    reduced_D = jax.reshard(put(np.ones(8, "float32"), page.mesh), P(reduced={"data"}))
    assert "reduced on" in " ".join(attempt(jnp.add, page.x_BD, reduced_D).split())


@pytest.mark.parametrize("spec", [P(), P("data")], ids=["replicated", "sharded"])
def test_a_marked_array_cannot_be_added_to_an_unmarked_one(page, spec):
    """The mark restricts the forward pass too."""
    other_D = jax.reshard(page.w_D, spec)
    assert "reduced on" in " ".join(attempt(jnp.add, page.marked_w_D, other_D).split())
    assert "{R:data}" in str(jax.typeof(page.marked_w_D + page.marked_w_D))


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
