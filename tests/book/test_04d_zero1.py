"""The page "ZeRO-1": what it saves, what it sends, results left free, and other optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.memory import state
from many_devices.stacked import strategies, tiny
from many_devices.training import sent_mb, step_program
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "04d-zero1"
AUTO = jax.sharding.AxisType.Auto
PROGRAMS = {"data parallel": "train-dp", "ZeRO-1": "train-zero1"}
COMPILERS = {"H100": "gpu", "TPU v5e": "tpu", "CPU": "cpu"}
ALL_WEIGHTS = 1_219_584  # bytes of `tiny`
SMALL_ONES = 4 * (tiny.L * (2 * tiny.D + tiny.F) + tiny.D * tiny.V)  # of these, not sharded
LARGE_ONES = ALL_WEIGHTS - SMALL_ONES
IN_EIGHTHS = LARGE_ONES // 8 + SMALL_ONES
GATHER = 7 / 8 * ALL_WEIGHTS


# ZeRO-1


def test_zero_1_keeps_whole_weights_and_the_same_losses(page):
    """The weights are whole on every device, and twenty losses are those of data parallelism."""
    assert ms.memory(page.zero1.model).bytes_per_device == ALL_WEIGHTS
    np.testing.assert_allclose(page.zero1.losses, page.plain.losses, rtol=1e-5)


def test_zero_1_keeps_moments_of_large_weights_in_eighths(page):
    """The optimizer has 331,784 bytes on a device: small arrays stay whole."""
    assert LARGE_ONES == 4 * 301_056 == 4 * 8 * 37_632 and SMALL_ONES == 4 * 3_840
    assert ms.memory(page.zero1.optimizer).bytes_per_device == 2 * IN_EIGHTHS + 8 == 331_784


def test_moments_of_the_large_model_shrink_from_34_4_to_4_3_gb(page):
    """They are half of the 69 GB of weights, gradients and moments; the weights stay whole."""
    whole = state(page.data_parallel)
    zero1 = state(page.data_parallel, make=page.make_zero1)
    assert f"{whole['moments'] / 1e9:.1f} {zero1['moments'] / 1e9:.1f}" == "34.4 4.3"
    assert page.memory == zero1  # as printed last
    assert f"{sum(whole.values()) / 1e9:.0f}" == "69"
    assert 0.48 < whole["moments"] / sum(whole.values()) < 0.52
    assert zero1["weights"] == whole["weights"]


@compiled_for_cpu
def test_results_left_free_come_back_sharded(page):
    """The weights are whole before step 1 and 165,888 bytes after; steps 1 and 2 are compiled."""
    assert page.sizes == [ALL_WEIGHTS] + [IN_EIGHTHS] * 3 and IN_EIGHTHS == 165_888
    assert page.programs == [1, 2, 2]
    assert 1 < IN_EIGHTHS / (ALL_WEIGHTS / 8) < 1.1


def test_results_left_free_give_the_same_loss(page):
    """After three steps the loss is that of ZeRO-1 with pinned results."""
    loss = page.after("free").loss
    assert np.isclose(float(loss), page.zero1.losses[2], rtol=1e-5)


# What ZeRO-1 sends, in gathers


def gathers(strategy, compiler):
    """What a device sends in a step of `tiny`, in gathers of all weights, as stored."""
    moves = stored_program(PROGRAMS[strategy])[COMPILERS[compiler]]["moves"]
    return sum(move["wire"] for move in moves) / GATHER


@compiled_for_cpu
def test_the_stored_rows_are_what_the_cpu_compiler_makes_here(page):
    """The stored programs are those of this page, and for CPU they send what is stored."""
    programs = {"data parallel": page.plain.program, "ZeRO-1": page.zero1.program}
    for strategy, program in programs.items():
        assert sent_mb(program) * 1e6 / GATHER == pytest.approx(gathers(strategy, "CPU"))


@compiled_for_cpu
def test_for_cpu_zero_1_adds_one_all_gather_of_the_large_weights(page):
    """Compiled for CPU, ZeRO-1 sends half as much again, and FSDP nearly twice as much."""
    added = ms.diff(page.plain.program, page.zero1.program)
    assert set(added) == {("all-gather", ("data",))}
    assert added.bytes("all-gather", "data") == LARGE_ONES
    assert 1.49 < sent_mb(page.zero1.program) / sent_mb(page.plain.program) < 1.5
    of_fsdp = step_program(tiny, strategies["FSDP"], 64)
    assert 1.95 < sent_mb(of_fsdp) / sent_mb(page.plain.program) < 2
    for program in (page.zero1.program, of_fsdp):
        assert set(ms.collectives(program).by("kind")) == {"all-gather", "all-reduce"}


def test_the_tpus_compiler_pads_what_zero_1_scatters():
    """For TPU v5e the reduce-scatters of ZeRO-1 are larger than the gradients: a sixth more is sent."""
    scattered = {
        name: sum(
            move["payload"]
            for move in stored_program("train-zero1")[compiler]["moves"]
            if move["kind"] == "reduce-scatter"
        )
        for name, compiler in COMPILERS.items()
    }
    assert scattered["TPU v5e"] > scattered["H100"] == LARGE_ONES
    ratio = {name: gathers("ZeRO-1", name) / gathers("data parallel", name) for name in COMPILERS}
    assert ratio["H100"] == 1
    assert ratio["TPU v5e"] == pytest.approx(1 + 1 / 6, abs=0.01)
    assert ratio["CPU"] == pytest.approx(1.5, abs=0.01)


# Optimizers whose state has another shape


class OneWeight(nnx.Module):
    def __init__(self, names, **metadata):
        self.w = nnx.Param(jnp.ones((256, 512)), out_sharding=names, **metadata)


def optimizer_for(tx, names, sizes=(2, 4), **metadata):
    """A model of one weight with these names, and its optimizer, made as chapter 4 makes them."""
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AUTO,) * 2)

    def make():
        model = OneWeight(names, **metadata)
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


@pytest.mark.parametrize("names", ANNOTATIONS, ids=str)
@pytest.mark.parametrize(
    "tx",
    [
        optax.adafactor(1e-3),
        optax.sm3(1e-3),
        optax.novograd(1e-3),
        optax.lbfgs(memory_size=10),
        optax.adamw(1e-3),
    ],
    ids=["adafactor", "sm3", "novograd", "lbfgs", "adamw"],
)
def test_an_empty_optimizer_sharding_leaves_the_state_whole(tx, names):
    """And the weight is sharded as it was annotated."""
    model, optimizer = optimizer_for(tx, names, optimizer_sharding=())
    wanted = jax.NamedSharding(model.w.sharding.mesh, jax.P(*names))
    assert model.w.sharding.is_equivalent_to(wanted, 2)
    for leaf in jax.tree.leaves(optimizer):
        assert leaf.sharding.is_fully_replicated


def test_adafactor_keeps_a_row_and_a_column_for_a_matrix():
    """Of 256 x 512 numbers it keeps 256 + 512, and a handful of scalars."""
    _, optimizer = optimizer_for(optax.adafactor(1e-3), (None, None), optimizer_sharding=())
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(optimizer))
    assert sizes[-2:] == [256, 512] and sizes[-3] <= 1


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)
