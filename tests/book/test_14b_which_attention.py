"""The page "Ring, Ulysses or gather", and what chapter 14's three hold and send."""

import math
from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest

from attentions import on_mesh, random_qkv, sent_along_seq
from pages import cells_of, check_exercise, exercises_of, run
from traced import equations

PAGE = "14b-which-attention"
P = jax.P


@pytest.fixture(scope="module")
def chapter(compiled_once):
    """Chapter 14, whose three kinds of attention this page compares."""
    with run("14-sequences", until="bytes") as executed:
        yield executed
    jax.clear_caches()


def kept(chapter, attend, held):
    """For each device: the tokens whose keys and values autodiff keeps, and how many bytes it keeps."""
    block = P("data", "seq")
    order = chapter.order_of(held)
    whole = random_qkv(5)
    sharding = jax.sharding.NamedSharding(chapter.mesh, block)
    inputs = [jax.device_put(x[:, order], sharding) for x in whole]
    mapped = on_mesh(chapter, attend, held)
    _, pull = jax.vjp(mapped, *inputs)
    leaves = [leaf for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)]
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    tokens, sizes = [], []
    for device in chapter.mesh.devices[0]:
        mine = [np.ravel(shard.data) for shard in shards if shard.device == device]
        found = [np.isin(x[0], np.concatenate(mine)).all((1, 2)) for x in whole[1:]]
        tokens.append([set(np.flatnonzero(x).tolist()) for x in found])
        sizes.append(sum(x.nbytes for x in mine))
    return tokens, sizes


def checkpointed(chapter):
    def attend(q, k, v, held):
        return jax.checkpoint(partial(chapter.ring, held=held))(q, k, v)

    return attend


def test_training_keeps_every_block_of_the_ring(chapter):
    """For the backward pass a device keeps all keys and values; with jax.checkpoint, its own alone."""
    everything = set(range(64))
    own = [set(chapter.contiguous(device).tolist()) for device in range(4)]
    assert kept(chapter, chapter.ring, chapter.contiguous)[0] == 4 * [[everything, everything]]
    freed, sizes = kept(chapter, checkpointed(chapter), chapter.contiguous)
    assert freed == [[tokens, tokens] for tokens in own]
    inputs = 1 * 16 * (8 + 4 + 4) * 8 * 4  # sequences, tokens and heads on a device, C, float32
    assert sizes == 4 * [inputs]


def test_in_training_the_ring_saves_little_over_the_gather(chapter):
    """Autodiff keeps every block and all scores: at most a third less."""
    ring = kept(chapter, chapter.ring, chapter.contiguous)[1]
    gather = kept(chapter, chapter.gather, chapter.contiguous)[1]
    scores = 8 * 16 * 64 * 4  # of a device, float32
    assert min(ring) > scores and min(ring) > 2 / 3 * max(gather)


def test_with_checkpoint_blocks_are_sent_again(chapter):
    """With jax.checkpoint, training sends three times the forward bytes; on JAX 0.10, for CPU, twice."""
    again = chapter.compiled(checkpointed(chapter), chapter.contiguous)
    forward = 4 * 32 * 2 * 4 * 3 * 8  # bytes, tokens on a device, keys and values, K, n - 1, C
    assert sent_along_seq(chapter, chapter.ring_step) == 2 * forward
    times = 1.5 if jax.__version_info__ >= (0, 11) else 1  # 1 is twice the forward bytes
    assert sent_along_seq(chapter, again) == times * 2 * forward


def largest_scores(chapter, attend, held):
    """The largest number of scores for one sequence that are made at once on a device."""
    shapes = [jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (8, 4, 4)]
    traced = jax.make_jaxpr(on_mesh(chapter, attend, held))(*shapes)
    # Two sequences on two devices, so that a device has one
    return max(
        math.prod(found.outvars[0].aval.shape) for found, _ in equations(traced.jaxpr, "exp")
    )


def test_scores_at_a_time(chapter):
    """Gather makes H S/n S scores at a time, Ulysses H/n S S, the ring H (S / n) squared."""
    S, H, n = 64, 8, 4
    assert largest_scores(chapter, chapter.gather, chapter.contiguous) == H * (S // n) * S
    assert largest_scores(chapter, chapter.ulysses, chapter.contiguous) == (H // n) * S * S
    assert largest_scores(chapter, chapter.ring, chapter.contiguous) == H * (S // n) ** 2


def test_keys_at_a_time(chapter):
    """Keys of one sequence on a device, as tokens times heads: S K, S K / n, and S / n K for a block."""
    S, K, n = 64, 4, 4
    sizes = {}

    def spy(function, name):
        def called(q, k, v, *positions):
            sizes.setdefault(name, set()).add(k.shape[1] * k.shape[2])
            return function(q, k, v, *positions)

        return called

    shapes = [jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (8, 4, 4)]
    used = {"gather": "attention", "ulysses": "attention", "ring": "unfinished_attention"}
    for name, function in used.items():
        jax.clear_caches()
        replaced = {function: spy(getattr(chapter, function), name)}
        with mock.patch.dict(chapter.ring.__globals__, replaced):
            jax.eval_shape(on_mesh(chapter, getattr(chapter, name), chapter.contiguous), *shapes)
        jax.clear_caches()
    assert sizes == {"gather": {S * K}, "ulysses": {S * K // n}, "ring": {S // n * K}}
    assert S * K // n < 2 * (S // n * K) < S * K, "Ulysses, two blocks of a ring, gather"


def test_tokens_that_hide_a_message(page):
    """S / n > 2 (FLOP/s : bytes/s) (K / H): 1,099, 9,890 and 2,550 tokens, as the page prints."""
    for flops, wire, said in [(989e12, 450e9, 1099), (989e12, 50e9, 9890), (459e12, 90e9, 2550)]:
        length = 2 * flops / wire / 4
        assert round(length) == said == round(page.tokens_to_hide(flops, wire, H=32, K=8))
        compute = 2 * said**2 * 4 / flops  # H C = 4 and K C = 1
        assert math.isclose(compute, 4 * said / wire, rel_tol=1e-3)


def test_ulysses_sends_least_where_the_table_says(page):
    """Where n divides H and K, it sends less than the others from n > 1 + H / K on, and not before."""
    choose = dict(page.variables)
    solution = {tag: cell.source for cell in cells_of(PAGE) for tag in cell.tags}["solution-choice"]
    exec(solution, choose)
    for n in range(2, 33):
        for H, K in [(32, 8), (8, 8), (32, 32), (64, 8)]:
            chosen = choose["answer_choice"](1, n, H, K, 1e9)
            less = (2 * H + 2 * K) * (n - 1) / n < 2 * K * (n - 1)
            fits = H % n == 0 and K % n == 0
            assert (chosen == "Ulysses") == (fits and less), (n, H, K)


def test_with_repeated_key_heads_ulysses_sends_less():
    """Key heads repeated to n, a multiple of K that divides H: less than the gather if n > H / (K - 1)."""
    for n in range(2, 65):
        for H, K in [(32, 8), (32, 4), (64, 8), (64, 2), (32, 2)]:
            if H % n == 0 and n % K == 0:
                less = (2 * H + 2 * n) * (n - 1) / n < 2 * K * (n - 1)
                assert less == (n > H / (K - 1)), (n, H, K)
    assert [n for n in range(9, 65) if 32 % n == n % 8 == 0 and n > 32 / (8 - 1)] == [16, 32]


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercises(page, exercise):
    """The check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
