"""Eight simulated devices for what runs in this process; processes of their own for any number."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
for folder in (EXAMPLES, ROOT / "tests" / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture
def run():
    """run(n, code): what the code prints on n devices, with a clean stderr."""

    def run(devices, code):
        settings = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "NPROC": "16",
            "PYTHONPATH": str(EXAMPLES),
        }
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_"))
        }
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(
            command,
            cwd=EXAMPLES,
            text=True,
            env=environment | settings,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Runs share what the first of them compiled: half of the seconds of a short run."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    cache = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in cache}
    with pytest.MonkeyPatch.context() as settings:
        for name, value in cache.items():
            settings.setenv(name.upper(), str(value))  # for processes that are started
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
