"""The page "Quick start": from one device to FSDP, in plain JAX and in Flax."""

import contextlib
import io
import re
from unittest import mock

import jax
import numpy as np
import pytest

from many_devices.compiled import stored_program
from pages import compiled_for_cpu, run

PAGE = "quickstart"
AUTO = (jax.sharding.AxisType.Auto,)
P = jax.P


def shardings_of(page):
    """(where, rows, number of pieces of a weight) of the three runs."""
    copies = jax.NamedSharding(page.mesh, P())
    return {
        "one device": (page.on_device_0, page.on_device_0, 1),
        "data parallel": (copies, page.sharded, 1),
        "fsdp": (page.sharded, page.sharded, page.n),
    }


def printed_by(page, where, rows):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        page.train(weights_at=where, batch_at=rows)
    *steps, shape = said.getvalue().splitlines()
    losses = [float(line.split()[-1]) for line in steps]
    return losses, [int(size) for size in re.findall(r"\d+", shape)]


def numpy_losses(weights, x_BD, y_BD, steps=4):
    """The same training in NumPy, with gradients written by hand."""
    w_DF, w_FD = weights["w_DF"], weights["w_FD"]
    losses = []
    for _ in range(steps):
        h_BF = np.maximum(x_BD @ w_DF, 0)
        error_BD = h_BF @ w_FD - y_BD
        losses.append((error_BD**2).mean())
        gradient_BD = 2 * error_BD / error_BD.size
        gradient_BF = (gradient_BD @ w_FD.T) * (h_BF > 0)
        w_DF, w_FD = w_DF - x_BD.T @ gradient_BF, w_FD - h_BF.T @ gradient_BD
    return losses


# The three runs


def test_all_three_runs_train_as_numpy(page):
    """The losses of each run are those of NumPy, to rounding, and they fall."""
    truth = numpy_losses(page.start, page.x_BD, np.sort(page.x_BD))
    rtol = 1e-4 if jax.default_backend() == "cpu" else 0.05  # TF32 or bfloat16
    for where, rows, _ in shardings_of(page).values():
        losses, _ = printed_by(page, where, rows)
        np.testing.assert_allclose(losses, truth, rtol=rtol)
    assert truth[-1] < 0.6 * truth[0]


def test_what_a_device_holds_of_w_df(page):
    """All 96 rows on one device and in data parallelism; 12 of them with FSDP."""
    for where, rows, pieces in shardings_of(page).values():
        _, shape = printed_by(page, where, rows)
        assert shape == [page.D // pieces, 4 * page.D]


def test_the_page_prints_whole_weights_twice_and_then_pieces(capsys):
    """The cells of the page themselves run one device, copies and pieces, in this order."""
    capsys.readouterr()
    with run(PAGE, until="fsdp") as page:
        shapes = re.findall(r"w_DF on each device: \((\d+), (\d+)\)", capsys.readouterr().out)
        whole, piece = (page.D, 4 * page.D), (page.D // page.n, 4 * page.D)
    assert [tuple(map(int, shape)) for shape in shapes] == [whole, whole, piece]


def test_a_device_has_its_own_64_examples(page):
    """The batch has 64 examples for each device, 512 on eight."""
    batch = jax.device_put(page.x_BD, page.sharded)
    assert {shard.data.shape[0] for shard in batch.addressable_shards} == {64}
    assert page.n != 8 or page.x_BD.shape == (512, 96)


def test_the_bytes_that_fsdp_saves(page):
    """For both weights a device stores 36,864 bytes of float32 instead of 294,912."""
    stored = [
        sum(4 * array.size // pieces for array in page.start.values()) for pieces in (1, page.n)
    ]
    assert page.n != 8 or stored == [294_912, 36_864]


# What moves


def row_of(count):
    """A mesh of so many devices in one row, and the sharding of rows over it."""
    mesh = jax.make_mesh((count,), ("data",), axis_types=AUTO, devices=jax.devices()[:count])
    return jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data"))


def text_of(page, where, rows, examples, function):
    """The text of the compiled program of one step, with so many examples for each device."""
    weights = {
        name: jax.ShapeDtypeStruct(array.shape, "float32", sharding=where)
        for name, array in page.start.items()
    }
    shape = examples * rows.mesh.size, page.D
    x_BD = jax.ShapeDtypeStruct(shape, "float32", sharding=rows)
    jitted = jax.jit(function, static_argnums=3, out_shardings=(where, None))
    return jitted.lower(weights, x_BD, x_BD, rows).compile().as_text()


def moved(*inputs):
    """{kind: shapes of the results} of the communication in text_of(*inputs)."""
    found = {}
    for line in text_of(*inputs).splitlines():
        if hit := re.search(r" = (.*?) (all-\w+|reduce-s\w+|collective-\w+)\(", line):
            found.setdefault(hit[2], set()).update(re.findall(r"\[([\d,]*)\]", hit[1]))
    return found


def without_constraint(page):
    def step(*inputs):
        with mock.patch.object(jax.lax, "with_sharding_constraint", lambda x, rows: x):
            return page.step(*inputs)

    return step


WEIGHTS = {"96,384", "384,96"}


@compiled_for_cpu
def test_both_strategies_sum_gradients_and_fsdp_alone_gathers_weights(page):
    """With the constraint, on 2, 3 or 8 devices and for 1, 8 or 64 examples on each."""
    summed = {"all-reduce": WEIGHTS | {""}}  # two gradients, and the loss
    for count, examples in [(2, 1), (2, 64), (3, 8), (8, 1), (8, 8), (8, 64)]:
        copies, rows = row_of(count)
        assert moved(page, copies, rows, examples, page.step) == summed
        fsdp = moved(page, rows, rows, examples, page.step)
        assert fsdp == summed | {"all-gather": WEIGHTS}


@compiled_for_cpu
def test_without_the_constraint_64_examples_move_only_weights(page):
    """At this page's batch the CPU compiler gathers only weights anyway."""
    _, rows = row_of(8)
    assert moved(page, rows, rows, 64, without_constraint(page))["all-gather"] == WEIGHTS


@compiled_for_cpu
def test_without_the_constraint_8_examples_move_activations(page):
    """With 8 examples for each device it also gathers, in the backward pass, an array as large as
    the whole batch."""
    _, rows = row_of(8)
    loose = moved(page, rows, rows, 8, without_constraint(page))
    assert loose["all-gather"] == WEIGHTS | {"64,96"} and (8 * 8, page.D) == (64, 96)
    lines = text_of(page, rows, rows, 8, without_constraint(page)).splitlines()
    late = [line for line in lines if re.search(r"\[64,96\]\S* all-gather\(", line)]
    assert late and all("transpose(jvp" in line for line in late)


def test_chapter_4_has_the_cost_for_h100_and_tpu():
    """The page sends its readers there for it: without constraints 1,024 rows send over five times
    as much."""
    for compiler in ("gpu", "tpu"):
        pinned, loose = (
            sum(row["wire"] for row in stored_program(name)[compiler]["moves"])
            for name in ("train-fsdp-1024", "train-loose-1024")
        )
        assert loose > 5 * pinned


# The Flax model


def test_the_flax_model_learns(page):
    """Its loss falls, and the optimizer counts four steps."""
    first = page.flax_loss_of(page.MLP(page.nnx.Rngs(0)), page.x_BD, np.sort(page.x_BD))
    assert page.loss < 0.6 * first and page.optimizer.step[...] == 4


def test_adams_moments_are_where_the_weights_are(page):
    """Weights, biases and both moments are sharded along their first dimension, in n pieces."""
    moments = page.optimizer.opt_state[0]
    weights = jax.tree.leaves(page.model)
    assert len(weights) == 4
    for of_all in (moments.mu, moments.nu):
        for weight, moment in zip(weights, jax.tree.leaves(of_all), strict=True):
            assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)
    for weight in weights:
        assert weight.addressable_shards[0].data.shape[0] == weight.shape[0] // page.n


@pytest.mark.parametrize("counter", ["of adam", "of flax"])
def test_the_two_counters_are_whole(page, counter):
    """Each device has full copies of the two step counters."""
    value = page.optimizer.opt_state[0].count if counter == "of adam" else page.optimizer.step
    assert value[...].sharding.is_fully_replicated
    assert len(value[...].sharding.device_set) == page.n


def test_the_bytes_of_the_flax_model(page):
    """Each device holds one eighth of 3 x 296,832 bytes, and 8 bytes of counters."""
    weights = 4 * (2 * page.D * 4 * page.D + 5 * page.D)
    assert page.n != 8 or weights == 296_832
    assert page.held == 3 * weights // page.n + 8
    assert sum(array.nbytes for array in page.arrays) == 3 * weights + 8


def test_an_optimizer_made_from_a_placed_model_has_its_moments_there(page):
    """An Adam optimizer that is made from a placed model keeps its moments where the weights are."""
    model = jax.device_put(page.MLP(page.nnx.Rngs(0)), page.sharded)
    optimizer = page.nnx.Optimizer(model, page.optax.adam(1e-3), wrt=page.nnx.Param)
    for of_all in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        for weight, moment in zip(jax.tree.leaves(model), jax.tree.leaves(of_all), strict=True):
            assert moment.sharding.is_equivalent_to(page.sharded, weight.ndim)


def test_a_forgotten_optimizer_still_lowers_the_loss(page):
    """What the step does not return is lost, and the loss falls all the same."""

    @jax.jit
    def forgetful(model, optimizer, x_BD, y_BD):
        model, _, loss = page.flax_step(model, optimizer, x_BD, y_BD)
        return model, loss

    model = page.MLP(page.nnx.Rngs(0))
    optimizer = page.nnx.Optimizer(model, page.optax.adam(1e-3), wrt=page.nnx.Param)
    losses = []
    for _ in range(4):
        model, loss = forgetful(model, optimizer, page.x_BD, np.sort(page.x_BD))
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and optimizer.step[...] == 0


def test_out_shardings_tell_that_the_optimizer_is_missing(page):
    """With the page's out_shardings, a step that does not return the optimizer raises an error."""

    def forgetful(model, optimizer, x_BD, y_BD):
        model, _, loss = page.flax_step(model, optimizer, x_BD, y_BD)
        return model, loss

    run = jax.jit(forgetful, out_shardings=(*page.shardings, None))
    with pytest.raises(ValueError, match="out_shardings"):
        run(page.model, page.optimizer, *page.batch)
