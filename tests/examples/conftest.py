"""Eight simulated devices for what runs in this process, and examples/ to import from."""

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
ROOT = Path(__file__).parents[2]
for folder in (ROOT / "examples", ROOT / "tests" / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
