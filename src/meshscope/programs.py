"""What moves: the collectives of a compiled program, by the reader's mesh axes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from . import hlo
from .tables import Report, number, shape_text, words

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "send",
    "recv",
)
UNMATCHED = ("?",)
_MENTION = re.compile(  # an opcode that is, or looks like, one of these
    r"(?<![\w%.\-])((ragged-)?all-[\w\-]+|reduce-scatter[\w\-]*|collective-[\w\-]+|"
    r"(send|recv)[\w\-]*)\("
)


class UnparsedCollective(UserWarning):
    """A line mentions a collective but could not be read, so it is not counted."""


@dataclass(frozen=True)
class Collective:
    """One value that groups of devices exchange. Bytes are for **one** execution.

    kind           one of `KINDS`; a start and its end (async) are one row.
    axes           the mesh axes along which devices exchange, in the mesh's order. Axes
                   of size 1 are never named. `()`: every group is one device, so nothing
                   moves. `("?",)`: no set of axes gives these groups; `within` is the
                   smallest set that contains them.
    dtype, shape   of the value that `payload_bytes` measures. An all-to-all written as n
                   separate pieces has the shape (n, *piece).
    payload_bytes  bytes of the whole value one device takes part in: all-gather, its
                   output; reduce-scatter, its input; any other, its operand. 0 where
                   every group is one device.
    executions     how often one run of the program executes it: the trip counts of the
                   loops around it, multiplied. None: not known (a `while` without a trip
                   count, a branch of a conditional).
    inside_loop    whether a loop surrounds it.
    op_name        JAX's name of the operation, or "".
    source_line    "file.py:12", "cell:12" in a notebook, or None.
    groups         positions in the mesh's device order; for a permute, send or recv
                   (source, target) pairs.
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

        In a group of n devices on a ring, with S = `payload_bytes`: all-gather and
        reduce-scatter (n - 1)/n S, all-reduce 2 (n - 1)/n S. A ring passes S/n bytes to
        the neighbour n - 1 times; an all-reduce is a reduce-scatter, then an all-gather.
        Sources: https://jax-ml.github.io/scaling-book/sharding/ and
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

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
    """Totals by key: a `dict`, made by `Collectives.by` and `diff`."""

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
        """Payload bytes of one key: `by("kind", "axes").bytes("all-gather", "model")`.

        0 if nothing has this key, None if unknown. Axes come as a name or a tuple in any
        order; those of size 1 are left out, as in the rows. A kind or an axis that does
        not exist raises ValueError: a typing error is not a zero.
        """
        return self._totals(key).payload_bytes

    def wire(self, *key: Any) -> float | None:
        """Wire bytes per device of one key, like `bytes`."""
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

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
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

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
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

    compiled   what `jax.jit(f).lower(...).compile()` returns, or the text of a compiled
               program (then `mesh` is needed).
    mesh       the mesh whose axes name the groups; by default the one in the program's
               input or output shardings.

    Groups are compared as sets of positions on the mesh. Axis names printed in a program
    are never used: the compiler makes up its own. `Collective` defines the bytes. A
    combined (tuple) collective gives one row per value. On TPU, a collective carried step
    by step through several fusions counts once, and an all-reduce fused with the slice
    after it ("all-reduce-scatter") is a reduce-scatter.

    What is listed is one backend's choice: CPU, for example, carries bfloat16 as float32.
    Communication inside custom calls, such as hand-written kernels, is not seen.

    Raises TypeError for what is not compiled; ValueError if there is no mesh or more than
    one, or if the mesh has other devices than the program. Warns `UnparsedCollective` of
    lines that mention a collective and cannot be read.
    """
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh= wants a jax.sharding.Mesh, not {type(mesh).__name__}")
    shardings: list[Sharding] = []
    text, backend = compiled, "a program given as text"
    if not isinstance(compiled, str):
        text = program_text(compiled)
        leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        shardings = [leaf for leaf in leaves if isinstance(leaf, Sharding)]
        device: Any = next((d for s in shardings for d in s.device_set), None)
        name = device.platform if device else jax.default_backend()
        backend = f"{name.upper()} program (jax {jax.__version__})"
    note = f"{backend[0].upper()}{backend[1:]}; another backend may choose differently"

    program = hlo.parse(text)
    found = list(_walk(program, program.entry, 1, False))
    seen = {instruction for instruction, *_ in found}
    for instruction in program.instructions():
        if _mentions(instruction) and instruction not in seen:
            _warn(instruction.line)
    for line in program.unread:
        if _MENTION.search(line):
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
    grid = _positions(mesh, next(iter(own.values()), None))
    header = re.search(r"\bnum_partitions=(\d+)", text.split("\n", 1)[0])
    if found and header and int(header[1]) != grid.size:
        raise ValueError(
            f"the program runs on {header[1]} devices and the mesh has {grid.size}: "
            "pass the mesh it was compiled for as mesh="
        )
    sources, repeated = hlo.Sources(text), _repeated(program)
    rows: list[Collective] = []
    for instruction, where, executions, inside in found:
        if instruction in repeated:
            continue
        kind, values, groups = _read(program, instruction, where, grid.size)
        if not values:
            _warn(instruction.line)
        axes, within = _match(groups, kind, mesh.axis_names, grid)
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

    a, b   compiled programs, or what `collectives` returned for them.

    Keys without a difference are left out: programs that move the same give an empty
    table. None where one side is unknown.
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


def program_text(compiled: Any) -> str:
    """The text of a compiled program; TypeError, saying what to do, for the rest."""
    if hasattr(compiled, "as_text") and hasattr(compiled, "memory_analysis"):
        return str(compiled.as_text())
    kind = type(compiled).__name__
    if hasattr(compiled, "as_text") or hasattr(compiled, "compile"):
        raise TypeError(f"this {kind} is not compiled: call .compile() first")
    if hasattr(compiled, "lower"):
        raise TypeError(f"this {kind} is not compiled: call .lower(...).compile() first")
    how = "jax.jit(f).lower(...).compile()"
    raise TypeError(f"expected a compiled program, not {kind}: pass {how}")


def _warn(line: str) -> None:
    message = f"not counted, cannot read: {line[:300]}"
    warnings.warn(message, UnparsedCollective, stacklevel=3)


def _mentions(instruction: hlo.Instruction) -> bool:
    """Is it, or may it be, a collective? Not its end, nor a transfer to the host."""
    return (
        bool(_MENTION.match(instruction.opcode + "("))
        and not instruction.opcode.endswith(("-done", "-update"))
        and "is_host_transfer=true" not in instruction.attributes
    )


# An instruction, its computation, executions, whether it is inside a loop.
_Found = tuple[hlo.Instruction, str, int | None, bool]


def _walk(
    program: hlo.Program, name: str, executions: int | None, inside: bool
) -> Iterator[_Found]:
    """The collectives from one computation on down, in the order of the text."""
    for instruction in program.computations.get(name, {}).values():
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            continue  # what they call was called by the start
        if _mentions(instruction):
            yield instruction, name, executions, inside
        called = instruction.called()
        for key, target in called:
            runs, loop = executions, inside
            if opcode == "while":
                trips, loop = _trips(program, name, instruction), True
                # A condition is evaluated once more than its body runs.
                more = int(key == "condition")
                runs = None if None in (runs, trips) else runs * (trips + more)  # type: ignore[operator]
            elif opcode == "conditional" and len(called) > 1:
                runs = None
            yield from _walk(program, target, runs, loop)


def _trips(program: hlo.Program, name: str, loop: hlo.Instruction) -> int | None:
    """How often a loop runs: as the compiler says, or as its counter shows."""
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(found[1])

    def source(computation: hlo.Computation, operand: str, opcode: str) -> hlo.Instruction:
        while computation[operand].opcode in ("copy", "bitcast"):
            (operand,) = computation[operand].operands
        if computation[operand].opcode != opcode:
            raise ValueError("not the loop of a counter")
        return computation[operand]

    def constant(computation: hlo.Computation, operand: str) -> int:
        return int(source(computation, operand, "constant").literal)

    def item(computation: hlo.Computation, operand: str) -> int:
        got = source(computation, operand, "get-tuple-element")
        return hlo.numbers("index", got.attributes)[0]  # type: ignore[index]

    called, here = dict(loop.called()), program.computations[name]
    try:
        condition = program.computations[called["condition"]]
        body = program.computations[called["body"]]
        # state[i] < limit, where state[i] begins at a constant and grows by another
        test, state = hlo.root(condition), hlo.root(body)
        i = item(condition, test.operands[0])
        update = source(body, state.operands[i], "add")
        start = constant(here, here[loop.operands[0]].operands[i])
        limit = constant(condition, test.operands[1])
        step = constant(body, update.operands[1])
        counts = item(body, update.operands[0]) == i and step > 0
        if counts and test.opcode == "compare" and "direction=LT" in test.attributes:
            return max(0, -(-(limit - start) // step))
    except (KeyError, IndexError, TypeError, ValueError, StopIteration):
        pass
    return None


def _repeated(program: hlo.Program) -> set[hlo.Instruction]:
    """Collectives that carry on, inside a fusion, what another fusion has started.

    Compiled for TPU, the fusions of one start, steps and end share a channel.
    """

    def channel(i: hlo.Instruction) -> str:
        return f"{i.opcode} {hlo.numbers('channel_id', i.attributes)}"

    mark = 'custom_call_target="AsyncCollectiveStart"'
    every = program.computations
    starts = {n for n, c in every.items() if any(mark in i.line for i in c.values())}
    begun = {channel(i) for n in starts for i in every[n].values() if _mentions(i)}
    fusions = (i for i in program.instructions() if i.opcode == "fusion")
    fused = {name for i in fusions for _, name in i.called()} - starts
    return {i for n in fused for i in every[n].values() if channel(i) in begun}


def _read(
    program: hlo.Program, instruction: hlo.Instruction, where: str, devices: int
) -> tuple[str, list[hlo.Array], hlo.Groups | None]:
    """Kind, values (none: cannot be read) and groups of one collective."""
    kind, here = instruction.opcode.removesuffix("-start"), program.computations[where]
    if kind in ("collective-permute", "send", "recv"):
        groups = hlo.pairs(instruction.line)
    else:
        groups = hlo.groups(instruction.attributes, devices)
    if kind not in KINDS or (groups is None and kind not in ("send", "recv")):
        return kind, [], groups
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    if any(name not in here for name in instruction.operands):
        return kind, [], groups
    values = [array for name in instruction.operands for array in here[name].arrays]
    if kind == "all-gather":
        (axis,) = hlo.numbers("dimensions", instruction.attributes) or [0]
        n = max(map(len, groups or ()))
        values = [(e, (*s[:axis], n * s[axis], *s[axis + 1 :])) for e, s in values]
        if any(value not in instruction.arrays for value in values):
            return kind, [], groups
    elif kind == "all-to-all" and len(values) > 1:
        values = [(values[0][0], (len(values), *values[0][1]))]
    elif kind == "recv":
        values = list(instruction.arrays[:1])
    elif kind in ("send", "ragged-all-to-all"):
        values = values[:1]
    return kind, values, groups


def _positions(mesh: Mesh | AbstractMesh, own: Mesh | None) -> np.ndarray:
    """The program's position of every device of a mesh, in the mesh's shape.

    A program numbers devices in the order of its own mesh, whatever their ids are.
    """
    shape = tuple(mesh.shape.values())
    if not isinstance(mesh, Mesh) or own is None:
        return np.arange(math.prod(shape)).reshape(shape)
    order = {device: i for i, device in enumerate(own.devices.flat)}
    if set(order) != set(mesh.devices.flat):
        raise ValueError("the mesh and the program have different devices")
    return np.array([order[d] for d in mesh.devices.flat]).reshape(shape)


def _match(
    groups: hlo.Groups | None, kind: str, names: Sequence[str], grid: np.ndarray
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes, within) of groups of positions; see `Collective`."""
    if groups is None:
        return UNMATCHED, tuple(names)
    place = {int(position): where for where, position in np.ndenumerate(grid)}
    every = range(grid.ndim)
    used = [d for d in every if any(len({place[p][d] for p in g}) > 1 for g in groups)]
    within = tuple(names[d] for d in used)
    if kind in ("collective-permute", "send", "recv"):
        return within, within
    lines = grid.transpose([d for d in every if d not in used] + used)
    lines = lines.reshape(-1, math.prod(grid.shape[d] for d in used))
    same = {frozenset(g) for g in groups} == {frozenset(g) for g in lines.tolist()}
    return (within if same else UNMATCHED), within
