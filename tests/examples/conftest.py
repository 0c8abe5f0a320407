"""Examples run in a process of their own, on a number of simulated devices."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run():
    """run(n, code): what the code prints on n devices, with a clean stderr."""

    def run(devices, code):
        settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "16",
                    "PYTHONPATH": str(EXAMPLES)}
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("JAX_", "XLA_"))}
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=EXAMPLES, text=True,
                              env=environment | settings, capture_output=True, timeout=300)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    return run
