"""Whether trees of arrays agree, and how far they are apart."""

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
