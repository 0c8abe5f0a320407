"""Chapter 9, "FSDP by hand with shard_map"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshscope as ms
from compared import assert_same
from layers_of_fsdp import large_weights
from many_devices.stacked import large
from pages import check_exercise, compiled_for_cpu, exercises_of
from traced import kept_for_backward

PAGE = "09-fsdp"
P = jax.P


def payloads(moved):
    return sorted((row.kind, row.payload_bytes) for row in moved)


# What data parallelism stores eight times


@pytest.mark.parametrize("spec, bytes_per_weight", [(P(), 16), (P(None, "data"), 2)])
def test_adam_takes_16_bytes_a_weight_as_copies_and_2_as_pieces(page, spec, bytes_per_weight):
    """With Adam, real arrays take 16 bytes a weight as copies, 2 as pieces on eight devices."""
    array = jax.device_put(jnp.zeros((64, 96)), jax.NamedSharding(page.mesh, spec))
    adam, _ = optax.adam(1e-3).init(array)
    four = [array, jnp.zeros_like(array), adam.mu, adam.nu]
    assert ms.memory(four).bytes_per_device == bytes_per_weight * array.size


def test_the_large_model_takes_68_7_gb_as_copies_and_8_6_as_pieces(page):
    """4.3 billion weights: 68.7 GB on each device as copies, 8.6 GB as pieces."""

    def gigabytes(spec):
        sharding = jax.NamedSharding(page.mesh, spec)
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            large_weights(),
        )
        return 4 * ms.memory(placed).bytes_per_device / 1e9

    copies, pieces = gigabytes(P()), gigabytes(P(None, "data"))
    count = sum(leaf.size for leaf in jax.tree.leaves(large_weights()))
    assert copies == 16 * count / 1e9 and pieces == copies / 8
    assert (f"{copies:.1f}", f"{pieces:.1f}") == ("68.7", "8.6")
    assert f"{count / 1e9:.1f}" == f"{2 * large.L * large.D * large.F / 1e9:.1f}" == "4.3"


# Inside shard_map


def on_eight(page, function):
    return jax.shard_map(function, mesh=page.mesh, in_specs=P("data"), out_specs=P("data"))


def scattered_sum(row_block):
    return jax.lax.psum_scatter(row_block[0], "data", tiled=True)


def test_each_device_adds_up_its_block_and_psum_adds_up_the_blocks(page):
    """Eight sums of two numbers each, and one sum of all sixteen, which every device has."""
    sixteen = np.arange(16)
    assert np.array_equal(page.block_sums(sixteen), sixteen.reshape(8, 2).sum(axis=1))
    found = page.total(sixteen)
    assert found == 120 and found.sharding.is_fully_replicated


def test_the_collectives_compute_what_numpy_does(page):
    """all_gather, psum, pmean and psum_scatter give what NumPy gives."""
    numbers = np.arange(8)
    gathered = on_eight(page, partial(jax.lax.all_gather, axis_name="data", axis=0, tiled=True))
    assert np.array_equal(gathered(numbers).reshape(8, 8), np.tile(numbers, (8, 1)))
    position = on_eight(page, lambda x_block: jax.lax.axis_index("data") + 0 * x_block)
    assert np.array_equal(position(numbers), numbers)
    summed = on_eight(page, lambda x_block: jax.lax.psum(x_block, "data"))
    assert np.array_equal(summed(numbers), np.full(8, numbers.sum()))
    averaged = on_eight(page, lambda x_block: jax.lax.pmean(x_block, "data"))
    assert np.array_equal(averaged(numbers), np.full(8, numbers.mean()))
    rows = 10 * np.arange(8)[:, None] + np.arange(8)  # as in the drawing; a row is a device
    assert np.array_equal(on_eight(page, scattered_sum)(rows), rows.sum(axis=0))


def test_without_tiled_the_blocks_are_stacked(page):
    """Without tiled=True, all_gather puts the blocks along a new dimension."""

    stacked = on_eight(page, lambda x_block: jax.lax.all_gather(x_block, "data", axis=0))
    assert stacked(np.arange(8)).shape == (64, 1)


# Data parallelism


def test_the_gradient_of_data_parallelism_is_right(page):
    """The mean inside the loss gives the gradient of one device, in every number."""
    assert_same(page.ddp_gradient, page.true_gradient)


def test_averaged_afterwards_it_is_eight_times_as_large(page):
    """pmean of the gradient, instead of the loss, gives eight times the gradient."""

    @jax.shard_map(mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P())
    def average_afterwards(w_DF, batch_block):
        return jax.lax.pmean(jax.grad(page.error_of)(w_DF, batch_block), "data")

    assert_same(average_afterwards(page.w_DF, page.batch), 8 * page.true_gradient)


def test_with_the_check_off_neither_gradient_is_right(page):
    """With check_vma=False no sum is inserted: FSDP's is eight times as large, and DDP's one device's."""
    off = dict(mesh=page.mesh, check_vma=False)
    fsdp = jax.shard_map(
        jax.grad(page.fsdp_mean_error),
        in_specs=(page.by_rows, P("data")),
        out_specs=page.by_rows,
        **off,
    )
    assert_same(fsdp(page.w_pieces_DF, page.batch), 8 * page.true_gradient)
    ddp = jax.shard_map(jax.grad(page.mean_error), in_specs=(P(), P("data")), out_specs=P(), **off)
    first = [block[:8] for block in page.batch]
    own = ddp(page.w_DF, page.batch).addressable_data(0)
    assert_same(own, jax.grad(page.error_of)(page.w_DF, first))
    assert not np.allclose(own, page.true_gradient, atol=1e-4)


@compiled_for_cpu
def test_data_parallelism_moves_all_reduces_only(page):
    """JAX writes an all-reduce for the gradient."""
    program = jax.jit(page.ddp).lower(page.w_DF, page.batch).compile()
    moved = ms.collectives(program, page.mesh)
    assert payloads(moved) == [("all-reduce", page.w_DF.nbytes)]


# FSDP


def test_the_gradient_of_fsdp_is_right_and_in_pieces(page):
    """FSDP gives the gradient of one device, in every number, sharded as the weight is."""
    assert_same(page.fsdp_gradient, page.true_gradient)
    for array in (page.fsdp_gradient, page.w_pieces_DF):
        assert array.addressable_shards[3].data.shape == (4, 16)


def test_the_backward_pass_of_one_matrix_does_not_need_it_whole(page):
    """As drawn: of the gathered matrix, nothing is kept after the forward pass."""
    specs = page.by_rows, P("data")
    kept = kept_for_backward(page.fsdp_mean_error, page.w_DF, page.batch, page.mesh, specs)
    assert kept and page.w_DF.shape not in kept


FSDP_MOVES = [
    ("all-gather", 2_048),
    ("reduce-scatter", 2_048),
]


@compiled_for_cpu
def test_fsdp_moves_a_gather_and_a_scatter(page):
    """An all-gather of the matrix and a reduce-scatter of its gradient, and no all-reduce."""
    assert payloads(page.moved) == FSDP_MOVES
    assert [row.wire_bytes for row in page.moved] == [1_792, 1_792]


def test_averaged_afterwards_fsdp_is_wrong_too(page):
    """The mean after the gradient: each piece becomes the same sum of all eight pieces."""

    def late(w_block_DF, batch_block):
        def error(w_block_DF):
            w_DF = jax.lax.all_gather(w_block_DF, "data", axis=0, tiled=True)
            return page.error_of(w_DF, batch_block)

        return jax.lax.pmean(jax.grad(error)(w_block_DF), "data")

    specs = dict(in_specs=(page.by_rows, P("data")), out_specs=P())
    averaged = jax.jit(jax.shard_map(late, mesh=page.mesh, **specs))(page.w_pieces_DF, page.batch)
    pieces_of_truth = np.reshape(page.true_gradient, (8, 4, 16))
    np.testing.assert_allclose(averaged, pieces_of_truth.sum(axis=0), rtol=1e-4, atol=1e-6)


def test_any_dimension_gives_the_same_gradient_and_moves_the_same(page):
    """Sharded by columns, the gradient is the same, and as many bytes move."""
    columns = P(None, "data")
    specs = dict(in_specs=(columns, P("data")), out_specs=columns)
    mapped = jax.jit(jax.shard_map(jax.grad(page.answer_columns), mesh=page.mesh, **specs))
    assert_same(mapped(page.w_DF, page.batch), page.true_gradient)
    program = mapped.lower(page.w_DF, page.batch).compile()
    assert payloads(ms.collectives(program, page.mesh)) == FSDP_MOVES


# Training


def test_fifty_steps_give_the_matrix_of_one_device(page):
    """Both strategies end with the matrix, and the error, of one device; FSDP stores an eighth."""
    wanted = page.w_DF
    gradient_of = jax.jit(jax.grad(page.error_of))
    for _ in range(50):
        wanted = wanted - 2.0 * gradient_of(wanted, page.batch)
    error = page.error_of(wanted, page.batch)
    assert error < page.error_of(page.w_DF, page.batch) / 10
    for trained in page.trained.values():
        assert_same(trained, wanted, rtol=1e-2, atol=1e-4)  # fifty steps of rounding
        assert float(page.error_of(trained, page.batch)) == pytest.approx(float(error), rel=1e-3)
    held = {name: ms.memory(trained).bytes_per_device for name, trained in page.trained.items()}
    assert held == {"DDP": 2_048, "FSDP": 256}


@compiled_for_cpu
def test_each_step_takes_pieces_and_makes_pieces(page):
    """Between the steps the matrix is in eight pieces: one step gathers it once, for the gradient."""
    step = jax.jit(lambda w_DF: w_DF - 2.0 * page.fsdp(w_DF, page.batch))
    assert step(page.w_pieces_DF).sharding.spec == page.by_rows
    moved = ms.collectives(step.lower(page.w_pieces_DF).compile(), page.mesh)
    assert payloads(moved) == FSDP_MOVES


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
