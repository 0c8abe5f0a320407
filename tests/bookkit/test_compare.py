"""Which outputs changed between two executions."""

import nbformat
import pytest

from bookkit.model.book import Problem
from bookkit.run import compare

new = nbformat.v4


def notebook(*cells):
    made = new.new_notebook(cells=[new.new_markdown_cell("# T")])
    for source, text, *tags in cells:
        cell = new.new_code_cell(source, metadata={"tags": tags})
        cell.outputs = [new.new_output("execute_result", data={"text/plain": text})]
        made.cells.append(cell)
    return made


def found(before, after):
    return [(cell, line) for cell, line, _ in compare.differences(before, after)]


def test_what_changed_is_named_by_cell_and_first_line():
    before = notebook(("a", "1"), ("\nb\nc", "2"), ("t", "9 ms", "timing"))
    after = notebook(("a", "1"), ("\nb\nc", "3"), ("t", "8 ms", "timing"))
    assert found(before, before) == []
    assert found(before, after) == [(3, "b")]
    ((_, _, how),) = compare.differences(before, after)
    assert "-2" in how and "+3" in how


def test_a_new_cell_does_not_make_all_the_others_differ():
    before, after = notebook(("a", "1"), ("b", "2")), notebook(("a", "1"), ("new", "0"), ("b", "2"))
    assert found(before, after) == [(3, "new")]
    assert found(after, before) == [(3, "new")]


@pytest.mark.parametrize("kind", ["stream", "error", "html"])
def test_every_kind_of_output_counts(kind):
    def one(text):
        made = notebook(("a", "1"))
        made.cells[1].outputs = [
            {
                "stream": new.new_output("stream", name="stderr", text=text),
                "error": new.new_output("error", ename="E", evalue="", traceback=[text]),
                "html": new.new_output("display_data", data={"text/plain": "", "text/html": text}),
            }[kind]
        ]
        return made

    assert found(one("x"), one("x")) == [] and found(one("x"), one("y")) == [(2, "a")]


def test_two_folders(tmp_path, capsys):
    for folder, text in (("before", "1"), ("after", "2")):
        (tmp_path / folder).mkdir()
        nbformat.write(notebook(("a", text)), tmp_path / folder / "01-x.ipynb")
    nbformat.write(notebook(("a", "1")), tmp_path / "after" / "02-y.ipynb")
    compare.main([str(tmp_path / "before"), str(tmp_path / "after")])
    said = capsys.readouterr().out
    assert "01-x.ipynb, cell 2: a" in said and "02-y.ipynb is only in" in said
    compare.main([str(tmp_path / "after"), str(tmp_path / "after")])
    assert "no output differs" in capsys.readouterr().out
    with pytest.raises(Problem, match="holds no executed chapters"):
        compare.main([str(tmp_path), str(tmp_path)])
