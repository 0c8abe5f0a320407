# @title Curves over a common axis (a drawing helper)
import math
from html import escape
from IPython.display import HTML

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
    drawn = [text(0, top - 12, y), text(right, bottom + 34, x, "end"),
             path([(left, top), (left, bottom), (right, bottom)], 'opacity=".6"')]
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
    return HTML(f'<svg role="img" aria-label="{escape(says)}" width="440" '
                f'viewBox="0 0 360 {bottom + 40}" font-size="12" fill="currentColor" '
                'style="max-width:100%;height:auto" font-family="sans-serif">'
                f'{"".join(drawn)}</svg>')
