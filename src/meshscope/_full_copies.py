"""Does a program hold a sharded array in one piece? Seen by numbers of elements."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, overload

from . import _compat
from . import _hlo as hlo
from . import _programs as programs
from ._messages import Said
from ._paths import placed_leaves
from ._tables import Cell, Content, Report, heads, number, numbers, shape_text

Shape = tuple[int, ...]
Exclude = str | Shape

# Instructions that only hand a value on, or name what another computation returns.
_CARRIES = {
    *("get-tuple-element", "tuple", "bitcast", "copy", "copy-start", "copy-done"),
    *("opt-barrier", "optimization-barrier", "add-dependency", "domain"),
}
_CALLS = {
    *("fusion", "while", "conditional", "call", "async-start", "async-update", "async-done"),
}
SHOWN = 5  # lines of an error, and operations in one of them
LONGEST = 80  # characters of an operation's name


@dataclass(frozen=True)
class FullCopy:
    """Values of a program that have as many elements as an array that should be sharded.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> split, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    >>> w = jax.ShapeDtypeStruct((48, 80), "float32", sharding=split)
    >>> gather = jax.jit(lambda w: w.T, out_shardings=whole).lower(w).compile()
    >>> copy = meshscope.full_copies(gather, {"w": w})[0]
    >>> copy.paths, copy.shape, copy.elements
    (('w',), (48, 80), 3840)

    Attributes:
      paths: the leaves that it may be a copy of; several where they are equally large.
      shape: of the first of them, or of one of its layers.
      layer: whether it is one layer of a stack, not all of it.
      found: the shape that the program's values have.
      dtype: their element type, by JAX's name.
      op_name: JAX's name of the operation, or ``""``.
      source_line: ``"file.py:12"``, in a notebook ``"cell:12"``, or None.
      lines: the program's lines, one per value.
      or_piece_of: the path of another leaf of which it may be a piece; None: it is certain.
    """

    paths: tuple[str, ...]
    shape: Shape
    layer: bool
    found: Shape
    dtype: str
    op_name: str
    source_line: str | None
    lines: tuple[str, ...]
    or_piece_of: str | None

    @property
    def elements(self) -> int:
        """How many elements each value has.

        >>> import meshscope
        >>> copy = meshscope.FullCopy(("w",), (4, 8), False, (32,), "int8", "", None, (), None)
        >>> copy.elements
        32
        """
        return math.prod(self.found)

    def _whose(self) -> Cell:
        """The leaf or leaves, in words."""
        path: Cell = ", ".join(self.paths) or Said("array")
        if self.layer:
            path = Said("one layer of {path}", path=path)
        if self.or_piece_of is None:
            return path
        return Said("{path}, or a piece of {other}", path=path, other=self.or_piece_of)


class FullCopies(Report, Sequence[FullCopy]):
    """What ``full_copies`` found: a sequence of ``FullCopy``, the largest first.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> split, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    >>> w = jax.ShapeDtypeStruct((48, 80), "float32", sharding=split)
    >>> gather = jax.jit(lambda w: w.T, out_shardings=whole).lower(w).compile()
    >>> bool(meshscope.full_copies(gather, w)), len(meshscope.full_copies(gather, w)) > 0
    (True, True)
    """

    def __init__(self, rows: Sequence[FullCopy]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> FullCopy: ...
    @overload
    def __getitem__(self, index: slice) -> FullCopies: ...
    def __getitem__(self, index: SupportsIndex | slice) -> FullCopy | FullCopies:
        return FullCopies(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def grouped(self) -> FullCopies:
        """The same with one row for each leaf, shape and line of source: as short as it gets.

        A training step makes many values of one shape at one line: products, casts, copies. A row
        has the operation and dtype of the first of them, and the lines of all.

        >>> import jax, meshscope
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> split, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
        >>> w = jax.ShapeDtypeStruct((48, 80), "float32", sharding=split)
        >>> double = lambda w: (2 * w).astype("bfloat16")
        >>> program = jax.jit(double, out_shardings=whole).lower(w).compile()
        >>> copies = meshscope.full_copies(program, {"w": w})
        >>> len(copies) > 1, len(copies.grouped())
        (True, 1)
        """
        return FullCopies(
            [
                replace(rows[0], lines=tuple(line for row in rows for line in row.lines))
                for rows in self._groups()
            ]
        )

    def _groups(self) -> list[list[FullCopy]]:
        """Rows of one leaf, shape and line of source, in the order of the first of each."""
        groups: dict[Any, list[FullCopy]] = {}
        for row in self:
            key = row.paths, row.layer, _dimensions(row.found), row.source_line, row.or_piece_of
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def _content(self) -> Content:
        one = "1 kind of value is whole on a device" if self else "Nothing is whole on a device"
        title = "{count} kinds of values are whole on a device" if len(self) > 1 else one
        rows = [
            [
                row._whose(),
                shape_text(row.shape),
                f"{row.dtype}[{','.join(map(str, row.found))}]",
                number(len(row.lines)),
                row.op_name or "-",
                row.source_line or "-",
            ]
            for row in self
        ]
        columns = heads("leaf", "shape", "found")
        columns += [*numbers("lines"), *heads("operation", "source")]
        values = {"count": len(self)} if len(self) > 1 else {}
        return Content(Said(title, **values), columns, rows)


@dataclass(frozen=True)
class _Whole:
    """What no device should hold: a leaf, or one layer of a stack."""

    path: str
    shape: Shape
    layer: bool
    dtype: str


def full_copies(
    compiled: Any,
    tree: Any,
    *,
    exclude: Exclude | Iterable[Exclude] = (),
    stacked: bool = True,
    min_bytes: int = 0,
) -> FullCopies:
    """List the values of a program that are as large as a whole leaf, or as one layer of it.

    ``assert_no_full_copy`` says what counts and what the arguments are; it raises where this
    lists.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> split = jax.NamedSharding(mesh, jax.P("data"))
    >>> w = jax.ShapeDtypeStruct((48, 80), "float32", sharding=split)
    >>> halve = jax.jit(lambda w: w / 2, out_shardings=split).lower(w).compile()
    >>> meshscope.full_copies(halve, {"w": w})
    Nothing is whole on a device

    Raises:
      ValueError: nothing to check; a line of the program that could not be read; a text that
        is not a compiled program; an exclusion that excludes nothing.
      TypeError: something other than a compiled program, or a leaf that is not on devices,
        with what to pass instead.
    """
    leaves = placed_leaves(tree)
    wholes: dict[int, list[_Whole]] = {}
    pieces: dict[int, dict[Shape, str]] = {}
    for path, leaf in leaves:
        shape = tuple(leaf.shape)
        piece = tuple(leaf.sharding.shard_shape(shape))
        # A stack of layers: at least matrices, of which a device holds a part of each.
        stack = stacked and len(shape) > 2 and shape[0] == piece[0] > 1
        for layer in (False, True) if stack else (False,):
            whole, part = (shape[1:], piece[1:]) if layer else (shape, piece)
            pieces.setdefault(math.prod(part), {}).setdefault(_dimensions(part), path)
            large = not min_bytes or math.prod(whole) * _compat.bits(leaf.dtype) >= 8 * min_bytes
            if whole != part and math.prod(whole) and large:
                wholes.setdefault(math.prod(whole), []).append(
                    _Whole(path, whole, layer, str(leaf.dtype))
                )
    if not wholes:
        raise ValueError(
            "nothing to check, every leaf is whole on every device"
            + (f" or smaller than min_bytes={min_bytes:,}" if min_bytes else "")
            + ": pass arrays, or jax.ShapeDtypeStructs with shardings, of which at least one is split"
        )
    text, program = programs.program(compiled)
    if program.unread:
        raise ValueError(
            f"{len(program.unread)} line(s) of this program could not be read, so that it cannot "
            f"be told what they hold: {program.unread[0][:300]}"
        )
    patterns = [exclude] if _one(exclude) else list(exclude)
    used: set[int] = set()
    sources = hlo.Sources(text)
    found: dict[FullCopy, list[str]] = {}  # without its lines: the lines
    for instruction, named in _made(program):
        for element, dims in instruction.arrays:
            candidates = wholes.get(math.prod(dims), [])
            dimensions = _dimensions(dims)
            exact = [one for one in candidates if _dimensions(one.shape) == dimensions]
            alike = pieces.get(math.prod(dims), {})
            # As many elements as a piece of another leaf: dimensions may tell.
            if not candidates or (dimensions in alike and not exact):
                continue
            doubt = None
            if alike and (dimensions in alike or not exact):
                doubt = alike.get(dimensions) or next(iter(alike.values()))
            op_name, source = _metadata(named, sources)
            hits = {n for n, pattern in enumerate(patterns) if _is(pattern, dims, op_name, source)}
            used |= hits
            if hits:
                continue
            whose = exact or candidates
            whose = [one for one in whose if one.layer == whose[0].layer]
            row = FullCopy(
                paths=tuple(dict.fromkeys(one.path for one in whose)),
                shape=whose[0].shape,
                layer=whose[0].layer,
                found=dims,
                dtype=hlo.dtype(element),
                op_name=op_name,
                source_line=source,
                lines=(),
                or_piece_of=doubt,
            )
            line = re.sub(r",? (metadata|\w+_config)=\{.*", "", instruction.line)
            found.setdefault(row, []).append(line)
    if idle := [pattern for n, pattern in enumerate(patterns) if n not in used]:
        raise ValueError(
            f"exclude={idle[0]!r} excludes nothing: give a pattern for an operation's name or "
            "for file.py:line, or a shape, as full_copies lists them"
        )
    rows = [replace(row, lines=tuple(lines)) for row, lines in found.items()]
    dtypes = {(one.path, one.dtype) for many in wholes.values() for one in many}

    def order(row: FullCopy) -> tuple[bool, int, bool, bool]:
        """What is certain first, then the largest, then what looks like the leaf itself."""
        shape = _dimensions(row.found) != _dimensions(row.shape)
        dtype = not any((path, row.dtype) in dtypes for path in row.paths)
        return row.or_piece_of is not None, -row.elements, shape, dtype

    return FullCopies(sorted(rows, key=order))


def assert_no_full_copy(
    compiled: Any,
    tree: Any,
    *,
    exclude: Exclude | Iterable[Exclude] = (),
    stacked: bool = True,
    min_bytes: int = 0,
) -> None:
    """Assert that a program holds no leaf of a tree, and no layer of a stack, in one piece.

    A compiled program has the shapes that one device sees. A value counts as a full copy if
    it has exactly as many elements as a leaf that is split, whatever its shape and dtype:
    transposed, flattened, cast or expanded, it is still a copy. So does one with as many as
    one layer of a stack. What is inside a fusion counts too, although it may never reach
    memory. Leaves that are whole on every device are not checked.

    Passing is necessary, not sufficient. A copy with padding has more elements; a half of an
    array has fewer; what a kernel does inside is not seen. Look at temporaries too:
    ``memory(compiled).temporaries`` should be of the order of the pieces.

    In a program that makes or updates weights nothing else has as many elements, and every
    copy is an error. In one with activations, gradients or data, other values may have. The error
    has one line for each shape and line of your source, the largest first, and
    ``full_copies(...).grouped()`` shows all of them as a table; ``min_bytes`` leaves out the small
    leaves, and ``exclude`` names what you have looked at. If many remain, compile with sizes that
    no two dimensions share, such as a batch of 24 and a width of 80.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> split = jax.NamedSharding(mesh, jax.P("data", "model"))
    >>> w = jax.ShapeDtypeStruct((48, 80), "float32", sharding=split)
    >>> normal = jax.nn.initializers.normal()
    >>> init = jax.jit(lambda key: normal(key, w.shape), out_shardings=split)
    >>> meshscope.assert_no_full_copy(init.lower(jax.random.key(0)).compile(), w)

    >>> gather = jax.jit(lambda w: w * 2, out_shardings=jax.NamedSharding(mesh, jax.P()))
    >>> meshscope.assert_no_full_copy(gather.lower(w).compile(), {"w": w})
    Traceback (most recent call last):
    AssertionError: w (48, 80) is whole in this program: ...

    Args:
      compiled: what ``.lower(...).compile()`` returns, for example of an initialiser, or its
        text.
      tree: a pytree of arrays, or of ``jax.ShapeDtypeStruct`` with shardings, as they
        should be; a Flax module or variable is one.
      exclude: values that are no copies: patterns (``*`` and ``?``) for the name of an
        operation or for its source, such as ``"*/dot_general"`` or ``"model.py:31"``; or
        shapes as a device sees them, such as ``(64, 384)``.
      stacked: whether a leaf of three or more dimensions, of which the first is not split, is
        a stack of layers. False for kernels of convolutions and attention that are not
        stacked, if their slices raise false alarms.
      min_bytes: leaves and layers that are smaller, counted whole, are not checked: biases and
        norms of a training step have as many elements as many other values.

    Raises:
      AssertionError: a full copy, with the leaf's path, the shape that was found, the
        operation and its source.
      ValueError: no leaf is left to check; a line of the program that could not be read; a
        text that is not a compiled program; an exclusion that excludes nothing; or a value
        that may also be a piece of another leaf, so that sizes cannot tell (choose sizes that
        differ).
      TypeError: something other than a compiled program, or a leaf that is not on devices,
        with what to pass instead.
    """
    __tracebackhide__ = True  # pytest shows the test, and not what follows here
    groups = full_copies(
        compiled, tree, exclude=exclude, stacked=stacked, min_bytes=min_bytes
    )._groups()
    if not groups:
        return
    certain = [rows for rows in groups if rows[0].or_piece_of is None]
    shown = (certain or groups)[:SHOWN]
    lines = [_line(rows) for rows in shown]
    if more := len(groups) - len(shown):
        lines.append(f"and {more} more, which full_copies(...).grouped() lists")
    told = "\n  ".join(lines)
    first = shown[0][0]
    leaf = " or ".join(filter(None, first.paths)) or "the array"
    whose = f"{'one layer of ' * first.layer}{leaf} {shape_text(first.shape)}"
    if certain:
        raise AssertionError(f"{whose} is whole in this program: {told}")
    raise ValueError(
        f"cannot tell whether this is {whose} or a piece of {first.or_piece_of}, which has as "
        f"many elements; choose sizes that differ, or exclude it: {told}"
    )


def _dimensions(shape: Shape) -> Shape:
    return tuple(sorted(n for n in shape if n != 1))


def _one(exclude: Any) -> bool:
    """Is it a pattern or a shape, not several?"""
    shape = isinstance(exclude, tuple) and bool(exclude) and all(type(n) is int for n in exclude)
    return isinstance(exclude, str) or shape


def _is(pattern: Any, dims: Shape, op_name: str, source: str | None) -> bool:
    """Does an exclusion mean a value?"""
    if not isinstance(pattern, str):
        return tuple(pattern) == dims
    literal = pattern.replace("[", "[[]")  # names of operations have brackets
    return any(fnmatch.fnmatchcase(text, literal) for text in (op_name, source or ""))


def _made(program: hlo.Program) -> Iterator[tuple[hlo.Instruction, list[hlo.Instruction]]]:
    """Each instruction that makes values, with those around it that may say what it is for."""
    for where, computation in program.computations.items():
        around: list[hlo.Instruction] = []
        at = where
        while (found := program.caller(at)) and len(around) < len(program.computations):
            at, caller = found
            around.append(caller)
        for instruction in computation.values():
            opcode, called = instruction.opcode, [name for _, name in instruction.called()]
            known = bool(called) and all(name in program.computations for name in called)
            passed = opcode in _CARRIES or (opcode in _CALLS and known)
            if not passed and (opcode != "parameter" or where == program.entry):
                yield instruction, [instruction, *around]


def _metadata(named: Sequence[hlo.Instruction], sources: hlo.Sources) -> tuple[str, str | None]:
    """Name and source of the first instruction that has a name."""
    for instruction in named:
        if op_name := hlo.op_name(instruction.line):
            return op_name, sources.find(instruction.line)
    return "", None


def _line(rows: Sequence[FullCopy]) -> str:
    """One line of an error, for the rows of one leaf, shape and line of source."""
    first = rows[0]
    names = list(dict.fromkeys(row.op_name for row in rows if row.op_name))
    last = list(dict.fromkeys(name.split("/")[-1] for name in names))  # jit(step)/sin is a sin
    some = [names[0], *last[1:SHOWN]] + ["..."] * (len(last) > SHOWN) if names else []
    by = f" by {', '.join(map(_short, some))}" if some else ""
    at = f" at {first.source_line}" if first.source_line else ""
    lines = [line for row in rows for line in row.lines]
    count = f", {len(lines)} lines" if len(lines) > 1 else ""
    found = f"{first.dtype}[{','.join(map(str, first.found))}]"
    return f"{found}{by}{at}{count}: {lines[0]}"


def _short(name: str) -> str:
    """The name of an operation; that of a fusion may join the names of hundreds."""
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}..."
