"""Snapshots of a program's sharding: what it takes, communicates and holds, in a file to read.

``assert_snapshot`` compares a compiled program with such a file. With pytest, the fixture
``sharding_snapshot`` does it, and ``pytest --update-sharding`` writes the files. pytest itself is
not needed here.

>>> import jax, meshscope.testing
>>> mesh = jax.make_mesh((8,), ("data",))
>>> x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
>>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
>>> print(meshscope.testing.snapshot(compiled).rstrip())
# What a device takes, sends and holds in one run: `pytest --update-sharding` writes this file, jax ...
program     on           cpu, data=8                -         -
input       0            float32 (8, 16) P('data')  1         -
output      result       float32 (16) P()           1         -
collective  all-reduce   over data, float32 (16)    64 bytes  ...
memory      arguments    -                          64 bytes  -
memory      outputs      -                          64 bytes  -
memory      aliased      -                          0 bytes   -
memory      temporaries  -                          ...
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from . import _paths
from ._collectives import Collective, Collectives, collectives
from ._full_copies import full_copies
from ._memory import memory
from ._programs import program_text
from ._tables import shape_text, words

__all__ = ["assert_snapshot", "differences", "snapshot"]

FIRST = (
    "# What a device takes, sends and holds in one run: `pytest --update-sharding` writes this file"
)
TOLERANCE = 0.1  # of scratch memory, which a compiler may lay out in another way
COLUMNS = re.compile(r"\s{2,}")


class _Row(NamedTuple):
    """One line. All but the source is compared; lines of source move with every edit."""

    what: str  # program, input, output, collective, whole or memory
    name: str
    how: str
    amount: str
    source: str


def snapshot(compiled: Any, mesh: Mesh | AbstractMesh | None = None, tree: Any = None) -> str:
    """The text of a snapshot: a line for each input, output, collective and sum of memory.

    Leaves whose paths differ in a number alone, such as those of the layers of a list, share a
    line. Lines of source are there to read.

    >>> import jax, meshscope.testing
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
    >>> text = meshscope.testing.snapshot(jax.jit(lambda x: x.sum(0)).lower(x).compile())
    >>> [line.split()[:2] for line in text.splitlines() if "collective" in line]
    [['collective', 'all-reduce']]

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns.
      mesh: as in ``collectives``.
      tree: leaves that should never be whole on a device, as in ``full_copies``; those that are
        get a line each.

    Raises:
      TypeError, ValueError: as ``collectives`` and ``full_copies`` do.
    """
    program_text(compiled)  # says what to pass
    rows = list(_rows(compiled, mesh, tree))
    wide = [max(len(row[n]) for row in rows) for n in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([f"{FIRST}, jax {jax.__version__}", *lines]) + "\n"


def _rows(compiled: Any, mesh: Mesh | AbstractMesh | None, tree: Any) -> Iterator[_Row]:
    moves = collectives(compiled, mesh)
    sizes = ", ".join(f"{name}={size}" for name, size in moves.axis_sizes.items())
    yield _Row("program", "on", f"{_platform(compiled)}, {sizes or 'no mesh'}", "-", "-")
    yield from _placed("input", compiled.args_info, compiled.input_shardings)
    yield from _placed("output", compiled.out_info, compiled.output_shardings)
    yield from _moved(moves)
    if tree is not None:
        seen: dict[tuple[str, str], list[str]] = {}
        for copy in full_copies(compiled, tree):
            layer = "one layer of " if copy.layer else ""
            key = layer + (" or ".join(copy.paths) or "the array"), copy.dtype
            seen.setdefault(key, []).append(copy.source_line or copy.op_name or "-")
        for (name, dtype), sources in sorted(seen.items()):
            yield _Row("whole", name, dtype, "-", sources[0])
    held = memory(compiled)
    for part in ("arguments", "outputs", "aliased", "temporaries"):
        yield _Row("memory", part, "-", f"{getattr(held, part):,} bytes", "-")


def _platform(compiled: Any) -> str:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = [device for one in shardings for device in one.device_set]
    return str(devices[0].platform if devices else jax.default_backend())


def _placed(what: str, shapes: Any, shardings: Any) -> Iterator[_Row]:
    """A line for each kind of leaf: its path, with * for numbers inside, type, shape and spec."""
    if what == "input":
        # Arguments by their number, then those given by name.
        shapes, shardings = (
            {str(n): arg for n, arg in enumerate(args)} | named
            for args, named in (shapes, shardings)
        )
    leaves = _paths.leaves(shapes) if jax.tree.leaves(shapes) else []
    structure: Any = jax.tree.structure(shapes)
    places = structure.flatten_up_to(shardings)  # None: the program does not use it
    kinds = Counter[tuple[str, str]]()
    for (path, leaf), place in zip(leaves, places, strict=True):
        first, dot, rest = path.partition(".")
        name = first + dot + re.sub(r"(?<![^.])\d+(?![^.])", "*", rest)
        spec = "unused" if place is None else _spec(place, leaf.shape)
        kinds[name or "result", f"{leaf.dtype} {shape_text(leaf.shape)} {spec}"] += 1
    for (name, how), count in kinds.items():
        yield _Row(what, name, how, str(count), "-")


def _spec(sharding: Any, shape: tuple[int, ...]) -> str:
    """P('data') in one spelling: without axes of size 1, and without the Nones at the end."""
    if not isinstance(sharding, NamedSharding):
        return f"in pieces of {shape_text(sharding.shard_shape(tuple(shape)))}"
    parts: list[Any] = []
    for part in sharding.spec:
        axes = (part,) if isinstance(part, str) else tuple(part or ())
        axes = tuple(axis for axis in axes if sharding.mesh.shape.get(axis, 0) != 1)
        parts.append(axes[0] if len(axes) == 1 else axes or None)
    while parts and parts[-1] is None:
        parts.pop()
    return f"P({', '.join(map(repr, parts))})"


def _moved(moves: Collectives) -> Iterator[_Row]:
    """A line for each collective, equal ones together."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for row in moves:
        if row.axes:
            times = "unknown times" if row.executions is None else f"{row.executions} times"
            amount = f"{row.payload_bytes:,} bytes"
            amount += f", {times} in a loop" * row.inside_loop
            if not row.inside_loop and row.executions is None:
                amount += ", in a branch"
            how = f"over {words(row.axes)}, {row.dtype} {shape_text(row.shape)}"
            groups.setdefault((row.kind, how, amount), []).append(row)
    for (kind, how, amount), rows in sorted(groups.items(), key=lambda item: item[0]):
        for row in rows:
            yield _Row("collective", kind, how, amount, row.source_line or row.op_name or "-")


def _read(text: str) -> list[_Row]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    rows = [COLUMNS.split(line.strip(), 4) for line in lines]
    if wrong := [line for line, row in zip(lines, rows, strict=True) if len(row) != 5]:
        raise ValueError(
            f"this is not a line of a snapshot: {wrong[0]!r}; write the file again with "
            "pytest --update-sharding"
        )
    return [_Row(*row) for row in rows]


def differences(old: str, new: str, tolerance: float = TOLERANCE) -> list[str]:
    """How the second snapshot differs from the first, a line each, causes before effects.

    ``-`` is in the first alone, ``+`` in the second alone, ``~`` is a sum that changed.

    >>> import meshscope.testing
    >>> old = "memory  arguments    -  64 bytes   -"
    >>> meshscope.testing.differences(old, old.replace("64", "512"))
    ['~ memory: arguments 64 bytes before, 512 bytes now']

    Args:
      old: the text of a snapshot.
      new: another.
      tolerance: by how much of the first the temporaries may differ: 0.1 is 10 %.

    Raises:
      ValueError: a line that is none of a snapshot.
    """
    before, after = _read(old), _read(new)
    had, has = (
        Counter(row[:4] for row in rows if row.what != "memory") for rows in (before, after)
    )
    lines: list[str] = []
    for what in ("program", "input", "output", "collective", "whole"):
        for sign, rows, less in (("-", before, has), ("+", after, had)):
            left = less.copy()
            for row in rows:
                if row.what != what:
                    continue
                left[row[:4]] -= 1
                if left[row[:4]] < 0:
                    lines.append(_told(sign, row))
    now = {row.name: _bytes(row) for row in after if row.what == "memory"}
    for row in before:
        if row.what == "memory" and row.name in now:
            was, found = _bytes(row), now[row.name]
            allowed = tolerance * was if row.name == "temporaries" else 0
            if abs(found - was) > allowed:
                lines.append(f"~ memory: {row.name} {was:,} bytes before, {found:,} bytes now")
    return lines


def _bytes(row: _Row) -> int:
    return int(row.amount.split()[0].replace(",", ""))


def _told(sign: str, row: _Row) -> str:
    """One line of a difference, as a sentence."""
    source = f", from {row.source}" if row.source != "-" else ""
    if row.what == "collective":
        return f"{sign} {row.name} {row.how}, {row.amount}{source}"
    if row.what == "whole":
        verb = "is" if sign == "+" else "was"
        return f"{sign} {row.name} {verb} whole on a device, as {row.how}{source}"
    count = f", {row.amount} of them" if row.amount not in ("1", "-") else ""
    return f"{sign} {row.what} {row.name}: {row.how}{count}"


def assert_snapshot(
    compiled: Any,
    file: str | os.PathLike[str],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    tree: Any = None,
    tolerance: float = TOLERANCE,
    update: bool = False,
) -> bool:
    """Assert that a program is as its snapshot says; whether the file was written.

    >>> import jax, meshscope.testing, pathlib, tempfile
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
    >>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    >>> file = pathlib.Path(tempfile.mkdtemp(), "sum.txt")
    >>> meshscope.testing.assert_snapshot(compiled, file, update=True)
    True
    >>> meshscope.testing.assert_snapshot(compiled, file)
    False
    >>> other = jax.jit(lambda x: x.sum(1)).lower(x).compile()
    >>> meshscope.testing.assert_snapshot(other, file)
    Traceback (most recent call last):
    AssertionError: sum.txt does not describe this program...

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns.
      file: of the snapshot. It is replaced as a whole or not at all.
      mesh: as in ``collectives``.
      tree: as in ``snapshot``.
      tolerance: as in ``differences``.
      update: write the file where it differs, and assert nothing.

    Raises:
      AssertionError: a difference, by input, output, collective and sum of memory, with lines of
        your source; or no file.
      TypeError, ValueError: as ``snapshot`` does.
    """
    __tracebackhide__ = True  # pytest shows the test, and not what follows here
    path = Path(file)
    new = snapshot(compiled, mesh, tree)
    old = path.read_text("utf-8") if path.exists() else None
    if update:
        if old == new:
            return False
        _write(path, new)
        return True
    if old is None:
        raise AssertionError(
            f"there is no snapshot {path}: run pytest --update-sharding, read the file that it "
            "writes, and commit it"
        )
    if lines := differences(old, new, tolerance):
        told = "\n  ".join(lines)
        was = re.search(r"^#.*, jax (\S+)$", old, re.MULTILINE)
        with_jax = ""
        if was and was[1] != jax.__version__:
            with_jax = f" It was written with jax {was[1]}, and this is {jax.__version__}."
        raise AssertionError(
            f"{path.name} does not describe this program.{with_jax} If the difference is meant, "
            f"pytest --update-sharding writes the file again.\n  {told}"
        )
    return False


def _write(path: Path, text: str) -> None:
    """All of a file at once, so that a test that is killed leaves none in half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, "utf-8", newline="\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
