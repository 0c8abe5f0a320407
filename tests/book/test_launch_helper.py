"""The launcher of chapter 11, many_devices.processes: no process is left, whatever happens to those
who wait.

It runs in a process of its own, which is told to do one thing and is then left
alone, fails, or is interrupted, as a kernel is by the stop button of a notebook.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from many_devices import processes

pytestmark = pytest.mark.newest  # of kernels: once is enough

SOURCE = Path(processes.__file__).read_text("utf-8")

PROGRAMS = """
def sleeps(seconds):
    child = __import__("subprocess").Popen(["sleep", "1000"])  # it has started something itself
    say(os.getpid(), child.pid)
    time.sleep(seconds)

def ends_badly():
    say(os.getpid(), os.getpid())
    time.sleep(3)
    if jax.process_index() == 1:
        raise ValueError("a mistake in process 1")
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def helper(tmp_path_factory):
    """A module that holds the launcher and two programs to start."""
    folder = tmp_path_factory.mktemp("helper")
    # `inspect` finds the source of what is in a file.
    (folder / "helper.py").write_text(f"{SOURCE}\n\n{PROGRAMS}")
    return folder


def begin(helper, what):
    """A process that does this with the helper, in a group of its own.

    It listens to interruptions, as a kernel does: what a shell runs in the background does not, and
    hands that on to all that it starts.
    """
    listens = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listens}\nfrom helper import *\nprint(disk, flush=True)\n{textwrap.dedent(what)}"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=helper, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def started(folder, count, limit=120):
    """Process ids that the programs wrote into their logs, once there are so many logs with them."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        logs = [path.read_text().splitlines() for path in Path(folder).glob("*/*.log")]
        said = [line.split()[1:] for log in logs for line in log if len(line.split()) == 3]
        if len(said) >= count:
            return [int(number) for numbers in said for number in numbers]
        time.sleep(0.05)
    raise AssertionError(f"{count} processes have not started within {limit} s")


def alive(numbers):
    def lives(number):
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"  # dead, and waits to be asked how it ended

    return [number for number in numbers if lives(number)]


def gone(numbers, limit=10):
    end = time.monotonic() + limit
    while alive(numbers) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(numbers)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")


@needs_proc
def test_nothing_is_left_after_an_interruption(helper):
    process = begin(helper, "run(sleeps, 2, 2, given={'seconds': 1000})")
    try:
        numbers = started(process.stdout.readline().strip(), 2)
        assert len(alive(numbers)) == 4
        process.send_signal(signal.SIGINT)  # what the stop button of a notebook sends
        _, errors = process.communicate(timeout=100)  # it waits for those it has killed
        assert errors.rstrip().endswith("KeyboardInterrupt") and gone(numbers), alive(numbers)
    finally:
        process.kill()


@pytest.mark.slow
@needs_proc
def test_nothing_is_left_after_a_failure_which_is_told(helper):
    process = begin(helper, "run(ends_badly, 2, 2)")
    try:
        numbers = started(process.stdout.readline().strip(), 2)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1 and gone(numbers)
    assert "RuntimeError: process 1 of ends_badly failed:" in errors
    assert "ValueError: a mistake in process 1" in errors


@needs_proc
def test_nothing_is_left_after_success_or_after_the_time_is_over(helper):
    what = """
    run(sleeps, 1, 2, given={"seconds": 0})
    try:
        run_together(Job(sleeps, 1, 2, given={"seconds": 1000}), seconds=20)
    except TimeoutError as error:
        print(error)
    """
    process = begin(helper, what)
    try:
        numbers = started(process.stdout.readline().strip(), 2)
        said, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert "not ended after 20 s, and stopped now" in said, errors
    assert gone(numbers), alive(numbers)


@pytest.mark.slow
def test_the_watchdog_ends_those_whose_notebook_was_killed(helper):
    """SIGKILL leaves nobody to clean up: then the hard limit in each program ends it."""
    source = (helper / "helper.py").read_text()
    seconds = "faulthandler.dump_traceback_later(120, exit=True)"
    assert source.count(seconds) == 1
    short = helper / "short"
    short.mkdir()
    (short / "helper.py").write_text(source.replace(seconds, seconds.replace("120", "25")))
    process = begin(short, "run(sleeps, 2, 2, given={'seconds': 1000})")
    numbers = started(process.stdout.readline().strip(), 2)
    programs, children = numbers[::2], numbers[1::2]
    process.kill()
    process.wait()
    try:
        assert gone(programs, limit=60), alive(programs)
    finally:
        for number in children:  # which these programs, of our own making, have started
            os.kill(number, signal.SIGKILL)


@needs_proc
def test_the_stop_button_of_a_notebook_leaves_nothing(helper):
    """In a real kernel, where it is a cell."""
    manager, client = start_new_kernel(cwd=str(helper))
    try:
        said = []

        def heard(message):
            said.append(message["content"].get("text", ""))

        # A cell of its own for each, as in the chapter: `inspect` reads programs from their cells.
        for cell in (f"{SOURCE}\nprint(disk)", PROGRAMS):
            reply = client.execute_interactive(cell, timeout=60, output_hook=heard)
            assert reply["content"]["status"] == "ok", reply["content"]
        folder = "".join(said).strip()
        client.execute("run(sleeps, 2, 2, given={'seconds': 1000})")
        numbers = started(folder, 2)
        assert len(alive(numbers)) == 4
        manager.interrupt_kernel()
        assert gone(numbers, limit=30), alive(numbers)
        reply = client.get_shell_msg(timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_jobs_of_one_call_have_addresses_of_their_own(helper):
    process = begin(helper, "import json; print(json.dumps(free_addresses(20)))")
    said, _ = process.communicate(timeout=60)
    addresses = json.loads(said.splitlines()[1])
    assert len(set(addresses)) == 20 and all(one.startswith("127.0.0.1:") for one in addresses)


def test_two_notebooks_never_draw_the_same_address(helper):
    # Two coordinators at one port take each other's processes ("a different incarnation").
    draw = "random.seed(0); print(free_addresses(5), flush=True); time.sleep(100)"
    processes = [begin(helper, draw) for _ in range(2)]
    try:
        said = [[process.stdout.readline() for _ in range(2)][1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    first, second = (set(re.findall(r"127[.0-9:]+", one)) for one in said)
    assert len(first) == len(second) == 5 and not first & second
