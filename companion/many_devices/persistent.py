"""Processes that stay, and run one function after another: for pages with many small programs.

`many_devices.processes`, of chapter 11, starts new processes for each program.
"""

import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref

from many_devices.processes import BEFORE, START, disk, environment, free_addresses

SERVE = """
import json
from jax.experimental import multihost_utils

for line in sys.stdin:  # until the notebook closes it, or ends
    faulthandler.dump_traceback_later(240, exit=True)
    task, functions = json.loads(line)
    for name, source in functions:
        exec(compile(source, name, "exec"))
    try:
        answer = str(globals()[name]())
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    with open(f"{task}-{number}.new", "w") as file:
        file.write(answer)
    os.rename(file.name, f"{task}-{number}")
os._exit(0)  # the others end too, so wait for nobody
"""


def end(running):
    """Kill the processes, with all that they started."""
    for process in running:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended
        process.wait()
        process.stdin.close()


class Workers:
    """The processes of one job, on this computer, each with four simulated devices.

    They call `jax.distributed.initialize` with the `limits`, in seconds, and then wait for functions.
    A function may use `jax`, `jnp`, `np`, `Auto`, `multihost_utils`, the modules that `BEFORE`
    imports, the functions in `uses`, and those that ran before it. All have one current folder.

    started: which processes of the job are started.
    settings: variables of the environment.
    """

    def __init__(self, count=2, started=(0, 1), uses=(), settings=(), **limits):
        self.count, self.limits, self.tasks = count, limits, 0
        self.settings = dict(settings)
        self.functions = [inspect.getsource(each) for each in uses]
        (self.address,) = free_addresses(1)
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=disk))
        self.running = []
        weakref.finalize(self, end, self.running)  # at the latest when the notebook ends
        for number in started:
            self.running.append(self.start(number))

    def start(self, number, **limits):
        """Start one process of the job, if need be with other limits."""
        limits = self.limits | {"coordinator_bind_address": self.address} | limits
        parts = [BEFORE, f"limits = {limits!r}", START, *self.functions, SERVE]
        numbers = [self.address, str(self.count), str(number)]
        with open(self.folder / f"errors-{number}", "w") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", "\n".join(parts), *numbers],
                env=environment(4) | self.settings,
                cwd=self.folder,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def tell(self, function, uses=()):
        """Let all processes run the function, and do not wait. uses: functions that it calls."""
        self.tasks += 1
        sources = [(each.__name__, inspect.getsource(each)) for each in (*uses, function)]
        order = [self.tasks, sources]
        for process in self.running:
            print(json.dumps(order), file=process.stdin, flush=True)

    def run(self, function, uses=(), seconds=90):
        """What the function returned or raised, as text, for each process.

        Raises RuntimeError, and ends the job, if a process ends or does not answer in time.
        """
        self.tell(function, uses)
        files = [self.folder / f"{self.tasks}-{number}" for number in range(len(self.running))]
        until = time.monotonic() + seconds
        while not all(file.exists() for file in files):
            ended = [n for n, process in enumerate(self.running) if process.poll() is not None]
            if ended or time.monotonic() > until:
                words = self.errors(ended[0])[-2000:] if ended else "no answer"
                self.end()
                raise RuntimeError(f"{function.__name__}: {words}")
            time.sleep(0.01)
        return [file.read_text() for file in files]

    def errors(self, number):
        """What a process wrote to stderr, with single blanks."""
        return " ".join((self.folder / f"errors-{number}").read_text().split())

    def wait(self, seconds=90):
        """The exit codes, once all processes have ended by themselves."""
        until = time.monotonic() + seconds
        while None in [process.poll() for process in self.running]:
            if time.monotonic() > until:
                raise TimeoutError(f"the processes have not ended after {seconds} s")
            time.sleep(0.02)
        return [process.returncode for process in self.running]

    def end(self):
        """Kill all processes of the job that still run."""
        end(self.running)


def show(answers):
    """Print the answer of each process, once if they are equal."""
    same = len(set(answers)) == 1
    for number, answer in enumerate(answers[:1] if same else answers):
        said = " ".join(answer.split()).split(" RPC:")[0]
        who = "all" if same else f"process {number}"
        print(textwrap.fill(f"{who}: {said}", 88))
