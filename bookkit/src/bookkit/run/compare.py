"""List the outputs that differ between two sets of executed chapters.

    bookkit compare BEFORE AFTER      two folders of `bookkit execute --out DIR`

Cells tagged `timing` are left out: what they show differs each time.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from bookkit.model.book import Problem


def outputs_as_text(cell: NotebookNode) -> str:
    """The outputs of a cell as text to compare: streams, errors, and every form of a result."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(f"[{output.name}]\n{output.text}")
        elif output.output_type == "error":
            parts.append("[error]\n" + "\n".join(output.traceback))
        for mime, data in sorted(output.get("data", {}).items()):
            text = data if isinstance(data, str) else json.dumps(data, indent=1)
            parts.append(f"[{mime}]\n{text}")
    return "\n".join(part.rstrip("\n") for part in parts)


def differences(before: NotebookNode, after: NotebookNode) -> Iterator[tuple[int, str, str]]:
    """(cell counted from 1, its first line, how its outputs differ); cells are matched by their code."""
    old = [cell for cell in before.cells if cell.cell_type == "code"]
    new = [(n, cell) for n, cell in enumerate(after.cells, 1) if cell.cell_type == "code"]
    match = difflib.SequenceMatcher(
        None, [cell.source for cell in old], [cell.source for _, cell in new], autojunk=False
    )
    for tag, a, b, c, d in match.get_opcodes():
        if tag != "equal":
            for number, cell in new[c:d]:
                yield number, first_line(cell), "the code of this cell changed"
            if c == d:
                yield new[min(c, len(new) - 1)][0], first_line(old[a]), "this cell is gone"
            continue
        for one, (number, other) in zip(old[a:b], new[c:d], strict=True):
            if "timing" in other.metadata.get("tags", []) or outputs_as_text(
                one
            ) == outputs_as_text(other):
                continue
            lines = difflib.unified_diff(
                outputs_as_text(one).splitlines(),
                outputs_as_text(other).splitlines(),
                lineterm="",
                n=1,
            )
            yield number, first_line(other), "\n".join(line[:160] for line in list(lines)[2:42])


def first_line(cell: NotebookNode) -> str:
    return next((line for line in cell.source.splitlines() if line.strip()), "")


def compare_folders(before: Path, after: Path) -> Iterator[str]:
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.ipynb")})
    for name in names:
        if not (before / name).exists() or not (after / name).exists():
            yield f"{name} is only in {before if (before / name).exists() else after}"
            continue
        notebooks = [nbformat.read(folder / name, as_version=4) for folder in (before, after)]
        for number, line, how in differences(*notebooks):
            yield f"{name}, cell {number}: {line}\n{how}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit compare", description=__doc__.split("\n")[0])
    options.add_argument("before", type=Path)
    options.add_argument("after", type=Path)
    chosen = options.parse_args(arguments)
    for folder in (chosen.before, chosen.after):
        if not list(folder.glob("*.ipynb")):
            raise Problem(f"{folder} holds no executed chapters: `bookkit execute --out {folder}`")
    found = list(compare_folders(chosen.before, chosen.after))
    print("\n".join(found) or "no output differs")
    if found:
        print(f"{len(found)} cells differ")
