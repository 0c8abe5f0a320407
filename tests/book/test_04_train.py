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
from many_devices.compiled import stored_program
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


# The first training run


def test_at_least_97_percent_of_unseen_digits_are_right(page):
    """After five epochs at least 97 % of the 360 digits it never saw are right."""
    assert len(page.right_B) == 360 and page.right_B.mean() >= 0.97
    losses = page.trained.losses
    assert len(losses) == page.trained.optimizer.step[...] == 5 * 23
    assert losses[0] > 2 and np.mean(losses[-23:]) < 0.2


def test_the_test_rows_are_not_trained_on(page):
    """The 360 rows of the test come last, and no batch of any epoch has one of them."""
    rows = np.concatenate([np.concatenate(page.shuffled(epoch)) for epoch in range(5)])
    assert rows.max() == 1437 - 1 and len(page.images_BI[1437:]) == 360
    assert len(np.unique(rows)) == 1437


def test_the_step_is_compiled_once(page):
    """The last batch is filled up to the shape of the others, so there is one compilation."""
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
    assert ms.memory(run.program).aliased == in_memory


def test_what_was_donated_cannot_be_used_any_more(page):
    """The model and the optimizer that went into a step are deleted."""
    model, optimizer = begin(page, page.data_parallel)
    batch = page.batch_of(np.arange(64), page.mesh)
    page.trained.program(model, optimizer, batch)
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
    with_optimizer = page.trained.losses[:23]
    assert np.mean(with_optimizer[-5:]) < np.mean(losses[-5:]) < 0.5 * losses[0]
    assert optimizer.step[...] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(optimizer.opt_state[0].mu))


# Padding


def test_padded_rows_and_logits_change_no_loss_and_get_no_gradient(page):
    """The loss of eight rows, six of them real, is that of the six rows and of ten classes."""
    logits_BV = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    labels_B = np.arange(8)
    weights_B = (labels_B < 6).astype("float32")

    def loss_of_logits(logits_BV):  # the model's answer is its input
        return page.loss_of(lambda x: x, (logits_BV, labels_B, weights_B))

    gradient_BV = np.asarray(jax.grad(loss_of_logits)(logits_BV))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    alone = cross_entropy(logits_BV[:6, :10], labels_B[:6]).mean()
    assert np.isclose(loss_of_logits(logits_BV), alone, rtol=1e-6)
    assert (gradient_BV[:6, :10] != 0).all()
    assert not gradient_BV[6:].any() and not gradient_BV[:, 10:].any()
    every_logit = cross_entropy(logits_BV[:6], labels_B[:6]).mean()
    assert not np.isclose(loss_of_logits(logits_BV), every_logit, rtol=0.1)  # the mask matters


def test_the_last_batch_of_an_epoch_has_29_real_rows(page):
    """1,437 rows are 22 batches of 64 and one of 29, whose other rows have weight 0."""
    rows = page.shuffled(0)
    assert [len(batch) for batch in rows] == [64] * 22 + [29]
    x_BI, labels_B, weights_B = page.batch_of(rows[-1], page.mesh)
    assert x_BI.shape == (64, 64) and np.array_equal(weights_B, np.arange(64) < 29)
    np.testing.assert_array_equal(x_BI[:29], page.images_BI[rows[-1]])
    np.testing.assert_array_equal(labels_B[:29], page.labels_B[rows[-1]])


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
        blocks = page.runs[name].model.blocks
        x_BI = page.batch_of(np.arange(64), page.strategies[name].mesh())[0]
        arrays = [x_BI, blocks.w_DF[...], blocks.w_FD[...]]
        assert [array.sharding.shard_shape(array.shape)[-2:] for array in arrays] == shapes


def test_in_how_many_pieces_the_weights_are(page):
    """Of 302,592 numbers of kernels and 2,304 of biases and scales, FSDP shards only the kernels."""
    assert (KERNELS, B_F, SMALL) == (302_592, 1_536, 768) and B_F + SMALL == 2_304
    pieces = {  # of kernels, b_F, scale_D and b_D
        "data parallel": (1, 1, 1),
        "FSDP": (8, 1, 1),
        "tensor parallel": (8, 8, 1),
        "FSDP x tensor": (8, 4, 1),
    }
    for name, (of_kernels, of_b_f, of_small) in pieces.items():
        model = page.runs[name].model
        blocks = model.blocks

        def numbers(*weights):
            shapes = [weight.sharding.shard_shape(weight.shape) for weight in weights]
            return sum(int(np.prod(shape)) for shape in shapes)

        kernels = (model.w_ID, blocks.w_DF, blocks.w_FD, model.w_DV)
        assert numbers(*kernels) * of_kernels == KERNELS
        assert numbers(blocks.b_F) * of_b_f == B_F
        assert numbers(blocks.scale_D, blocks.b_D) * of_small == SMALL


def test_what_a_device_stores(page):
    """12 bytes for each number that a device has, and two counters; the prediction's arithmetic."""
    assert KERNELS // 8 + B_F + SMALL == 40_128 and 12 * 40_128 + 8 == 481_544
    assert 12 * (KERNELS + B_F + SMALL) + 8 == 3_658_760 == 8 * 457_345
    expected = {
        "one device": 3_658_760,
        "data parallel": 3_658_760,
        "FSDP": 481_544,
        "tensor parallel": 12 * (KERNELS // 8 + B_F // 8 + SMALL) + 8,
        "FSDP x tensor": 12 * (KERNELS // 8 + B_F // 4 + SMALL) + 8,
    }
    for name, run in page.runs.items():
        assert ms.memory((run.model, run.optimizer)).bytes_per_device == expected[name]


@pytest.mark.parametrize("data, model", [(2, 4), (4, 2), (1, 8)])
def test_the_arithmetic_holds_on_other_meshes(page, data, model):
    strategy = page.Strategy(data, model, fsdp="data")
    _, state = nnx.get_abstract_model(partial(page.make, page.tiny, strategy), strategy.mesh())
    numbers = KERNELS // 8 + B_F // model + SMALL
    assert ms.memory(state).bytes_per_device == 12 * numbers + 8


def test_the_optimizer_gives_each_moment_the_annotation_of_its_weight(page):
    """AdamW's moments are sharded as their weights are, under each of the five strategies."""
    for run in page.runs.values():
        weights = jax.tree.leaves(run.model)
        for moments in (run.optimizer.opt_state[0].mu, run.optimizer.opt_state[0].nu):
            for weight, moment in zip(weights, jax.tree.leaves(moments), strict=True):
                assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)


# The losses agree


def test_losses_and_weights_agree_under_all_strategies(page):
    """All losses of an epoch agree to rounding, and so do the weights after it."""
    reference = page.runs["one device"]
    assert len(page.runs) == 5 and reference.losses[0] > 2.5 and reference.losses[-1] < 0.2
    assert page.runs["data parallel"] is page.trained  # which went on for four more epochs
    for name, run in page.runs.items():
        assert apart([np.array(run.losses[:23])], [np.array(reference.losses)]) < 1e-5
        if name != "data parallel":
            weights = zip(host(run.model), host(reference.model), strict=True)
            assert max(np.abs(a - b).max() for a, b in weights) < 0.01 * 23 * 1e-3
            assert run.optimizer.step[...] == len(run.losses) == 23


def test_the_first_gradients_agree_under_all_strategies(page):
    """Adam's first moments after one step are a tenth of the gradient, and agree to rounding."""
    gradients = {}
    for name, strategy in page.strategies.items():
        batch = page.batch_of(page.shuffled(0)[0], strategy.mesh())
        _, optimizer, _ = page.runs[name].program(*begin(page, strategy), batch)
        gradients[name] = host(optimizer.opt_state[0].mu)
    for gradient in gradients.values():
        assert apart(gradient, gradients["one device"]) < 1e-5


# What each strategy sends


def moves(name, compiler):
    """{(kind, axes): (payload, wire)} of a stored program, in bytes."""
    found = {}
    for row in stored_program(name)[compiler]["moves"]:
        key = row["kind"], tuple(row["axes"])
        payload, wire = found.get(key, (0, 0))
        found[key] = payload + row["payload"], wire + row["wire"]
    return found


def sent(name, compiler):
    return sum(wire for _, wire in moves(name, compiler).values()) / 1e6


WEIGHTS = 4 * (KERNELS + B_F + SMALL)  # bytes
IN_BLOCKS = 4 * 2 * 4 * 96 * 384  # of the kernels of the blocks
GATHERED = 2 * IN_BLOCKS + 30_720  # those of the blocks twice, first and last once


@compiled_for_cpu
def test_the_stored_programs_for_cpu_are_the_ones_that_this_page_compiles(page):
    """Each strategy sends in the page's own program what the stored program for CPU sends."""
    for name, stored in page.stored_names.items():
        assert page.sent_mb(page.runs[name].program) == pytest.approx(sent(stored, "cpu"))


def test_one_device_sends_nothing(page):
    assert len(ms.collectives(page.runs["one device"].program)) == 0


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_data_parallelism_sums_all_gradients(compiler):
    """Data parallelism sends 2 x 7/8 x 1.22 = 2.13 MB, on all three; the loss is 8 bytes more."""
    assert moves("train-dp", compiler) == {
        ("all-reduce", ("data",)): (WEIGHTS + 8, 7 / 4 * (WEIGHTS + 8))
    }
    assert f"{WEIGHTS / 1e6:.2f}" == "1.22" and f"{7 / 4 * WEIGHTS / 1e6:.2f}" == "2.13"


@pytest.mark.parametrize("compiler, size", [("gpu", 1), ("cpu", 1), ("tpu", 2)])
def test_fsdp_gathers_the_kernels_of_the_blocks_twice(compiler, size):
    """FSDP gathers 2.39 MB and sends 7/8 of them, 2.09 MB; the TPU's gathers are in bfloat16."""
    assert IN_BLOCKS == 1_179_648 and GATHERED == 2_390_016
    payload, wire = moves("train-fsdp", compiler)["all-gather", ("data",)]
    assert payload * size == GATHERED and wire == 7 / 8 * payload
    assert f"{GATHERED / 1e6:.2f}" == "2.39" and f"{7 / 8 * GATHERED / 1e6:.2f}" == "2.09"
    types = {row["dtype"] for row in stored_program("train-fsdp")[compiler]["moves"]}
    assert ("bfloat16" in types) == (compiler == "tpu")


def test_for_h100_gradients_are_scattered():
    """On an H100 FSDP sends 1.06 MB for gradients of kernels, and all-reduces the small weights'."""
    found = moves("train-fsdp", "gpu")
    assert found["reduce-scatter", ("data",)] == (4 * KERNELS, 7 / 8 * 4 * KERNELS)
    assert f"{7 / 8 * 4 * KERNELS / 1e6:.2f}" == "1.06"
    assert found["all-reduce", ("data",)][0] == 4 * (B_F + SMALL) + 8


def test_for_cpu_gradients_are_summed_whole():
    """The CPU's FSDP has no reduce-scatter: it all-reduces all gradients."""
    found = moves("train-fsdp", "cpu")
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    assert found["all-reduce", ("data",)][0] == WEIGHTS + 8


def test_on_an_h100_fsdp_sends_half_as_much_again():
    """1.5 times the bytes of data parallelism: two gathers and a reduce-scatter, each half a sum."""
    assert 1.45 < sent("train-fsdp", "gpu") / sent("train-dp", "gpu") < 1.55


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_tensor_parallelism_sums_activations(compiler):
    """Tensor parallelism gathers one weight, and adds up activations: for each layer one
    all-reduce forward and one backward."""
    found = moves("train-tp", compiler)
    assert set(found) == {("all-gather", ("model",)), ("all-reduce", ("model",))}
    assert found["all-gather", ("model",)][0] <= 4 * 64 * 96
    activation = 4 * 64 * 96
    rest = found["all-reduce", ("model",)][0] - (2 * 4 + 1) * activation
    assert 0 < rest <= 4 * 4 * 64  # a few numbers for each row
    assert f"{9 * 7 / 4 * activation / 1e6:.2f}" == "0.39"


@pytest.mark.parametrize("compiler", ["gpu", "cpu"])
def test_the_hybrid_does_all_of_it_in_smaller_pieces(compiler):
    """Weights are in four pieces along model, a ring of two sends 1/2, activations have half of
    the rows."""
    found, whole = moves("train-hybrid", compiler), moves("train-tp", compiler)
    payload, wire = found["all-gather", ("data",)]
    assert payload == GATHERED / 4 and wire == payload / 2
    assert found["all-reduce", ("model",)][0] < 0.6 * whole["all-reduce", ("model",)][0]
    activation = 4 * 32 * 96  # ten of them, and a few numbers for each row
    assert 0 < found["all-reduce", ("model",)][0] - 10 * activation <= 4 * 4 * 32
    gradients = found["all-reduce", ("data",)][0]
    gradients += found.get(("reduce-scatter", ("data",)), (0, 0))[0]
    assert gradients == 4 * ((KERNELS + B_F) // 4 + SMALL) + 8


@compiled_for_cpu
def test_the_programs_of_this_page_gather_sum_and_scatter_what_the_text_says(page):
    """Compiled here: payloads by kind and axis of each strategy, with no reduce-scatter."""
    moved = {
        name: ms.collectives(run.program).by("kind", "axes") for name, run in page.runs.items()
    }
    for name in ("data parallel", "FSDP"):  # gradients; the loss: a sum and a count
        assert moved[name].bytes("all-reduce", "data") == WEIGHTS + 8
        assert moved[name].wire("all-reduce", "data") == 7 / 4 * (WEIGHTS + 8)
    assert moved["FSDP"].bytes("all-gather", "data") == GATHERED
    assert moved["tensor parallel"].bytes("all-gather", "model") == 4 * 64 * 96
    assert moved["FSDP x tensor"].bytes("all-gather", "data") == GATHERED // 4
    for table in moved.values():
        assert "reduce-scatter" not in {kind for kind, _ in table}


@compiled_for_cpu
def test_tensor_parallelism_sums_activations_and_not_logits(page):
    """No sum along model has the shape of the logits: they stay sharded by classes."""
    seen = 0
    for name in ("tensor parallel", "FSDP x tensor"):
        for row in ms.collectives(page.runs[name].program):
            rows_here = 64 // page.strategies[name].data
            if row.axes == ("model",) and row.shape[:1] == (rows_here,):
                assert row.shape in ((rows_here,), (rows_here, 96), (64, 96))
                seen += 1
    assert seen


# FSDP that became tensor parallelism


def test_the_four_kinds_of_kernel(page):
    """The kernels lead from I to D, from D to F, from F to D, and from D to V."""
    model = page.trained.model
    stacked = (model.blocks.w_DF, model.blocks.w_FD)
    shapes = {model.w_ID.shape, model.w_DV.shape} | {weight.shape[1:] for weight in stacked}
    assert page.kernels == shapes


@compiled_for_cpu
def test_fsdp_gathers_its_kernels_and_nothing_else(page):
    """With the constraints, what FSDP gathers are the four kinds of kernel."""
    assert page.gathered == page.kernels


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


@compiled_for_cpu
def test_without_constraints_no_kernel_of_a_block_is_gathered(page):
    """The weights stay where they are, and the losses agree."""

    class Unpinned(page.Model):
        def __call__(self, x_BI):
            x_BD, _ = jax.lax.scan(
                lambda x_BD, block: (block(x_BD), None), x_BI @ self.w_ID, self.blocks
            )
            return x_BD @ self.w_DV

    def make(strategy):
        model = Unpinned(page.tiny, strategy, nnx.Rngs(0))
        return model, nnx.Optimizer(model, page.adamw, wrt=nnx.Param)

    strategy, losses = page.strategies["FSDP"], []
    with jax.set_mesh(strategy.mesh()):
        model, optimizer = jax.jit(make, static_argnums=0)(strategy)
        batches = [page.batch_of(rows, strategy.mesh()) for rows in page.shuffled(0)]
        jitted = page.compiled_step(page.step, model, optimizer)
        program = jitted.lower(model, optimizer, batches[0]).compile()
        for batch in batches:
            model, optimizer, loss = program(model, optimizer, batch)
            losses.append(float(loss))
    moved = ms.collectives(program)
    gathered = {row.shape for row in moved if row.kind == "all-gather"}
    assert not gathered & {(96, 384), (384, 96)}
    np.testing.assert_allclose(losses, page.runs["FSDP"].losses, rtol=1e-5)
    assert page.sent_mb(program) == pytest.approx(sent("train-loose", "cpu"))


def test_what_fsdp_without_constraints_costs():
    """On an H100 22.5 MB in place of 3.2 with 1,024 rows, and less with 64; with constraints the
    batch does not matter."""
    told = [f"{sent(name, 'gpu'):.1f}" for name in ("train-loose-1024", "train-fsdp-1024")]
    assert told == ["22.5", "3.2"]
    assert sent("train-loose", "gpu") < sent("train-fsdp", "gpu") == sent("train-fsdp-1024", "gpu")


# The companion has this program


@pytest.mark.parametrize("name", ["data parallel", "FSDP x tensor"])
def test_the_companion_has_the_model_of_this_page(page, name):
    """many_devices.model makes the same weights with the same annotations, and the same loss."""

    def begin(program, strategy, batch):
        model = program.Model(program.tiny, strategy, nnx.Rngs(0))
        return model, program.loss_of(model, batch)

    made = []
    for program in (page, companion):
        strategy = program.strategies[name]
        batch = page.batch_of(np.arange(64), strategy.mesh())
        with jax.set_mesh(strategy.mesh()):
            made.append(jax.jit(partial(begin, program, strategy, batch))())
    (ours, our_loss), (theirs, their_loss) = made
    assert our_loss == their_loss
    variables = [nnx.to_flat_state(nnx.state(model)) for model in (ours, theirs)]
    for (path, one), (other_path, other) in zip(*variables, strict=True):
        assert (path, one.out_sharding) == (other_path, other.out_sharding)
        assert np.array_equal(one, other)


def test_the_companion_has_the_strategies_of_this_page(page):
    """Its Strategy has more fields, which by default change nothing."""
    assert page.tiny.__dict__ == companion.tiny.__dict__
    assert list(page.strategies) == list(companion.strategies)
    for name, ours in page.strategies.items():
        theirs = companion.strategies[name]
        assert vars(ours).items() <= vars(theirs).items()
        assert ours.mesh() == theirs.mesh()


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
