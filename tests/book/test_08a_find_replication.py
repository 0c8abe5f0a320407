"""The page "Find the line that replicated"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "08a-find-replication"
P = jax.P
COMPILERS = ["cpu", "tpu", "gpu"]


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def kinds_of(function, *spec):
    mesh = mesh_of(AxisType.Auto)
    x = jax.ShapeDtypeStruct((512, 1024), "float32", sharding=jax.NamedSharding(mesh, P(*spec)))
    return ms.collectives(jax.jit(function).lower(x).compile(), mesh).kinds


ACTIVATION = 512 * 1024 * 4  # bytes


def gathers(program, page):
    return [move for move in ms.collectives(program, page.mesh) if move.kind == "all-gather"]


# The collectives name the line


def with_names(page, clip):
    """The program with its own names and lines, which the tests' cache leaves out of its key."""
    option = "jax_compilation_cache_include_metadata_in_key"

    def forward(weights, x_BD):
        return page.forward(weights, x_BD, clip)

    jax.config.update(option, True)
    try:
        return jax.jit(forward).lower(page.weights, page.x_512_BD).compile()
    finally:
        jax.config.update(option, False)


def test_the_gathers_are_named_by_their_layer_and_their_line(page):
    """All of them come from layer_2 and from line 2 of the model's cell, the one with quantile."""
    found = gathers(with_names(page, page.clip_outliers), page)
    assert found
    assert all("layer_2" in move.op_name for move in found)
    assert all(move.source_line.endswith(":2") for move in found)
    assert any("quantile" in move.op_name for move in found)


@compiled_for_cpu
def test_the_activation_is_gathered_along_each_axis(page):
    """Compiled for CPU: half of it along model, all of it along data, 3.1 MB together."""
    found = gathers(page.slow, page)
    by_axes = ms.collectives(page.slow, page.mesh).by("kind", "axes")
    assert by_axes.bytes("all-gather", ("data",)) == ACTIVATION
    assert by_axes.bytes("all-gather", ("model",)) == ACTIVATION // 2
    assert f"{sum(move.payload_bytes for move in found) / 1e6:.1f}" == "3.1"


@compiled_for_cpu
def test_on_cpu_the_scratch_memory_has_room_for_thirteen_activations(page):
    """Of a device's eighth; repaired, for two of them."""
    eighth = ACTIVATION // page.mesh.size
    assert ms.memory(page.slow).temporaries == 13 * eighth
    assert ms.memory(page.repaired).temporaries == 2 * eighth
    assert ms.memory(page.counted).temporaries < 4 * eighth
    assert (f"{ACTIVATION / 1e6:.1f}", f"{eighth / 1e6:.2f}") == ("2.1", "0.26")


@compiled_for_cpu
def test_repaired_only_the_sums_of_row_parallel_products_remain(page):
    """Compiled for CPU: four all-reduces, one for each layer, and none larger."""
    found = ms.collectives(page.repaired, page.mesh)
    sums = [move for move in found if move.payload_bytes > 100]
    assert [(m.kind, m.payload_bytes) for m in sums] == [("all-reduce", 512 * 256 * 4 // 2)] * 4
    for program in (page.repaired, page.counted):
        assert ms.collectives(program, page.mesh).kinds == {"all-reduce"}


def test_what_each_way_of_clipping_clips(page):
    """The percentile, by a sort or by counting, 0.1 per cent; the deviation 1.9 per cent."""
    rng = np.random.default_rng(0)
    x_BD, w_DF = rng.normal(size=(512, 256)), rng.normal(size=(256, 1024)) / 16
    h_BF = jax.nn.silu(jnp.asarray(x_BD @ w_DF, "float32"))

    def share(clip):
        return float((clip(h_BF) != h_BF).mean())

    assert abs(share(page.clip_outliers) - 0.001) < 1e-5
    assert abs(share(page.clip_by_counting) - 0.001) < 1e-5
    assert round(100 * share(page.clip_by_deviation), 1) == 1.9


@compiled_for_cpu
def test_the_line_that_is_named_made_the_value(page):
    """Of a shuffle: half of the activation, in layer_2, on line 9; JAX before 0.11 names the index."""
    shuffled = with_names(page, page.shuffle_features)
    found = max(ms.collectives(shuffled, page.mesh), key=lambda move: move.payload_bytes)
    assert (found.kind, found.payload_bytes) == ("all-gather", ACTIVATION // 2)
    line = ":9" if jax.__version_info__ >= (0, 11) else ":3"
    assert "layer_2" in found.op_name and found.source_line.endswith(line)


# The repair


def gathered(name, compiler):
    rows = stored_program(name)[compiler]["moves"]
    return sum(row["payload"] for row in rows if row["kind"] == "all-gather")


def scratch(name, compiler):
    return stored_program(name)[compiler]["memory"]["temporaries"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_repair_takes_the_gathers_away_with_every_compiler(compiler):
    """With the percentile 3.1 MB are gathered, repaired nothing, compiled for CPU, TPU and H100."""
    assert f"{gathered('arrays-slow', compiler) / 1e6:.1f}" == "3.1"
    assert gathered("arrays-repaired", compiler) == 0


def test_scratch_memory_shows_the_repair_for_cpu_and_h100_and_not_for_tpu():
    """Scratch memory falls from 3.4 to 0.5 MB on CPU and from 3.7 to 1.8 on H100; a TPU states 0.32
    MB for both."""
    for compiler, before, after in [("cpu", "3.41", "0.52"), ("gpu", "3.67", "1.84")]:
        assert f"{scratch('arrays-slow', compiler) / 1e6:.2f}" == before
        assert f"{scratch('arrays-repaired', compiler) / 1e6:.2f}" == after
    assert scratch("arrays-slow", "tpu") == scratch("arrays-repaired", "tpu")
    assert f"{scratch('arrays-slow', 'tpu') / 1e6:.2f}" == "0.32"


@compiled_for_cpu
def test_the_stored_numbers_for_cpu_are_those_of_the_page(page):
    """The program of the page and the stored one are the same."""
    for name, program in [("arrays-slow", page.slow), ("arrays-repaired", page.repaired)]:
        assert ms.memory(program).temporaries == scratch(name, "cpu")


# Percentiles and sorts


@compiled_for_cpu
@pytest.mark.parametrize("spec", [("data", None), ("data", "model")])
@pytest.mark.parametrize(
    "over_all", [lambda x: jnp.sort(x, axis=None), lambda x: jnp.quantile(x, 0.9)]
)
def test_over_all_elements_a_percentile_or_a_sort_gathers(over_all, spec):
    """For a percentile or a sort over all elements, XLA gathers."""
    assert "all-gather" in kinds_of(over_all, *spec)


@compiled_for_cpu
@pytest.mark.parametrize("function", [jnp.sort, lambda x, axis: jnp.quantile(x, 0.9, axis=axis)])
def test_along_one_dimension_of_a_matrix_pieces_move_by_all_to_all_or_not_at_all(function):
    """Along a whole dimension nothing moves; along a sharded one pieces move, and none is gathered."""
    assert not kinds_of(partial(function, axis=1), "data", None)
    for axis, spec in [(0, ("data", None)), (1, ("data", "model"))]:
        kinds = kinds_of(partial(function, axis=axis), *spec)
        assert "all-to-all" in kinds and "all-gather" not in kinds


# Random numbers


def random_program(kind, **said):
    """A compiled program that makes 512 x 512 numbers in eighths, while a mesh is set."""
    mesh = mesh_of(kind)
    eighths = jax.NamedSharding(mesh, P("data", "model"))

    def uniform(key):
        return jax.random.uniform(key, (512, 512), **said)

    with jax.set_mesh(mesh):
        return jax.jit(uniform, out_shardings=eighths).lower(jax.random.key(0)).compile()


def makes_the_whole(program):
    assert {s.shard_shape((512, 512)) for s in [program.output_shardings]} == {(256, 128)}
    return "f32[512,512]" in program.as_text()


@compiled_for_cpu
def test_in_auto_mode_every_device_makes_its_own_block_of_random_numbers():
    """In Auto mode, out_shardings= of jax.jit is enough: no device makes the whole array."""
    program = random_program(AxisType.Auto)
    assert not makes_the_whole(program)
    assert ms.memory(program).temporaries < 512 * 512 * 4


@compiled_for_cpu
def test_in_explicit_mode_out_shardings_of_jit_comes_too_late():
    """In Explicit mode every device makes the whole array, unless the random function is told."""
    program = random_program(AxisType.Explicit)
    assert makes_the_whole(program)
    assert ms.memory(program).temporaries > 512 * 512 * 4
    told = random_program(AxisType.Explicit, out_sharding=P("data", "model"))
    assert not makes_the_whole(told)


def test_an_element_depends_on_the_key_and_its_own_position():
    """The numbers of jax.random.uniform are the same, whichever device makes them."""
    alone = jax.random.uniform(jax.random.key(0), (512, 512))
    for kind in (AxisType.Auto, AxisType.Explicit):
        assert (random_program(kind)(jax.random.key(0)) == alone).all()


def test_nobody_says_where_so_key_and_array_are_on_one_device_uncommitted(page):
    """Without out_shardings."""
    for array in (page.key, page.uniform(page.key)):
        assert len(array.devices()) == 1 and not array.committed


@compiled_for_cpu
def test_on_the_page_nothing_moves_and_the_numbers_are_the_same(page):
    """Compiled for CPU: no collectives, and less scratch memory than the array takes."""
    assert jax.config.jax_threefry_partitionable and page.same and not page.moved
    assert page.in_pieces(page.key).sharding.is_equivalent_to(page.eighths, 2)
    memory = ms.memory(page.in_pieces.lower(page.key).compile())
    assert memory.temporaries < 512 * 512 * 4


@compiled_for_cpu
def test_the_older_form_moves_pieces_and_needs_more_memory_than_the_array(page):
    """Compiled for CPU: its values do not depend on the sharding either, and they are other ones."""
    now = page.uniform(page.key)
    with jax.threefry_partitionable(False):
        older = jax.jit(page.uniform, out_shardings=page.eighths).lower(page.key).compile()
        alone = page.uniform(page.key)
        np.testing.assert_array_equal(older(page.key), alone)
    assert ms.collectives(older, page.mesh).kinds == {"all-gather", "collective-permute"}
    assert ms.memory(older).temporaries > now.nbytes
    assert (now == alone).mean() < 1e-3


def test_in_the_older_form_numbers_depend_on_the_length_of_the_array(page):
    """The first four of four and of eight differ; in today's form they are the same."""

    def first_four():
        return [np.asarray(jax.random.uniform(page.key, (size,)))[:4] for size in (4, 8)]

    assert np.array_equal(*first_four())
    with jax.threefry_partitionable(False):
        assert not np.array_equal(*first_four())


@compiled_for_cpu
def test_gamma_agrees_when_to_stop(page):
    """Compiled for CPU: an all-reduce of one boolean."""

    def gamma(key):
        return jax.random.gamma(key, 2.0, (64, 64))

    program = jax.jit(gamma, out_shardings=page.eighths).lower(page.key).compile()
    votes = {(m.kind, m.dtype, m.payload_bytes) for m in ms.collectives(program, page.mesh)}
    assert votes == {("all-reduce", "bool", 1)}


# Uneven sizes


def test_inside_a_program_the_compiler_pads_to_pieces_of_three(page):
    """The sum of eleven pinned cosines is right."""
    right = np.cos(page.eleven).sum()
    np.testing.assert_allclose(jax.jit(page.pinned_total)(page.eleven), right, rtol=1e-5)
    assert "f32[3]" in jax.jit(page.pinned_total).lower(page.eleven).compile().as_text()


def test_returned_the_eleven_cosines_are_whole_on_every_device(page):
    """Although they were pinned in four parts."""
    shards = jax.jit(page.pinned)(page.eleven).addressable_shards
    assert [shard.data.shape for shard in shards] == [(11,)] * 8
    assert page.piece.data.shape == (11,)


def test_device_put_raises_for_an_uneven_argument(page):
    """The message has the parts and the size."""
    said = " ".join(attempt(jax.device_put, page.eleven, page.uneven).split())
    assert "partitioned 4 times" in said and "dimension size is 11" in said


def test_padding_is_masked(page):
    """Padded to twelve, a device has three; without the mask the sum is too large by cos(0) = 1."""
    right = np.cos(page.eleven).sum()
    masked = jnp.cos(page.padded).sum(where=page.real)
    np.testing.assert_allclose([masked, jnp.cos(page.padded).sum()], [right, right + 1], rtol=1e-5)
    assert {shard.data.shape for shard in page.padded.addressable_shards} == {(3,)}


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
