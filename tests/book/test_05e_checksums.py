"""The page "A flipped bit loads without an error"."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import meshscope as ms
from many_devices.checkpoints import mesh_of
from many_devices.helpers import put
from pages import check_exercise, exercises_of

PAGE = "05e-checksums"
P = jax.P


def differs(page, one, other):
    return int(page.checksum(one)) != int(page.checksum(other))


def test_eight_flipped_bits_load_without_an_error_and_the_checksum_notices_each(page, tmp_path):
    """Because chunks are compressed, one bit can change many numbers."""

    def flip_at(place, data):
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    changed = []
    for place in range(50_000, 450_000, 50_000):
        folder = shutil.copytree(page.disk / "numbers", tmp_path / str(place))
        page.change_largest_file(folder, functools.partial(flip_at, place))
        wrong = ocp.load(folder, page.target)["w"]  # no error
        assert differs(page, wrong, page.numbers)
        changed.append(int((wrong != page.numbers).sum()))
    assert len(changed) == 8 and min(changed) >= 1 and max(changed) > 100


def test_a_chunk_that_cannot_be_decompressed_raises_an_error(page, tmp_path):
    """So does a file that is cut off."""
    digits = np.random.default_rng(0).integers(0, 3, (512, 256)).astype("float32")
    ocp.save(tmp_path / "digits", {"w": jax.device_put(digits, page.by_rows)})
    page.change_largest_file(tmp_path / "digits", page.flip_one_bit)
    cut = shutil.copytree(page.disk / "numbers", tmp_path / "cut")
    page.change_largest_file(cut, lambda data: data[: len(data) // 2])
    for folder in (tmp_path / "digits", cut):
        with pytest.raises(Exception, match="while reading array"):
            ocp.load(folder, page.target)


def test_the_checksum_of_the_copies(page):
    """Only the copy on one device has the same checksum."""
    seen = [differs(page, array, page.numbers) for array in page.copies.values()]
    assert seen == [False, True, True, True, True]
    assert not np.array_equal(page.flipped, page.numbers)


def test_the_checksum_notices_what_a_plain_sum_does_not(page):
    """Swapped, reversed, rolled, transposed and negated numbers have the same sum of bits."""
    host = np.random.default_rng(1).normal(size=(4, 96, 384)).astype("float32")
    layers = put(host, page.mesh, None, "data", "model")

    def plain_sum(x):
        return np.asarray(x).view("uint32").sum(dtype="uint32")

    damaged = {
        "layers swapped": host[[1, 0, 2, 3]],
        "layers reversed": host[::-1],
        "columns rolled by a shard": np.roll(host, 96, -1),
        "negated": -host,
        "transposed": np.swapaxes(host, 1, 2),
        "rows reversed": host[:, ::-1],
    }
    for name, array in damaged.items():
        assert plain_sum(array) == plain_sum(host), name
        assert differs(page, array, layers), name


def test_the_checksum_does_not_depend_on_the_mesh(page):
    """Of a model on three other meshes it is the same."""
    for shape in [(8, 1), (2, 2), (1, 1)]:
        _, target = nnx.get_abstract_model(page.make, mesh_of(*shape))
        moved = ocp.load(page.disk / "noted", target)
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(moved)} == {mesh_of(*shape)}
        assert page.checksums(moved) == page.noted


def test_the_checksum_reads_types_of_one_two_and_four_bytes_and_keys(page):
    """Sharded or not it is the same, and it sees a change; it tells 0 from -0."""
    host = np.random.default_rng(1).normal(size=(4, 96, 384)).astype("float32")
    by_model = jax.NamedSharding(mesh_of(2, 2), P(None, "data", "model"))
    for dtype in ("bfloat16", "int8", "int32"):
        small = (100 * host).astype(dtype)
        assert not differs(page, small, jax.device_put(small, by_model))
        assert differs(page, small, small[::-1])
    assert differs(page, jax.random.key(0), jax.random.key(1))
    assert differs(page, np.float32(0), -np.float32(0))


def test_for_larger_types_and_for_bool_the_checksum_raises_an_error(page):
    """Of eight bytes it would read only half: x and -x would have one checksum."""
    with jax.enable_x64(True):
        for dtype in ("float64", "int64", "complex64"):
            with pytest.raises(TypeError, match=f"no checksum for {dtype}"):
                page.checksum(jnp.ones(8, dtype))
    with pytest.raises(TypeError):
        page.checksum(jnp.ones(8, bool))


def test_the_checksum_of_a_sharded_array_makes_no_full_copy(page):
    """Each device adds up its own part."""
    layers = put(np.ones((4, 96, 384), "float32"), page.mesh, None, "data", "model")
    ms.assert_no_full_copy(page.checksum.lower(layers).compile(), layers)


def test_checksums_of_a_model_find_the_changed_array(page):
    """Saved on eight devices and compared on four; one sign of many is found, by its path."""
    assert len(page.noted) == 2 and page.checksums(page.back) == page.noted
    assert all(leaf.sharding.mesh.size == 4 for leaf in jax.tree.leaves(page.back))
    other = ocp.load(page.disk / "noted", page.small_target)
    other["kernel"][...] = other["kernel"][...].at[95, 383].multiply(-1)
    changed = [path for path, one in page.checksums(other).items() if one != page.noted[path]]
    assert len(changed) == 1 and "kernel" in changed[0]


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
