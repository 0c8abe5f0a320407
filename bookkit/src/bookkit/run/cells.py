"""Run chapters' cells as plain Python, many times and fast: no kernel, no outputs kept.

    python bookkit/src/bookkit/run/cells.py < jobs.json        one line of JSON per finished job

A job is {"id", "cells": [{"index", "source", "tags", "probe"}], "timeout", "fresh"}. JAX is imported
once and each job runs in a fork of that process, before any device exists, so that jobs share the
seconds of importing and nothing else. A job marked fresh starts its own Python (for changes to the
setup cell itself). A cell that raises ends its job, unless it is a probe: a probe's error is noted.

Read it from Python with `run(jobs)`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import linecache
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

HEAVY = (
    "numpy",
    "jax",
    "jax.numpy",
    "flax.nnx",
    "flax.linen",
    "optax",
    "orbax.checkpoint",
    "sklearn.datasets",
    "matplotlib",
    "meshscope",
)
TIMEOUT = 300
NO_FORKS = "Chapters' cells are run in forks of one process, which Windows lacks: use WSL"


def as_jobs(cells: Iterable[Any], **more: Any) -> dict[str, Any]:
    """The cells of a chapter (bookkit/model/chapter.py) as one job."""
    return {
        "cells": [
            {"index": cell.index, "source": cell.source, "tags": list(cell.tags)} for cell in cells
        ],
        **more,
    }


def run_jobs(
    jobs: Iterable[dict[str, Any]],
    parallel: int = 1,
    python: str = sys.executable,
    seconds: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield one result per job as it ends: {"id", "failed", "error", "values", "seconds", …}.

    With `seconds`, a job whose "cost" (in seconds) does not fit into what is left is not started.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "NPROC": "16",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONWARNINGS": "ignore",
    }
    environment.pop("XLA_FLAGS", None)
    with tempfile.TemporaryFile("w+") as given:
        json.dump({"jobs": list(jobs), "parallel": parallel, "seconds": seconds}, given)
        given.seek(0)
        process = subprocess.Popen(
            [python, __file__], stdin=given, stdout=subprocess.PIPE, env=environment, text=True
        )
    try:
        for line in process.stdout or ():
            yield json.loads(line)
        if process.wait():
            raise RuntimeError(f"bookkit/run/cells.py ended with {process.returncode}; see above")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


# Inside the process that runs cells.


def run_in_namespace(cells: list[dict[str, Any]], note: Callable[..., None]) -> None:
    """Run cells in one namespace called __main__; tell note(…) about each start and end."""
    module = types.ModuleType("__main__")
    module.__dict__["display"] = print
    sys.modules["__main__"] = module
    for cell in cells:
        name = f"<cell {cell['index']}>"
        source = cell["source"]
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        note(start=cell["index"])
        started, error, value = time.perf_counter(), None, None
        try:
            tree = ast.parse(source, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), module.__dict__)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__)
        except BaseException as raised:
            lines = str(raised).splitlines()
            error = f"{type(raised).__name__}: {lines[0] if lines else ''}"
        if "raises-exception" in cell["tags"]:
            error = None if error else "DID NOT RAISE: the cell is tagged raises-exception"
        if error is None and any(tag.startswith("solution-") for tag in cell["tags"]):
            if not str(value).startswith("correct"):
                error = f"NOT CORRECT: the solution is answered {str(value)[:100]!r}"
        note(
            end=cell["index"],
            error=error,
            seconds=time.perf_counter() - started,
            value=value if isinstance(value, str) else None,
            probe=bool(cell.get("probe")),
        )
        if error and not cell.get("probe"):
            return


def child(cells: list[dict[str, Any]], reports: int) -> None:
    """Run the cells in this process and end it; reports is a file descriptor."""
    with open("/dev/null", "r+b", buffering=0) as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    printed = tempfile.TemporaryFile("w+")
    sys.stdout = printed

    def note(**entry: Any) -> None:
        if "end" in entry:
            printed.flush()
            printed.seek(0)
            entry["printed"] = printed.read()[-4000:]
            printed.seek(0)
            printed.truncate()
        os.write(reports, (json.dumps(entry) + "\n").encode())

    run_in_namespace(cells, note)
    os._exit(0)


def start(job: dict[str, Any]) -> tuple[int, Any, subprocess.Popen | None]:
    """Begin one job: its process id, the file where its reports arrive, its Popen if any."""
    if sys.platform == "win32":
        raise OSError(NO_FORKS)
    reports = tempfile.TemporaryFile()
    if job.get("fresh"):
        command = [sys.executable, __file__, "--one", str(reports.fileno())]
        given = tempfile.TemporaryFile("w+")
        json.dump(job["cells"], given)
        given.seek(0)
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC", "TF_CPP_MIN_LOG_LEVEL")
        }
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean,
            process_group=0,
            pass_fds=[reports.fileno()],
        )
        return process.pid, reports, process
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            child(job["cells"], reports.fileno())
        finally:
            os._exit(70)
    return pid, reports, None


def result(
    job: dict[str, Any], reports: Any, status: int, seconds: float, timed_out: bool
) -> dict[str, Any]:
    reports.seek(0)
    entries = [json.loads(line) for line in reports.read().splitlines()]
    ends = [entry for entry in entries if "end" in entry]
    starts = [entry["start"] for entry in entries if "start" in entry]
    bad = next((entry for entry in ends if entry["error"] and not entry["probe"]), None)
    failed, error = (bad["end"], bad["error"]) if bad else (None, None)
    if timed_out:
        failed, error = starts[-1] if starts else None, f"TIMEOUT after {seconds:.0f} s"
    elif status and not bad:
        failed, error = starts[-1] if starts else None, f"CRASH: the process ended with {status}"
    return {
        "id": job.get("id"),
        "failed": failed,
        "error": error,
        "seconds": seconds,
        "cells": [
            {key: entry[key] for key in ("end", "error", "seconds", "value", "printed")}
            for entry in ends
        ],
    }


def serve(jobs: list[dict[str, Any]], parallel: int, seconds: float | None) -> None:
    if sys.platform == "win32":
        raise OSError(NO_FORKS)
    until = time.monotonic() + seconds if seconds is not None else float("inf")
    if sum(1 for job in jobs if not job.get("fresh")):
        code = "\n".join(cell["source"] for job in jobs for cell in job["cells"])
        for name in HEAVY:
            if re.search(rf"\b{name.split('.')[0]}\b", code):
                try:
                    importlib.import_module(name)
                except ImportError:
                    pass  # the cell that wants it says so
    waiting = list(jobs)
    running: dict[int, tuple[Any, ...]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                if time.monotonic() + job.get("cost", 0) > until:
                    continue
                pid, *rest = start(job)
                running[pid] = (job, *rest, time.monotonic())
            time.sleep(0.02)
            for pid, (job, reports, process, began) in list(running.items()):
                seconds = time.monotonic() - began
                ended, status = os.waitpid(pid, os.WNOHANG)
                timed_out = not ended and seconds > job.get("timeout", TIMEOUT)
                if timed_out:
                    os.killpg(pid, signal.SIGKILL)
                    ended, status = os.waitpid(pid, 0)
                if ended:
                    del running[pid]
                    if process:
                        process.returncode = status  # waited for already
                    print(
                        json.dumps(
                            result(
                                job, reports, os.waitstatus_to_exitcode(status), seconds, timed_out
                            )
                        ),
                        flush=True,
                    )
    finally:  # whoever is stopped stops its jobs
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--one", type=int, metavar="FD", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    sys.path[:] = [entry for entry in sys.path if entry != str(pathlib.Path(__file__).parent)]
    request = json.load(sys.stdin)
    if arguments.one:
        child(request, arguments.one)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    serve(request["jobs"], request["parallel"], request["seconds"])
