"""What moves: the collectives of a compiled program, by the reader's mesh axes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from . import _advice, _compat
from . import _hlo as hlo
from . import _programs as programs
from ._cpu import Widened, widened
from ._messages import Said
from ._programs import UNMATCHED
from ._tables import Cell, Column, Content, Report, words
from ._totals import HEADS, NOTHING, NUMBERS, Table, Totals, cell, minus, summed, total


class UnparsedCollectiveWarning(UserWarning):
    """A line mentions a collective but could not be read, so it is not counted.

    >>> import meshscope, warnings
    >>> warnings.simplefilter("error", meshscope.UnparsedCollectiveWarning)

    makes an error of it.
    """


@dataclass(frozen=True)
class Collective:
    """One value that groups of devices exchange. Bytes are those of a single execution.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> (row,) = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    >>> row.kind, row.axes, row.dtype, row.shape
    ('all-reduce', ('data',), 'float32', (16,))
    >>> row.payload_bytes, row.wire_bytes, row.executions
    (64, 64, 1)

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
        count, or in one branch of a conditional and not in every other.
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
        """Devices in one group; 2 for a permute, send or recv.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> (row,) = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> row.groups, row.group_size
        (((0, 4), (1, 5), (2, 6), (3, 7)), 2)
        """
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

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> (row,) = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> row.payload_bytes, row.wire_bytes  # 2 * 7/8 * 64
        (64, 112)
        """
        return sent_by_one(self.kind, self.group_size, self.payload_bytes)


def sent_by_one(kind: str, n: int, size: float) -> float | None:
    """The formulas of ``Collective.wire_bytes``, for n devices and a payload of this size."""
    if kind == "ragged-all-to-all":
        return None
    if kind == "recv":
        return 0
    if kind in ("collective-permute", "collective-broadcast", "send"):
        return size
    sent = (2 if kind == "all-reduce" else 1) * (n - 1) * size
    return sent / n if sent % n else sent // n


FIELDS = (  # that rows can be summed by
    *("kind", "axes", "dtype", "shape", "payload_bytes", "executions", "inside_loop", "op_name"),
    *("source_line", "within", "groups", "group_size", "wire_bytes"),
)
SHOWN = (  # of each row
    *("kind", "axes", "dtype", "shape", "payload_bytes", "wire_bytes", "executions"),
    *("inside_loop", "source_line"),
)


class Collectives(Report, Sequence[Collective]):
    """The collectives of one program, in the order of its text: a sequence of ``Collective``.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> rows = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    >>> len(rows), rows[0].kind, rows.axis_sizes
    (1, 'all-reduce', {'data': 2, 'model': 4})

    Attributes:
      axis_sizes: of the mesh whose axes name the groups; empty for a program without one.
    """

    def __init__(
        self, rows: Sequence[Collective], axis_sizes: dict[str, int], by: Said,
        widened: Widened | None = None,
    ) -> None:  # fmt: skip
        self._rows, self.axis_sizes, self._program = tuple(rows), axis_sizes, by
        self._widened = widened or Widened()

    @overload
    def __getitem__(self, index: SupportsIndex) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Collectives: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Collective | Collectives:
        if isinstance(index, slice):
            return Collectives(self._rows[index], self.axis_sizes, self._program, self._widened)
        return self._rows[operator.index(index)]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def kinds(self) -> set[str]:
        """The kinds that occur.

        >>> import jax, meshscope
        >>> x = jax.device_put(jax.numpy.ones(8), jax.devices()[0])
        >>> meshscope.collectives(jax.jit(lambda x: x.sum()).lower(x).compile()).kinds
        set()
        """
        return {row.kind for row in self}

    @property
    def total_payload_bytes(self) -> int | None:
        """Payload of all rows times their executions; None if some are unknown.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> rows = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> rows.total_payload_bytes
        64
        """
        return total(self).payload_bytes

    def by(self, *fields: str) -> Table:
        """Sum the rows that agree in these fields, executions multiplied in.

        Keys are tuples, or plain values for one field. How many rows there are is the
        compiler's choice (it merges and splits); bytes per kind and axes are steadier.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> rows = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> rows.by("kind", "axes")
        1 collective. CPU program (jax ...); another backend may choose differently
        kind        axes  executions  payload bytes  wire bytes per device
        all-reduce  data           1             64                     64

        Args:
          *fields: names of attributes of ``Collective``.

        Raises:
          ValueError: no field, or one that does not exist.
        """
        totals = summed(self, fields, FIELDS, 'by("kind", "axes")')
        return Table(totals, fields, self.axis_sizes, self._title(self._what()))

    def _what(self) -> Said:
        if len(self) > 1:
            return Said("{count} collectives", count=len(self))
        return Said("1 collective" if self else "No collectives")

    def _content(self) -> Content:
        columns = [Column(Said(HEADS[field]), field in NUMBERS) for field in SHOWN]
        rows = [
            [_axes(row) if field == "axes" else cell(field, getattr(row, field)) for field in SHOWN]
            for row in self
        ]
        return Content(self._title(self._what()), columns, rows)

    def _title(self, what: Said, *others: Collectives) -> Said:
        """What a table shows, of which program, and which bytes are not as they are written.

        ``others`` are the collectives of further programs in the same table.
        """
        message = "{what}. {program}; another backend may choose differently"
        title = Said(message, what=what, program=self._program)
        sent = [(one, {row.dtype for row in one if row.payload_bytes}) for one in (self, *others)]
        notes = [note for one, dtypes in sent if (note := one._widened.note(dtypes))]
        for note in {str(note): note for note in notes}.values():  # each once
            title = Said("{title}\n{note}", title=title, note=note)
        return title


def _axes(row: Collective) -> Cell:
    if row.axes == UNMATCHED:
        return Said("{axes} within {others}", axes="?", others=words(row.within))
    return words(row.axes)


def collectives(compiled: Any, mesh: Mesh | AbstractMesh | None = None) -> Collectives:
    """List what a compiled program makes devices say to each other.

    Groups are compared as sets of positions on the mesh. Axis names printed in a program
    are never used: the compiler makes up its own. A combined (tuple) collective gives
    one row per value. What every branch of a conditional exchanges alike counts once. On
    TPU, a collective carried step by step through several fusions counts once, and an
    all-reduce fused with the slice that follows it is a reduce-scatter.

    What is listed is one backend's choice. Communication inside custom calls, such as
    hand-written kernels, is not seen.

    A program compiled for CPU sends some types as wider ones: bfloat16 and float8_e8m0fnu as
    float32, any other float8 and float4 as float16, int4 as int8. So its bytes are 2 or 4
    times those that were written, and a line above the table says so.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> rows = meshscope.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    >>> [(row.kind, row.axes, row.payload_bytes) for row in rows]
    [('all-reduce', ('data',), 64)]

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, or the text of a compiled
        program (then ``mesh`` is needed).
      mesh: the mesh whose axes name the groups; by default the one in the program's input
        or output shardings. An ``AbstractMesh`` has the axes of the program's own mesh, in
        any order, or a single one: it does not say which device is where. With a text,
        the mesh is that which the program was compiled for.

    Raises:
      TypeError: something other than a compiled program or a mesh, with what to pass
        instead.
      ValueError: a text that is not a compiled program; no mesh, or more than one; a mesh of
        other devices than the program's, or one that does not say where they are.

    Warns:
      UnparsedCollectiveWarning: a line that mentions a collective and cannot be read.
    """
    found = read(compiled, mesh, "collectives")
    rows = [row for _, values in found.moves for row in values]
    return Collectives(rows, found.axis_sizes, found.by, found.widened)


@dataclass(frozen=True)
class Reading:
    """A program, and each collective that runs with the values that it exchanges.

    ``by`` says whose program it is, and ``platform`` what it was compiled for; a text does not.
    """

    program: hlo.Program
    moves: list[tuple[programs.Found, list[Collective]]]
    axis_sizes: dict[str, int]
    by: Said
    platform: str | None
    widened: Widened


def read(compiled: Any, mesh: Mesh | AbstractMesh | None, function: str) -> Reading:
    """Read a program as ``collectives`` does, for the public function of this name."""
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(_advice.says(mesh, _advice.MESH, "mesh="))
    text, program = programs.program(compiled)
    shardings: list[Sharding] = []
    by, platform = Said("A program given as text"), None
    if not isinstance(compiled, str):
        shardings = programs.shardings_of(compiled)
        platform = programs.platform_of(shardings)
        version = f"jax {jax.__version__}"
        by = Said("{backend} program ({version})", backend=platform.upper(), version=version)
    found, lost = programs.executed(program)
    for line in lost:
        _warn(line)
    meshes: list[Any] = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    own = {(m.axis_names, m.devices.shape, tuple(m.devices.flat)): m for m in meshes}
    if mesh is None and len(own) == 1:
        (mesh,) = own.values()
    if mesh is None and found:
        told = "a program given as text names no mesh"
        if not isinstance(compiled, str):
            many = f"{len(own) or 'no'} mesh{'es' * (len(own) > 1)}"
            told = f"the inputs and outputs of this program name {many}"
        raise ValueError(f"{told}: pass the one to use, {function}(compiled, mesh)")
    sizes = dict(mesh.shape) if mesh is not None else {}
    if mesh is None or not found:
        return Reading(program, [], sizes, by, platform, Widened())
    programs.check_size(program, mesh)
    named = None if isinstance(compiled, str) else list(own.values())
    order = next(filter(None, map(_compat.device_order, shardings)), None)
    grid = programs.positions(mesh, named, order)
    sources = hlo.Sources(text)
    moves: list[tuple[programs.Found, list[Collective]]] = []
    for each in found:
        line = each.instruction.line
        kind, values, groups = programs.read(program, each.instruction, each.where, grid.size)
        if not values:
            _warn(line)
            continue
        axes, within = programs.match(groups, kind, mesh.axis_names, grid)
        rows = [
            Collective(
                kind=kind,
                axes=axes,
                dtype=hlo.dtype(value[0]),
                shape=value[1],
                payload_bytes=hlo.nbytes(value) if axes else 0,
                executions=each.executions,
                inside_loop=each.loop is not None,
                op_name=hlo.op_name(line),
                source_line=sources.find(line),
                within=within,
                groups=groups or (),
            )
            for value in values
        ]
        moves.append((each, rows))
    return Reading(program, moves, sizes, by, platform, widened(program, text, platform))


def diff(a: Any, b: Any) -> Table:
    """What b moves more (negative: less) than a, by kind and axes.

    Keys without a difference are left out: programs that move the same give an empty
    table, unless they move it an unknown number of times. None is where one side is
    unknown. Programs on different meshes are compared by the names of their axes, whose
    sizes may differ.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> less, more = (jax.jit(f).lower(x).compile() for f in (abs, lambda x: x.sum(0)))
    >>> meshscope.diff(less, more)
    Second program minus first. CPU program (jax ...); another backend may choose differently
    kind        axes  executions  payload bytes  wire bytes per device
    all-reduce  data           1             64                     64

    Args:
      a: a compiled program, or what ``collectives`` returned for it.
      b: likewise.

    Raises:
      TypeError, ValueError: as ``collectives`` does.
    """
    one, two = (x if isinstance(x, Collectives) else collectives(x) for x in (a, b))
    # Axes in the order of the first mesh, then those that only the second has.
    sizes = {axis: 0 for axis in (*one.axis_sizes, *two.axis_sizes)}

    def ordered(rows: Collectives) -> Table:
        table = rows.by("kind", "axes")
        totals = {
            (kind, axes if axes == UNMATCHED else tuple(a for a in sizes if a in axes)): total
            for (kind, axes), total in table.items()
        }
        return Table(totals, table._fields, rows.axis_sizes, table._title)

    old, new = ordered(one), ordered(two)
    changes: dict[Any, Totals] = {}
    for key in dict.fromkeys([*old, *new]):
        change = minus(new.get(key, NOTHING), old.get(key, NOTHING))
        if any(value != 0 for value in change):
            changes[key] = change
    what = Said("Second program minus first" if changes else "No difference")
    return Table(changes, ("kind", "axes"), sizes, two._title(what, one), (old, new))


def _warn(line: str) -> None:
    message = f"not counted, cannot read: {line[:300]}"
    warnings.warn(message, UnparsedCollectiveWarning, stacklevel=4)
