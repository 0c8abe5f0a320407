"""Predictions that are computed from shapes and axis sizes hold on other meshes too.

The cells tagged `rerun`, and all before them that show, run again with the mesh of the cell tagged
`mesh` made 4×2 and 1×8: what such a cell prints as predicted and as measured must be the same. Cells
tagged `fixed-mesh` are left out.
"""
import re

import pytest

from bookkit.lint.anatomy import WRITTEN_MESH
from bookkit.model.chapter import chapters
from bookkit.run.cells import as_jobs, run_jobs
from rules import verify

pytestmark = pytest.mark.newest  # of kernels and setup cells: once is enough

OTHERS = ("(4, 2)", "(1, 8)")


def last_predicted(chapter):
    """The last cell whose prediction is computed."""
    return max((cell.index for cell in chapter.code if "rerun" in cell.tags), default=None)


def with_mesh(chapter, shape):
    """The job of a chapter up to its last prediction, on another mesh; proofs are about the page's own."""
    cells = [cell for cell in chapter.shown
             if cell.index <= last_predicted(chapter) and "fixed-mesh" not in cell.tags]
    job = as_jobs(cells, id=(chapter.name, shape), timeout=200)
    for cell in job["cells"]:
        if "mesh" in cell["tags"]:
            cell["source"] = cell["source"].replace(WRITTEN_MESH, shape)
    return job


SAID = re.compile(r"predicted\b(.*?)·\s*measured\b(.*)")


def unlike_predicted(chapter, outcome):
    """Lines of the cells tagged rerun in which the two differ; a cell without such a line is named too."""
    printed = {entry["end"]: entry["printed"] for entry in outcome["cells"]}
    for cell in chapter.code:
        if "rerun" in cell.tags and cell.index in printed and cell.index != outcome["failed"]:
            lines = [line for line in printed[cell.index].splitlines() if SAID.search(line)]
            for line in lines or ["nothing as predicted and measured"]:
                found = SAID.search(line)
                if not found or found[1].strip(" ,:") != found[2].strip(" ,:"):
                    yield cell.index, f"prints {line!r}"


def failures(chapters):
    """What fails on another mesh, by chapter; two run at a time, in forks of one process."""
    found = {chapter.name: [] for chapter in chapters}
    named = {chapter.name: chapter for chapter in chapters}
    jobs = [with_mesh(chapter, shape) for chapter in chapters for shape in OTHERS]
    for outcome in run_jobs(jobs, parallel=2):
        name, shape = outcome["id"]
        said = list(unlike_predicted(named[name], outcome))
        if outcome["failed"] is not None:
            said.append((outcome["failed"], f"fails: {outcome['error']}"))
        for cell, what in said:
            found[name].append(
                f"book/{name}.md, cell {cell}: on a mesh of shape {shape} it {what}; compute from "
                "mesh.shape, or tag a demonstration that needs this mesh fixed-mesh")
    return found


CHAPTERS = [chapter for chapter in chapters() if last_predicted(chapter)]


@pytest.fixture(scope="module")
def failed():
    return failures(CHAPTERS)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_on_other_meshes(failed, chapter):
    verify(failed[chapter.name])
