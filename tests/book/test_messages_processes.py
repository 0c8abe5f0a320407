"""Messages of several processes: each program raises what its heading quotes."""

import os
import re
import signal

import jax
import pytest

from pages import BOOK
from printed import assert_raised, run_and_read, without_blanks

PAGE = "messages-processes"

RAISED = {
    "fatal-errors": [
        "Terminating process because the JAX distributed service detected fatal errors",
        "Polled an error from coordination service",
    ]
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once, with its processes. Those that a test starts end with it."""
    with run_and_read(PAGE) as executed:
        logs = {name: executed.variables[name] for name in ("alone", "both", "replaced")}
        executed.errors = {
            name: {number: job.errors(number) for number in range(len(job.running))}
            for name, job in logs.items()
        }
        try:
            yield executed
        finally:
            for job in (*logs.values(), executed.together):
                job.end()
    jax.clear_caches()


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug])


def test_every_process_that_jax_ends_says_the_first_line(page):
    """The one that waited alone, the survivor of a killed one, and both of a replaced pair."""
    line = RAISED["fatal-errors"][0]
    for job, number in [("alone", 0), ("both", 0), ("replaced", 1)]:
        assert line in page.errors[job][number], (job, number)


def test_the_status_behind_it_tells_the_causes_apart(page):
    """Alone: a deadline while registering. With one killed: the task that is unhealthy."""
    assert "alone:DEADLINE_EXCEEDED" in page.printed["status"]
    assert "RegisterTask" in page.errors["alone"][0]
    killed = "both:UNAVAILABLE:Thefollowingtasksareunhealthy(stoppedsendingheartbeats):1"
    assert killed in page.printed["status"]


def test_when_process_0_ends_the_others_cannot_reach_the_service(page):
    """Process 1 aborts with the status `Failed to send RPC`, because process 0 runs the service."""
    job = page.Workers(heartbeat_timeout_seconds=6)
    try:
        job.run(page.count)
        os.kill(job.running[0].pid, signal.SIGKILL)
        assert job.wait() == [-signal.SIGKILL, -signal.SIGABRT]
        assert "Failed to send RPC" in page.status(job, 1)
        assert RAISED["fatal-errors"][0] in job.errors(1)
    finally:
        job.end()


def crash():
    """What both workers run: its source is sent to them."""
    if jax.process_index() == 1:
        os.abort()
    return float(x.sum())  # noqa: F821  (a name of the worker)


def test_a_crash_in_cpp_has_the_code_of_those_that_jax_ends(page):
    """Process 1 aborts by itself: both end with -6, and the log of process 0 names task 1."""

    job = page.Workers(heartbeat_timeout_seconds=6)
    try:
        job.run(page.count)
        job.tell(crash)
        assert job.wait() == [-signal.SIGABRT] * 2
        assert "unhealthy (stopped sending heartbeats): 1" in page.status(job, 0)
        assert "detected fatal errors" not in job.errors(1)
    finally:
        job.end()


def test_messages_that_need_other_machines_are_marked_and_cite_a_thread():
    """Each of these headings stands below the sentence that it was not raised here."""
    text = (BOOK / f"{PAGE}.md").read_text("utf-8")
    _, marked = text.split("\n## Messages that need other machines, not executed here\n")
    lead, *entries = re.split(r"(?m)^### ", marked)
    assert "They are not raised here" in lead and "```" not in marked
    assert len(entries) >= 5
    for entry in entries:
        assert re.search(r"Met in \[[^\]]+\]\(https://github\.com/", entry), entry[:40]
    assert "NCCLoperation" in without_blanks(marked)
