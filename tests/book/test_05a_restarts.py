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


# Two kills


def test_sigkill_ends_two_processes_and_nobody_kills_the_third(page):
    """SIGKILL is the signal that no program can catch."""
    assert [process.code for process in page.processes] == [-signal.SIGKILL] * 2 + [0]


def test_a_kill_in_the_middle_of_a_save_leaves_a_directory_with_a_temporary_name(page):
    """The step that was being written is not complete."""
    assert [process.unfinished for process in page.processes] == [[4], [10], []]


def test_each_process_starts_with_the_newest_complete_step(page):
    """With steps 2 and 8."""
    assert [process.first for process in page.processes] == [0, 2, 8]
    for before, after in zip(page.processes[:2], page.processes[1:], strict=True):
        assert after.first == before.complete[-1] < before.killed


def test_the_last_two_steps_stay_on_disk_and_every_fourth(page):
    """As the policy keeps them: step 2 was deleted before the second process was killed."""
    complete = [process.complete for process in page.processes]
    assert complete == [[2], [4, 6, 8], [4, 8, 10, 12]]


def test_the_next_process_deletes_the_unfinished_directory(page):
    """`cleanup_tmp_directories=True`."""
    assert not list((page.disk / "killed").glob("*tmp"))


def test_the_program_has_the_eight_devices_of_the_notebook(page):
    """It gets the notebook's environment."""
    (page.disk / "devices.py").write_text("import jax; print(jax.device_count())")
    process = page.launch(page.disk, file="devices.py")
    assert process.communicate()[0].strip() == "8" and process.returncode == 0


def test_compiled_programs_stay_on_disk_between_two_processes(page):
    """So a restart need not compile again: another process adds nothing to the cache."""
    before = {path.name for path in (page.disk / "compiled").glob("*-cache")}
    first, _ = page.run_and_kill(page.disk / "cached", kill=2)
    shutil.rmtree(page.disk / "cached")
    assert first == 0 and before
    assert {path.name for path in (page.disk / "compiled").glob("*-cache")} == before


def test_two_kills_change_no_bit(page):
    """Model and optimizer of step 12 are those of a run that was never killed."""
    assert bits(nnx.state(page.killed)) == bits(nnx.state(page.never_killed))
    assert len(page.losses) == 12 and len(page.equal) > 30 and all(page.equal)
    assert len(jax.tree.leaves(page.killed)) == len(jax.tree.leaves(page.never_killed))
    for _, optimizer in (page.killed, page.never_killed):
        assert optimizer.step[...] == 12


def test_a_renamed_unfinished_directory_counts_and_cannot_be_loaded(page):
    """Orbax takes what a kill left for complete, and the restart fails on it."""
    folder = page.disk / "renamed"
    page.run_and_kill(folder, kill=4)
    assert page.steps_on_disk(folder) == ([2], [4])
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
    """It ends by itself with code 0, long before its last step, and nothing is left unfinished."""
    assert page.warned.returncode == 0 and 1 <= page.stopped < 100
    complete, unfinished = page.steps_on_disk(page.disk / "warned")
    assert complete[-1] == page.stopped and not unfinished
    _, optimizer = page.restore(page.disk / "warned" / str(page.stopped), page.mesh)
    assert optimizer.step[...] == page.stopped


def large():
    """Takes long enough to write that the call returns before."""
    return {"w": jnp.asarray(np.random.default_rng(0).random((2048, 4096), "float32"))}


def test_the_end_of_the_with_block_waits_for_the_last_save(tmp_path):
    """The step is complete afterwards, and was not when the call returned."""
    with ocp.training.Checkpointer(tmp_path) as saver:
        saver.save_async(1, large())
        assert not (tmp_path / "1").exists()
    assert (tmp_path / "1").exists()


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
