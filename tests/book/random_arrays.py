"""Random numbers, the same at each call."""

from functools import cache

import numpy as np


@cache
def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")
