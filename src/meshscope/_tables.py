"""Small tables, as plain text and as HTML in the page's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from . import _compat
from ._messages import Said, attributes, html

Cell = str | Said

FIRST_ROWS = 10  # shown in a page; the rest unfolds
STYLE = (
    # One class deep, so that a page's own style sheet wins with two.
    "<style>"
    ".meshscope table{border-collapse:collapse;border:0;color:inherit;background:none;margin:0;"
    "font-size:.9em;font-variant-numeric:tabular-nums}"
    ".meshscope caption{caption-side:top;text-align:left;color:inherit;padding:.2em 0;"
    "width:max-content;max-width:90vw}"
    ".meshscope th,.meshscope td{padding:.2em 1.2em .2em 0;text-align:left;color:inherit;"
    "background:none;border:0;vertical-align:top;"
    "border-bottom:1px solid rgba(128,128,128,.3)}"
    ".meshscope th{font-weight:600}"
    ".meshscope .ms-number{text-align:right}"
    ".meshscope summary{cursor:pointer;padding:.2em 0}"
    "</style>"
)


@dataclass(frozen=True)
class Column:
    """The head of a column, and whether it holds numbers."""

    head: Cell
    number: bool = False


@dataclass(frozen=True)
class Content:
    """What a report shows."""

    title: Said
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def heads(*names: str) -> list[Column]:
    """Columns of words."""
    return [Column(Said(name)) for name in names]


def numbers(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(Said(name), number=True) for name in names]


def number(value: float | None) -> Cell:
    """1,234 or 1,234.5; None is unknown."""
    if value is None:
        return Said("unknown")
    return f"{value:,}" if value == int(value) else f"{value:,.1f}"


def words(value: object) -> str:
    """A tuple as a, b; nothing as a dash."""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return "-" if value in (None, "") else str(value)


def shape_text(shape: Sequence[int]) -> str:
    """(2, 4), and (4) for one dimension."""
    return f"({', '.join(map(str, shape))})"


def spec_text(spec: object) -> str:
    """P('data', None) {U:model}, with sums that are to be done; a dash for no spec."""
    if not isinstance(spec, PartitionSpec):
        return "-"
    states = [("U", _compat.unreduced(spec)), ("R", _compat.reduced(spec))]
    marks = ", ".join(f"{state}:{','.join(sorted(axes))}" for state, axes in states if axes)
    return f"P({', '.join(map(repr, spec.partitions))})" + (f" {{{marks}}}" if marks else "")


class Report:
    """What shows itself as a table: text in a terminal, HTML in a notebook."""

    def _content(self) -> Content:
        raise NotImplementedError

    def __repr__(self) -> str:
        content = self._content()
        if not content.rows:
            return str(content.title)
        columns = content.columns
        lines = [[str(column.head) for column in columns]]
        lines += [[str(cell) for cell in row] for row in content.rows]
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            [str(content.title)]
            + [
                "  ".join(
                    cell.rjust(width) if column.number else cell.ljust(width)
                    for cell, width, column in zip(line, wide, columns, strict=True)
                ).rstrip()
                for line in lines
            ]
        )

    def _repr_html_(self) -> str:
        content = self._content()
        title, rows = content.title, content.rows
        lines = html(title).replace("\n", "\n<br/>")
        caption = f"<caption{title.attributes()}>{lines}</caption>"
        if not rows:
            return f'<div class="meshscope">{STYLE}<table class="meshscope">{caption}</table></div>'
        # A fold that hides a row or two costs more room than it saves.
        first = rows if len(rows) <= FIRST_ROWS + 2 else rows[:FIRST_ROWS]
        parts = [STYLE, _table(content.columns, first, caption)]
        if rest := rows[len(first) :]:
            more = Said("⋯ {count} more rows", count=len(rest))
            parts.append(
                f"<details><summary{more.attributes()}>{html(more)}</summary>"
                f"{_table(content.columns, rest)}</details>"
            )
        return f'<div class="meshscope">{"".join(parts)}</div>'


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str = "") -> str:
    def line(cells: Sequence[Cell], tag: str, more: str = "") -> str:
        return "".join(
            f"<{tag}{more}{_class(column)}{attributes(cell)}>{html(cell)}</{tag}>"
            for cell, column in zip(cells, columns, strict=True)
        )

    top = line([column.head for column in columns], "th", ' scope="col"')
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<table class="meshscope">{caption}<thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _class(column: Column) -> str:
    return ' class="ms-number"' if column.number else ""
