"""Eight simulated devices for what runs in this process, and examples/ to import from."""

import sys

import jax

from bookkit.model.book import ROOT

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
for folder in (ROOT / "examples", ROOT / "tests" / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
