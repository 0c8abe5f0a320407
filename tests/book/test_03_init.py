"""Chapter 3, "Initialise a model that never existed in one piece": on what a random number depends."""

import jax
import numpy as np
import pytest
from flax import nnx

PAGE = "03-init"
P = jax.P
KEY = jax.random.key(0)


def normal(rows, columns):
    return np.asarray(jax.random.normal(KEY, (rows, columns)))


def test_a_number_depends_on_its_place_in_the_flattened_array():
    """Each number depends on the key and on its place in the flattened array alone."""
    assert np.array_equal(normal(4, 8).ravel(), normal(8, 4).ravel())
    assert np.array_equal(normal(4, 8).ravel(), normal(1, 32).ravel())


def test_more_rows_keep_the_numbers():
    """Another number of rows keeps the numbers that there were."""
    assert np.array_equal(normal(8, 8)[:4], normal(4, 8))


def test_more_columns_change_all_rows_but_the_first():
    """With another number of columns all rows but the first get other numbers."""
    narrow, wide = normal(4, 8), normal(4, 16)[:, :8]
    assert np.array_equal(narrow[0], wide[0])
    for row in (1, 2, 3):
        assert not np.isin(narrow[row], wide[row]).any()


@pytest.mark.parametrize("spec", [P("data", "model"), P("model", None), P(None, "data")], ids=str)
@pytest.mark.parametrize(
    "init",
    [nnx.initializers.lecun_normal(), nnx.initializers.he_uniform()],
    ids=["normal", "uniform"],
)
def test_it_does_not_matter_which_device_draws_it(page, init, spec):
    """Drawn in pieces under jax.jit, the numbers are those of one device."""
    sharding = jax.NamedSharding(page.mesh, spec)
    drawn = jax.jit(lambda: init(KEY, (64, 512)), out_shardings=sharding)()
    assert not drawn.sharding.is_fully_replicated
    np.testing.assert_array_equal(drawn, init(KEY, (64, 512)))
