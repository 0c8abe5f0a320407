"""examples/plan_transformer.py: the sizes it claims, and a plan for a small model of its kind."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
import plan_transformer as example

SMALL = dataclasses.replace(
    example.CONFIG, L=2, D=64, F=128, K=4, G=2, C=16, V=256, B=16, S=32
)  # fmt: skip


def mesh_of(data, model):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, model), example.AXES, axis_types=kinds)


def weights_of(config):
    with jax.set_mesh(mesh_of(8, 1)):
        made = nnx.eval_shape(lambda: example.Transformer(config, {}, nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(made, nnx.Param)))


def test_it_has_the_weights_of_llama_3_8b():
    """https://huggingface.co/meta-llama/Meta-Llama-3-8B says so many."""
    assert weights_of(example.CONFIG) == 8_030_261_248


@pytest.fixture(scope="module")
def plan():
    step = functools.partial(example.step, config=SMALL)
    return ms.plan(step, example.TABLES, 8, axes=example.AXES)


def test_every_table_compiles_and_what_does_not_divide_is_said(plan):
    assert {outcome.table for outcome in plan.fitting} == {
        "data parallel", "FSDP", "FSDP x tensor", "HSDP"
    }  # fmt: skip
    (tensor,) = [one for one in plan.outcomes if one.error]
    assert (tensor.table, tensor.where) == ("tensor parallel", "model 8")
    assert "4" in tensor.error, "there are four heads for keys and values, and eight devices"


def test_closed_forms_are_those_of_its_tables(plan):
    weights, seven = weights_of(SMALL), 7 / 8
    by_table = {one.table: one.expected for one in plan.fitting if one.where == "data 8"}
    assert sum(by_table["data parallel"].values()) == 2 * 2 * weights * seven
    scales = SMALL.D * (2 * SMALL.L + 1)  # whole on each device, so that their gradients are summed
    fsdp = by_table["FSDP"]
    assert fsdp["all-gather", ("data",)] == 2 * 2 * (weights - scales) * seven
    assert fsdp["reduce-scatter", ("data",)] == 2 * (weights - scales) * seven
    (both,) = [one for one in plan.fitting if one.where == "data 4 × model 2" and "x" in one.table]
    rows = SMALL.B * SMALL.S // 4
    sums = (5 * SMALL.L + 2) * rows * SMALL.D * 2
    assert both.expected["all-reduce", ("model",)] == 2 * sums / 2


def test_state_is_twelve_bytes_for_each_weight_on_the_devices_that_share_it(plan):
    """float32 masters and two moments: whole under data parallelism, an eighth under FSDP."""
    by_table = {one.table: one.memory.arguments for one in plan.fitting if one.where == "data 8"}
    weights = weights_of(SMALL)
    assert by_table["data parallel"] == pytest.approx(12 * weights, rel=0.01)
    assert by_table["FSDP"] == pytest.approx(12 * weights / 8, rel=0.02)


def test_devices_share_out_the_work(plan):
    for outcome in plan.fitting:
        assert outcome.repeats == pytest.approx(1, abs=0.05), (outcome.table, outcome.where)


@pytest.mark.slow
def test_the_step_that_is_planned_learns_the_same_under_every_table():
    """What is compiled from shapes is a training step, and not only the shape of one."""
    config = dataclasses.replace(SMALL, D=32, C=8, B=8)
    tokens_BS = np.random.default_rng(0).integers(config.V, size=(config.B, config.S))
    losses = {}
    for table, sizes in {"data parallel": (8, 1), "FSDP x tensor": (2, 4)}.items():
        mesh, rules = mesh_of(*sizes), example.TABLES[table]
        with jax.set_mesh(mesh):
            make = jax.jit(lambda rules=rules: example.Transformer(config, rules, nnx.Rngs(0)))
            model = make()
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

            @jax.jit
            def step(model, optimizer, tokens_BS, rules=rules):
                loss, grads = nnx.value_and_grad(example.loss_of)(model, tokens_BS, rules)
                optimizer.update(model, grads)
                return model, optimizer, loss

            losses[table] = []
            for _ in range(5):
                model, optimizer, loss = step(model, optimizer, tokens_BS)
                losses[table].append(float(loss))
    first, second = losses.values()
    np.testing.assert_allclose(first, second, rtol=0.01)
    assert first[0] == pytest.approx(math.log(config.V), rel=0.02) and first[-1] < first[0] - 0.2
