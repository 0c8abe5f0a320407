"""Eight devices on any machine. Nothing here imports JAX before its settings are made."""

import importlib.metadata as metadata
import os
import re
import subprocess
import sys

OLDEST = {
    "jax": "0.10.2",
    "flax": "0.12.8",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.4",
    "meshscope": "0.1",
}
CPU = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "NPROC": "16",  # threads: 8 to 12 of them can deadlock on jax 0.10
}


def setup() -> None:
    """Make eight simulated CPU devices, check the versions, and print what there is.

    Call it before JAX is used. With BOOK_DEVICES=real in the environment, the page runs on this
    machine's own devices instead, with float32 products in full precision.

    Raises RuntimeError, in one sentence that says what to do: a package is missing or too old, JAX
    was used or imported too early, or there are fewer than eight devices.
    """
    if old := too_old():
        raise RuntimeError(f"Install, then restart: {', '.join(old)}")
    real = os.environ.get("BOOK_DEVICES") == "real"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides notes of XLA; errors still show
    os.environ.update({"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if real else CPU)
    if on_hosted_machine() and not real:
        remove_gpu_plugins()
    import jax

    if jax.__version__ != metadata.version("jax"):
        raise RuntimeError(
            f"JAX {jax.__version__} was imported before the installation of "
            f"{metadata.version('jax')}: restart the runtime, then run all cells"
        )
    if not real:
        use_cpu_devices(jax)
    found = f"{len(jax.devices())} {jax.default_backend()} devices"
    if not real and found != "8 cpu devices":
        raise RuntimeError(f"{found}, not 8 cpu devices: restart the runtime, then run all cells")
    if len(jax.devices()) < 8:
        raise RuntimeError(f"{found}, not 8: only the quick start and train.py run on fewer")
    print(f"jax {jax.__version__}, flax {metadata.version('flax')}, {found}")


def use_cpu_devices(jax) -> None:
    """The settings again, for a JAX that was imported, and not used, before they were made."""
    if jax.config.jax_num_cpu_devices == 8 and jax.config.jax_platforms == "cpu":
        return
    try:
        jax.config.update("jax_num_cpu_devices", 8)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # JAX was used as well: what devices there are is checked next


def on_hosted_machine() -> bool:
    """Colab or Kaggle, where the setup cell of a page installs what it needs."""
    return "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ


def too_old() -> list[str]:
    """The packages that are missing or older than the book needs."""

    def found(name: str) -> str:
        hits = [package.version for package in metadata.distributions(name=name)]
        return hits[0] if hits else "none"

    def number(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    return [
        f"{name} {found(name)} (needs {oldest})"
        for name, oldest in OLDEST.items()
        if number(found(name)) < number(oldest)
    ]


def remove_gpu_plugins() -> None:
    """Uninstall GPU plugins of JAX, which fit only the JAX that the machine came with."""
    names = [str(package.name) for package in metadata.distributions()]
    if gpu := [name for name in names if name.startswith("jax-cuda")]:
        subprocess.run([sys.executable, "-m", "pip", "-q", "uninstall", "-y", *gpu], check=True)
