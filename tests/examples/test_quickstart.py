"""examples/quickstart.py: the same losses under three placements, and the page shows this file."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from bookkit.model.book import Book

BOOK = Book()
PROGRAM = BOOK.root / "examples" / "quickstart.py"
PAGE = BOOK.root / "book" / "quickstart.md"
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n((?::[^\n]*\n)*)\n?(.*?)^```$", re.M | re.S)


def run(devices, source=None, status=0):
    """The program's output in a fresh Python with so many CPU devices; `source` in its place."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, PROGRAM] if source is None else [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert status or done.stderr == ""
    return done.stdout + done.stderr


def runs_of(output):
    """(losses, shape of the piece of w_DF) of each of the runs in plain JAX, in order."""
    runs, losses = [], []
    for line in output.splitlines():
        if found := re.fullmatch(r"step \d: loss ([\d.]+)", line):
            losses.append(float(found[1]))
        elif found := re.fullmatch(r"w_DF on each device: \((\d+), (\d+)\)", line):
            runs.append((losses, (int(found[1]), int(found[2]))))
            losses = []
    return runs


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_same_losses_and_smaller_pieces(devices):
    """As NumPy computes them, on as many devices as the program runs on."""
    output = run(devices)
    one, copies, pieces = runs_of(output)
    assert f"{devices} devices: cpu" in output
    assert len(one[0]) == 4 and one[0] == sorted(one[0], reverse=True)
    assert copies[0] == pytest.approx(one[0], rel=1e-5)
    assert pieces[0] == pytest.approx(one[0], rel=1e-5)
    assert one[0] == pytest.approx(numpy_losses(devices), rel=1e-4)
    assert one[1] == copies[1] == (96, 384)
    assert pieces[1] == (96 // devices, 384)
    held, whole = re.search(r"each device holds ([\d,]+) of ([\d,]+) bytes", output).groups()
    counters = 2 * 4
    assert (int(whole.replace(",", "")) - counters) == devices * (
        int(held.replace(",", "")) - counters
    )


def numpy_losses(devices):
    """The losses of the plain program in NumPy, with gradients written by hand."""
    x_BD = np.random.default_rng(0).random((64 * devices, 96))
    w_DF = np.random.default_rng(1).normal(0, 0.02, (96, 384))
    w_FD = np.random.default_rng(2).normal(0, 0.02, (384, 96))
    losses = []
    for _ in range(4):
        h_BF = np.maximum(x_BD @ w_DF, 0)
        error_BD = h_BF @ w_FD - np.sort(x_BD)
        losses.append((error_BD**2).mean())
        gradient_BD = 2 * error_BD / error_BD.size
        gradient_BF = (gradient_BD @ w_FD.T) * (h_BF > 0)
        w_DF, w_FD = w_DF - x_BD.T @ gradient_BF, w_FD - h_BF.T @ gradient_BD
    return losses


def test_any_number_of_devices():
    """Five devices do not divide 96: the sizes follow."""
    one, _, pieces = runs_of(run(5))
    assert one[1] == (480, 1920) and pieces[1] == (96, 1920)


def test_an_old_jax_is_told_what_to_do():
    body = PROGRAM.read_text("utf-8")
    line = re.search(r"^assert .*$", body, re.M)[0]
    with pytest.raises(AssertionError, match="older than 0.7: pip install -U jax"):
        run(1, f"import jax\njax.__version_info__ = (0, 6, 2)\n{line}")


def test_without_flax_it_says_what_to_install():
    """As in a runtime whose Flax cannot be imported beside its JAX."""
    body = PROGRAM.read_text("utf-8")
    output = run(2, f"import sys\nsys.modules['flax'] = None\n{body}", status=1)
    assert output.splitlines()[-1] == "Flax is missing or too old: pip install -U flax"
    assert len(runs_of(output)) == 3


def cells_of_program():
    _, *cells = re.split(r"^# %%\n", PROGRAM.read_text("utf-8"), flags=re.M)
    return [cell.strip("\n") for cell in cells]


def cells_of_page():
    """Every cell of the page comes from the program."""
    found = CELL.findall(PAGE.read_text("utf-8"))
    assert all("from-quickstart" in options for options, _ in found)
    return [source.strip("\n") for _, source in found]


def test_the_page_shows_the_program():
    assert cells_of_page() == cells_of_program(), (
        "book/quickstart.md and examples/quickstart.py differ; copy the cell that you changed"
    )


def test_thirty_three_lines():
    """The title's number: lines from the data to FSDP, without imports, blank lines and Flax."""
    _, *cells, _, _ = cells_of_program()
    lines = [line for cell in cells for line in cell.splitlines() if line.strip()]
    assert len(lines) == 33
    assert "in 33 lines" in PAGE.read_text("utf-8")
