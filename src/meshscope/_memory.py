"""Where the bytes live: arrays by leaf, compiled programs by purpose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.stages import Compiled

from . import _advice, _compat
from . import _hlo as hlo
from ._messages import Said, joined
from ._paths import placed_leaves
from ._programs import platform_of, program_text, shardings_of
from ._tables import Cell, Content, Report, heads, number, numbers, shape_text, spec_text


@dataclass(frozen=True)
class Leaf:
    """One array of a tree. Memory that a leaf before it has counted is not counted again.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> (leaf,) = meshscope.memory({"w": x}).leaves
    >>> leaf.path, leaf.bytes_per_device, leaf.copies, leaf.total_bytes
    ('w', 256, 4, 2048)

    Attributes:
      path: where it is in the tree, ``""`` for a tree of one array.
      shape: of the whole array.
      dtype: its name.
      spec: its partition spec, None if its sharding has none.
      bytes_per_device: bytes of one piece; 0 for a deleted array and for one whose
        memory is counted elsewhere.
      copies: how many devices hold each element.
      sharded: whether a piece is less than the whole array.
      unique_bytes: every element once.
      total_bytes: all pieces on all devices.
      memory_kind: ``"pinned_host"`` and the like; None if nothing says otherwise than
        the devices' own memory.
      deleted: whether its memory was freed, or given away by donating it.
      shares: path of a leaf whose memory it uses, or None.
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
    memory_kind: str | None = None
    deleted: bool = False
    shares: str | None = None


@dataclass(frozen=True, repr=False)
class Memory(Report):
    """Bytes of a tree of arrays.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> meshscope.memory({"w": x})
    256 bytes per device; 512 without copies, 2,048 on all devices
    leaf  shape    dtype    spec       bytes per device  placement
    w     (8, 16)  float32  P('data')               256  sharded, 4 copies

    Attributes:
      leaves: ``Leaf`` rows, the largest per device first.
      bytes_per_device: bytes in the memory of the device that holds most.
      host_bytes_per_device: bytes in the host's memory (``"pinned_host"`` and the like),
        of the device that has most there.
    """

    leaves: Sequence[Leaf]
    bytes_per_device: int
    host_bytes_per_device: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum over all devices, copies included, the host's memory not.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> shape = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(mesh, jax.P()))
        >>> meshscope.memory(shape).total_bytes
        256
        """
        return sum(leaf.total_bytes for leaf in self.leaves if not leaf.memory_kind)

    @property
    def unique_bytes(self) -> int:
        """Every element on a device counted once.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> shape = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(mesh, jax.P()))
        >>> meshscope.memory(shape).unique_bytes
        32
        """
        return sum(leaf.unique_bytes for leaf in self.leaves if not leaf.memory_kind)

    def _content(self) -> Content:
        columns = heads("leaf", "shape", "dtype", "spec")
        columns += [*numbers("bytes per device"), *heads("placement")]
        rows = [
            [
                leaf.path or Said("array"),
                shape_text(leaf.shape),
                leaf.dtype,
                spec_text(leaf.spec),
                number(leaf.bytes_per_device),
                _placement(leaf),
            ]
            for leaf in self.leaves
        ]
        message = "{bytes} bytes per device; {unique} without copies, {total} on all devices"
        values = {"bytes": self.bytes_per_device, "unique": self.unique_bytes}
        values["total"] = self.total_bytes
        if self.host_bytes_per_device:
            message = message.replace("device;", "device and {host} in host memory;")
            values["host"] = self.host_bytes_per_device
        told = {name: f"{value:,}" for name, value in values.items()}
        return Content(Said(message, **told), columns, rows)


def _placement(leaf: Leaf) -> Cell:
    """How a leaf is sharded, in words."""
    if leaf.deleted:
        return Said("deleted")
    parts = [Said("sharded")] if leaf.sharded else []
    if sums := _compat.unreduced(leaf.spec):
        # Same indices on several devices, and another value on each.
        parts.append(Said("partial sums over {axes}", axes=", ".join(sorted(sums))))
    elif leaf.copies > 1:
        parts = parts or [Said("replicated")]
        parts.append(Said("{count} copies", count=leaf.copies))
    parts = parts or [Said("one device")]
    if leaf.memory_kind:
        parts.append(Said("in {memory}", memory=leaf.memory_kind))
    if leaf.shares is not None:
        parts.append(Said("the buffers of {path}", path=leaf.shares or Said("array")))
    return joined("{part}, {parts}", parts)


@dataclass(frozen=True, repr=False)
class ProgramMemory(Report):
    """Bytes per device that a compiled program asks for, from XLA's buffer assignment.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> meshscope.memory(jax.jit(lambda x: x + 1).lower(x).compile())
    128 bytes per device for a compiled program
    what         bytes per device
    arguments                  64
    outputs                    64
    temporaries                 0
    aliased                     0

    Attributes:
      arguments: what goes in.
      outputs: what comes out.
      temporaries: the room for everything in between.
      aliased: outputs that reuse the room of (donated) arguments.
      host_arguments, host_outputs, host_temporaries, host_aliased: the same in the host's
        memory (``"pinned_host"`` and the like). XLA's CPU compiler does not separate the two,
        so there arguments, outputs and aliased outputs follow from the program's layouts, and
        temporaries all count as the device's.
      peak: the most at one moment, all of the above together, from the TPU compiler; 0 for
        other devices, which allocate each part whole. On TPU, loops of a program that run one
        after the other share room that ``temporaries`` counts several times.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    host_arguments: int = 0
    host_outputs: int = 0
    host_temporaries: int = 0
    host_aliased: int = 0
    peak: int = 0

    @property
    def bytes_per_device(self) -> int:
        """arguments + outputs + temporaries - aliased, of the device's own memory; on TPU the peak.

        >>> import meshscope
        >>> meshscope.ProgramMemory(64, 64, 8, aliased=64).bytes_per_device
        72
        """
        whole = self.arguments + self.outputs + self.temporaries - self.aliased
        return self.peak or whole

    @property
    def host_bytes_per_device(self) -> int:
        """The same sum of the host's memory.

        >>> import meshscope
        >>> meshscope.ProgramMemory(64, 64, 8, 64, host_arguments=512).host_bytes_per_device
        512
        """
        total = self.host_arguments + self.host_outputs + self.host_temporaries
        return total - self.host_aliased

    def _content(self) -> Content:
        message = "{bytes} bytes per device for a compiled program"
        values = {"bytes": f"{self.bytes_per_device:,}"}
        host = any(value for name, value in vars(self).items() if name.startswith("host_"))
        if host:
            message = message.replace("device for", "device and {host} in host memory for")
            values["host"] = f"{self.host_bytes_per_device:,}"
        rows = [
            [name.replace("_", " "), number(value)]
            for name, value in vars(self).items()
            if (host or not name.startswith("host_")) and (value or name != "peak")
        ]
        columns = [*heads("what"), *numbers("bytes per device")]
        return Content(Said(message, **values), columns, rows)


@overload
def memory(x: Compiled) -> ProgramMemory: ...
@overload
def memory(x: Any) -> Memory: ...
def memory(x: Any) -> Memory | ProgramMemory:
    """Count bytes per device, of arrays as they are placed or of a compiled program.

    Memory is counted once: an array that is in a tree twice adds nothing, and neither does
    one that was made from another's buffers (on CPU, arrays made from one NumPy array may
    share its memory). That includes the devices of other processes: they run the same
    program, so what shares all of its memory here shares it there, too. A deleted array,
    for example a donated one, holds nothing. Elements smaller than a byte are packed: int4
    takes half a byte.

    The host's memory is counted separately, for arrays and for what a program takes from
    there or puts there.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> meshscope.memory({"w": x, "tied": x}).bytes_per_device
    256
    >>> meshscope.memory(jax.jit(lambda x: x + 1).lower(x).compile()).outputs
    256

    Args:
      x: a ``jax.Array``; a ``jax.ShapeDtypeStruct`` with a sharding; a pytree of these (a
        Flax module, state or variable is one); or what ``.lower(...).compile()`` returns.

    Returns:
      ``Memory`` of arrays, ``ProgramMemory`` of a program.

    Raises:
      TypeError: anything else, with what to pass instead: for example a NumPy array, a
        shape without a sharding, a traced array, a mesh, or a program that is not compiled.
      ValueError: a tree without leaves, such as ``{}`` or None; a backend that does not
        report the memory of a program.
    """
    if _advice.is_compiled(x):
        return _program(x)
    rows: list[Leaf] = []
    held: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}  # bytes by device
    seen: dict[Hashable, str] = {}
    for path, leaf in placed_leaves(x, _advice.MEMORY):
        row, pieces = _leaf(path, leaf, seen)
        rows.append(row)
        held[bool(row.memory_kind)].update(pieces)
    rows.sort(key=lambda row: -row.bytes_per_device)
    device, host = (max(held[where].values(), default=0) for where in (False, True))
    return Memory(tuple(rows), device, host)


def _leaf(path: str, leaf: Any, seen: dict[Hashable, str]) -> tuple[Leaf, dict[Any, int]]:
    """The row of a leaf and the bytes that it adds on each device; ``seen``: buffers so far."""
    shape, sharding = tuple(leaf.shape), leaf.sharding
    size, bits = math.prod(shape), _compat.bits(leaf.dtype)
    part, count = tuple(sharding.shard_shape(shape)), sharding.num_devices
    piece = _bytes(math.prod(part), bits)
    abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    devices = list(range(count)) if abstract else list(sharding.device_set)
    deleted, shares = _compat.is_deleted(leaf), None
    adds = dict.fromkeys(devices, 0 if deleted else piece)
    once = 0 if deleted else _bytes(size, bits)
    if isinstance(leaf, jax.Array) and not deleted:
        known: dict[Any, bool] = {}  # by place in the array: was it counted?
        pieces = list(_compat.buffers(leaf))
        pieces += _compat.remote_buffers(leaf, [buffer for _, _, buffer in pieces])
        for device, index, buffer in pieces:
            known[index] = known.get(index, False) or buffer in seen
            if buffer in seen:
                adds[device], shares = 0, seen[buffer] if piece else None
            seen.setdefault(buffer, path)
        once = once * list(known.values()).count(False) // len(known) if known else once
    row = Leaf(
        path=path,
        shape=shape,
        dtype=str(leaf.dtype),
        spec=sharding.spec if isinstance(sharding, NamedSharding) else None,
        bytes_per_device=max(adds.values(), default=0),
        copies=math.prod(part) * count // size if size else count,
        sharded=part != shape,
        unique_bytes=once,
        total_bytes=sum(adds.values()),
        memory_kind=_compat.other_memory(leaf),
        deleted=deleted,
        shares=shares,
    )
    return row, adds


def _bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // 8)


def _program(compiled: Any) -> ProgramMemory:
    """The bytes of a compiled program, those in the host's memory separately."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend does not tell the memory of a program")
    names = {"arguments": "argument", "outputs": "output", "temporaries": "temp"}
    names["aliased"] = "alias"
    sizes: dict[str, int] = {}
    for ours, theirs in names.items():
        sizes[ours] = getattr(stats, f"{theirs}_size_in_bytes")
        sizes[f"host_{ours}"] = getattr(stats, f"host_{theirs}_size_in_bytes", 0)
    if not any(size for name, size in sizes.items() if name.startswith("host_")):
        # For CPU, XLA counts all memory as the device's. The program's layouts name the host's.
        for name, size in hlo.host_bytes(program_text(compiled)).items():
            sizes[f"host_{name}"] = size
            sizes[name] -= size
    for_tpu = platform_of(shardings_of(compiled)) == "tpu"
    peak = getattr(stats, "peak_memory_in_bytes", 0) if for_tpu else 0
    return ProgramMemory(**sizes, peak=peak)
