"""Which mesh and which table: every candidate compiled from shapes, and ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import jax
from jax.sharding import Mesh

from ._messages import Said
from ._plan_candidates import Rules, axes_of, candidates
from ._plan_chips import CHIPS, Chip
from ._plan_compilers import COMPILERS, devices_for
from ._plan_measure import measure
from ._plan_outcome import Outcome, digits, outcome_of
from ._plan_picture import picture
from ._plan_results import Results
from ._show import Drawing
from ._tables import Cell, Content, Report, heads, number, numbers

APART = 0.01  # of what a device sends: what differs by more is shown
FIRST = 3  # of those that fit, whose differences are shown


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """Every candidate: first those that fit, the fastest first; then the others, by memory.

    It shows itself as a table of those that fit, a table of what the first three of their
    compiled programs send otherwise than the closed form, and a table of why the rest does not
    fit. A factor after *compute ms* says how often devices repeat each other's operations, and
    one in the last column how many times the closed form the compiled program sends.

    >>> import meshscope
    >>> memory = meshscope.ProgramMemory(64, 0, 8, 0)
    >>> outcomes = meshscope.Outcome("DP", {}, {"data": 8}, memory, flops=1e9),
    >>> plan = meshscope.Plan(outcomes, meshscope.CHIPS["h100"], 80e9, "cpu", 8)
    >>> [outcome.table for outcome in plan.fitting]
    ['DP']

    Attributes:
      outcomes: all of them, ranked.
      chip: whose published numbers priced them.
      hbm: bytes that one device may take.
      compiler: what compiled them: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
      devices: how many each has.
    """

    outcomes: Sequence[Outcome]
    chip: Chip
    hbm: float
    compiler: str
    devices: int

    @property
    def fitting(self) -> list[Outcome]:
        """Those that fit, the fastest first.

        >>> import meshscope
        >>> meshscope.Plan((), meshscope.CHIPS["h100"], 80e9, "cpu", 8).fitting
        []
        """
        return [outcome for outcome in self.outcomes if outcome.fits(self.hbm)]

    @property
    def as_compiled(self) -> bool:
        """Whether bytes are priced as compiled for the chip itself, and not for a CPU in its place.

        >>> import meshscope
        >>> meshscope.Plan((), meshscope.CHIPS["v5e"], 16e9, "tpu", 8).as_compiled
        True
        """
        return self.compiler != "cpu"

    def step_seconds(self, outcome: Outcome) -> float | None:
        """The estimate that an outcome is ranked by.

        >>> import meshscope
        >>> outcome = meshscope.Outcome("DP", {}, {"data": 8}, flops=989e12, counted={})
        >>> plan = meshscope.Plan((outcome,), meshscope.CHIPS["h100"], 80e9, "cpu", 8)
        >>> plan.step_seconds(outcome)
        1.0

        Args:
          outcome: one of them.
        """
        return outcome.step_seconds(self.chip, self.as_compiled)

    @property
    def drawing(self) -> Drawing:
        """A picture of memory against time with one mark for each candidate that has a program.

        >>> import meshscope
        >>> memory = meshscope.ProgramMemory(64, 0, 8, 0)
        >>> outcome = meshscope.Outcome("DP", {}, {"data": 8}, memory, flops=1e9, counted={})
        >>> plan = meshscope.Plan((outcome,), meshscope.CHIPS["h100"], 80e9, "cpu", 8)
        >>> plan.drawing.svg[:4]
        '<svg'
        """
        marks = [
            (number, outcome.table, outcome.where, outcome.bytes_per_device, seconds)
            for number, outcome in enumerate(self.outcomes, 1)
            if outcome.bytes_per_device and (seconds := self.step_seconds(outcome))
        ]
        return picture(marks, self.hbm, self.chip.name, repr(self))

    def differences(self) -> list[tuple[int, str, tuple[str, ...], float, float]]:
        """What compiled programs send otherwise than the closed form, of those that fit.

        >>> import meshscope
        >>> memory, key = meshscope.ProgramMemory(64, 0, 8, 0), ("all-reduce", ("data",))
        >>> outcome = meshscope.Outcome("DP", {}, {"data": 8}, memory, 1e9, 1, {key: 7}, {key: 14})
        >>> meshscope.Plan((outcome,), meshscope.CHIPS["h100"], 80e9, "cpu", 8).differences()
        [(1, 'all-reduce', ('data',), 7, 14)]

        Returns:
          (number in the table, kind, axes, bytes in closed form, bytes as compiled): of one
          device. Differences of less than 1 % of all that the device sends are left out.
        """
        found = []
        for n, outcome in enumerate(self.fitting, 1):
            expected, counted = outcome.expected, outcome.counted
            if expected is None or counted is None:
                continue
            least = APART * max(sum(expected.values()), sum(counted.values()))
            for kind, axes in {**expected, **counted}:
                pair = expected.get((kind, axes), 0), counted.get((kind, axes), 0)
                if abs(pair[0] - pair[1]) > least:
                    found.append((n, kind, axes, *pair))
        return found

    def ranked(self) -> Plan:
        """Return the plan with the fastest that fits first, and last what was not compiled.

        >>> import meshscope
        >>> chip, memory = meshscope.CHIPS["h100"], meshscope.ProgramMemory(64, 0, 8, 0)
        >>> slow = meshscope.Outcome("slow", {}, {"data": 8}, memory, flops=2e15, counted={})
        >>> fast = meshscope.Outcome("fast", {}, {"data": 8}, memory, flops=1e15, counted={})
        >>> plan = meshscope.Plan((slow, fast), chip, 80e9, "cpu", 8).ranked()
        >>> [outcome.table for outcome in plan.outcomes]
        ['fast', 'slow']
        """
        return replace(self, outcomes=tuple(sorted(self.outcomes, key=self._rank)))

    def _rank(self, outcome: Outcome) -> tuple[float, ...]:
        size = outcome.bytes_per_device
        if outcome.fits(self.hbm) and size is not None:
            seconds = self.step_seconds(outcome)
            # Of those that are equally fast, to three digits, the smallest comes first.
            return 0, math.inf if seconds is None else float(f"{seconds:.3g}"), size
        return (2, 0, 0) if size is None else (1, size, 0)

    def _contents(self) -> list[Content]:
        """What is shown, table by table."""
        found = [self._fits()]
        if rows := [
            [str(n), kind, ", ".join(axes), _gigabytes(pair[0]), _gigabytes(pair[1])]
            for n, kind, axes, *pair in self.differences()
            if n <= FIRST
        ]:
            title = Said(
                "Not as in closed form: what the {compiler} program sends",
                compiler=self.compiler.upper(),
            )
            columns = [*numbers("#"), *heads("kind", "axes"), *numbers("GB in closed form")]
            found.append(Content(title, [*columns, *numbers("GB as compiled")], rows))
        fitting = len(self.fitting)
        others = [
            [str(n), one.table, one.where, _gigabytes(one.bytes_per_device), one.why_not(self.hbm)]
            for n, one in enumerate(self.outcomes, 1)
            if n > fitting
        ]
        if others:
            columns = [*numbers("#"), *heads("table", "mesh"), *numbers("GB per device")]
            found.append(Content(Said("Does not fit"), [*columns, *heads("why")], others))
        return found

    def _fits(self) -> Content:
        values = {"memory": digits(self.hbm / 1e9), "devices": str(self.devices)}
        values["chip"] = self.chip.name
        message = "Fits into {memory} GB: {devices} devices, {chip}"
        if not self.fitting:
            title = Said("Nothing fits into {memory} GB: {devices} devices, {chip}", **values)
            return Content(title, [], [])
        title = Said("{title}\n{note}", title=Said(message, **values), note=self._what())
        columns = [*numbers("#"), *heads("table", "mesh")]
        columns += numbers("GB per device", "compute ms", "wire ms", "step ms")
        columns += numbers("GB sent", "as compiled")
        return Content(title, columns, [*map(self._row, self.fitting, range(1, 10**6))])

    def _what(self) -> Said:
        """Where the numbers come from."""
        if self.as_compiled:
            message = "Memory and bytes as compiled for {compiler}; {estimate}"
        elif all(outcome.expected is None for outcome in self.fitting):
            message = (
                "Memory and bytes as compiled for {compiler}, which another may not do; {estimate}"
            )
        else:
            message = "Memory as compiled for {compiler}, bytes in closed form; {estimate}"
        estimate = Said("times at published peaks, to rank by and not to expect")
        return Said(message, compiler=self.compiler.upper(), estimate=estimate)

    def _row(self, outcome: Outcome, n: int) -> list[Cell]:
        compute = outcome.compute_seconds(self.chip)
        wire = outcome.wire_seconds(self.chip, self.as_compiled)
        sent = outcome.wire(self.as_compiled)
        return [
            str(n),
            outcome.table,
            outcome.where,
            _gigabytes(outcome.bytes_per_device),
            _compute(compute, outcome.repeats),
            _milliseconds(None if wire is None else sum(wire)),
            _milliseconds(self.step_seconds(outcome)),
            _gigabytes(None if sent is None else sum(sent.values())),
            _times(outcome),
        ]

    def _content(self) -> Content:
        return self._fits()

    def __repr__(self) -> str:
        return "\n\n".join(repr(_Shown(content)) for content in self._contents())

    def _repr_html_(self) -> str:
        parts = [_Shown(content)._repr_html_() for content in self._contents()]
        return "".join([parts[0], self.drawing.svg, *parts[1:]])


@dataclass(frozen=True, repr=False)
class _Shown(Report):
    """One of several tables."""

    content: Content

    def _content(self) -> Content:
        return self.content


def _gigabytes(size: float | None) -> Cell:
    return number(None) if size is None else digits(size / 1e9)


def _milliseconds(seconds: float | None) -> Cell:
    return number(None) if seconds is None else digits(1e3 * seconds)


def _compute(seconds: float | None, repeats: float | None) -> Cell:
    """Time to compute, and how often devices do what another does too."""
    if seconds is None or repeats is None or repeats < 1 + 5 * APART:
        return _milliseconds(seconds)
    return f"{digits(1e3 * seconds)} ({repeats:.2f} ×)"


def _times(outcome: Outcome) -> Cell:
    """How many times the closed form the compiled program sends."""
    if outcome.expected is None:
        return "-"  # the column before it says what is sent as compiled
    if outcome.counted is None:
        return number(None)
    expected, counted = sum(outcome.expected.values()), sum(outcome.counted.values())
    return f"{counted / expected:.2f} ×" if expected else _gigabytes(counted)


def plan(
    step: Callable[[Mesh, dict[str, Any]], Any],
    tables: Mapping[str, Rules],
    devices: int | None = None,
    *,
    axes: Sequence[str] | None = None,
    chip: str | Chip = "h100",
    hbm: float | None = None,
    compiler: str = "cpu",
    explicit: bool = False,
    results: str | PathLike[str] | None = None,
    progress: Callable[[int, int, Outcome], None] | None = None,
) -> Plan:
    """Compile a training step for every mesh and table from shapes, and rank what fits.

    A table has rules: which mesh axes shard which logical axis. Each is tried with every mesh
    of ``devices`` devices on which it says something that no table before it says. Nothing is
    allocated, and nothing runs.

    What fits is decided by the memory of the compiled step. Ranked is what fits, by
    ``Outcome.step_seconds``. Bytes are those of the closed form (``Step.expected``) where a CPU
    compiled in place of the chip, because its choices are not the chip's: it sends bfloat16 as
    float32, and sums gradients whole where others scatter them. Compiled for the chip itself,
    ``compiler="tpu"`` or ``"gpu"``, they are those of the program. Where both differ, the
    table says so.

    >>> import jax, meshscope
    >>> def step(mesh, rules):
    ...     def shape(*names):
    ...         spec = jax.P(*(rules.get(name) for name in names))
    ...         sharding = jax.NamedSharding(mesh, spec)
    ...         return jax.ShapeDtypeStruct((512, 512), "float32", sharding=sharding)
    ...     def train_step(w, x):
    ...         return w - 0.1 * jax.grad(lambda w: (x @ w).mean())(w)
    ...     w, x = shape("embed", None), shape("batch", None)
    ...     traced = jax.jit(train_step, donate_argnums=0, out_shardings=w.sharding).trace(w, x)
    ...     return meshscope.Step(traced, weights=w, batch=rules.get("batch"))
    >>> tables = {"DP": {"batch": "data"}, "FSDP": {"batch": "data", "embed": "data"}}
    >>> plan = meshscope.plan(step, tables, devices=8)
    >>> [(outcome.table, outcome.where) for outcome in plan.fitting]
    [('DP', 'data 8'), ('FSDP', 'data 8')]

    Args:
      step: takes a mesh and the rules of a table, of which axes of size 1 are gone, and
        returns ``jax.jit(train_step, ...).trace(*shapes)``, or a ``Step`` of that, which adds
        the closed form. It is called while the mesh is set.
      tables: rules by the name of their table: ``{"FSDP": {"batch": "data", "embed": "data"}}``.
      devices: how many; by default those of this process.
      axes: the mesh's axes, the last of which numbers devices one by one, so that on GPUs it
        stays inside a node; by default in the order in which the tables name them.
      chip: the key of one of ``CHIPS``, or a ``Chip``.
      hbm: bytes that one device may take; by default all that the chip has.
      compiler: ``"cpu"``, or ``"tpu"`` or ``"gpu"`` where these compilers are installed.
      explicit: whether the mesh's axes are Explicit; they are Auto by default.
      results: a file to keep results in, one line of JSON for each candidate. A run that was
        interrupted goes on from there. A result is used again only for the same program.
      progress: called after each candidate with how many are done, how many there are, and
        the outcome.

    Raises:
      ValueError: a chip or a compiler that there is not, more devices than its links join, no
        candidate at all, a file of results that is none.
      RuntimeError: a compiler that is not installed, or too few simulated devices.
    """
    if compiler not in COMPILERS:
        raise ValueError(f"no compiler {compiler!r}, there are {', '.join(COMPILERS)}")
    name = chip if isinstance(chip, str) else next((k for k, v in CHIPS.items() if v == chip), "")
    if isinstance(chip, str):
        if chip not in CHIPS:
            raise ValueError(f"no chip {chip!r}, there are {', '.join(CHIPS)}")
        chip = CHIPS[chip]
    count = jax.device_count() if devices is None else devices
    if count < 1:
        raise ValueError(f"{count} devices: give at least one")
    if count > chip.most:
        raise ValueError(
            f"{count} devices are more than the {chip.most} {chip.name} that fast links join: plan "
            "for one slice, and add data parallelism between slices"
        )
    memory = chip.hbm if hbm is None else hbm
    if memory <= 0:
        raise ValueError(f"{memory:g} bytes of memory: give what one device has, as 80e9")
    axes = axes_of(tables) if axes is None else tuple(axes)
    if missing := [axis for axis in axes_of(tables) if axis not in axes]:
        raise ValueError(f"a table names the axis {missing[0]!r}, and axes are {', '.join(axes)}")
    found = candidates(tables, count, axes)
    if not found:
        raise ValueError(
            f"no table shards anything over {count} devices: give tables with mesh axes, as "
            '{"FSDP": {"batch": "data", "embed": "data"}}'
        )
    kept = Results(results)
    available = devices_for(compiler, name, count)
    outcomes = []
    for candidate in found:
        record = measure(step, candidate, available, compiler, explicit, kept)
        outcomes.append(outcome_of(record))
        if progress is not None:
            progress(len(outcomes), len(found), outcomes[-1])
    return Plan(tuple(outcomes), chip, memory, compiler, count).ranked()
