"""The page "Smaller activations": what remat sends, in a scan and in a list, and how fast bfloat16 is."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from pages import BOOK, compiled_for_cpu

PAGE = "activations"


def in_a_list(page):
    """What makes chapter 4's model with its blocks in a list, not in a scan, and its optimizer."""

    class InAList(page.Model):
        def __init__(self, config, strategy, rngs):
            super().__init__(config, strategy, rngs)
            self.blocks = nnx.List([page.Block(config, strategy, rngs) for _ in range(config.L)])

        def __call__(self, x_BI):
            def layer(x_BD, block):
                return page.pinned(block(x_BD), self.strategy)

            x_BD = page.pinned(x_BI @ self.w_ID, self.strategy)
            for block in self.blocks:
                x_BD = self.strategy.remat(layer)(x_BD, block)
            return page.pinned(x_BD @ self.w_DV, self.strategy, features="model")

    def make(config, strategy):
        model = InAList(config, strategy, nnx.Rngs(0))
        return model, nnx.Optimizer(model, page.adamw, wrt=nnx.Param)

    return make


def gathers_of_the_blocks(page, program):
    """Bytes gathered, in gathers of all blocks; the first and the last kernel are left out."""
    config = page.tiny
    of_blocks = 4 * 2 * config.L * config.D * config.F
    at_the_ends = 4 * (config.I + config.V) * config.D  # gathered once each
    gathered = ms.collectives(program).by("kind").bytes("all-gather")
    return (gathered - at_the_ends) / of_blocks


@pytest.fixture(scope="module")
def programs(page):
    """The step of FSDP on `tiny`, in a scan and in a list, without remat and with it."""
    strategies = {"plain": page.fsdp, "remat": replace(page.fsdp, remat=jax.checkpoint)}
    return {
        (layers, name): page.step_program(page.tiny, strategy, 64, make=make)
        for layers, make in {"scan": page.make, "list": in_a_list(page)}.items()
        for name, strategy in strategies.items()
    }


@compiled_for_cpu
@pytest.mark.parametrize("name", ["plain", "remat"])
def test_in_a_scan_fsdp_gathers_each_block_twice_with_remat_or_without(page, programs, name):
    """In a scan FSDP gathers each weight of a block twice, with remat or without."""
    assert gathers_of_the_blocks(page, programs["scan", name]) == 2


@compiled_for_cpu
def test_in_a_list_fsdp_gathers_once_and_remat_adds_the_second_gather(page, programs):
    """Layers in a list are gathered once; with remat they are gathered twice."""
    assert gathers_of_the_blocks(page, programs["list", "plain"]) == 1
    assert gathers_of_the_blocks(page, programs["list", "remat"]) == 2


@compiled_for_cpu
def test_in_a_scan_neither_remat_nor_bfloat16_sends_a_byte_more(page, programs):
    """In this program neither remat nor bfloat16 sends a byte more."""
    sent = page.sent_mb(programs["scan", "plain"])
    for strategy in (page.halved, page.recomputed, page.mixed):
        assert page.sent_mb(page.step_program(page.tiny, strategy, 64)) == sent


@compiled_for_cpu
def test_in_a_list_remat_sends_more(page, programs):
    """Layers in a list: remat sends a whole gather of the blocks more."""
    plain, remat = (page.sent_mb(programs["list", name]) for name in ("plain", "remat"))
    config = page.tiny
    one_gather = 7 / 8 * 4 * 2 * config.L * config.D * config.F / 1e6
    assert remat - plain == pytest.approx(one_gather)


def test_the_list_is_the_same_model(page):
    """Blocks in a list and in a scan are the same function, if they have the same weights."""
    strategy = page.Strategy(1, 1)
    with jax.set_mesh(strategy.mesh()):
        listed, _ = in_a_list(page)(page.tiny, strategy)
        stacked, _ = page.make(page.tiny, strategy)
        for number, block in enumerate(listed.blocks):
            nnx.update(block, jax.tree.map(lambda w, i=number: w[i], nnx.state(stacked.blocks)))
        for name in ("w_ID", "w_DV"):
            getattr(listed, name).set_value(getattr(stacked, name)[...])
        x_BI = page.images_BI[:8]
        np.testing.assert_allclose(listed(x_BI), stacked(x_BI), rtol=1e-4, atol=1e-5)


# Products in bfloat16 and in float32: the H200's numbers, as the pages print them


def number(page, pattern):
    """A number as it stands in the text of a page, which must say it once."""
    (found,) = set(re.findall(pattern, (BOOK / f"{page}.md").read_text("utf-8")))
    return float(found)


def test_bfloat16_is_about_twice_as_fast_as_float32_by_default_and_many_times_as_highest():
    """On the H200, bfloat16 multiplies about twice as fast as float32 at JAX's default precision,
    and many times as fast as with "highest"."""
    operations = 2 * 8192**3
    by_default = operations / (1e-3 * number("04-train", r"took ([\d.]+) ms by default")) / 1e12
    highest = operations / (1e-3 * number("04-train", r"and ([\d.]+) ms with `\"highest\"`")) / 1e12
    bfloat16 = number("strategies", r"reached at best (\d+) of the 989 TFLOP/s")
    assert 1.8 < bfloat16 / by_default < 2.2
    assert bfloat16 / highest > 10
    assert f"{bfloat16:.0f} and {by_default:.0f} TFLOP/s" in (BOOK / "activations.md").read_text(
        "utf-8"
    )
