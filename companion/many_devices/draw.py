"""Small drawings in SVG: bars, stacked bars, curves and images of digits."""

import math
from html import escape

from IPython.display import HTML


class Drawing(HTML):
    """Inline SVG; where only text can be shown, the words that it has for those who do not see."""

    def __init__(self, svg, says):
        super().__init__(svg)
        self.says = says

    def __repr__(self):
        return self.says


def bars(rows, says, unit="kB"):
    """{row: {column: bytes}} as inline SVG: every number above its bar."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    most = max(value for row in rows.values() for value in row.values())
    scale, wide, left = {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit], 108, 112

    def text(x, y, words, more=""):
        return f'<text x="{x}" y="{y}"{more}>{escape(words)}</text>'

    def bar(x, y, value):
        digits = 2 if most < 100 * scale else 0
        length = max(value / most * (wide - 16), 0.5)
        return (
            text(x, y, f"{value / scale:,.{digits}f}") + f'<rect x="{x}" '
            f'y="{y + 4}" width="{length:.1f}" height="9" opacity=".55"/>'
        )

    drawn = [
        text(left + i * wide, 14 + 15 * j, part, ' font-weight="bold"')
        for i, name in enumerate(columns)
        for j, part in enumerate([*name.split("\n"), unit])
    ]
    top = 51 + 15 * max(name.count("\n") for name in columns)
    for y, (name, row) in zip(range(top, top + 34 * len(rows), 34), rows.items()):
        drawn += [text(0, y + 6, name)]
        drawn += [
            bar(left + columns.index(column) * wide, y, value) for column, value in row.items()
        ]
    right, below = left + len(columns) * wide, top + 34 * len(rows) - 14
    return Drawing(
        f'<svg role="img" aria-label="{escape(says)}" width="{right}" '
        f'viewBox="0 0 {right} {below}" font-size="12" fill="currentColor" '
        f'style="min-width:{min(right, 600)}px;max-width:100%;height:auto" '
        'font-family="sans-serif">'
        f"{''.join(drawn)}</svg>",
        says,
    )


def curves(lines, says, x="step", y="loss", log=False):
    """{name: [(x, y), ...]} as inline SVG, y from 0 or, with log, in powers of ten."""
    dashes = ["", "6 3", "2 2", "9 3 2 3", "1 4"]
    points = [point for line in lines.values() for point in line]
    x_most, y_most = max(a for a, _ in points), max(b for _, b in points)

    def ticks(most):
        unit = 10 ** math.floor(math.log10(most))
        wide = next(n * unit for n in (0.2, 0.5, 1, 2) if most <= 5 * n * unit)
        return [n * wide for n in range(math.floor(1.01 * most / wide) + 1)]

    if log:
        low = math.floor(math.log10(min(b for _, b in points)))
        high = math.ceil(math.log10(y_most))
        marks = {10.0**n: f"1e{n}" for n in range(low, high + 1)}
    else:
        marks = {value: f"{value:,.3g}" for value in ticks(y_most)}
    left, right, top, bottom = 44, 350, 34 + 16 * len(lines), 214 + 16 * len(lines)

    def at_x(value):
        return left + (right - left) * value / x_most

    def at_y(value):
        share = (math.log10(value) - low) / (high - low) if log else value / y_most
        return bottom - (bottom - top) * share

    def text(x, y, words, anchor="start"):
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        return f"<text {at}>{escape(words)}</text>"

    def path(places, more):
        ends = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        return f'<path d="M{ends}" fill="none" stroke="currentColor" {more}/>'

    drawn = [
        text(0, top - 12, y),
        text(right, bottom + 34, x, "end"),
        path([(left, top), (left, bottom), (right, bottom)], 'opacity=".6"'),
    ]
    for value, words in marks.items():
        drawn.append(text(left - 6, at_y(value) + 4, words, "end"))
        drawn.append(path([(left, at_y(value)), (right, at_y(value))], 'opacity=".15"'))
    for value in ticks(x_most):
        drawn.append(text(at_x(value), bottom + 17, f"{value:,.4g}", "middle"))
    for i, (name, line) in enumerate(lines.items()):
        how = f'stroke-width="1.6" stroke-dasharray="{dashes[i % len(dashes)]}"'
        drawn.append(path([(left, 10 + 16 * i), (left + 28, 10 + 16 * i)], how))
        drawn.append(text(left + 36, 14 + 16 * i, name))
        drawn.append(path([(at_x(a), at_y(b)) for a, b in line], how))
        for a, b in line if len(line) < 9 else ():  # few points: say where they are
            drawn.append(f'<circle cx="{at_x(a):.1f}" cy="{at_y(b):.1f}" r="2.5"/>')
    return Drawing(
        f'<svg role="img" aria-label="{escape(says)}" width="440" '
        f'viewBox="0 0 360 {bottom + 40}" font-size="12" fill="currentColor" '
        'style="max-width:100%;height:auto" font-family="sans-serif">'
        f"{''.join(drawn)}</svg>",
        says,
    )


PATTERNS = (
    '<defs><g fill="none" stroke="currentColor" stroke-width="1.4">'
    '<pattern id="lines" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path d="M-1 6L6 -1M-1 1L1 -1M4 6L6 4"/></pattern>'
    '<pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<circle cx="2.5" cy="2.5" r=".8"/></pattern>'
    '<pattern id="grid" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M0 3H6M3 0V6"/></pattern></g></defs>'
)


def stacks(rows, says, unit="GB", limits=(), fills=None):
    """{row: {part: bytes}} as inline SVG: parts side by side, their sum right.

    Parts are told apart by greys and patterns, or by `fills`, {part: (colour, opacity)}. `limits`
    are ticks across every bar, in the unit.
    """
    scale = {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    patterned = [("currentColor", 0.75), ("url(#lines)", 1), ("currentColor", 0.25)]
    patterned += [("url(#dots)", 1), ("currentColor", 0.05), ("url(#grid)", 1)]
    fills = fills or dict(zip(parts, patterned))
    most = max([*limits, *(sum(row.values()) / scale for row in rows.values())])
    digits = 0 if most >= 100 else 1

    def text(x, y, words, more=""):
        return f'<text x="{x:.1f}" y="{y}" {more}>{escape(words)}</text>'

    def box(x, y, width, part):
        colour, opacity = fills.get(part, ("currentColor", 0.1))
        return (
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="15" '
            f'fill="{colour}" fill-opacity="{opacity}" stroke="currentColor" '
            'stroke-width=".5" stroke-opacity=".5"/>'
        )

    drawn, x, y = [PATTERNS], 0, 4
    for part in parts:  # the key, in as many lines as it takes
        length = 32 + 7.2 * len(part)
        x, y = (0, y + 20) if x + length > 360 else (x, y)
        drawn += [box(x, y, 16, part), text(x + 21, y + 12, part)]
        x += length
    y += 34
    for name, row in rows.items():
        total = sum(row.values()) / scale
        drawn.append(text(0, y + 10, name, 'font-weight="600"'))
        words = f"{total:,.{digits}f} {unit}"
        drawn.append(text(360, y + 10, words, 'text-anchor="end"'))
        x, y = 0, y + 15
        for part, value in row.items():
            width = value / scale / most * 359
            drawn.append(box(x, y, width, part))
            x += width
        for limit in limits:  # a tick across the bar, below its label, edged in the background
            for colour, width in (("Canvas", 4), ("currentColor", 1.5)):
                drawn.append(
                    f'<path d="M{limit / most * 359:.1f} {y}v19" '
                    f'stroke="{colour}" stroke-width="{width}"/>'
                )
        y += 27
    for limit in limits:
        x = limit / most * 359
        words, middle = f"{limit} {unit}", 'text-anchor="middle"'
        drawn.append(text(min(x, 330), y + 14, words, middle))
    return Drawing(
        f'<svg role="img" aria-label="{escape(says)}" width="480" '
        f'viewBox="0 0 360 {y + 20}" font-size="12" fill="currentColor" '
        'style="max-width:100%;height:auto" font-family="sans-serif">'
        f"{''.join(drawn)}</svg>",
        says,
    )


def restarts(processes, last):
    """A row for each process: a bar of its steps, dots for the steps on disk, a cross if killed.

    A process has `first`, the step it started with; `killed`, the step it was writing when it was
    killed, or None; `complete` and `unfinished`, the steps that were then on disk.
    """
    left, unit, high = 76, 22, 34
    middle, stroke = ' text-anchor="middle"', 'fill="none" stroke="currentColor"'

    def x_of(step):
        return left + unit * step

    drawn = ['<text x="0" y="12">step</text>']
    for step in range(0, last + 1, 2):
        drawn.append(f'<text x="{x_of(step)}" y="12"{middle}>{step}</text>')
    for row, one in enumerate(processes):
        y, end = 34 + high * row, last if one.killed is None else one.killed
        drawn.append(f'<text x="0" y="{y + 4}">process {row + 1}</text>')
        wide = unit * (end - one.first)
        drawn.append(
            f'<rect x="{x_of(one.first)}" y="{y - 4}" width="{wide}" height="8" opacity=".3"/>'
        )
        drawn += [f'<circle cx="{x_of(step)}" cy="{y}" r="5"/>' for step in one.complete]
        drawn += [
            f'<circle cx="{x_of(step)}" cy="{y}" r="9" stroke-dasharray="2 2" {stroke}/>'
            for step in one.unfinished
        ]
        if one.killed is not None:
            cross = f"M{x_of(end) - 5} {y - 5}l10 10m0 -10l-10 10"
            drawn.append(f'<path d="{cross}" stroke-width="2" {stroke}/>')
            if row + 1 < len(processes):
                start = x_of(processes[row + 1].first)
                arrow = f"M{start} {y + 8}v{high - 16}m-3 -5l3 5l3 -5"
                drawn.append(f'<path d="{arrow}" {stroke}/>')
    below = 34 + high * len(processes) - 16
    says = "; ".join(
        f"process {row + 1} starts with step {one.first}, then on disk {one.complete}"
        + ("" if one.killed is None else f", killed while it wrote step {one.killed}")
        for row, one in enumerate(processes)
    )
    return Drawing(
        f'<svg role="img" aria-label="{escape(says)}" width="480" '
        f'viewBox="0 0 360 {below}" font-size="12" fill="currentColor" '
        'style="max-width:100%;height:auto" font-family="sans-serif">'
        f"{''.join(drawn)}</svg>",
        says,
    )
