"""Whether trees of arrays agree, how far they are apart, and how an array is sharded."""

import jax
import numpy as np


def host(tree):
    """The arrays of a tree in the host's memory, in double precision."""
    return [np.asarray(leaf, "float64") for leaf in jax.tree.leaves(tree)]


def apart(these, those):
    """The largest difference, relative to the largest entry of its array."""
    pairs = zip(these, those, strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


def assert_same(tree, expected, rtol=1e-4, atol=1e-6):
    """Equal up to float32 rounding: eight devices add in another order than one."""
    for found, wanted in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def bits(tree):
    """The bits of every array of a tree, with its structure."""

    def of(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return jax.tree.structure(tree), [of(leaf) for leaf in jax.tree.leaves(tree)]


def sharded_as(array, mesh, *spec):
    return array.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(*spec)), array.ndim)
