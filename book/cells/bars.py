# @title Bars of bytes, labelled (a drawing helper)
from html import escape
from IPython.display import HTML

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
        return (text(x, y, f"{value / scale:,.{digits}f}") + f'<rect x="{x}" '
                f'y="{y + 4}" width="{length:.1f}" height="9" opacity=".55"/>')
    drawn = [text(left + i * wide, 14 + 15 * j, part, ' font-weight="bold"')
             for i, name in enumerate(columns)
             for j, part in enumerate([*name.split("\n"), unit])]
    top = 51 + 15 * max(name.count("\n") for name in columns)
    for y, (name, row) in zip(range(top, top + 34 * len(rows), 34), rows.items()):
        drawn += [text(0, y + 6, name)]
        drawn += [bar(left + columns.index(column) * wide, y, value)
                  for column, value in row.items()]
    right, below = left + len(columns) * wide, top + 34 * len(rows) - 14
    return HTML(f'<svg role="img" aria-label="{escape(says)}" width="{right}" '
                f'viewBox="0 0 {right} {below}" font-size="12" fill="currentColor" '
                f'style="min-width:{min(right, 600)}px;max-width:100%;height:auto" '
                'font-family="sans-serif">'
                f'{"".join(drawn)}</svg>')
