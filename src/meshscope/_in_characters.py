"""A drawing in characters, for a terminal."""

from __future__ import annotations

import itertools

from ._messages import plain
from ._scene import Scene


def as_text(s: Scene) -> str:
    mesh, (rows, columns) = s.p.is_mesh, map(len, s.seen)
    out = [*s.heading, f"{s.p.what}  {s.p.spec}", *map(plain, s.above)]
    side, top = s.ticks(0), s.ticks(1)
    left = [plain(line) for line in s.side]
    gutter = max(map(len, left)) + 1 if left else 0
    scale = max(map(len, side)) + 1 if left else 0
    ruled = rows <= 8  # lines between rows, and numbers on these lines

    def short(held: list[str]) -> str:
        text = " ".join(held)  # in narrow columns, one line more
        return text if columns <= 8 else text.replace("…", "\n…").replace("–", "\n–")

    labels = [short(c) for _, cells in s.panels for r in cells for c in r if c]
    wide = max(len(line) for text in labels for line in text.split("\n"))
    wide += 2 if columns <= 8 else 0
    if columns <= 8:
        wide = max(wide, *(len(t) + mesh for t in top))
    for name, cells in s.panels:
        out += [plain(name)] if name else []
        if s.has[1]:
            out.append(" " * (gutter + scale) + plain(s.top))
            line = ""
            for n, tick in enumerate(top):
                at = n * (wide + 1) + (1 + (wide - len(tick)) // 2 if mesh else 0)
                if at > len(line) or not n:
                    line = f"{line:<{at}}{tick}"
            out.append(" " * (gutter + scale) + line)
        body: list[tuple[str, str]] = []
        rule = ["─" * wide] * columns
        for n, row in enumerate(cells):
            if ruled or n == 0:
                a, b, c = "┌┬┐" if n == 0 else "├┼┤"
                body.append(("" if mesh or not ruled else side[n], a + b.join(rule) + c))
            texts = ["⋯" if c is None else short(c) for c in row]
            tick = "" if not mesh and ruled else side[n]
            for layer in itertools.zip_longest(*(t.split("\n") for t in texts)):
                body.append((tick, f"│{'│'.join((t or '').center(wide) for t in layer)}│"))
                tick = ""
        body.append(("" if mesh else side[-1], f"└{'┴'.join(rule)}┘"))
        skip = max(0, (len(body) - len(left)) // 2)
        words = [""] * skip + left
        body += [("", "")] * (len(words) - len(body))
        words += [""] * (len(body) - len(words))
        for word, (tick, line) in zip(words, body):
            mark = f"{tick:>{scale - 1}} " if left else ""
            out.append(f"{word:<{gutter}}{mark}{line}")
    out += map(plain, s.foot)
    return "\n".join(line.rstrip() for line in out)
