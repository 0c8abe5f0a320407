"""What moves: the collectives of a compiled program, by the reader's mesh axes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from . import hlo, programs
from .programs import KINDS, UNMATCHED
from .tables import Report, Rows, number, shape_text, words


class UnparsedCollective(UserWarning):
    """A line mentions a collective but could not be read, so it is not counted."""


@dataclass(frozen=True)
class Collective:
    """One value that groups of devices exchange. Bytes are those of a single execution.

    Attributes:
      kind: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``,
        ``"collective-permute"``, ``"collective-broadcast"``, ``"ragged-all-to-all"``,
        ``"send"`` or ``"recv"``. A start and its end (async) are one row.
      axes: the mesh axes along which devices exchange, in the mesh's order. Axes of size
        1 are never named. ``()``: every group is one device, so nothing moves.
        ``("?",)``: no set of axes gives these groups.
      dtype: JAX's name of the element type.
      shape: of the value that ``payload_bytes`` measures. An all-to-all written as
        separate pieces has their number before the shape of one.
      payload_bytes: bytes of the whole value that one device takes part in: all-gather,
        its output; reduce-scatter, its input; any other, its operand. 0 where every
        group is one device.
      executions: how often one run of the program executes it: the trip counts of the
        loops around it, multiplied. None if not known: in a ``while`` without a trip
        count, or in a branch of a conditional.
      inside_loop: whether a loop surrounds it.
      op_name: JAX's name of the operation, or ``""``.
      source_line: ``"file.py:12"``, in a notebook ``"cell:12"``, or None.
      within: the smallest set of axes that contains every group.
      groups: positions in the mesh's device order; (source, target) pairs for a permute,
        send or recv.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    executions: int | None
    inside_loop: bool
    op_name: str
    source_line: str | None
    within: tuple[str, ...]
    groups: hlo.Groups

    @property
    def group_size(self) -> int:
        """Devices in one group; 2 for a permute, send or recv."""
        return max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float | None:
        """Bytes that one device sends in one execution.

        With n devices in a group on a ring, and S the payload: all-gather and
        reduce-scatter (n - 1)/n S, all-reduce 2 (n - 1)/n S. A ring passes S/n bytes to
        the neighbour n - 1 times; an all-reduce is a reduce-scatter, then an all-gather
        (https://jax-ml.github.io/scaling-book/sharding/,
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

        The rest is the least that the busiest sender sends on any network: all-to-all
        (n - 1)/n S, as it keeps its own piece; collective-permute, collective-broadcast
        and send S; recv 0. None for ragged-all-to-all, whose sizes are data.
        """
        n, size = self.group_size, self.payload_bytes
        if self.kind == "ragged-all-to-all":
            return None
        if self.kind == "recv":
            return 0
        if self.kind in ("collective-permute", "collective-broadcast", "send"):
            return size
        sent = (2 if self.kind == "all-reduce" else 1) * (n - 1) * size
        return sent / n if sent % n else sent // n


class Totals(NamedTuple):
    """Sums over executions. None: the executions of some row are not known."""

    count: int | None  # type: ignore[assignment]
    payload_bytes: int | None
    wire_bytes: float | None


class Table(Report, dict[Any, Totals]):
    """Totals by key: a ``dict``, made by ``Collectives.by`` and ``diff``."""

    def __init__(
        self,
        totals: dict[Any, Totals],
        fields: Sequence[str],
        of: Collectives,
        what: str,
    ) -> None:
        super().__init__(totals)
        self._fields, self._of, self._what = tuple(fields), of, what

    def bytes(self, *key: Any) -> int | None:
        """Payload bytes of one key, such as ``("all-gather", "model")`` by kind and axes.

        0 if nothing has this key, None if unknown. Axes come as a name or a tuple in any
        order; those of size 1 are left out, as in the rows. A kind or an axis that does
        not exist raises ValueError: a typing error is not a zero.
        """
        return self._totals(key).payload_bytes

    def wire(self, *key: Any) -> float | None:
        """Wire bytes per device of one key, like ``bytes``."""
        return self._totals(key).wire_bytes

    def _totals(self, key: tuple[Any, ...]) -> Totals:
        if len(key) != len(self._fields):
            raise ValueError(f"give one value for each of {', '.join(self._fields)}")
        values = list(key)
        for i, field in enumerate(self._fields):
            if field == "kind" and key[i] not in KINDS:
                raise ValueError(f"no kind {key[i]!r}, there are {', '.join(KINDS)}")
            if field == "axes" and (sizes := self._of.axis_sizes):
                axes = (key[i],) if isinstance(key[i], str) else tuple(key[i])
                if unknown := set(axes) - set(sizes) - set(UNMATCHED):
                    raise ValueError(f"no axis {unknown} on this mesh: {tuple(sizes)}")
                values[i] = tuple(a for a in sizes if a in axes and sizes[a] > 1)
                if "?" in axes:
                    values[i] = UNMATCHED
                elif axes and not values[i]:
                    return Totals(0, 0, 0)
        return self.get(values[0] if len(values) == 1 else tuple(values), Totals(0, 0, 0))

    def _table(self) -> Rows:
        rows = [
            [words(k) for k in (key if len(self._fields) > 1 else (key,))]
            + [number(value) for value in totals]
            for key, totals in self.items()
        ]
        head = (*self._fields, "count", "payload bytes", "wire bytes per device")
        return f"{self._what}. {self._of.note}", head, rows


class Collectives(Report, Sequence[Collective]):
    """The collectives of one program, in the order of its text."""

    def __init__(self, rows: Sequence[Collective], axis_sizes: dict[str, int], note: str) -> None:
        self._rows, self.axis_sizes, self.note = tuple(rows), axis_sizes, note

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Collectives: ...
    def __getitem__(self, index: int | slice) -> Collective | Collectives:
        if isinstance(index, int):
            return self._rows[index]
        return Collectives(self._rows[index], self.axis_sizes, self.note)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def kinds(self) -> set[str]:
        """The kinds that occur."""
        return {row.kind for row in self}

    @property
    def total_payload_bytes(self) -> int | None:
        """Payload of all rows times their executions; None if some are unknown."""
        return _total(self).payload_bytes

    def by(self, *fields: str) -> Table:
        """Sum the rows that agree in these fields, executions multiplied in.

        Keys are tuples, or plain values for one field. How many rows there are is the
        compiler's choice (it merges and splits); bytes per kind and axes are steadier.
        """
        if not fields:
            raise ValueError('name a field, for example by("kind", "axes")')
        rows: dict[Any, list[Collective]] = {}
        for row in self:
            key = tuple(getattr(row, field) for field in fields)
            rows.setdefault(key if len(fields) > 1 else key[0], []).append(row)
        totals = {key: _total(group) for key, group in rows.items()}
        return Table(totals, fields, self, self._what())

    def _what(self) -> str:
        return f"{len(self) or 'No'} collective{'s' * (len(self) != 1)}"

    def _table(self) -> Rows:
        head = ["kind", "axes", "dtype", "shape", "payload bytes"]
        head += ["wire bytes per device", "executions", "in loop", "source"]
        rows = [
            [
                row.kind,
                words(row.axes) + f" within {words(row.within)}" * (row.axes == UNMATCHED),
                row.dtype,
                shape_text(row.shape),
                number(row.payload_bytes),
                number(row.wire_bytes),
                number(row.executions),
                "yes" if row.inside_loop else "no",
                row.source_line or "-",
            ]
            for row in self
        ]
        return f"{self._what()}. {self.note}", head, rows


def _total(rows: Sequence[Collective]) -> Totals:
    def add(values: list[Any]) -> Any:
        return None if None in values else sum(values)

    def times(row: Collective, value: float | None) -> Any:
        return None if None in (value, row.executions) else value * row.executions  # type: ignore[operator]

    return Totals(
        add([row.executions for row in rows]),
        add([times(row, row.payload_bytes) for row in rows]),
        add([times(row, row.wire_bytes) for row in rows]),
    )


def collectives(compiled: Any, mesh: Mesh | AbstractMesh | None = None) -> Collectives:
    """List what a compiled program makes devices say to each other.

    Groups are compared as sets of positions on the mesh. Axis names printed in a program
    are never used: the compiler makes up its own. A combined (tuple) collective gives
    one row per value. On TPU, a collective carried step by step through several fusions
    counts once, and an all-reduce fused with the slice that follows it is a
    reduce-scatter.

    What is listed is one backend's choice: CPU, for example, carries bfloat16 as float32.
    Communication inside custom calls, such as hand-written kernels, is not seen.

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, or the text of a compiled
        program (then ``mesh`` is needed).
      mesh: the mesh whose axes name the groups; by default the one in the program's input
        or output shardings.

    Raises:
      TypeError: what is not compiled, with what to call.
      ValueError: no mesh, or more than one; a mesh of other devices than the program's.

    Warns:
      UnparsedCollective: a line that mentions a collective and cannot be read.
    """
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh= wants a jax.sharding.Mesh, not {type(mesh).__name__}")
    shardings: list[Sharding] = []
    text, backend = compiled, "a program given as text"
    if not isinstance(compiled, str):
        text = programs.program_text(compiled)
        leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        shardings = [leaf for leaf in leaves if isinstance(leaf, Sharding)]
        device: Any = next((d for s in shardings for d in s.device_set), None)
        name = device.platform if device else jax.default_backend()
        backend = f"{name.upper()} program (jax {jax.__version__})"
    note = f"{backend[0].upper()}{backend[1:]}; another backend may choose differently"

    program = hlo.parse(text)
    found, lost = programs.executed(program)
    for line in lost:
        _warn(line)
    meshes: list[Any] = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    own = {(m.axis_names, m.devices.shape, tuple(m.devices.flat)): m for m in meshes}
    if mesh is None and len(own) == 1:
        (mesh,) = own.values()
    if mesh is None:
        if found:
            raise ValueError(
                f"the inputs and outputs of this program name {len(own) or 'no'} "
                f"mesh{'es' * (len(own) > 1)}: pass the one to use as mesh="
            )
        return Collectives([], {}, note)
    grid = programs.positions(mesh, next(iter(own.values()), None))
    header = re.search(r"\bnum_partitions=(\d+)", text.split("\n", 1)[0])
    if found and header and int(header[1]) != grid.size:
        raise ValueError(
            f"the program runs on {header[1]} devices and the mesh has {grid.size}: "
            "pass the mesh it was compiled for as mesh="
        )
    sources = hlo.Sources(text)
    rows: list[Collective] = []
    for instruction, where, executions, inside in found:
        kind, values, groups = programs.read(program, instruction, where, grid.size)
        if not values:
            _warn(instruction.line)
            continue
        axes, within = programs.match(groups, kind, mesh.axis_names, grid)
        op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.line)
        rows += [
            Collective(
                kind=kind,
                axes=axes,
                dtype=hlo.dtype(value[0]),
                shape=value[1],
                payload_bytes=hlo.nbytes(value) if axes else 0,
                executions=executions,
                inside_loop=inside,
                op_name=op_name[1] if op_name else "",
                source_line=sources.find(instruction.line),
                within=within,
                groups=groups or (),
            )
            for value in values
        ]
    return Collectives(rows, dict(mesh.shape), note)


def diff(a: Any, b: Any) -> Table:
    """What b moves more (negative: less) than a, by kind and axes.

    Keys without a difference are left out: programs that move the same give an empty
    table, unless they move it an unknown number of times. None stands where one side is
    unknown.

    Args:
      a: a compiled program, or what ``collectives`` returned for it.
      b: likewise.
    """
    one, two = (x if isinstance(x, Collectives) else collectives(x) for x in (a, b))
    old, new = one.by("kind", "axes"), two.by("kind", "axes")
    changes: dict[Any, Totals] = {}
    for key in dict.fromkeys([*old, *new]):
        before, after = (t.get(key, Totals(0, 0, 0)) for t in (old, new))
        both: Any = zip(before, after, strict=True)
        change = Totals(*(None if None in pair else pair[1] - pair[0] for pair in both))
        if any(value != 0 for value in change):
            changes[key] = change
    what = "Second program minus first" if changes else "No difference"
    return Table(changes, ("kind", "axes"), two, what)


def _warn(line: str) -> None:
    message = f"not counted, cannot read: {line[:300]}"
    warnings.warn(message, UnparsedCollective, stacklevel=3)
