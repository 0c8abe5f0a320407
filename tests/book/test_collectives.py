"""The page "Five collectives on a ring of four": what each sends, and its gradient."""

import jax
import numpy as np
import pytest

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "collectives"
P = jax.P


def moves_of(function, *inputs):
    return list(ms.collectives(jax.jit(function).lower(*inputs).compile()))


def size_of_result(result):
    """S: the bytes of the whole array that results, with copies counted once."""
    held = {str(shard.index): shard.data.nbytes for shard in result.addressable_shards}
    return sum(held.values())


# What each device sends, for a whole array of S bytes on n devices


@compiled_for_cpu
@pytest.mark.parametrize(
    "name, of_the_result, formula",
    [
        ("reduce_scatter", 1, lambda S, n: S * (n - 1) / n),
        ("all_gather", "a copy on each", lambda S, n: S * (n - 1) / n),
        ("all_reduce", "a copy on each", lambda S, n: 2 * S * (n - 1) / n),
        ("all_to_all", 1, lambda S, n: (S / n) * (n - 1) / n),
        ("permute", 1, lambda S, n: S / n),
    ],
)
def test_each_collective_sends_what_its_formula_says_of_the_whole_array(
    page, name, of_the_result, formula
):
    """S is the size of the whole array; all-gather and reduce-scatter send S(n-1)/n, an all-reduce
    2S(n-1)/n, an all-to-all (S/n)(n-1)/n and a collective-permute S/n."""
    function, n = getattr(page, name), page.n
    x = page.pieces if name in ("all_gather", "all_to_all", "permute") else page.terms
    result = jax.jit(function)(x)
    # where every device gets a copy, out_specs=P("X") stacks n of them
    S = size_of_result(result) / (n if of_the_result == "a copy on each" else 1)
    (move,) = moves_of(function, x)
    assert move.wire_bytes == formula(S, n)


def test_meshscope_counts_by_the_whole_array_too(page):
    """The payload of an all-gather, a reduce-scatter's result times n and an all-reduce's are S."""
    x = {"all_gather": page.pieces, "reduce_scatter": page.terms, "all_reduce": page.terms}
    for name, value in x.items():
        (move,) = moves_of(getattr(page, name), value)
        assert move.payload_bytes == 131_072, name


# Gradients


@compiled_for_cpu
def test_backwards_an_all_gather_in_shard_map_is_a_reduce_scatter(page):
    """Inside shard_map the gradient of an all-gather is a reduce-scatter."""
    y = jax.eval_shape(page.all_gather, page.pieces)
    transposed = jax.linear_transpose(page.all_gather, page.pieces)
    assert [move.kind for move in moves_of(lambda y: transposed(y), y)] == ["reduce-scatter"]


def test_backwards_a_gather_that_all_devices_use_alike_moves_nothing(page):
    """Where all devices compute the same with what jax.reshard gathered, backwards nothing moves."""

    def whole(x):
        return jax.reshard(x, P(None, None))

    forward = moves_of(whole, page.pieces)
    assert [move.kind for move in forward] == ["all-gather"]
    y = whole(page.pieces)
    assert moves_of(lambda y: jax.vjp(whole, page.pieces)[1](y), y) == []


# The ring


def share_of_a_two_way_ring(n):
    """Time of an all-to-all over that of an all-gather, on a ring with links in both directions.

    Every device has n pieces for n devices, each of size 1, and each goes the shorter way; what is
    exactly opposite goes half and half. The busiest link decides.
    """
    links = np.zeros((n, 2))
    for device in range(n):
        for distance in range(1, n):
            ways = [(distance, 0)] if 2 * distance < n else [(n - distance, 1)]
            if 2 * distance == n:
                ways = [(distance, 0), (distance, 1)]
            for steps, direction in ways:
                for step in range(steps):
                    sender = device + step if direction == 0 else device - step
                    links[sender % n, direction] += 1 / len(ways)
    gather = n * (n - 1) / 2  # n pieces of each of the others, half of them from each side
    return links.max() / gather


@pytest.mark.parametrize("n", [4, 8, 16, 64])
def test_an_all_to_all_on_a_two_way_ring_takes_a_third_to_a_quarter_of_a_gather(n):
    """On a two-way ring an all-to-all takes n/4(n-1) of an all-gather's time: a third on four
    devices, about a quarter on a long ring."""
    assert share_of_a_two_way_ring(n) == pytest.approx(n / (4 * (n - 1)))


def test_the_share_is_a_third_on_four_devices_and_a_quarter_on_many():
    """A third on four devices, about a quarter on a long ring."""
    assert share_of_a_two_way_ring(4) == pytest.approx(1 / 3)
    assert share_of_a_two_way_ring(256) == pytest.approx(1 / 4, rel=0.01)
