"""Where the bytes live: arrays by leaf, compiled programs by purpose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled

from .programs import program_text
from .tables import Report, Rows, number, shape_text, spec_text


@dataclass(frozen=True)
class Leaf:
    """One array of a tree.

    Attributes:
      path: where it stands in the tree, ``""`` for a tree of one array.
      shape: of the whole array.
      dtype: its name.
      spec: its partition spec, None if its sharding has none.
      bytes_per_device: bytes of one piece.
      copies: how many devices hold each element.
      sharded: whether a piece is less than the whole array.
      unique_bytes: every element once.
      total_bytes: all pieces on all devices.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Any
    bytes_per_device: int
    copies: int
    sharded: bool
    unique_bytes: int
    total_bytes: int


@dataclass(frozen=True, repr=False)
class Memory(Report):
    """Bytes of a tree of arrays.

    Attributes:
      leaves: ``Leaf`` rows, the largest per device first.
      bytes_per_device: bytes on the device that holds most.
    """

    leaves: Sequence[Leaf]
    bytes_per_device: int

    @property
    def total_bytes(self) -> int:
        """Sum over all devices, copies included."""
        return sum(leaf.total_bytes for leaf in self.leaves)

    @property
    def unique_bytes(self) -> int:
        """Every element counted once."""
        return sum(leaf.unique_bytes for leaf in self.leaves)

    def _table(self) -> Rows:
        rows = []
        for leaf in self.leaves:
            sums = ", ".join(sorted(getattr(leaf.spec, "unreduced", None) or ()))
            how = "sharded" if leaf.sharded else "replicated" * (leaf.copies > 1)
            copies = f"{leaf.copies} copies" if leaf.copies > 1 else ""
            if sums:  # same indices on several devices, and another value on each
                how, copies = "sharded" * leaf.sharded, f"partial sums over {sums}"
            rows.append(
                [
                    leaf.path or "array",
                    shape_text(leaf.shape),
                    leaf.dtype,
                    spec_text(leaf.spec),
                    number(leaf.bytes_per_device),
                    ", ".join(filter(None, (how, copies))) or "one device",
                ]
            )
        title = (
            f"{number(self.bytes_per_device)} bytes per device; "
            f"{number(self.unique_bytes)} without copies, "
            f"{number(self.total_bytes)} on all devices"
        )
        head = ("leaf", "shape", "dtype", "spec", "bytes per device", "placement")
        return title, head, rows


@dataclass(frozen=True, repr=False)
class ProgramMemory(Report):
    """Bytes per device that a compiled program asks for, from XLA's buffer assignment.

    Attributes:
      arguments: what goes in.
      outputs: what comes out.
      temporaries: the room for everything in between.
      aliased: outputs that reuse the room of (donated) arguments.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @property
    def bytes_per_device(self) -> int:
        """arguments + outputs + temporaries - aliased."""
        return self.arguments + self.outputs + self.temporaries - self.aliased

    def _table(self) -> Rows:
        rows = [[name, number(value)] for name, value in vars(self).items()]
        title = f"{number(self.bytes_per_device)} bytes per device for a compiled program"
        return title, ("what", "bytes per device"), rows


@overload
def memory(x: Compiled) -> ProgramMemory: ...
@overload
def memory(x: Any) -> Memory: ...
def memory(x: Any) -> Memory | ProgramMemory:
    """Bytes per device: of arrays where they lie, or of a compiled program.

    An array that stands twice in a tree counts once.

    Args:
      x: a ``jax.Array``; a ``jax.ShapeDtypeStruct`` with a sharding; a pytree of these (a
        Flax module, state or variable is one); or what ``.lower(...).compile()`` returns.

    Raises:
      TypeError: a host array or number, a shape without a sharding, a program that is not
        compiled, with what to pass instead.
    """
    if _is_program(x):
        program_text(x)  # raises for what is not compiled
        stats = x.memory_analysis()
        if stats is None:
            raise ValueError("this backend does not tell the memory of a program")
        return ProgramMemory(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
        )
    rows: list[Leaf] = []
    held: Counter[Any] = Counter()  # bytes by device
    seen: set[int] = set()
    for path, leaf in placed_leaves(x):
        if id(leaf) in seen:
            continue
        if isinstance(leaf, jax.Array):
            seen.add(id(leaf))
        shape, sharding = tuple(leaf.shape), leaf.sharding
        size, item = math.prod(shape), leaf.dtype.itemsize
        part, count = tuple(sharding.shard_shape(shape)), sharding.num_devices
        piece = math.prod(part)
        abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
        for device in range(count) if abstract else sharding.device_set:
            held[device] += piece * item
        rows.append(
            Leaf(
                path=path,
                shape=shape,
                dtype=str(leaf.dtype),
                spec=sharding.spec if isinstance(sharding, NamedSharding) else None,
                bytes_per_device=piece * item,
                copies=piece * count // size if size else count,
                sharded=part != shape,
                unique_bytes=size * item,
                total_bytes=piece * count * item,
            )
        )
    rows.sort(key=lambda row: -row.bytes_per_device)
    return Memory(tuple(rows), max(held.values(), default=0))


def _is_program(x: Any) -> bool:
    """Something to compile or compiled: what is no tree of arrays and can be called."""
    if hasattr(x, "memory_analysis"):
        return True
    leaves = jax.tree.leaves(x)
    alone = len(leaves) == 1 and leaves[0] is x and not isinstance(x, Mesh)
    return alone and (callable(x) or hasattr(x, "as_text"))


def placed_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, array) of every leaf; TypeError, saying what to pass, for one without place."""
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        path = path.removesuffix("value").removesuffix(".")
        if getattr(leaf, "sharding", None) is None:
            what, kind = path or "this", type(leaf).__name__
            if isinstance(leaf, jax.ShapeDtypeStruct):
                how = "pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
                raise TypeError(f"{what} is a {kind} without a sharding: {how}")
            how = "pass jax.device_put(x, sharding)"
            raise TypeError(f"{what} is of type {kind}, no array on devices: {how}")
        found.append((path, leaf))
    return found
