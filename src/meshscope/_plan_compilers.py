"""Devices to compile for: simulated ones of a CPU, or chips that are described and not here."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from typing import Any

import jax
from jax.experimental import topologies

COMPILERS = ("cpu", "tpu", "gpu")
QUICK = {"xla_backend_optimization_level": 0}  # of CPU: machine code is never run
ALONE = {  # libtpu asks no cloud where it is, and writes no logs
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# What XLA has to know of a GPU that is not here, as in
# https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class MissingCompiler(RuntimeError):
    """The compiler that was asked for is not installed, or cannot describe these chips."""


def devices_for(compiler: str, chip: str, count: int) -> list[Any]:
    """So many devices to compile for.

    Args:
      compiler: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
      chip: the key of a chip in ``CHIPS``.
      count: devices.

    Raises:
      MissingCompiler: with what to do about it.
    """
    if compiler == "cpu":
        return _simulated(count)
    return (_tpus if compiler == "tpu" else _gpus)(chip, count)


def _simulated(count: int) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < count:
        raise MissingCompiler(
            f"this process has {len(found)} CPU devices and the plan needs {count}: say "
            f'jax.config.update("jax_num_cpu_devices", {count}) before anything else uses JAX, '
            "or run python -m meshscope plan, which does"
        )
    return found[:count]


def _tpus(chip: str, count: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise MissingCompiler(
            'no TPU compiler is installed: pip install "jax[tpu]" brings it, or leave out '
            "--compiler tpu"
        )
    if chip not in ("v5e", "v5p", "v6e"):
        raise MissingCompiler(f"the TPU compiler knows no {chip}: give --chip v5e, v5p or v6e")
    os.environ.update({name: value for name, value in ALONE.items() if name not in os.environ})
    shape = topology(chip, count)
    one = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    try:
        found = topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **one)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise MissingCompiler(
            f"the TPU compiler cannot describe {chip}:{shape} ({first}): give another --devices"
        ) from None
    return list(found.devices)


def topology(chip: str, count: int) -> str:
    """The shape of a slice of so many chips, as near to a cube as powers of two come: 2x4, 4x4x4.

    Raises:
      MissingCompiler: a count that is not a power of two.
    """
    steps = count.bit_length() - 1
    if count != 1 << steps:
        raise MissingCompiler(
            f"slices of TPUs have 1, 2, 4, 8, 16 … chips, not {count}: give another --devices"
        )
    dims = 3 if chip == "v5p" else 2
    sizes = [2 ** ((steps + n) // dims) for n in range(dims)]
    if dims == 3 and count <= 4:
        sizes = [1, *sizes[1:]] if math.prod(sizes[1:]) == count else sizes
        sizes = sorted(sizes, reverse=True)  # 2x2x1, as its boards are
    return "x".join(map(str, sizes))


def _gpus(chip: str, count: int) -> list[Any]:
    plugin = next((name for name in _PLUGINS if _installed(name)), None)
    if plugin is None:
        raise MissingCompiler(
            'no GPU compiler is installed: pip install "jax[cuda13]" brings it, or leave out '
            "--compiler gpu"
        )
    if chip != "h100":
        raise MissingCompiler(f"XLA is told here of an H100 alone, not of {chip}: give --chip h100")
    if count > 8 and count % 8:
        raise MissingCompiler(f"{count} GPUs are no number of nodes of 8: give another --devices")
    _register(plugin)
    # networks, nodes in each, devices in each
    shape = f"1x{max(count // 8, 1)}x{min(count, 8)}"
    found = topologies.get_topology_desc(platform="cuda", topology=shape, target_config=_H100)
    return list(found.devices)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


_registered: set[str] = set()


def _register(plugin: str) -> None:
    """Tell JAX of a plugin, once: started for CPU alone, it does not look for any."""
    if plugin in _registered:
        return
    try:
        importlib.import_module(plugin).initialize()
    except jax.errors.JaxRuntimeError as error:  # JAX has found it already
        if "ALREADY_EXISTS" not in str(error):
            raise
    _registered.add(plugin)
