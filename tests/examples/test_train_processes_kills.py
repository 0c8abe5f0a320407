"""examples/train.py as two processes: one is killed again and again, and nothing is lost.

Two kills in `make test`; `.ci/run kills` sets TRAIN_PROCESS_KILLS to forty. TRAIN_SEED chooses
the process, the moment, and how many processes go on; where exactly a kill falls differs in any case.
"""

import os
import random
import re
import signal

import lives
import numpy as np
import pytest

pytestmark = [pytest.mark.kills, pytest.mark.usefixtures("compiled_once")]  # programs alone

KILLS = int(os.environ.get("TRAIN_PROCESS_KILLS", "2"))
SEED = int(os.environ.get("TRAIN_SEED", "18"))
EVERY = 10  # steps from save to save
STEPS = 3 * EVERY * (KILLS + 1)
HEARTBEAT = 8
COMMAND = [
    "--strategy", "fsdp-tensor", "--steps", STEPS, "--save-every", EVERY, "--log-every", 1,
    "--evaluate-every", EVERY,
    "--heartbeat", HEARTBEAT,
]  # fmt: skip
ABORTED = -signal.SIGABRT


def killed_once(folder, victim, ahead):
    """One life of two processes. Returns the step it began at, and the survivor's stderr."""
    with lives.together(folder, 2, *COMMAND) as processes:
        first, other = processes[0], processes[1 - victim]
        assert lives.wait_until(lambda: lives.first_step(lives.heard(first)) is not None, first)
        began = lives.first_step(lives.heard(first))
        assert lives.wait_until(lambda: lives.last_step(folder) >= began + ahead, first)
        lives.killed(processes[victim])
        return began, lives.ended(other, ABORTED, limit=HEARTBEAT + 60)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that is killed and one that never is, both as two processes, and a record of each life."""
    root = tmp_path_factory.mktemp("processes")
    run, rng, records = root / "killed", random.Random(SEED), []
    for number in range(KILLS):
        # The first kills are of each process once, then of either.
        victim = number if number < 2 else rng.randrange(2)
        newest = max(lives.complete(run), default=0)
        began, said = killed_once(run, victim, rng.randrange(EVERY // 2, 3 * EVERY))
        records.append({"victim": victim, "newest": newest, "began": began, "said": said})
        print(f"process {victim} was killed: began at {began}, came to {lives.last_step(run)}")
    for folder, more in [(run, ()), (root / "never", ("--steps", STEPS + EVERY))]:
        with lives.together(folder, 2, *COMMAND, *more) as processes:
            for process in processes:
                lives.ended(process)
    return run, root / "never", records


def test_each_life_begins_at_the_newest_complete_step(runs):
    assert len(runs[2]) == KILLS and {record["victim"] for record in runs[2]} == {0, 1}
    for record in runs[2]:
        assert record["began"] == record["newest"], record


def test_the_other_process_says_why_it_ended(runs):
    for record in runs[2]:
        why = (
            r"stopped sending heartbeats" if record["victim"] else r"the leader task was preempted"
        )
        assert re.search(why, record["said"]), record["said"][-2000:]


def test_killed_runs_end_with_the_bits_of_one_never_killed(runs):
    run, never, _ = runs
    assert lives.same_bits(lives.arrays(run, STEPS), lives.arrays(never, STEPS)) == []


def test_each_step_has_one_row_of_metrics(runs):
    run, never, _ = runs
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 1)]
    assert lives.metrics(run) == lives.metrics(never)[:STEPS]


def test_one_process_goes_on_where_two_stopped(runs):
    """Ten steps more, to rounding. Four at night."""
    run, never, _ = runs
    count = 1 if KILLS < 10 else 4
    with lives.together(run, count, *COMMAND, "--steps", STEPS + EVERY) as processes:
        for process in processes:
            lives.ended(process)
    ours, theirs = lives.column(run, "loss"), lives.column(never, "loss")
    assert len(ours) == len(theirs) == STEPS + EVERY
    np.testing.assert_allclose(ours[-EVERY:], theirs[-EVERY:], rtol=2e-5)
