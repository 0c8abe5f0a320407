"""Messages of several processes: each program raises what its heading quotes, and the fix works."""

import inspect
import os
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from many_devices.persistent import Workers
from many_devices.processes import Auto
from pages import source_of
from printed import assert_raised, quoted_in_headings, run_and_read, said, without_blanks

PAGE = "messages-processes"

ENTRIES = quoted_in_headings(PAGE)
NO_MESSAGE = "stuck"  # its heading quotes a line of a program
ELSEWHERE = {  # pieces that another test raises
    "gloo": ["Gloo ReduceScatter failed:", "Read timeout"],  # before JAX 0.12
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def by_rows():
    """As on the page: its source is sent to the processes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(Auto,))
    return jax.NamedSharding(mesh, jax.P("data"))


def numbers():
    return jax.device_put(np.arange(16.0), by_rows())


@pytest.fixture(scope="module")
def pair():
    """Two processes of four devices each, for what the page says and does not run."""
    workers = Workers(uses=(by_rows, numbers))
    yield workers
    workers.end()


@pytest.mark.parametrize("slug", [slug for slug in ENTRIES if slug != NO_MESSAGE])
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    elsewhere = ELSEWHERE.get(slug, [])
    here = [piece for piece in ENTRIES[slug] if piece not in elsewhere]
    assert here
    assert_raised(page, slug, here, elsewhere=elsewhere)


def test_all_messages_have_an_entry():
    """No heading of the page is left out above."""
    assert len(ENTRIES) == 16 and NO_MESSAGE in ENTRIES


def test_none_of_the_pages_processes_is_left(page):
    """At the end of the page all of them have ended."""
    for job in (page.pair, page.alone, page.replaced, page.together):
        assert job.running and all(process.poll() is not None for process in job.running)


# Start


def test_called_first_two_processes_see_eight_devices(page):
    """Each has four of its own."""
    assert page.counts == ["2 processes, 8 devices"] * 2


def test_where_no_launcher_is_known_initialize_asks_for_all_three(page):
    """The address, the number of processes and this one's number, one after the other."""
    assert page.asked.stdout.splitlines() == [
        "ValueError: coordinator_address should be defined.",
        "ValueError: Number of processes must be defined.",
        "ValueError: The process id of the current process must be defined.",
    ]


def test_told_all_three_each_knows_which_it_is(page):
    """The processes of the pair are 0 and 1 of 2."""
    assert page.told == ["process 0 of 2", "process 1 of 2"]


def test_one_process_alone_is_not_what_was_asked_for(page):
    """In this process `expect` raises; in the pair it does not."""
    assert "is initialize() called" in said(page.expect)
    assert page.expected == ["as asked for"] * 2


def test_a_mesh_that_takes_what_it_finds_trains_alone_without_an_error():
    """A process that has not heard of the others makes a mesh of its own devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(Auto,))
    assert jax.process_count() == 1 and mesh.size == jax.local_device_count()


# Global arrays


def test_neither_process_can_read_all_of_a_global_array(page):
    """np.asarray raises in both."""
    assert len(page.not_read) == 2
    assert all("Fetching value for" in answer for answer in page.not_read)


def test_process_allgather_returns_all_of_it_in_both(page):
    """With tiled=True both have 0 to 15."""
    assert page.gathered == [str(np.arange(16.0, dtype="float32"))] * 2


def test_a_sum_is_known_to_every_process(pair):
    """float(x.sum()) is 120 in both, without process_allgather."""

    assert pair.run(add_numbers) == [str(float(sum(range(16))))] * 2


def add_numbers():
    return float(numbers().sum())


def test_a_global_array_is_joined_and_an_array_of_each_process_is_stacked(page):
    """Without tiled a global array raises, and others get a dimension of two."""
    assert all("only supports tiled=True" in answer for answer in page.not_stacked)
    assert page.both_shapes == ["each its own: (2, 3), one global: (16,)"] * 2


def test_a_constant_of_a_jitted_function_must_not_span_processes(page):
    """Closed over it raises in both."""
    assert len(page.not_closed_over) == 2
    for answer in page.not_closed_over:
        assert "Closing over jax.Array that spans non-addressable" in answer


def test_an_array_that_is_passed_in_is_doubled(page):
    """As an argument it gives twice the sum of 0 to 15."""
    assert page.doubled == [str(2.0 * sum(range(16)))] * 2


def default_argument():
    @jax.jit
    def double(x=numbers()):  # noqa: B008  (it is the mistake)
        return 2 * x

    return double().sum()


def test_a_default_argument_is_closed_over_as_well(pair):
    """The same message as for a closure."""
    for answer in pair.run(default_argument):
        assert "Closing over jax.Array that spans non-addressable" in answer


# Feed


def test_device_put_compares_what_the_processes_pass(page):
    """Different arrays raise in both."""
    assert len(page.not_same) == 2
    assert all("is not the same on each process" in answer for answer in page.not_same)


def put_equal():
    return jax.device_put(np.full(4, 7), jax.NamedSharding(by_rows().mesh, jax.P())).sum()


def test_equal_arrays_pass(pair):
    """The sum of four sevens is 28 in both."""
    assert pair.run(put_equal) == ["28"] * 2


def test_own_rows_lie_end_to_end(page):
    """First the rows of process 0, then those of process 1."""
    assert page.own_rows == ["[0. 0. 0. 0. 1. 1. 1. 1.]"] * 2


def test_neither_own_rows_nor_the_whole_batch_raises(page):
    """Twelve rows of sixteen, where each process has eight."""
    assert len(page.not_made) == 2
    assert all("Invalid host data" in answer for answer in page.not_made)


def test_without_the_global_shape_the_batch_is_twice_as_long(page):
    """All 16 rows from each process make 32 without an error, and 16 if the shape is given."""
    assert page.batch_shapes == ["without: (32,), with the global shape: (16,)"] * 2


# Save


def test_an_array_of_one_process_is_not_saved(page):
    """Both raise."""
    assert len(page.not_saved) == 2
    for answer in page.not_saved:
        assert "Cannot serialize host local jax.Array" in answer
        assert "in multi-host setting" in answer


def test_on_the_mesh_of_all_it_is_saved(page):
    """Loaded again, the replicated and the sharded array have their sums."""
    assert page.saved == [f"sums: {8 * 1.0}, {sum(range(16)):.1f}"] * 2


# Late, stuck, missing, killed


def test_a_barrier_raises_in_both_and_names_process_1(page):
    """One of two tasks reached it, and the end of the message says who is missing."""
    assert len(page.not_met) == 2
    for answer in page.not_met:
        assert "DEADLINE_EXCEEDED: Barrier timed out" in answer
        assert "# of tasks that reached the barrier: 1/2" in answer
        assert "Some timed out task names: 1" in " ".join(answer.split())


def test_in_time_both_pass_the_barrier_and_the_job_goes_on(page):
    """After the barrier that timed out, too."""
    assert page.met == ["all are here"] * 2


def test_while_one_is_late_nothing_is_written_and_nobody_ends(page):
    """The first new words of both are the watchdog's."""
    assert page.new_words == page.ended == [False, False]
    for number in (0, 1):
        silent = page.pair.errors(number).split("Timeout (")[0].strip()
        assert silent == page.before[number]


def test_the_watchdog_writes_where_each_process_was(page):
    """Process 0 was in the sum, process 1 in its sleep, and the sum is right: it was only late."""
    lines = inspect.getsource(page.add_late).splitlines()
    for number, (line, words) in enumerate([(4, "float(x.sum())"), (3, "time.sleep")]):
        written = page.pair.errors(number).split("Timeout (0:00:01)!")
        assert len(written) == 2 and f"line {line} in add_late" in written[1]
        assert words in lines[line - 1]
    assert page.totals == [str(float(sum(range(16))))] * 2


def test_a_sum_between_processes_keeps_to_the_limit_of_xla(page):
    """The one that waits raises after 4 s, and the late one finds its connection closed."""
    assert "Gloo all-reduce failed" in page.timed_out[0]
    assert "Timed out waiting" in page.timed_out[0]
    assert "Connection closed by peer" in page.timed_out[1]


def test_without_the_flag_the_same_sum_waits(page):
    """Seven seconds late, it is right in both."""
    assert page.waited == [str(float(sum(range(16))))] * 2


def scatter_late():
    """A reduce-scatter that connects the processes, and one to which process 1 comes later."""
    rows = by_rows()
    scatter = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
            mesh=rows.mesh,
            in_specs=rows.spec,
            out_specs=rows.spec,
        )
    )
    x = jax.device_put(np.arange(64.0), rows)
    scatter(x).block_until_ready()
    if jax.process_index() == 1:
        time.sleep(34)
    return scatter(x).block_until_ready().shape


@pytest.mark.slow
def test_before_jax_0_12_a_reduce_scatter_fails_after_30_seconds():
    """Then it raises in the words of the heading; since 0.12 it waits as long as the flag says."""
    workers = Workers(uses=(by_rows, numbers))
    try:
        answers = workers.run(scatter_late)
    finally:
        workers.end()
    if jax.__version_info__ >= (0, 12):
        assert answers == ["(8,)"] * 2
    else:
        assert all(piece in answers[0] for piece in ELSEWHERE["gloo"])


def test_alone_process_0_aborts_without_an_exception(page):
    """Exit code -6, and no traceback of Python."""
    assert page.alone_codes == [-signal.SIGABRT]
    assert 128 + signal.SIGABRT == 134  # in a shell
    assert "Traceback (most recent call last)" not in page.alone.errors(0)


def test_the_survivor_aborts_and_the_killed_one_has_another_code(page):
    """-6 and -9; the survivor's log names task 1."""
    assert page.pair_codes == [-signal.SIGABRT, -signal.SIGKILL]
    words = page.pair.errors(0)
    assert "The following tasks are unhealthy (stopped sending heartbeats): 1" in words


def test_the_process_without_an_abort_was_the_first(page):
    """It is process 1."""
    assert page.first == [1]


def test_every_process_that_jax_ends_says_the_first_line(page):
    """The one that waited alone, the survivor of a killed one, and one of a replaced pair."""
    line = ENTRIES["fatal-errors"][0]
    for job, number in [(page.alone, 0), (page.pair, 0), (page.replaced, 1)]:
        assert line in job.errors(number), number


def test_the_status_behind_it_tells_the_causes_apart(page):
    """Alone: a deadline while registering. With one killed: the task that is unhealthy."""
    assert "alone:DEADLINE_EXCEEDED" in page.printed["status"]
    assert "RegisterTask" in page.alone.errors(0)
    killed = "pair:UNAVAILABLE:Thefollowingtasksareunhealthy(stoppedsendingheartbeats):1"
    assert killed in page.printed["status"]


def test_when_process_0_ends_the_others_cannot_reach_the_service(page):
    """Process 1 aborts with the status `Failed to send RPC`, because process 0 runs the service."""
    job = Workers(heartbeat_timeout_seconds=6)
    try:
        job.run(page.count)
        os.kill(job.running[0].pid, signal.SIGKILL)
        assert job.wait() == [-signal.SIGKILL, -signal.SIGABRT]
        assert "Failed to send RPC" in page.status(job, 1)
        assert ENTRIES["fatal-errors"][0] in job.errors(1)
    finally:
        job.end()


def crash():
    if jax.process_index() == 1:
        os.abort()
    return float(jnp.ones(8).sum())


def test_a_crash_in_cpp_has_the_code_of_those_that_jax_ends(page):
    """Process 1 aborts by itself: both end with -6, and the log of process 0 names task 1."""
    job = Workers(heartbeat_timeout_seconds=6)
    try:
        job.run(page.count)
        job.tell(crash)
        assert job.wait() == [-signal.SIGABRT] * 2
        assert "unhealthy (stopped sending heartbeats): 1" in page.status(job, 0)
        assert "detected fatal errors" not in job.errors(1)
    finally:
        job.end()


def test_a_process_that_comes_back_alone_ends_the_job(page):
    """It is refused, and both abort."""
    assert page.replaced_codes == [-signal.SIGABRT] * 2
    assert "with a different incarnation. It has likely restarted." in page.replaced.errors(0)


def test_started_together_both_work(page):
    """A new job sees all devices."""
    assert page.restarted == ["2 processes, 8 devices"] * 2


def test_messages_that_need_other_machines_are_marked_and_cite_a_thread():
    """Each of these headings stands below the sentence that it was not raised here."""
    text = source_of(PAGE).read_text("utf-8")
    _, marked = text.split("\n## Messages that need other machines, not executed here\n")
    lead, *entries = re.split(r"(?m)^### ", marked)
    assert "They are not raised here" in lead and "```" not in marked
    assert len(entries) >= 5
    for entry in entries:
        assert re.search(r"Seen in \[[^\]]+\]\(https://github\.com/", entry), entry[:40]
    assert "NCCLoperation" in without_blanks(marked)
