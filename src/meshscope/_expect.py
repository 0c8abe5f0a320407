"""Hold a program to what it may communicate, in one line of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from ._collectives import Collective, collectives
from ._tables import words
from ._totals import total

SOURCES = 3  # lines of source that one line of a difference names


@dataclass(frozen=True)
class Bound:
    """A range of bytes, made by ``at_most`` and ``about``.

    >>> import meshscope
    >>> meshscope.about(1000, 0.1)
    about(1,000 bytes, within 10 %)
    >>> 1050 in meshscope.about(1000, 0.1), 1200 in meshscope.about(1000, 0.1)
    (True, False)

    Attributes:
      low: the least number of bytes.
      high: the largest.
      text: what was asked for, in words.
    """

    low: float
    high: float
    text: str

    def __contains__(self, found: float) -> bool:
        return self.low <= found <= self.high

    def __repr__(self) -> str:
        return self.text


def at_most(n: int) -> Bound:
    """No more than n bytes, and possibly none.

    >>> import meshscope
    >>> 0 in meshscope.at_most(100), 101 in meshscope.at_most(100)
    (True, False)

    Args:
      n: bytes.
    """
    return Bound(0, n, f"at most {n:,} bytes")


def about(n: int, tolerance: float = 0.05) -> Bound:
    """n bytes, more or less.

    >>> import meshscope
    >>> 95 in meshscope.about(100), 94 in meshscope.about(100)
    (True, False)

    Args:
      n: bytes.
      tolerance: by how much of n the number may differ: 0.05 is 5 %.
    """
    return Bound(
        n - n * tolerance, n + n * tolerance, f"about({n:,} bytes, within {100 * tolerance:g} %)"
    )


def expect(
    compiled: Any,
    expected: Mapping[tuple[str, Any], int | Bound],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    others: bool = False,
) -> None:
    """Assert that a program communicates these bytes, by kind and axes, and nothing else.

    Bytes are the payload bytes of one run, executions multiplied in, as
    ``collectives(compiled).by("kind", "axes")`` has them.

    >>> import jax, meshscope
    >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
    >>> x = jax.device_put(jax.numpy.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
    >>> compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    >>> meshscope.expect(compiled, {("all-reduce", "data"): 64})
    >>> meshscope.expect(compiled, {("all-reduce", "data"): meshscope.at_most(100)})
    >>> meshscope.expect(compiled, {("all-gather", "model"): 64})
    Traceback (most recent call last):
    AssertionError: this program does not communicate what was expected
      - all-gather over model: nothing, expected 64 bytes
      + all-reduce over data: 64 bytes, not expected; from ...

    Args:
      compiled: as in ``collectives``, or what that returned.
      expected: bytes by kind and axes. Axes come as a name or a tuple in any order. A number is
        exact; ``at_most(n)`` and ``about(n, tolerance)`` are not. ``{}``: no communication.
      mesh: as in ``collectives``.
      others: whether kinds and axes that are not listed are allowed.

    Raises:
      AssertionError: a difference, with a line for each kind and axes that names the lines of
        your source.
      TypeError, ValueError: as ``collectives`` does; a kind or an axis that does not exist.
    """
    __tracebackhide__ = True  # pytest shows the test, and not what follows here
    rows = compiled if hasattr(compiled, "axis_sizes") else collectives(compiled, mesh)
    table = rows.by("kind", "axes")
    wanted: dict[tuple[str, frozenset[str]], tuple[str, int | Bound]] = {}
    for key, value in expected.items():
        if not (isinstance(key, tuple) and len(key) == 2):
            raise ValueError(f"{key!r} is not a kind and its axes, such as ('all-gather', 'data')")
        table.bytes(*key)  # says what does not exist
        kind, axes = key
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        wanted[kind, frozenset(names)] = (f"{kind} over {words(names)}", value)
    found: dict[tuple[str, frozenset[str]], list[Collective]] = {}
    for row in rows:
        if row.axes:  # others move nothing
            found.setdefault((row.kind, frozenset(row.axes)), []).append(row)
    lines = []
    for key, (name, value) in wanted.items():
        sent = total(found.get(key, [])).payload_bytes
        if sent is None or sent not in _bound(value):
            lines.append(_line(name, sent, found.get(key, []), f"expected {_bound(value)}"))
    for key in found if not others else ():
        if key not in wanted:
            some = found[key]
            name = f"{some[0].kind} over {words(some[0].axes)}"
            lines.append(_line(name, total(some).payload_bytes, some, "not expected"))
    if lines:
        told = "\n  ".join(lines)
        raise AssertionError(f"this program does not communicate what was expected\n  {told}")


def _bound(value: int | Bound) -> Bound:
    return value if isinstance(value, Bound) else Bound(value, value, f"{value:,} bytes")


def _line(name: str, sent: int | None, rows: Sequence[Collective], wanted: str) -> str:
    """One line of a difference: + too much or unknown, - too little."""
    if not rows:
        return f"- {name}: nothing, {wanted}"
    amount = "an unknown number of" if sent is None else f"{sent:,}"
    sign = "+" if wanted == "not expected" else "~"
    return f"{sign} {name}: {amount} bytes, {wanted}; {origin(rows)}"


def origin(rows: Sequence[Collective]) -> str:
    """Where collectives come from, the largest first: from model.py:61 in a loop."""
    ordered = sorted(rows, key=lambda row: -row.payload_bytes * (row.executions or 1))
    places = [
        (row.source_line or row.op_name or "no line of yours") + " in a loop" * row.inside_loop
        for row in ordered
    ]
    shown = list(dict.fromkeys(places))
    more = f" and {len(shown) - SOURCES} more" if len(shown) > SOURCES else ""
    return f"from {', '.join(shown[:SOURCES])}{more}"
