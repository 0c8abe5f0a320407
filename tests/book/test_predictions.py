"""Predictions come from shapes and axis sizes: they must hold on other meshes too.

The cells tagged `predict` and `predicted`, and all before them, run again with the mesh of the cell
tagged `mesh` made 4×2 and 1×8. Cells tagged `fixed-mesh` are left out.
"""
import pytest

from bookkit.lint.anatomy import WRITTEN_MESH
from bookkit.model.chapter import chapters
from bookkit.run.cells import as_jobs, run_jobs
from rules import verify

OTHERS = ("(4, 2)", "(1, 8)")


def last_predicted(chapter):
    return max((cell.index for cell in chapter.code if "predicted" in cell.tags), default=None)


def with_mesh(chapter, shape):
    """The job of a chapter up to its last prediction, on another mesh."""
    cells = [cell for cell in chapter.code
             if cell.index <= last_predicted(chapter) and "fixed-mesh" not in cell.tags]
    job = as_jobs(cells, id=shape, timeout=200)
    for cell in job["cells"]:
        if "mesh" in cell["tags"]:
            cell["source"] = cell["source"].replace(WRITTEN_MESH, shape)
    return job


def failures(chapter, shapes=OTHERS):
    for outcome in run_jobs([with_mesh(chapter, shape) for shape in shapes]):
        if outcome["failed"] is not None:
            yield (f"book/{chapter.name}.md, cell {outcome['failed']}: fails on a mesh of shape "
                   f"{outcome['id']}: {outcome['error']}; compute from mesh.shape, or tag a "
                   "demonstration that needs this mesh fixed-mesh")


@pytest.mark.parametrize("chapter", [chapter for chapter in chapters() if last_predicted(chapter)],
                         ids=lambda chapter: chapter.name)
def test_on_other_meshes(chapter):
    verify(failures(chapter))
