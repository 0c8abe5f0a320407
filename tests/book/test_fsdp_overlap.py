"""The page "When a gather costs no time: tokens per device"."""

import pytest

from layers_of_fsdp import REMATS, in_one_layer
from pages import run


@pytest.fixture(scope="module")
def machines():
    """The published peaks of the page, by name: operations and bytes in a second."""
    with run("fsdp-overlap", until="mesh") as page:
        return {name: (flops, wire) for name, flops, wire in page.machines}


def tokens(bytes_for_a_number, operations_for_a_row, flops, wire):
    """How many rows hide what is sent for each number of a matrix."""
    return bytes_for_a_number / operations_for_a_row * flops / wire


def in_a_pass(remat, sum_dtype, backward=True):
    """Bytes and operations for each number of a matrix, as the traced program has them."""
    counts = in_one_layer(REMATS[remat])
    if not backward:
        return 2 * 1, 2 * 1  # one gather in bfloat16; a multiplication and an addition
    size = 2 * (counts["gathers"] - 1) + sum_dtype * counts["scatters"]
    return size, 2 * (counts["matmuls"] - 1)


def test_by_the_peaks_a_gather_hides_from_c_over_w_tokens_on(machines):
    """In bfloat16, and by the peaks, forward and backward need C/W tokens: 2,198 in a server."""
    flops, wire = machines["H100, inside a server"]
    forward = tokens(*in_a_pass("freed by a policy", 2, backward=False), flops, wire)
    backward = tokens(*in_a_pass("freed by a policy", 2), flops, wire)
    assert forward == backward == flops / wire
    assert f"{forward:,.0f}" == "2,198"


def test_slower_matmuls_need_fewer_tokens_and_a_slower_wire_more(machines):
    """At half of the matmuls' peak 1,099 tokens hide a gather; at 80 % of the wire's, 2,747."""
    flops, wire = machines["H100, inside a server"]
    once = in_a_pass("freed by a policy", 2, backward=False)
    assert f"{tokens(*once, flops / 2, wire):,.0f}" == "1,099"
    assert f"{tokens(*once, flops, 0.8 * wire):,.0f}" == "2,747"


@pytest.mark.parametrize("remat, ratio", [("freed by a policy", 1.5), ("jax.checkpoint", 1.0)])
def test_sums_in_float32_need_1_5_times_as_many_tokens_only_if_no_matmul_is_done_twice(
    remat, ratio
):
    """Backward with sums in float32: 1.5 C/W if only weights are freed, C/W with jax.checkpoint."""
    assert tokens(*in_a_pass(remat, 4), 1, 1) == ratio


def test_with_plain_checkpoint_two_thirds_of_the_tokens_are_enough():
    """Plain jax.checkpoint has three matmuls backward in place of two."""
    two, three = (in_a_pass(remat, 2)[1] for remat in ("freed by a policy", "jax.checkpoint"))
    assert two / three == 2 / 3
