"""What moves: the collectives of a compiled program, by the reader's mesh axes."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from . import hlo
from .tables import Report, number

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all", "send", "recv",
)  # fmt: skip
UNMATCHED = ("?",)
_KNOWN = {kind + end for kind in KINDS for end in ("", "-start", "-update", "-done")}
_SUSPECT = re.compile(
    r"(?<![\w%.\-])((?:ragged-)?all-(?:gather|reduce|to-all)|reduce-scatter|collective-)[\w\-]*\("
)


class UnparsedCollective(UserWarning):
    """A line of a program mentions a collective but could not be read, so it is not counted."""


@dataclass(frozen=True)
class Collective:
    """One value that a group of devices exchanges. Bytes are for **one** execution.

    kind           "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
                   "collective-permute", "collective-broadcast", "ragged-all-to-all",
                   "send" or "recv". A started and finished (async) pair is one row.
    axes           the mesh axes whose devices talk to each other, in the mesh's order.
                   Axes of size 1 are never named. `()`: every group is one device, nothing
                   moves. `("?",)`: no set of axes gives these groups; see `within`, `groups`.
    within         the smallest set of axes that contains every group (equals `axes` unless
                   that is `("?",)`).
    groups         sets of positions in the mesh's device order (pairs for a permute).
    dtype, shape   of the value that `payload_bytes` measures. An all-to-all given as n
                   separate pieces has the shape (n, *piece).
    payload_bytes  bytes of the whole value one device takes part in: all-gather, the gathered
                   output; reduce-scatter, the input before scattering; any other, the operand.
                   0 where every group is one device.
    executions     how often one run of the program executes it: trip counts of the loops
                   around it, multiplied. None: not known (a `while` without a trip count, or a
                   branch of a conditional).
    inside_loop    whether a loop surrounds it.
    op_name        JAX's name of the operation, or "".
    source_line    "file.py:12", "cell:12" in a notebook, or None.
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
    groups: tuple[tuple[int, ...], ...]

    @property
    def group_size(self) -> int:
        """Devices in one group n; for a permute, send or recv the group is a pair."""
        return max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float | None:
        """Bytes that one device sends in one execution.

        In a group of n devices on a ring, with S = `payload_bytes`:
        all-gather and reduce-scatter (n - 1)/n * S, all-reduce 2 (n - 1)/n * S. Each step
        of the ring passes S/n bytes to the neighbour, n - 1 times; an all-reduce is a
        reduce-scatter followed by an all-gather.
        Source: https://jax-ml.github.io/scaling-book/sharding/ (communication primitives) and
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (bus bandwidth).

        The rest is the least that the device which sends most has to send, whatever the
        network: all-to-all (n - 1)/n * S (it keeps its own piece), collective-permute, send
        and collective-broadcast S, recv 0. None for ragged-all-to-all, whose sizes are data.
        """
        n, size = self.group_size, self.payload_bytes
        if self.kind == "ragged-all-to-all":
            return None
        if self.kind == "recv" or size == 0:
            return 0
        if self.kind in ("collective-permute", "send", "collective-broadcast"):
            return size
        sent = (2 if self.kind == "all-reduce" else 1) * (n - 1) * size
        return sent // n if sent % n == 0 else sent / n


class Totals(NamedTuple):
    """Sums over rows, each multiplied by its executions. None: some execution count is unknown."""

    count: int | None
    payload_bytes: int | None
    wire_bytes: float | None


def _times(a: float | None, b: float | None) -> Any:
    return None if a is None or b is None else a * b


def _sum(values: Sequence[float | None]) -> Any:
    return None if None in values else sum(v for v in values if v is not None)


class Table(Report, dict[Any, Totals]):
    """Totals by key, a `dict`. Made by `Collectives.by` and `diff`."""

    def __init__(
        self, items: dict[Any, Totals], fields: tuple[str, ...], sizes: dict[str, int], title: str
    ) -> None:
        super().__init__(items)
        self._fields, self._sizes, self._title = fields, sizes, title

    def _look_up(self, key: tuple[Any, ...]) -> Totals | None:
        if len(key) != len(self._fields):
            raise ValueError(f"this table is by {self._fields}: give one value for each")
        given = dict(zip(self._fields, key, strict=True))
        if given.get("kind", KINDS[0]) not in KINDS:
            raise ValueError(f"unknown kind {given['kind']!r}; the kinds are {', '.join(KINDS)}")
        if "axes" in given:
            axes = (given["axes"],) if isinstance(given["axes"], str) else tuple(given["axes"])
            unknown = [a for a in axes if self._sizes and a not in self._sizes and a != "?"]
            if unknown:
                raise ValueError(f"no mesh axis {unknown[0]!r}; the axes are {tuple(self._sizes)}")
            given["axes"] = (
                tuple(a for a, n in self._sizes.items() if n > 1 and a in axes)
                if self._sizes and axes != UNMATCHED
                else axes
            )
            if axes and not given["axes"]:
                return None
        values = tuple(given.values())
        return self.get(values[0] if len(values) == 1 else values)

    def bytes(self, *key: Any) -> int | None:
        """Payload bytes under a key, 0 if there is none: `table.bytes("all-gather", ("model",))`.

        Axes may come in any order; those of size 1 are left out, as in the rows. A kind or an
        axis that cannot exist raises ValueError, so a typing error is not a zero. None: unknown.
        """
        found = self._look_up(key)
        return 0 if found is None else found.payload_bytes

    def wire(self, *key: Any) -> float | None:
        """Wire bytes per device under a key, like `bytes`."""
        found = self._look_up(key)
        return 0 if found is None else found.wire_bytes

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        head = (*self._fields, "count", "payload bytes", "wire bytes per device")
        rows = [
            [*map(_cell, key if len(self._fields) > 1 else (key,)), *map(number, totals)]
            for key, totals in self.items()
        ]
        return self._title, head, rows


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if value else "-"
    return "-" if value is None else str(value)


class Collectives(Report, Sequence[Collective]):
    """The collectives of one program, in the order of its text."""

    def __init__(self, rows: Sequence[Collective], sizes: dict[str, int], program: str) -> None:
        self._rows, self._sizes = tuple(rows), sizes
        self.program = program

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Collectives: ...
    def __getitem__(self, index: int | slice) -> Collective | Collectives:
        if isinstance(index, slice):
            return Collectives(self._rows[index], self._sizes, self.program)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self._rows)

    @property
    def kinds(self) -> set[str]:
        """The kinds that occur."""
        return {row.kind for row in self._rows}

    @property
    def total_payload_bytes(self) -> int | None:
        """Payload of all rows times their executions; None if one of these is unknown."""
        return _sum([_times(row.payload_bytes, row.executions) for row in self._rows])

    def by(self, *fields: str) -> Table:
        """Sum rows that agree in these fields; `by("kind")` has plain keys, others tuples.

        Counts and bytes include executions. The number of rows is the compiler's choice
        (it may split, merge or repeat a collective); bytes per kind and axes are steadier.
        """
        if not fields:
            raise ValueError('name at least one field, for example by("kind", "axes")')
        keys: dict[Any, list[Collective]] = {}
        for row in self._rows:
            values = tuple(getattr(row, field) for field in fields)
            keys.setdefault(values[0] if len(fields) == 1 else values, []).append(row)
        totals = {
            key: Totals(
                _sum([row.executions for row in rows]),
                _sum([_times(row.payload_bytes, row.executions) for row in rows]),
                _sum([_times(row.wire_bytes, row.executions) for row in rows]),
            )
            for key, rows in keys.items()
        }
        return Table(totals, fields, self._sizes, self._title())

    def _title(self) -> str:
        what = f"{len(self)} collective{'s' * (len(self) != 1)}" if len(self) else "No collectives"
        return f"{what}. {self.program}; another backend may choose differently"

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        head = ("kind", "axes", "dtype", "shape", "payload bytes", "wire bytes per device",
                "executions", "in loop", "source")  # fmt: skip
        rows = [
            [
                row.kind,
                _cell(row.axes) + (f" within {_cell(row.within)}" * (row.axes == UNMATCHED)),
                row.dtype,
                "(" + ", ".join(map(str, row.shape)) + ")",
                number(row.payload_bytes),
                number(row.wire_bytes),
                number(row.executions),
                "yes" if row.inside_loop else "no",
                _cell(row.source_line),
            ]
            for row in self._rows
        ]
        return self._title(), head, rows


def collectives(compiled: Any, mesh: Mesh | AbstractMesh | None = None) -> Collectives:
    """List what a compiled program makes devices say to each other.

    compiled   what `jax.jit(f).lower(...).compile()` returns, or the text of a compiled
               program (then `mesh` is needed).
    mesh       the mesh whose axes name the groups. By default it is read from the program's
               input or output shardings.

    Groups are compared as sets of positions on the mesh; axis names printed in the program are
    never used, because the compiler makes up its own. Payloads are in bytes per device for one
    execution; see `Collective` and `Collective.wire_bytes` for the definitions and formulas.
    A combined (tuple) collective gives one row per value. Backends differ: a program compiled
    for CPU says what CPU does (bfloat16 travels as float32 there, for example). Communication
    inside custom calls, such as hand-written kernels, is not seen.

    Raises TypeError for what is not compiled, ValueError if there is no mesh or two, or if the
    mesh has another number of devices than the program. Warns `UnparsedCollective` for a line
    that mentions a collective and cannot be read.
    """
    if isinstance(compiled, str):
        text, shardings, program = compiled, [], "A program given as text"
    else:
        text, shardings = program_text(compiled), _shardings(compiled)
        devices = [d for s in shardings for d in list(s.device_set)[:1]]
        backend = devices[0].platform if devices else jax.default_backend()
        program = f"{backend.upper()} program (jax {jax.__version__})"
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh= wants a jax.sharding.Mesh, not {type(mesh).__name__}")
    parsed = hlo.parse(text)
    found = list(_walk(parsed, parsed.entry, 1, False))
    reached = {id(instruction) for instruction, *_ in found}
    for instruction in itertools.chain(*parsed.computations.values()):
        if _counts(instruction) and id(instruction) not in reached:
            _unparsed(instruction.line)
    for line in parsed.unread:
        if _SUSPECT.search(line):
            _unparsed(line)
    known = list({s.mesh: None for s in shardings if isinstance(s, NamedSharding)})
    known = list({(m.axis_names, m.devices.tobytes()): m for m in known}.values())
    if mesh is None:
        if len(known) != 1 and found:
            raise ValueError(
                f"the inputs and outputs of this program name {len(known) or 'no'} "
                f"mesh{'es' * (len(known) > 1)}: pass the one to use as mesh="
            )
        if len(known) != 1:
            return Collectives([], {}, program)
        mesh = known[0]
    grid = _positions(mesh, known)
    header = re.search(r"\bnum_partitions=(\d+)", text.split("\n", 1)[0])
    if found and header and int(header[1]) != grid.size:
        raise ValueError(
            f"the program runs on {header[1]} devices and the mesh has {grid.size}: "
            "pass the mesh it was compiled for as mesh="
        )
    sources = hlo.Sources(text)
    rows = []
    for instruction, types, executions, inside in found:
        try:
            rows += _rows(instruction, types, executions, inside, mesh.axis_names, grid, sources)
        except (KeyError, ValueError, IndexError):
            _unparsed(instruction.line)
    return Collectives(rows, dict(mesh.shape), program)


def diff(a: Any, b: Any) -> Table:
    """What program b moves more (or, negative, less) than program a, by kind and axes.

    Takes compiled programs or what `collectives` returned. Keys without a difference are left
    out, so equal programs give an empty table; None where either side is unknown.
    """
    one, two = (x if isinstance(x, Collectives) else collectives(x) for x in (a, b))
    first, second = one.by("kind", "axes"), two.by("kind", "axes")
    nothing = Totals(0, 0, 0)
    changes = {}
    for key in dict.fromkeys([*first, *second]):
        old, new = first.get(key, nothing), second.get(key, nothing)
        change = Totals(*(None if None in (o, n) else n - o for o, n in zip(old, new)))
        if any(value is None or value for value in change):
            changes[key] = change
    title = "The second program minus the first" if changes else "No difference"
    title += f". {two.program}; another backend may choose differently"
    return Table(changes, ("kind", "axes"), {**one._sizes, **two._sizes}, title)


def program_text(compiled: Any) -> str:
    """The text of a compiled program; TypeError, saying what to do, for anything else."""
    if all(hasattr(compiled, name) for name in ("as_text", "memory_analysis", "input_shardings")):
        return str(compiled.as_text())
    kind = type(compiled).__name__
    if hasattr(compiled, "as_text") and hasattr(compiled, "compile"):
        raise TypeError("this program is lowered, not compiled: call .compile() on it first")
    if hasattr(compiled, "lower"):
        raise TypeError(f"this {kind} is not compiled: call .lower(...).compile() first")
    if callable(compiled):
        raise TypeError(
            f"this {kind} is not compiled: call jax.jit(f).lower(...).compile() first, "
            "with example arguments or jax.ShapeDtypeStructs"
        )
    raise TypeError(
        f"expected a compiled program, the result of .lower(...).compile(), not {kind}"
    )


def _shardings(compiled: Any) -> list[Any]:
    leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return [leaf for leaf in leaves if isinstance(leaf, jax.sharding.Sharding)]


def _unparsed(line: str) -> None:
    warnings.warn(f"not counted, cannot read: {line[:300]}", UnparsedCollective, stacklevel=3)


def _counts(instruction: hlo.Instruction) -> bool:
    """Is it a collective, and not the end of one or a transfer to the host?"""
    kind = instruction.opcode.removesuffix("-start")
    return kind in KINDS and "is_host_transfer=true" not in instruction.attributes


_Found = tuple[hlo.Instruction, dict[str, tuple[hlo.Array, ...]], int | None, bool]


def _walk(
    program: hlo.Program, name: str, executions: int | None, inside: bool
) -> Iterator[_Found]:
    """Collectives from here on down, with how often each runs and whether in a loop."""
    types = {i.name: i.arrays for i in program.computations[name]}
    for instruction in program.computations[name]:
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            continue  # the start was counted
        if _counts(instruction):
            yield instruction, types, executions, inside
        elif opcode not in _KNOWN and _SUSPECT.match(opcode + "("):
            _unparsed(instruction.line)
        called = instruction.called()
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.line)
        branches = sum(key not in ("calls", "to_apply") for key, _ in called)
        for key, target in called:
            if target not in program.computations:
                continue
            runs, loop = executions, inside
            if opcode == "while":
                # The condition is evaluated once more than the body runs.
                times = int(trips[1]) + (key == "condition") if trips else None
                runs, loop = _times(executions, times), True
            elif opcode == "conditional" and branches > 1:
                runs = None
            yield from _walk(program, target, runs, loop)


def _positions(mesh: Mesh | AbstractMesh, known: Sequence[Mesh]) -> np.ndarray:
    """The program's position of every device of the mesh, in the mesh's shape.

    A program numbers devices in the order of its own mesh, whatever their ids are.
    """
    shape = tuple(mesh.shape.values())
    grid = np.arange(math.prod(shape)).reshape(shape)
    if not isinstance(mesh, Mesh) or not known:
        return grid
    order = {device: i for i, device in enumerate(known[0].devices.flat)}
    if set(order) != set(mesh.devices.flat):
        raise ValueError("the mesh and the program use different devices")
    return np.vectorize(order.get, otypes=[int])(mesh.devices)


def _match(
    groups: hlo.Groups, names: Sequence[str], grid: np.ndarray, pairs: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes, within) of groups of positions; see `Collective`."""
    place = {int(p): where for where, p in np.ndenumerate(grid)}
    spread = [
        d for d in range(grid.ndim) if any(len({place[p][d] for p in g}) > 1 for g in groups)
    ]
    within = tuple(names[d] for d in spread)
    if pairs:
        return within, within
    rest = [d for d in range(grid.ndim) if d not in spread]
    size = math.prod(grid.shape[d] for d in spread)
    lines = grid.transpose(rest + spread).reshape(-1, size).tolist()
    same = set(map(frozenset, lines)) == set(map(frozenset, groups))
    return (within if same else UNMATCHED), within


def _rows(
    instruction: hlo.Instruction,
    types: dict[str, tuple[hlo.Array, ...]],
    executions: int | None,
    inside: bool,
    names: Sequence[str],
    grid: np.ndarray,
    sources: hlo.Sources,
) -> list[Collective]:
    kind = instruction.opcode.removesuffix("-start")
    pairs = kind in ("collective-permute", "send", "recv")
    groups = (
        hlo.source_target_pairs(instruction.line)
        if pairs
        else hlo.replica_groups(instruction.attributes, grid.size)
    )
    if groups is None and kind not in ("send", "recv"):
        raise ValueError("no groups")
    axes, within = _match(groups or (), names, grid, pairs)
    if groups is None:
        axes = UNMATCHED
    values = [array for name in instruction.operands for array in types[name]]
    if kind == "recv":
        values = list(instruction.arrays[:1])
    elif kind in ("collective-permute", "send", "ragged-all-to-all"):
        values = values[:1] if kind != "collective-permute" else values
    n = max(map(len, groups or ()), default=1)
    if kind == "all-gather":
        (axis,) = hlo.dimension(instruction.attributes)
        values = [(e, (*s[:axis], s[axis] * n, *s[axis + 1 :])) for e, s in values]
        if any(value not in instruction.arrays for value in values):
            raise ValueError("operands and result disagree")
    elif kind == "all-to-all" and len(values) > 1:
        values = [(values[0][0], (len(values), *values[0][1]))]
    if not values:
        raise ValueError("no operands")
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.line)
    return [
        Collective(
            kind=kind,
            axes=axes,
            dtype=hlo.dtype(element),
            shape=shape,
            payload_bytes=hlo.nbytes((element, shape)) if within or axes == UNMATCHED else 0,
            executions=executions,
            inside_loop=inside,
            op_name=op_name[1] if op_name else "",
            source_line=sources.find(instruction.line),
            within=within,
            groups=groups or (),
        )
        for element, shape in values
    ]
