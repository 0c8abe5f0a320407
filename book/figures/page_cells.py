"""Numbers of a figure from the page that shows it: the same functions, from the same cells."""

import re
from pathlib import Path

CELL = re.compile(r"^```\{code-cell\}[^\n]*\n((?::[^\n]*\n)*)\n?(.*?)^```$", re.M | re.S)


def run_cells(page, *slugs):
    """What the cells `id-SLUG` or `shared-SLUG` of book/PAGE.md bind, run in the order given."""
    source = Path(__file__).parents[1].joinpath(f"{page}.md").read_text("utf-8")
    cells = {
        slug: code
        for options, code in CELL.findall(source)
        for slug in re.findall(r"\b(?:id|shared)-([\w-]+)", options)
    }
    names = {"__name__": page, "print": lambda *_: None}
    for slug in slugs:
        if slug not in cells:
            raise SystemExit(f"book/{page}.md has no cell with the tag id-{slug} or shared-{slug}")
        exec(compile(cells[slug], f"book/{page}.md, cell {slug}", "exec"), names)
    return names
