"""Small tables, as plain text and as HTML in the page's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from jax.sharding import PartitionSpec as P

Rows = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, head, rows


def number(value: float | None) -> str:
    """1,234 or 1,234.5; None is unknown."""
    if value is None:
        return "unknown"
    return f"{value:,}" if value == int(value) else f"{value:,.1f}"


def words(value: object) -> str:
    """A tuple as a, b; nothing as a dash."""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return "-" if value in (None, "") else str(value)


def shape_text(shape: tuple[int, ...]) -> str:
    """(2, 4), and (4) for one dimension."""
    return f"({', '.join(map(str, shape))})"


def spec_text(spec: object) -> str:
    """P('data', None); a dash for no spec."""
    if not isinstance(spec, P):
        return "-"
    sums = [f" {{U:{','.join(sorted(spec.unreduced))}}}"] if spec.unreduced else []
    return "".join([f"P{tuple(spec.partitions)}".replace(",)", ")"), *sums])


class Report:
    """What shows itself as a table: text in a terminal, HTML in a notebook."""

    def _table(self) -> Rows:
        raise NotImplementedError

    def __repr__(self) -> str:
        title, head, rows = self._table()
        if not rows:
            return title
        columns = zip(head, *rows, strict=True)
        wide = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([title, *lines])

    def _repr_html_(self) -> str:
        title, head, rows = self._table()
        cell = "border-bottom:1px solid currentColor;padding:.15em .6em;text-align:left"
        top = "".join(f'<th scope="col" style="{cell}">{escape(h)}</th>' for h in head)
        body = "".join(
            "<tr>" + "".join(f'<td style="{cell}">{escape(c)}</td>' for c in row) + "</tr>"
            for row in rows
        )
        return (
            '<table class="meshscope" style="border-collapse:collapse;color:inherit">'
            '<caption style="caption-side:top;text-align:left;color:inherit">'
            f"{escape(title)}</caption>"
            + (f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>" if rows else "")
            + "</table>"
        )
