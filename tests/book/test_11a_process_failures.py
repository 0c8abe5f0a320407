"""The page "When one process fails": who ends the waiting, and which one was first.

The page runs six failures and a barrier; the jobs of this file run side by side. Two processes each,
with short timeouts.
"""

import inspect
import os
import signal
import time

import jax
import numpy as np
import pytest

from many_devices.processes import Auto, Job, reason, run_together, say, stood_at
from pages import check_exercise, exercises_of

PAGE = "11a-process-failures"
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


def crash():
    """Add up twice; in between process 1 aborts, as a failed check in C++ does."""
    x = spread()
    try:
        say("the sum:", float(x.sum()))
        if jax.process_index() == 1:
            os.abort()
        say("the sum:", float(x.sum()))
    finally:
        say("finally")


def long_end(seconds):
    """Both run the same lines, and process 1 needs longer at its end."""
    say("the sum:", float(spread().sum()))
    if jax.process_index() == 1:
        time.sleep(seconds)
    say("saved")


def job(program, limits=LIMITS, **given):
    return Job(program, 2, 2, (spread,), given, limits, dies=True)


JOBS = {
    "crash": job(crash),
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


def steps_until(last):
    return ["connected"] + [f"step {number}: 120.0" for number in range(last)]


# The six failures of the page


def test_the_defaults_of_the_three_timeouts(page):
    """300 s until all have called initialize, 100 s for a heartbeat, 300 s at the end."""
    defaults = inspect.signature(jax.distributed.initialize).parameters
    assert [defaults[name].default for name in page.limits] == [300, 100, 300]


def test_a_killed_process_ends_the_other_when_heartbeats_are_missing(page):
    """JAX aborts the one that waits in its sum, some seconds later, and names task 1."""
    survivor, victim = page.failures["killed"]
    assert (survivor.code, victim.code) == (ABORTED, KILLED)
    assert survivor.log == victim.log == steps_until(3)
    assert reason(survivor).endswith("(stopped sending heartbeats): 1")
    assert 2 < survivor.ended - victim.ended < 60


def test_a_stuck_process_is_ended_by_watchdogs(page):
    """Both end with code 1, and the lines show which one slept and which one waited."""
    waits, sleeps = page.failures["stuck"]
    assert (waits.code, sleeps.code) == (1, 1)
    assert "sleep" in stood_at(sleeps) and "x.sum()" in stood_at(waits)


def test_jax_does_not_end_a_stuck_process(page):
    """It outlived the heartbeat's timeout, because its heartbeats went on: JAX aborted nobody."""
    waits, sleeps = page.failures["stuck"]
    assert waits.ended - waits.times[0] > page.limits["heartbeat_timeout_seconds"] + 1
    assert not any(said_by_jax([waits, sleeps]))
    assert "finally" not in waits.log + sleeps.log


def test_after_an_exception_both_are_aborted_at_the_shutdown_barrier(page):
    """The one that raised waits at its end; the exit code 1 is nowhere, the traceback in its log."""
    waits, raised = page.failures["raised"]
    assert codes([waits, raised]) == [ABORTED, ABORTED]
    assert all("Shutdown barrier" in reason(life) for life in (waits, raised))
    assert "ValueError" in raised.errors and "ValueError" not in waits.errors


def test_the_abort_runs_no_finally_and_after_an_exception_it_had_run(page):
    """The abort itself runs no `finally`; a process that raised an exception had run its own."""
    waits, raised = page.failures["raised"]
    assert raised.log[-1] == "finally" and "finally" not in waits.log
    killed = page.failures["killed"] + page.failures["coordinator killed"]
    assert all("finally" not in life.log or "Traceback" in life.errors for life in killed)


def test_a_killed_coordinator_ends_the_other_at_once(page):
    """The connection breaks, so nobody waits for a heartbeat."""
    leader, follower = page.failures["coordinator killed"]
    survivor, victim = page.failures["killed"]
    assert (leader.code, follower.code) == (KILLED, ABORTED)
    assert follower.ended - leader.ended < survivor.ended - victim.ended


def test_a_missing_process_ends_the_other_in_initialize(page):
    """It aborts with `Deadline Exceeded` and never connected."""
    (life,) = page.failures["missing"]
    assert life.code == ABORTED and life.log == []
    assert "DEADLINE_EXCEEDED: Deadline Exceeded" in reason(life)


def test_a_sum_of_the_first_alone_ends_at_the_shutdown_barrier(page):
    """Process 1 skips the `if` and waits at its end; process 0 never has its sum."""
    first, other = page.failures["only the first"]
    assert codes([first, other]) == [ABORTED, ABORTED]
    assert first.log == ["connected"] and other.log == ["connected", "ended"]


def test_jax_says_of_each_process_that_it_aborts(page):
    """In each of the page's failures, those that end with code -6 wrote that JAX terminates them."""
    for lives in page.failures.values():
        assert [life.code == ABORTED for life in lives] == said_by_jax(lives)


# Which one was first


def test_a_crash_in_cpp_has_the_code_of_jax_abort(lives):
    """Code -6 is an abort: JAX's, of a process that waits, or a crash in C++ of the culprit."""
    assert codes(lives["crash"]) == [ABORTED, ABORTED]


def test_only_jax_abort_has_the_line_that_says_so(lives):
    """A process that JAX aborted wrote that JAX terminates it; one that crashed by itself did not."""
    assert said_by_jax(lives["crash"]) == [True, False]
    assert not any("finally" in life.log for life in lives["crash"])


def test_the_task_that_is_named_unhealthy_was_the_first_whatever_its_exit_code(page, lives):
    """`unhealthy (stopped sending heartbeats)` names the culprit, killed or crashed."""
    for both, code in [(lives["crash"], ABORTED), (page.failures["killed"], KILLED)]:
        survivor, victim = both
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


# A barrier with a timeout


def test_the_barrier_names_the_missing_process(page):
    """Both processes get an exception that says who is missing, first the one that was in time."""
    for life in page.late_lives:
        assert "DEADLINE_EXCEEDED: Barrier timed out" in life.log[1]
        assert "reached the barrier: 1/2" in life.log[1] and life.log[1].endswith("names: 1")
    assert page.late_lives[0].times[1] < page.late_lives[1].times[1]


def test_after_the_barrier_both_end_with_code_1(page):
    """Both raise, and both reach the shutdown barrier in time."""
    assert codes(page.late_lives) == [1, 1]


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
