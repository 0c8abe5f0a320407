"""examples/serve.py: the same tokens with both caches as by recomputing everything."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "serve.py"


def test_both_caches_give_the_same_tokens():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "163,584 bytes of weights on each device",
        "copies: 49,152 bytes of cache on each device, same tokens: True",
        "positions: 24,576 bytes of cache on each device, same tokens: True",
    ]
