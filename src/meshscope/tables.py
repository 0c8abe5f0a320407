"""Small tables, as plain text and as HTML that follows the page's colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def number(value: float | None) -> str:
    """An integer with thousands separators; a fraction with one digit; None as unknown."""
    if value is None:
        return "unknown"
    return f"{value:,}" if value == int(value) else f"{value:,.1f}"


def plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; no colours, no escape codes."""
    if not rows:
        return title
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in (head, *rows)]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def html(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose lines are `currentColor`, for light and dark pages alike."""
    line = "border-bottom:1px solid currentColor;padding:.15em .6em;text-align:left"
    body = "".join(
        "<tr>" + "".join(f'<td style="{line}">{escape(c)}</td>' for c in row) + "</tr>"
        for row in rows
    )
    top = "".join(f'<th scope="col" style="{line}">{escape(c)}</th>' for c in head)
    thead = f"<thead><tr>{top}</tr></thead>" if rows else ""
    return (
        '<table class="meshscope" style="border-collapse:collapse;color:inherit">'
        f'<caption style="caption-side:top;text-align:left;color:inherit">{escape(title)}</caption>'
        f"{thead}<tbody>{body}</tbody></table>"
    )


class Report:
    """What shows itself as a table: text in a terminal, HTML in a notebook."""

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return plain(*self._table())

    def _repr_html_(self) -> str:
        return html(*self._table())
