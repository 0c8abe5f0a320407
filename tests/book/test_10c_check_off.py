"""Deeper page to chapter 10, "Right gradients with `check_vma=False`"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pages import check_exercise, exercises_of

PAGE = "10c-check-off"
P = jax.P
N = 8


def assert_same(tree, expected, rtol=1e-3, atol=1e-5):
    """Equal up to float32 rounding: eight devices add in a different order from one."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def in_pieces(page, function, check, out_specs):
    """The function of pieces of the weights and rows of the batch, on eight devices."""
    in_specs = page.fsdp_specs, P("data")
    return jax.shard_map(
        function, mesh=page.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check
    )


def around_fsdp(page, check):
    """The gradient of FSDP around the whole shard_map, which returns the devices' losses."""

    def own_loss(params, batch_block):
        w_DF = page.gather_rows(params["w_DF"])
        return page.own_loss(params | {"w_DF": w_DF}, batch_block)

    mapped = in_pieces(page, own_loss, check, P("data"))
    mean = jax.jit(jax.grad(lambda params, batch: jnp.mean(mapped(params, batch))))
    return mean(page.params, page.batch)


def forms(page, check):
    """The gradient of each form that the page names."""
    by_rows = {
        "grad(pmean(loss))": jax.grad(page.mean_loss),
        "pmean(grad(loss))": page.mean_of_gradients,
        "cast, then pmean(grad(loss))": page.either_way,
    }
    sharded = {
        "FSDP: grad(pmean(loss))": jax.grad(page.fsdp_loss),
        "FSDP: cast the bias, grad(loss / 8), psum of the bias": page.answer_either,
    }
    found = {name: page.on_eight(way, check) for name, way in by_rows.items()}
    found |= {name: page.on_eight(way, check, page.fsdp_specs) for name, way in sharded.items()}
    return found | {
        "grad around shard_map": jax.jit(jax.grad(partial(page.outside, check=check)))(
            page.params, page.batch
        ),
        "FSDP: grad around shard_map": around_fsdp(page, check),
    }


def test_which_forms_are_right_with_the_check_on_and_off(page):
    """How many times the true gradient each form gives, for the matrix and for the bias."""
    right, eight, wrong = ("1x", "1x"), ("8x", "8x"), ("wrong", "wrong")
    wanted = {
        "grad(pmean(loss))": (right, wrong),
        "pmean(grad(loss))": (eight, right),
        "cast, then pmean(grad(loss))": (right, right),
        "FSDP: grad(pmean(loss))": (right, ("8x", "wrong")),
        "FSDP: cast the bias, grad(loss / 8), psum of the bias": (right, right),
        "grad around shard_map": (right, right),
        "FSDP: grad around shard_map": (right, right),
    }
    on, off = (forms(page, check) for check in (True, False))
    found = {
        form: tuple(tuple(page.factors(way[form]).values()) for way in (on, off)) for form in on
    }
    assert found == wanted


def on_each_device(page, function, check):
    """What a function of weights and rows returns on each device, stacked."""

    def stacked(params, batch_block):
        return jax.tree.map(lambda array: array[None], function(params, batch_block))

    mapped = jax.shard_map(
        stacked,
        mesh=page.mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=check,
    )
    return jax.jit(mapped)(page.params, page.batch)


def assert_of_own_rows(page, stacked):
    """On device i it is the gradient of the rows 8 i to 8 i + 7."""
    for i in range(N):
        own = jax.tree.map(lambda rows, i=i: rows[8 * i : 8 * i + 8], page.batch)
        found = jax.tree.map(lambda gradient, i=i: gradient[i], stacked)
        assert_same(found, jax.grad(page.loss_of)(page.params, own))


def test_with_the_check_off_grad_of_pmean_leaves_each_device_its_own_gradient(page):
    """That of its own eight rows."""
    assert_of_own_rows(page, on_each_device(page, jax.grad(page.mean_loss), check=False))


@pytest.mark.parametrize("check", [True, False])
def test_after_a_cast_each_device_has_the_gradient_of_its_own_rows(page, check):
    """With the check on and off; without the cast and with the check on it has the sum of all."""

    def after_cast(params, batch_block):
        varying = jax.lax.pcast(params, "data", to="varying")
        return jax.grad(page.loss_of)(varying, batch_block)

    assert_of_own_rows(page, on_each_device(page, after_cast, check))
    uncast = on_each_device(page, jax.grad(page.loss_of), check)
    if check:
        assert_same(uncast["b_F"][0], 8 * page.true_gradient["b_F"])
    else:
        assert_of_own_rows(page, uncast)


def test_after_a_cast_a_mean_in_the_loss_depends_on_the_check(page):
    """The sum of the gradients is right with the check on, and 8 times too large with it off."""

    def cast_outside_the_mean(params, batch_block):
        varying = jax.lax.pcast(params, "data", to="varying")
        return jax.lax.psum(jax.grad(page.mean_loss)(varying, batch_block), "data")

    on, off = (page.factors(page.on_eight(cast_outside_the_mean, check)) for check in (True, False))
    assert (on, off) == ({"w_DF": "1x", "b_F": "1x"}, {"w_DF": "8x", "b_F": "8x"})


def test_fsdp_as_in_chapter_9_is_wrong_with_the_check_off(page):
    """The matrix 8 times, the bias wrong; with the check on, both right."""
    last = page.after("fsdp").gradient  # of the loop's second turn
    assert page.factors(last) == {"w_DF": "8x", "b_F": "wrong"}
    on = page.on_eight(jax.grad(page.fsdp_loss), True, page.fsdp_specs)
    assert_same(on, page.true_gradient)


def test_with_the_check_off_the_bias_of_fsdp_keeps_each_devices_own_gradient(page):
    """That of its own eight rows, and the matrix gets eight times the mean."""

    def what_is_left(params, batch_block):
        gradient = jax.grad(page.fsdp_loss)(params, batch_block)
        return gradient | {"b_F": gradient["b_F"][None]}

    mapped = in_pieces(page, what_is_left, False, P("data"))
    left = jax.jit(mapped)(page.params, page.batch)
    assert_same(left["w_DF"], 8 * page.true_gradient["w_DF"])
    for i in range(N):
        own = jax.tree.map(lambda rows, i=i: rows[8 * i : 8 * i + 8], page.batch)
        assert_same(left["b_F"][i], jax.grad(page.loss_of)(page.params, own)["b_F"])


def test_the_partner_of_a_gather_is_a_scatter_with_the_check_on_and_off(page):
    """The gradients of the gathered matrix are summed either way."""
    for check in (True, False):
        mapped = in_pieces(page, jax.grad(page.fsdp_loss), check, page.fsdp_specs)
        traced = str(jax.make_jaxpr(mapped)(page.params, page.batch))
        assert traced.count("= all_gather[") == traced.count("= reduce_scatter[") == 1


def test_fsdp_is_right_either_way_only_with_the_cast_and_the_sum(page):
    """The loss divided by eight, and a sum for the bias; without its cast the bias is 8 times."""
    for check in (True, False):
        gradient = page.on_eight(page.answer_either, check, page.fsdp_specs)
        assert_same(gradient, page.true_gradient)
        assert gradient["w_DF"].addressable_shards[3].data.shape == (4, 16)

    def without_cast(params, batch_block):
        def loss(params):
            whole = params | {"w_DF": page.gather_rows(params["w_DF"])}
            return page.loss_of(whole, batch_block) / 8

        gradient = jax.grad(loss)(params)
        return gradient | {"b_F": jax.lax.psum(gradient["b_F"], "data")}

    on, off = (page.on_eight(without_cast, check, page.fsdp_specs) for check in (True, False))
    assert page.factors(on) == {"w_DF": "1x", "b_F": "8x"}
    assert page.factors(off) == {"w_DF": "1x", "b_F": "1x"}


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
