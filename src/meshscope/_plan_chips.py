"""Published numbers of chips, to price arithmetic and communication with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_TPUS = "https://jax-ml.github.io/scaling-book/tpus/"
_GPUS = "https://jax-ml.github.io/scaling-book/gpus/"


@dataclass(frozen=True)
class Chip:
    """What a vendor or a textbook publishes about one chip: peaks, which no program reaches.

    >>> import meshscope
    >>> chip = meshscope.CHIPS["h100"]
    >>> chip.flops / chip.link  # tokens per device from which FSDP can hide what it sends
    2197.77...

    Attributes:
      name: as people write it.
      flops: bfloat16 operations per second, dense: without the factor of sparsity.
      hbm: bytes of memory, as published. Devices have some more: XLA's compiler lets a program
        use 16.9e9 of a v5e, 102.8e9 of a v5p and 33.5e9 of a v6e, and an H100 has 85.5e9, of
        which JAX takes three quarters by default.
      link: bytes per second that one device sends along one axis of the mesh: both
        directions of one axis of a TPU's torus, where its ends are joined; NVLink in one
        direction.
      most: devices that such links join.
      node: devices that share a fast switch, and are numbered one after the other; None for
        a torus.
      outside: bytes per second of one device's own network card, between nodes.
      sources: where these numbers are from.
    """

    name: str
    flops: float
    hbm: float
    link: float
    most: int
    node: int | None
    outside: float | None
    sources: tuple[str, ...]

    def bandwidth(self, sizes: Mapping[str, int], axes: Sequence[str]) -> float:
        """Bytes per second that each device sends while groups along ``axes`` exchange.

        A torus gives each axis of a mesh an axis of its own. Between nodes of GPUs, the
        devices of a group that share a node share out what leaves it, so that each of their
        network cards carries a part. A group with one device in each node has one card.

        >>> import meshscope
        >>> chip, sizes = meshscope.CHIPS["h100"], {"data": 8, "model": 8}
        >>> [chip.bandwidth(sizes, axes) / 1e9 for axes in (("model",), ("data",), tuple(sizes))]
        [450.0, 50.0, 400.0]

        Args:
          sizes: of the mesh's axes, the last of which numbers devices one by one.
          axes: along which the groups lie.
        """
        if self.node is None or self.outside is None:
            return self.link
        names = list(sizes)
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        order = [names.index(name) for name in names if name not in axes]
        order += [names.index(name) for name in names if name in axes]
        groups = grid.transpose(order).reshape(-1, math.prod(sizes[name] for name in axes))
        together = groups.shape[1]
        for group in (groups // self.node).tolist():
            together = min(together, *Counter(group).values())
        if together == groups.shape[1]:
            return self.link
        return min(self.link, together * self.outside)


CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(
        *("TPU v5e", 197e12, 16e9, 90e9, 256, None, None),
        ("https://docs.cloud.google.com/tpu/docs/v5e", _TPUS),
    ),
    "v5p": Chip(
        *("TPU v5p", 459e12, 95e9, 180e9, 6144, None, None),
        ("https://docs.cloud.google.com/tpu/docs/v5p", _TPUS),
    ),
    "v6e": Chip(
        *("TPU v6e", 918e12, 32e9, 180e9, 256, None, None),
        ("https://docs.cloud.google.com/tpu/docs/v6e", _TPUS),
    ),
    "h100": Chip(
        *("H100", 989e12, 80e9, 450e9, 1024, 8, 50e9),
        ("https://www.nvidia.com/en-us/data-center/h100/", _GPUS),
    ),
    "h200": Chip(
        *("H200", 989e12, 141e9, 450e9, 1024, 8, 50e9),
        ("https://www.nvidia.com/en-us/data-center/h200/", _GPUS),
    ),
}
