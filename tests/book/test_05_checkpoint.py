"""Chapter 5, "A checkpoint belongs to no mesh"."""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from compared import bits
from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401
from pages import check_exercise, exercises_of

PAGE = "05-checkpoint"
P = jax.P
when = ocp.training.save_decision_policies


def random_numbers():
    """Too much for a nearly full disk, and hard to compress."""
    return {"w": jnp.asarray(np.random.default_rng(0).random((256, 256), "float32"))}


def three(page, mesh):
    """The run that was saved after three steps."""
    return page.restore(page.disk / "3", mesh)


# Save on eight devices, load on two


def test_the_target_decides_which_device_gets_which_part(page):
    """Two devices load what eight have saved, in halves of four rows."""
    w = page.loaded["w"]
    assert w.sharding == page.by_rows and len(page.w.sharding.device_set) == 8
    assert np.array_equal(w, np.arange(64).reshape(8, 8))
    assert [shard.data.shape for shard in w.addressable_shards] == [(4, 8)] * 2


def test_without_a_target_the_note_of_the_old_sharding_is_followed(page):
    """On the same eight devices this works; Orbax warns that it is unsafe."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert ocp.load(page.disk / "first")["w"].sharding == page.w.sharding
    messages = [str(one.message) for one in warned]
    assert any("unsafe when restoring on a different topology" in said for said in messages)


def test_without_a_target_a_process_with_four_devices_cannot_load(page):
    """Devices 4 to 7 of the note do not exist there, so the sharding is None."""
    script = "import sys; from orbax.checkpoint import v1 as ocp; ocp.load(sys.argv[1])"
    failed = subprocess.run(
        [sys.executable, "-c", script, page.disk / "first"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert failed.returncode == 1
    assert "The available devices are different" in failed.stderr
    assert "ValueError: sharding passed to deserialization should be specified" in failed.stderr
    assert "Got None" in failed.stderr


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


# What to save


def test_the_target_has_the_shardings_of_the_annotations_and_no_numbers(page):
    """`nnx.get_abstract_model` allocates nothing."""
    leaves = jax.tree.leaves(page.after("target").target)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    wanted = jax.NamedSharding(page.mesh, P("data", "model"))
    assert page.w_DF.sharding == wanted
    made = jax.tree.leaves(nnx.state(three(page, page.mesh)))
    for asked, array in zip(leaves, made, strict=True):
        assert array.sharding == asked.sharding


# Bit for bit


def test_on_the_same_mesh_with_the_same_program_training_continues_bit_for_bit(page):
    """With mesh, compiler and order of additions the same, losses and state are equal in all bits."""
    assert page.losses == page.losses_again and len(set(page.losses)) == 3
    assert bits(nnx.state(page.run)) == bits(nnx.state(page.restored))
    assert bits(nnx.state(page.restored)) != bits(nnx.state(three(page, page.mesh)))


def test_the_count_of_the_optimizer_is_the_step(page):
    """After three more steps the optimizer has counted to six; new, it is at 0."""
    _, saved = three(page, page.mesh)
    assert saved.step[...] == 3
    _, new = page.new_run(page.mesh)
    assert new.step[...] == 0
    assert page.run[1].step[...] == page.restored[1].step[...] == 6


def test_the_position_in_the_data_is_the_step(page):
    """The number of a step alone decides its batch, on each mesh."""
    ours, other = page.batch_at(3, page.mesh), page.batch_at(3, page.mesh_of(1, 2))
    assert all(map(np.array_equal, ours, other))
    assert not np.array_equal(ours[0], page.batch_at(4, page.mesh)[0])


def test_the_step_donates_the_run(page):
    """The old run is donated."""
    donated = three(page, page.mesh)  # not the page's: a save may keep its arrays
    page.train(donated, page.mesh, 3, 4)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))


def test_a_new_optimizer_shows_in_the_second_loss(page):
    """The first loss is right to the last bit; those of steps 4 and 5 are wrong, not by rounding."""
    wrong = [3 + i for i in range(3) if page.losses_new[i] != page.losses[i]]
    assert page.losses_new[0] == page.losses[0] and wrong == [4, 5]
    assert min(abs(np.subtract(page.losses_new, page.losses))[1:]) > 1e-3


def test_keys_and_counters_are_in_the_model(page, tmp_path):
    """A layer with dropout that is loaded draws what it would have drawn; a new one repeats."""
    ones = jnp.ones((8, 64))
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    first = layer(ones)
    ocp.save(tmp_path / "dropout", nnx.state(layer))
    second = layer(ones)
    new = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graphdef, target = nnx.split(new)
    loaded = nnx.merge(graphdef, ocp.load(tmp_path / "dropout", target))
    assert np.array_equal(loaded(ones), second) and not np.array_equal(first, second)
    assert np.array_equal(new(ones), first)


# Another mesh


def test_what_was_saved_comes_back_bit_for_bit_on_any_mesh(page):
    """Weights, moments, keys and counters are equal bit for bit on each mesh."""
    saved = bits(nnx.state(three(page, page.mesh)))
    for data, model in [(4, 2), (8, 1), (2, 2), (1, 2), (1, 1)]:
        mesh = page.mesh_of(data, model)
        loaded = nnx.state(three(page, mesh))
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(loaded)} == {mesh}
        assert bits(loaded) == saved


def test_with_another_order_of_additions_it_continues_to_rounding(page):
    """On other meshes the losses after a load are equal to six digits; not on all to the bit."""
    apart = []
    for data, model in [(4, 2), (1, 2), (1, 1)]:
        mesh = page.mesh_of(data, model)
        run, losses = page.train(three(page, mesh), mesh, 3, 6)
        np.testing.assert_allclose(losses, page.losses, rtol=1e-6)
        assert run[1].step[...] == 6
        apart += list(abs(np.subtract(losses, page.losses)))
    assert max(apart) > 0


def test_a_mesh_that_does_not_divide_a_dimension_raises_an_error(page):
    """The sizes of the axes have to divide the arrays' dimensions."""
    with pytest.raises(Exception, match="divi"):
        three(page, page.mesh_of(5, 1))


# Save while you train


def test_a_save_in_the_background_keeps_the_values_although_they_are_donated_at_once(page):
    """What reaches the disk are the values at the time of the call."""
    state = nnx.state(three(page, page.mesh))
    was = bits(nnx.state(three(page, page.mesh)))
    weights = bits(nnx.state(three(page, page.mesh))[0])
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)
    late = ocp.save_async(page.disk / "late", state)
    assert not (page.disk / "late").exists()  # it has returned, and is not finished
    negated = overwrite(state[0])
    assert late.result() is None
    assert bits(ocp.load(page.disk / "late", page.after("target").target)) == was
    again = overwrite(negated)  # it does donate; what is still being copied is kept as well
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(negated))
    assert bits(again) == weights != bits(overwrite(again))
    shutil.rmtree(page.disk / "late")


def test_the_error_of_a_save_that_nobody_asks_for_is_only_in_the_log(tmp_path, caplog):
    """`ocp.save_async` raises nothing; `result()` raises the error."""
    logging.disable(logging.NOTSET)
    with nearly_full_disk():
        response = ocp.save_async(tmp_path / "dropped", random_numbers())  # no error
        limit = time.monotonic() + 60
        while "raised an exception" not in caplog.text:
            assert time.monotonic() < limit, "it is not in the log"
            time.sleep(0.01)
    with pytest.raises(ValueError, match="too large"):
        response.result()
    assert not (tmp_path / "dropped").exists()


def test_which_steps_are_saved_and_which_are_kept(page):
    """Every second step is saved, and the last two stay."""
    folder = page.disk / "series"
    with page.open_series(folder) as saver:
        saved = [number for number in range(12) if saver.save(number, {"w": page.w})]
        kept = [checkpoint.step for checkpoint in saver.checkpoints]
    shutil.rmtree(folder)
    assert saved == [0, 2, 4, 6, 8, 10] and kept == [8, 10]


def test_force_saves_a_step_between_the_intervals(page):
    """Pass `force=True` for a step that must be on disk."""
    with page.open_series(page.disk / "forced") as saver:
        assert not saver.save(11, {"w": page.w}) and saver.save(11, {"w": page.w}, force=True)
    shutil.rmtree(page.disk / "forced")


def test_without_policies_each_save_that_meets_no_other_is_made_and_kept(page, tmp_path):
    """The default skips a step while another is being saved, and deletes nothing."""
    with ocp.training.Checkpointer(tmp_path / "each") as saver:
        saved = [number for number in range(5) if saver.save(number, {"w": page.w})]
        kept = [checkpoint.step for checkpoint in saver.checkpoints]
    assert saved == kept == [0, 1, 2, 3, 4]
    with ocp.training.Checkpointer(tmp_path / "busy") as saver:
        response = saver.save_async(0, {"w": jnp.ones((4096, 4096))})
        assert saver.save_async(1, {"w": page.w}) is None  # step 0 is still being written
        response.result()
        assert saver.save_async(2, {"w": page.w}).result()


def test_what_a_kill_left_unfinished_is_deleted(page):
    """`cleanup_tmp_directories=True` deletes directories with a temporary name."""
    folder = page.disk / "unfinished"
    with page.open_series(folder) as saver:
        saver.save(2, {"w": page.w})
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    with page.open_series(folder) as saver:
        assert saver.latest.step == 2
        saver.save(4, {"w": page.w})  # waits for the deletion, which is in the background
    names = {path.name for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert names == {"2", "4"}


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
    assert not (tmp_path / "10").exists()  # a step gets its name only when it is complete


def test_the_call_that_raises_saves_nothing_and_the_one_after_it_does(tmp_path):
    """The error of a failed save is raised instead of saving."""
    saver = series_with_a_failed_save(tmp_path)
    with pytest.raises(ValueError, match="too large"):
        saver.save_async(20, random_numbers())
    saver.save_async(30, random_numbers())
    saver.close()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["30"]


def test_the_response_tells_of_a_failed_save_at_once(tmp_path):
    """To know earlier, call `result()` on the response."""
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


# The loop that resumes


def test_the_loop_continues_from_its_newest_checkpoint_on_another_mesh(page):
    """Started again, it takes only the six steps that are missing, with the losses of a run that was
    never stopped."""
    assert len(page.resumed_losses) == 6 and len(page.all_losses) == 12
    np.testing.assert_allclose(page.resumed_losses, page.all_losses[6:], rtol=1e-5)
    resumed, losses = page.train_until(12, page.disk / "resumed", page.mesh_of(1, 2))  # at its end
    assert losses == [] and resumed[1].step[...] == 12
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(resumed)} == {page.mesh_of(1, 2)}


def test_on_the_same_mesh_the_loop_ends_bit_for_bit_as_one_never_stopped(page):
    """Also if it stopped at a step that only `force` saved."""
    folder = page.disk / "stopped"
    page.train_until(5, folder, page.mesh)
    resumed, losses = page.train_until(12, folder, page.mesh)
    shutil.rmtree(folder)
    assert losses == page.all_losses[5:]
    never_stopped = page.restore(page.disk / "never-stopped" / "12", page.mesh)
    assert bits(nnx.state(resumed)) == bits(nnx.state(never_stopped))


def test_the_name_of_a_checkpoint_is_the_number_of_steps_taken(page):
    """The counters in each checkpoint of the loop have its number."""
    with page.open_series(page.disk / "resumed") as saver:
        steps = [checkpoint.step for checkpoint in saver.checkpoints]
    assert steps == [10, 12]
    for step in steps:
        _, optimizer = page.restore(page.disk / "resumed" / str(step), page.mesh)
        assert optimizer.step[...] == step


def test_custom_metadata_can_be_saved_with_each_step(page):
    """`saver.metadata(step).custom_metadata` reads what `save_async` was given."""
    folder = page.disk / "noted"
    with page.open_series(folder) as saver:
        saver.save_async(2, {"w": page.w}, custom_metadata={"width": 96})
    with page.open_series(folder) as saver:
        noted = saver.metadata(saver.latest.step).custom_metadata
    shutil.rmtree(folder)
    assert noted == {"width": 96}


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
