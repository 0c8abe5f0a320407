"""Start examples/train.py as readers do, kill it, and read what it left."""

import contextlib
import csv
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorstore

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "train.py"
SPEED = {"tokens_per_second", "mfu"}  # the columns that differ from run to run
SMALL = [  # two layers, which every strategy can split over eight devices
    "--L", 2, "--D", 32, "--F", 64, "--H", 8, "--K", 8, "--C", 4, "--S", 16, "--batch", 16,
    "--warm-up", 5, "--decay-steps", 400, "--test-rows", 16, "--evaluate-every", 20,
]  # fmt: skip


def environment(devices):
    """Of a child that sees so many simulated devices, whatever this process was started with."""
    mine = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # the programs are small
    return {
        **mine,
        **quick,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "NPROC": "16",
    }


def started(folder, *arguments, devices=8, program=(TRAIN,), **settings):
    command = [sys.executable, *program, *SMALL, "--checkpoints", folder, *arguments]
    number, path = tempfile.mkstemp(prefix="said", dir=Path(folder).parent)
    os.close(number)
    with open(path, "a") as said:  # a pipe that nobody empties would stop the program
        process = subprocess.Popen(
            [str(part) for part in command], env=environment(devices),
            stdout=subprocess.DEVNULL, stderr=settings.pop("stderr", said), **settings,
        )  # fmt: skip
    process.said = Path(path)
    return process


TAKEN = []  # one socket for each address that was drawn


def free_address():
    """Of this machine, where nobody listens, or will: as chapter 11's helper draws it.

    Two coordinators can listen at one port without an error, and then take each other's processes.
    So who draws a port also holds the one 6,000 above it, which a second one cannot.
    """
    while True:
        port = random.randrange(20_000, 26_000)  # what systems give out on their own is larger
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            TAKEN.append(socket.create_server(("127.0.0.1", port + 6_000)))
            return f"127.0.0.1:{port}"


@contextlib.contextmanager
def together(folder, count, *arguments, devices=None, own=None, **settings):
    """train.py as several processes that share eight devices. None is left behind.

    `own` has what is different for some of them, by their number.
    """
    address = free_address()
    given = ["--processes", count, "--coordinator", address]
    processes = []
    try:
        for number in range(count):
            more = [*given, "--process", number, *arguments]
            mine = {"folder": folder, "devices": devices or 8 // count} | settings
            mine |= (own or {}).get(number, {})
            processes.append(started(mine.pop("folder"), *more, **mine))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(process, status=0, limit=300):
    """What it said on stderr, once it has ended with this status."""
    try:
        process.wait(limit)
    finally:
        process.kill()
        process.wait()
    said = heard(process)
    assert process.returncode == status, f"exit {process.returncode}, not {status}:\n{said}"
    return said


def heard(process):
    """What it has said on stderr so far."""
    return process.said.read_text()


def train(folder, *arguments, devices=8, status=0, program=(TRAIN,)):
    return ended(started(folder, *arguments, devices=devices, program=program), status)


def metrics(folder):
    """The rows of metrics.csv, without the columns that no two runs share."""
    path = Path(f"{folder}-logs") / "metrics.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if key not in SPEED} for row in rows]


def column(folder, name):
    return np.array([float(row[name]) for row in metrics(folder) if row[name]])


def last_step(folder):
    """The newest step of metrics.csv, which a process may be writing: 0 before there is one."""
    path = Path(f"{folder}-logs") / "metrics.csv"
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return int(whole[-1].split(",")[0]) if len(whole) > 1 else 0


def complete(folder):
    """Steps whose directory has its final name, in order."""
    return sorted(int(path.name) for path in Path(folder).glob("*") if path.name.isdigit())


def torn(folder):
    """Steps whose directory still has the name that Orbax gives while it writes."""
    return {int(path.name.split(".")[0]) for path in Path(folder).glob("*.orbax-checkpoint-tmp")}


def arrays(folder, step):
    """Every array of a checkpoint by name, read by TensorStore: without Orbax, JAX or a mesh."""
    base = {"driver": "ocdbt", "base": f"file://{Path(folder).resolve()}/{step}/state/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    names = [key.decode().removesuffix("zarr.json") for key in keys if key.endswith(b"zarr.json")]
    assert len(names) > 10, f"step {step} of {folder} holds the arrays {names}"
    found = {}
    for name in names:
        store = {"driver": "zarr3", "kvstore": base | {"path": name}}
        found[name] = np.asarray(tensorstore.open(store).result().read().result())
    return found


def same_bits(one, two):
    """The names of the arrays that differ in any bit, or in dtype or shape."""
    assert one.keys() == two.keys()
    return [
        name for name in one
        if one[name].dtype != two[name].dtype or one[name].shape != two[name].shape
        or one[name].tobytes() != two[name].tobytes()
    ]  # fmt: skip


def wait_until(condition, process, limit=120):
    """Poll until it holds. False if the process ended first."""
    end = time.monotonic() + limit
    while not condition():
        if process.poll() is not None:
            return False
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"nothing after {limit} s: {heard(process)}")
        time.sleep(0.001)
    return True


def first_step(said):
    """The step that a life says it began at."""
    found = re.search(r"(?:a new run from|resuming after) step (\d+) of", said)
    return int(found[1]) if found else None


def killed(process):
    """SIGKILL, which no program can catch. Returns what it had said."""
    process.kill()
    process.wait(60)
    said = heard(process)
    assert process.returncode == -signal.SIGKILL, f"exit {process.returncode}:\n{said}"
    return said
