"""The page "Kill a training run, and restart it"."""

import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from compared import bits
from full_disk import quiet_orbax  # noqa: F401
from many_devices.checkpoints import open_series

PAGE = "05a-restarts"
when = ocp.training.save_decision_policies


# Three kills


def test_sigkill_ends_three_processes_and_nobody_kills_the_fourth(page):
    """SIGKILL is the signal that no program can catch."""
    assert [process.code for process in page.four] == [-signal.SIGKILL] * 3 + [0]


def test_a_kill_in_the_middle_of_a_save_leaves_a_directory_with_a_temporary_name(page):
    """The step that was being written is not complete."""
    assert [process.unfinished for process in page.four] == [[4], [4], [10], []]


def test_each_process_starts_with_the_newest_complete_step(page):
    """With steps 2, 2 and 8."""
    assert [process.first for process in page.four] == [0, 2, 2, 8]
    for before, after in zip(page.four[:3], page.four[1:], strict=True):
        assert after.first == before.complete[-1] < before.killed


def test_the_last_two_steps_stay_on_disk_and_every_fourth(page):
    """As the policy keeps them: step 2 was deleted before the third process was killed."""
    complete = [process.complete for process in page.four]
    assert complete == [[2], [2], [4, 6, 8], [4, 8, 10, 12]]


def test_the_next_process_deletes_the_unfinished_directory(page):
    """`cleanup_tmp_directories=True`."""
    assert not list((page.disk / "killed").glob("*tmp"))


def test_compiled_programs_stay_on_disk_between_two_processes(page):
    """So a restart need not compile again: another process adds nothing to the cache."""
    before = {path.name for path in (page.disk / "compiled").glob("*-cache")}
    process = page.run_and_kill(page.disk / "cached", kill=2)
    shutil.rmtree(page.disk / "cached")
    assert process.killed == 2 and before
    assert {path.name for path in (page.disk / "compiled").glob("*-cache")} == before


def test_three_kills_change_no_bit(page):
    """Model, optimizer and keys of step 12 are those of a run that was never killed."""
    assert bits(nnx.state(page.killed)) == bits(nnx.state(page.never_killed))
    assert len(page.losses) == 12 and page.equal and all(page.equal)
    for run in (page.killed, page.never_killed):
        assert run.optimizer.step[...] == run.rngs.default.count[...] == 12


def test_a_renamed_unfinished_directory_counts_and_cannot_be_loaded(page):
    """Orbax takes what a kill left for complete, and the restart fails on it."""
    folder = page.disk / "renamed"
    assert page.run_and_kill(folder, kill=4).unfinished == [4]
    (folder / "4.orbax-checkpoint-tmp").rename(folder / "4")
    with ocp.training.Checkpointer(folder) as saver:
        assert saver.latest.step == 4
    with pytest.raises(Exception) as raised:
        page.train_until(12, folder, page.mesh)
    shutil.rmtree(folder)
    assert type(raised.value).__name__ in ("KeyError", "InvalidLayoutError")


@pytest.fixture
def killed_at_once_and_late(tmp_path):
    """Two series whose newest step has a temporary name: one lacks its arrays, one only the rename."""
    like = {"w": jax.ShapeDtypeStruct((4,), "float32", sharding=jnp.zeros(4).sharding)}
    for name in ("at once", "late"):
        with ocp.training.Checkpointer(tmp_path / name) as saver:
            for step in (2, 4):
                saver.save(step, {"w": jnp.full(4, float(step))}, force=True)
        (tmp_path / name / "4").rename(tmp_path / name / "4.orbax-checkpoint-tmp")
    shutil.rmtree(tmp_path / "at once" / "4.orbax-checkpoint-tmp" / "state")
    return tmp_path / "at once", tmp_path / "late", like


def test_an_unfinished_directory_does_not_count(killed_at_once_and_late):
    """Under its temporary name a directory is not the newest step, whatever is in it."""
    *folders, _ = killed_at_once_and_late
    for folder in folders:
        with ocp.training.Checkpointer(folder) as saver:
            assert saver.latest.step == 2


def test_renamed_it_counts_as_complete_whether_or_not_everything_is_in_it(killed_at_once_and_late):
    """Orbax takes a renamed directory for complete; with parts missing its load fails."""
    at_once, late, like = killed_at_once_and_late
    for folder in (at_once, late):
        (folder / "4.orbax-checkpoint-tmp").rename(folder / "4")
        with ocp.training.Checkpointer(folder) as saver:
            assert saver.latest.step == 4
    with ocp.training.Checkpointer(late) as saver:
        assert np.array_equal(saver.load(abstract_state=like)["w"], np.full(4, 4.0))
    with (
        ocp.training.Checkpointer(at_once) as saver,
        pytest.raises(Exception, match="state|layout"),
    ):
        saver.load(abstract_state=like)


# Preemption


def test_a_program_that_catches_sigterm_saves_the_step_that_it_has_reached(page):
    """It ends by itself, long before its last step, and nothing unfinished is left."""
    assert page.warned.returncode == 0 and 1 <= page.stopped < 100
    steps = [int(name) for name in page.on_disk]  # a temporary name is not a number
    assert max(steps) == page.stopped
    run = page.restore(page.disk / "warned" / str(page.stopped), page.mesh)
    assert run.optimizer.step[...] == page.stopped


@pytest.fixture
def warned(monkeypatch):
    """As if SIGTERM had come, where jax.distributed runs."""
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)


def test_at_preemption_a_step_between_the_intervals_is_saved(tmp_path, warned):
    """One yes is enough: at preemption a policy of `open_series` says yes to step 3."""
    with open_series(tmp_path) as saver:
        assert saver.should_save(3)


def test_without_jax_distributed_the_preemption_policy_never_says_yes(tmp_path):
    """Without `jax.distributed`, as here, the program must catch the signal itself."""
    with open_series(tmp_path) as saver:
        assert [step for step in range(1, 8) if saver.should_save(step)] == [2, 4, 6]


def large():
    """Takes long enough to write that a call comes meanwhile."""
    return {"w": jnp.asarray(np.random.default_rng(0).random((2048, 4096), "float32"))}


def test_by_default_the_first_step_is_saved_then_one_whenever_no_save_is_running(tmp_path):
    """By default a Checkpointer saves the first step, then whenever no save is running."""
    with ocp.training.Checkpointer(tmp_path) as saver:
        response = saver.save_async(0, large())  # the first step
        assert not saver.should_save(1)  # it is still being written
        response.result()
        assert saver.should_save(2)


def test_by_default_it_saves_at_preemption_even_while_a_save_is_running(tmp_path, monkeypatch):
    """By default a Checkpointer saves at preemption."""
    with ocp.training.Checkpointer(tmp_path) as saver:
        response = saver.save_async(0, large())
        before = saver.should_save(1)
        monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
        assert (before, saver.should_save(1)) == (False, True)
        response.result()


def test_a_policy_that_you_pass_replaces_all_three(tmp_path, warned):
    """With an interval of two alone, neither the first step, nor an idle disk, nor a warning saves."""
    alone = when.FixedIntervalPolicy(2)
    with ocp.training.Checkpointer(tmp_path / "alone", save_decision_policy=alone) as saver:
        assert [step for step in range(1, 8) if saver.should_save(step)] == [2, 4, 6]
    with ocp.training.Checkpointer(tmp_path / "default") as saver:
        assert [step for step in range(1, 8) if saver.should_save(step)] == [*range(1, 8)]
