"""The page "Train the router": the load-balancing loss, and the router's gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compared import assert_same
from defined import program_at
from many_devices.experts import loss_of
from pages import BOOK

PAGE = "13b-load-balance"
P = jax.P


def test_the_balance_loss_is_1_for_an_equal_load_and_grows(page):
    """1 if both are equal; larger if the favourites also get the routes, up to E/k."""
    equal_BE = jnp.full((16, 8), 1 / 8)
    each_BR = jnp.arange(32).reshape(16, 2) % 8
    assert np.isclose(page.balance_of(equal_BE, each_BR), 1)
    trained = page.balance_of(*page.route(page.x_BD, page.params["router_DE"])[::2])
    assert trained > 1.1
    rng = np.random.default_rng(0)
    for k in (1, 2):
        share_E = np.sort(rng.dirichlet(np.ones(8), 100) * 0.9 + 0.1 / 8)
        prob_E = np.sort(rng.dirichlet(np.ones(8), 100))
        assert np.all(8 * np.sum(share_E * prob_E, axis=1) >= 1)  # the same experts lead in both
        favourites_BE = jnp.tile(jnp.arange(8) < k, (16, 1)) / k
        favourites_BR = jnp.tile(jnp.arange(k), (16, 1))
        assert np.isclose(page.balance_of(favourites_BE, favourites_BR), 8 / k)


def test_where_they_disagree_the_balance_loss_can_be_below_1(page):
    """Nine of ten routes to one expert by a narrow choice, and the tenth with certainty: 0.93."""
    probs_BE = jnp.array(9 * [[0.51, 0.49]] + [[0.0, 1.0]])
    assert round(float(page.balance_of(probs_BE, probs_BE.argmax(-1, keepdims=True))), 2) == 0.93


def test_the_gradient_of_the_balance_loss_is_through_the_probability(page):
    """The share is a count and has no gradient: the gradient is E times the share, over tokens."""
    probs_BE, _, experts_BR = page.route(page.x_BD, page.params["router_DE"])
    gradient = jax.grad(page.balance_of)(probs_BE, experts_BR)
    share_E = np.bincount(np.ravel(experts_BR), minlength=8) / 1_024
    np.testing.assert_allclose(gradient, np.tile(8 * share_E / 512, (512, 1)), rtol=1e-5)


def test_on_eight_devices_the_balance_loss_is_over_all_tokens(page):
    """With the pmean of both factors it is that of one device, value and gradient."""
    similar_BD = page.x_BD[np.argsort(page.batch[1])]
    route = partial(page.route, router_DE=page.params["router_DE"])

    def on_one(x_BD):
        probs_BE, _, experts_BR = route(x_BD)
        return page.balance_of(probs_BE, experts_BR)

    def on_eight(axes, x_block_BD):
        probs_BE, _, experts_BR = route(x_block_BD)
        return jax.lax.pmean(page.balance_of(probs_BE, experts_BR, axes), "expert")

    def mapped(axes):
        specs = dict(in_specs=P("expert"), out_specs=P())
        return jax.value_and_grad(jax.shard_map(partial(on_eight, axes), mesh=page.mesh, **specs))

    wanted, wanted_gradient = jax.value_and_grad(on_one)(similar_BD)
    found, gradient = jax.jit(mapped(("expert",)))(similar_BD)
    assert_same(found, wanted)
    assert_same(gradient, wanted_gradient, atol=1e-8)
    other, other_gradient = jax.jit(mapped(()))(similar_BD)
    assert other > wanted + 0.01
    assert not np.allclose(other_gradient, wanted_gradient, rtol=1e-2, atol=1e-7)


def test_balanced_over_all_tokens_and_worst_on_each_device(page):
    """The page's documents: equal shares and probabilities over all tokens, E/k on every device."""
    probs_BE, chosen_BR = page.sure_BE, page.chosen_BR
    assert np.all(np.bincount(np.ravel(chosen_BR)) == 2 * 512 / 8), "every expert has equal routes"
    assert np.all(probs_BE.mean(0) == 1 / 8) and np.all(probs_BE.sum(1) == 1)
    assert page.balance_of(probs_BE, chosen_BR) == 1

    def in_groups(n):
        probs = probs_BE.reshape(n, 512 // n, 8)
        return jax.vmap(page.balance_of)(probs, chosen_BR.reshape(n, 512 // n, 2))

    for device, chosen_block_BR in enumerate(chosen_BR.reshape(8, 64, 2)):
        assert np.all(chosen_block_BR == jnp.array([device, (device + 1) % 8]))
    assert np.all(in_groups(8) == 8 / 2)
    assert np.all(in_groups(2) > 1.5), "microbatches make the same mistake"


def test_with_k_1_and_gates_that_sum_to_one_the_router_gets_no_gradient(page):
    """k = 1, scaled: zero up to rounding. With the probability as the gate it is not."""

    def size_of(router_DE, k):
        y_BD, _, _ = page.dense_mixture(page.params | {"router_DE": router_DE}, page.x_BD, k)
        return jnp.mean(y_BD**2)

    gradients = {k: jax.grad(size_of)(page.params["router_DE"], k) for k in (2, 1)}
    sizes = {k: float(jnp.linalg.norm(g)) for k, g in gradients.items()}
    assert sizes[2] > 1e-3 > 1e-6 > sizes[1]

    def with_probability(router_DE):
        probs_BE, _, experts_BR = page.route(page.x_BD, router_DE, 1)
        y_BD, _, _ = page.dense_mixture(page.params | {"router_DE": router_DE}, page.x_BD, 1)
        return jnp.mean((jnp.take_along_axis(probs_BE, experts_BR, 1) * y_BD) ** 2)

    assert jnp.linalg.norm(jax.grad(with_probability)(page.params["router_DE"])) > 1e-3


def test_the_balance_loss_hides_it(page):
    """With the load-balancing loss, the same router has a gradient, and the loss falls."""
    layer = partial(page.dense_mixture, k=1)
    program = jax.jit(jax.value_and_grad(partial(loss_of, layer=layer), has_aux=True))
    (first, _), gradient = program(page.params, page.batch)
    assert jnp.linalg.norm(gradient["router_DE"]) > 1e-4
    weights = page.params
    for _ in range(5):
        (loss, _), gradient = program(weights, page.batch)
        weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient)
    assert loss < first - 0.1


def test_the_page_shows_1_over_all_tokens_and_4_on_each_device(page):
    """The answer of the prediction: 8 x 8 x 1/8 x 1/8, and 8 x 1/2 x 1 = E/k."""
    assert page.over_all == 1 and page.on_each == 4 == 8 / page.chosen_BR.shape[1]
    assert page.sure_BE.shape == (8 * 64, 8)


def test_the_page_shows_the_gradient_from_the_output_alone(page):
    """For k = 1 it is rounding alone; the load-balancing loss hides that."""
    assert page.router_gradient(2, 0.0) > 1e-3 > 1e-6 > page.router_gradient(1, 0.0)
    assert page.router_gradient(1, 0.01) > 1e-4


def test_the_untrained_router_is_unfair(page):
    """Experts are far from equally popular: one gets more than ten times what another gets."""
    popular = np.bincount(np.ravel(page.experts_BR), minlength=8)
    assert popular.max() > 10 * popular.min()


def test_in_bfloat16_the_router_chooses_other_experts(page):
    """Of 512 tokens, some get another expert if their scores are rounded to bfloat16, but few."""
    assert page.differ_B.shape == (512,) and 0 < page.differ_B.sum() < 51  # fewer than a tenth


def test_float32_gates_make_the_output_float32(page):
    """The results of bfloat16 experts, times float32 gates, are float32."""
    combine = program_at(BOOK.parent / "examples" / "experts.py").combine
    y_EQD, slots_BR = jnp.ones((2, 2, 4), "bfloat16"), jnp.zeros((3, 1), int)
    _, gates_BR, _ = page.route(
        page.x_BD.astype("bfloat16").astype("float32")[:3], page.params["router_DE"], 1
    )
    for dtype in ("float32", "bfloat16"):
        assert combine(y_EQD, gates_BR.astype(dtype), slots_BR, slots_BR).dtype == dtype
    assert gates_BR.dtype == "float32"
