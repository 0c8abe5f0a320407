"""Chapter 14, "Long sequences", and its program in examples/ring_attention.py."""

import math
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from defined import functions, program_at, shown
from pages import BOOK, check_exercise, exercises_of

PAGE = "14-sequences"
FILE = BOOK.parent / "examples" / "ring_attention.py"
P = jax.P
VARIANTS = {"gather": "contiguous", "ring": "zigzag", "ulysses": "contiguous"}


def variant(page, name):
    """The compiled step of this variant, and the order of its tokens."""
    return getattr(page, f"{name}_step"), getattr(page, VARIANTS[name])


def test_loss_and_gradient_equal_those_of_one_device(page):
    """Gather, ring and Ulysses give the loss and every gradient of one device, so one update is equal."""
    for name in VARIANTS:
        step, held = variant(page, name)
        loss, gradient = step(page.model, page.in_order(page.batch, held))
        np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5, err_msg=name)
        pairs = zip(*map(jax.tree.leaves, (gradient, page.true_gradient)), strict=True)
        for found, true in pairs:
            np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-7, err_msg=name)


def test_attention_equals_jax_nn(page):
    """`full` is causal grouped-query attention: it equals jax.nn.dot_product_attention."""
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (jax.random.normal(key, (2, 64, heads, 8)) for key, heads in zip(keys, (8, 4, 4)))
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(page.full(q, k, v), wanted, atol=1e-5)


def test_bytes_follow_the_formulas_forward_and_backward(page):
    """Gather and ring send 2K(n - 1) per token and C, Ulysses (2H + 2K)(n - 1) / n; twice in all."""
    n, tokens, H, K, C = 4, 32, 8, 4, 8
    around = 4 * tokens * 2 * K * (n - 1) * C
    exchanged = 4 * tokens * (2 * H + 2 * K) * (n - 1) // n * C
    assert page.sent(page.gather_step) == (around, around) == (24_576, 24_576)
    assert page.sent(page.ring_step) == (around, around)
    assert page.sent(page.ulysses_step) == (exchanged, exchanged) == (18_432, 18_432)
    assert (page.around, page.exchanged) == (around, exchanged)


KINDS = {
    "gather": {"all-gather": 2, "reduce-scatter": 2},
    "ring": {"collective-permute": 12},
    "ulysses": {"all-to-all": 8},
}


def test_each_variant_runs_its_own_collectives(page):
    """A gather becomes a reduce-scatter backward; the ring runs n - 1 steps; Ulysses four swaps."""
    for name, kinds in KINDS.items():
        counted = {}
        for row in page.ms.collectives(variant(page, name)[0], mesh=page.mesh):
            if row.axes == ("seq",):
                counted[row.kind] = counted.get(row.kind, 0) + row.executions
        assert counted == kinds


def test_training_keeps_every_block_of_the_ring(page):
    """The scan hands all n - 1 blocks of keys and values to the backward pass."""

    def loss(q, k, v):
        return jax.lax.psum(page.ring(q, k, v, page.zigzag).sum(), ("data", "seq"))

    block = P("data", "seq")
    mapped = jax.shard_map(
        jax.value_and_grad(loss, argnums=(0, 1, 2)),
        mesh=page.mesh,
        in_specs=block,
        out_specs=(P(), (block, block, block)),
    )
    q, k = jnp.ones((4, 64, 8, 8)), jnp.ones((4, 64, 4, 8))
    text = str(jax.make_jaxpr(mapped)(q, k, k))
    stacked = re.findall(r"f32\[3,2,(?:16|8),4,8\]", text)  # steps, B, S / n or half of it, K, C
    assert stacked


def test_zigzag_gives_every_device_as_many_pairs(page):
    """In contiguous order the devices compute 4i + 3 pairs of half blocks, in zigzag 2n + 1."""
    assert page.pairs_of(page.contiguous).tolist() == [3, 7, 11, 15]
    assert page.pairs_of(page.zigzag).tolist() == [9, 9, 9, 9]


def test_zigzag_holds_one_early_and_one_late_half(page):
    """Device i has the halves i and 2n - 1 - i."""
    starts = [(page.zigzag(i)[::8] // 8).tolist() for i in range(4)]
    assert starts == [[0, 7], [1, 6], [2, 5], [3, 4]]


def largest_scores(page, attend, held):
    """The largest number of scores for one sequence that one call of `part` makes on a device."""
    sizes = []

    def spy(q, k, v, position_S, position_T):
        sizes.append(q.shape[2] * q.shape[1] * k.shape[1])
        return page_part(q, k, v, position_S, position_T)

    page_part, block = page.part, P("data", "seq")
    shapes = [jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (8, 4, 4)]
    with mock.patch.dict(attend.__globals__, part=spy):
        mapped = jax.shard_map(
            partial(attend, held=held), mesh=page.mesh, in_specs=block, out_specs=block
        )
        jax.eval_shape(mapped, *shapes)
    return max(sizes)


def test_scores_at_a_time(page):
    """Gather makes H S/n S scores at a time, Ulysses H/n S S, the ring H (S / 2n) squared."""
    S, H, n = 64, 8, 4
    assert largest_scores(page, page.gather, page.contiguous) == H * (S // n) * S
    assert largest_scores(page, page.ulysses, page.contiguous) == (H // n) * S * S
    assert largest_scores(page, page.ring, page.zigzag) == H * (S // (2 * n)) ** 2


def largest_error(page, gradient):
    pairs = zip(*map(jax.tree.leaves, (gradient, page.true_gradient)), strict=True)
    return max(float(jnp.abs(found - true).max()) for found, true in pairs)


def test_positions_that_restart_are_plausible_and_wrong(page):
    """Either mistake leaves a loss near the true one, and a wrong gradient, without an error."""
    for step in page.wrong_rotary, page.wrong_mask:
        loss, gradient = step(page.model, page.batch)
        assert 0 < abs(loss - page.true_loss) < 0.1
        right = page.gather_step(page.model, page.batch)[1]
        assert largest_error(page, gradient) > 1000 * largest_error(page, right)


def test_one_line_catches_positions_that_restart(page):
    """check_positions accepts both orders, and raises for positions that restart."""
    page.check_positions(page.contiguous)
    page.check_positions(page.zigzag)
    with pytest.raises(AssertionError, match="repeat or are missing"):
        page.check_positions(page.restarted)


def test_ulysses_needs_key_heads_divisible_by_devices(page):
    """With two key heads on four devices, all_to_all raises an error."""
    q, k = jnp.ones((2, 64, 8, 8)), jnp.ones((2, 64, 2, 8))
    block = P("data", "seq")
    mapped = jax.shard_map(
        partial(page.ulysses, held=page.contiguous),
        mesh=page.mesh,
        in_specs=block,
        out_specs=block,
    )
    with pytest.raises(ValueError):
        mapped(q, k, k)


def test_tokens_that_hide_a_message():
    """L > 2 (F / W) (K / H): 1,099, 9,890 and 2,550 tokens, as the table says."""
    for flops, wire, said in [(989e12, 450e9, 1099), (989e12, 50e9, 9890), (459e12, 90e9, 2550)]:
        length = 2 * flops / wire / 4
        assert round(length) == said
        compute = 2 * said**2 * 4 / flops  # H C = 4 and K C = 1
        assert math.isclose(compute, 4 * said / wire, rel_tol=1e-3)


def test_the_file_has_the_functions_of_the_page():
    """Every function of examples/ring_attention.py, except `main`, stands on the page as it is."""
    on_page = shown(PAGE, functions)
    in_file = functions(FILE.read_text("utf-8"))
    del in_file["main"]
    assert in_file == {name: on_page[name] for name in in_file}


def test_the_file_runs(capsys):
    """examples/ring_attention.py says that all three equal attention on one device."""
    program = program_at(FILE)
    program.main()
    errors = re.findall(r"error ([\d.e+-]+)", capsys.readouterr().out)
    assert len(errors) == 6 and all(float(error) < 1e-4 for error in errors)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercises(page, exercise):
    """Each check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
