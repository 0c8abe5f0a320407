"""The page "Checkpoints on disk"."""

import math
import warnings

import jax
import numpy as np
import pytest
import tensorstore
from flax import nnx
from orbax.checkpoint import v1 as ocp

from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401
from many_devices.checkpoints import mesh_of
from many_devices.helpers import put
from pages import check_exercise, exercises_of

PAGE = "05b-checkpoints-in-depth"
P = jax.P


def layer_on(page, mesh):
    """The saved layer, on another mesh."""
    graphdef, target = nnx.get_abstract_model(page.make, mesh)
    return nnx.merge(graphdef, ocp.load(page.disk / "layer", target))


# The directory


def test_the_files_of_the_table_are_there(page):
    """What the table of names describes exists, and Google's mark of completeness was written last."""
    folder = page.disk / "layer"
    for name in ("_METADATA", "_sharding", "ocdbt.process_0"):
        assert (folder / "state" / name).exists(), name
    assert (folder / "_CHECKPOINT_METADATA").exists()
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert written[folder / "commit_success.txt"] == max(written.values())


def test_process_0_wrote_the_arrays_and_the_index_is_small(page):
    """The data of `ocdbt.process_0` is large, that of the index is not."""
    files = {
        path: path.stat().st_size
        for path in (page.disk / "layer").rglob("*")
        if path.parent.name == "d"
    }
    assert len(files) == 2
    assert max(files, key=files.get).parent.parent.name == "ocdbt.process_0"
    assert min(files.values()) < 4 * 384 < max(files.values())


@pytest.fixture
def saved(tmp_path):
    """Two arrays on eight devices, saved; targets for one device, with shardings and without."""
    eight = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on_eight = jax.NamedSharding(eight, P("data"))
    arrays = jax.device_put({name: np.arange(64.0, dtype="float32") for name in "wv"}, on_eight)
    ocp.save(tmp_path / "saved", arrays)
    bare = {name: jax.ShapeDtypeStruct((64,), "float32") for name in "wv"}
    full = {
        name: leaf.update(sharding=jax.NamedSharding(mesh_of(1, 1), P()))
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
    assert reads_the_old_shardings(path, None)
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


def test_get_abstract_model_gives_an_unannotated_array_no_axes_and_it_comes_back_replicated(
    page, tmp_path
):
    """Saved sharded, its target has `P()`: `_sharding` is not used."""

    def plain():
        return nnx.Param(jax.numpy.zeros(96))

    sharded = jax.device_put(np.zeros(96, "float32"), jax.NamedSharding(page.mesh, P("data")))
    ocp.save(tmp_path / "plain", {"v": nnx.Param(sharded)})
    _, target = nnx.get_abstract_model(plain, page.mesh)
    assert target.sharding == jax.NamedSharding(page.mesh, P())
    assert ocp.load(tmp_path / "plain", {"v": target})["v"].sharding.is_fully_replicated


# Chunks


def test_the_smaller_of_the_two_sizes_is_on_disk(page):
    """The database has each number once."""
    arrays = jax.tree.leaves(ocp.metadata(page.disk / "layer").metadata)
    stored = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
    assert stored == page.held.unique_bytes == 4 * (96 * 384 + 384 + 96)
    assert page.held.total_bytes == 4 * (96 * 384 + 2 * 384 + 8 * 96)


def test_a_chunk_is_a_shard_or_an_equal_part_of_one(page):
    """Of `w_DF` a chunk is a shard; each of two devices wrote half of a shard of `b_F`, and each of
    eight an eighth of `b_D`."""
    data, model = page.mesh.shape["data"], page.mesh.shape["model"]
    assert page.chunk_of("w_DF") == (96 // data, 384 // model) == (48, 96)
    assert page.chunk_of("b_F") == (384 // model // data,) == (48,)
    assert page.chunk_of("b_D") == (96 // page.mesh.size,) == (12,)


def test_the_chunks_are_what_the_devices_held(page):
    """Read without Orbax, each chunk of `w_DF` is the shard of a device."""
    base = {"driver": "ocdbt", "base": f"file://{page.disk}/layer/state/"}
    kept = {"driver": "zarr3", "kvstore": base | {"path": "w_DF.value/"}}
    on_disk = tensorstore.open(kept).result()
    assert on_disk.chunk_layout.read_chunk.shape == page.chunk_of("w_DF")
    for shard in layer_on(page, page.mesh).w_DF.addressable_shards:
        assert shard.data.shape == page.chunk_of("w_DF")
        assert np.array_equal(on_disk[shard.index].read().result(), shard.data)


def test_devices_share_the_writing_where_they_can_divide_it_evenly(page, tmp_path):
    """Where no dimension of a shard divides by the number of copies, one device writes it whole."""
    mesh = page.mesh
    odd = {
        "ten": put(np.arange(10.0), mesh),
        "seven": put(np.ones((7, 9)), mesh),
        "scalar": put(np.float32(3), mesh),
        "six": put(np.ones((12, 7)), mesh, "data"),
        "even": put(np.ones((16, 7)), mesh, "data"),
    }
    ocp.save(tmp_path / "odd", odd)
    shared = set()
    for name, array in ocp.metadata(tmp_path / "odd").metadata.items():
        shard = odd[name].sharding.shard_shape(odd[name].shape)
        copies = mesh.size // (math.prod(odd[name].shape) // math.prod(shard))
        divides = any(size % copies == 0 for size in shard)
        chunk = math.prod(array.storage_metadata.chunk_shape)
        assert chunk == math.prod(shard) // (copies if divides else 1), name
        shared |= {name} if divides else set()
    assert shared == {"even"}


# Reading


def chunks_read(page, mesh):
    """For device 0: how many chunks its part overlaps, and the share of them that it keeps."""
    piece = layer_on(page, mesh).w_DF.addressable_shards[0]
    count = 1
    for part, size, chunk in zip(piece.index, (96, 384), page.chunk_of("w_DF")):
        first, last, _ = part.indices(size)
        count *= (last - 1) // chunk - first // chunk + 1
    return count, piece.data.size / (count * math.prod(page.chunk_of("w_DF")))


def test_which_chunks_device_0_of_another_mesh_reads(page):
    """As in the figure: on 8×1 it reads four and keeps a quarter of each."""
    read = {(4, 2): (2, 1 / 2), (8, 1): (4, 1 / 4), (2, 2): (2, 1), (1, 1): (8, 1)}
    for shape, expected in read.items():
        assert chunks_read(page, mesh_of(*shape)) == expected


def test_device_0_needs_as_many_chunks_as_the_exercise_says(page):
    """What the check of the exercise has typed in is what device 0 overlaps."""
    typed = {(2, 4): 1, (4, 2): 2, (8, 1): 4, (2, 2): 2, (1, 1): 8, (1, 2): 4, (1, 8): 2}
    for shape, count in typed.items():
        assert chunks_read(page, mesh_of(*shape))[0] == count


def bytes_read(folder, rows):
    """Bytes of files that one reader needs for these rows of the array w."""

    def so_far():
        name = "/tensorstore/kvstore/file/bytes_read"
        (metric,) = tensorstore.experimental_collect_matching_metrics(name)
        return metric["values"][0]["value"]

    base = {"driver": "ocdbt", "base": f"file://{folder}/state/", "path": "w/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": base}).result()
    before = so_far()
    array[rows].read().result()
    return so_far() - before


def test_a_chunk_is_read_whole_and_smaller_chunks_read_less(page, tmp_path):
    """An eighth of the rows costs four times its bytes; with smaller chunks about twice at most.

    Chunks that are as large as a shard, and no smaller, change nothing.
    """
    noise = np.random.default_rng(0).random((768, 1024), "float32")
    noise = put(noise, page.mesh, "data", "model")
    ocp.save(tmp_path / "coarse", {"w": noise})
    for name, parts in (("as-shards", 8), ("fine", 64)):
        context = ocp.Context()
        context.array.saving.storage_options.chunk_byte_size = noise.nbytes // parts
        with context:
            ocp.save(tmp_path / name, {"w": noise})
    eighth = bytes_read(tmp_path / "coarse", slice(None)) / 8
    rows = slice(0, 96)  # what device 0 keeps on 8×1
    for name in ("coarse", "as-shards"):
        assert 3.8 < bytes_read(tmp_path / name, rows) / eighth < 4.2
    assert bytes_read(tmp_path / "fine", rows) / eighth < 2.2


def test_an_eighth_of_a_shard_in_bytes_as_on_the_page(page, tmp_path):
    """2,304 bytes is one eighth of a shard of `w_DF`, and the chunks have this size."""
    assert 2_304 == 96 * 384 * 4 // 64 == math.prod(page.chunk_of("w_DF")) * 4 // 8
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = 2_304
    with context:
        ocp.save(tmp_path / "small", {"w": page.model.w_DF[...]})
    stored = ocp.metadata(tmp_path / "small").metadata["w"]
    assert math.prod(stored.storage_metadata.chunk_shape) * 4 <= 2_304


# Complete


def test_on_a_local_disk_a_directory_gets_its_name_when_all_is_written(page, tmp_path):
    """While Orbax writes, the directory has a temporary name; then it is renamed."""
    response = ocp.save_async(tmp_path / "run", nnx.state(page.model))
    assert not (tmp_path / "run").exists()
    response.result()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


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


def test_without_overwrite_a_name_that_is_taken_raises_an_error(page):
    """If the name is taken, `ocp.save` raises an error."""
    with pytest.raises(ValueError, match="already exists"):
        ocp.save(page.disk / "layer", nnx.state(page.model))


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


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
