"""Where the blocks of an array are: shapes and shardings as plain numbers."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from . import _advice, _compat, _paths
from ._tables import spec_text

Axes = tuple[tuple[str, int], ...]  # (name, size) of mesh axes, major first
Index = tuple[int, ...]

# What a mesh axis is doing that splits no dimension.
COPIED, COPIES = "copied over {axes}", "copied × {count}"
UNREDUCED, REDUCED = "partial sums over {axes}", "reduced over {axes}"


@dataclass(frozen=True)
class Edge:
    """One dimension: its size in elements, in how many parts, over which axes."""

    size: int
    parts: int = 1
    axes: Axes = ()
    mark: str = ""  # for a mesh: the type of the axis


@dataclass(frozen=True)
class Placement:
    """An array, or a mesh, as blocks on devices.

    ``blocks`` maps the position of a block along every dimension to what holds it:
    ids of devices in the order of the mesh or, where no device is known yet, mesh
    coordinates (``:`` for every coordinate of an axis).
    """

    what: str  # float32[8,16], or Mesh
    spec: str
    edges: tuple[Edge, ...]
    blocks: Mapping[Index, Sequence[str]]
    mesh: Axes
    notes: tuple[tuple[str, Axes], ...] = ()  # ("copied over {axes}", axes), …
    keys: str = ""  # the axes whose coordinates label a block; none: it is labelled by devices
    is_mesh: bool = False
    memory: str | None = None  # its kind, if it is not the devices' own

    @property
    def local(self) -> Index:
        """Shape of one block, in elements."""
        return tuple(e.size // e.parts for e in self.edges)


def times(shape: Index) -> str:
    """A shape as one says it: 4×16, or scalar."""
    return "×".join(map(str, shape)) or "scalar"


def leaves(x: Any) -> list[tuple[str, Placement]]:
    """Name and placement of every leaf of ``x``, in tree order."""
    return [(name, place(leaf, name)) for name, leaf in _paths.leaves(x, _is_leaf)]


def _is_leaf(x: Any) -> bool:
    if type(x) is tuple and len(x) == 2:
        return isinstance(x[1], Sharding | PartitionSpec) and not hasattr(x[0], "dtype")
    return isinstance(x, Mesh | AbstractMesh | Sharding | PartitionSpec)


def place(x: Any, name: str = "") -> Placement:
    """The placement of an array, a shape with a sharding, a traced array or a mesh."""
    at = f" (leaf {name})" if name else ""
    if isinstance(x, Mesh | AbstractMesh):
        return _mesh(x)
    if _is_leaf(x) and isinstance(x, tuple) and isinstance(x[1], Sharding):
        shape = _shape(x[0], at)
        return _array(shape, x[1], _what("", shape), at, memory=_compat.other_memory(x[1]))
    if isinstance(x, _compat.Tracer | _compat.ShapedArray):
        return _traced(jax.typeof(x) if isinstance(x, _compat.Tracer) else x, at)
    if not (hasattr(x, "shape") and hasattr(x, "sharding")):
        raise TypeError(_advice.says(x, _advice.DRAWING, name))
    if x.sharding is None:
        raise ValueError(_advice.says(x, _advice.DRAWING, name))
    what = _what(x.dtype, x.shape)
    if _compat.is_deleted(x):
        raise ValueError(
            f"this {what} was deleted and is on no device{at}: a function to which an array is "
            "donated takes its memory; show what the function returned"
        )
    return _array(x.shape, x.sharding, what, at, memory=_compat.other_memory(x))


def _shape(x: Any, at: str) -> Index:
    try:
        return tuple(operator.index(n) for n in x)
    except TypeError:
        raise TypeError(
            f"{x!r} is not a shape{at}: pass (shape, sharding), a shape being a tuple of integers "
            "such as (8, 16), or (8,) for one dimension"
        ) from None


def _what(dtype: Any, shape: Index) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _traced(aval: Any, at: str) -> Placement:
    mesh = aval.sharding.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    auto = [a for a, kind in types.items() if kind == AxisType.Auto]
    if len(auto) == len(types):
        why = "over Auto axes: the compiler has not placed it yet"
        raise ValueError(
            f"{aval} is traced {why if auto else 'without a mesh'}{at}: show what the "
            "jitted function returns, or give it arrays on a mesh of Explicit axes"
        )
    verbs = dict.fromkeys(auto, "left to the compiler over {axes}")
    manual = _compat.manual_axes(aval)
    verbs |= dict.fromkeys(manual["varying"], "varying over {axes}")
    verbs |= dict.fromkeys(manual["unreduced"], UNREDUCED)
    verbs |= dict.fromkeys(manual["reduced"], REDUCED)
    what, memory = _what(aval.dtype, aval.shape), _compat.other_memory(aval)
    return _array(aval.shape, aval.sharding, what, at, verbs, memory)


def _array(
    shape: Index, sharding: Any, what: str, at: str, verbs: dict[str, str] | None = None,
    memory: str | None = None,
) -> Placement:  # fmt: skip
    if not isinstance(sharding, NamedSharding):
        return dataclasses.replace(_unnamed(shape, sharding, what, at), memory=memory)
    mesh, spec = sharding.mesh, sharding.spec
    sizes: dict[str, int] = dict(zip(mesh.axis_names, mesh.axis_sizes))
    given = tuple(spec.partitions)
    text = spec_text(spec)
    if len(given) > len(shape):
        raise ValueError(
            f"{text} names {len(given)} dimensions, {what} has {len(shape)}{at}: "
            "pass a spec that is no longer than the shape"
        )
    edges = []
    for dim, size in enumerate(shape):
        part = given[dim] if dim < len(given) else None
        if part is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"dimension {dim} of {what} is left to the compiler by UNCONSTRAINED"
                f"{at}: name the mesh axes that split it, or None"
            )
        names = (part,) if isinstance(part, str) else tuple(part or ())
        axes = tuple((a, sizes[a]) for a in names)
        edges.append(Edge(size, math.prod(n for _, n in axes), axes))
        if size % edges[-1].parts:
            raise ValueError(
                f"dimension {dim} of {what} has size {size}, which mesh axis "
                f"{' × '.join(f'{a!r} of size {n}' for a, n in axes)} does not divide"
                f"{at}: pad the dimension, or leave it whole"
            )

    concrete, blocks = isinstance(mesh, Mesh), dict[Index, list[str]]()
    used = {a for e in edges for a, _ in e.axes}
    for position in np.ndindex(*sizes.values()):
        where = dict(zip(sizes, position))
        held = blocks.setdefault(tuple(_part(e.axes, where) for e in edges), [])
        if concrete:
            held.append(_id(mesh, position))
        elif not held:
            held.append(",".join(str(i) if a in used else ":" for a, i in where.items()))
    states = dict.fromkeys(_compat.unreduced(spec), UNREDUCED)
    states |= dict.fromkeys(_compat.reduced(spec), REDUCED)
    verbs = states | (verbs or {})
    notes: dict[str, Axes] = {}
    for a, n in sizes.items():
        if a not in used and n > 1:
            verb = verbs.get(a, COPIED)
            notes[verb] = (*notes.get(verb, ()), (a, n))
    keys = "" if concrete else ", ".join(sizes)
    mesh_axes = tuple(sizes.items())
    placed = tuple(notes.items())
    return Placement(what, text, tuple(edges), blocks, mesh_axes, placed, keys, memory=memory)


def _part(axes: Axes, where: dict[str, int]) -> int:
    """Which part of a dimension split over ``axes`` is at mesh coordinates."""
    part = 0
    for name, size in axes:
        part = part * size + where[name]
    return part


def _id(mesh: Any, position: Index) -> str:
    return str(mesh.devices[position].id)


def _unnamed(shape: Index, sharding: Any, what: str, at: str) -> Placement:
    """A sharding without axis names: ask it which device holds which box."""
    try:
        local = sharding.shard_shape(shape)
        boxes = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise ValueError(f"{what} does not divide evenly{at}: {error}") from None
    blocks: dict[Index, list[str]] = {}
    for device, box in boxes.items():
        starts = (s.indices(n)[0] for s, n in zip(box, shape))
        index = tuple(start // m if m else 0 for start, m in zip(starts, local))
        blocks.setdefault(index, []).append(str(device.id))
    edges = tuple(Edge(n, n // m if m else 1) for n, m in zip(shape, local))
    copies = len(boxes) // len(blocks)
    notes = ((COPIES, (("", copies),)),) if copies > 1 else ()
    return Placement(what, type(sharding).__name__, edges, blocks, (), notes)


def _mesh(mesh: Any) -> Placement:
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes))
    if not axes:
        raise ValueError(
            "the mesh is empty: make one with jax.make_mesh, or call jax.set_mesh first"
        )
    concrete = isinstance(mesh, Mesh)
    blocks = {
        at: (_id(mesh, at) if concrete else ",".join(map(str, at)),)
        for at in np.ndindex(*mesh.axis_sizes)
    }
    types = [kind.name for kind in mesh.axis_types]
    kind = f"{mesh.devices.flat[0].platform} devices" if concrete else "devices"
    return Placement(
        type(mesh).__name__,
        f"{math.prod(mesh.axis_sizes)} {kind}",
        tuple(Edge(n, n, ((a, n),), t) for (a, n), t in zip(axes, types)),
        blocks,
        axes,
        is_mesh=True,
    )
