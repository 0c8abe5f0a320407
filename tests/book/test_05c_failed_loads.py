"""The page "When a load fails, loudly or silently"."""

import contextlib
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401
from many_devices.checkpoints import mesh_of, message_of
from pages import check_exercise, exercises_of

PAGE = "05c-failed-loads"
P = jax.P


# Loads that raise an error


def test_a_target_of_another_shape_raises_an_error(page):
    """The message names the stored shape."""
    said = message_of(ocp.load, page.disk / "numbers", page.half_the_rows)
    assert "the stored shape: (512, 256)" in " ".join(said.split())


def test_a_target_with_another_name_raises_an_error(page):
    """In the message, Source is the target and Target is the disk."""
    said = message_of(ocp.load, page.disk / "numbers", page.other_name)
    assert "tree structures do not match" in " ".join(said.split())
    of_kernel, of_w = said.split("kernel:")[1].split("\nw:")
    assert "Source: ShapeDtypeStruct" in of_kernel and "Target: MISSING" in of_kernel
    assert "Source: MISSING" in of_w and "Target: ValueMetadata" in of_w


def test_write_shape_is_the_piece_that_each_device_wrote(page):
    """Rows over two devices, and four copies of each half: each of eight wrote 64 rows."""
    said = message_of(ocp.load, page.disk / "numbers", page.other_name)
    assert f"write_shape=({512 // page.mesh.size}, 256)" in said


def test_a_mesh_that_does_not_divide_a_dimension_raises_an_error(page):
    """Rows in thirds: the message says that they should divide evenly."""
    by_three = jax.NamedSharding(mesh_of(3, 2), P("data"))
    in_thirds = {"w": page.like_numbers["w"].update(sharding=by_three)}
    with pytest.raises(ValueError, match="should evenly divide"):
        ocp.load(page.disk / "numbers", in_thirds)


def test_without_the_old_devices_a_target_is_needed(page, tmp_path):
    """As if devices 100 to 107 had written it: without a target it fails, with one it loads."""
    elsewhere = shutil.copytree(page.disk / "numbers", tmp_path / "elsewhere")
    note = elsewhere / "state" / "_sharding"
    text, count = re.subn(r'(\\"id\\": )(\d)', r"\g<1>10\2", note.read_text())
    assert count >= 8
    note.write_text(text)
    with pytest.raises(ValueError, match="sharding passed to deserialization"):
        ocp.load(elsewhere)
    assert np.array_equal(ocp.load(elsewhere, page.like_numbers)["w"], page.numbers)


def test_a_file_that_is_cut_off_raises_an_error(page, tmp_path):
    """The message says that it happened while reading an array."""
    cut = shutil.copytree(page.disk / "layer", tmp_path / "cut")
    files = [path for path in cut.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(Exception, match="while reading array"):
        ocp.load(cut, page.target)


def test_a_relative_path_raises_an_error_after_something_was_written(page, tmp_path):
    """A path should be absolute; the error comes late."""
    with contextlib.chdir(tmp_path):
        with pytest.raises(ValueError, match="should be absolute"):
            ocp.save("relative", {"w": page.numbers})
    assert list(tmp_path.glob("relative*tmp"))


def test_a_name_that_is_taken_raises_an_error(page):
    """The checkpoint already exists."""
    with pytest.raises(ValueError, match="already exists"):
        ocp.save(page.disk / "numbers", {"w": page.numbers})


def test_annotations_read_without_a_mesh_raise_an_error(page):
    """Annotations alone name no devices."""
    with pytest.raises(ValueError, match="An auto mesh context"):
        nnx.eval_shape(page.make)


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


def test_orbax_cuts_or_pads_if_it_is_asked_to(page):
    """With `enable_padding_and_truncation=True` it does so without a word."""
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    more_rows = {"w": page.like_numbers["w"].update(shape=(1024, 256))}
    with context:
        cut = ocp.load(page.disk / "numbers", page.half_the_rows)["w"]
        padded = ocp.load(page.disk / "numbers", more_rows)["w"]
    assert np.array_equal(cut, page.host_numbers[:256])
    assert np.array_equal(padded[:512], page.host_numbers) and not padded[512:].any()


def test_a_part_loads_with_partial_load(page):
    """What the target leaves out is not read; without the option the names do not match."""
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    only_bias = nnx.State({"bias": page.target["bias"]})
    with pytest.raises(ValueError, match="do not match"):
        ocp.load(page.disk / "layer", only_bias)
    with context:
        assert list(ocp.load(page.disk / "layer", only_bias)) == ["bias"]


# Silent failures


def test_a_model_merged_from_the_target_has_shapes_and_shardings_and_no_numbers(page):
    """Nothing is raised until its first use; the check after the load catches it."""
    hollow = page.hollow
    assert hollow.kernel.shape == page.model.kernel.shape
    assert hollow.kernel.sharding == page.target.kernel.sharding
    with pytest.raises(AssertionError, match="is not an array"):
        page.assert_holds_arrays(hollow)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.jit(lambda model: model.kernel + 1)(hollow)


def test_a_model_merged_from_what_was_loaded_passes_the_check(page):
    """`ocp.load` returns new arrays."""
    loaded = nnx.merge(page.graphdef, ocp.load(page.disk / "layer", page.target))
    page.assert_holds_arrays(loaded)
    assert np.array_equal(loaded.kernel, page.model.kernel)


def test_orbax_casts_to_the_dtype_of_the_target_without_a_word(page):
    """To bfloat16, and even to int8."""
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(page.short))
    assert page.stored.dtype == "float32"
    eight_bits = jax.ShapeDtypeStruct((512, 256), "int8", sharding=page.by_rows)
    assert ocp.load(page.disk / "numbers", {"w": eight_bits})["w"].dtype == "int8"


def test_comparing_dtypes_before_the_load_catches_the_cast(page):
    """The dtypes on disk are in the metadata; with the right target nothing is raised."""
    with pytest.raises(AssertionError, match="bias/value: bfloat16 for float32"):
        page.assert_same_dtypes(page.disk / "layer", page.short_target)
    page.assert_same_dtypes(page.disk / "layer", page.target)


def test_the_moments_of_an_optimizer_lose_half_of_their_bits_too(page, tmp_path):
    """The same check catches it."""

    def with_moments():
        model = page.make()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    _, asked = nnx.get_abstract_model(with_moments, page.mesh)
    with jax.set_mesh(page.mesh):
        ocp.save(tmp_path / "moments", nnx.state(jax.jit(with_moments)()))
        short = jax.tree.map(page.asking_bfloat16, asked)
    moments = ocp.load(tmp_path / "moments", short)[1]["opt_state"][0]["nu"]
    assert moments["kernel"].dtype == "bfloat16"
    page.assert_same_dtypes(tmp_path / "moments", asked)
    with pytest.raises(AssertionError, match="bfloat16 for float32"):
        page.assert_same_dtypes(tmp_path / "moments", short)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
