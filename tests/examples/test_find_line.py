"""examples/find_line.py lists the line that gathers an activation first, and nothing of it once mended."""

import os
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "examples" / "find_line.py"
LINES = FILE.read_text("utf-8").splitlines()


def run(*arguments, devices=8):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, FILE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_line_comes_first():
    done = run()
    assert done.returncode == 0, done.stderr
    first, name = done.stdout.splitlines()[2:4]
    assert re.match(r"all-gather +2,097,152 bytes", first) and "layer_2" in name
    line = int(re.search(r"find_line\.py:(\d+)", first)[1])
    assert "jnp.quantile" in LINES[line - 1]


def test_mended_nothing_is_gathered():
    slow, mended = run(), run("--mended")
    assert "all-gather" not in mended.stdout
    scratch = [int(re.search(r"scratch +([\d,]+)", done.stdout)[1].replace(",", ""))
               for done in (slow, mended)]  # fmt: skip
    assert scratch[0] > 2 * scratch[1]


def test_too_few_devices_say_what_to_do():
    done = run(devices=2)
    assert done.returncode == 1 and "JAX_NUM_CPU_DEVICES=8" in done.stderr
