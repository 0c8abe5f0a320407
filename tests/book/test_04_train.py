"""Chapter 4, "Train: the program does not change, the strategy does"."""

from collections import namedtuple
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import meshscope as ms
from compared import apart, host
from many_devices import data, stacked, training
from pages import check_exercise, compiled_for_cpu, exercises_of
from traced import equations

PAGE = "04-train"
P = jax.P
NAMES = ["data parallel", "FSDP", "tensor parallel", "FSDP x tensor"]

# Sizes in numbers, from the shapes of the weights
BLOCKS = 2 * 2 * 96 * 384
ENDS = (64 + 10) * 96
B_F = 2 * 384
SMALL = 2 * 2 * 96
ALL = 12 * (BLOCKS + ENDS + B_F + SMALL) + 8  # with two moments and two counters

Run = namedtuple("Run", "model optimizer losses")


def begin(page, strategy):
    """A new model and its optimizer, made as the page makes them."""
    with jax.set_mesh(strategy.mesh()):
        return jax.jit(page.make, static_argnums=(0, 1))(page.tiny, strategy)


def program_for(page, strategy, rows=64):
    """The page's step, compiled for a batch of so many rows."""
    build = partial(page.make, page.tiny, strategy)
    model, optimizer = nnx.merge(*nnx.get_abstract_model(build, strategy.mesh()))
    with jax.set_mesh(strategy.mesh()):
        batch = page.batch_of(np.arange(rows), strategy.mesh())
        jitted = page.compiled_step(page.step, model, optimizer)
        return jitted.lower(model, optimizer, batch).compile()


def all_strategies(page):
    """The page's four, and one device."""
    return {"one device": page.Strategy(1, 1)} | page.strategies


@pytest.fixture(scope="module")
def runs(page):
    """One epoch with each strategy."""
    return {name: Run(*page.train(one, epochs=1)) for name, one in all_strategies(page).items()}


# The model before it is trained


def test_a_block_keeps_the_shape_and_has_its_own_weights(page):
    strategy = page.strategies["FSDP"]
    with jax.set_mesh(strategy.mesh()):
        block = page.Block(page.tiny, strategy, nnx.Rngs(0))
        assert block(np.ones((64, 96), "float32")).shape == (64, 96)
    one, other = begin(page, page.data_parallel)[0].blocks
    assert one.w_DF.shape == (96, 384) and not np.array_equal(one.w_DF, other.w_DF)


def test_the_first_step_returns_the_loss_of_the_untrained_model(page):
    """The loss is computed before the update; the step is counted."""
    after = page.after("first-step")
    with jax.set_mesh(page.mesh):
        untrained = page.loss_of(begin(page, page.data_parallel)[0], page.batch)
    assert np.isclose(after.loss, untrained, rtol=1e-5) and after.optimizer.step[...] == 1


# The first training run


def test_at_least_95_percent_of_unseen_digits_are_right(page):
    """After three epochs at least 95 % of the 360 digits it never saw are right."""
    assert len(page.right_B) == 360 and page.right_B.mean() >= 0.95
    losses = page.losses
    assert len(losses) == page.optimizer.step[...] == 3 * 22
    assert f"{losses[0]:.1f} {np.mean(losses[-22:]):.1f}" == "2.7 0.1"
    assert losses[0] - np.mean(losses[17:22]) > 0.8 * losses[0]  # most of it in the first epoch


def test_the_test_rows_are_not_trained_on(page):
    """The 360 rows of the test come last, and no batch of any epoch has one of them."""
    rows = np.concatenate([page.shuffled(epoch) for epoch in range(3)])
    assert rows.max() == 1437 - 1 and len(page.images_BI[1437:]) == 360


def test_each_epoch_has_22_full_batches_and_drops_29_other_rows(page):
    """1,437 rows are 22 batches of 64 and 29 rows more, which in another epoch are others."""
    dropped = []
    for epoch in range(3):
        rows = page.shuffled(epoch)
        assert rows.shape == (22, 64) and len(np.unique(rows)) == 22 * 64
        dropped.append(set(range(1437)) - set(rows.flat))
    assert [len(rows) for rows in dropped] == [29] * 3
    assert len(set.union(*dropped)) > 2 * 29


def test_the_step_is_compiled_once(page):
    """All batches of an epoch have the same shape, so there is one compilation."""
    model, optimizer = begin(page, page.data_parallel)
    jitted = page.compiled_step(page.step, model, optimizer)
    with jax.set_mesh(page.mesh):
        for rows in (page.shuffled(0)[0], page.shuffled(0)[-1]):
            model, optimizer, _ = jitted(model, optimizer, page.batch_of(rows, page.mesh))
    assert jitted._cache_size() == 1 and optimizer.step[...] == 2


@compiled_for_cpu  # a TPU pads to its tiles
def test_the_step_takes_over_the_memory_of_model_and_optimizer(page):
    """All of model and optimizer is donated."""
    in_memory = ms.memory((page.model, page.optimizer)).bytes_per_device
    assert ms.memory(program_for(page, page.data_parallel)).aliased == in_memory


def test_what_was_donated_cannot_be_used_any_more(page):
    """The model and the optimizer that went into a step are deleted."""
    model, optimizer = begin(page, page.data_parallel)
    batch = page.batch_of(np.arange(64), page.mesh)
    with jax.set_mesh(page.mesh):
        page.compiled_step(page.step, model, optimizer)(model, optimizer, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((model, optimizer)))
    assert not any(array.is_deleted() for array in batch)


def test_each_device_has_all_weights_and_its_own_rows(page):
    """With data parallelism each device has all weights, twice as many moments, two counters, and
    8 of 64 rows."""
    weighs = ms.memory(page.model).bytes_per_device
    assert ms.memory(page.optimizer).bytes_per_device == 2 * weighs + 8
    assert {leaf.copies for leaf in ms.memory(page.model).leaves} == {8}
    pixels = ms.memory(page.batch_of(np.arange(64), page.mesh)[0]).leaves[0]
    assert (pixels.copies, pixels.bytes_per_device) == (1, 8 * 64 * 4)


def test_a_step_that_forgets_the_optimizer_raises(page):
    """compiled_step expects three results, so a step that returns two raises an error."""

    def forgetful(model, optimizer, batch):
        model, _, loss = page.step(model, optimizer, batch)
        return model, loss

    model, optimizer = begin(page, page.data_parallel)
    jitted = page.compiled_step(forgetful, model, optimizer)
    with jax.set_mesh(page.mesh), pytest.raises(ValueError, match="out_shardings"):
        jitted(model, optimizer, page.batch_of(np.arange(64), page.mesh))


def test_without_the_optimizer_the_loss_falls_and_nothing_is_counted(page):
    """The page's forgetful step trains, but more slowly; moments and counter stay at zero."""
    model, optimizer = begin(page, page.data_parallel)
    losses = []
    with jax.set_mesh(page.mesh):
        for rows in page.shuffled(0):
            model, loss = page.forgetful_step(model, optimizer, page.batch_of(rows, page.mesh))
            losses.append(float(loss))
    assert np.mean(page.losses[17:22]) < np.mean(losses[-5:]) < 0.5 * losses[0]
    assert optimizer.step[...] == page.fresh.step[...] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(page.fresh.opt_state[0].mu))


# What each strategy stores


def test_the_pieces_have_the_shapes_of_the_figure(page):
    """What device 0 stores of a batch, of w_DF and of w_FD, for four strategies."""
    drawn = {
        "data parallel": [(8, 64), (96, 384), (384, 96)],
        "FSDP": [(8, 64), (12, 384), (384, 12)],
        "tensor parallel": [(64, 64), (96, 48), (48, 96)],
        "FSDP x tensor": [(32, 64), (48, 96), (96, 48)],
    }
    assert list(drawn) == NAMES
    for name, shapes in drawn.items():
        block = begin(page, page.strategies[name])[0].blocks[0]
        x_BI = page.batch_of(np.arange(64), page.strategies[name].mesh())[0]
        arrays = [x_BI, block.w_DF[...], block.w_FD[...]]
        assert [array.sharding.shard_shape(array.shape) for array in arrays] == shapes


def pieces(strategy):
    """In how many pieces the kernels of the blocks, the two others and `b_F` are."""
    data = strategy.data if strategy.fsdp else 1
    return data * strategy.model, data, strategy.model


def test_in_how_many_pieces_the_weights_are(page):
    """FSDP shards only the kernels; biases and scales are fewer than 1 % of the numbers."""
    assert B_F + SMALL < 0.01 * (BLOCKS + ENDS + B_F + SMALL)
    for strategy in page.strategies.values():
        model, _ = begin(page, strategy)

        def numbers(*weights):
            shapes = [weight.sharding.shard_shape(weight.shape) for weight in weights]
            return sum(int(np.prod(shape)) for shape in shapes)

        of_blocks, of_ends, of_b_f = pieces(strategy)
        kernels = [kernel for block in model.blocks for kernel in (block.w_DF, block.w_FD)]
        assert numbers(*kernels) * of_blocks == BLOCKS
        assert numbers(model.w_ID, model.w_DV) * of_ends == ENDS
        assert numbers(*(block.b_F for block in model.blocks)) * of_b_f == B_F
        assert sum(numbers(block.scale_D, block.b_D) for block in model.blocks) == SMALL


@pytest.mark.parametrize("data, model", [(8, 1), (2, 4), (4, 2), (1, 8), (1, 1)])
def test_what_a_device_stores(page, data, model):
    """12 bytes for each number that a device has, and two counters, on any mesh."""
    strategy = page.Strategy(data, model, fsdp="data")
    of_blocks, of_ends, of_b_f = pieces(strategy)
    numbers = BLOCKS // of_blocks + ENDS // of_ends + B_F // of_b_f + SMALL
    assert page.stored_bytes(strategy) == 12 * numbers + 8
    assert ms.memory(begin(page, strategy)).bytes_per_device == 12 * numbers + 8


def test_a_device_stores_a_little_more_than_one_eighth_with_fsdp(page):
    """Data parallelism stores everything, FSDP 5 % more than an eighth, tensor parallelism the most
    of the other three, because two kernels stay whole."""
    stored = {name: page.stored_bytes(strategy) for name, strategy in page.strategies.items()}
    assert stored["data parallel"] == ALL == 1_868_552 == 8 * 233_569
    assert 1.045 < 8 * stored["FSDP"] / ALL < 1.055
    assert stored["FSDP"] < stored["FSDP x tensor"] < stored["tensor parallel"]
    of_ends = 12 * (ENDS - ENDS // 8)
    assert stored["tensor parallel"] - of_ends < stored["FSDP"]


def test_the_optimizer_gives_each_moment_the_annotation_of_its_weight(page):
    """AdamW's moments are sharded as their weights are, under each of the four strategies."""
    for strategy in page.strategies.values():
        model, optimizer = begin(page, strategy)
        weights = jax.tree.leaves(model)
        for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
            for weight, moment in zip(weights, jax.tree.leaves(moments), strict=True):
                assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)


# The losses agree


def test_losses_agree_on_the_page(page):
    """The losses of an epoch agree to rounding under the two strategies that the page trains with."""
    assert len(page.fsdp_losses) == 22
    assert apart([np.array(page.fsdp_losses)], [np.array(page.losses[:22])]) < 1e-5


def test_losses_and_weights_agree_under_all_strategies(page, runs):
    """All losses of an epoch agree with one device to rounding, and so do the weights after it."""
    reference = runs["one device"]
    assert len(runs) == 5 and reference.losses[0] > 2.5 and reference.losses[-1] < 0.3
    assert apart([np.array(page.losses[:22])], [np.array(reference.losses)]) < 1e-5
    for run in runs.values():
        assert apart([np.array(run.losses)], [np.array(reference.losses)]) < 1e-5
        weights = zip(host(run.model), host(reference.model), strict=True)
        assert max(np.abs(a - b).max() for a, b in weights) < 0.01 * 22 * 1e-3
        assert run.optimizer.step[...] == len(run.losses) == 22


def test_the_first_gradients_agree_under_all_strategies(page):
    """Adam's first moments after one step are a tenth of the gradient, and agree to rounding."""
    gradients = {}
    for name, strategy in all_strategies(page).items():
        batch = page.batch_of(page.shuffled(0)[0], strategy.mesh())
        _, optimizer, _ = program_for(page, strategy)(*begin(page, strategy), batch)
        gradients[name] = host(optimizer.opt_state[0].mu)
    for gradient in gradients.values():
        assert apart(gradient, gradients["one device"]) < 1e-5


# What the text says about what moves


@compiled_for_cpu
@pytest.mark.parametrize("rows", [64, 128])  # with 64, an activation has the shape of w_ID
def test_fsdp_gathers_its_kernels_and_nothing_else(page, rows):
    """With the constraints, what FSDP gathers are the four kinds of kernel, and no activation."""
    kernels = {w.shape for w in jax.tree.leaves(nnx.state(page.model)) if w.ndim == 2}
    moved = ms.collectives(program_for(page, page.strategies["FSDP"], rows))
    assert {row.shape for row in moved if row.kind == "all-gather"} <= kernels
    sums = {row.shape for row in moved if row.kind != "all-gather"}
    assert not {(rows, 96), (rows, 384), (rows // 8, 96), (rows // 8, 384)} & sums


@compiled_for_cpu
def test_tensor_parallelism_adds_up_activations_of_all_rows(page):
    """An activation of 64 rows, in each block, once forward and once backward."""
    moved = ms.collectives(program_for(page, page.strategies["tensor parallel"]))
    assert {(row.kind, row.axes, row.shape) for row in moved} == {
        ("all-reduce", ("model",), (64, 96))
    }
    assert sum(row.executions for row in moved) == 2 * page.tiny.L


# The constraints


def test_the_first_matmul_every_block_and_the_logits_are_constrained(page):
    """One constraint each: rows along `data`, features whole."""
    strategy = page.strategies["FSDP x tensor"]
    with jax.set_mesh(strategy.mesh()):
        model = page.Model(page.tiny, strategy, nnx.Rngs(0))
        traced = jax.make_jaxpr(model)(np.zeros((16, page.tiny.I), "float32"))
    found = equations(traced.jaxpr, "sharding_constraint")
    specs = [equation.params["sharding"].spec for equation, _ in found]
    assert specs == [P("data")] * (1 + page.tiny.L + 1)


# Other pages train this model with its blocks in a stack


def stacked_from(page, model, strategy):
    """The stacked model with the weights of the page's, and 6 logits more."""
    theirs = stacked.Model(stacked.Config(L=2, D=96, F=384), strategy, nnx.Rngs(0))
    for name in ("w_DF", "w_FD", "b_F", "b_D", "scale_D"):
        layers = [np.asarray(getattr(block, name)) for block in model.blocks]
        getattr(theirs.blocks, name)[...] = np.stack(layers)
    theirs.w_ID[...] = np.asarray(model.w_ID)
    theirs.w_DV[...] = np.pad(np.asarray(model.w_DV), ((0, 0), (0, 6)), constant_values=9.0)
    return theirs


@pytest.mark.parametrize("name", NAMES)
def test_the_stacked_model_is_this_model(page, name):
    """With the same weights, many_devices.stacked has the same loss, and the same specs behind L."""
    strategy = stacked.strategies[name]
    with jax.set_mesh(strategy.mesh()):
        theirs = stacked_from(page, page.model, strategy)
        their_loss = stacked.loss_of(
            theirs, training.batch_of(page.shuffled(0)[0], strategy.mesh())
        )
        ours = page.Block(page.tiny, strategy, nnx.Rngs(0))
    with jax.set_mesh(page.mesh):
        our_loss = page.loss_of(page.model, page.batch_of(page.shuffled(0)[0], page.mesh))
    np.testing.assert_allclose(their_loss, our_loss, rtol=1e-4)
    for weight in ("w_DF", "w_FD", "b_F", "b_D", "scale_D"):
        spec = getattr(ours, weight).out_sharding
        assert getattr(theirs.blocks, weight).out_sharding == (None, *spec)


def test_the_stacked_model_has_the_strategies_of_this_page(page):
    """Its Strategy has more fields, which by default change nothing."""
    assert list(all_strategies(page)) == list(stacked.strategies)
    for name, ours in all_strategies(page).items():
        theirs = stacked.strategies[name]
        assert vars(ours).items() <= vars(theirs).items()
        assert ours.mesh() == theirs.mesh()


def test_its_batches_are_those_of_this_page(page):
    """Of an epoch it has one batch more, which is shorter; its row weights of a full batch are 1."""
    for epoch in range(3):
        *full, last = training.shuffled(epoch)
        assert np.array_equal(full, page.shuffled(epoch)) and len(last) == 29
    rows = page.shuffled(0)[0]
    ours, theirs = page.batch_of(rows, page.mesh), training.batch_of(rows, page.mesh)
    for one, other in zip(ours, theirs[:2], strict=True):
        assert np.array_equal(one, other) and one.sharding == other.sharding
    assert theirs[2].shape == (64,) and (theirs[2] == 1).all()


# The data


def test_the_data_are_scikit_learns_digits_shuffled():
    """1,797 images of 8 by 8 pixels between 0 and 1, in an order that mixes the classes."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(1797)
    assert data.images_BI.shape == (1797, 64) and data.images_BI.max() == 1
    assert np.array_equal(data.images_BI, digits.data[order] / 16)
    assert np.array_equal(data.labels_B, digits.target[order])


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
