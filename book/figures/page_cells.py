"""Numbers of a figure from the page that shows it: the same functions, from the same cells."""

import re
from pathlib import Path

CELL = re.compile(r"^```\{code-cell\}[^\n]*\n((?::[^\n]*\n)*)\n?(.*?)^```$", re.M | re.S)


def run_cells(page, *slugs):
    """What the cells `id-SLUG` of the page PAGE.md bind, run in the order given."""
    (path,) = Path(__file__).parents[1].rglob(f"{page}.md")
    source = path.read_text("utf-8")
    cells = {
        slug: code
        for options, code in CELL.findall(source)
        for slug in re.findall(r"\bid-([\w-]+)", options)
    }
    names = {"__name__": page, "print": lambda *_: None}
    for slug in slugs:
        if slug not in cells:
            raise SystemExit(f"{path} has no cell with the tag id-{slug}")
        exec(compile(cells[slug], f"{path}, cell {slug}", "exec"), names)
    return names
