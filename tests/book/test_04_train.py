"""Chapter 4, "Train: the program does not change, the strategy does"."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import meshscope as ms
from compared import apart, host
from many_devices import data, training
from many_devices import model as companion
from pages import check_exercise, compiled_for_cpu, exercises_of
from traced import equations

PAGE = "04-train"
P = jax.P
NAMES = ["data parallel", "FSDP", "tensor parallel", "FSDP x tensor"]

# Sizes in numbers, from the shapes of the weights
KERNELS = 2 * 4 * 96 * 384 + (64 + 16) * 96
B_F = 4 * 384
SMALL = 2 * 4 * 96


def begin(page, strategy):
    """A new model and its optimizer, made as the page makes them."""
    with jax.set_mesh(strategy.mesh()):
        return jax.jit(page.make, static_argnums=(0, 1))(page.tiny, strategy)


def program_for(page, strategy):
    """The page's step, compiled for a batch of 64 rows."""
    build = partial(page.make, page.tiny, strategy)
    model, optimizer = nnx.merge(*nnx.get_abstract_model(build, strategy.mesh()))
    with jax.set_mesh(strategy.mesh()):
        batch = page.batch_of(np.arange(64), strategy.mesh())
        jitted = page.compiled_step(page.step, model, optimizer)
        return jitted.lower(model, optimizer, batch).compile()


def all_strategies(page):
    """The page's four, and one device."""
    return {"one device": page.Strategy(1, 1)} | page.strategies


@pytest.fixture(scope="module")
def runs(page):
    """One epoch with each strategy: those that the page ran, and the others."""
    missing = {name: one for name, one in all_strategies(page).items() if name not in page.runs}
    return page.runs | {name: page.train(one, epochs=1) for name, one in missing.items()}


# The model before it is trained


def test_a_stack_is_a_block_whose_arrays_have_a_first_dimension(page):
    """A block keeps the shape; in a stack each block has its own weights, and L the entry None."""
    strategy = page.strategies["FSDP"]
    with jax.set_mesh(strategy.mesh()):
        block = page.Block(page.tiny, strategy, nnx.Rngs(0))
        y_BD = block(np.ones((64, 96), "float32"))
        assert block.w_DF.shape == (96, 384) and y_BD.shape == (64, 96)
        blocks = page.make_stack(page.tiny, strategy, nnx.Rngs(0))
    assert blocks.w_DF.shape == page.model.blocks.w_DF.shape == (4, 96, 384)
    assert blocks.w_DF.out_sharding == (None, "data", "model")
    assert not np.array_equal(blocks.w_DF[0], blocks.w_DF[1])


def test_before_training_the_loss_is_about_ln_10(page):
    """That of ten equal probabilities; the first step returns it too, and is counted."""
    with jax.set_mesh(page.mesh):
        untrained = page.loss_of(page.after("loss").model, page.batch)
    assert abs(untrained - np.log(10)) < 0.1 and np.isclose(page.loss, untrained, rtol=1e-5)
    assert page.optimizer.step[...] == 1


# The first training run


def test_at_least_95_percent_of_unseen_digits_are_right(page):
    """After three epochs at least 95 % of the 360 digits it never saw are right."""
    assert len(page.right_B) == 360 and page.right_B.mean() >= 0.95
    losses = page.trained.losses
    assert len(losses) == page.trained.optimizer.step[...] == 3 * 22
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
    run = page.trained
    in_memory = ms.memory((run.model, run.optimizer)).bytes_per_device
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
    weighs = ms.memory(page.trained.model).bytes_per_device
    assert ms.memory(page.trained.optimizer).bytes_per_device == 2 * weighs + 8
    assert {leaf.copies for leaf in ms.memory(page.trained.model).leaves} == {8}
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
    """If a step returns only the model and the loss, the loss falls more slowly, and moments and
    counter stay at zero."""

    @jax.jit
    def forgetful(model, optimizer, batch):
        model, _, loss = page.step(model, optimizer, batch)
        return model, loss

    model, optimizer = begin(page, page.data_parallel)
    losses = []
    with jax.set_mesh(page.mesh):
        for rows in page.shuffled(0):
            model, loss = forgetful(model, optimizer, page.batch_of(rows, page.mesh))
            losses.append(float(loss))
    with_optimizer = page.trained.losses[:22]
    assert np.mean(with_optimizer[-5:]) < np.mean(losses[-5:]) < 0.5 * losses[0]
    assert optimizer.step[...] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(optimizer.opt_state[0].mu))


# The loss


def test_logits_beyond_the_ten_classes_change_no_loss_and_get_no_gradient(page):
    """The loss of eight rows of 16 logits is their mean cross-entropy over the first ten."""
    logits_BV = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    labels_B = np.arange(8)

    def loss_of_logits(logits_BV):  # the model's answer is its input
        return page.loss_of(lambda x: x, (logits_BV, labels_B))

    gradient_BV = np.asarray(jax.grad(loss_of_logits)(logits_BV))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    ten = cross_entropy(logits_BV[:, :10], labels_B).mean()
    assert np.isclose(loss_of_logits(logits_BV), ten, rtol=1e-6)
    assert (gradient_BV[:, :10] != 0).all() and not gradient_BV[:, 10:].any()
    every_logit = cross_entropy(logits_BV, labels_B).mean()
    assert not np.isclose(loss_of_logits(logits_BV), every_logit, rtol=0.1)  # the mask matters


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
        blocks = begin(page, page.strategies[name])[0].blocks
        x_BI = page.batch_of(np.arange(64), page.strategies[name].mesh())[0]
        arrays = [x_BI, blocks.w_DF[...], blocks.w_FD[...]]
        assert [array.sharding.shard_shape(array.shape)[-2:] for array in arrays] == shapes


def test_in_how_many_pieces_the_weights_are(page):
    """FSDP shards only the kernels; biases and scales are fewer than 1 % of the numbers."""
    assert B_F + SMALL < 0.01 * (KERNELS + B_F + SMALL)
    pieces = {  # of kernels, b_F, scale_D and b_D
        "data parallel": (1, 1, 1),
        "FSDP": (8, 1, 1),
        "tensor parallel": (8, 8, 1),
        "FSDP x tensor": (8, 4, 1),
    }
    for name, (of_kernels, of_b_f, of_small) in pieces.items():
        model, _ = begin(page, page.strategies[name])
        blocks = model.blocks

        def numbers(*weights):
            shapes = [weight.sharding.shard_shape(weight.shape) for weight in weights]
            return sum(int(np.prod(shape)) for shape in shapes)

        kernels = (model.w_ID, blocks.w_DF, blocks.w_FD, model.w_DV)
        assert numbers(*kernels) * of_kernels == KERNELS
        assert numbers(blocks.b_F) * of_b_f == B_F
        assert numbers(blocks.scale_D, blocks.b_D) * of_small == SMALL


def test_what_a_device_stores(page):
    """12 bytes for each number that a device has, and two counters."""
    assert 12 * (KERNELS + B_F + SMALL) + 8 == 3_658_760 == 8 * 457_345
    expected = {
        "one device": 3_658_760,
        "data parallel": 3_658_760,
        "FSDP": 12 * (KERNELS // 8 + B_F + SMALL) + 8,
        "tensor parallel": 12 * (KERNELS // 8 + B_F // 8 + SMALL) + 8,
        "FSDP x tensor": 12 * (KERNELS // 8 + B_F // 4 + SMALL) + 8,
    }
    for name, strategy in all_strategies(page).items():
        assert ms.memory(begin(page, strategy)).bytes_per_device == expected[name]
        assert page.stored_bytes(strategy) == expected[name]
    for name in ("FSDP", "tensor parallel", "FSDP x tensor"):
        assert 1 < 8 * expected[name] / 3_658_760 < 1.06
    assert expected["FSDP"] == max(list(expected.values())[2:])  # it keeps all biases whole


@pytest.mark.parametrize("data, model", [(2, 4), (4, 2), (1, 8)])
def test_the_arithmetic_holds_on_other_meshes(page, data, model):
    strategy = page.Strategy(data, model, fsdp="data")
    _, state = nnx.get_abstract_model(partial(page.make, page.tiny, strategy), strategy.mesh())
    numbers = KERNELS // 8 + B_F // model + SMALL
    assert ms.memory(state).bytes_per_device == 12 * numbers + 8


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
    """The losses of an epoch agree to rounding under the strategies that the page trains with."""
    assert page.runs["data parallel"] is page.trained  # which went on for more epochs
    assert list(page.runs) == ["data parallel", "FSDP"]
    for run in page.runs.values():
        assert apart([np.array(run.losses[:22])], [np.array(page.trained.losses[:22])]) < 1e-5


def test_losses_and_weights_agree_under_all_strategies(runs):
    """All losses of an epoch agree with one device to rounding, and so do the weights after it."""
    reference = runs["one device"]
    assert len(runs) == 5 and reference.losses[0] > 2.5 and reference.losses[-1] < 0.2
    for name, run in runs.items():
        assert apart([np.array(run.losses[:22])], [np.array(reference.losses)]) < 1e-5
        if name != "data parallel":
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
def test_fsdp_gathers_its_kernels_and_nothing_else(page):
    """With the constraints, what FSDP gathers are the four kinds of kernel, and no activation."""
    blocks, model = page.trained.model.blocks, page.trained.model
    kernels = {model.w_ID.shape, model.w_DV.shape, blocks.w_DF.shape[1:], blocks.w_FD.shape[1:]}
    moved = ms.collectives(program_for(page, page.strategies["FSDP"]))
    assert {row.shape for row in moved if row.kind == "all-gather"} == kernels


@compiled_for_cpu
def test_tensor_parallelism_adds_up_activations_of_all_rows(page):
    """Inside the loop over the blocks, an activation of 64 rows, once forward and once backward."""
    moved = ms.collectives(program_for(page, page.strategies["tensor parallel"]))
    in_loops = [row for row in moved if row.inside_loop and row.shape == (64, 96)]
    assert {(row.kind, row.axes) for row in in_loops} == {("all-reduce", ("model",))}
    assert sum(row.executions for row in in_loops) == 2 * page.tiny.L


@compiled_for_cpu
@pytest.mark.parametrize("name", ["one device", *NAMES])
def test_each_strategy_sends_what_the_companions_does(page, name):
    """The bytes on the page about what strategies send are those of this page's programs, and four
    more along `data`, for the sum of the row weights."""
    strategy = all_strategies(page)[name]
    theirs = training.step_program(companion.tiny, companion.strategies[name], 64)
    table, more = (
        ms.collectives(program).by("kind", "axes")
        for program in (program_for(page, strategy), theirs)
    )
    assert table.keys() == more.keys()
    for (kind, axes), totals in table.items():
        of_weights = 4 if (kind, axes) == ("all-reduce", ("data",)) else 0
        assert more[kind, axes].payload_bytes == totals.payload_bytes + of_weights


# The constraints


def test_the_first_matmul_every_block_and_the_logits_are_constrained(page):
    """One constraint each: rows along `data`, features whole, but those of the logits along `model`."""
    strategy = page.strategies["FSDP x tensor"]
    with jax.set_mesh(strategy.mesh()):
        model = page.Model(page.tiny, strategy, nnx.Rngs(0))
        traced = jax.make_jaxpr(model)(np.zeros((16, page.tiny.I), "float32"))
    found = equations(traced.jaxpr, "sharding_constraint")
    specs = [equation.params["sharding"].spec for equation, _ in found]
    rows = P("data", None)
    assert specs == [rows, rows, P("data", "model")]


# The companion has this program


@pytest.mark.parametrize("name", ["data parallel", "FSDP x tensor"])
def test_the_companion_has_the_model_of_this_page(page, name):
    """many_devices.model makes the same weights with the same annotations, and its loss, which has
    row weights too, is the same for a full batch."""

    def begin(program, strategy, batch):
        model = program.Model(program.tiny, strategy, nnx.Rngs(0))
        return model, program.loss_of(model, batch)

    made = []
    for program, batches in ((page, page), (companion, training)):
        strategy = program.strategies[name]
        batch = batches.batch_of(np.arange(64), strategy.mesh())
        with jax.set_mesh(strategy.mesh()):
            made.append(jax.jit(partial(begin, program, strategy, batch))())
    (ours, our_loss), (theirs, their_loss) = made
    np.testing.assert_allclose(our_loss, their_loss, rtol=1e-6)
    variables = [nnx.to_flat_state(nnx.state(model)) for model in (ours, theirs)]
    for (path, one), (other_path, other) in zip(*variables, strict=True):
        assert (path, one.out_sharding) == (other_path, other.out_sharding)
        assert np.array_equal(one, other)


def test_the_companion_has_the_strategies_of_this_page(page):
    """Its Strategy has more fields, which by default change nothing."""
    assert page.tiny.__dict__ == companion.tiny.__dict__
    assert list(all_strategies(page)) == list(companion.strategies)
    for name, ours in all_strategies(page).items():
        theirs = companion.strategies[name]
        assert vars(ours).items() <= vars(theirs).items()
        assert ours.mesh() == theirs.mesh()


def test_the_companion_has_the_batches_of_this_page(page):
    """Of an epoch it has one batch more, which is shorter; its row weights of a full batch are 1."""
    for epoch in range(3):
        *full, last = training.shuffled(epoch)
        assert np.array_equal(full, page.shuffled(epoch)) and len(last) == 29
    rows = page.shuffled(0)[0]
    ours, theirs = page.batch_of(rows, page.mesh), training.batch_of(rows, page.mesh)
    for one, other in zip(ours, theirs[:2], strict=True):
        assert np.array_equal(one, other) and one.sharding == other.sharding
    assert theirs[2].shape == (64,) and (theirs[2] == 1).all()


def test_the_companion_trains_as_this_page(page):
    """training.train takes the first twenty steps of this page, from the same weights."""
    run = training.train(companion.strategies["FSDP"])
    np.testing.assert_allclose(run.losses, page.runs["FSDP"].losses[:20], rtol=1e-5)


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
