"""notebooks/*.ipynb say the same as book/*.md, whatever file times say, and carry no outputs."""

import nbformat
import pytest

from bookkit.model.chapter import chapters
from rules import BOOK, tree, verify

SYNC = "run `make sync` and commit the notebooks"


def differences(chapter, notebook, path):
    """Where the notebook at `path` differs from its chapter."""
    for number, (cell, other) in enumerate(zip(chapter.cells, notebook.cells), 1):
        if cell.kind != other.cell_type:
            yield f"{path}, cell {number}: {other.cell_type}, but {cell.where} is {cell.kind}; {SYNC}"
        elif cell.source != other.source:
            pairs = zip(cell.lines + [""], other.source.split("\n") + [""])
            line = next((at for at, (a, b) in enumerate(pairs, 1) if a != b), len(cell.lines))
            yield f"{path}, cell {number}, line {line}: not the text of {cell.where}; {SYNC}"
        elif cell.metadata != dict(other.metadata):
            yield (f"{path}, cell {number}: metadata {dict(other.metadata)}, but {cell.where} has "
                   f"{cell.metadata}; {SYNC}")
    if len(chapter.cells) != len(notebook.cells):
        yield (f"{path}: {len(notebook.cells)} cells, but book/{chapter.name}.md has "
               f"{len(chapter.cells)}; {SYNC}")


def leftovers(notebook, path):
    """Outputs and execution counts that were committed."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            yield f"{path}, cell {number}: outputs are committed; {SYNC}"
        if "execution" in cell.metadata:
            yield f"{path}, cell {number}: times of an execution are committed; {SYNC}"


def read(path):
    shown = path.relative_to(BOOK.root)
    assert path.exists(), f"{shown} is missing: {SYNC}"
    return nbformat.read(path, as_version=4), shown


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_pair(chapter):
    notebook, shown = read(BOOK.notebook(f"book/{chapter.name}"))
    verify([*differences(chapter, notebook, shown), *leftovers(notebook, shown)])


@pytest.mark.parametrize("language", BOOK.languages[1:], ids=lambda language: language.code)
@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_translated_notebook(chapter, language):
    """A translation changes Markdown and comments: same cells, same tags, same syntax trees."""
    notebook, shown = read(BOOK.notebook(f"book/{chapter.name}", language))
    problems = list(leftovers(notebook, shown))
    kinds = [(cell.cell_type, tuple(cell.metadata.get("tags", ()))) for cell in notebook.cells]
    if kinds != [(cell.kind, cell.tags) for cell in chapter.cells]:
        problems.append(f"{shown}: other cells than book/{chapter.name}.md; {SYNC}")
    theirs = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for number, (cell, source) in enumerate(zip(chapter.code, theirs, strict=False), 1):
        if tree(source) != tree(cell.source):
            problems.append(f"{shown}: code cell {number} runs something else; {SYNC}")
    verify(problems)


def test_no_orphans():
    """Every committed notebook belongs to a chapter."""
    names = {chapter.name for chapter in chapters()}
    verify(f"{path.relative_to(BOOK.root)}: no book/{path.stem}.md; delete it"
           for path in sorted((BOOK.root / "notebooks").rglob("*.ipynb"))
           if path.stem not in names and ".ipynb_checkpoints" not in path.parts)
