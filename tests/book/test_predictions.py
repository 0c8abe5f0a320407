"""Predictions come from shapes and axis sizes: they must hold on other meshes too.

The cells tagged `predict` and `predicted`, and all before them, run again with the mesh of the cell
tagged `mesh` made 4×2 and 1×8. Cells tagged `fixed-mesh` are left out.
"""
import ast

import pytest

from bookkit.model.chapter import chapters
from bookkit.run.cells import as_jobs, run_jobs
from rules import over_chapters, rule, verify

WRITTEN = "(2, 4)"
OTHERS = ("(4, 2)", "(1, 8)")


def last_predicted(chapter):
    return max((cell.index for cell in chapter.code if "predicted" in cell.tags), default=None)


@rule
def anatomy_of_predictions(chapter):
    made = [cell for cell in chapter.code if "mesh" in cell.tags]
    if len(made) != 1:
        yield f"book/{chapter.name}.md: {len(made)} cells tagged mesh; one makes the chapter's mesh"
    elif made[0].source.count(WRITTEN) != 1:
        yield f"{made[0].where}: tagged mesh, it holds {WRITTEN} once, for tests to put others there"
    guesses = [cell for cell in chapter.code if "predict" in cell.tags]
    proofs = [cell for cell in chapter.code if "predicted" in cell.tags]
    if not guesses or not proofs:
        yield (f"book/{chapter.name}.md: no prediction; compute one in a cell tagged predict and "
               "assert it in a later one tagged predicted")
    for cell in guesses:
        names = {node.id for node in ast.walk(ast.parse(cell.source))
                 if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if not any(name.startswith("predicted") for name in names):
            yield f"{cell.where}: tagged predict, but assigns no name that begins with predicted"
    for cell in proofs:
        asserts = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assert)]
        names = {node.id for one in asserts for node in ast.walk(one) if isinstance(node, ast.Name)}
        if not any(name.startswith("predicted") for name in names):
            yield f"{cell.where}: tagged predicted, but asserts nothing about predicted…"


def with_mesh(chapter, shape):
    """The job of a chapter up to its last prediction, on another mesh."""
    cells = [cell for cell in chapter.code
             if cell.index <= last_predicted(chapter) and "fixed-mesh" not in cell.tags]
    job = as_jobs(cells, id=shape, timeout=200)
    for cell in job["cells"]:
        if "mesh" in cell["tags"]:
            cell["source"] = cell["source"].replace(WRITTEN, shape)
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


test_anatomy = over_chapters(__name__)
