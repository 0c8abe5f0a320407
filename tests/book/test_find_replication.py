"""The page "Find the line that replicated"."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from pages import compiled_for_cpu

PAGE = "find-replication"
P = jax.P
COMPILERS = ["cpu", "tpu", "gpu"]


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def kinds_of(function, *spec):
    mesh = mesh_of(AxisType.Auto)
    x = jax.ShapeDtypeStruct((512, 1024), "float32", sharding=jax.NamedSharding(mesh, P(*spec)))
    return ms.collectives(jax.jit(function).lower(x).compile(), mesh).kinds


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
