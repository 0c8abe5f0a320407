"""What moves: the collectives of a compiled program, by the reader's mesh axes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from . import _advice, _compat
from . import _hlo as hlo
from . import _programs as programs
from ._cpu import Widened, widened
from ._messages import Said
from ._programs import KINDS, UNMATCHED
from ._tables import Cell, Column, Content, Report, number, numbers, shape_text, words


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
        n, size = self.group_size, self.payload_bytes
        if self.kind == "ragged-all-to-all":
            return None
        if self.kind == "recv":
            return 0
        if self.kind in ("collective-permute", "collective-broadcast", "send"):
            return size
        sent = (2 if self.kind == "all-reduce" else 1) * (n - 1) * size
        return sent / n if sent % n else sent // n


HEADS = {  # of the columns for fields of Collective
    "kind": "kind",
    "axes": "axes",
    "dtype": "dtype",
    "shape": "shape",
    "payload_bytes": "payload bytes",
    "executions": "executions",
    "inside_loop": "in loop",
    "op_name": "operation",
    "source_line": "source",
    "within": "within",
    "groups": "groups",
    "group_size": "group size",
    "wire_bytes": "wire bytes per device",
}
AXES = ("axes", "within")  # fields that name mesh axes
NUMBERS = ("executions", "payload_bytes", "wire_bytes", "group_size")
SHOWN = (  # of each row
    *("kind", "axes", "dtype", "shape", "payload_bytes", "wire_bytes", "executions"),
    *("inside_loop", "source_line"),
)


class Totals(NamedTuple):
    """Sums over executions. None: the executions of some row are not known.

    >>> import meshscope
    >>> meshscope.Totals(executions=2, payload_bytes=64, wire_bytes=96)
    Totals(executions=2, payload_bytes=64, wire_bytes=96)

    Attributes:
      executions: how many collectives one run of the program executes.
      payload_bytes: their payloads.
      wire_bytes: what one device sends.
    """

    executions: int | None
    payload_bytes: int | None
    wire_bytes: float | None


NOTHING = Totals(0, 0, 0)


class Table(Report, dict[Any, Totals]):
    """Totals by key: a ``dict`` to ``Totals``, made by ``Collectives.by`` and ``diff``.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    >>> table = meshscope.collectives(compiled).by("kind", "axes")
    >>> dict(table)
    {('all-reduce', ('data',)): Totals(executions=1, payload_bytes=64, wire_bytes=64)}
    """

    def __init__(
        self,
        totals: Mapping[Any, Totals],
        fields: Sequence[str],
        axis_sizes: Mapping[str, int],
        title: Said,
        sides: tuple[Table, Table] | None = None,
    ) -> None:
        super().__init__(totals)
        self._fields, self._sizes, self._title = tuple(fields), dict(axis_sizes), title
        self._sides = sides  # of a difference: the first and the second program's own
        self._totals = {self._normal(key): found for key, found in totals.items()}

    def _normal(self, key: Any) -> tuple[Any, ...]:
        """A key as a tuple with axes as sets, whose order says nothing."""
        values = key if len(self._fields) > 1 else (key,)
        named = zip(self._fields, values, strict=True)
        return tuple(frozenset(v) if field in AXES else v for field, v in named)

    def bytes(self, *key: Any) -> int | None:
        """Payload bytes of one key, such as ``("all-gather", "model")`` by kind and axes.

        0 if nothing has this key, None if unknown. Axes come as a name or a tuple in any
        order; those of size 1 are left out, as in the rows.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
        >>> table = meshscope.collectives(compiled).by("kind", "axes")
        >>> table.bytes("all-reduce", "data"), table.bytes("all-gather", "data")
        (64, 0)
        >>> table.bytes("all-reduce", "modle")
        Traceback (most recent call last):
        ValueError: no axis 'modle' on this mesh, which has data, model

        Raises:
          ValueError: a kind, an axis or a dtype that does not exist (a typing error is
            not a zero), for a difference one that neither side has; another number of
            values than fields.
        """
        return self._find(key).payload_bytes

    def wire(self, *key: Any) -> float | None:
        """Wire bytes per device of one key, like ``bytes``.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
        >>> meshscope.collectives(compiled).by("kind").wire("all-reduce")
        64
        """
        return self._find(key).wire_bytes

    def _find(self, key: tuple[Any, ...]) -> Totals:
        if len(key) != len(self._fields):
            raise ValueError(f"give one value for each of {', '.join(self._fields)}")
        return self._look_up(tuple(map(self._checked, range(len(key)), key)))

    def _checked(self, n: int, value: Any) -> Any:
        """The nth value of a key, axes as a set; ValueError for what does not exist."""
        field = self._fields[n]
        if field == "kind" and value not in KINDS:
            raise ValueError(f"no kind {value!r}, there are {', '.join(KINDS)}")
        if field == "dtype" and value not in {key[n] for key in self._totals}:
            try:
                jnp.dtype(value)
            except TypeError:
                raise ValueError(f"no dtype {value!r}: give JAX's name, as 'float32'") from None
        if field not in AXES:
            return value
        axes = (value,) if isinstance(value, str) else value
        if not isinstance(axes, (tuple, list, set, frozenset)):
            raise ValueError(f"{field}: give a name or a tuple of names, not {value!r}")
        for axis in axes if tuple(axes) != UNMATCHED else ():
            if axis not in self._sizes:
                has = ", ".join(self._sizes)
                where = f"on this mesh, which has {has}" if has else "as the program has no mesh"
                raise ValueError(f"no axis {axis!r} {where}")
        return frozenset(axes)

    def _look_up(self, values: tuple[Any, ...]) -> Totals:
        """The totals of a key that exists, whatever its axes are on this side's mesh."""
        if values in self._totals:
            return self._totals[values]
        if self._sides:
            old, new = (side._look_up(values) for side in self._sides)
            return _minus(new, old)
        here = list(values)
        for n, field in enumerate(self._fields):
            if field in AXES and values[n] and values[n] != frozenset(UNMATCHED):
                if values[n] - set(self._sizes):
                    return NOTHING  # an axis that only the other side has
                here[n] = frozenset(axis for axis in values[n] if self._sizes[axis] > 1)
                if not here[n]:
                    return NOTHING  # nothing moves along axes of size 1
        return self._totals.get(tuple(here), NOTHING)

    def _content(self) -> Content:
        rows = [
            [*map(_cell, self._fields, key if len(self._fields) > 1 else (key,))]
            + [number(value) for value in totals]
            for key, totals in self.items()
        ]
        columns = [Column(Said(HEADS[field]), field in NUMBERS) for field in self._fields]
        columns += numbers(*map(HEADS.__getitem__, NUMBERS[:3]))
        return Content(self._title, columns, rows)


def _cell(field: str, value: Any) -> Cell:
    """A value of a field of ``Collective``, as a table shows it."""
    if field in NUMBERS:
        return number(value)
    if field == "inside_loop":
        return Said("yes" if value else "no")
    return shape_text(value) if field == "shape" else words(value)


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
        return _total(self).payload_bytes

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
        there = f"there are {', '.join(HEADS)}"
        if not fields:
            raise ValueError(f'name a field, for example by("kind", "axes"); {there}')
        if wrong := [field for field in fields if field not in HEADS]:
            raise ValueError(f"no field {wrong[0]!r}, {there}")
        rows: dict[Any, list[Collective]] = {}
        for row in self:
            key = tuple(getattr(row, field) for field in fields)
            rows.setdefault(key if len(fields) > 1 else key[0], []).append(row)
        totals = {key: _total(group) for key, group in rows.items()}
        return Table(totals, fields, self.axis_sizes, self._title(self._what()))

    def _what(self) -> Said:
        if len(self) > 1:
            return Said("{count} collectives", count=len(self))
        return Said("1 collective" if self else "No collectives")

    def _content(self) -> Content:
        columns = [Column(Said(HEADS[field]), field in NUMBERS) for field in SHOWN]
        rows = [
            [
                _axes(row) if field == "axes" else _cell(field, getattr(row, field))
                for field in SHOWN
            ]
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


def _total(rows: Sequence[Collective]) -> Totals:
    def add(values: list[Any]) -> Any:
        return None if None in values else sum(values)

    def times(row: Collective, value: float | None) -> Any:
        if value is None or row.executions is None:
            return None
        return value * row.executions

    return Totals(
        add([row.executions for row in rows]),
        add([times(row, row.payload_bytes) for row in rows]),
        add([times(row, row.wire_bytes) for row in rows]),
    )


def _minus(new: Totals, old: Totals) -> Totals:
    pairs: Any = zip(new, old, strict=True)
    return Totals(*(None if None in pair else pair[0] - pair[1] for pair in pairs))


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
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(_advice.says(mesh, _advice.MESH, "mesh="))
    text, program = programs.program(compiled)
    shardings: list[Sharding] = []
    by, platform = Said("A program given as text"), None
    if not isinstance(compiled, str):
        leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        shardings = [leaf for leaf in leaves if isinstance(leaf, Sharding)]
        device: Any = next((d for s in shardings for d in s.device_set), None)
        platform = str(device.platform if device else jax.default_backend())
        version = f"jax {jax.__version__}"
        by = Said("{backend} program ({version})", backend=platform.upper(), version=version)
    found, lost = programs.executed(program)
    for line in lost:
        _warn(line)
    meshes: list[Any] = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    own = {(m.axis_names, m.devices.shape, tuple(m.devices.flat)): m for m in meshes}
    if mesh is None and len(own) == 1:
        (mesh,) = own.values()
    if mesh is None:
        if found:
            told = "a program given as text names no mesh"
            if not isinstance(compiled, str):
                many = f"{len(own) or 'no'} mesh{'es' * (len(own) > 1)}"
                told = f"the inputs and outputs of this program name {many}"
            raise ValueError(f"{told}: pass the one to use, collectives(compiled, mesh)")
        return Collectives([], {}, by)
    if not found:
        return Collectives([], dict(mesh.shape), by)
    programs.check_size(program, mesh)
    named = None if isinstance(compiled, str) else list(own.values())
    order = next(filter(None, map(_compat.device_order, shardings)), None)
    grid = programs.positions(mesh, named, order)
    sources = hlo.Sources(text)
    rows: list[Collective] = []
    for each in found:
        line = each.instruction.line
        kind, values, groups = programs.read(program, each.instruction, each.where, grid.size)
        if not values:
            _warn(line)
            continue
        axes, within = programs.match(groups, kind, mesh.axis_names, grid)
        rows += [
            Collective(
                kind=kind,
                axes=axes,
                dtype=hlo.dtype(value[0]),
                shape=value[1],
                payload_bytes=hlo.nbytes(value) if axes else 0,
                executions=each.executions,
                inside_loop=each.inside,
                op_name=hlo.op_name(line),
                source_line=sources.find(line),
                within=within,
                groups=groups or (),
            )
            for value in values
        ]
    return Collectives(rows, dict(mesh.shape), by, widened(program, text, platform))


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
        change = _minus(new.get(key, NOTHING), old.get(key, NOTHING))
        if any(value != 0 for value in change):
            changes[key] = change
    what = Said("Second program minus first" if changes else "No difference")
    return Table(changes, ("kind", "axes"), sizes, two._title(what, one), (old, new))


def _warn(line: str) -> None:
    message = f"not counted, cannot read: {line[:300]}"
    warnings.warn(message, UnparsedCollectiveWarning, stacklevel=3)
