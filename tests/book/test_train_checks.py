"""The page "Check a training": the step counter in a run that goes on, and what FSDP gathers."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "train-checks"


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


# FSDP in a scan gathers the blocks twice


def written_out(page):
    """What makes the page's model with its blocks one after another, each with its pin."""

    class WrittenOut(page.Model):
        def __call__(self, x_BI):
            def layer(x_BD, block):
                return page.pinned(block(x_BD), self.strategy)

            x_BD = page.pinned(x_BI @ self.w_ID, self.strategy)
            for number in range(page.tiny.L):
                block = jax.tree.map(lambda w, i=number: w[i], self.blocks)
                x_BD = self.strategy.remat(layer)(x_BD, block)
            return page.pinned(x_BD @ self.w_DV, self.strategy, features="model")

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
    make = page.make if layers == "scan" else written_out(page)
    program = page.step_program(page.tiny, strategy, 64, make=make)
    config = page.tiny
    of_the_blocks = 4 * 2 * config.L * config.D * config.F
    at_the_ends = 4 * (config.I + config.V) * config.D
    gathered = ms.collectives(program).by("kind").bytes("all-gather")
    assert gathered == times * of_the_blocks + at_the_ends
