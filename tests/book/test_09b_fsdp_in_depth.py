"""The page "FSDP in depth: free gathered weights with a remat policy"."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import compared
from layers_of_fsdp import REMATS, in_one_layer
from many_devices.helpers import traffic
from many_devices.memory import kept_gb
from many_devices.stacked import strategies
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "09b-fsdp-in-depth"
P = jax.P
POLICIES = jax.checkpoint_policies
WHOLE = 4 * 4 * 64 * 64  # bytes of all matrices
assert_same = partial(compared.assert_same, rtol=1e-3, atol=1e-5)


def plain_loss(params, x_BD):
    """The loss on one device, in a Python loop and without a gather."""
    for w_DD, b_D in zip(params["w_DD"], params["b_D"]):
        x_BD = x_BD + jnp.tanh(x_BD @ w_DD + b_D)
    return jnp.mean(x_BD**2)


def kept_by(page, policy, gather=None):
    return page.bytes_kept(partial(jax.checkpoint, policy=policy), gather or page.gather_layer)


# Four layers, gathered one at a time


@pytest.mark.parametrize("name", ["no remat", "free_gathers", "jax.checkpoint"])
def test_the_gradient_is_that_of_one_device_with_each_remat(page, name):
    """In every number."""
    check_gradient(page, name)


def check_gradient(page, name):
    found = jax.jit(page.gradient(page.remats[name]))(page.params, page.x_BD)
    assert_same(found, jax.jit(jax.grad(plain_loss))(page.params, page.x_BD))


def test_the_gradient_is_that_of_one_device(page):
    """With plain jax.checkpoint, in every number."""
    check_gradient(page, "jax.checkpoint")


@compiled_for_cpu
def test_matrices_are_gathered_twice_scattered_once_and_biases_all_reduced(page):
    """131,072 bytes are gathered, 65,536 scattered, 1,024 all-reduced."""
    assert page.params["w_DD"].nbytes == WHOLE == 65_536
    step = page.gradient(page.remats["jax.checkpoint"])
    by_kind = traffic(step, page.params, page.x_BD, mesh=page.mesh).by("kind")
    sent = {kind: by_kind.bytes(kind) for kind in by_kind}
    biases = page.params["b_D"].nbytes
    assert sent == {"all-gather": 131_072, "reduce-scatter": 65_536, "all-reduce": biases}
    assert biases == 1_024


# Remat policies


def test_what_a_device_keeps_without_remat_with_the_policy_and_with_plain_checkpoint(page):
    """81,920, 24,576 and 17,408 bytes; the policy frees 7/8 of the matrices, 57,344 bytes."""
    sizes = {name: page.bytes_kept(remat) for name, remat in page.remats.items()}
    rows, bias = 8 * 64 * 4, 64 * 4
    assert rows == 64 * 64 * 4 // 8 == 2_048 and bias == 256  # input, tanh or piece
    assert sizes["jax.checkpoint"] == 17_408 == 4 * (rows + rows + bias)
    older = jax.__version_info__ < (0, 12) and sizes["free_gathers"] == 4 * 4 * rows
    assert sizes["free_gathers"] == 24_576 == 4 * 3 * rows or older
    assert sizes["no remat"] - sizes["free_gathers"] == WHOLE * 7 // 8 == 57_344
    assert sizes["no remat"] == 81_920 or older
    assert sizes["no remat"] == kept_by(page, POLICIES.everything_saveable)
    assert sizes["jax.checkpoint"] == kept_by(page, POLICIES.nothing_saveable)


def test_a_policy_that_frees_gathers_computes_no_matmul_twice():
    """Freed by a policy, weights are gathered twice and no matmul is computed twice."""
    kept, freed = in_one_layer(REMATS["kept"]), in_one_layer(REMATS["freed by a policy"])
    assert freed == kept | {"gathers": 2 * kept["gathers"]}


def test_plain_checkpoint_computes_the_forward_matmul_again():
    """Plain jax.checkpoint gathers twice, too, and computes each layer's matmul twice."""
    freed, again = in_one_layer(REMATS["freed by a policy"]), in_one_layer(REMATS["jax.checkpoint"])
    assert again == freed | {"matmuls": freed["matmuls"] + 1}


@pytest.mark.parametrize("name", REMATS)
def test_gradients_are_scattered_once(name):
    """Whatever is kept, a layer's gradient is scattered once."""
    assert in_one_layer(REMATS[name])["scatters"] == 1


def counted(page, name):
    """Gathers and matmuls of one layer in the traced gradient, forward and backward."""
    traced = str(jax.make_jaxpr(page.gradient(page.remats[name]))(page.params, page.x_BD))
    return traced.count("all_gather["), traced.count("dot_general[")


def test_the_pages_policy_saves_work_and_no_communication(page):
    """Its gradient has one matmul less than plain jax.checkpoint's, and as many gathers."""
    assert counted(page, "no remat") == (1, 3)  # a forward matmul and two backward
    assert counted(page, "free_gathers") == (2, 3)
    assert counted(page, "jax.checkpoint") == (2, 4) == (page.gathers, page.matmuls)


@compiled_for_cpu
def test_both_send_the_same(page):
    """As compiled for CPU, gathers and scatters of both have the same bytes."""
    freed, again = (
        traffic(page.gradient(page.remats[name]), page.params, page.x_BD, mesh=page.mesh).by("kind")
        for name in ("free_gathers", "jax.checkpoint")
    )
    for kind in ("all-gather", "reduce-scatter"):
        assert freed.bytes(kind) == again.bytes(kind) > 0


def test_in_a_loop_without_a_scan_the_policy_frees_as_well(page):
    """With the layers in a Python loop, all matrices that the backward pass needs are freed; in Auto
    mode there is no gather to see, and the policy keeps everything."""
    in_auto_mode = [
        kept_gb(replace(strategies["FSDP"], remat=remat))
        for remat in (page.no_remat, page.remats["free_gathers"], jax.checkpoint)
    ]
    assert in_auto_mode[0] == in_auto_mode[1] > 10 * in_auto_mode[2]

    def kept_by_loop(rule):
        remat = partial(jax.checkpoint, policy=rule) if rule else page.no_remat

        def layer(x_BD, weights):
            weights = page.gather_layer(weights)
            return x_BD + jnp.tanh(x_BD @ weights["w_DD"] + weights["b_D"])

        def residuals(params, x_block_BD):
            def run(params):
                y = x_block_BD
                for n in range(4):
                    y = remat(layer)(y, jax.tree.map(lambda leaf: leaf[n], params))  # noqa: B023
                return y

            backward = jax.vjp(run, params)[1]
            return jnp.zeros(sum(leaf.nbytes for leaf in jax.tree.leaves(backward)))

        specs = page.specs, P("data")
        mapped = jax.shard_map(residuals, mesh=page.mesh, in_specs=specs, out_specs=P())
        return jax.eval_shape(mapped, page.params, page.x_BD).size

    rules = (None, page.free_gathers, POLICIES.nothing_saveable)
    everything, freed, nothing = map(kept_by_loop, rules)
    needed = WHOLE * 3 // 4  # no gradient needs the first matrix
    assert everything > needed and everything - freed == needed * 7 // 8
    assert nothing < freed


def test_a_weight_computed_from_a_gathered_one_is_kept_whole(page):
    """Scaled after the gather, nothing is freed, and the factor is kept as well; nor transposed."""
    after = kept_by(page, page.free_gathers, page.scaled_after)
    assert after - page.bytes_kept(page.remats["free_gathers"]) >= 57_344
    older = jax.__version_info__ < (0, 12)
    assert after - page.bytes_kept(page.no_remat) == 4 or older

    def transposed_after(weights):
        return page.gather_layer(weights) | {"w_DD": page.gather_layer(weights)["w_DD"].T}

    transposed = kept_by(page, page.free_gathers, transposed_after)
    assert transposed - page.bytes_kept(page.remats["free_gathers"]) >= 57_344

    def scaled_before(weights):
        return page.gather_layer(weights | {"w_DD": 2 * weights["w_DD"]})

    assert kept_by(page, page.free_gathers, scaled_before) < after - 40_000


def test_everything_except_these_names_keeps_everything(page):
    """save_anything_except_these_names returns True whatever it is called with, and frees nothing."""
    stub = POLICIES.save_anything_except_these_names("whole")
    (named,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "whole"))(1.0).eqns
    assert stub(named.primitive, name="whole") is True and stub(None) is True
    assert kept_by(page, stub, page.named) == page.bytes_kept(page.no_remat)
    other_name = POLICIES.save_only_these_names("whole")
    assert (
        kept_by(page, other_name, page.named) - page.bytes_kept(jax.checkpoint) == 57_344
    )  # it is named


def test_to_free_a_named_weight_refuse_both_gather_and_name(page):
    """Naming is an operation with a result of its own."""
    free = page.bytes_kept(page.remats["free_gathers"])
    assert kept_by(page, page.free_gathers, page.named) == page.bytes_kept(page.no_remat)
    assert kept_by(page, page.free_named, page.named) == free


def test_save_only_these_names_costs_57_344_bytes_and_saves_a_gather(page):
    """Compared with plain jax.checkpoint; everything else is computed twice."""
    rule = partial(jax.checkpoint, policy=POLICIES.save_only_these_names("whole"))

    def loss(params, x_block_BD):
        y_BD = page.stack(params, x_block_BD, page.named, rule)
        return jax.lax.pmean(jnp.mean(y_BD**2), "data")

    specs = dict(in_specs=(page.specs, P("data")), out_specs=page.specs)
    saved = jax.shard_map(jax.grad(loss), mesh=page.mesh, **specs)
    text = str(jax.make_jaxpr(saved)(page.params, page.x_BD))
    assert text.count("all_gather[") == 1 and text.count("dot_general[") == 4
    assert page.bytes_kept(rule, page.named) - page.bytes_kept(jax.checkpoint) == 57_344


def test_save_any_names_but_these_keeps_as_little_as_plain_checkpoint(page):
    """It keeps nothing that has no name."""
    rule = POLICIES.save_any_names_but_these("whole")
    assert kept_by(page, rule, page.named) == page.bytes_kept(jax.checkpoint)


def test_dots_saveable_keeps_results_of_matmuls_also_a_weight_that_is_one(page):
    """It frees gathered weights here, and keeps a weight that is itself a product."""
    results = 4 * 8 * 64 * 4  # of four matmuls, for 8 rows
    assert kept_by(page, POLICIES.dots_saveable) == page.bytes_kept(jax.checkpoint) + results

    def whole_of(piece):
        return {"w_DD": piece, "b_D": None}

    def merged(piece, x_block):
        return jnp.sum(
            jnp.tanh(x_block @ (page.gather_layer(whole_of(piece))["w_DD"] @ jnp.eye(32)))
        )

    def kept_of_merged(rule):
        def residuals(piece, x_block):
            _, backward = jax.vjp(jax.checkpoint(merged, policy=rule), piece, x_block)
            return jnp.zeros(sum(leaf.nbytes for leaf in jax.tree.leaves(backward)))

        mapped = jax.shard_map(residuals, mesh=page.mesh, in_specs=P("data"), out_specs=P())
        return jax.eval_shape(mapped, jnp.zeros((64, 32)), jnp.zeros((64, 64))).size

    dots, nothing = map(kept_of_merged, (POLICIES.dots_saveable, POLICIES.nothing_saveable))
    assert dots >= nothing + 64 * 32 * 4  # the whole product


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
