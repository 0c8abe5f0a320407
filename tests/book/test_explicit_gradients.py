"""The page "Gradients in Explicit mode: unreduced, reduced, and one sum a step"."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshscope as ms
from pages import compiled_for_cpu

P = jax.P
RELEASE = jax.__version_info__


@pytest.fixture(autouse=True)
def mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@functools.cache
def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def placed(array, *spec, **mark):
    return jax.device_put(array, jax.NamedSharding(jax.sharding.get_mesh(), P(*spec, **mark)))


def terms(sign=1):
    """An unreduced value: each device along `model` has one term of a sum."""
    h_BF, w_FD = placed(numbers(8, 32), "data", "model"), placed(sign * numbers(32, 16), "model")
    return jnp.dot(h_BF, w_FD, out_sharding=P("data", None, unreduced={"model"}))


def summed(value):
    """The value after its sum was taken, as NumPy has it."""
    spec = jax.typeof(value).sharding.spec
    return np.asarray(jax.reshard(value, P(*spec.partitions)))


def unreduced(value):
    return "{U:model}" in str(jax.typeof(value))


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
    """Sum, transpose, reshape, slice and astype keep an unreduced value unreduced."""
    check(LINEAR[name], terms())


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
    found = terms() * jax.reshard(two, P(reduced={"model"}))
    assert unreduced(found)
    np.testing.assert_allclose(summed(found), 2 * plain(), rtol=1e-4, atol=1e-5)


def test_a_quotient_by_a_reduced_value_has_a_rule_since_0_11_1():
    """Terms can be divided by a value that is marked reduced, since JAX 0.11.1."""
    two = jax.reshard(jnp.float32(2), P(reduced={"model"}))
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
    blocks = [numbers(8, 32)[:, i : i + 8] @ numbers(32, 16)[i : i + 8] for i in (0, 8, 16, 24)]
    np.testing.assert_allclose(found, np.max(blocks, axis=(0, 2)), rtol=1e-4)


def test_a_flip_has_no_rule():
    """A flip of an unreduced value raises NotImplementedError."""
    with pytest.raises(NotImplementedError):
        terms()[:, ::-1]


@compiled_for_cpu
def test_compiled_for_cpu_a_sum_stays_in_the_loop_over_microbatches(mesh):
    """CPU's compiler leaves the sum of a gradient in the loop, also of a weight in no other loop."""

    def loss(w_DD, x_BD):
        return (jnp.tanh(x_BD @ w_DD) ** 2).mean()

    def accumulated(w_DD, x_MBD):
        def add(total, x_BD):
            return total + jax.grad(loss)(w_DD, x_BD), None

        return jax.lax.scan(add, jnp.zeros_like(w_DD), x_MBD)[0]

    w_DD, x_MBD = placed(numbers(16, 16)), placed(numbers(4, 8, 16), None, "data")
    program = jax.jit(accumulated).lower(w_DD, x_MBD).compile()
    sums = [move for move in ms.collectives(program, mesh) if move.axes == ("data",)]
    assert [(move.kind, move.inside_loop, move.executions) for move in sums] == [
        ("all-reduce", True, 4)
    ]
