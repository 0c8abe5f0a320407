# @title Stacked bars with totals (a drawing helper)
from html import escape
from IPython.display import HTML

def stacks(rows, says, unit="GB", limits=(), fills=None):
    """{row: {part: bytes}} as inline SVG: parts side by side, their sum right."""
    scale = {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    greys = [("currentColor", opacity) for opacity in (0.8, 0.55, 0.33, 0.15)]
    fills = fills or dict(zip(parts, greys))
    most = max([*limits, *(sum(row.values()) / scale for row in rows.values())])
    digits = 0 if most >= 100 else 1
    def text(x, y, words, more=""):
        return f'<text x="{x:.1f}" y="{y}" {more}>{escape(words)}</text>'
    def box(x, y, width, part):
        colour, opacity = fills.get(part, ("currentColor", 0.1))
        return (f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="15" '
                f'fill="{colour}" fill-opacity="{opacity}" stroke="currentColor" '
                'stroke-width=".5" stroke-opacity=".5"/>')
    drawn, x, y = [], 0, 4
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
        for limit in limits:  # a tick across the bar, with an edge of the background
            for colour, width in (("Canvas", 4), ("currentColor", 1.5)):
                drawn.append(f'<path d="M{limit / most * 359:.1f} {y - 2}v19" '
                             f'stroke="{colour}" stroke-width="{width}"/>')
        y += 27
    for limit in limits:
        x = limit / most * 359
        words, middle = f"{limit} {unit}", 'text-anchor="middle"'
        drawn.append(text(min(x, 330), y + 14, words, middle))
    return HTML(f'<svg role="img" aria-label="{escape(says)}" width="480" '
                f'viewBox="0 0 360 {y + 20}" font-size="12" fill="currentColor" '
                'style="max-width:100%;height:auto" font-family="sans-serif">'
                f'{"".join(drawn)}</svg>')
