"""The page "A balanced ring", and the program of chapter 14 in examples/ring_attention.py."""

import inspect
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from defined import functions, program_at, shown
from many_devices import sequences
from pages import BOOK, check_exercise, exercises_of
from traced import waits_of

PAGE = "14a-balanced-ring"
FILE = BOOK.parent / "examples" / "ring_attention.py"


def test_zigzag_holds_one_early_and_one_late_half(page):
    """Device i has the halves i and 2n - 1 - i."""
    starts = [(page.zigzag(i)[::8] // 8).tolist() for i in range(4)]
    assert starts == [[0, 7], [1, 6], [2, 5], [3, 4]]
    np.testing.assert_array_equal(np.sort(page.order), np.arange(64))


def test_zigzag_gives_every_device_as_many_pairs(page):
    """In contiguous order the devices need 4i + 3 pairs of half blocks, in zigzag order 2n + 1."""
    assert page.pairs_of(page.contiguous) == [3, 7, 11, 15]
    assert page.pairs_of(page.zigzag) == [9, 9, 9, 9]


def test_the_slowest_device_needs_about_half_of_the_pairs():
    """2n + 1 of 4n - 1, for any number of devices."""
    for n in range(2, 65):
        seen = [j + 1 for j in range(2 * n)]  # half blocks of keys, for a half block of queries
        assert max(seen[2 * i] + seen[2 * i + 1] for i in range(n)) == 4 * n - 1
        assert {seen[i] + seen[2 * n - 1 - i] for i in range(n)} == {2 * n + 1}
    assert 0.5 < (2 * 64 + 1) / (4 * 64 - 1) < 0.51


def test_which_half_is_needed(page):
    """The rule of the table: from a smaller number the early keys, from a larger one the late queries."""
    for mine in range(4):
        for theirs in range(4):
            at_S, at_T = page.zigzag(mine), page.zigzag(theirs)
            seen = at_S[:, None] >= at_T
            pairs = [[seen[:8, :8], seen[:8, 8:]], [seen[8:, :8], seen[8:, 8:]]]
            found = [[bool(pair.any()) for pair in row] for row in pairs]
            if theirs < mine:
                assert found == [[True, False], [True, False]]
            elif theirs > mine:
                assert found == [[False, False], [True, True]]
            else:
                assert found == [[True, False], [True, True]]
            if theirs != mine:  # what is needed is seen whole
                assert all(pair.all() or not pair.any() for row in pairs for pair in row)


def close(found, true):
    for one, other in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_output_and_gradient_equal_those_of_one_device(page):
    """In zigzag order, the ring gives the output and all three gradients of jax.nn."""
    true = jax.nn.dot_product_attention(*page.qkv, is_causal=True)[:, page.order]
    close(page.ring(*page.in_order), true)
    close(page.gradient_of(page.ring)(*page.in_order), page.true_gradient)
    alone = page.gradient_of(page.whole)(*page.qkv)
    np.testing.assert_array_equal(page.true_gradient[0], alone[0][:, page.order])


def test_large_scores_do_not_overflow(page):
    """With queries a hundred times as large, it still equals jax.nn."""
    q, k, v = page.qkv
    true = page.whole(100 * q, k, v)[:, page.order]
    found = page.ring(100 * q[:, page.order], k[:, page.order], v[:, page.order])
    assert page.error_of(found, true) < 1e-4


def test_in_bfloat16_the_output_is_bfloat16(page):
    """Queries, keys and values in bfloat16 give such an output, within its rounding."""
    half = [x.astype("bfloat16") for x in page.in_order]
    found = page.ring(*half)
    assert found.dtype == "bfloat16"
    wanted = page.ring(*[x.astype("float32") for x in half])
    np.testing.assert_allclose(found.astype("float32"), wanted, rtol=2**-7, atol=2**-8)


def test_each_device_computes_the_needed_pairs_alone(page):
    """Counted while it runs: 9 pairs on every device, 3 of its own block and 2 of each that arrives."""
    pairs, unfinished = np.zeros((2, 4), int), page.unfinished_attention

    def count(row, column, many):
        pairs[row, column] += many

    def counted(q, k, v, position_S, position_T):
        many = q.shape[1] * k.shape[1] // 64
        jax.debug.callback(count, jax.lax.axis_index("data"), jax.lax.axis_index("seq"), many)
        return unfinished(q, k, v, position_S, position_T)

    jax.clear_caches()
    with mock.patch.dict(page.attend.__globals__, unfinished_attention=counted):
        mapped = jax.shard_map(
            page.balanced_ring, mesh=page.mesh, in_specs=page.block, out_specs=page.block
        )
        jax.block_until_ready(jax.jit(mapped)(*page.in_order))
        jax.effects_barrier()
    jax.clear_caches()
    assert pairs.tolist() == 2 * [[9, 9, 9, 9]]


@pytest.mark.parametrize("name", ["from_smaller", "from_larger"])
def test_each_branch_computes_two_pairs_of_four(page, name):
    """Of an arriving block, each of the two functions computes half of the pairs."""
    sizes, unfinished = [], page.unfinished_attention

    def spy(q, k, v, position_S, position_T):
        sizes.append(q.shape[1] * k.shape[1])
        return unfinished(q, k, v, position_S, position_T)

    k = jnp.ones((1, 16, 4, 8))
    queries, keys = (jnp.ones((1, 16, 8, 8)), page.zigzag(1)), (k, k, page.zigzag(2))
    half = page.attend(page.early_half(queries), keys)
    with mock.patch.dict(page.attend.__globals__, unfinished_attention=spy):
        getattr(page, name)(half, half, queries, keys)
    assert 2 * sum(sizes) == 16 * 16


def test_no_message_waits_for_attention(page):
    """Each block is sent before it is used, so the compiler can send while the device computes."""
    mapped = jax.shard_map(
        page.balanced_ring, mesh=page.mesh, in_specs=page.block, out_specs=page.block
    )
    (outer,) = jax.make_jaxpr(mapped)(*page.qkv).jaxpr.eqns
    messages, products = waits_of(outer.params["jaxpr"])
    assert len(messages) == 6 and {wait.products for wait in messages} == {0}
    assert {wait.messages for wait in products} == {0, 1, 2, 3}


def test_it_sends_the_same_bytes_as_the_plain_ring(page):
    """Keys and values of 16 tokens, 4 heads and 8 numbers, three times; backward as much again."""
    block = 16 * 4 * 8 * 4  # the one sequence of a device
    step = page.gradient_of(page.ring).lower(*page.in_order).compile()
    rows = [row for row in ms.collectives(step, page.mesh) if row.axes == ("seq",)]
    assert {row.kind for row in rows} == {"collective-permute"}
    assert sum(row.executions * row.wire_bytes for row in rows) == 2 * 2 * 3 * block


def test_in_reading_order_it_is_wrong_without_an_error(page):
    """Tokens that are not in zigzag order give another result; only the order differs."""
    assert page.error_of(page.ring(*page.qkv), page.whole(*page.qkv)) > 0.1
    assert page.error_of(page.ring(*page.in_order), page.true) < 1e-5


def test_the_file_has_the_functions_of_the_pages():
    """Every function of examples/ring_attention.py, except `main`, is on a page, or imported there."""
    on_pages = functions(inspect.getsource(sequences))
    on_pages |= shown("14-sequences", functions) | shown(PAGE, functions)
    in_file = functions(FILE.read_text("utf-8"))
    del in_file["main"]
    assert in_file == {name: on_pages[name] for name in in_file}


def test_the_file_runs(capsys):
    """examples/ring_attention.py says that all four equal attention on one device."""
    program = program_at(FILE)
    program.main()
    errors = re.findall(r"error ([\d.e+-]+)", capsys.readouterr().out)
    assert len(errors) == 8 and all(float(error) < 1e-4 for error in errors)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercises(page, exercise):
    """The check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
