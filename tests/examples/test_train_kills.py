"""examples/train.py is killed again and again, while it starts, trains and saves, and loses nothing.

Two kills in `make test`; `.ci/run kills` sets TRAIN_KILLS to forty. TRAIN_SEED chooses other
moments, and where exactly a kill falls differs in any case.
"""

import os
import random
import time

import lives
import pytest

pytestmark = [pytest.mark.kills, pytest.mark.usefixtures("compiled_once")]  # programs alone

KILLS = int(os.environ.get("TRAIN_KILLS", "2"))
SEED = int(os.environ.get("TRAIN_SEED", "16"))
STEPS = 40 + 60 * KILLS  # more than the kills let a run take
EVERY = 10  # steps from save to save
COMMAND = ["--strategy", "fsdp-tensor", "--steps", STEPS, "--save-every", EVERY, "--log-every", 1]


def plan(rng):
    """What the program is doing when it is killed: half of the times, it saves."""
    others = [("training", "starting")[number % 2] for number in range(KILLS // 2)]
    moments = ["saving"] * (KILLS - len(others)) + others
    rng.shuffle(moments)
    return moments


def killed_while(when, folder, rng):
    """One life: (step it began at, steps that it was writing). None before it said where."""
    leftovers = lives.torn(folder)  # it clears these away before it says where it begins
    process = lives.started(folder, *COMMAND)
    if when == "starting":
        end, most = time.monotonic() + rng.uniform(0.5, 6), lives.last_step(folder) + 4 * EVERY
        assert lives.wait_until(
            lambda: time.monotonic() > end or lives.last_step(folder) > most, process
        )
    else:
        assert lives.wait_until(lambda: lives.first_step(lives.heard(process)) is not None, process)
        first = lives.first_step(lives.heard(process))
        ahead = rng.randrange(1, 4 * EVERY)
        if when == "training":
            assert lives.wait_until(lambda: lives.last_step(folder) > first + ahead, process)
        else:
            after = first + ahead - EVERY
            assert lives.wait_until(
                lambda: any(step > after for step in lives.torn(folder)), process
            )
            time.sleep(rng.choice([0, 0, 0.01, 0.03, 0.1]))
    first = lives.first_step(lives.killed(process))
    return first, lives.torn(folder) - (leftovers if first is None else set())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that is killed, one that never is, and a record of each life."""
    root = tmp_path_factory.mktemp("kills")
    run, rng, records = root / "killed", random.Random(SEED), []
    for when in plan(rng):
        newest = max(lives.complete(run), default=0)
        first, torn = killed_while(when, run, rng)
        rows = lives.last_step(run)
        records.append({"when": when, "newest": newest, "first": first, "torn": torn, "rows": rows})
        print(
            f"killed while {when}: began at {first}, came to {rows}, was writing {torn or 'nothing'}"
        )
    newest = max(lives.complete(run), default=0)
    said = lives.train(run, *COMMAND)
    records.append(
        {"when": "never", "newest": newest, "first": lives.first_step(said), "torn": set()}
    )
    lives.train(root / "never", *COMMAND)
    return run, root / "never", records


def test_kills_fall_into_saves_too(runs):
    kills = [record for record in runs[2] if record["when"] != "never"]
    torn = [record for record in kills if record["torn"]]
    print(f"{len(kills)} kills with seed {SEED}, {len(torn)} of them in the middle of a save")
    assert len(kills) == KILLS and len(torn) >= max(1, KILLS // 4), kills


def test_each_life_begins_at_the_newest_complete_step(runs):
    for record in runs[2]:
        assert record["first"] in (None, record["newest"]), record
    assert sum(record["first"] is not None for record in runs[2]) > KILLS / 2


def test_killed_runs_end_with_the_bits_of_one_never_killed(runs):
    run, never, _ = runs
    assert lives.same_bits(lives.arrays(run, STEPS), lives.arrays(never, STEPS)) == []


def test_each_step_has_one_row_of_metrics(runs):
    run, never, _ = runs
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 1)]
    assert lives.metrics(run) == lives.metrics(never)


def test_nothing_is_left_over(runs):
    run, never, _ = runs
    kept = [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    assert lives.complete(run) == lives.complete(never) == kept
    assert sorted(path.name for path in run.iterdir()) == sorted(map(str, kept))
