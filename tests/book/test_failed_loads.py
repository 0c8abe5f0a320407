"""The page "When a load fails, or says nothing"."""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401


def test_after_a_full_disk_the_last_complete_checkpoint_is_there_unless_it_was_saved_over(tmp_path):
    """On a full disk the last complete checkpoint stays, unless overwrite=True saved over it."""
    numbers = {"w": jax.numpy.asarray(np.random.default_rng(0).random((256, 256), "float32"))}
    with ocp.training.Checkpointer(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, numbers, force=True)
    saver = ocp.training.Checkpointer(tmp_path)
    with nearly_full_disk(), pytest.raises(Exception, match="too large"):
        saver.save(3, numbers, force=True)
    with pytest.raises(Exception, match="too large"):
        saver.close()  # says it once more
    with ocp.training.Checkpointer(tmp_path) as saver:
        assert [checkpoint.step for checkpoint in saver.checkpoints] == [1, 2]
    with nearly_full_disk(), pytest.raises(Exception, match="too large"):
        ocp.save(tmp_path / "2", numbers, overwrite=True)
    with ocp.training.Checkpointer(tmp_path) as saver:
        assert [checkpoint.step for checkpoint in saver.checkpoints] == [1]
