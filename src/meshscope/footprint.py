"""Where the bytes live: arrays by leaf, compiled programs by purpose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from .programs import program_text
from .tables import Report, number


@dataclass(frozen=True)
class Leaf:
    """One array of a tree.

    bytes_per_device  bytes of its largest piece on one device.
    copies            how many devices hold each element.
    sharded           whether a device holds less than the whole array.
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


class Memory(Report):
    """Bytes of a tree of arrays.

    leaves            rows, the largest per device first.
    bytes_per_device  bytes on the device that holds most.
    total_bytes       sum over all devices, copies included.
    unique_bytes      every element counted once.
    """

    def __init__(self, leaves: Sequence[Leaf], bytes_per_device: int) -> None:
        self.leaves = tuple(sorted(leaves, key=lambda leaf: -leaf.bytes_per_device))
        self.bytes_per_device = bytes_per_device

    @property
    def total_bytes(self) -> int:
        return sum(leaf.total_bytes for leaf in self.leaves)

    @property
    def unique_bytes(self) -> int:
        return sum(leaf.unique_bytes for leaf in self.leaves)

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        title = (
            f"{number(self.bytes_per_device)} bytes per device, {number(self.unique_bytes)} "
            f"in all, {number(self.total_bytes)} with copies"
        )
        head = ("leaf", "shape", "dtype", "spec", "bytes per device", "placement")
        rows = [
            [
                leaf.path or "(array)",
                "(" + ", ".join(map(str, leaf.shape)) + ")",
                leaf.dtype,
                "-" if leaf.spec is None else f"P{tuple(leaf.spec)}".replace(",)", ")"),
                number(leaf.bytes_per_device),
                ("sharded" if leaf.sharded else "replicated" if leaf.copies > 1 else "whole")
                + (f", {leaf.copies} copies" if leaf.copies > 1 else ""),
            ]
            for leaf in self.leaves
        ]
        return title, head, rows


@dataclass(frozen=True, repr=False)
class ProgramMemory(Report):
    """Bytes per device that a compiled program asks for.

    arguments, outputs  what goes in and comes out.
    temporaries         everything in between that the compiler keeps at once at some point.
    aliased             outputs that reuse the memory of (donated) arguments.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @property
    def bytes_per_device(self) -> int:
        """arguments + outputs + temporaries - aliased."""
        return self.arguments + self.outputs + self.temporaries - self.aliased

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        names = ("arguments", "outputs", "temporaries", "aliased", "bytes_per_device")
        rows = [[name.replace("_", " "), number(getattr(self, name))] for name in names]
        return "Bytes per device of a compiled program", ("what", "bytes"), rows


def memory(x: Any) -> Memory | ProgramMemory:
    """Bytes per device: of arrays where they lie, or of a compiled program.

    x   a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, or any pytree of these (a
        Flax module or state is one); or what `.lower(...).compile()` returns, whose numbers
        come from XLA's buffer assignment (`memory_analysis()`).

    An array that stands twice in a tree counts once. Raises TypeError for host arrays and
    numbers, for shapes without a sharding, and for programs that are not compiled.
    """
    if hasattr(x, "memory_analysis") or hasattr(x, "lower") or callable(x) and _no_arrays(x):
        program_text(x)  # raises unless compiled
        stats = x.memory_analysis()
        if stats is None:
            raise ValueError("this backend does not report the memory of a program")
        return ProgramMemory(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.alias_size_in_bytes,
        )
    leaves: list[Leaf] = []
    devices: Counter[Any] = Counter()
    seen: set[int] = set()
    for path, value in placed_leaves(x):
        if isinstance(value, jax.Array) and id(value) in seen:
            continue
        seen.add(id(value))
        leaf, pieces = _leaf(path, value)
        leaves.append(leaf)
        devices.update(pieces)
    return Memory(leaves, max(devices.values(), default=0))


def _no_arrays(x: Any) -> bool:
    leaves = jax.tree.leaves(x)
    return len(leaves) == 1 and leaves[0] is x


def placed_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every array; TypeError, saying what to pass, for a leaf with no place."""
    found = []
    for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        path = path.removesuffix(".value") if path != "value" else ""
        if getattr(value, "sharding", None) is None:
            name = f" at {path}" if path else ""
            if hasattr(value, "shape") and isinstance(value, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"the ShapeDtypeStruct{name} has no sharding: pass "
                    "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
                )
            raise TypeError(
                f"the {type(value).__name__}{name} is not on a device: "
                "pass jax.device_put(x, sharding)"
            )
        found.append((path, value))
    return found


def _leaf(path: str, value: Any) -> tuple[Leaf, dict[Any, int]]:
    shape, sharding, item = tuple(value.shape), value.sharding, value.dtype.itemsize
    size = math.prod(shape)
    try:
        local = [math.prod(sharding.shard_shape(shape))] * sharding.num_devices
    except ValueError:  # pieces of unequal size
        slices = sharding.devices_indices_map(shape).values()
        local = [
            math.prod(len(range(*s.indices(n))) for s, n in zip(i, shape, strict=True))
            for i in slices
        ]
    abstract = not hasattr(sharding, "device_set") or _is_abstract(sharding)
    devices = range(len(local)) if abstract else sharding.devices_indices_map(shape)
    leaf = Leaf(
        path=path,
        shape=shape,
        dtype=str(value.dtype),
        spec=sharding.spec if isinstance(sharding, NamedSharding) else None,
        bytes_per_device=max(local) * item,
        copies=sum(local) // size if size else len(local),
        sharded=max(local) < size,
        unique_bytes=size * item,
        total_bytes=sum(local) * item,
    )
    return leaf, {d: n * item for d, n in zip(devices, local, strict=True)}


def _is_abstract(sharding: Any) -> bool:
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
