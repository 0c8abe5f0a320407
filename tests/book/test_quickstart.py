"""The quick start: an optimizer of a model that is already placed."""

import jax
import pytest

PAGE = "quickstart"


def test_adams_moments_are_where_the_weights_are(page):
    """An Adam optimizer that is made from the placed model keeps its moments where the weights are."""
    moments = page.optimizer.opt_state[0]
    weights = jax.tree.leaves(page.layer)
    assert not any(weight.sharding.is_fully_replicated for weight in weights)
    for of_all in (moments.mu, moments.nu):
        for weight, moment in zip(weights, jax.tree.leaves(of_all), strict=True):
            assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)


@pytest.mark.parametrize("counter", ["of adam", "of flax"])
def test_the_two_counters_are_whole(page, counter):
    """Each device holds the optimizer's two step counters whole."""
    value = page.optimizer.opt_state[0].count if counter == "of adam" else page.optimizer.step
    assert value[...].sharding.is_fully_replicated
