"""The page "Check a training run": two silent failures, the gathers, metrics and the clock."""

import pathlib
import tempfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import meshscope as ms
from many_devices import data, training
from many_devices.compiled import stored_program
from many_devices.stacked import loss_of, pinned
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "04a-train-checks"
AUTO = jax.sharding.AxisType.Auto


# The counter


def go_on(page, step, model, optimizer, steps):
    """As many steps of a run that begins with this model and optimizer: the optimizer and losses."""
    losses = []
    with jax.set_mesh(page.mesh):
        for rows in page.shuffled(7)[:steps]:
            batch = page.batch_of(rows, page.mesh)
            model, *changed, loss = step(model, optimizer, batch)
            (optimizer,) = changed or (optimizer,)  # not returned: the one that was given
            losses.append(float(loss))
    return optimizer, losses


def restored(page):
    """Model and optimizer as a checkpoint would give them back: copies, the counter as it was."""
    trained = page.after("counter")
    return jax.tree.map(lambda array: array + 0, (trained.model, trained.optimizer))


def test_the_counter_grows_by_the_steps_of_a_run_that_goes_on(page):
    """In a run that goes on from a checkpoint the counter grows by its steps, and is not their number."""
    model, optimizer = restored(page)
    before = int(optimizer.step[...])
    assert before > 0
    optimizer, losses = go_on(page, jax.jit(page.step), model, optimizer, 3)
    assert optimizer.step[...] - before == len(losses)
    assert optimizer.step[...] != len(losses)  # what fails in every resumed run


def test_an_optimizer_that_nobody_returned_does_not_count(page):
    """If nobody returns the optimizer, the counter does not grow, in a run that goes on either."""
    model, optimizer = restored(page)
    before = int(optimizer.step[...])
    optimizer, losses = go_on(page, page.forgetful_step, model, optimizer, 3)
    assert optimizer.step[...] - before == 0 < len(losses)


def test_the_loss_falls_with_no_step_counted(page):
    """Without the optimizer the loss falls, though not as low, and moments and counter stay at zero."""
    losses, forgetful = page.losses, page.losses_forgetful
    assert np.mean(forgetful[-23:]) < 0.5 < np.log(10)
    assert np.mean(forgetful[-23:]) > 1.5 * np.mean(losses[-23:])
    assert page.untouched.step[...] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(page.untouched.opt_state[0].mu))
    assert page.after("counter").optimizer.step[...] == len(losses) == 69


def test_a_first_step_of_adam_goes_by_the_sign_of_the_gradient(page):
    """It moves every weight by one learning rate against the sign of its gradient."""
    gradient = jnp.asarray([0.3, -2.0, 1e-4])
    update, _ = page.adamw.update(gradient, page.adamw.init(gradient), 0 * gradient)
    np.testing.assert_allclose(update, -1e-3 * jnp.sign(gradient), rtol=1e-3)


def test_nnx_jit_carries_the_changes_back(page):
    """Under nnx.jit the optimizer counts its step although nothing but the loss is returned."""
    assert page.counted.step[...] == 1 and np.any(page.counted.opt_state[0].mu.kernel)


def test_a_forgotten_model_never_changes(page):
    """If the model is not returned, the loss of a given batch stays as it is."""
    model, optimizer = training.place(page.data_parallel)
    batch = page.batch_of(np.arange(64), page.mesh)

    @jax.jit
    def forgetful(model, optimizer, batch):
        _, optimizer, loss = page.step(model, optimizer, batch)
        return optimizer, loss

    losses = []
    with jax.set_mesh(page.mesh):
        for _ in range(3):
            optimizer, loss = forgetful(model, optimizer, batch)
            losses.append(float(loss))
    assert len(set(losses)) == 1 and optimizer.step[...] == 3


def test_with_a_learning_rate_that_rises_from_0_a_forgotten_optimizer_trains_nothing():
    """Every step is step 0, so its learning rate is 0."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=10, decay_steps=100)
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    x_BI = jnp.ones((8, 4))

    @jax.jit
    def forgetful(model, optimizer):
        gradients = nnx.grad(lambda model: (model(x_BI) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return model

    first = np.asarray(model.kernel)
    for _ in range(3):
        model = forgetful(model, optimizer)
    np.testing.assert_array_equal(model.kernel, first)


# FSDP that became tensor parallelism


@compiled_for_cpu
def test_with_constraints_all_kernels_are_gathered_and_nothing_else(page):
    """The model has four kinds of kernel, and FSDP with constraints gathers exactly these."""
    tiny = page.tiny
    assert (tiny.D, tiny.D // 8, tiny.F) == (96, 12, 384)  # features, a device's, hidden
    ways = [tiny.I, tiny.D, tiny.F, tiny.D, tiny.V]  # into the blocks, through them, out
    assert page.kernels == set(zip(ways[:-1], ways[1:]))
    rows = ms.collectives(page.trained.program)
    assert {row.shape for row in rows if row.kind == "all-gather"} == page.kernels


@compiled_for_cpu
def test_without_constraints_no_kernel_is_gathered_and_rows_of_the_batch_move(page):
    """At 64 rows none of four kinds; what moves in their place has all rows of the batch."""
    assert not page.kernels_gathered(page.loose.program)
    table = ms.collectives(page.loose.program)
    large = [row for row in table if row.payload_bytes > 4 * 96 * 96]
    assert large and all(64 in row.shape for row in large)


def test_without_constraints_losses_and_stored_weights_are_the_same(page):
    """The losses agree, and every weight is stored in the same pieces."""
    np.testing.assert_allclose(page.loose.losses, page.trained.losses, rtol=1e-5)
    in_pieces = ms.memory(page.trained.model).bytes_per_device
    assert ms.memory(page.loose.model).bytes_per_device == in_pieces


@compiled_for_cpu
def test_without_constraints_devices_add_up_parts_of_all_rows(page):
    """In the scan an all-reduce has all rows and all hidden units, from pieces of D."""
    program = page.step_program(page.tiny, replace(page.fsdp, pin=False), 1024)
    assert not page.kernels_gathered(program) & page.in_blocks
    inside = [row for row in ms.collectives(program) if row.inside_loop]
    added = {row.shape for row in inside if row.kind == "all-reduce"}
    assert (1024, page.tiny.F) in added


@compiled_for_cpu
def test_how_the_bytes_grow_with_the_batch(page):
    """With constraints they do not. Without, less at 64 rows, more at 256, over five times as much
    at 1,024."""
    pinned_mb = page.sent_mb(page.trained.program)
    ratios = {}
    for B in (64, 256, 1024):
        assert page.sent_mb(page.step_program(page.tiny, page.fsdp, B)) == pinned_mb
        loose = page.step_program(page.tiny, replace(page.fsdp, pin=False), B)
        ratios[B] = page.sent_mb(loose) / pinned_mb
    assert ratios[64] < 1 < ratios[256] and ratios[1024] > 5
    assert 15 < ratios[1024] / ratios[64] < 17  # sixteen times the rows


def sent(name, compiler):
    """What the stored program sends, in bytes."""
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"])


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_what_fsdp_without_constraints_costs(compiler):
    """With constraints the batch does not matter. Without, 64 rows send less and 1,024 rows more
    than five times as much."""
    pinned, more_pinned = sent("train-fsdp", compiler), sent("train-fsdp-1024", compiler)
    assert pinned == more_pinned
    assert sent("train-loose", compiler) < pinned
    assert sent("train-loose-1024", compiler) > 5 * more_pinned
    assert 15 < sent("train-loose-1024", compiler) / sent("train-loose", compiler) < 18


@compiled_for_cpu
def test_without_a_scan_a_larger_batch_makes_weights_move(page):
    """Written out one after another, at 64 rows no kernel of a block is gathered, at 1,024 all."""
    assert page.turns == {64: set(), 1024: page.in_blocks}


def test_the_layers_written_out_compute_what_the_scan_computes(page):
    strategy = replace(page.fsdp, pin=False)
    images_BI = data.images_BI[:64]
    with jax.set_mesh(page.fsdp.mesh()):
        model, _ = page.make_written_out(page.tiny, strategy)
        logits_BV = jax.jit(page.WrittenOut.__call__)(model, images_BI)
        by_scan_BV = jax.jit(page.Model.__call__)(model, images_BI)
    np.testing.assert_allclose(logits_BV, by_scan_BV, atol=1e-4)


# FSDP in a scan gathers the blocks twice


def written_out(page):
    """What makes the page's model with its blocks one after another, each with its pin."""

    class WrittenOut(page.Model):
        def __call__(self, x_BI):
            def layer(x_BD, block):
                return pinned(block(x_BD), self.strategy)

            x_BD = pinned(x_BI @ self.w_ID, self.strategy)
            for number in range(page.tiny.L):
                block = jax.tree.map(lambda w, i=number: w[i], self.blocks)
                x_BD = self.strategy.remat(layer)(x_BD, block)
            return pinned(x_BD @ self.w_DV, self.strategy, features="model")

    def make(config, strategy):
        model = WrittenOut(config, strategy, nnx.Rngs(0))
        return model, nnx.Optimizer(model, page.adamw, wrt=nnx.Param)

    return make


@compiled_for_cpu
@pytest.mark.parametrize(
    "layers, remat, times",
    [("scan", False, 2), ("scan", True, 2), ("one by one", False, 1), ("one by one", True, 2)],
)
def test_how_often_fsdp_gathers_the_blocks(page, layers, remat, times):
    """In a scan FSDP gathers the blocks twice; one after another once, and with remat twice."""
    strategy = replace(page.fsdp, remat=jax.checkpoint) if remat else page.fsdp
    make = training.make if layers == "scan" else written_out(page)
    program = page.step_program(page.tiny, strategy, 64, make=make)
    config = page.tiny
    of_the_blocks = 4 * 2 * config.L * config.D * config.F
    at_the_ends = 4 * (config.I + config.V) * config.D
    gathered = ms.collectives(program).by("kind").bytes("all-gather")
    assert gathered == times * of_the_blocks + at_the_ends


@compiled_for_cpu
def test_fsdp_gathers_2_390_016_bytes(page):
    """The kernels of the blocks twice and the other two once; a device sends seven eighths."""
    tiny = page.tiny
    of_blocks = 4 * 2 * tiny.L * tiny.D * tiny.F  # bytes
    at_the_ends = 4 * (tiny.I + tiny.V) * tiny.D
    assert (of_blocks, at_the_ends) == (1_179_648, 30_720)
    assert page.gathers == 2 * of_blocks + at_the_ends == 2_390_016
    wire = ms.collectives(page.trained.program).by("kind")["all-gather"].wire_bytes
    assert wire == page.gathers * 7 // 8


def test_h100_gathers_as_much_and_tpu_half_of_it(page):
    """The TPU's compiler gathers as many numbers in bfloat16."""
    assert page.gathered_bytes("gpu") == 2_390_016 == 2 * page.gathered_bytes("tpu")
    moves = stored_program("train-fsdp")["tpu"]["moves"]
    assert {row["dtype"] for row in moves if row["kind"] == "all-gather"} == {"bfloat16"}


# Compare two runs by their gradients


def test_adam_hides_a_gradient_that_is_eight_times_too_large():
    """Adam's updates for gradients that are eight times too large are the same."""

    def updates_for(gradients):
        tx = optax.adam(1e-3)

        def one(state, gradient):
            update, state = tx.update(gradient, state)
            return state, update

        return np.asarray(jax.lax.scan(one, tx.init(gradients[0]), gradients)[1])

    gradients = jnp.asarray(np.random.default_rng(0).normal(size=(20, 64)), "float32")
    updates = updates_for(gradients)
    np.testing.assert_allclose(updates, updates_for(8 * gradients), rtol=1e-3, atol=1e-8)
    assert np.abs(updates[0]).max() < 1.001e-3  # a fresh start: at most the learning rate


# How large a step of Adam can be


def adam_steps(gradients):
    """Sizes of Adam's updates, in learning rates."""
    tx = optax.adam(1.0)

    def one(state, gradient):
        update, state = tx.update(gradient, state)
        return state, update

    updates = jax.lax.scan(one, tx.init(gradients[0]), gradients)[1]
    return np.abs(np.asarray(updates))


def test_adams_first_step_is_one_learning_rate():
    """Adam's step is about one learning rate."""
    assert adam_steps(jnp.ones(20)) == pytest.approx(1, abs=0.01)


def test_after_many_zeros_adams_first_step_is_three_and_later_ones_are_up_to_seven():
    """When gradients arrive after many zeros, the first step is about three learning rates, and
    later ones are up to seven."""
    steps = adam_steps(jnp.concatenate([jnp.zeros(5000), jnp.ones(200)]))[5000:]
    assert 2.9 < steps[0] < 3.2
    assert 6 < steps.max() < 7.3 and steps.argmax() > 0


def test_no_history_makes_a_step_of_adam_larger_than_7_3_learning_rates():
    """The largest step that any history can make is (1-b1) / sqrt((1-b2)(1-b1²/b2)), 7.27."""
    b1, b2 = 0.9, 0.999
    bound = (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))
    assert 7.2 < bound < 7.3
    ages = np.arange(2000)[::-1]
    worst = jnp.asarray((b1 / b2) ** ages, "float32")  # where Cauchy and Schwarz are equal
    steps = adam_steps(jnp.concatenate([jnp.zeros(20_000), worst]))
    assert steps[-1] == pytest.approx(bound, rel=1e-3)
    others = np.random.default_rng(0).normal(size=(64, 400)) * np.logspace(-4, 0, 400)
    assert max(adam_steps(jnp.asarray(row, "float32")).max() for row in others) < bound


# Which optimizers need no annotations of their own


class OneWeight(nnx.Module):
    def __init__(self, names):
        self.w = nnx.Param(jnp.ones((256, 512)), out_sharding=names)


def optimizer_for(tx, names, sizes=(2, 4)):
    """A model of one weight with these names, and its optimizer, made as chapter 4 makes them."""
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AUTO,) * 2)

    def make():
        model = OneWeight(names)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        return jax.jit(make)()


ANNOTATIONS = [(None, None), ("data", None), ("data", "model")]


@pytest.mark.parametrize("names", ANNOTATIONS, ids=str)
@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        optax.sgd(1e-3, momentum=0.9),
        optax.lion(1e-3),
        optax.contrib.muon(1e-3),
    ],
    ids=["adamw", "momentum", "lion", "muon"],
)
def test_state_with_the_shape_of_its_weight_is_sharded_as_the_weight_is(tx, names):
    """With AdamW, SGD with momentum, Lion and Muon all state of a weight's shape lies as the weight."""
    model, optimizer = optimizer_for(tx, names)
    state = [leaf for leaf in jax.tree.leaves(optimizer) if leaf.shape == (256, 512)]
    assert state
    for leaf in state:
        assert leaf.sharding.is_equivalent_to(model.w.sharding, 2)


@pytest.mark.parametrize("names", ANNOTATIONS, ids=str)
@pytest.mark.parametrize(
    "tx, rank",
    [(optax.adafactor(1e-3), 1), (optax.sm3(1e-3), 1), (optax.novograd(1e-3), 0)],
    ids=["adafactor", "sm3", "novograd"],
)
def test_state_with_fewer_dimensions_than_its_weight_raises(tx, rank, names):
    """With Adafactor, SM3 or NovoGrad making the optimizer raises, even if nothing is sharded."""
    with pytest.raises(
        ValueError, match=f"rank at least 2, but was applied to a value of rank {rank}"
    ):
        optimizer_for(tx, names)


@compiled_for_cpu
@pytest.mark.parametrize(
    "sizes, names, piece",
    [
        ((2, 4), ("data", "model"), (5, 64, 512)),  # history and rows, not rows and columns
        ((1, 8), (None, "model"), (10, 32, 512)),  # rows, not columns
        ((8, 1), ("data", None), (10, 256, 512)),  # whole: eight do not divide a history of ten
    ],
    ids=str,
)
def test_lbfgs_shards_its_history_in_the_wrong_dimensions(sizes, names, piece):
    """With L-BFGS nothing is raised: the annotation shards the wrong dimensions of its history, or
    leaves it whole if the sizes do not divide."""
    model, optimizer = optimizer_for(optax.lbfgs(memory_size=10), names, sizes)
    history = [leaf for leaf in jax.tree.leaves(optimizer) if leaf.shape == (10, 256, 512)]
    assert history
    for leaf in history:
        assert leaf.sharding.shard_shape(leaf.shape) == piece
        assert piece[1:] != model.w.sharding.shard_shape(model.w.shape)


# Row weights


def test_padded_rows_change_no_loss_and_get_no_gradient():
    """The loss of eight rows, six of them real, is that of the six rows."""
    logits_BV = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    labels_B = np.arange(8)
    weights_B = (labels_B < 6).astype("float32")

    def loss_of_logits(logits_BV):  # the model's answer is its input
        return loss_of(lambda x: x, (logits_BV, labels_B, weights_B))

    gradient_BV = np.asarray(jax.grad(loss_of_logits)(logits_BV))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    alone = cross_entropy(logits_BV[:6, :10], labels_B[:6]).mean()
    assert np.isclose(loss_of_logits(logits_BV), alone, rtol=1e-6)
    assert (gradient_BV[:6, :10] != 0).all() and not gradient_BV[6:].any()


def test_a_short_batch_is_padded_with_row_0_which_has_no_weight(page):
    """The last 29 rows of an epoch come first, and the 35 copies of row 0 after them have weight 0."""
    rows = page.shuffled(0)
    assert [len(batch) for batch in rows] == [64] * 22 + [29]
    x_BI, labels_B, weights_B = page.batch_of(rows[-1], page.mesh)
    assert x_BI.shape == (64, 64) and np.array_equal(weights_B, np.arange(64) < 29)
    np.testing.assert_array_equal(x_BI[:29], data.images_BI[rows[-1]])
    np.testing.assert_array_equal(labels_B[:29], data.labels_B[rows[-1]])
    assert (np.asarray(x_BI[29:]) == data.images_BI[0]).all()


# Metrics


def test_sums_divided_once_are_the_mean_of_all_rows(page):
    """Loss and right answers of the 360 test rows, as NumPy counts them."""
    state = page.after("means")
    with jax.set_mesh(page.mesh):
        logits_BV = np.asarray(jax.jit(page.Model.__call__)(state.model, data.images_BI[1437:]))
    labels_B = data.labels_B[1437:]
    each_B = optax.softmax_cross_entropy_with_integer_labels(logits_BV[:, :10], labels_B)
    assert state.count == 360
    np.testing.assert_allclose(state.loss / state.count, np.mean(each_B), rtol=1e-4)
    assert state.right == (logits_BV[:, :10].argmax(axis=1) == labels_B).sum()


def test_the_last_batch_has_40_real_rows_and_three_devices_without_one(page):
    """24 of its rows are padding, so the last three of eight devices have no real row."""
    assert page.sums[:, 2].tolist() == [64] * 5 + [40]
    weights_B = page.batch_of(page.batches[-1], page.mesh)[2]
    real = [np.asarray(shard.data).sum() for shard in weights_B.addressable_shards]
    assert sorted(real) == [0, 0, 0, 8, 8, 8, 8, 8]


def test_the_shortcuts_are_off_by_over_one_percent(page):
    """Last batch dropped, mean of batch means, and worst of all the mean of device means."""
    state = page.after("means")
    truth = state.loss / state.count
    losses = []
    with jax.set_mesh(page.mesh):
        for rows in page.batches:
            x_BI, labels_B, weights_B = page.batch_of(rows, page.mesh)
            logits_BV = jax.jit(page.Model.__call__)(state.model, x_BI)[:, :10]
            each_B = optax.softmax_cross_entropy_with_integer_labels(logits_BV, labels_B)
            losses.append(np.asarray(each_B * weights_B).reshape(8, 8).sum(axis=1))
    counts = np.pad(np.ones(360), (0, 24)).reshape(6, 8, 8).sum(axis=2)
    device_means = np.array(losses) / np.maximum(counts, 1)
    wrong = [state.batch_means[:5].mean(), state.batch_means.mean(), device_means.mean()]
    errors = [abs(value / truth - 1) for value in wrong]
    assert min(errors) > 0.01 and errors[2] > errors[1]


# The clock


def test_the_call_returns_before_half_of_the_time_of_the_step_has_passed(page):
    """JAX queues the work and returns before there is a result, unless the machine is busy then."""
    ratios = np.array(page.done) / np.array(page.called)
    assert np.quantile(ratios, 0.75) > 2


def test_a_batch_is_a_copy_of_its_rows(page):
    """Writing to the data set after the transfer was started does not change the batch."""
    images_BI = data.images_BI
    backup_BI = images_BI[:64].copy()
    sent_BI = page.batch_of(np.arange(64), page.mesh)[0]
    try:
        images_BI[:64] = 0
        assert np.array_equal(sent_BI, backup_BI)
    finally:
        images_BI[:64] = backup_BI


def test_the_profiler_leaves_a_folder_for_xprof(page):
    model, optimizer = training.place(page.fsdp)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            *_, loss = page.program(model, optimizer, page.batch)
            loss.block_until_ready()
        assert list(pathlib.Path(folder).rglob("*.xplane.pb"))


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
