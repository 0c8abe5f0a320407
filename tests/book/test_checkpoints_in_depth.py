"""The page "Checkpoints in depth"."""

import warnings

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401

P = jax.P


def mesh_of(count):
    types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("data",), axis_types=types, devices=jax.devices()[:count])


@pytest.fixture
def saved(tmp_path):
    """Two arrays on eight devices, saved; targets for one device, with shardings and without."""
    on_eight = jax.NamedSharding(mesh_of(8), P("data"))
    arrays = jax.device_put({name: np.arange(64.0, dtype="float32") for name in "wv"}, on_eight)
    ocp.save(tmp_path / "saved", arrays)
    bare = {name: jax.ShapeDtypeStruct((64,), "float32") for name in "wv"}
    full = {
        name: leaf.update(sharding=jax.NamedSharding(mesh_of(1), P()))
        for name, leaf in bare.items()
    }
    return tmp_path / "saved", arrays, bare, full


def reads_the_old_shardings(path, target):
    """Whether a load says that it populates shardings from the file `_sharding`."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ocp.load(path, target)
    return any("from sharding file" in str(one.message) for one in said)


def test_sharding_is_read_for_every_array_to_which_the_target_gives_none(saved):
    """`_sharding` is read without a target, and with one that leaves an array without a sharding."""
    path, arrays, bare, full = saved
    assert reads_the_old_shardings(path, bare)
    assert reads_the_old_shardings(path, full | {"v": bare["v"]})
    assert not reads_the_old_shardings(path, full)
    mixed = ocp.load(path, full | {"v": bare["v"]})
    assert mixed["w"].sharding == full["w"].sharding and mixed["v"].sharding == arrays["v"].sharding


def test_without_that_file_only_a_target_with_all_shardings_loads(saved):
    """Where `_sharding` is missing, a target with shardings loads, any other does not."""
    path, arrays, bare, full = saved
    (path / "state" / "_sharding").unlink()
    assert np.array_equal(ocp.load(path, full)["w"], arrays["w"])
    for target in (None, bare, full | {"v": bare["v"]}):
        with pytest.raises(ValueError, match="Sharding of jax.Array cannot be None"):
            ocp.load(path, target)


def test_a_full_disk_with_overwrite_leaves_no_checkpoint_at_all(tmp_path):
    """With overwrite=True a full disk leaves nothing; under another name the old one stays."""
    numbers = {"w": jax.numpy.asarray(np.random.default_rng(0).random((256, 256), "float32"))}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), numbers
    )
    for name in ("kept", "over"):
        ocp.save(tmp_path / name, numbers)
    with nearly_full_disk():
        with pytest.raises(Exception, match="too large"):
            ocp.save(tmp_path / "another", numbers)
        with pytest.raises(Exception, match="too large"):
            ocp.save(tmp_path / "over", numbers, overwrite=True)
    assert np.array_equal(ocp.load(tmp_path / "kept", like)["w"], numbers["w"])
    assert not (tmp_path / "over").exists() and not (tmp_path / "another").exists()
