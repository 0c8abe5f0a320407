"""The page "FSDP in bfloat16: gather in bfloat16, sum in float32"."""

import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compared
import meshscope as ms
from layers_of_fsdp import free_gathers
from many_devices.helpers import traffic
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again

PAGE = "09g-fsdp-bfloat16"
P = jax.P
WHOLE = 4 * 4 * 64 * 64  # bytes of all matrices
assert_same = partial(compared.assert_same, rtol=1e-3, atol=1e-5)


def batch_of(page, first=0, dtype="float32"):
    rows = slice(first, first + 64)
    return page.images_BI[rows].astype(dtype), page.labels_B[rows]


def gradient_with(page, use):
    """The gradient of the page's loss alone, on all devices."""
    specs = dict(in_specs=(page.pieces, P("data")), out_specs=page.pieces)
    return jax.shard_map(jax.grad(partial(page.loss_of, use=use)), mesh=page.mesh, **specs)


def plain_loss(params, batch):
    """The loss on one device, in a Python loop and without a gather."""
    x_BD, labels_B = batch
    for w_DD, b_D in zip(params["w_DD"], params["b_D"]):
        x_BD = x_BD + jnp.tanh(x_BD @ w_DD + b_D)
    log_p_BV = jax.nn.log_softmax(x_BD[:, :10])
    return -jnp.mean(log_p_BV[jnp.arange(len(labels_B)), labels_B])


# bfloat16


def test_converted_first_gather_and_sum_are_in_bfloat16_and_with_the_remedy_the_gather_alone(page):
    """Not converted, both are in float32; with the remedy the sum is in float32."""
    ways = (page.gather, page.in_bf16, page.sum_in_float32)
    assert [page.dtypes_asked(way) for way in ways] == [
        {"all_gather": gathered, "reduce_scatter": summed}
        for gathered, summed in (("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32"))
    ]


@compiled_for_cpu
def test_cpu_carries_bfloat16_collectives_as_float32(page):
    """So the bytes of CPU programs cannot tell."""
    mapped = jax.shard_map(page.in_bf16, mesh=page.mesh, in_specs=P("data"), out_specs=P("data"))
    compiled = jax.jit(mapped).lower(jnp.ones((64, 16))).compile()
    assert {row.dtype for row in ms.collectives(compiled, page.mesh)} == {"float32"}


def test_a_sum_in_bfloat16_is_off_by_more_with_more_devices(page):
    """0.3 % at 8 devices, 18.7 % at 1,024."""
    errors = [float(page.ring_error(n)) for n in (8, 64, 256, 1024)]
    assert errors == sorted(errors) and errors[0] < 0.005 and 0.15 < errors[3] < 0.22


def test_late_terms_are_rounded_away(page):
    """From 1/2 on, bfloat16's numbers are 1/256 apart, and a term of less than half is lost."""
    half = jnp.bfloat16(0.5)
    assert half + jnp.bfloat16(1 / 1024) == half
    assert half + jnp.bfloat16(1.1 / 512) == half + jnp.bfloat16(1 / 256)
    terms = np.asarray((jax.random.normal(jax.random.key(0), (1024, 4096)) + 1) / 1024)
    assert np.mean(terms) == pytest.approx(1 / 1024, rel=0.01) and np.mean(terms > 0) > 0.8
    assert np.mean(terms > 1 / 512) < 1 / 6  # five of six are lost

    def one_more(so_far, term):
        return so_far + term, None

    nothing = jnp.zeros(4096, jnp.bfloat16)
    ends, _ = jax.lax.scan(one_more, nothing, terms.astype(jnp.bfloat16))
    assert 0.78 < np.mean(ends, dtype=np.float32) < 0.84  # and not 1


def plain_losses(page):
    """The losses of one device, with momentum by hand."""
    weights, speed = page.params, jax.tree.map(jnp.zeros_like, page.params)
    value, losses = jax.jit(jax.value_and_grad(plain_loss)), []
    for n in range(20):
        loss, gradient = value(weights, batch_of(page, 64 * n))
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, gradient)
        weights = jax.tree.map(lambda w, v: w - 0.05 * v, weights, speed)
        losses.append(float(loss))
    return losses


def test_twenty_steps_in_float32_have_the_losses_of_one_device(page):
    """With momentum by hand, and on new digits in each step."""
    losses = page.in_float32.losses
    np.testing.assert_allclose(losses, plain_losses(page), rtol=1e-3)
    assert len(losses) == 20 and losses[-1] < losses[0] / 2


def test_the_gradient_is_that_of_one_device(page):
    """In float32, in every number."""
    _, found = jax.jit(page.loss_and_gradient(page.use_float32))(page.params, batch_of(page))
    assert_same(found, jax.jit(jax.grad(plain_loss))(page.params, batch_of(page)))


def test_in_bfloat16_the_losses_are_close_and_not_equal(page):
    """Layers in bfloat16 train as well as in float32."""
    gaps = np.abs(np.subtract(page.in_bfloat16.losses, page.in_float32.losses))
    assert 1e-5 < gaps.max() < 5e-2


def test_weights_and_momentum_stay_in_float32_and_in_pieces(page):
    """After twenty steps in bfloat16."""
    weights, momentum, _ = page.in_bfloat16
    for leaf in jax.tree.leaves((weights, momentum)):
        assert leaf.dtype == jnp.float32
    assert "data" in weights["w_DD"].sharding.spec


def test_no_gradient_is_summed_in_bfloat16(page):
    """Neither the matrices' nor the biases', and the gradients are float32."""
    mapped = jax.jit(gradient_with(page, page.use_bf16))
    some = batch_of(page, dtype="bfloat16")
    gradient = jax.eval_shape(mapped, page.params, some)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
    sums = re.findall(
        r"stablehlo.(?:all_reduce|reduce_scatter).*?\) : \(tensor<[\dx]*?(\w+)>",
        mapped.lower(page.params, some).as_text(),
        re.DOTALL,
    )
    assert "f32" in sums[0] and not any("bf16" in dtype for dtype in sums)


def bytes_kept(page, policy):
    """Bytes that a device keeps for the backward pass, with jax.checkpoint under this policy."""
    found = []

    def forward(params, batch_block):
        loss, backward = jax.vjp(
            partial(page.loss_of, batch_block=batch_block, use=page.use_bf16), params
        )
        found.append(sum(leaf.nbytes for leaf in jax.tree.leaves(backward)))
        return loss

    specs = dict(in_specs=(page.pieces, P("data")), out_specs=P())
    remat = partial(jax.checkpoint, policy=policy)
    with mock.patch.object(jax, "checkpoint", remat):
        mapped = jax.shard_map(forward, mesh=page.mesh, **specs)
        jax.eval_shape(mapped, page.params, batch_of(page, dtype="bfloat16"))
    return found[-1]


def test_in_bfloat16_the_policy_frees_7_8_of_32_768_bytes(page):
    """`free_gathers` finds the gather inside the function with a backward pass of its own."""
    everything = bytes_kept(page, jax.checkpoint_policies.everything_saveable)
    freed = bytes_kept(page, free_gathers)
    assert everything - freed == 32_768 * 7 // 8 and 32_768 == WHOLE // 2


def test_with_remat_a_step_sends_12_bytes_a_number_and_with_the_remedy_8(page):
    """Two gathers and a scatter in the page's step: 4 + 4 + 4 bytes, and 2 + 2 + 4."""
    step = page.loss_and_gradient(page.use_bf16)
    traced = str(jax.make_jaxpr(step)(page.params, batch_of(page, dtype="bfloat16")))
    assert (traced.count("all_gather["), traced.count("reduce_scatter[")) == (2, 1)
    size = {"f32": 4, "bf16": 2}
    for way, total in ((page.gather, 12), (page.sum_in_float32, 8)):
        asked = page.dtypes_asked(way)
        assert 2 * size[asked["all_gather"]] + size[asked["reduce_scatter"]] == total


# The guard, new in JAX 0.12

guarded_since_0_12 = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax.sharding.no_collectives is new in JAX 0.12"
)
FORBIDDEN = "Collective across axis 'data' is forbidden by `no_collectives`, but `psum` acts on"


def test_without_the_guard_the_page_says_so(page, monkeypatch, capsys):
    """On an older release the cell prints one sentence, and the rest of the page runs."""
    monkeypatch.delattr(jax.sharding, "no_collectives", raising=False)
    run_again(page, PAGE, "forbidden")
    assert "has no jax.sharding.no_collectives: it came in 0.12" in capsys.readouterr().out


def test_a_forgotten_bias_is_summed_in_bfloat16_by_a_psum_that_jax_adds(page):
    """Without the guard it compiles: its gradient is summed in bfloat16, and the gathers' are not."""

    def summed_in(use):
        step = jax.jit(gradient_with(page, use))
        text = step.lower(page.params, batch_of(page, dtype="bfloat16")).as_text()
        line = r'"?stablehlo.(all_reduce|reduce_scatter).*?: \(tensor<[\dx]*x(\w+)>\)'
        return dict(re.findall(line, text, re.DOTALL))

    assert summed_in(page.bias_forgotten) == {"all_reduce": "bf16", "reduce_scatter": "f32"}
    assert summed_in(page.use_bf16) == {"all_reduce": "f32", "reduce_scatter": "f32"}


@guarded_since_0_12
def test_the_guard_refuses_the_forgotten_bias(page):
    """Of what the layer computes, only the bias's gradient needs a collective."""
    with pytest.raises(Exception, match=FORBIDDEN) as raised:
        step = page.loss_and_gradient(page.bias_forgotten, page.guarded_layer)
        step(page.params, page.batch)
    assert type(raised.value).__name__ == "ForbiddenCollectiveError"


@guarded_since_0_12
@compiled_for_cpu
def test_the_guarded_step_with_its_cast_sends_and_computes_the_same(page):
    """Compiled for CPU: gathers, scatters and the biases' all-reduce, and the same gradient."""
    step = page.loss_and_gradient(page.use_bf16, page.guarded_layer)
    moves = traffic(step, page.params, page.batch, mesh=page.mesh)
    assert moves.kinds == {"all-gather", "all-reduce", "reduce-scatter"}
    expected = jax.grad(plain_loss)(page.params, batch_of(page))
    _, found = jax.jit(step)(page.params, page.batch)
    assert_same(found, expected, rtol=0.1, atol=2e-3)


@guarded_since_0_12
def test_the_guard_refuses_a_gather_by_its_name_and_axis_index_passes(page):
    """Inside shard_map a collective along the axis is refused; axis_index moves nothing."""

    def traced(function):
        def guarded(x_block):
            with jax.sharding.no_collectives({"data"}):
                return function(x_block)

        specs = {"in_specs": P("data"), "out_specs": P("data")}
        return jax.eval_shape(jax.shard_map(guarded, mesh=page.mesh, **specs), jnp.ones(8))

    with pytest.raises(Exception, match="`all_gather` acts on axis 'data'"):
        traced(page.gather)
    traced(lambda x_block: x_block + jax.lax.axis_index("data"))


@guarded_since_0_12
def test_the_guard_refuses_a_mean_that_comes_after_the_gradient(page):
    """Chapter 9's mistake: the gradient of a weight with P() is summed already, by JAX's psum."""

    def error_of(w_DF, x_BD):
        return jnp.mean(jnp.tanh(x_BD @ w_DF) ** 2)

    def average_afterwards(gradient, w_DF, x_block_BD):
        return jax.lax.pmean(gradient(w_DF, x_block_BD), "data")

    def local(w_DF, x_block_BD):
        with jax.sharding.no_collectives({"data"}):
            return jax.grad(error_of)(w_DF, x_block_BD)

    w_DF, x_BD = jnp.full((64, 16), 0.01), batch_of(page)[0]
    on_rows = partial(jax.shard_map, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P())
    gradient = jax.grad(error_of)
    wrong = on_rows(partial(average_afterwards, gradient))(w_DF, x_BD)
    np.testing.assert_allclose(wrong, 8 * gradient(w_DF, x_BD), rtol=1e-4, atol=1e-6)
    with pytest.raises(Exception, match=FORBIDDEN):
        on_rows(partial(average_afterwards, local))(w_DF, x_BD)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
