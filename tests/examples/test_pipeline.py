"""examples/pipeline.py has the loss and gradient of one device, and notices when it has not."""

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "examples" / "pipeline.py"


def run(path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, path]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_it_equals_one_device():
    done = run(FILE)
    assert done.returncode == 0, done.stderr
    assert "4 stages, 8 microbatches, bubble 27.3%" in done.stdout
    assert done.stdout.endswith("loss and gradient are those of one device\n")


def test_it_notices_the_wrong_direction(tmp_path):
    source, right = FILE.read_text("utf-8"), "(s, s + 1) for s"
    assert source.count(right) == 1
    path = tmp_path / "pipeline.py"
    path.write_text(source.replace(right, "(s + 1, s) for s"), "utf-8")
    assert "Not equal to tolerance" in run(path).stderr
