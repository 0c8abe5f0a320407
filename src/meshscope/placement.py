"""Where the blocks of an array lie: shapes and shardings as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec

Axes = tuple[tuple[str, int], ...]  # (name, size) of mesh axes, major first
Index = tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """One dimension: its size in elements, in how many parts, over which axes."""

    size: int
    parts: int = 1
    axes: Axes = ()
    mark: str = ""  # what stands beside a mesh axis: its type


@dataclass(frozen=True)
class Placement:
    """An array, or a mesh, as blocks on devices.

    ``blocks`` maps the index of a block along every dimension to what holds it:
    device ids in mesh order, or mesh coordinates where no device is known yet
    (``":"`` stands for every coordinate of an axis).
    """

    what: str  # float32[8,16], or Mesh
    spec: str
    edges: tuple[Edge, ...]
    blocks: dict[Index, tuple[str, ...]]
    notes: tuple[tuple[str, Axes], ...]  # ("copied", axes), …
    mesh: Axes
    keys: str  # what a label in a block counts
    is_mesh: bool = False

    @property
    def local(self) -> Index:
        """Shape of one block, in elements."""
        return tuple(e.size // e.parts for e in self.edges)


def times(shape: Sequence[int]) -> str:
    """A shape as a person says it: 4×16, or scalar."""
    return "×".join(map(str, shape)) or "scalar"


def spec_text(partitions: Sequence[Any]) -> str:
    """A partition spec as a person types it."""
    return f"P({', '.join(map(repr, partitions))})"


def leaves(x: Any) -> list[tuple[str, Placement]]:
    """Name and placement of every leaf of ``x``, in tree order."""
    found = jax.tree_util.tree_flatten_with_path(x, is_leaf=_whole)[0]
    if not found:
        raise ValueError("nothing to show: the tree has no leaves; pass arrays")
    return [(_name(path), place(leaf, _name(path))) for path, leaf in found]


def _whole(x: Any) -> bool:
    pair = type(x) is tuple and len(x) == 2 and not hasattr(x[0], "dtype")
    return isinstance(x, Mesh | AbstractMesh | Sharding | PartitionSpec) or (
        pair and isinstance(x[1], Sharding | PartitionSpec)
    )


def _name(path: tuple[Any, ...]) -> str:
    if path and getattr(path[-1], "name", "") == "value":
        path = path[:-1]  # the array inside an nnx.Variable
    return jax.tree_util.keystr(path, simple=True, separator=".")


def place(x: Any, name: str = "") -> Placement:
    """The placement of one array, shape with a sharding, traced array or mesh."""
    at = f" (leaf {name})" if name else ""
    if isinstance(x, Mesh | AbstractMesh):
        return _mesh(x)
    if _whole(x) and isinstance(x, tuple) and isinstance(x[1], Sharding):
        shape = tuple(int(n) for n in x[0])
        return _array(shape, x[1], _what("", shape), at)
    if _whole(x):
        raise TypeError(
            f"{_type(x)} says how to split, not what{at}: "
            "pass (shape, jax.NamedSharding(mesh, spec))"
        )
    if isinstance(x, jax.core.Tracer | jax.core.ShapedArray):
        return _traced(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, at)
    if isinstance(x, np.ndarray | np.generic | int | float | complex):
        raise TypeError(
            f"{_type(x)} is on the host, on no device{at}: "
            "pass jax.device_put(x, sharding), or (shape, sharding)"
        )
    if hasattr(x, "as_text"):
        raise TypeError(
            f"{_type(x)} is a program, not an array{at}: pass (shape, sharding) "
            "with one of its output_shardings, or what it returns"
        )
    if callable(x) or not hasattr(x, "shape") or not hasattr(x, "sharding"):
        raise TypeError(
            f"{_type(x)} has no placement{at}: pass a jax.Array, a "
            "jax.ShapeDtypeStruct with a sharding, (shape, sharding), a mesh, "
            "or a pytree of these"
            + (" (for a function: what it returns)" if callable(x) else "")
        )
    if x.sharding is None:
        raise ValueError(
            f"a {_type(x)} without a sharding lies nowhere{at}: "
            "pass jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)"
        )
    return _array(x.shape, x.sharding, _what(x.dtype, x.shape), at)


def _what(dtype: Any, shape: Index) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _type(x: Any) -> str:
    return f"{type(x).__module__.partition('.')[0]}.{type(x).__qualname__}"


def _traced(aval: Any, at: str) -> Placement:
    sharding, shape = aval.sharding, aval.shape
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    if not types:
        raise ValueError(
            f"{aval} is traced without a mesh{at}: jit arrays that lie on an "
            "Explicit mesh, or show what the jitted function returns"
        )
    if all(t == AxisType.Auto for t in types.values()):
        raise ValueError(
            f"{aval} is traced on Auto axes, so the compiler has not placed it yet{at}: "
            "show what the jitted function returns, or make the mesh's axes Explicit"
        )
    manual = getattr(aval, "manual_axis_type", None)
    varying = getattr(manual, "varying", None) or getattr(aval, "vma", frozenset())
    verbs = {a: "left to the compiler" for a, t in types.items() if t == AxisType.Auto}
    verbs |= dict.fromkeys(varying, "varying")
    verbs |= dict.fromkeys(getattr(manual, "unreduced", ()), "partial sums")
    return _array(shape, sharding, _what(aval.dtype, shape), at, verbs)


def _array(
    shape: Index,
    sharding: Sharding,
    what: str,
    at: str,
    verbs: dict[str, str] | None = None,
) -> Placement:
    if not isinstance(sharding, NamedSharding):
        return _unnamed(shape, sharding, what, at)
    mesh, spec = sharding.mesh, sharding.spec
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes))
    if not sizes:
        raise ValueError(
            f"{what} has a sharding without a mesh{at}: pass one made with jax.make_mesh"
        )
    given = tuple(spec.partitions)
    if len(given) > len(shape):
        raise ValueError(
            f"{spec_text(given)} names {len(given)} dimensions, {what} has {len(shape)}{at}: "
            "pass a spec that is no longer than the shape"
        )
    edges = []
    for dim, size in enumerate(shape):
        part = given[dim] if dim < len(given) else None
        if part is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"dimension {dim} of {what} is UNCONSTRAINED{at}: name its axes, or None"
            )
        names = (
            () if part is None else (part,) if isinstance(part, str) else tuple(part)
        )
        axes = tuple((str(a), sizes[a]) for a in names)
        edges.append(Edge(size, math.prod(n for _, n in axes), axes))
        if size % edges[-1].parts:
            raise ValueError(
                f"dimension {dim} of {what} has size {size}, which mesh axis "
                f"{' × '.join(f'{a!r} of size {n}' for a, n in axes)} does not divide{at}: "
                "pad the dimension, or leave it unsplit"
            )
    used = {a for e in edges for a, _ in e.axes}
    verbs = dict.fromkeys(spec.unreduced, "partial sums") | (verbs or {})
    groups: dict[str, list[tuple[str, int]]] = {}
    for a, n in sizes.items():
        if a not in used and n > 1:
            groups.setdefault(verbs.get(a, "copied"), []).append((a, n))
    blocks: dict[Index, list[str]] = {}
    for coordinate in np.ndindex(*sizes.values()):
        where = dict(zip(sizes, coordinate))
        index = tuple(_mixed(e.axes, where) for e in edges)
        held = blocks.setdefault(index, [])
        if isinstance(mesh, Mesh):
            held.append(str(mesh.devices[coordinate].id))
        elif not held:
            held.append(
                ",".join(str(c) if a in used else ":" for a, c in where.items())
            )
    return Placement(
        what,
        spec_text(given),
        tuple(edges),
        {k: tuple(v) for k, v in blocks.items()},
        tuple((verb, tuple(axes)) for verb, axes in groups.items()),
        tuple(sizes.items()),
        "device" if isinstance(mesh, Mesh) else f"device ({', '.join(sizes)})",
    )


def _mixed(axes: Axes, where: dict[str, int]) -> int:
    """Position along a dimension split by ``axes``, major axis first."""
    position = 0
    for name, size in axes:
        position = position * size + where[name]
    return position


def _unnamed(shape: Index, sharding: Sharding, what: str, at: str) -> Placement:
    """A sharding without axis names: ask it which device holds which box."""
    try:
        local = sharding.shard_shape(shape)
        boxes = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise ValueError(f"{what} does not divide evenly{at}: {error}") from None
    edges = tuple(Edge(n, n // m if m else 1) for n, m in zip(shape, local))
    blocks: dict[Index, list[str]] = {}
    for device, box in boxes.items():
        starts = (s.indices(n)[0] for s, n in zip(box, shape))
        index = tuple(i // m if m else 0 for i, m in zip(starts, local))
        blocks.setdefault(index, []).append(str(device.id))
    copies = max(map(len, blocks.values()))
    return Placement(
        what,
        type(sharding).__name__,
        edges,
        {k: tuple(v) for k, v in blocks.items()},
        (("copied", (("", copies),)),) if copies > 1 else (),
        (),
        "device",
    )


def _mesh(mesh: Mesh | AbstractMesh) -> Placement:
    axes = tuple(zip(map(str, mesh.axis_names), mesh.axis_sizes))
    if not axes:
        raise ValueError(
            "the mesh is empty: make one with jax.make_mesh, or jax.set_mesh(mesh) first"
        )
    types = (t.name for t in mesh.axis_types)
    blocks: dict[Index, tuple[str, ...]] = {}
    for index in np.ndindex(*mesh.axis_sizes):
        known = isinstance(mesh, Mesh)
        label = str(mesh.devices[index].id) if known else ",".join(map(str, index))
        blocks[index] = (label,)
    kind = f"{mesh.devices.flat[0].platform} " if isinstance(mesh, Mesh) else ""
    return Placement(
        type(mesh).__name__,
        f"{math.prod(mesh.axis_sizes)} {kind}devices",
        tuple(Edge(n, n, ((a, n),), t) for (a, n), t in zip(axes, types)),
        blocks,
        (),
        axes,
        "device",
        is_mesh=True,
    )
