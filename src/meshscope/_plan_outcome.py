"""What one candidate takes, priced by the published numbers of a chip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._collectives import sent_by_one
from ._memory import ProgramMemory
from ._plan_candidates import as_tuple
from ._plan_chips import Chip
from ._plan_results import Record

Wire = dict[tuple[str, tuple[str, ...]], float]  # bytes that one device sends, by kind and axes


@dataclass(frozen=True)
class Outcome:
    """A table on a mesh: what it takes, and whether it fits.

    >>> import meshscope
    >>> outcome = meshscope.Outcome("FSDP", {"batch": "data"}, {"data": 8}, error="TypeError: no")
    >>> outcome.where, outcome.fits(80e9), outcome.why_not(80e9)
    ('data 8', False, 'TypeError: no')

    Attributes:
      table: its name.
      rules: the mesh axes of each logical axis, as the callable got them: without axes of
        size 1.
      mesh: sizes of all axes of the mesh.
      memory: of the compiled step, or None.
      flops: operations of matrix products on one device: of the compiled program where they
        can be read, else those of the traced step divided by the devices.
      repeats: how often the devices repeat each other's operations: 1 if they share them
        out, None if not known.
      expected: bytes that one device sends by kind and axes, in closed form; None without.
      counted: the same of the compiled program; None if it could not be counted.
      batch: mesh axes over which the batch is sharded.
      seconds: of the processor, to trace and to compile it.
      error: why there is no program; None if there is one.
    """

    table: str
    rules: Mapping[str, Any]
    mesh: Mapping[str, int]
    memory: ProgramMemory | None = None
    flops: float | None = None
    repeats: float | None = None
    expected: Wire | None = None
    counted: Wire | None = None
    batch: tuple[str, ...] = ()
    seconds: float = 0
    error: str | None = None

    @property
    def where(self) -> str:
        """``"data 8 × model 8"``, without axes of size 1.

        >>> import meshscope
        >>> meshscope.Outcome("DP", {}, {"data": 8, "model": 1}).where
        'data 8'
        """
        sizes = [f"{name} {size}" for name, size in self.mesh.items() if size > 1]
        return " × ".join(sizes) or "one device"

    @property
    def bytes_per_device(self) -> int | None:
        """Memory of the compiled step, or None.

        >>> import meshscope
        >>> memory = meshscope.ProgramMemory(64, 64, 8, aliased=64)
        >>> meshscope.Outcome("DP", {}, {"data": 8}, memory).bytes_per_device
        72
        """
        return None if self.memory is None else self.memory.bytes_per_device

    def fits(self, hbm: float) -> bool:
        """Does it take at most so many bytes on a device?

        >>> import meshscope
        >>> outcome = meshscope.Outcome("DP", {}, {"data": 8}, meshscope.ProgramMemory(64, 0, 8, 0))
        >>> outcome.fits(72), outcome.fits(71)
        (True, False)

        Args:
          hbm: bytes of memory of one device.
        """
        return self.bytes_per_device is not None and self.bytes_per_device <= hbm

    def why_not(self, hbm: float) -> str:
        """Why it does not fit, in words; ``""`` if it does.

        >>> import meshscope
        >>> memory = meshscope.ProgramMemory(16_000_000_000, 0, 4_000_000_000, 0)
        >>> meshscope.Outcome("DP", {}, {"data": 8}, memory).why_not(18e9)
        '2.00 GB too many: 16.0 GB of state and batch, 4.00 GB of temporaries'

        Args:
          hbm: bytes of memory of one device.
        """
        if self.error is not None:
            return self.error
        if self.memory is None or self.fits(hbm):
            return ""
        state = self.memory.arguments + self.memory.outputs - self.memory.aliased
        if state > hbm:
            return f"state and batch alone take {digits(state / 1e9)} GB"
        over = (self.memory.bytes_per_device - hbm) / 1e9
        return (
            f"{digits(over)} GB too many: {digits(state / 1e9)} GB of state and batch, "
            f"{digits(self.memory.temporaries / 1e9)} GB of temporaries"
        )

    def compute_seconds(self, chip: Chip) -> float | None:
        """Time of the matrix products at the chip's peak, or None if they are not known.

        >>> import meshscope
        >>> outcome = meshscope.Outcome("DP", {}, {"data": 8}, flops=989e12)
        >>> outcome.compute_seconds(meshscope.CHIPS["h100"])
        1.0

        Args:
          chip: whose peak it is.
        """
        return None if self.flops is None else self.flops / chip.flops

    def wire(self, as_compiled: bool) -> dict[tuple[str, tuple[str, ...]], float] | None:
        """Bytes that one device sends: of the closed form, unless there is none or ``as_compiled``.

        >>> import meshscope
        >>> sent = {("all-reduce", ("data",)): 7.0}
        >>> meshscope.Outcome("DP", {}, {"data": 8}, counted=sent).wire(as_compiled=False)
        {('all-reduce', ('data',)): 7.0}

        Args:
          as_compiled: whether to take what the compiler made in place of the closed form.
        """
        return self.counted if as_compiled or self.expected is None else self.expected

    def wire_seconds(self, chip: Chip, as_compiled: bool) -> tuple[float, float] | None:
        """Time to send, in two parts: along axes of the batch, and along all others; or None.

        What moves along axes of the batch is weights and gradients, which can move while
        something else is computed. The rest is activations, sums that the next matrix product
        waits for.

        >>> import meshscope
        >>> sent = {("all-reduce", ("data",)): 450e9, ("all-reduce", ("model",)): 900e9}
        >>> mesh = {"data": 2, "model": 4}
        >>> outcome = meshscope.Outcome("DP", {}, mesh, counted=sent, batch=("data",))
        >>> outcome.wire_seconds(meshscope.CHIPS["h100"], as_compiled=True)
        (1.0, 2.0)

        Args:
          chip: whose links they are.
          as_compiled: as in ``wire``.
        """
        sent = self.wire(as_compiled)
        if sent is None:
            return None
        beside = waiting = 0.0
        for (_, axes), size in sent.items():
            if not axes or not size:
                continue
            seconds = size / chip.bandwidth(self.mesh, axes)
            if set(axes) <= set(self.batch):
                beside += seconds
            else:
                waiting += seconds
        return beside, waiting

    def step_seconds(self, chip: Chip, as_compiled: bool) -> float | None:
        """An estimate to rank by: at the published peaks, and with all that can overlap doing so.

        It is the longer of computing and of moving weights and gradients, plus the time to
        exchange activations. No program reaches it.

        >>> import meshscope
        >>> sent = {("all-gather", ("data",)): 225e9}
        >>> outcome = meshscope.Outcome("FSDP", {}, {"data": 8}, flops=989e12, counted=sent,
        ...                             batch=("data",))
        >>> outcome.step_seconds(meshscope.CHIPS["h100"], as_compiled=True)
        1.0

        Args:
          chip: whose peaks they are.
          as_compiled: as in ``wire``.
        """
        compute, wire = self.compute_seconds(chip), self.wire_seconds(chip, as_compiled)
        if compute is None or wire is None:
            return None
        beside, waiting = wire
        return max(compute, beside) + waiting


def digits(value: float) -> str:
    """Three digits, or all before the point: 1,234, 12.3, 0.00123."""
    if not value:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def outcome_of(record: Record) -> Outcome:
    """A record of a candidate, as ``measure`` makes it or as a file holds it."""
    mesh = record["mesh"]
    devices = math.prod(mesh.values())
    known: dict[str, Any] = {}
    if record.get("memory") and not record.get("error"):
        known["memory"] = ProgramMemory(**record["memory"])
        share = record["traced_flops"] / devices
        counted = record.get("flops")
        # A compiler that hides products in calls of libraries leaves too few to count.
        readable = counted is not None and counted >= 0.9 * share
        known["flops"] = counted if readable else share
        known["repeats"] = counted / share if readable and share else None
        sent = {(kind, tuple(axes)): wire for kind, axes, _, wire in record["sent"]}
        complete = not record["unread"] and None not in sent.values()
        known["counted"] = sent if complete else None
    if record.get("expected") is not None:
        known["expected"] = expected = {}
        for kind, axes, size in record["expected"]:
            wire = sent_by_one(kind, math.prod(mesh[a] for a in axes), size)
            expected[kind, tuple(axes)] = size if wire is None else wire  # None: data decides
    batch = as_tuple(tuple(record.get("batch") or ()))
    return Outcome(
        table=record["table"],
        rules={name: tuple(a) if isinstance(a, list) else a for name, a in record["rules"].items()},
        mesh=mesh,
        batch=batch,
        seconds=record.get("seconds", 0),
        error=record.get("error"),
        **known,
    )
