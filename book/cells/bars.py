# @title Bars of bytes, labelled (a drawing helper of chapter 4)
from html import escape
from IPython.display import HTML

def bars(rows, says, unit="kB"):
    """{row: {column: bytes}} as inline SVG: each number with a bar beside its label."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    most = max(value for row in rows.values() for value in row.values())
    scale, wide, left = {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit], 112, 118
    def text(x, y, words, more=""):
        return f'<text x="{x}" y="{y}" {more}>{escape(words)}</text>'
    def bar(x, y, value):
        label = f"{value / scale:,.2f}" if most < 100 * scale else f"{value / scale:,.0f}"
        length = max(value / most * (wide - 16), 0.5)
        return text(x, y, label) + (f'<rect x="{x}" y="{y + 4}" width="{length:.1f}" '
                                    'height="9" fill="currentColor" opacity=".55"/>')
    drawn = [text(left + i * wide, 14 + 15 * j, part, 'font-weight="bold"')
             for i, name in enumerate(columns) for j, part in enumerate(name.split("\n"))]
    top = 36 + 15 * max(name.count("\n") for name in columns)
    for y, (name, row) in zip(range(top, top + 34 * len(rows), 34), rows.items()):
        drawn.append(text(0, y + 6, name))
        drawn += [bar(left + columns.index(column) * wide, y, value)
                  for column, value in row.items()]
    size = left + len(columns) * wide, top + 34 * len(rows) - 10
    return HTML(f'<svg role="img" aria-label="{escape(says)}" viewBox="0 0 {size[0]} '
                f'{size[1]}" width="{size[0]}" style="max-width:100%;height:auto" '
                'font-size="12" font-family="sans-serif" fill="currentColor">'
                f'{"".join(drawn)}</svg>')
