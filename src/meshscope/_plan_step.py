"""A training step on a mesh, traced from shapes, and the closed form of what it should send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Traced

from . import _compat
from ._paths import placed_leaves
from ._plan_candidates import Axes, as_tuple
from ._programs import KINDS

Sent = dict[tuple[str, tuple[str, ...]], float]  # payload bytes by kind and axes


@dataclass(frozen=True)
class Step:
    """A training step, traced from shapes, and what its strategy should send.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> def shape(*spec):
    ...     sharding = jax.NamedSharding(mesh, jax.P(*spec))
    ...     return jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    >>> def train_step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: (x @ w).mean())(w)
    >>> traced = jax.jit(train_step, donate_argnums=0).trace(shape("data"), shape("data"))
    >>> step = meshscope.Step(traced, weights=shape("data"), batch="data")  # FSDP
    >>> for (kind, axes), size in step.expected(mesh).items():
    ...     print(kind, axes, size)
    all-gather ('data',) 32768
    reduce-scatter ('data',) 16384

    Attributes:
      traced: what ``jax.jit(train_step, ...).trace(...)`` returns for shapes with shardings.
        Donate the state, and give ``out_shardings``: both decide how much memory it takes.
      weights: the tree of weights with their shardings; None: no closed form, so that what
        the compiler made is all there is to rank by.
      batch: the mesh axes, a name or a tuple, over which the batch is sharded.
      sent_as: the dtype in which weights and gradients are sent; None: that of each weight.
      activations: bytes of activations that the step exchanges, by kind and mesh axes, for
        example ``{("all-reduce", "model"): 4 * L * rows * D * 2}`` for tensor parallelism:
        the payload, as ``Collective.payload_bytes`` counts it, times executions.
      gathers: how often a weight that is sharded over axes of the batch is gathered: 2 if it is
        gathered again for the backward pass, 1 if it is kept from the forward pass.
    """

    traced: Traced
    weights: Any = None
    batch: Axes = None
    sent_as: Any = None
    activations: Mapping[tuple[str, Axes], float] = field(default_factory=dict)
    gathers: int = 2

    def expected(
        self, mesh: Mesh | AbstractMesh
    ) -> dict[tuple[str, tuple[str, ...]], float] | None:
        """Payload bytes by kind and axes, in closed form; None without ``weights``.

        Take a weight of S bytes. Let f be the devices on the axes of the batch that it is
        sharded over, t those on its other axes, and r those on the remaining axes of the
        batch. It is all-gathered ``gathers`` times, S/t bytes each; its gradient is
        reduce-scattered over f, S/t bytes, and all-reduced over r, S/(f t) bytes. So data
        parallelism all-reduces S, FSDP gathers S twice and scatters it once, and under tensor
        parallelism weights are not sent at all (https://arxiv.org/abs/1910.02054, section 7;
        https://jax-ml.github.io/scaling-book/training/).

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> sharding = jax.NamedSharding(mesh, jax.P("model"))  # HSDP: shards inside, copies outside
        >>> w = jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
        >>> traced = jax.jit(lambda w: w + 1).trace(w)
        >>> meshscope.Step(traced, weights=w, batch=("data", "model")).expected(mesh)[
        ...     "all-reduce", ("data",)]
        4096

        Args:
          mesh: the one that the step was traced for.

        Raises:
          TypeError: a weight without a sharding.
          ValueError: a kind of collective or an axis that does not exist.
        """
        if self.weights is None:
            return None
        found: Sent = {}

        def send(kind: str, axes: tuple[str, ...], size: float) -> None:
            key = kind, tuple(name for name in mesh.axis_names if name in axes)
            if axes and size:
                found[key] = found.get(key, 0) + size

        def used(axes: Axes) -> tuple[str, ...]:
            if wrong := [axis for axis in as_tuple(axes) if axis not in mesh.axis_names]:
                has = ", ".join(map(str, mesh.axis_names))
                raise ValueError(f"no axis {wrong[0]!r} on this mesh, which has {has}")
            return tuple(axis for axis in as_tuple(axes) if mesh.shape[axis] > 1)

        batch = used(self.batch)
        for _, leaf in placed_leaves(self.weights):
            dtype = jnp.dtype(self.sent_as or leaf.dtype)
            size = math.prod(leaf.shape) * _compat.bits(dtype) // 8
            over = used(_spec_axes(leaf))
            shards = tuple(axis for axis in over if axis in batch)
            copies = tuple(axis for axis in batch if axis not in over)
            ours = size // math.prod(mesh.shape[axis] for axis in over if axis not in batch)
            send("all-gather", shards, self.gathers * ours)
            send("reduce-scatter", shards, ours)
            send("all-reduce", copies, ours // math.prod(mesh.shape[axis] for axis in shards))
        for (kind, axes), size in self.activations.items():
            if kind not in KINDS:
                raise ValueError(f"no kind {kind!r}, there are {', '.join(KINDS)}")
            send(kind, used(axes), size)
        return found


def _spec_axes(leaf: Any) -> tuple[str, ...]:
    """The mesh axes that a leaf is sharded over."""
    if not isinstance(leaf.sharding, NamedSharding):
        raise TypeError(f"a weight has a {type(leaf.sharding).__name__}: give a NamedSharding")
    return tuple(axis for entry in leaf.sharding.spec for axis in as_tuple(entry))


def as_step(made: Any) -> Step:
    """What a callable returned, as a ``Step``; TypeError for anything that is none."""
    step = made if isinstance(made, Step) else Step(made)
    if not isinstance(step.traced, Traced):
        raise TypeError(
            f"the step is {type(step.traced).__name__}: return what jax.jit(train_step).trace(...) "
            "returns, or an ms.Step of it"
        )
    return step
