"""The normaliser shortens what differs between runs and machines, and nothing else."""

import nbformat
import pytest

from bookkit.run.normalise import normalise, normalise_text


@pytest.mark.parametrize(
    ("raw", "published"),
    [
        ('source_file="/tmp/ipykernel_4711/123456789.py" line=3', 'source_file="cell.py" line=3'),
        ("/var/folders/x7/T/ipykernel_9/1.py:2: UserWarning", "cell.py:2: UserWarning"),
        (
            "File /home/me/book/.venv/lib/python3.12/site-packages/jax/_src/api.py:7",
            "File jax/_src/api.py:7",
        ),
        (
            "\x1b[32m~/.venv/lib/python3.11/site-packages/flax/nnx.py\x1b[39m",
            "\x1b[32mflax/nnx.py\x1b[39m",
        ),
        ("/usr/lib/python3/dist-packages/numpy/x.py", "numpy/x.py"),
        ("at /work/src/meshscope/drawing.py:9", "at meshscope/drawing.py:9"),
        ("(/a/site-packages/jax/x.py, /b/site-packages/jax/y.py)", "(jax/x.py, jax/y.py)"),
        (r"C:\Users\me\ipykernel_1\22.py", "cell.py"),
    ],
)
def test_shortened(raw, published):
    assert normalise_text(raw) == published


@pytest.mark.parametrize(
    "text",
    [
        "P('data', None) / 8 devices",
        "/tmp/run_12/42.py",
        "https://docs.jax.dev/site-packages.html",
        "a/b and c/d",
        "src/other/module.py",
        "0x7f00aa 2026-11-20 ipykernel_12",
    ],
)
def test_nothing_else_changes(text):
    assert normalise_text(text) == text


def test_every_kind_of_output_is_normalised_but_pictures():
    raw, short = "/tmp/ipykernel_1/2.py", "cell.py"
    new = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell(f"'{raw}'")
    cell.outputs = [
        new("stream", name="stdout", text=raw),
        new("error", ename="E", evalue=raw, traceback=[raw]),
        new(
            "execute_result",
            data={"text/plain": raw, "text/html": raw, "application/json": {"a": [raw]}},
        ),
        new("display_data", data={"image/svg+xml": raw, "image/png": raw}),
    ]
    markdown = nbformat.v4.new_markdown_cell(raw)
    normalise(nbformat.v4.new_notebook(cells=[markdown, cell]))
    stream, error, result, picture = cell.outputs
    assert stream.text == short and error.evalue == short and error.traceback == [short]
    assert result.data == {
        "text/plain": short,
        "text/html": short,
        "application/json": {"a": [short]},
    }
    assert picture.data == {"image/svg+xml": short, "image/png": raw}
    assert cell.source == f"'{raw}'" and markdown.source == raw
