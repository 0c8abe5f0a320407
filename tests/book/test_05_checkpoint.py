"""Chapter 5, "A checkpoint belongs to no mesh"."""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401

PAGE = "05-checkpoint"
P = jax.P
when = ocp.training.save_decision_policies


def random_numbers():
    """Too much for a nearly full disk, and hard to compress."""
    return {"w": jax.numpy.asarray(np.random.default_rng(0).random((256, 256), "float32"))}


def bits(tree):
    def of(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


# Save while you train


def series_with_a_failed_save(folder):
    """A Checkpointer that saves each tenth step, and whose save of step 10 has failed."""
    saver = ocp.training.Checkpointer(folder, save_decision_policy=when.FixedIntervalPolicy(10))
    with nearly_full_disk():
        response = saver.save_async(10, random_numbers())
        with pytest.raises(ValueError, match="too large"):
            response.result()  # now it has failed, and the loop does not know
    return saver


def test_a_failed_save_is_raised_by_the_next_call_that_saves(tmp_path):
    """A call for a step that the policy skips neither waits nor raises; the next that saves does."""
    saver = series_with_a_failed_save(tmp_path)
    skipped = [saver.save_async(step, random_numbers()) for step in range(11, 20)]
    assert skipped == [None] * 9  # without an error
    with pytest.raises(ValueError, match="too large"):
        saver.save_async(20, random_numbers())
    saver.close()
    assert not (tmp_path / "10").exists()


def test_the_call_that_raises_saves_nothing_and_the_one_after_it_does(tmp_path):
    """The error of a failed save is raised instead of saving."""
    saver = series_with_a_failed_save(tmp_path)
    with pytest.raises(ValueError, match="too large"):
        saver.save_async(20, random_numbers())
    saver.save_async(30, random_numbers())
    saver.close()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["30"]


def test_the_response_tells_of_a_failed_save_at_once(tmp_path):
    """To know earlier, ask the response with result()."""
    saver = ocp.training.Checkpointer(tmp_path, save_decision_policy=when.FixedIntervalPolicy(10))
    with nearly_full_disk():
        response = saver.save_async(10, random_numbers())
        with pytest.raises(ValueError, match="too large"):
            response.result()


def test_the_end_of_the_with_block_raises_the_error_of_the_last_save(tmp_path):
    """The end of the `with` block raises the error of the last save."""
    with pytest.raises(ValueError, match="too large"):
        with nearly_full_disk(), ocp.training.Checkpointer(tmp_path) as saver:
            saver.save_async(1, random_numbers())


# Targets


def saved_elsewhere(folder):
    """A checkpoint whose note names devices 100 to 107, which are not here."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(np.arange(64.0, dtype="float32"), jax.NamedSharding(mesh, P("data")))
    ocp.save(folder / "w", {"w": w})
    note = folder / "w" / "state" / "_sharding"
    text, count = re.subn(r'(\\"id\\": )(\d)', r"\g<1>10\2", note.read_text())
    assert count >= 8
    note.write_text(text)
    return folder / "w", w


def test_a_target_without_shardings_is_as_bad_as_none(tmp_path):
    """Without its old devices a checkpoint loads neither without a target nor with one that has no
    shardings; with shardings it loads."""
    path, w = saved_elsewhere(tmp_path)
    bare = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype)}
    for target in (None, bare):
        with pytest.raises(ValueError, match="sharding passed to deserialization"):
            ocp.load(path, target)
    right = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)}
    assert np.array_equal(ocp.load(path, right)["w"], w)


# Bit for bit


def test_what_was_saved_comes_back_bit_for_bit_on_any_mesh(page):
    """Weights, moments, keys and counters are equal bit for bit on each mesh."""
    saved = bits(nnx.state(page.restore(page.disk / "three", page.mesh)))
    for data, model in [(4, 2), (2, 2), (1, 1)]:
        mesh = page.mesh_of(data, model)
        loaded = nnx.state(page.restore(page.disk / "three", mesh))
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(loaded)} == {mesh}
        assert bits(loaded) == saved


def test_on_the_same_mesh_with_the_same_program_training_continues_bit_for_bit(page):
    """With mesh, compiler and order of additions the same, losses and state are equal in all bits."""
    assert page.losses == page.losses_again
    assert bits(nnx.state(page.went_on)) == bits(nnx.state(page.came_back))


def test_with_another_order_of_additions_it_continues_to_rounding(page):
    """On another mesh the losses after a load are equal to rounding."""
    other = page.mesh_of(1, 1)
    _, losses = page.advance(page.restore(page.disk / "three", other), other, 3, 6)
    np.testing.assert_allclose(losses, page.losses, rtol=1e-5)


# In practice


class PathOf:
    """A path of which only the text is asked for; real ones need packages for cloud storage."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text

    __fspath__ = as_posix = __str__


def test_on_google_storage_orbax_marks_a_checkpoint_and_renames_nothing():
    """By default Orbax renames on no gs:// path; on a local disk and on s3:// it does."""
    from orbax.checkpoint._src.path import atomicity, atomicity_defaults

    ways = {
        path.split("/")[0]: atomicity_defaults.get_default_temporary_path_class(PathOf(path))
        for path in ("gs://bucket/run/10", "s3://bucket/run/10", "/disk/run/10")
    }
    assert ways.pop("gs:") is atomicity.CommitFileTemporaryPath
    assert set(ways.values()) == {atomicity.AtomicRenameTemporaryPath}
