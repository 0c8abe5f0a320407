"""examples/train.py goes on where it was stopped, on any devices, in one process and in two.

A run that only has to end somewhere is made in this process, on some of its eight simulated devices;
what is stopped, or has a terminal, is a process of its own, as readers start it.
"""

import os
import pty
import re
import shutil
import signal
import termios

import jax
import lives
import numpy as np
import pytest

import strategies
import train

pytestmark = pytest.mark.usefixtures("compiled_once")  # programs alone

STEPS = 46
EVERY_STEP = ["--steps", STEPS, "--log-every", 1, "--save-every", 20]
ONE_MORE = ["--strategy", "fsdp-tensor", *EVERY_STEP]
LOSS = dict(rtol=2e-5, atol=0)  # another order of the same sums, over 46 steps; measured: 3e-6


def ran(capfd, folder, *arguments, devices=8, status=train.FINISHED):
    """What it says on stderr when it runs in this process, on the first of its devices."""
    capfd.readouterr()
    right, command = strategies.make_mesh, [*lives.SMALL, "--checkpoints", folder, *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            strategies, "make_mesh", lambda *settings: right(*settings[:3], settings[3][:devices])
        )
        got = train.main([str(part) for part in command])
    said = capfd.readouterr()
    assert got == status, f"exit {got}, not {status}:\n{said.err}"
    return said.err or said.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def never(folder):
    """A run that was never stopped."""
    lives.train(folder / "never", *ONE_MORE)
    return folder / "never"


def copied(run, to):
    shutil.copytree(run, to)
    shutil.copytree(f"{run}-logs", f"{to}-logs")
    return to


# ---- stopped, and started again ----------------------------------------------------------------


def test_it_learns(never):
    losses = lives.column(never, "loss")
    assert losses[0] > 5.5 and losses[-5:].mean() < losses[0] - 1.5
    tests = lives.column(never, "test_loss")
    assert len(tests) == 3 and tests[2] < tests[1] < tests[0]


@pytest.fixture(scope="module")
def stopped(folder):
    """A run that SIGTERM stopped, and how far it came."""
    run = folder / "stopped"
    process = lives.started(run, *ONE_MORE)
    lives.wait_until(lambda: lives.last_step(run) >= 23, process)
    process.send_signal(signal.SIGTERM)
    return run, lives.ended(process, status=train.STOPPED)


def test_sigterm_saves_the_step_that_was_reached(stopped):
    run, said = stopped
    reached = lives.last_step(run)
    assert train.STOPPED == 143 and 23 <= reached < STEPS
    assert lives.complete(run)[-1] == reached and not lives.torn(run)
    assert f"stopped by SIGTERM; step {reached} is saved" in said
    assert "in 1 process," in said and "1 processes" not in said


def test_the_same_mesh_goes_on_with_the_same_bits(stopped, folder, never):
    run, reached = copied(stopped[0], folder / "resumed"), lives.last_step(stopped[0])
    shutil.copytree(run / str(reached), run / f"{reached + 1}.orbax-checkpoint-tmp")  # torn, newer
    said = lives.train(run, *ONE_MORE)
    assert lives.first_step(said) == reached and not lives.torn(run)
    assert lives.same_bits(lives.arrays(run, STEPS), lives.arrays(never, STEPS)) == []
    assert lives.metrics(run) == lives.metrics(never)
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 1)]
    assert len(lives.complete(run)) == 3  # --keep


WRONG = {
    "new moments": lambda run, fresh, position: (run._replace(optimizer=fresh.optimizer), position),
    "data from the start": lambda run, fresh, position: (run, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_restart_is_noticed(stopped, tmp_path, never, monkeypatch, capfd, wrong):
    """What people forget to restore: the comparison above must not pass with it."""
    run, right = copied(stopped[0], tmp_path / "run"), train.begin

    def begin(plan, saver):
        old, places, step, position = right(plan, saver)
        old, position = WRONG[wrong](old, jax.jit(plan.make, out_shardings=places)(), position)
        return old, places, step, position

    monkeypatch.setattr(train, "begin", begin)
    ran(capfd, run, *ONE_MORE)
    losses, theirs = lives.column(run, "loss"), lives.column(never, "loss")
    assert np.abs(losses - theirs).max() > 1e-3


@pytest.mark.slow
def test_other_meshes_go_on_to_rounding(tmp_path, never, capfd):
    """Eight devices, then four, then one, each with another strategy and number of microbatches."""
    run, more = tmp_path / "elastic", EVERY_STEP[2:]
    ran(capfd, run, "--strategy", "hsdp", "--accumulate", 2, *more, "--steps", 15)
    said = ran(capfd, run, "--strategy", "zero1", *more, "--steps", 30, devices=4)
    assert lives.first_step(said) == 15 and "zero1 on 4 devices of cpu (data 4) in 1 proc" in said
    said = ran(capfd, run, "--strategy", "data-parallel", *EVERY_STEP, devices=1)
    assert lives.first_step(said) == 30 and "on 1 device of cpu in 1 process" in said
    np.testing.assert_allclose(lives.column(run, "loss"), lives.column(never, "loss"), **LOSS)
    held = lives.column(run, "bytes_per_device")
    assert len(set(held[:15])) == len(set(held[15:30])) == len(set(held[30:])) == 1
    assert held[0] < held[15] < held[30]


def test_a_finished_run_has_nothing_left_to_do_and_can_be_lengthened(tmp_path, never, capfd):
    run, before = copied(never, tmp_path / "longer"), lives.arrays(never, STEPS)
    said = ran(capfd, run, *ONE_MORE)
    assert f"nothing left to do: step {STEPS} is saved in {run}" in said
    said = ran(capfd, run, *ONE_MORE, "--steps", 10)
    assert f"step {STEPS} is saved in {run}, and 10 were asked for" in said
    assert "resuming after" not in said and "finished: step" not in said
    assert lives.same_bits(lives.arrays(run, STEPS), before) == []
    ran(capfd, run, *ONE_MORE, "--steps", STEPS + 2)
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, STEPS + 3)]


# ---- another schedule, other weights, no training ----------------------------------------------


@pytest.mark.parametrize("flag, there", [("--D 64", "--D 32"), ("--batch 32", "--batch 16"),
    ("--seed 5", "--seed 0"), ("--precision bfloat16", "--precision float32"),
    ("--learning-rate 0.1", "--learning-rate 0.006"), ("--S 8", "--S 16")])  # fmt: skip
def test_a_directory_of_another_run_is_refused(never, capfd, flag, there):
    before = sorted(never.rglob("*"))
    said = ran(capfd, never, *flag.split(), status=train.REFUSED)
    assert f"{never}/{STEPS} is of a run with {there} (now {flag.split()[1]})" in said
    assert ("add --new-schedule" in said) == ("rate" in flag)
    assert sorted(never.rglob("*")) == before


@pytest.mark.slow
def test_a_new_schedule_goes_on_when_told_so(tmp_path, never, capfd):
    run = copied(never, tmp_path / "run")
    new = ["--learning-rate", 0.5, "--warm-up", 0, "--decay-steps", 48, "--new-schedule"]
    said = ran(capfd, run, *ONE_MORE, "--steps", 48, *new)
    assert lives.first_step(said) == STEPS
    rates = lives.column(run, "learning_rate")
    assert rates[STEPS - 1] < 0.006 < rates[STEPS] and 0.05 < rates[-1] < 0.06
    said = ran(capfd, run, *ONE_MORE, "--steps", 49, status=train.REFUSED)
    assert "--learning-rate 0.5 (now 0.006)" in said, "the new one is noted"


@pytest.mark.slow
def test_it_begins_with_other_weights_and_tests_without_training(tmp_path, never, capfd):
    said = ran(capfd, never, "--eval-only")
    loss = lives.column(never, "test_loss")[-1]
    assert f"test loss {loss:.4f} over 16 rows of 16" in said
    begun = ["--init-from", never, "--learning-rate", 0, "--strategy", "hsdp", "--steps", 1]
    ran(capfd, tmp_path / "run", *begun)
    assert np.isclose(lives.column(tmp_path / "run", "test_loss")[0], loss, rtol=1e-5)
    ours, theirs = lives.arrays(tmp_path / "run", 1), lives.arrays(never, STEPS)
    weights = [name for name in ours if name.startswith("model.")]
    assert len(weights) == 12 and all(np.array_equal(ours[name], theirs[name]) for name in weights)
    moments = [name for name in ours if ".mu." in name]
    assert moments and not any(np.array_equal(ours[name], theirs[name]) for name in moments)
    before = sorted(tmp_path.rglob("*"))
    more = ["--init-from", never, "--D", 64]
    said = ran(capfd, tmp_path / "other", *more, status=train.REFUSED)
    assert f"{never}/{STEPS} has a model with D 32: give its sizes" in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_named_at_its_step_and_not_saved(tmp_path, capfd):
    more = ["--learning-rate", 1e30, "--warm-up", 0, "--clip", 0, "--steps", 20]
    said = ran(capfd, tmp_path / "nan", *more, status=train.FAILED)
    assert re.search(r"train.py: the (loss|gradient's norm) is (nan|inf) at step [23], which", said)
    assert "Traceback" not in said and lives.complete(tmp_path / "nan") == []


@pytest.mark.slow
def test_a_profile_and_a_sample_are_written(tmp_path, capfd):
    run = tmp_path / "run"
    said = ran(capfd, run, "--steps", 8, "--profile", 2, "--sample", 5)
    assert f"a trace is in {run}-logs/profile" in said
    traces = list((tmp_path / "run-logs" / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 10_000
    assert "it writes: The " in said


# ---- several processes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(folder):
    run = folder / "two"
    with lives.together(run, 2, *ONE_MORE, "--steps", 20, "--profile", 1, "--profile-process", 1,
                        "--watchdog", 100) as processes:  # fmt: skip
        return run, [lives.ended(process) for process in processes]


def test_two_processes_are_the_same_program(two, never):
    run, (first, second) = two
    assert "finished: step 20 is saved" in first and "finished" not in second
    assert "on 8 devices of cpu (fsdp 2 x model 4) in 2 processes" in first
    np.testing.assert_allclose(lives.column(run, "loss"), lives.column(never, "loss")[:20], **LOSS)
    assert [int(row["step"]) for row in lives.metrics(run)] == [*range(1, 21)]
    assert "a trace is in" in second and "a trace is in" not in first


@pytest.mark.newest
def test_a_machine_that_was_not_asked_for_is_refused(tmp_path, capfd):
    said = ran(capfd, tmp_path / "alone", "--devices", 4, status=train.REFUSED)
    assert "asked for 1 process with 4 devices together, found 1 with 8" in said
    said = lives.train(tmp_path / "alone", "--processes", 2, devices=4, status=train.REFUSED)
    assert "Nothing that JAX knows has started this program" in said and "Traceback" not in said
    assert not (tmp_path / "alone").exists()


@pytest.mark.slow
@pytest.mark.newest
def test_a_watchdog_ends_a_step_that_hangs_and_says_where(tmp_path):
    """Process 1 is stopped, not killed: it still has its connections, and answers nothing."""
    run = tmp_path / "hangs"
    more = ["--watchdog", 15, "--strategy", "fsdp", "--steps", 100_000, "--log-every", 1]
    with lives.together(run, 2, *more) as processes:
        assert lives.wait_until(lambda: lives.last_step(run) > 3, processes[0])
        processes[1].send_signal(signal.SIGSTOP)
        said = lives.ended(processes[0], 1, limit=60)
    assert "Timeout (0:00:15)!" in said and re.search(r"train\.py\", line \d+ in loop", said)


# ---- what is said ------------------------------------------------------------------------------


@pytest.mark.newest
def test_the_progress_bar_shows_loss_speed_and_bytes(tmp_path):
    """On a terminal, which a pseudo-terminal is; elsewhere there are lines of the log."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 140))
    process = lives.started(tmp_path / "bar", "--steps", 12, devices=2, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 10_000):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait(60) == 0
    bar = r"\| 10/12 \[.* loss \d\.\d+, norm \d\.\d+, [\d,]+ tokens/s, 0\.\d\d MB per device"
    assert re.search(bar, shown.decode()), shown


def test_a_checkpoint_of_another_program_is_refused(tmp_path, capfd):
    with train.ocp.training.Checkpointer(tmp_path / "theirs") as saver:
        saver.save(7, {"w": np.ones(4)})
    said = ran(capfd, tmp_path / "theirs", status=train.REFUSED)
    assert "theirs/7 was not written by this program" in said
