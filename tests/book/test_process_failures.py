"""The page "When one process fails": who ends the waiting, and which one was first.

All jobs run side by side, two processes each, with short limits.
"""

import os
import signal
import time

import jax
import numpy as np
import pytest

from many_devices.processes import Auto, Job, run_together, say

ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL
BY_JAX = "Terminating process because the JAX distributed service detected fatal errors"
LIMITS = {
    "initialization_timeout": 60,  # this computer may be busy
    "heartbeat_timeout_seconds": 5,
    "shutdown_timeout_seconds": 4,
}


def spread():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(Auto,))
    return jax.device_put(np.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))


def fails(how, victim):
    """Add up twice; in between the process `victim` fails."""
    x = spread()
    try:
        say("the sum:", float(x.sum()))
        if jax.process_index() == victim:
            if how == "crash":
                os.abort()  # as a failed check in C++ does
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a row that cannot be read")
        say("the sum:", float(x.sum()))
    finally:
        say("finally")


def only_the_first():
    x = spread()
    if jax.process_index() == 0:  # and nobody else
        say("the sum:", float(x.sum()))


def long_end(seconds):
    """Both run the same lines, and process 1 needs longer at its end."""
    say("the sum:", float(spread().sum()))
    if jax.process_index() == 1:
        time.sleep(seconds)
    say("saved")


def job(program, limits=LIMITS, started=None, **given):
    return Job(program, 2, 2, (spread,), given, limits, started=started, dies=True)


JOBS = {
    "crash": job(fails, how="crash", victim=1),
    "raised": job(fails, how="raise", victim=1),
    "killed": job(fails, how="kill", victim=1),
    "coordinator killed": job(fails, how="kill", victim=0),
    "missing": job(only_the_first, LIMITS | {"initialization_timeout": 3}, started=(0,)),
    "only the first": job(only_the_first),
    "long end": job(long_end, seconds=12),
    "long end, enough time": job(long_end, LIMITS | {"shutdown_timeout_seconds": 60}, seconds=6),
}


@pytest.fixture(scope="module")
def lives():
    """How the processes of each job ended."""
    return dict(zip(JOBS, run_together(*JOBS.values()), strict=True))


def codes(lives):
    return [life.code for life in lives]


def said_by_jax(lives):
    return [BY_JAX in " ".join(life.errors.split()) for life in lives]


def test_a_crash_in_cpp_has_the_code_of_jax_abort(lives):
    """Code -6 is an abort: JAX's, of a process that waits, or a crash in C++ of the culprit."""
    assert codes(lives["crash"]) == [ABORTED, ABORTED]


def test_only_jax_abort_has_the_line_that_says_so(lives):
    """A process that JAX aborted wrote that JAX terminates it; one that crashed by itself did not."""
    assert said_by_jax(lives["crash"]) == [True, False]


@pytest.mark.parametrize("name, by_jax", [
    ("raised", [0, 1]), ("killed", [0]), ("coordinator killed", [1]), ("missing", [0]),
    ("only the first", [0, 1]), ("long end", [0, 1]),
])  # fmt: skip
def test_jax_says_of_each_process_that_it_aborts(lives, name, by_jax):
    """In each of the page's failures, those that end with code -6 wrote that JAX terminates them."""
    ended = [n for n, life in enumerate(lives[name]) if life.code == ABORTED]
    assert ended == by_jax == [n for n, said in enumerate(said_by_jax(lives[name])) if said]


def test_the_task_that_is_named_unhealthy_was_the_first_whatever_its_exit_code(lives):
    """`unhealthy (stopped sending heartbeats)` names the culprit, killed or crashed."""
    for name, code in {"crash": ABORTED, "killed": KILLED}.items():
        survivor, victim = lives[name]
        said = " ".join(survivor.errors.split())
        assert "unhealthy (stopped sending heartbeats): 1" in said and victim.code == code


def test_the_shutdown_barrier_also_fails_if_one_needs_longer_at_its_end(lives):
    """`Shutdown barrier has failed` without a traceback: they ran different lines, or one needed
    longer at its end than shutdown_timeout_seconds."""
    for life in lives["long end"]:
        assert "Shutdown barrier has failed" in " ".join(life.errors.split())
        assert "Traceback" not in life.errors
    assert codes(lives["long end"]) == [ABORTED, ABORTED]
    assert codes(lives["long end, enough time"]) == [0, 0]


def test_it_is_aborted_in_the_middle_of_its_work(lives):
    """A process that works alone at the end is aborted before its work is done."""
    first, late = lives["long end"]
    assert "saved" in first.log and "saved" not in late.log
    assert all("saved" in life.log for life in lives["long end, enough time"])


def test_the_abort_runs_no_finally_and_after_an_exception_it_had_run(lives):
    """The abort itself runs no `finally`; a process that raised an exception had run its own."""
    waits, raised = lives["raised"]
    assert codes(lives["raised"]) == [ABORTED, ABORTED]
    assert "finally" in raised.log and "ValueError" in raised.errors
    assert "finally" not in waits.log
    assert not any("finally" in life.log for life in lives["crash"])
