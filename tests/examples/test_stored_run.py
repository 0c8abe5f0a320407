"""The run that book/trainer.md shows is stored in examples/data/tiny_run.csv, and comes out again."""

import csv
import re
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).parents[2]
STORED = list(csv.DictReader((ROOT / "examples" / "data" / "tiny_run.csv").open()))
PAGE = (ROOT / "book" / "trainer.md").read_text("utf-8")


def test_the_page_shows_what_is_stored():
    shown = re.findall(r"step (\d+) of 200: loss ([\d.]+),", PAGE)
    losses = {row["step"]: float(row["loss"]) for row in STORED}
    assert len(shown) == 3 and all(f"{losses[step]:.3f}" == loss for step, loss in shown)
    tests = re.findall(r"^\| (\d+) \| ([\d.]+) \|", PAGE, re.M)
    known = {row["step"]: float(row["test_loss"]) for row in STORED if row["test_loss"]}
    assert len(tests) == 3 and all(f"{known[step]:.3f}" == loss for step, loss in tests)


def test_the_moved_run_agrees_to_four_digits_as_the_page_says():
    apart = [abs(float(row["loss"]) - float(row["loss_moved"])) for row in STORED]
    assert 0 < max(apart) < 1e-4


def test_an_impossible_width_is_answered_as_on_the_page(tmp_path, capsys):
    arguments = ["--cpu-devices", "8", "--D", "36", "--checkpoints", str(tmp_path / "run")]
    assert train.main(arguments) == train.REFUSED
    assert capsys.readouterr().err in PAGE


@pytest.mark.slow
def test_the_stored_run_comes_out_again(tmp_path):
    """Another machine rounds differently, so losses agree to 0.02 at first and 0.05 at the end."""
    assert train.main(["--cpu-devices", "8", "--checkpoints", str(tmp_path / "run")]) == 0
    again = list(csv.DictReader((tmp_path / "run-logs" / "metrics.csv").open()))
    assert [row["step"] for row in again] == [row["step"] for row in STORED]
    for now, was in zip(again, STORED, strict=True):
        allowed = 0.02 if int(was["step"]) <= 100 else 0.05
        assert abs(float(now["loss"]) - float(was["loss"])) < allowed, was["step"]
