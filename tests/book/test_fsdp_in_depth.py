"""The page "FSDP in depth: keep less, send less"."""

import pytest

from layers_of_fsdp import REMATS, in_one_layer


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
