"""Chapter 11: start a program as several processes, and tell how each of them ended."""

import contextlib
import inspect
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

temporary = tempfile.TemporaryDirectory()
disk = pathlib.Path(temporary.name)  # everything this page writes

BEFORE = """
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later(120, exit=True)  # then it ends, whatever happens
"""

START = """
import sys, jax, jax.numpy as jnp, numpy as np

Auto = jax.sharding.AxisType.Auto

address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, number, **limits)
"""

SAY = """
log = open(sys.argv[4], "a")  # not the terminal, to which libraries write as well

def say(*words):
    print(f"{time.time():.3f}", *words, file=log, flush=True)

say("connected")
"""


class Job(NamedTuple):
    program: Callable  # its source is written into a file
    processes: int
    devices: int  # of each process, simulated
    uses: tuple = ()  # functions that it calls
    given: dict = {}  # its arguments
    limits: dict = {}  # of jax.distributed.initialize, in seconds
    settings: dict = {}  # of the environment
    started: tuple | None = None  # which of its processes; None: all
    dies: bool = False  # a job that does not expect to die stops at the first death


class Life(NamedTuple):
    log: list  # what it said
    times: list  # when it said so, in seconds
    began: float  # when it was started
    ended: float  # when it ended
    code: int  # its exit code: negative, if a signal ended it
    errors: str  # its stderr


taken = []  # one socket for each address that was drawn: two jobs could share a port


def free_addresses(count):
    """Addresses of this computer that nobody listens at, or will."""
    ports = []
    while len(ports) < count:
        port = random.randrange(20_000, 26_000)  # systems give out larger ones
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            taken.append(socket.create_server(("127.0.0.1", port + 6_000)))
            ports.append(port)
    return [f"127.0.0.1:{port}" for port in ports]


def written(job, folder):
    """The file that each process of the job runs."""
    functions = "\n".join(inspect.getsource(each) for each in (*job.uses, job.program))
    call = (
        f"{job.program.__name__}(**{job.given!r})\n"
        "faulthandler.cancel_dump_traceback_later()\nsay('ended')\n"
    )
    path = folder / f"{job.program.__name__}.py"
    limits = {"shutdown_timeout_seconds": 20} | job.limits  # who fails waits for all
    own = "limits['coordinator_bind_address'] = sys.argv[1]  # on this computer alone"
    lines = [BEFORE, f"limits = {limits!r}", own, START, SAY, functions, call]
    path.write_text("\n".join(lines))
    return path


def environment(devices):
    """What a process is started with that simulates so many devices."""
    mine = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return mine | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "NPROC": "16",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def started(job, address, folder):
    """The processes of the job: each is a group of its own, with all that it starts."""
    path = written(job, folder)
    quick = {"PYTHONUNBUFFERED": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # small programs
    for number in job.started or range(job.processes):
        command = [
            sys.executable,
            path,
            address,
            str(job.processes),
            str(number),
            folder / f"{number}.log",
        ]
        with open(folder / f"{number}.err", "w") as errors:
            yield subprocess.Popen(
                command,
                env=environment(job.devices) | quick | job.settings,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )


def lives_of(processes, ends):
    """What is left of the processes of a job, in order."""
    for process in processes:
        path = pathlib.Path(process.args[-1])
        text = path.read_text() if path.exists() else ""  # it may have said nothing
        said = [line.partition(" ") for line in text.splitlines()]
        log, times = [each[2] for each in said], [float(each[0]) for each in said]
        errors = path.with_suffix(".err").read_text()
        yield Life(log, times, *ends[process.pid], process.returncode, errors)


def check_alive(job, processes):
    """A death that the job did not expect ends it, with what the first to fail said."""
    if job.dies or not any(process.poll() for process in processes):
        return
    time.sleep(0.5)  # for the last words of the others
    errors = [
        pathlib.Path(process.args[-1]).with_suffix(".err").read_text() for process in processes
    ]
    raised = [number for number, said in enumerate(errors) if "Traceback (" in said]
    number = [*raised, 0][0]  # those without a traceback only followed
    begins = max(0, errors[number].find("Traceback ("))
    said = errors[number][begins : begins + 3000]
    raise RuntimeError(f"process {number} of {job.program.__name__} failed:\n{said}")


def run_together(*jobs, seconds=150):
    """Run jobs side by side. Returns for each the lives of its processes."""
    running, begins, ends = [], {}, {}
    try:
        for job, address in zip(jobs, free_addresses(len(jobs))):
            folder = pathlib.Path(tempfile.mkdtemp(dir=disk))
            processes = []
            running.append((job, processes))
            for process in started(job, address, folder):
                processes.append(process)
                begins[process.pid] = time.time()
        limit = time.monotonic() + seconds
        while len(ends) < sum(len(processes) for _, processes in running):
            for job, processes in running:
                check_alive(job, processes)
                for process in processes:
                    if process.poll() is not None:
                        both = begins[process.pid], time.time()
                        ends.setdefault(process.pid, both)
            if time.monotonic() > limit:
                raise TimeoutError(f"not ended after {seconds} s, and stopped now")
            time.sleep(0.02)
        return [list(lives_of(processes, ends)) for _, processes in running]
    finally:  # after success, failure and interruption
        for _, processes in running:
            for process in processes:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass  # it has ended, and nothing of it is left
                process.wait()


def run(program, processes, devices, **more):
    """The lives of one job's processes."""
    return run_together(Job(program, processes, devices, **more))[0]


def side_by_side(lives, width=44):
    """The logs, a column for each process."""
    logs = [[line for line in life.log if line not in ("connected", "ended")] for life in lives]
    print("".join(f"{'process ' + str(n):{width}}" for n in range(len(logs))).rstrip())
    for row in range(max(len(log) for log in logs)):
        cells = [log[row] if row < len(log) else "" for log in logs]
        if len(cells[0]) > width and not any(cells[1:]):  # a long line of the first
            print(textwrap.fill(cells[0], 2 * width - 4))
        else:
            print("".join(f"{cell:{width}}" for cell in cells).rstrip())


say, Auto = print, jax.sharding.AxisType.Auto  # in this notebook


def data_mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(Auto,))


def rows_here(sharding, size):
    """The rows of a batch that this process's devices hold, in order."""
    every_row, mine = np.arange(size), set()
    slices = sharding.addressable_devices_indices_map((size,))  # device: its slices
    for part in slices.values():
        mine.update(every_row[part].tolist())
    return np.array(sorted(mine))


TELLING = [  # of what JAX's runtime writes on stderr before it aborts
    r"Shutdown barrier has failed",
    r"The following tasks are unhealthy \(stopped sending heartbeats\): \d+",
    r"the leader task was preempted/died/restarted unexpectedly",
    r"DEADLINE_EXCEEDED: Deadline Exceeded",
]


def stood_at(life):
    """The line of our program that its watchdog found it at."""
    frames = re.findall(r'File "(\S+)", line (\d+) in ', life.errors)
    path, number = [each for each in frames if each[0].startswith(str(disk))][0]
    return pathlib.Path(path).read_text().splitlines()[int(number) - 1].strip()


def reason(life):
    """How it ended: by whom, and in whose words."""
    said = " ".join(life.errors.split())
    if life.code == -signal.SIGABRT:
        found = [re.search(each, said) for each in TELLING]
        raised = re.search(r"^\w*Error: .*", life.errors, re.MULTILINE)
        first = f"{raised[0]}; then " if raised else ""
        return f"{first}aborted by JAX: {next(match[0] for match in found if match)}"
    if life.code == 1 and "Timeout (" in said:
        return f"ended by its watchdog at: {stood_at(life)}"
    if life.code == -signal.SIGKILL:
        return "killed"
    return "finished" if life.code == 0 else life.errors.strip().splitlines()[-1]


def table(lives_by_name):
    for name, lives in lives_by_name.items():
        print(name)
        for number, life in enumerate(lives):
            after = ", after finally" if "finally" in life.log else ""
            words = f"  process {number}, exit code {life.code}{after}: {reason(life)}"
            print(textwrap.fill(words, 86, subsequent_indent=" " * 4))
