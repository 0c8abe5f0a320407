"""The page "Checkpoints in depth"."""

import functools
import math
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as older
import pytest
import tensorstore
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from orbax.checkpoint import v1 as ocp

import meshscope as ms
from compared import bits
from full_disk import nearly_full_disk, quiet_orbax  # noqa: F401
from many_devices.checkpoints import make_run, mesh_of
from many_devices.helpers import attempt, put
from pages import check_exercise, exercises_of

PAGE = "05b-checkpoints-in-depth"
P = jax.P
BETWEEN = 54 * 24 * 60 / 419  # minutes from one failure to the next


def same(one, two):
    """Two trees of the same structure with the same numbers."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two)))


def layer_on(page, mesh):
    """The saved layer, on another mesh."""
    graphdef, target = nnx.get_abstract_model(page.make, mesh)
    return nnx.merge(graphdef, ocp.load(page.disk / "layer", target))


# How often to save


def test_what_is_lost_with_an_hour_between_two_saves():
    """The pauses take 0.8 % of the time, and a failure each 186 minutes loses 23 % of it."""
    assert round(BETWEEN) == 186
    assert (f"{0.5 / 60:.1%}", f"{(60 / 2 + 2 + 10) / BETWEEN:.0%}") == ("0.8%", "23%")


def test_youngs_formula_finds_the_smallest_lost_share(page):
    """√(2 · 0.5 · 186) = 13.6 minutes is the smallest of all intervals in steps of a tenth."""
    by_formula = math.sqrt(2 * 0.5 * BETWEEN)
    assert f"{by_formula:.1f}" == f"{page.best:.1f}" == "13.6"
    assert page.lost(page.best) == min(page.lost(page.minutes)) < page.lost(60)


def test_near_the_minimum_the_lost_share_changes_little(page):
    """7 or 28 minutes instead of 14 cost about two percentage points more."""
    for interval in (7, 28):
        assert 0.015 < page.lost(interval) - page.lost(14) < 0.0205


def test_with_a_pause_of_a_second_the_best_interval_is_two_and_a_half_minutes(page):
    """Most of what is lost is then W + R, 6.5 %."""
    best = page.minutes[np.argmin(page.lost(page.minutes, pause=1 / 60))]
    assert f"{best:.1f}" == f"{math.sqrt(2 * BETWEEN / 60):.1f}" == "2.5"
    assert f"{(2 + 10) / BETWEEN:.1%}" == "6.5%"
    assert (2 + 10) / BETWEEN > page.lost(best, pause=1 / 60) / 2


def test_for_random_failures_the_best_of_five_intervals_is_that_of_the_formula(page):
    """Failures drawn at random lose what the formula says, to 2.5 points, and least at 14 minutes."""
    works = np.random.default_rng(0).exponential(BETWEEN, 200_000)  # minutes from start to failure
    shares = []
    for interval in (5, 7, 14, 28, 60):
        able = np.maximum(works - 10 - 2, 0)  # after a restart, until the last complete save
        done = able // (interval + 0.5) * interval
        shares.append(1 - done.sum() / works.sum())
        assert abs(shares[-1] - page.lost(interval)) < 0.025
    assert shares.index(min(shares)) == 2


# On disk


def test_the_smaller_of_the_two_sizes_is_on_disk(page):
    """The database has each number once."""
    arrays = jax.tree.leaves(ocp.metadata(page.disk / "layer").metadata)
    stored = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
    assert stored == page.held.unique_bytes == 4 * (96 * 384 + 384 + 96)
    assert page.held.total_bytes == 4 * (96 * 384 + 2 * 384 + 8 * 96)


def test_the_files_of_the_table_are_there(page):
    """What the table of names describes exists, and the mark of completeness was written last."""
    folder = page.disk / "layer"
    for name in ("_METADATA", "_sharding", "array_metadatas", "ocdbt.process_0", "d"):
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
    """An eighth of the rows costs four times its bytes; with smaller chunks about twice at most."""
    noise = np.random.default_rng(0).random((768, 1024), "float32")
    noise = put(noise, page.mesh, "data", "model")
    ocp.save(tmp_path / "coarse", {"w": noise})
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = noise.nbytes // 64
    with context:
        ocp.save(tmp_path / "fine", {"w": noise})
    eighth = bytes_read(tmp_path / "coarse", slice(None)) / 8
    rows = slice(0, 96)  # what device 0 keeps on 8×1
    assert 3.8 < bytes_read(tmp_path / "coarse", rows) / eighth < 4.2
    assert bytes_read(tmp_path / "fine", rows) / eighth < 2.2


# Where a target gets its shardings


def test_a_target_made_by_hand_is_the_target_of_the_annotations(page):
    """Shapes, dtypes and shardings are equal."""
    wanted = jax.tree.leaves(page.target)
    assert jax.tree.leaves(page.by_hand) == wanted and len(wanted) == 3
    annotated = nnx.get_named_sharding(page.shapes, page.mesh)  # what get_abstract_model looks up
    assert jax.tree.leaves(jax.tree.map(page.target_for, page.shapes, annotated)) == wanted
    assert all(leaf.sharding.mesh == page.mesh for leaf in jax.tree.leaves(page.by_hand))


def test_what_only_a_constraint_sharded_comes_back_whole(page):
    """Saved in eight pieces, loaded whole on every device, without an error."""
    kernel = 64 * 512 * 4
    assert ms.memory(page.pieces).bytes_per_device == kernel // page.mesh.size
    assert ms.memory(page.whole).bytes_per_device == kernel
    assert same(page.pieces, page.whole)


def test_for_a_stack_by_jax_vmap_the_target_shards_the_wrong_dimensions(page):
    """`jax.vmap` knows no annotations: layers and rows are sharded, without an error."""

    def stack():
        def layer(key):
            w_DF = jax.random.normal(key, (64, 512))
            return nnx.Param(w_DF, out_sharding=("data", "model"))

        return jax.vmap(layer)(jax.random.split(jax.random.key(0), 8))

    stacked = nnx.get_abstract_model(stack, page.mesh)[1]
    assert stacked.shape == (8, 64, 512)
    assert stacked.sharding.shard_shape(stacked.shape) == (4, 16, 512)


# Tied weights


def arrays_on_disk(folder):
    return len(jax.tree.leaves(ocp.metadata(folder).metadata))


def test_a_state_stores_a_tied_weight_once_and_a_module_twice(page):
    """Only from the state does it come back tied; from the module nothing says that it does not."""
    assert arrays_on_disk(page.disk / "state") == 1
    assert arrays_on_disk(page.disk / "module") == 2
    assert page.from_state.head is page.from_state.embed
    assert page.from_module.head is not page.from_module.embed
    for loaded in (page.from_state, page.from_module):
        assert np.array_equal(loaded.embed.embedding, page.tied.embed.embedding)


def test_an_untied_checkpoint_does_not_fit_a_tied_target(page, tmp_path):
    """`jax.jit` makes two arrays of one variable (chapter 3): two are on disk, and the load fails."""
    untied = jax.jit(page.make_tied)()
    ocp.save(tmp_path / "untied", nnx.state(untied))
    assert arrays_on_disk(tmp_path / "untied") == 2
    with pytest.raises(ValueError, match="do not match"):
        ocp.load(tmp_path / "untied", page.tied_target)


# A flipped bit


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
        wrong = ocp.load(folder, page.like_numbers)["w"]  # no error
        assert differs(page, wrong, page.numbers)
        changed.append(int((wrong != page.numbers).sum()))
    assert len(changed) == 8 and min(changed) >= 1 and max(changed) > 100


def test_the_checksum_of_the_copies(page):
    """Only the copy on one device has the same checksum."""
    seen = [differs(page, array, page.numbers) for array in page.copies.values()]
    assert seen == [False, True, True, True, True]
    assert not np.array_equal(page.flipped["w"], page.numbers)


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
        moved = layer_on(page, mesh_of(*shape))
        assert not differs(page, moved.w_DF[...], page.model.w_DF[...])


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


def test_the_checksum_of_a_sharded_array_makes_no_full_copy(page):
    """Each device adds up its own part."""
    layers = put(np.ones((4, 96, 384), "float32"), page.mesh, None, "data", "model")
    ms.assert_no_full_copy(page.checksum.lower(layers).compile(), layers)


def test_checksums_of_a_model_find_the_changed_array(page):
    """Saved on eight devices and compared on four; one sign of many is found, by its path."""
    assert len(page.noted) == 3 and page.checksums(page.back) == page.noted
    assert all(leaf.sharding.mesh.size == 4 for leaf in jax.tree.leaves(page.back))
    other = ocp.load(page.disk / "noted", page.small_target)
    other["w_DF"][...] = other["w_DF"][...].at[95, 383].multiply(-1)
    changed = [path for path, one in page.checksums(other).items() if one != page.noted[path]]
    assert len(changed) == 1 and "w_DF" in changed[0]


def test_a_bit_that_flips_in_the_index_raises_an_error(page, tmp_path):
    """The index has a checksum of its own."""
    folder = shutil.copytree(page.disk / "numbers", tmp_path / "index")
    (index,) = (folder / "state" / "d").iterdir()
    index.write_bytes(page.flip_one_bit(index.read_bytes()))
    with pytest.raises(Exception, match="decoding b-tree node"):
        ocp.load(folder, page.like_numbers)


def test_a_chunk_that_cannot_be_decompressed_raises_an_error(page, tmp_path):
    """So does a file that is cut off."""
    digits = np.random.default_rng(0).integers(0, 3, (512, 256)).astype("float32")
    ocp.save(tmp_path / "digits", {"w": jax.device_put(digits, page.by_rows)})
    page.change_largest_file(tmp_path / "digits", page.flip_one_bit)
    cut = shutil.copytree(page.disk / "numbers", tmp_path / "cut")
    page.change_largest_file(cut, lambda data: data[: len(data) // 2])
    for folder in (tmp_path / "digits", cut):
        with pytest.raises(Exception, match="while reading array"):
            ocp.load(folder, page.like_numbers)


# overwrite=True


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
        ocp.save(page.disk / "numbers", {"w": page.numbers})


# In practice


def state_and_target(mesh):
    """The state of chapter 5's run, and a target for it."""
    with jax.set_mesh(mesh):
        state = nnx.state(jax.jit(make_run)())
    return state, nnx.get_abstract_model(make_run, mesh)[1]


def test_the_options_for_copied_models_and_for_the_hosts_memory_exist(page, tmp_path):
    """A checkpoint loads and saves with `use_load_and_broadcast` and limits of memory."""
    context = ocp.Context()
    context.array.loading.use_load_and_broadcast = True
    context.memory.transfer_concurrent_bytes = context.memory.read_concurrent_bytes = 10**9
    w = put(np.arange(64, dtype="float32").reshape(8, 8), page.mesh, "data", "model")
    ocp.save(tmp_path / "sharded", {"w": w})
    whole = jax.NamedSharding(page.mesh, P())
    copied = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=whole)}
    with context:
        loaded = ocp.load(tmp_path / "sharded", copied)
        ocp.save(tmp_path / "again", loaded)
    assert np.array_equal(loaded["w"], w)
    assert np.array_equal(ocp.load(tmp_path / "again", copied)["w"], w)


def test_v1_reads_what_older_code_wrote(page, tmp_path):
    """What `StandardCheckpointer` and `CheckpointManager` wrote loads."""
    state, target = state_and_target(page.mesh)
    with (
        older.StandardCheckpointer() as one,
        older.CheckpointManager(tmp_path / "many") as many,
    ):
        one.save(tmp_path / "standard", state)
        many.save(3, args=older.args.StandardSave(state))
    for path in (tmp_path / "standard", tmp_path / "many" / "3"):
        assert bits(ocp.load(path, target)) == bits(state)


def test_a_step_of_several_items_needs_load_checkpointables(page, tmp_path):
    """`ocp.load` says that the structures do not match."""
    state, target = state_and_target(page.mesh)
    with older.CheckpointManager(tmp_path / "items") as several:
        items = older.args.Composite(
            params=older.args.StandardSave(state["model"]),
            opt=older.args.StandardSave(state["optimizer"]),
        )
        several.save(4, args=items)
    with pytest.raises(ValueError, match="do not match"):
        ocp.load(tmp_path / "items" / "4", target)
    parts = {"params": target["model"], "opt": target["optimizer"]}
    loaded = ocp.load_checkpointables(tmp_path / "items" / "4", parts)
    assert bits(loaded["params"]) == bits(state["model"])
    assert bits(loaded["opt"]) == bits(state["optimizer"])


def test_compiled_programs_can_be_kept_on_disk(tmp_path):
    """`jax_compilation_cache_dir` keeps the compiled programs in a cache on disk."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    try:
        for name, value in zip(names, (str(tmp_path), 0.0)):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: jnp.sin(x) @ x.T).lower(jnp.ones((8, 8))).compile()
        assert any(tmp_path.iterdir())
    finally:
        for name, value in zip(names, before):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


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


# Explicit mode


def test_types_alone_are_refused_as_a_target(page):
    """The types name axes and their sizes, and Orbax needs devices."""
    assert page.types["w_DF"].sharding.spec == P("data", "model")
    assert "not found in mesh" in attempt(ocp.load, page.disk / "typed", page.types)


def test_rebound_to_the_mesh_with_devices_the_types_come_back(page):
    """A target with the specs of the types gives typed arrays."""
    typed = page.typed_back["w_DF"]
    assert str(jax.typeof(typed[...])) == "float32[96@data,384@model]"
    assert typed.sharding == jax.NamedSharding(page.explicit_mesh, P("data", "model"))


def test_get_abstract_model_finds_no_annotations_and_asks_for_the_whole(page):
    """Every device gets the whole weight, without an error."""
    assert str(jax.typeof(page.whole_back["w_DF"][...])) == "float32[96,384]"
    held = ms.memory(page.whole_back).total_bytes
    assert held == 8 * ms.memory(page.typed_back).total_bytes
    assert same(page.typed_back, page.whole_back)


def test_what_was_saved_in_auto_mode_loads_in_explicit_mode(page):
    """A checkpoint knows no modes: the target's mesh decides."""
    loaded = ocp.load(page.disk / "layer", jax.tree.map(page.rebind, page.target))
    assert same(loaded, nnx.state(layer_on(page, page.mesh)))
    assert str(jax.typeof(loaded.w_DF[...])) == "float32[96@data,384@model]"


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
