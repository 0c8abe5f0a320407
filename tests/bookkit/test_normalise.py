"""The normaliser shortens what differs between runs and machines, and nothing else."""

import pytest

from bookkit.run.normalise import normalise_text


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
