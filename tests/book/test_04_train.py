"""Chapter 4, "Train: the program does not change, the strategy does": optimizers and Adam's step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from pages import compiled_for_cpu

PAGE = "04-train"
AUTO = jax.sharding.AxisType.Auto
P = jax.P


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


def test_the_optimizer_gives_each_moment_the_annotation_of_its_weight(page):
    """AdamW's moments lie where their weights lie, under each of the five strategies."""
    for strategy in page.strategies.values():
        model, optimizer = page.placed(strategy)
        weights = jax.tree.leaves(model)
        for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
            for weight, moment in zip(weights, jax.tree.leaves(moments), strict=True):
                assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)


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
