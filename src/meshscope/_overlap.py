"""What runs while a collective does: the order of a compiled program's schedule."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from jax.sharding import AbstractMesh, Mesh

from . import _collectives as moves
from . import _hlo as hlo
from . import _programs as programs
from . import _work as work
from ._collectives import Collective
from ._messages import Said
from ._tables import Cell, Column, Content, Report, number
from ._totals import HEADS, NUMBERS, Table, cell, summed

FIELDS = (  # that rows can be summed by
    *("kind", "axes", "dtype", "shape", "payload_bytes", "wire_bytes", "executions"),
    *("op_name", "source_line", "loop", "trips", "beside", "hidden"),
)
SHOWN = (  # of each row
    *("kind", "axes", "shape", "payload_bytes", "loop", "trips", "beside", "matmuls", "flops"),
    *("other_bytes", "source_line"),
)
# Instructions that hand on what a start returned.
_PASSES = ("get-tuple-element", "bitcast", "tuple", "opt-barrier", "optimization-barrier")
_END = 'custom_call_target="AsyncCollectiveDone"'


@dataclass(frozen=True)
class Overlap:
    """A collective, and what stands between its start and its end. All is of one execution.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> (row,) = meshscope.overlap(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    >>> row.kind, row.axes, row.beside, row.hidden
    ('all-reduce', ('data',), 'synchronous', False)

    Attributes:
      kind: as in ``Collective``.
      axes: likewise.
      dtype: of the largest value, where the compiler combined several.
      shape: likewise.
      payload_bytes: of all its values.
      wire_bytes: likewise; None as in ``Collective``.
      executions: as in ``Collective``.
      op_name: likewise.
      source_line: likewise.
      loop: the name of the innermost loop around it, or None.
      trips: how often one run of that loop repeats its body; None if not known, or no loop.
      beside: what stands between its two lines, by the first of these that is there:
        ``"matmul"``; ``"kernel"``, a call of a kernel, of which the text says only that it runs;
        ``"other work"``, neither of them; ``"nothing"``. ``"synchronous"``: it has one line, and
        the device waits for it. ``"unknown"``: its end is not in the same computation, as
        where one turn of a loop starts what the next one ends.
      matmuls: the numbers of these matmuls among those of the same computation, from 0.
      flops: of these matmuls, 2 for each multiplication with its addition. None if not known: in
        a library's call that does not say what it contracts, a loop without a trip count, or
        branches that differ.
      other_bytes: the sizes of the values that instructions without a matmul write in between.
        None if not known.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    wire_bytes: float | None
    executions: int | None
    op_name: str
    source_line: str | None
    loop: str | None
    trips: int | None
    beside: str
    matmuls: tuple[int, ...]
    flops: int | None
    other_bytes: int | None

    @property
    def hidden(self) -> bool | None:
        """Is a matmul beside it? None if the text cannot tell, as for a kernel or an unknown end.

        This is an order, not a time: a matmul that is shorter than the collective hides only a
        part of it.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> rows = meshscope.overlap(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> [row.hidden for row in rows]
        [False]
        """
        if self.beside in ("kernel", "unknown"):
            return None
        return self.beside == "matmul"


class Overlaps(Report, Sequence[Overlap]):
    """What ``overlap`` found, in the order of the program's text: a sequence of ``Overlap``.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> rows = meshscope.overlap(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    >>> len(rows), rows[0].beside
    (1, 'synchronous')

    Attributes:
      axis_sizes: of the mesh whose axes name the groups; empty for a program without one.
    """

    def __init__(
        self, rows: Sequence[Overlap], axis_sizes: dict[str, int], by: Said, on_cpu: bool = False
    ) -> None:
        self._rows, self.axis_sizes, self._program = tuple(rows), axis_sizes, by
        self._on_cpu = on_cpu

    @overload
    def __getitem__(self, index: SupportsIndex) -> Overlap: ...
    @overload
    def __getitem__(self, index: slice) -> Overlaps: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Overlap | Overlaps:
        if isinstance(index, slice):
            return Overlaps(self._rows[index], self.axis_sizes, self._program, self._on_cpu)
        return self._rows[operator.index(index)]

    def __len__(self) -> int:
        return len(self._rows)

    def by(self, *fields: str) -> Table:
        """Sum the rows that agree in these fields, executions multiplied in.

        ``by("kind", "axes", "hidden")`` says how many bytes of each kind have a matmul beside
        them (True), have none (False), or may have one (None).

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        >>> rows = meshscope.overlap(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> dict(rows.by("kind", "hidden"))
        {('all-reduce', False): Totals(executions=1, payload_bytes=64, wire_bytes=112)}

        Args:
          *fields: names of attributes of ``Overlap``.

        Raises:
          ValueError: no field, or one that does not exist.
        """
        totals = summed(self, fields, FIELDS, 'by("kind", "axes", "hidden")')
        return Table(totals, fields, self.axis_sizes, self._title())

    def _content(self) -> Content:
        columns = [
            Column(Said(HEADS[field]), field in (*NUMBERS, "trips", "flops", "other_bytes"))
            for field in SHOWN
        ]
        rows = [[_shown(row, field) for field in SHOWN] for row in self]
        return Content(self._title(), columns, rows)

    def _title(self) -> Said:
        message = "{what}. {program}; another backend may choose differently"
        if not self:
            return Said(message, what=Said("No collectives"), program=self._program)
        counts = {
            "hidden": sum(row.hidden is True for row in self),
            "count": len(self),
            "unknown": sum(row.hidden is None for row in self),
        }
        what = Said(
            "Beside a matmul: {hidden} of {count} collectives; unknown: {unknown}", **counts
        )
        title = Said(message, what=what, program=self._program)
        if not self._on_cpu:
            return title
        note = Said("XLA for CPU starts no collective early: compile for the device that you use")
        return Said("{title}\n{note}", title=title, note=note)


def _shown(row: Overlap, field: str) -> Cell:
    """A field of a row, as the table shows it; a dash where there is nothing to say."""
    value = getattr(row, field)
    if field in ("matmuls", "flops", "other_bytes") and row.beside in ("synchronous", "unknown"):
        return "-"
    if field == "trips":
        return "-" if row.loop is None else number(value)
    return cell(field, value)


def overlap(compiled: Any, mesh: Mesh | AbstractMesh | None = None) -> Overlaps:
    """List what stands between the start and the end of each collective of a compiled program.

    A device issues a program in the order of its lines. An asynchronous collective has two, one
    that starts it and one that waits for it, and what stands between them can run while it is
    sent. A collective with one line is synchronous: the device waits for it. So is a pair that
    XLA for GPU marked with ``is_sync``.

    Pairs are read in every form that XLA gives them: ``all-gather-start`` and
    ``all-gather-done``, ``async-start`` around a computation that holds a collective, ``send``
    and ``send-done``, and the fusions that begin, carry and end a collective on TPU. A matmul may
    be a ``dot``, a convolution (on TPU), a call of a library, or a fusion or loop that has one.

    This is an order, not a time. Whether the matmul takes as long as the collective, and how much
    slower both get, only a profile on your hardware tells. A program compiled for CPU has no
    pairs, and its runtime may run independent lines side by side: ask a program compiled for the
    accelerator that you will use.

    >>> import jax, meshscope
    >>> text = '''HloModule jit_f, is_scheduled=true, num_partitions=8
    ...
    ... ENTRY %main (w: bf16[64,128], x: bf16[32,64]) -> bf16[32,128] {
    ...   %w = bf16[64,128] parameter(0)
    ...   %x = bf16[32,64] parameter(1)
    ...   %start = (bf16[64,128], bf16[512,128]) all-gather-start(%w), replica_groups={}, dimensions={0}
    ...   %dot = bf16[32,128] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ...   %done = bf16[512,128] all-gather-done(%start)
    ...   ROOT %out = bf16[32,128] copy(%dot)
    ... }'''
    >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
    >>> (gather,) = meshscope.overlap(text, mesh)
    >>> gather.beside, gather.matmuls, gather.flops == 2 * 32 * 64 * 128
    ('matmul', (0,), True)

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, or the text of a compiled
        program (then ``mesh`` is needed), for example one that was compiled for a machine that
        is not here.
      mesh: as in ``collectives``.

    Raises:
      TypeError, ValueError: as ``collectives`` does.

    Warns:
      UnparsedCollectiveWarning: a line that mentions a collective and cannot be read.
    """
    found = moves.read(compiled, mesh, "overlap")
    chains = programs.chains(found.program)
    rows = [_row(found.program, chains, each, values) for each, values in found.moves]
    return Overlaps(rows, found.axis_sizes, found.by, found.platform == "cpu" and bool(rows))


def _row(
    program: hlo.Program,
    chains: dict[hlo.Instruction, programs.Chain],
    each: programs.Found,
    values: list[Collective],
) -> Overlap:
    """One collective, with what is beside it."""
    largest = max(values, key=operator.attrgetter("payload_bytes"))
    sent = [value.wire_bytes for value in values]
    beside, matmuls, done = _beside(program, *_ends(program, chains, each))
    return Overlap(
        kind=largest.kind,
        axes=largest.axes,
        dtype=largest.dtype,
        shape=largest.shape,
        payload_bytes=sum(value.payload_bytes for value in values),
        wire_bytes=None if None in sent else sum(value for value in sent if value is not None),
        executions=each.executions,
        op_name=largest.op_name,
        source_line=largest.source_line,
        loop=each.loop.name if each.loop else None,
        trips=each.loop.trips if each.loop else None,
        beside=beside,
        matmuls=matmuls,
        flops=done.flops,
        other_bytes=done.other_bytes,
    )


def _beside(
    program: hlo.Program, where: str, start: hlo.Instruction, end: hlo.Instruction | None
) -> tuple[str, tuple[int, ...], work.Work]:
    """What stands between two lines of a computation: a word, the matmuls, and all of the work."""
    if end is None:
        return "unknown", (), work.Work(flops=None, other_bytes=None)
    if end is start:
        return "synchronous", (), work.Work()
    between: list[work.Work] = []
    numbers: list[int] = []
    matmul, running = 0, False
    for instruction in program.computations[where].values():
        if instruction is end:
            break
        one = work.of(program, where, instruction)
        if running:
            between.append(one)
            numbers += [matmul] if one.matmuls else []
        running = running or instruction is start
        matmul += bool(one.matmuls)
    done = work.total(between)
    word = "other work" if done.other_bytes != 0 else "nothing"
    word = "kernel" if done.kernels else word
    return "matmul" if numbers else word, tuple(numbers), done


def _ends(
    program: hlo.Program,
    chains: dict[hlo.Instruction, programs.Chain],
    each: programs.Found,
) -> tuple[str, hlo.Instruction, hlo.Instruction | None]:
    """The computation of a collective's two lines, its start and its end.

    The end is the start if the collective has one line, and None if it is not found.
    """
    if chain := chains.get(each.instruction):
        ends = [fusion for fusion, _ in chain.carried if _holds(program, fusion, _END)]
        return chain.where, chain.start, ends[-1] if ends else None
    where, start = each.where, each.instruction
    # Where it is the whole of a computation that another line starts, that line is its start.
    while not _is_start(start):
        caller = program.caller(where)
        if caller is None or caller[1].opcode not in _AROUND:
            return each.where, each.instruction, each.instruction
        where, start = caller
    if re.search(r'"is_sync":"?true', start.line):
        return where, start, start
    handed, seen = {start.name}, False
    for instruction in program.computations[where].values():
        seen = seen or instruction is start
        if not seen or not handed & set(instruction.operands):
            continue
        if instruction.opcode.endswith("-done"):
            return where, start, instruction
        if instruction.opcode in _PASSES or instruction.opcode.endswith("-update"):
            handed.add(instruction.name)
    return where, start, None


# What may stand around a collective that another line starts.
_AROUND = ("fusion", "call", "async-start", "fusion-start", "call-start")


def _is_start(instruction: hlo.Instruction) -> bool:
    return instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv")


def _holds(program: hlo.Program, fusion: hlo.Instruction, words: str) -> bool:
    """Do these words stand in one of the lines that a fusion calls?"""
    within = [program.computations.get(name, {}) for _, name in fusion.called()]
    return any(words in line.line for computation in within for line in computation.values())
