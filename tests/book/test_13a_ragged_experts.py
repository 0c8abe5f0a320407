"""The page "Experts without padding", and what other compilers make of its program."""

import contextlib
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lax import parallel

from compared import assert_same
from many_devices.compiled import stored_program
from many_devices.experts import specs
from pages import compiled_for_cpu

PAGE = "13a-ragged-experts"
P = jax.P


# One exchange


def test_the_offsets_of_three_devices(page):
    """Rows lie one after another, by receiver on the sender, and by sender on the receiver."""
    sizes = np.array(page.after("starts").sizes)
    for sender in range(3):
        for receiver in range(3):
            assert page.on_sender[sender, receiver] == sum(sizes[sender, :receiver])
            assert page.on_receiver[sender, receiver] == sum(sizes[:sender, receiver])


def test_what_device_1_passes(page):
    """The numbers of the answer."""
    assert page.on_sender[1].tolist() == [0, 1, 1] and page.sizes[1].tolist() == [1, 0, 3]
    assert page.on_receiver[1].tolist() == [2, 1, 0] and page.sizes[:, 1].tolist() == [1, 0, 2]


def test_the_example_arrives_as_drawn_and_returns(page):
    """On three devices, rows arrive ordered by sender; with the roles exchanged they come back."""
    three = jax.make_mesh((3,), ("expert",), axis_types=page.auto, devices=jax.devices()[:3])
    totals = page.sizes.sum(1)
    rows = np.full((3, 4), -1)
    for sender in range(3):
        receivers = np.repeat(np.arange(3), page.sizes[sender])
        rows[sender, : totals[sender]] = 10 * sender + receivers

    def there_and_back(row):
        here = jax.lax.axis_index("expert")
        sizes, on_sender, on_receiver = page.sizes, page.on_sender, page.on_receiver
        numbers = on_sender[here], sizes[here], on_receiver[here], sizes[:, here]
        returning = on_receiver[:, here], sizes[:, here], on_sender[:, here], sizes[here]
        empty = jnp.full_like(row[0], -1)
        arrived = page.gathered_exchange(row[0], empty, *numbers, axis_name="expert")
        back = page.gathered_exchange(arrived, empty, *returning, axis_name="expert")
        return arrived[None], back[None]

    spec = P("expert")
    arrived, back = jax.shard_map(there_and_back, mesh=three, in_specs=spec, out_specs=spec)(rows)
    assert np.array_equal(arrived, [[0, 0, 10, -1], [1, 21, 21, -1], [12, 12, 12, 22]])
    assert np.array_equal(back, rows)


def test_the_substitute_returns_what_ragged_all_to_all_is_defined_to(page):
    """Rows of random numbers from each device to each other, to the places they are told."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4, (8, 8))  # (from, to)
    rows = rng.normal(size=(8, 32, 2)).astype("float32")
    input_offsets = np.cumsum(sizes, 1) - sizes
    output_offsets = np.cumsum(sizes, 0) - sizes
    expected = np.full((8, 32, 2), -1, "float32")
    for source in range(8):
        for to in range(8):
            for n in range(sizes[source, to]):
                place = output_offsets[source, to] + n
                expected[to, place] = rows[source, input_offsets[source, to] + n]

    def exchange(*operands):
        rows, output, *numbers = (operand[0] for operand in operands)
        return page.gathered_exchange(rows, output, *numbers, axis_name="expert")[None]

    mapped = jax.shard_map(
        exchange, mesh=page.mesh, in_specs=6 * (P("expert"),), out_specs=P("expert")
    )
    output = np.full((8, 32, 2), -1, "float32")
    found = mapped(rows, output, input_offsets, sizes, output_offsets, sizes.T)
    assert np.array_equal(found, expected)


def test_the_ragged_layer_is_the_dense_one(page):
    """Nothing is padded or dropped: loss and gradients are those of the dense program."""
    assert_same(page.ragged_loss, page.dense_loss, rtol=1e-6)
    assert_same(page.ragged_gradient, page.dense_gradient)


@contextlib.contextmanager
def ragged_on_cpu(page):
    """While it lasts, XLA's ragged exchange is replaced by the page's substitute, on CPU.

    JAX's own rules for types and gradients of ragged_all_to_all stay as they are.
    """

    def substitute(*operands, axis_name, axis_index_groups):
        return page.gathered_exchange(*operands, axis_name=axis_name)

    lowered = mlir.lower_fun(substitute, multiple_results=False)
    with mock.patch.dict(mlir._platform_specific_lowerings["cpu"]):
        mlir.register_lowering(parallel.ragged_all_to_all_p, lowered, platform="cpu")
        yield


def test_jax_differentiates_the_ragged_exchange_as_the_dense_program(page):
    """With the rules of jax.lax.ragged_all_to_all itself, loss and gradients are the dense ones."""
    with ragged_on_cpu(page):
        program = page.program_on(page.mesh, page.ragged_mixture)
        (loss, _), gradient = program(page.params, page.batch)
    assert_same(loss, page.dense_loss, rtol=1e-6)
    assert_same(gradient, page.dense_gradient)


def test_with_plain_zeros_to_receive_rows_gradients_are_summed_over_devices(page):
    """The result has the type of `output`; of plain zeros, the loss is right and gradients are not."""

    def plain(rows, output, *numbers, axis_name):
        zeros = jnp.zeros(output.shape, output.dtype)
        received = jax.lax.ragged_all_to_all(rows, zeros, *numbers, axis_name=axis_name)
        assert "expert" in str(jax.typeof(output)) and "expert" in str(jax.typeof(rows))
        assert "expert" not in str(jax.typeof(received))
        return received

    with ragged_on_cpu(page):
        program = page.program_on(page.mesh, partial(page.ragged_mixture, exchange=plain))
        (loss, _), gradient = program(page.params, page.batch)
    assert_same(loss, page.dense_loss, rtol=1e-6)
    norms = {name: jnp.linalg.norm(array) for name, array in gradient.items()}
    for name, wrong in (("in_ID", True), ("up_EDF", True), ("down_EFD", True), ("out_DV", False)):
        assert (norms[name] > 2 * jnp.linalg.norm(page.dense_gradient[name])) == wrong


def test_the_room_is_needed_where_all_tokens_go_to_one_expert(page):
    """A router that sends every first choice to expert 3 fills 512 rows there; still equal."""
    first = jnp.zeros((64, 32)).at[:, 0].set(jnp.linspace(1, 2, 64))
    x_BD = jnp.tile(first, (8, 1)) + 0.1 * page.x_BD.at[:, 0].set(0)
    one_way = page.params | {"router_DE": page.params["router_DE"].at[0, 3].set(50.0)}
    expected, *_ = page.dense_mixture(one_way, x_BD)

    def layer(params, x_block_BD):
        layer = partial(page.ragged_mixture, exchange=page.gathered_exchange)
        return layer(params, x_block_BD, ("expert",))[0]

    mapped = dict(in_specs=(specs, P("expert")), out_specs=P("expert"))
    found = jax.jit(jax.shard_map(layer, mesh=page.mesh, **mapped))(one_way, x_BD)
    _, _, experts_BR = page.route(x_BD, one_way["router_DE"])
    assert np.sum(experts_BR == 3) == 512 == 4 * 512 * 2 // 8  # four times a balanced load
    assert_same(found, expected, rtol=1e-3, atol=1e-5)


def test_the_ragged_layer_wants_one_expert_on_each_device(page):
    """On two by four devices, with two experts on each, it raises an error."""
    grid = jax.make_mesh((2, 4), ("data", "expert"), axis_types=page.auto * 2)
    layer = partial(page.ragged_mixture, exchange=page.gathered_exchange)
    with pytest.raises(AssertionError, match="one expert on each device"):
        page.program_on(grid, layer)(page.params, page.batch)


def test_with_two_experts_on_a_device_the_loss_would_be_wrong(page):
    """Without the check, on two by four devices, the loss is another than the dense one."""
    grid = jax.make_mesh((2, 4), ("data", "expert"), axis_types=page.auto * 2)
    layer = partial(page.ragged_mixture, exchange=page.gathered_exchange)
    with mock.patch.object(jax.lax, "axis_size", return_value=8):
        (loss, _), _ = page.program_on(grid, layer)(page.params, page.batch)
    assert abs(loss - page.dense_loss) > 1e-3


def test_ragged_sends_about_a_quarter(page):
    """A route whose expert is elsewhere is 128 bytes; padded with factor 4, about four times."""
    elsewhere = np.ravel(page.experts_BR) != np.arange(1_024) // 128
    expected = 32 * 4 * elsewhere.reshape(8, 128).sum(axis=1)
    assert np.array_equal(page.for_others * 32 * 4, expected)
    assert np.all((57_344 / expected > 3.5) & (57_344 / expected < 5))


@pytest.mark.parametrize("compiler", ["tpu", "gpu"])
def test_other_compilers_keep_four_ragged_exchanges(compiler):
    """Two forward, two backward; else lengths and offsets travel, and sums of what is replicated."""
    moves = stored_program(f"experts-ragged-{compiler}")[compiler]["moves"]
    ragged = [row for row in moves if row["kind"] == "ragged-all-to-all"]
    assert sum(row["executions"] for row in ragged) == 4
    numbers = [row for row in moves if row["dtype"] == "int32"]
    sums = [row for row in moves if row["kind"] == "all-reduce" and row["dtype"] == "float32"]
    assert len(moves) == len(ragged) + len(numbers) + len(sums)
    assert sum(row["payload"] for row in numbers) <= 4 * 8 * 4 + 8 * 8 * 4 + 4


@compiled_for_cpu
def test_the_cpu_compiler_has_no_ragged_exchange(page):
    """On simulated devices the real exchange raises an error."""
    program = page.program_on(page.mesh, page.ragged_mixture)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ragged-all-to-all"):
        program.lower(page.params, page.batch).compile()
