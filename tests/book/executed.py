"""Executed chapters, from the cache that the site is built from (bookkit/run/execute.py)."""
import functools

import pytest

from bookkit.model.book import Problem
from bookkit.run.execute import execute
from rules import BOOK


@functools.cache
def run(name):
    try:
        return execute(BOOK, [f"book/{name}"], say=lambda text: None)[f"book/{name}"]
    except Problem as problem:
        return problem


def executed(name):
    """The executed, normalised notebook of a chapter; a chapter that fails fails the test."""
    found = run(name)
    if isinstance(found, Problem):
        pytest.fail(f"`bookkit execute book/{name}` fails:\n{found}", pytrace=False)
    return found


def outputs(notebook):
    """(cell, output) of every output."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                yield cell, output


def shown(output):
    """All text of one output: streams, results in every text form, errors."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join([output.ename, output.evalue, *output.traceback])
    return "\n".join(text if isinstance(text, str) else "".join(text)
                     for mime, text in output.data.items()
                     if mime.startswith("text/") or mime == "image/svg+xml")
