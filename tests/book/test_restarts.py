"""The page "Kill a training, and start it again"."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from full_disk import quiet_orbax  # noqa: F401

when = ocp.training.save_decision_policies


@pytest.fixture
def warned(monkeypatch):
    """As if SIGTERM had come, where jax.distributed runs."""
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)


def large():
    """Takes long enough to write that a call comes meanwhile."""
    return {"w": jnp.asarray(np.random.default_rng(0).random((2048, 4096), "float32"))}


# The policies


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


# A torn directory


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


def test_a_torn_directory_does_not_count(killed_at_once_and_late):
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
