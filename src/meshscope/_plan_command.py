"""`python -m meshscope plan FILE`: look after the process that compiles.

A compiler may end its whole process where others raise an exception. So the candidates are compiled
in a process of its own. If a signal ends it, the candidate that it was compiling gets that as its
error, and another process goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ._plan_chips import CHIPS
from ._plan_compilers import COMPILERS
from ._plan_results import Results

RESTARTS = 20  # of the process that compiles
EPILOG = """\
FILE defines `step(mesh, rules)`, which returns jax.jit(train_step).trace(*shapes) or a
meshscope.Step of that, and TABLES, rules by name: {"FSDP": {"batch": "data", "embed": "data"}}.
It may define AXES, the axes of the mesh, if their order is to be another than that in TABLES.
examples/plan_transformer.py of https://github.com/many-devices/one-program is such a file.

A run that was interrupted goes on where it was: results are kept in the file of --results.
The exit status is 0 if something fits, 1 if nothing does, 2 if the command cannot run.
"""


def parser() -> argparse.ArgumentParser:
    """All commands, and what each takes."""
    whole = argparse.ArgumentParser(
        prog="python -m meshscope",
        description="Instruments for sharded JAX programs. In Python: import meshscope as ms.",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="compile a training step for every mesh and table, and rank what fits",
        description="Compile a training step for every mesh and table from shapes; rank what fits.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("file", metavar="FILE", help="Python file with `step` and TABLES")
    plan.add_argument("--devices", type=_count, required=True, help="how many devices, as 64")
    plan.add_argument("--chip", choices=CHIPS, default="h100", help="which chip (default: h100)")
    plan.add_argument(
        "--hbm", type=_size, help="bytes that one device may take, as 80e9 (default: the chip's)"
    )
    plan.add_argument(
        "--compiler",
        choices=COMPILERS,
        default="cpu",
        help="what compiles: cpu, in seconds; or tpu or gpu where it is installed, which take up to "
        "minutes for a candidate (default: cpu)",
    )
    plan.add_argument("--explicit", action="store_true", help="mesh axes are Explicit, not Auto")
    plan.add_argument(
        "--results", metavar="PATH", help="file to keep results in (default: FILE's name.jsonl)"
    )
    plan.add_argument("--picture", metavar="PATH.svg", help="draw memory against time")
    return whole


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of devices: give 1 or more")
    return int(text)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: give one, as 80e9")
    return size


def main(arguments: Sequence[str]) -> int:
    """Run a command; the exit status."""
    given = parser().parse_args(arguments)
    file = Path(given.file)
    if not file.is_file():
        return failed(f"there is no file {file}: give the file that defines `step` and TABLES")
    path = Path(given.results or f"{file.stem}.jsonl")
    for wanted in filter(None, (path, given.picture and Path(given.picture))):
        if not wanted.resolve().parent.is_dir() or wanted.is_dir():
            return failed(f"{wanted} cannot be written: give a file in a folder that exists")
    asked = {**vars(given), "results": str(path), "parent": os.getpid()}
    command = [sys.executable, "-m", "meshscope._plan_worker", json.dumps(asked)]
    try:
        Results(path).interrupted()  # what an earlier run left is tried again
    except ValueError as error:
        return failed(str(error))
    around = environment(given.devices, given.compiler)
    for _ in range(RESTARTS):
        if (code := _run(command, around)) >= 0:
            return code
        stopped = Results(path).interrupted()
        name = signal.Signals(-code).name
        if stopped is None:
            return failed(f"the process that compiles was ended by {name}: run the command again")
        stopped["error"] = f"the process that compiled it was ended by {name}"
        stopped["error"] += ", perhaps for want of memory" if name == "SIGKILL" else ""
        Results(path).add(stopped)
    return failed(f"compilers ended their process {RESTARTS} times: try fewer tables")


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run to the end; the exit status, negative for a signal. It ends when this process does."""
    with subprocess.Popen(command, env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            return process.wait()
        except KeyboardInterrupt:
            return failed("interrupted: run the same command to go on", 130)
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()


def environment(devices: int, compiler: str) -> dict[str, str]:
    """Of the process that compiles: so many simulated devices, and no accelerator."""
    found = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if found.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # which JAX sets, unless somebody has
        # What the partitioner warns of is counted here; the GPU's scheduler calls it an error
        # that a program is too large.
        found["TF_CPP_MIN_LOG_LEVEL"] = "3" if compiler == "gpu" else "2"
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", found.get("XLA_FLAGS", ""))
    return {**found, "XLA_FLAGS": flags.strip()}


def failed(sentence: str, code: int = 2) -> int:
    """Say on stderr what is wrong; the exit status."""
    print(f"meshscope plan: {sentence}", file=sys.stderr)
    return code
