"""Chapter 14, "Long sequences", and its program in examples/ring_attention.py."""

import contextlib
import math
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from defined import functions, program_at, shown
from pages import BOOK, check_exercise, exercises_of
from traced import equations

PAGE = "14-sequences"
FILE = BOOK.parent / "examples" / "ring_attention.py"
P = jax.P
VARIANTS = {"gather": "contiguous", "ring": "zigzag", "ulysses": "contiguous"}


def random_qkv(seed):
    """Random queries, keys and values of the page's sizes, whole."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (2, 64, heads, 8)) for key, heads in zip(keys, (8, 4, 4))]


def on_mesh(page, attend, held):
    """One of the three kinds of attention, on blocks of both axes."""
    block = P("data", "seq")
    attend = partial(attend, held=held)
    return jax.shard_map(attend, mesh=page.mesh, in_specs=block, out_specs=block)


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
    q, k, v = random_qkv(3)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(page.full(q, k, v), wanted, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone(page):
    """Moved by 7, all positions give the same attention; moved for the keys alone, another one."""
    q, k, v = random_qkv(3)
    at = page.positions

    def attended(q_at, k_at):
        return page.full(page.rotate(q, q_at), page.rotate(k, k_at), v)

    np.testing.assert_allclose(attended(at, at), attended(at + 7, at + 7), atol=1e-4)
    assert jnp.abs(attended(at, at) - attended(at, at + 7)).max() > 0.1


def errors_of(page, attend, held):
    """The largest error of each device's attention against jax.nn, with queries a hundred times as large."""
    q, k, v = random_qkv(4)
    q = 100 * q
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    order = page.order_of(held)
    found = jax.jit(on_mesh(page, attend, held))(q[:, order], k[:, order], v[:, order])
    errors = np.abs(np.asarray(found) - wanted[:, order])  # numpy's maximum of a NaN is NaN
    return np.array([part.max() for part in np.split(errors, 4, axis=1)])


def test_large_scores_do_not_overflow(page):
    """With scores of some hundreds, all three equal jax.nn: the maximum is subtracted first."""
    for name in VARIANTS:
        assert errors_of(page, getattr(page, name), variant(page, name)[1]).max() < 1e-4, name


def test_the_ring_needs_positions_that_rise_within_a_half_block(page):
    """Striped order, which rises, is right in all three; a block in reverse is wrong in the ring."""
    striped = lambda device: device + 4 * jnp.arange(16)  # noqa: E731
    reverse = lambda device: page.contiguous(device)[::-1]  # noqa: E731
    for name in VARIANTS:
        assert errors_of(page, getattr(page, name), striped).max() < 1e-4, name
        right = errors_of(page, getattr(page, name), reverse) < 1e-4  # NaN: a query without keys
        assert right.all() if name != "ring" else not right.any(), name


def test_is_causal_counts_from_zero_on_every_device(page):
    """After a gather, jax.nn needs `mask=`: with `is_causal=True` only the first device is right."""

    def library(q, k, v, held, **options):
        k, v = (jax.lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        if not options:
            mine_S = held(jax.lax.axis_index("seq"))
            options = {"mask": mine_S[:, None] >= page.order_of(held)}
        return jax.nn.dot_product_attention(q, k, v, **options)

    assert errors_of(page, library, page.contiguous).max() < 1e-4
    first, *others = errors_of(page, partial(library, is_causal=True), page.contiguous)
    assert first < 1e-4 and min(others) > 0.1


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


def test_ulysses_sends_less_from_eight_devices_on():
    """n > 1 + H / K; with 32 and 8 heads, 8 is the first such number that divides both."""
    for n in range(2, 33):
        for H, K in [(32, 8), (8, 4), (16, 16), (64, 8)]:
            less = (2 * H + 2 * K) * (n - 1) / n < 2 * K * (n - 1)
            assert less == (n > 1 + H / K)
    assert min(n for n in range(1, 33) if n > 1 + 32 / 8 and 32 % n == 0 and 8 % n == 0) == 8


def kept(page, attend, held):
    """For each device: the tokens whose keys and values autodiff keeps, and how many bytes it keeps."""
    block = P("data", "seq")
    order = page.order_of(held)
    whole = random_qkv(5)
    sharding = jax.sharding.NamedSharding(page.mesh, block)
    inputs = [jax.device_put(x[:, order], sharding) for x in whole]
    mapped = on_mesh(page, attend, held)
    _, pull = jax.vjp(mapped, *inputs)
    leaves = [leaf for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)]
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    tokens, sizes = [], []
    for device in page.mesh.devices[0]:
        mine = [np.ravel(shard.data) for shard in shards if shard.device == device]
        found = [np.isin(x[0], np.concatenate(mine)).all((1, 2)) for x in whole[1:]]
        tokens.append([set(np.flatnonzero(x).tolist()) for x in found])
        sizes.append(sum(x.nbytes for x in mine))
    return tokens, sizes


def checkpointed(page):
    def attend(q, k, v, held):
        return jax.checkpoint(partial(page.ring, held=held))(q, k, v)

    return attend


def test_training_keeps_every_block_of_the_ring(page):
    """For the backward pass a device keeps all keys and values; with jax.checkpoint, its own alone."""
    everything = set(range(64))
    own = [set(page.zigzag(device).tolist()) for device in range(4)]
    found = kept(page, page.ring, page.zigzag)[0]
    if jax.__version_info__ >= (0, 11):
        assert found == 4 * [[everything, everything]]
    else:  # JAX 0.10 keeps only the halves that a device attended to
        assert all(mine < tokens for mine, both in zip(own, found) for tokens in both)
    freed, sizes = kept(page, checkpointed(page), page.zigzag)
    assert freed == [[tokens, tokens] for tokens in own]
    inputs = 1 * 16 * (8 + 4 + 4) * 8 * 4  # sequences, tokens and heads on a device, C, float32
    assert sizes == 4 * [inputs]


def test_in_training_the_ring_stores_more_than_the_gather(page):
    """Autodiff keeps the scores of all pairs, computed or not, and every block: more bytes."""
    ring = kept(page, page.ring, page.zigzag)[1]
    gather = kept(page, page.gather, page.contiguous)[1]
    assert min(ring) > max(gather)


def test_with_checkpoint_blocks_are_sent_again(page):
    """The backward pass of a layer in jax.checkpoint sends the blocks of the forward pass again."""
    again = page.compiled(checkpointed(page), page.zigzag)
    assert sum(page.sent(page.ring_step)) == 2 * page.around
    assert sum(page.sent(again)) == 3 * page.around


def test_a_block_is_sent_while_it_is_used(page):
    """In a step of the ring, forward and backward, no branch waits for what arrives in that step."""

    def loss(q, k, v):
        return jax.lax.psum(page.ring(q, k, v, page.zigzag).sum(), ("data", "seq"))

    block = P("data", "seq")
    mapped = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)),
        mesh=page.mesh,
        in_specs=block,
        out_specs=(block, block, block),
    )
    q, k = jnp.ones((4, 64, 8, 8)), jnp.ones((4, 64, 4, 8))
    scans = equations(jax.make_jaxpr(mapped)(q, k, k).jaxpr, "scan")
    loops = [scan.params["jaxpr"].jaxpr for scan, _ in scans if "ppermute" in str(scan)]
    assert len(loops) == 2  # forward, backward
    for body in loops:
        after = {"ppermute": set(), "cond": set()}  # what depends on one
        reads = {"ppermute": [], "cond": []}
        for equation in body.eqns:
            used = {operand for operand in equation.invars if isinstance(operand, Var)}
            name = equation.primitive.name
            if name in reads:
                reads[name].append(used)
            for kind, tainted in after.items():
                if name == kind or used & tainted:
                    tainted |= set(equation.outvars)
        assert reads["ppermute"] and len(reads["cond"]) == 4
        assert not any(used & after["ppermute"] for used in reads["cond"])
        assert not any(used & after["cond"] for used in reads["ppermute"])


def test_zigzag_gives_every_device_as_many_pairs(page):
    """In contiguous order the devices compute 4i + 3 pairs of half blocks, in zigzag 2n + 1."""
    assert page.pairs_of(page.contiguous) == [3, 7, 11, 15]
    assert page.pairs_of(page.zigzag) == [9, 9, 9, 9]


@contextlib.contextmanager
def attention_replaced(page, replacement):
    """`unfinished_attention` is another function; what JAX has traced before, or now, is forgotten."""
    jax.clear_caches()
    with mock.patch.dict(page.ring.__globals__, unfinished_attention=replacement):
        yield
    jax.clear_caches()


def pairs_computed(page, held):
    """How many branches with attention each device of the ring runs: counted while it runs."""
    counts, unfinished = np.zeros((2, 4), int), page.unfinished_attention

    def count(row, column):
        counts[row, column] += 1

    def counted(*pair):
        jax.debug.callback(count, jax.lax.axis_index("data"), jax.lax.axis_index("seq"))
        return unfinished(*pair)

    q, k = jnp.ones((2, 64, 8, 8)), jnp.ones((2, 64, 4, 8))
    with attention_replaced(page, counted):
        mapped = on_mesh(page, page.ring, held)
        jax.block_until_ready(jax.jit(mapped)(q, k, k))
        jax.effects_barrier()
    return counts.tolist()


def test_the_ring_computes_the_needed_pairs_alone(page):
    """At run time each device takes its own branches: as many as pairs_of says, in either order."""
    assert pairs_computed(page, page.contiguous) == 2 * [[3, 7, 11, 15]]
    assert pairs_computed(page, page.zigzag) == 2 * [[9, 9, 9, 9]]


def test_zigzag_holds_one_early_and_one_late_half(page):
    """Device i has the halves i and 2n - 1 - i."""
    starts = [(page.zigzag(i)[::8] // 8).tolist() for i in range(4)]
    assert starts == [[0, 7], [1, 6], [2, 5], [3, 4]]


def largest_scores(page, attend, held):
    """The largest number of scores for one sequence that are made at once on a device."""
    sizes = []

    def spy(q, k, v, position_S, position_T):
        sizes.append(q.shape[2] * q.shape[1] * k.shape[1])
        return unfinished(q, k, v, position_S, position_T)

    unfinished = page.unfinished_attention
    shapes = [jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (8, 4, 4)]
    with attention_replaced(page, spy):
        mapped = on_mesh(page, attend, held)
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
    mapped = on_mesh(page, page.ulysses, page.contiguous)
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
