"""The page "Check a training run": the gathers, metrics and the clock."""

import inspect
import pathlib
import tempfile
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from many_devices import data, model, training
from many_devices.compiled import stored_program
from many_devices.stacked import Model, loss_of, pinned, tiny
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "04a-train-checks"
IN_BLOCKS = {(96, 384), (384, 96)}


# The model and its twenty steps


def test_the_model_has_four_blocks_in_a_stack_and_sixteen_logits(page):
    """Each kind of weight of the blocks is one array, and eight devices divide the logits."""
    model = page.trained.model
    assert model.blocks.w_DF.shape == (4, 96, 384) and model.w_DV.shape == (96, 16)


def test_twenty_steps_on_batches_of_64_rows_with_the_step_of_chapter_4(page):
    """`train` calls the step that chapter 4 shows, and the optimizer counts twenty."""
    assert len(page.trained.losses) == page.trained.optimizer.step[...] == 20
    assert inspect.getsource(training.step) == inspect.getsource(model.step)
    assert {len(rows) for rows in training.shuffled(0)[:20]} == {64}


# FSDP that became tensor parallelism


@compiled_for_cpu
def test_with_constraints_all_kernels_are_gathered_and_nothing_else(page):
    """FSDP with constraints gathers the three kinds of kernel, the first one, and nothing else."""
    assert (tiny.D, tiny.D // 8, tiny.F) == (96, 12, 384)  # features, a device's, hidden
    ways = [tiny.I, tiny.D, tiny.F, tiny.D, tiny.V]  # into the blocks, through them, out
    first, *others = zip(ways[:-1], ways[1:])
    assert page.kernels == set(others)
    rows = ms.collectives(page.trained.program)
    assert {row.shape for row in rows if row.kind == "all-gather"} == {first, *others}


def test_the_first_kernel_has_the_shape_of_an_activation_and_the_others_do_not(page):
    """An activation has 64 rows, which is a dimension of no kernel but the first."""
    first = page.trained.model.w_ID.shape
    assert first == (64, tiny.D) and first not in page.kernels
    assert not any(64 in shape for shape in page.kernels)


@compiled_for_cpu
def test_without_constraints_no_kernel_is_gathered_and_rows_of_the_batch_move(page):
    """At 64 rows none of three kinds; what moves in their place has all rows of the batch."""
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
    program = training.step_program(tiny, replace(page.fsdp, pin=False), 1024)
    assert not page.kernels_gathered(program) & IN_BLOCKS
    inside = [row for row in ms.collectives(program) if row.inside_loop]
    added = {row.shape for row in inside if row.kind == "all-reduce"}
    assert (1024, tiny.F) in added


@compiled_for_cpu
def test_the_stored_bytes_of_the_cpu_are_those_of_the_pages_own_programs(page):
    for name, trained in {"train-fsdp": page.trained, "train-loose": page.loose}.items():
        assert sent(name, "cpu") == pytest.approx(1e6 * training.sent_mb(trained.program))


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
def test_in_a_list_of_blocks_a_larger_batch_makes_weights_move(page, monkeypatch):
    """Chapter 4's model without its constraints: at 64 rows no kernel of a block is gathered, at
    1,024 both kinds."""
    monkeypatch.setattr(model, "pinned", lambda x_BD: x_BD)
    strategy = model.strategies["FSDP"]
    by_rows = jax.NamedSharding(strategy.mesh(), jax.P("data"))
    build = nnx.get_abstract_model(lambda: model.make(model.tiny, strategy), strategy.mesh())
    shapes = nnx.merge(*build)
    gathered = {}
    for B in (64, 1024):
        batch = (
            jax.ShapeDtypeStruct((B, 64), "float32", sharding=by_rows),
            jax.ShapeDtypeStruct((B,), "int32", sharding=by_rows),
        )
        with jax.set_mesh(strategy.mesh()):
            jitted = model.compiled_step(model.step, *shapes)
            program = jitted.lower(*shapes, batch).compile()
        gathered[B] = page.kernels_gathered(program) & IN_BLOCKS
    assert gathered == {64: set(), 1024: IN_BLOCKS}


# How often FSDP gathers a weight


def written_out():
    """What makes the page's model with its blocks one after another, each with its pin."""

    class WrittenOut(Model):
        def __call__(self, x_BI):
            def layer(x_BD, block):
                return pinned(block(x_BD), self.strategy)

            x_BD = pinned(x_BI @ self.w_ID, self.strategy)
            for number in range(tiny.L):
                block = jax.tree.map(lambda w, i=number: w[i], self.blocks)
                x_BD = self.strategy.remat(layer)(x_BD, block)
            return pinned(x_BD @ self.w_DV, self.strategy, features="model")

    def make(config, strategy):
        model = WrittenOut(config, strategy, nnx.Rngs(0))
        return model, nnx.Optimizer(model, training.adamw, wrt=nnx.Param)

    return make


@compiled_for_cpu
@pytest.mark.parametrize(
    "layers, remat, times",
    [("scan", False, 2), ("scan", True, 2), ("one by one", False, 1), ("one by one", True, 2)],
)
def test_how_often_fsdp_gathers_the_blocks(page, layers, remat, times):
    """In a scan FSDP gathers the blocks twice; one after another once, and with remat twice."""
    strategy = replace(page.fsdp, remat=jax.checkpoint) if remat else page.fsdp
    make = training.make if layers == "scan" else written_out()
    program = training.step_program(tiny, strategy, 64, make=make)
    of_the_blocks = 4 * 2 * tiny.L * tiny.D * tiny.F
    at_the_ends = 4 * (tiny.I + tiny.V) * tiny.D
    gathered = ms.collectives(program).by("kind").bytes("all-gather")
    assert gathered == times * of_the_blocks + at_the_ends


@compiled_for_cpu
def test_fsdp_gathers_2_390_016_bytes(page):
    """The kernels of the blocks twice and the other two once; a device sends seven eighths."""
    of_blocks = 4 * 2 * tiny.L * tiny.D * tiny.F  # bytes
    at_the_ends = 4 * (tiny.I + tiny.V) * tiny.D
    assert (of_blocks, at_the_ends) == (1_179_648, 30_720)
    assert page.after("gathers").cpu == 2 * of_blocks + at_the_ends == 2_390_016
    wire = ms.collectives(page.trained.program).by("kind")["all-gather"].wire_bytes
    assert wire == page.after("gathers").cpu * 7 // 8


def test_h100_gathers_as_much_and_tpu_half_of_it(page):
    """The TPU's compiler gathers as many numbers in bfloat16."""
    assert page.h100 == 2_390_016 == 2 * page.after("gathers").tpu
    moves = stored_program("train-fsdp")["tpu"]["moves"]
    assert {row["dtype"] for row in moves if row["kind"] == "all-gather"} == {"bfloat16"}


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
    rows = training.shuffled(0)
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
        logits_BV = np.asarray(jax.jit(Model.__call__)(page.trained.model, data.images_BI[1437:]))
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
            logits_BV = jax.jit(Model.__call__)(page.trained.model, x_BI)[:, :10]
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
