"""How far arrays are apart."""

import jax
import numpy as np


def host(tree):
    """The arrays of a tree in the host's memory, in double precision."""
    return [np.asarray(leaf, "float64") for leaf in jax.tree.leaves(tree)]


def apart(these, those):
    """The largest difference, relative to the largest entry of its array."""
    pairs = zip(these, those, strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)
