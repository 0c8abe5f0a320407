"""Sums over collectives, by some of their fields: the tables of ``by`` and ``diff``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ._messages import Said
from ._programs import KINDS, UNMATCHED
from ._tables import Cell, Column, Content, Report, number, numbers, shape_text, words

HEADS = {  # of the columns for fields of Collective and of Overlap
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
    "loop": "loop",
    "trips": "trips",
    "beside": "beside it",
    "hidden": "beside a matmul",
    "matmuls": "matmuls",
    "flops": "FLOPs of matmuls",
    "other_bytes": "other bytes",
}
BESIDE = ("matmul", "kernel", "other work", "nothing", "synchronous", "unknown")
AXES = ("axes", "within")  # fields that name mesh axes
NUMBERS = ("executions", "payload_bytes", "wire_bytes", "group_size")


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
        for name, all_of_it in (("kind", KINDS), ("beside", BESIDE)):
            if field == name and value not in all_of_it:
                raise ValueError(f"no {name} {value!r}, there are {', '.join(all_of_it)}")
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
            return minus(new, old)
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
            [*map(cell, self._fields, key if len(self._fields) > 1 else (key,))]
            + [number(value) for value in totals]
            for key, totals in self.items()
        ]
        columns = [Column(Said(HEADS[field]), field in NUMBERS) for field in self._fields]
        columns += numbers(*map(HEADS.__getitem__, NUMBERS[:3]))
        return Content(self._title, columns, rows)


def cell(field: str, value: Any) -> Cell:
    """A value of a field of ``Collective`` or ``Overlap``, as a table shows it."""
    if field in (*NUMBERS, "trips", "flops", "other_bytes"):
        return number(value)
    if field in ("inside_loop", "hidden"):
        return Said("unknown") if value is None else Said("yes" if value else "no")
    if field == "beside":
        return Said(value)
    return shape_text(value) if field == "shape" else words(value)


def summed(
    rows: Sequence[Any], fields: Sequence[str], there: Sequence[str], example: str
) -> dict[Any, Totals]:
    """Totals of the rows that agree in some fields; ValueError for a field that does not exist."""
    told = f"there are {', '.join(there)}"
    if not fields:
        raise ValueError(f"name a field, for example {example}; {told}")
    if wrong := [field for field in fields if field not in there]:
        raise ValueError(f"no field {wrong[0]!r}, {told}")
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        key = tuple(getattr(row, field) for field in fields)
        groups.setdefault(key if len(fields) > 1 else key[0], []).append(row)
    return {key: total(group) for key, group in groups.items()}


def total(rows: Sequence[Any]) -> Totals:
    def add(values: list[Any]) -> Any:
        return None if None in values else sum(values)

    def times(row: Any, value: float | None) -> Any:
        if value is None or row.executions is None:
            return None
        return value * row.executions

    return Totals(
        add([row.executions for row in rows]),
        add([times(row, row.payload_bytes) for row in rows]),
        add([times(row, row.wire_bytes) for row in rows]),
    )


def minus(new: Totals, old: Totals) -> Totals:
    pairs: Any = zip(new, old, strict=True)
    return Totals(*(None if None in pair else pair[0] - pair[1] for pair in pairs))
