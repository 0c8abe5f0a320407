"""Chapter 7, "Explicit sharding: the answer is in the type"."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

P = jax.P
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def like(shape, *spec):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(MESH, P(*spec)))


def spec_of(function, *inputs):
    return jax.eval_shape(function, *inputs).sharding.spec


def test_about_the_sum_jax_asks_only_if_it_is_sharded_in_both_operands():
    """A product whose summed dimension is sharded in one operand is accepted, in both it raises."""
    whole, by_sum = like((16, 32)), like((16, 32), "model")
    assert spec_of(jnp.dot, like((8, 16), None, "model"), whole) == P(None, None)
    assert spec_of(jnp.dot, like((8, 16)), by_sum) == P(None, None)
    with pytest.raises(Exception, match="Contracting dimensions are sharded"):
        spec_of(jnp.dot, like((8, 16), None, "model"), by_sum)


@pytest.mark.parametrize("summed", [None, "model"])
def test_a_product_also_raises_where_an_axis_would_stand_twice(summed):
    """A product is refused if an axis would stand twice in the result, whatever the sum."""
    x, v = like((8, 16), "data", None), like((16, 32), summed, "data")
    with pytest.raises(Exception, match="illegally sharded result"):
        spec_of(jnp.dot, x, v)


def heads(queries, keys):
    return jnp.einsum("bshc,bthc->bhst", queries, keys)


def test_batch_dimensions_must_be_sharded_alike_since_jax_0_11_1():
    """A product whose batch dimensions are not sharded alike raises; JAX before 0.11.1 took it."""
    queries, keys = like((8, 16, 4, 8), "data", None, "model"), like((8, 16, 4, 8), "data")
    if jax.__version_info__ >= (0, 11, 1):
        with pytest.raises(Exception, match="batch dimensions .* to have the same sharding"):
            spec_of(heads, queries, keys)
    else:
        assert spec_of(heads, queries, keys)[:2] == ("data", "model")
    assert spec_of(heads, queries, queries) == P("data", "model", None, None)
