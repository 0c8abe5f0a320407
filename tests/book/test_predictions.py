"""Predictions come from shapes and axis sizes: they must hold on other meshes too.

The cells tagged `rerun` (in the old form: `predicted`), and all before them, run again with the mesh
of the cell tagged `mesh` made 4×2 and 1×8. Cells tagged `fixed-mesh` are left out.
"""
import pytest

from bookkit.lint.anatomy import WRITTEN_MESH
from bookkit.model.chapter import chapters
from bookkit.run.cells import as_jobs, run_jobs
from rules import BOOK, verify

pytestmark = pytest.mark.reads()  # the code of pages alone

OTHERS = ("(4, 2)", "(1, 8)")


def last_predicted(chapter):
    """The last cell whose prediction is computed: in the old form all are, else they are tagged rerun."""
    tag = "predicted" if chapter.name in BOOK.exceptions.get("old_form", ()) else "rerun"
    return max((cell.index for cell in chapter.code if tag in cell.tags), default=None)


def with_mesh(chapter, shape):
    """The job of a chapter up to its last prediction, on another mesh."""
    cells = [cell for cell in chapter.code
             if cell.index <= last_predicted(chapter) and "fixed-mesh" not in cell.tags]
    job = as_jobs(cells, id=(chapter.name, shape), timeout=200)
    for cell in job["cells"]:
        if "mesh" in cell["tags"]:
            cell["source"] = cell["source"].replace(WRITTEN_MESH, shape)
    return job


def failures(chapters):
    """What fails on another mesh, by chapter; two run at a time, in forks of one process."""
    found = {chapter.name: [] for chapter in chapters}
    jobs = [with_mesh(chapter, shape) for chapter in chapters for shape in OTHERS]
    for outcome in run_jobs(jobs, parallel=2):
        if outcome["failed"] is not None:
            name, shape = outcome["id"]
            found[name].append(
                f"book/{name}.md, cell {outcome['failed']}: fails on a mesh of shape {shape}: "
                f"{outcome['error']}; compute from mesh.shape, or tag a demonstration that needs "
                "this mesh fixed-mesh")
    return found


CHAPTERS = [chapter for chapter in chapters() if last_predicted(chapter)]


@pytest.fixture(scope="module")
def failed():
    return failures(CHAPTERS)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_on_other_meshes(failed, chapter):
    verify(failed[chapter.name])
