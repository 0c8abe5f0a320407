"""Inside the process that runs a page's cells: its programs, compiled for CPU, TPU and GPU.

`python -m bookkit.compilers.two_programs` reads a job (second_compiler.py), runs the cells of a page one
after the other, and after some of them evaluates the code that makes a program, lowers that for each
machine, and notes what each compiler made of it. Without the folder of the compilers for TPU and GPU
the program is lowered for TPU, to be hashed, and not compiled for either.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import linecache
import math
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TARGET = "h100.txtpb"  # in book/compiled: what XLA is told of the GPU that it compiles for
QUIET = {  # libtpu asks no cloud where it is, and writes no logs into /tmp
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


# From a page's code to a program


class Recorder:
    """jax.jit, which notes what is lowered while code makes a program."""

    def __init__(self, jit: Callable[..., Any], lower: Callable[..., Any]) -> None:
        self.jit, self.elsewhere = jit, lower
        self.seen: list[tuple[Any, list[int] | None, Any]] = []

    def __call__(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda function: self(function, **options)
        # The jitted function itself, as JAX asks it for more than a wrapper would answer.
        jitted = self.jit(function, **options)
        plain = jitted.lower

        def lower(*inputs: Any) -> Any:
            jitted.lower = plain
            found = plain(*inputs)
            self.seen.append((self.elsewhere(jitted, *inputs), order_of(inputs), found))
            return found

        jitted.lower = lower
        return jitted


@contextlib.contextmanager
def recording(lower: Callable[..., Any]) -> Iterator[Recorder]:
    import jax

    recorder = Recorder(jax.jit, lower)
    jax.jit = recorder
    try:
        yield recorder
    finally:
        jax.jit = recorder.jit


def order_of(inputs: Any) -> list[int] | None:
    """The ids of the devices of the inputs' mesh, if they are not in order."""
    import jax

    for leaf in jax.tree.leaves(inputs):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            ids = [device.id for device in mesh.devices.flat]
            return None if ids == sorted(ids) else ids
    return None


def evaluated(code: str, names: dict[str, Any]) -> Any:
    """Run the lines of `code` among a page's names; the value of its last line."""
    tree = ast.parse(code.strip(), "<make>")
    last = tree.body.pop()
    if not isinstance(last, ast.Expr):
        raise ValueError("the last line of `make` is to be an expression")
    exec(compile(tree, "<make>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<make>", "eval"), names)


def made(
    code: str, names: dict[str, Any], lower: Callable[..., Any], for_cpu: bool = True
) -> tuple[Any, Any, Any]:
    """The program as `lower` lowers it, the order of its devices, and the one compiled for CPU."""
    import jax

    with recording(lower) as recorder:
        value = evaluated(code, names)
    if isinstance(value, tuple):
        function, *inputs = value
        lowered, order = lower(function, *inputs), order_of(inputs)
        if not for_cpu:
            return lowered, order, None
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        return lowered, order, jitted.lower(*inputs).compile()
    if len(recorder.seen) != 1:
        raise ValueError(f"lowers {len(recorder.seen)} programs with jax.jit; it is to lower one")
    lowered, order, found = recorder.seen[0]
    return lowered, order, value if isinstance(value, jax.stages.Compiled) else found.compile()


# What a compiler made of it


def account(program: Any, mesh: Any) -> dict[str, Any]:
    """What moves, by kind, axes and dtype, and bytes of memory."""
    import meshscope as ms

    totals = ms.collectives(program, mesh).by("kind", "axes", "dtype")
    return {
        "moves": [
            {
                "kind": kind,
                "axes": list(axes),
                "dtype": dtype,
                "executions": total.executions,
                "payload": total.payload_bytes,
                "wire": total.wire_bytes,
            }
            for (kind, axes, dtype), total in sorted(totals.items())
        ],
        "memory": {
            part: size
            for part, size in vars(ms.memory(program)).items()
            if size or part in ("arguments", "outputs", "temporaries", "aliased")
        },
    }


def schedule(program: Any, mesh: Any) -> list[list[Any]]:
    """What runs beside the collectives of a program's loops, as meshscope reads it.

    For each collective of a loop, in order: the number of the loop, its kind, the shape of its
    largest value, and which matmuls of the loop, counted from 0, stand between its two lines; none
    if it has one line, which the device waits for.
    """
    import meshscope as ms

    rows = [row for row in ms.overlap(program, mesh) if row.loop]
    loops = list(dict.fromkeys(row.loop for row in rows))
    return [[loops.index(row.loop), row.kind, list(row.shape), list(row.matmuls)] for row in rows]


def beside(program: Any, mesh: Any) -> list[list[Any]]:
    """What a program sends by kind, axes, and whether a matmul is beside it: bytes of payload."""
    import meshscope as ms

    totals = ms.overlap(program, mesh).by("kind", "axes", "hidden")
    return [[*key, total.payload_bytes] for key, total in totals.items()]


def told(compiled: Callable[[], Any], mesh: Any, **more: Callable[..., Any]) -> dict[str, Any]:
    """What another machine's compiler made of a program, or said in place of one."""
    import jax

    try:
        program = compiled()
        return account(program, mesh) | {name: tell(program, mesh) for name, tell in more.items()}
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error).strip().splitlines()[0]}


# Machines that are not here


def find_compilers(folder: str) -> None:
    """Let libtpu and XLA's plugin for GPU be found, which no page is to see before."""
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if folder not in sys.path:
        sys.path.append(folder)


@functools.cache  # a process registers it once
def register_gpu_compiler() -> None:
    """Tell JAX of the plugin, which it looked for before its folder could be seen."""
    import jax_plugins.xla_cuda13  # type: ignore[import-not-found]

    jax_plugins.xla_cuda13.initialize()


def on_h100(sizes: dict[str, int], root: Path) -> Any:
    """A grid of H100 to compile for, eight in each server. None is here, nor its driver."""
    import numpy as np
    from jax.experimental import topologies

    register_gpu_compiler()
    count = math.prod(sizes.values())
    target = (root / "book" / "compiled" / TARGET).read_text("utf-8")
    shape = f"1x{max(count // 8, 1)}x{min(count, 8)}"  # networks, servers in each, devices in each
    found = topologies.get_topology_desc(platform="cuda", topology=shape, target_config=target)
    return np.array(found.devices).reshape(*sizes.values())


def on_tpu(machine: str, sizes: dict[str, int]) -> Any:
    """A grid of the chips of a TPU that is not here, "v5e:16x16", along their network."""
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(machine, "tpu").devices
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    axes = tuple(sizes.values()), tuple(sizes)
    return jax.make_mesh(*axes, devices=devices, axis_types=kinds).devices


def gigabytes_at_most() -> float:
    """What this process has taken so far. The compilers need Linux, which keeps the peak here, in KB."""
    status = Path("/proc/self/status").read_text("utf-8").split()
    return int(status[status.index("VmHWM:") + 1]) / 1e6


def compiled_by_all(program: dict[str, Any], names: dict[str, Any], job: dict[str, Any]) -> Any:
    """What the compilers make of a program (bookkit.compilers.claims) among a page's names.

    With a `machine` it is compiled for that alone, with what the compiling took.
    """
    import jax

    from many_devices import compiled as tools

    root, machine = Path(job["root"]), program["machine"]
    platforms = ("tpu", "cuda") if job["others"] else ("tpu",)

    def lower(function: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
        return {name: tools.lowered_for(name, function, *inputs) for name in platforms}

    lowered, order, on_cpu = made(program["make"], names, lower, for_cpu=not machine)
    sizes = tools.sizes_of(lowered["tpu"])
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    found = {"hash": tools.digest(lowered["tpu"]), "mesh": sizes}
    found |= {"machine": machine} if machine else {"cpu": account(on_cpu, mesh)}
    if not job["others"]:
        return found
    find_compilers(job["others"])

    def for_tpu() -> Any:
        grid = on_tpu(machine, sizes) if machine else tools.on_tpu_v5e(sizes)
        switches = program["switches"] if machine else None
        return tools.compiled_for(grid, lowered["tpu"], order, switches)

    def for_gpu() -> Any:
        grid = on_h100(sizes, root)
        return tools.compiled_for(grid, lowered["cuda"], order, program["switches"])

    if machine:
        on_gpu, began = machine.startswith("h100"), time.process_time()
        compiler, compiled = ("gpu", for_gpu) if on_gpu else ("tpu", for_tpu)
        found[compiler] = told(compiled, mesh, beside=beside)
        seconds = round(time.process_time() - began)
        found["compiling"] = {"seconds": seconds, "gigabytes": round(gigabytes_at_most(), 1)}
        return found
    more = {"schedule": schedule} if program["schedule"] else {}
    return found | {"tpu": told(for_tpu, mesh), "gpu": told(for_gpu, mesh, **more)}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).strip().splitlines()[:1])}"


def main() -> None:
    """Run the job; write what was made of its programs, and a line for each thing that failed."""
    job = json.load(sys.stdin)
    page = types.ModuleType("page")
    sys.modules["page"] = page  # where dataclasses look for it
    found, failed = {}, []
    for where, slug, source in job["cells"]:
        linecache.cache[where] = (len(source), None, source.splitlines(True), where)
        try:
            exec(compile(source, where, "exec"), page.__dict__)
        except Exception as error:  # cells after it would only fail for want of its names
            failed.append(f"{where}: {first_line(error)}")
            break
        for program in job["programs"]:
            if program["after"] != slug:
                continue
            try:
                found[program["name"]] = compiled_by_all(program, page.__dict__, job)
            except Exception as error:
                failed.append(f"{where}, program {program['name']}: {first_line(error)}")
    Path(job["result"]).write_text(json.dumps({"made": found, "failed": failed}), "utf-8")


if __name__ == "__main__":
    main()
