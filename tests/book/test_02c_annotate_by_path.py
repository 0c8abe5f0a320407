"""The page "A model that you did not write: annotate it by a rule on paths": what it says is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from compared import sharded_as
from many_devices.checks import misplaced
from many_devices.helpers import attempt, put
from pages import check_exercise, exercises_of

PAGE = "02c-annotate-by-path"
P = jax.P
COLUMNS = (None, "model")
x_BI = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")


def test_the_rule_places_every_leaf(page):
    """Every weight of the classifier is sharded by its rule, and the numbers are what they were."""
    plain, foreign = page.Classifier(10, nnx.Rngs(0)), page.Classifier(10, nnx.Rngs(0))
    n = page.mesh.shape["model"]
    assert len(misplaced(foreign, page.mesh)) == 8
    page.place_by_rule(foreign, page.rule, page.mesh)
    total = ms.memory(plain).bytes_per_device
    sharded = 4 * (96 * 384 + 384 + 384 * 96)
    assert ms.memory(foreign).bytes_per_device == total - sharded + sharded // n
    values = dict(nnx.to_flat_state(nnx.state(plain, nnx.Param)))
    for path, weight in nnx.to_flat_state(nnx.state(foreign, nnx.Param)):
        np.testing.assert_array_equal(weight, values[path])
        assert weight.out_sharding == page.rule(path)
    assert foreign.up.kernel.sharding.shard_shape((96, 384)) == (96, 384 // n)
    assert foreign.down.kernel.sharding.shard_shape((384, 96)) == (384 // n, 96)
    assert misplaced(foreign, page.mesh) == []
    np.testing.assert_allclose(foreign(x_BI), plain(x_BI), atol=1e-5)


def test_the_rule_applies_in_a_nested_model_and_raises_for_an_unknown_name(page):
    """It reads the last two names of a path, and raises a ValueError for a name it does not know."""
    assert page.rule(("blocks", 0, "up", "kernel")) == COLUMNS
    assert attempt(page.rule, ("up", "scale")).startswith("ValueError")

    def whole(path):
        return (None,)

    forgotten = page.Classifier(10, nnx.Rngs(0))
    page.place_by_rule(forgotten, whole, page.mesh)  # no error,
    assert misplaced(forgotten, page.mesh) == []  # and nothing to notice
    assert forgotten.up.kernel.sharding.is_fully_replicated


def test_load_keeps_every_sharding_and_compares_shapes(page):
    """load puts the numbers in, keeps the sharding of every weight, and raises for another shape."""
    trained = page.Classifier(10, nnx.Rngs(1))
    assert misplaced(page.foreign, page.mesh) == []
    np.testing.assert_allclose(page.foreign(x_BI), trained(x_BI), atol=1e-5)
    other = page.arrays | {("up", "kernel"): np.ones((3, 3), "float32")}
    assert attempt(page.load, page.foreign, other).startswith("ValueError")
    assert misplaced(page.foreign, page.mesh) == []


def test_set_value_and_update_accept_any_shape():
    """set_value and nnx.update accept another shape, without a message."""
    linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    nnx.update(linear, {"kernel": jnp.ones((3, 3))})
    assert linear.kernel.shape == (3, 3)
    linear.kernel.set_value(jnp.ones((2, 2)))
    assert linear.kernel.shape == (2, 2)


def test_an_annotation_written_later_moves_nothing(page):
    """set_metadata moves nothing; set_value brings in the array that was moved."""
    late = nnx.Param(jnp.ones((8, 16)))
    late.set_metadata(out_sharding=COLUMNS)
    assert late.out_sharding == COLUMNS and len(late.devices()) == 1
    late.set_value(put(late[...], page.mesh, *COLUMNS))
    assert sharded_as(late, page.mesh, *COLUMNS)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
