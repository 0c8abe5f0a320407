"""Messages about arrays and meshes: each program raises what its heading quotes; the fixes are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-meshes"
P = jax.P

RAISED = {
    "key-error-2": [
        "KeyError: np.int64(2)",
        "IndivisibleError: shape=",
        "is incompatible with mesh_shape",
    ],
    "multi-slice": ["`jax.make_mesh` does not support multi-slice topologies"],
}
SILENT = "no message, and sharded by"
BEFORE = {piece: ((0, 11, 2), SILENT) for piece in RAISED["key-error-2"]}
OLDER = {"indivisible": ["the global size of its dimension", "should be divisible by"]}


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug], BEFORE)


def test_with_numpy_1_the_bare_number_is_two(page):
    """The key of the KeyError is the number 2, so NumPy 1 writes `KeyError: 2`."""
    if jax.__version_info__ < (0, 11, 2):
        return  # silent
    with jax.set_mesh(page.mesh), pytest.raises(KeyError) as caught:
        jax.jit(lambda: page.ten_columns(None, "model"))()
    assert f"KeyError: {int(caught.value.args[0])}" == "KeyError: 2"


def test_flax_without_a_bias_meets_it_and_with_other_results_the_array_is_silently_whole(page):
    """One uneven kernel alone raises KeyError since 0.11.2; beside a bias, or before, it is whole."""

    def kernel(**options):
        metadata = {"out_sharding": (None, "model")}
        layer = nnx.Linear(64, 10, rngs=nnx.Rngs(0), kernel_metadata=metadata, **options)
        return nnx.state(layer)

    with jax.set_mesh(page.mesh):
        both = jax.jit(kernel)()
        alone = jax.jit(lambda: kernel(use_bias=False))
        if jax.__version_info__ >= (0, 11, 2):
            assert said(alone).startswith("KeyError: ")
        else:
            assert alone()["kernel"][...].sharding.is_fully_replicated
    assert both["kernel"][...].sharding.is_fully_replicated


def test_shard_shape_compares_sizes_and_twelve_columns_are_sharded(page):
    """It raises the clear message for ten columns; twelve come in pieces of three."""
    raised = said(page.by_columns.shard_shape, (64, 10))
    assert raised.startswith("IndivisibleError: ")
    assert "partitioned 4 times, but the dimension size is 10" in raised
    with jax.set_mesh(page.mesh):
        padded = jax.jit(
            lambda: jax.lax.with_sharding_constraint(jnp.ones((64, 12)), P(None, "model"))
        )()
    assert (
        padded.addressable_shards[0].data.shape == (64, 3) == page.by_columns.shard_shape((64, 12))
    )


def test_a_hybrid_mesh_keeps_one_axis_inside_a_node(page):
    """Each row of the grid holds the eight GPUs of one node, and each GPU stands once."""
    assert page.gpu_grid.shape == (2, 8)
    assert [{gpu.slice_index for gpu in row} for row in page.gpu_grid] == [{0}, {1}]
    assert {gpu.id for gpu in page.gpu_grid.flat} == set(range(16))


@pytest.mark.parametrize("slug", OLDER)
def test_older_words_stand_in_the_heading_and_are_raised_no_more(page, slug):
    """Arguments, results and device_put say today's words; the older ones are for the search."""
    today = "partitioned 4 times, but the dimension size is 10"
    assert quoted_in_headings(PAGE)[slug] == ["IndivisibleError", today, *OLDER[slug]]
    ten = np.arange(10.0)
    for function in (
        lambda: jax.device_put(ten, page.by_model),
        lambda: jax.jit(jnp.negative, in_shardings=page.by_model)(ten),
        lambda: jax.jit(jnp.negative, out_shardings=page.by_model)(ten),
    ):
        raised = said(function)
        assert today in raised and not any(piece in raised for piece in OLDER[slug])
