"""Messages about checkpoints: the program raises what its heading quotes, and the fix is right."""

import contextlib
import logging
import os
import shutil
import time
import uuid
import warnings

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as older
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from full_disk import nearly_full_disk
from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-checkpoints"
P = jax.P

ENTRIES = quoted_in_headings(PAGE)
ELSEWHERE = {  # pieces that another test raises
    "no-target": ["cannot reshape array of size", "into shape"],  # of older releases
    "async": ["_SignalingThread.run() raised an exception:"],  # in the log
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()
    logging.disable(logging.NOTSET)  # the page turned it off


def saved():
    """The numbers that the page saved."""
    return np.arange(64).reshape(8, 8)


def new(page):
    """A path on the page's disk that nothing has yet."""
    return page.disk / uuid.uuid4().hex


def load(page, name="run", like=None):
    """The array in a checkpoint of the page, loaded by rows unless another target is given."""
    return ocp.load(page.disk / name, {"w": page.like_w if like is None else like})["w"]


@pytest.mark.parametrize("slug", ENTRIES)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    elsewhere = ELSEWHERE.get(slug, [])
    here = [piece for piece in ENTRIES[slug] if piece not in elsewhere]
    assert here or slug == "async"
    assert_raised(page, slug, here, elsewhere=elsewhere)


def test_all_messages_have_an_entry():
    """No heading of the page is left out above."""
    assert len(ENTRIES) == 14


# What the target asks for


@pytest.mark.parametrize("names", [["kernel"], ["w", "b"]], ids=["other", "more"])
def test_other_names_than_on_disk_raise(page, names):
    """Other names and more names raise, and MISSING stands at the disk's side."""
    target = {name: page.like_w for name in names}
    raised = said(ocp.load, page.disk / "run", target)
    assert "User-provided restore item and on-disk value metadata tree" in raised
    assert "tree structures do not match" in raised and "Target: MISSING" in raised


def test_fewer_names_raise_unless_partial_load_is_on(page):
    """Of two arrays one can be loaded with partial_load alone."""
    path = new(page)
    ocp.save(path, {"w": page.w, "b": page.w})
    assert "do not match" in said(ocp.load, path, {"w": page.like_w})
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        assert list(ocp.load(path, {"w": page.like_w})) == ["w"]


def test_a_dict_in_place_of_a_state_raises_the_same(page):
    """What was saved as an nnx.State does not load onto a dict of arrays."""
    raised = said(ocp.load, page.disk / "model", {"kernel": page.like_w})
    assert "tree structures do not match" in raised


def test_an_optimizer_of_another_kind_raises_the_same(page):
    """Adam's moments do not load onto a target for momentum, where mu is missing."""
    path, model = new(page), page.make()
    ocp.save(path, nnx.state(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))
    momentum = nnx.state(nnx.Optimizer(model, optax.sgd(1e-3, 0.9), wrt=nnx.Param))
    raised = said(ocp.load, path, momentum)
    assert "tree structures do not match" in raised
    assert "opt_state.0.mu: - Source: MISSING" in raised


def test_with_the_stored_names_it_loads(page):
    """The numbers come back, sharded as the target says."""
    np.testing.assert_array_equal(page.kernel, saved())
    assert page.kernel.sharding == page.by_rows


def test_without_a_target_four_devices_cannot_load_what_eight_saved(page):
    """The new process ends with the message."""
    assert page.failed.returncode == 1
    assert "sharding passed to deserialization should be specified" in page.failed.stderr


def test_older_words_are_those_of_a_reshaped_list_of_devices():
    """NumPy says them of two devices that should be 64."""
    raised = said(np.reshape, np.array(jax.devices()[:2]), (1, 64))
    assert "cannot reshape array of size 2 into shape (1,64)" in raised
    assert all(piece in raised for piece in ELSEWHERE["no-target"])


def test_with_a_target_four_devices_load_it(page):
    """The numbers come back on devices 0 to 3, with two columns on each."""
    np.testing.assert_array_equal(page.on_four, saved())
    assert {device.id for device in page.on_four.devices()} == {0, 1, 2, 3}
    assert page.on_four.addressable_shards[0].data.shape == (8, 8 // 4)


@pytest.mark.parametrize("rows", [4, 16])
def test_other_sizes_than_on_disk_raise(page, rows):
    """Fewer and more rows raise."""
    like = jax.ShapeDtypeStruct((rows, 8), "float32", sharding=page.by_rows)
    raised = said(load, page, "run", like)
    assert f"Requested shape: {like.shape} is not compatible with the stored shape:" in raised


def test_with_padding_and_truncation_rows_vanish_or_zeros_appear_without_an_error(page):
    """Four of eight rows are loaded, and of sixteen the last eight are zeros."""
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    larger = jax.ShapeDtypeStruct((16, 8), "float32", sharding=page.by_rows)
    with context:
        cut = load(page, like=page.smaller)
        padded = load(page, like=larger)
    np.testing.assert_array_equal(cut, saved()[:4])
    assert padded.shape == (16, 8) and not np.any(padded[8:])


def test_loaded_with_the_old_sizes_the_first_rows_are_the_first_rows(page):
    """They are 0 to 31."""
    np.testing.assert_array_equal(page.first_rows, saved()[:4])


def test_a_merged_target_has_no_numbers(page):
    """Called it raises; as an argument of jax.jit it is not a valid type; it has the same shape."""
    x = jnp.ones((2, 8))
    assert "'ShapeDtypeStruct' object is not subscriptable" in said(page.hollow, x)
    jitted = jax.jit(lambda model, x: model(x))
    assert "is not a valid JAX type" in said(jitted, page.hollow, x)
    assert page.hollow.kernel.shape == page.make().kernel.shape


def test_what_load_returned_is_the_model(page):
    """Merged, it has the saved kernel."""
    np.testing.assert_array_equal(page.model.kernel, page.make().kernel)


def test_an_abstract_mesh_has_no_devices(page):
    """A target by eval_shape on an Explicit mesh raises outside set_mesh."""
    raised = said(ocp.load, page.disk / "run", page.types)
    assert "Resource axis: data of P('data', 'model') is not found in mesh: ()" in raised


def test_inside_set_mesh_the_array_comes_back_typed(page):
    """All numbers come back, and the type names both axes; so they do with a mesh in the target."""
    spec = page.types["w"].sharding.spec
    target = page.types["w"].update(sharding=jax.NamedSharding(page.explicit_mesh, spec))
    for typed in (page.typed_w, load(page, like=target)):
        assert str(jax.typeof(typed)) == "float32[8@data,8@model]"
        np.testing.assert_array_equal(typed, saved())


def warned(page, like):
    with warnings.catch_warnings(record=True, action="always") as caught:
        load(page, like=like)
    return [str(one.message) for one in caught if "Sharding info" in str(one.message)]


def test_a_target_without_a_sharding_warns_and_follows_the_checkpoint(page):
    """It is sharded as it was saved, and the warning says that this is unsafe elsewhere."""
    (words,) = warned(page, page.without_sharding["w"])
    assert "Sharding info not provided when restoring." in words
    assert "Populating sharding info from sharding file" in words
    assert "unsafe when restoring on a different topology" in words
    assert page.as_saved.sharding == page.w.sharding


def test_a_target_with_a_sharding_does_not_warn(page):
    """It is sharded as the target says."""
    assert warned(page, page.like_w) == []
    assert page.moved.sharding == page.by_rows


def test_get_abstract_model_has_shardings_and_eval_shape_has_none(page):
    """In Auto mode, of the same model."""

    def make():
        annotation = {"out_sharding": ("data", "model")}
        return nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_metadata=annotation))

    with jax.set_mesh(page.mesh):
        types = jax.eval_shape(make)
    assert types["kernel"].get_value().sharding is None
    assert isinstance(page.abstract["kernel"].sharding, jax.NamedSharding)


# Paths, and what is complete


def test_a_checkpoint_is_not_overwritten(page):
    """Saved once more it raises, and the first one stays."""
    raised = said(ocp.save, page.disk / "run", {"w": 2 * page.w})
    assert raised.startswith("ValueError: Destination") and "already exists" in raised
    np.testing.assert_array_equal(load(page), saved())


def test_a_checkpointer_writes_each_step_under_a_name_of_its_own(page):
    """There are steps 3 and 4; step 4 once more raises."""
    steps = shutil.copytree(page.disk / "steps", new(page))
    with ocp.training.Checkpointer(steps) as saver:
        again = said(lambda: saver.save(4, {"w": page.w}, force=True))
        assert [each.step for each in saver.checkpoints] == [3, 4]
    assert again.startswith("StepAlreadyExistsError: Step 4 already exists")


@pytest.fixture
def in_new_folder(tmp_path, monkeypatch):
    """A current folder that nothing has written to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_relative_path_raises_late_when_saving(page, in_new_folder):
    """A directory with a temporary name stays behind."""
    assert "Checkpoint path should be absolute" in said(ocp.save, "other", {"w": page.w})
    left = [path.name for path in in_new_folder.iterdir()]
    assert left and all("orbax-checkpoint-tmp" in name for name in left)


def test_a_relative_path_raises_when_loading(page, monkeypatch):
    """In the page's folder, where `mine` is, a load raises too."""
    monkeypatch.chdir(page.disk)
    assert "Checkpoint path should be absolute" in said(ocp.load, "mine", {"w": page.like_w})


def test_a_path_that_begins_with_two_dots_raises_one_of_two_messages(page, in_new_folder):
    """Two threads check it, and either may be first."""
    upwards = os.path.join("..", in_new_folder.name, "other")
    raised = said(ocp.save, upwards, {"w": page.w})
    assert "Invalid file path" in raised or "should be absolute" in raised
    assert not (in_new_folder / "other").exists()


def test_the_absolute_path_is_saved(page):
    """What was saved as `mine` loads from the page's folder."""
    np.testing.assert_array_equal(load(page, "mine"), saved())


def test_the_error_of_a_save_in_the_background_is_in_the_log_and_in_the_response(
    page, in_new_folder
):
    """The log has the heading's words, result() raises the cause, and nothing was saved."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    log, handler = logging.getLogger(), Lines()
    usual, log.handlers = log.handlers, [handler]
    logging.disable(logging.NOTSET)
    try:
        forgotten = ocp.save_async("forgotten", {"w": page.w})
        until = time.monotonic() + 30
        while "raised an exception" not in "".join(lines) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        logging.disable()
        log.handlers = usual
    assert ELSEWHERE["async"][0] in "".join(lines)
    assert "should be absolute" in said(forgotten.result)
    assert not (in_new_folder / "forgotten").exists()
    assert not (page.disk / "never").exists()


def random_numbers():
    """More than the nearly full disk takes, however they are packed."""
    return {"w": np.random.default_rng(0).normal(size=(64, 64))}


def test_a_checkpointer_asks_when_it_next_saves_a_step(page):
    """The error of a save in the background is raised by the next call that saves, and not by one
    that its policy skips."""
    every_second = ocp.training.save_decision_policies.FixedIntervalPolicy(2)
    saver = ocp.training.Checkpointer(new(page), save_decision_policy=every_second)
    with nearly_full_disk():
        saver.save_async(0, random_numbers())  # no error
        assert saver.save_async(1, random_numbers()) is None  # skipped
        assert "too large" in said(saver.save_async, 2, random_numbers())
    with contextlib.suppress(Exception):
        saver.close()


def test_a_checkpointer_asks_at_the_end_of_its_block(page):
    """With no other save, the end of the block raises the error."""
    ended = []

    def save_once():
        with ocp.training.Checkpointer(new(page)) as saver:
            saver.save_async(0, random_numbers())
            ended.append("all of the block ran")

    with nearly_full_disk():
        assert "too large" in said(save_once)
    assert ended


def test_when_result_returns_the_checkpoint_is_complete(page):
    """It loads."""
    assert ocp.is_orbax_checkpoint(page.disk / "late")
    np.testing.assert_array_equal(load(page, "late"), saved())


def test_half_above_and_nowhere_are_not_complete_checkpoints(page):
    """What a kill left, the folder of the steps, a folder inside a checkpoint, and no folder raise."""
    for name in (page.half_written, "steps", "nowhere", "run/state"):
        raised = said(load, page, name)
        assert raised.startswith("InvalidLayoutError: Could not recognize the checkpoint at")
        assert "as a valid Orbax checkpoint" in raised


def test_the_newest_complete_step_is_loaded(page):
    """A Checkpointer passes over the half-written step 5, and loads step 4."""
    with ocp.training.Checkpointer(page.disk / "steps") as saver:
        assert saver.latest.step == 4
    np.testing.assert_array_equal(page.after("latest").loaded, saved())


def test_a_renamed_half_written_step_counts_as_complete(page):
    """Renamed to 5 it is the latest, and its load raises."""
    steps = shutil.copytree(page.disk / "steps", new(page))
    (steps / page.half_written.name).rename(steps / "5")
    with ocp.training.Checkpointer(steps) as saver:
        assert saver.latest.step == 5
        assert said(lambda: saver.load(abstract_state={"w": page.like_w}))


def test_without_its_manifest_nothing_loads(page):
    """The message names the file and the database."""
    part = shutil.copytree(page.disk / "run", new(page))
    (part / "state" / "manifest.ocdbt").unlink()
    raised = said(ocp.load, part, {"w": page.like_w})
    assert 'NOT_FOUND: Error opening "cast" driver:' in raised
    assert "in OCDBT database at local file" in raised and "does not exist" in raised


def test_copied_once_more_each_number_loads(page):
    """The lists of files are equal, and so are the numbers."""
    assert page.files(page.part) == page.files(page.disk / "run")
    np.testing.assert_array_equal(load(page, "part"), saved())


# What can be saved


def test_functions_and_bare_shapes_are_not_saved(page):
    """Both raise as leaves."""
    for leaf in (jnp.tanh, page.like_w, object()):
        raised = said(ocp.save, new(page), {"w": page.w, "other": leaf})
        assert "Unsupported leaf type for saving:" in raised


def test_numbers_and_strings_are_saved(page):
    """They come back as they were."""
    path = new(page)
    ocp.save(path, {"w": page.w, "step": 3, "name": "run"})
    found = ocp.load(path)
    assert found["step"] == 3 and found["name"] == "run"


def test_a_note_comes_back_with_the_arrays(page):
    """custom_metadata has the name of the activation."""
    np.testing.assert_array_equal(load(page, "leaf"), saved())
    assert ocp.metadata(page.disk / "leaf").custom_metadata == {"activation": "tanh"}


def test_a_key_comes_back_from_orbax_and_from_its_numbers(page):
    """Saved and loaded, or taken apart and wrapped, it draws the same numbers."""
    drawn = jax.random.normal(page.key, (4,))
    for key in (page.loaded_key, page.wrapped_key):
        assert key.dtype == page.key.dtype
        np.testing.assert_array_equal(jax.random.normal(key, (4,)), drawn)
    np.testing.assert_array_equal(page.key_numbers, [0, 7])


def test_what_the_text_names_raises_the_messages(page, tmp_path):
    """Bytes by NumPy's dtype raise the first, np.savez and flax.serialization the second."""
    first, second = ENTRIES["keys"]
    assert first in said(lambda: np.dtype(page.key.dtype).itemsize)
    assert second in said(lambda: np.savez(tmp_path / "keys.npz", key=page.key))
    assert second in said(flax.serialization.to_bytes, {"key": page.key})


def test_the_older_manager_wants_args(page):
    """A bare tree raises."""
    manager = older.CheckpointManager(new(page))
    raised = said(page.save_with, manager, 1, {"w": page.w})
    assert 'Unknown key "default" in CompositeCheckpointHandler' in raised


def test_what_it_saved_with_args_both_interfaces_load(page):
    """v1 and the manager itself load it, sharded as the target says."""
    np.testing.assert_array_equal(page.after("args").loaded, saved())
    with older.CheckpointManager(page.disk / "managed-by-args") as manager:
        restore = older.args.StandardRestore({"w": page.like_w})
        found = manager.restore(1, args=restore)["w"]
    assert found.sharding == page.after("args").loaded.sharding == page.by_rows
    np.testing.assert_array_equal(found, saved())
