"""What JAX has no public name for, or names differently from release to release.

Nothing else in this package touches a private name of JAX, so that a release that moves one is
met here. Supported: jax 0.10.2 and newer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

# Traced arrays and their types. jax.core exports both names; its documentation lists neither.
Tracer = jax.core.Tracer
ShapedArray = jax.core.ShapedArray


def unreduced(spec: Any) -> frozenset[str]:
    """Mesh axes over which a spec still has to be summed: ``{U:…}``."""
    return frozenset(getattr(spec, "unreduced", None) or ())


def reduced(spec: Any) -> frozenset[str]:
    """Mesh axes over which a spec is a finished sum: ``{R:…}``."""
    return frozenset(getattr(spec, "reduced", None) or ())


def manual_axes(aval: Any) -> dict[str, frozenset[str]]:
    """Inside ``shard_map``: the axes over which a value varies, is unreduced, is reduced."""
    manual = getattr(aval, "manual_axis_type", None)
    varying = getattr(manual, "varying", None) or getattr(aval, "vma", None)
    found = {
        "varying": varying,
        "unreduced": getattr(manual, "unreduced", None),
        "reduced": getattr(manual, "reduced", None),
    }
    return {what: frozenset(axes or ()) for what, axes in found.items()}


def device_order(sharding: Sharding) -> tuple[jax.Device, ...] | None:
    """The devices of a sharding in the order in which its programs number them."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else None
    found = getattr(sharding, "_device_assignment", None)
    return tuple(found) if found else None


def bits(dtype: Any) -> int:
    """Bits of one element where it is stored packed, as XLA stores it: 4 for int4."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)  # type: ignore[no-untyped-call]
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)  # type: ignore[no-untyped-call]
    return 8 * int(dtype.itemsize)


def is_explicit(aval: Any) -> bool:
    """Does the type of an array say where the array is: is every axis of its mesh Explicit?"""
    types = aval.sharding.mesh.axis_types
    return bool(types) and all(kind == AxisType.Explicit for kind in types)


def other_memory(x: Any) -> str | None:
    """The kind of memory that an array is in, ``"pinned_host"``; None: its devices' own."""
    if isinstance(x, Tracer | ShapedArray):
        # A type names the space, which its sharding leaves out.
        space = getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "memory_space", None)
        return "pinned_host" if getattr(space, "name", "") == "Host" else None
    sharding = getattr(x, "sharding", x)
    kind = sharding.memory_kind
    if kind == "device" or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return None if kind == "device" else kind
    device = next(iter(sharding.addressable_devices or sharding.device_set))
    return None if kind == default_memory(device) else kind


def default_memory(device: jax.Device) -> str | None:
    """The kind of memory that arrays of a device are in when nobody says another."""
    try:
        return str(device.default_memory().kind)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # a device without memory of its own, such as one that is only compiled for


def is_deleted(x: Any) -> bool:
    """Is it an array whose buffers were given away (donated) or freed?"""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and bool(x.is_deleted())


def buffers(x: jax.Array) -> Iterator[tuple[jax.Device, tuple[Any, ...], Hashable]]:
    """(device, place in the array, identity of the memory) of each piece that this process sees.

    The identity is an address, and with it the shape: a smaller piece may begin where a larger
    one does.
    """
    for shard in x.addressable_shards:
        piece = shard.data
        try:
            address: Hashable = piece.unsafe_buffer_pointer()
        except (AttributeError, NotImplementedError, RuntimeError, ValueError):
            address = ("array", id(x))  # this backend does not tell: its own memory
        try:
            index: tuple[Any, ...] = tuple((s.start, s.stop) for s in shard.index)
        except NotImplementedError:  # partial sums: each device has its own values
            index = (shard.device.id,)
        yield shard.device, index, (shard.device, address, piece.shape, str(piece.dtype))


def remote_buffers(
    x: jax.Array, here: Iterable[Hashable]
) -> Iterator[tuple[jax.Device, tuple[Any, ...], Hashable]]:
    """The same of each piece that other processes hold, whose addresses are not known here.

    Every process runs the same program, so two arrays that share all of their memory ``here``
    share it there too. What this process sees nothing of is shared by the same object alone.
    """
    if x.is_fully_addressable:
        return
    address = frozenset(here) or ("array", id(x))
    try:
        places: Any = x.sharding.devices_indices_map(x.shape)
    except NotImplementedError:  # partial sums, as above
        places = {}
    far: set[Any] = x.sharding.device_set - x.sharding.addressable_devices
    for device in far:
        slices = places.get(device)
        index = (device.id,) if slices is None else tuple((s.start, s.stop) for s in slices)
        yield device, index, (device, address)
