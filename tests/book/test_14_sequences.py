"""Chapter 14, "Long sequences"."""

import contextlib
import importlib
import inspect
import io
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attentions import on_mesh, random_qkv, sent_along_seq
from many_devices import sequences
from pages import BOOK, check_exercise, exercises_of, run_again, source_of
from traced import waits_of

PAGE = "14-sequences"
P = jax.P
VARIANTS = ["gather", "ring", "ulysses"]


def test_loss_and_gradient_equal_those_of_one_device(page):
    """Gather, ring and Ulysses give the loss and every gradient of one device, so one update is equal."""
    for name in VARIANTS:
        loss, gradient = getattr(page, f"{name}_step")(page.model, page.batch)
        np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5, err_msg=name)
        pairs = zip(*map(jax.tree.leaves, (gradient, page.true_gradient)), strict=True)
        for found, true in pairs:
            np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-7, err_msg=name)


def test_activations_of_a_long_sequence():
    """131,072 tokens of width 4,096 in bfloat16 take 1.1 GB."""
    assert round(131_072 * 4_096 * 2 / 1e9, 1) == 1.1


def test_attention_equals_jax_nn(page):
    """`whole_attention` is causal grouped-query attention: it equals jax.nn.dot_product_attention."""
    q, k, v = random_qkv(3)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(page.whole_attention(q, k, v), wanted, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone(page):
    """Moved by 7, all positions give the same attention; moved for the keys alone, another one."""
    q, k, v = random_qkv(3)
    at = page.positions

    def attended(q_at, k_at):
        return page.whole_attention(sequences.rotate(q, q_at), sequences.rotate(k, k_at), v)

    np.testing.assert_allclose(attended(at, at), attended(at + 7, at + 7), atol=1e-4)
    assert jnp.abs(attended(at, at) - attended(at, at + 7)).max() > 0.1


def test_the_line_of_the_model_that_the_page_shows(page):
    """The imported model calls `attend` in this line, and `attend` is given queries, keys and values."""
    line = "attended_BSHC = attend(q_BSHC, k_BTKC, v_BTKC)"
    assert line in inspect.getsource(page.Model)
    assert f"`{line}`" in source_of(PAGE).read_text("utf-8")


def test_a_model_in_bfloat16_attends_and_sends_in_bfloat16(page):
    """Its rotary positions keep the dtype, so all three run, send bfloat16 and agree with one device."""
    half = page.Model(nnx.Rngs(0), dtype="bfloat16")
    loss, gradient = page.jitted_step(half, page.batch, page.positions, page.whole_attention)
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-3)
    for name in VARIANTS:
        dtypes = []

        def attend(q, k, v, held, name=name, dtypes=dtypes):
            out = getattr(page, name)(q, k, v, held)
            dtypes.extend(str(x.dtype) for x in (q, k, v, out))
            return out

        with mock.patch.dict(page.compiled.__globals__, model=half):
            step = page.compiled(attend, page.contiguous)
        assert set(dtypes) == {"bfloat16"}, name
        found = step(half, page.batch)
        np.testing.assert_allclose(found[0], loss, rtol=1e-3, err_msg=name)
        for one, other in zip(*map(jax.tree.leaves, (found[1], gradient)), strict=True):
            assert one.dtype == "float32"
            assert jnp.linalg.norm(one - other) < 0.03 * jnp.linalg.norm(other), name


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
    """With scores of some hundreds, all three equal jax.nn: the maximum is subtracted first.

    The mask's -1e30 is finite in bfloat16 and float32, and not in float16.
    """
    assert float(jnp.finfo("float16").max) < 1e30 < float(jnp.finfo("bfloat16").max)
    for name in VARIANTS:
        assert errors_of(page, getattr(page, name), page.contiguous).max() < 1e-4, name


def test_in_bfloat16_all_three_are_as_exact_as_jax_nn(page):
    """With inputs in bfloat16 the ring too adds up in float32, and rounds its result once.

    The ring's error is 0.8 times that of jax.nn; with sums in bfloat16 it was 2.2 times.
    """
    exact = [x.astype("bfloat16").astype("float32") for x in random_qkv(3)]
    wanted = jax.nn.dot_product_attention(*exact, is_causal=True)
    inputs = [x.astype("bfloat16") for x in exact]

    def error_of(attend):
        found = jax.jit(attend)(*inputs)
        assert found.dtype == "bfloat16"
        return np.linalg.norm(found.astype("float32") - wanted)

    allowed = 1.2 * error_of(partial(jax.nn.dot_product_attention, is_causal=True))
    for name in VARIANTS:
        assert error_of(on_mesh(page, getattr(page, name), page.contiguous)) < allowed, name


def test_tokens_may_be_in_any_order_that_held_knows(page):
    """Striped over devices, or in reverse within a block: all three are right."""
    striped = lambda device: device + 4 * jnp.arange(16)  # noqa: E731
    reverse = lambda device: page.contiguous(device)[::-1]  # noqa: E731
    for name in VARIANTS:
        for held in striped, reverse:
            assert errors_of(page, getattr(page, name), held).max() < 1e-4, name


def test_bytes_follow_the_formulas_forward_and_backward(page):
    """Gather and ring send 2K(n - 1) per token and C, Ulysses (2H + 2K)(n - 1) / n; twice in all."""
    n, tokens, H, K, C = 4, 32, 8, 4, 8
    around = 4 * tokens * 2 * K * (n - 1) * C
    exchanged = 4 * tokens * (2 * H + 2 * K) * (n - 1) // n * C
    assert (around, exchanged) == (24_576, 18_432)
    for name, once in [("gather", around), ("ring", around), ("ulysses", exchanged)]:
        step = getattr(page, f"{name}_step")
        rows = [row for row in page.ms.collectives(step, mesh=page.mesh) if row.axes == ("seq",)]
        back = sum(row.executions * row.wire_bytes for row in rows if "transpose" in row.op_name)
        assert back == once, name
        assert sent_along_seq(page, step) == 2 * once, name
    per_token = [once / (4 * tokens * C) for once in (around, exchanged)]
    assert per_token == [24, 18], "times C, as the answer says"
    assert page.along_seq.wire_bytes == 2 * around, "the last one that the page prints, the ring's"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_again(page, PAGE, "bytes")
    found = [line.split()[:2] for line in out.getvalue().splitlines()]
    assert found == [["gather", "49,152"], ["Ulysses", "36,864"], ["ring", "49,152"]]


def pairs_of_tokens_in_view(page):
    at = page.positions
    return int((at[:, None] >= at).sum()), page.S**2


def test_nearly_half_of_the_pairs_are_masked_and_the_ring_computes_them_all(page):
    """A device computes its queries with all keys; the first masks every block that it receives."""
    seen, every = pairs_of_tokens_in_view(page)
    assert 0.45 < 1 - seen / every < 0.5
    sizes, unfinished = [], page.unfinished_attention

    def spy(q, k, v, position_S, position_T):
        sizes.append(q.shape[1] * k.shape[1])
        return unfinished(q, k, v, position_S, position_T)

    shapes = [jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (8, 4, 4)]
    with attention_replaced(page, spy):
        jax.eval_shape(on_mesh(page, page.ring, page.contiguous), *shapes)
    assert 4 * sum(sizes) == every
    needed = [
        [bool(page.contiguous(i)[-1] >= page.contiguous(j)[0]) for j in range(4)] for i in range(4)
    ]
    assert [sum(row) for row in needed] == [1, 2, 3, 4]


KINDS = {
    "gather": {"all-gather": 2, "reduce-scatter": 2},
    "ring": {"collective-permute": 12},
    "ulysses": {"all-to-all": 8},
}


def test_each_variant_runs_its_own_collectives(page):
    """A gather becomes a reduce-scatter backward; the ring runs n - 1 steps; Ulysses four swaps."""
    for name, kinds in KINDS.items():
        counted = {}
        for row in page.ms.collectives(getattr(page, f"{name}_step"), mesh=page.mesh):
            if row.axes == ("seq",):
                counted[row.kind] = counted.get(row.kind, 0) + row.executions
        assert counted == kinds


def test_ulysses_sends_less_if_n_is_more_than_1_plus_H_over_K():
    """n > 1 + H / K, which is 3 with 8 query heads and 4 key heads."""
    assert 1 + 8 / 4 == 3
    for n in range(2, 33):
        for H, K in [(32, 8), (8, 4), (16, 16), (64, 8)]:
            less = (2 * H + 2 * K) * (n - 1) / n < 2 * K * (n - 1)
            assert less == (n > 1 + H / K)


def test_repeated_key_heads_are_what_is_sent(page):
    """With two key heads repeated to four, Ulysses sends (2H + 2n)(n - 1) / n for each token and C."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        return page.ulysses(q, k, v, page.contiguous)

    block = P("data", "seq")
    mapped = jax.shard_map(attend, mesh=page.mesh, in_specs=block, out_specs=block)
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (8, 2))
    tokens, H, n, C = 16, 8, 4, 8
    step = jax.jit(mapped).lower(q, k, k).compile()
    assert sent_along_seq(page, step) == 4 * tokens * (2 * H + 2 * n) * (n - 1) // n * C


def test_no_message_of_the_forward_pass_waits_for_attention(page):
    """A block is sent before it is used, so no message depends on a product."""
    q, k = jnp.ones((4, 64, 8, 8)), jnp.ones((4, 64, 4, 8))
    mapped = on_mesh(page, page.ring, page.contiguous)
    (outer,) = jax.make_jaxpr(mapped)(q, k, k).jaxpr.eqns
    messages, products = waits_of(outer.params["jaxpr"])
    assert len(messages) == 6 and products
    assert all(wait.products == 0 for wait in messages)


def test_all_three_send_the_same_sums_of_gradients(page):
    """What is not sent along `seq` alone is summed along both axes, and has the same bytes for all."""
    sums = []
    for name in VARIANTS:
        rows = page.ms.collectives(getattr(page, f"{name}_step"), mesh=page.mesh)
        others = [row for row in rows if row.axes != ("seq",)]
        assert {(row.kind, row.axes) for row in others} == {("all-reduce", ("data", "seq"))}
        sums.append(sum(row.executions * row.wire_bytes for row in others))
    assert sums[0] == sums[1] == sums[2] > 0


def test_a_model_under_jit_calls_attention_in_shard_map(page):
    """Each of the three, wrapped alone, gives the loss and gradients of one device under plain jit."""
    np.testing.assert_allclose(page.found[0], page.true_loss, rtol=1e-5)
    assert largest_error(page, page.found[1]) < 1e-6
    shapes = {shard.data.shape for shard in page.sharded_batch[0].addressable_shards}
    assert shapes == {(2, 16)}  # half of the sequences, and a quarter of their tokens
    for name in VARIANTS:
        attend = on_mesh(page, getattr(page, name), page.contiguous)
        loss, gradient = page.jitted_step(page.model, page.sharded_batch, page.positions, attend)
        np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5, err_msg=name)
        assert largest_error(page, gradient) < 1e-6, name


def test_the_example_of_a_merge(page):
    """Scores 1 and 2, and then 4: the page's sum is that of all three, and that of `merge`."""
    blocks = [jnp.array([1.0, 2.0]), jnp.array([4.0])]
    one, two = [(x.max(), jnp.exp(x - x.max()).sum(), jnp.zeros(1)) for x in blocks]
    top, total, _ = page.merge(one, two)
    assert float(top) == 4
    np.testing.assert_allclose([page.merged, page.together], float(total), rtol=1e-6)


def one_head():
    """Queries, keys and values of four tokens and one head of size 8."""
    return jax.random.normal(jax.random.key(0), (3, 4, 8))


def test_two_blocks_of_keys_merge_to_attention(page):
    """`part` of each half of the keys, merged and divided: the softmax over all keys, also of large scores."""
    q, k, v = one_head()
    for times in (1, 100):
        blocks = [page.part(times * q, k[half], v[half]) for half in (slice(2), slice(2, 4))]
        _, total, out = page.merge(*blocks)
        wanted = jax.nn.softmax(times * q @ k.T / 8**0.5) @ v
        np.testing.assert_allclose(out / total[:, None], wanted, atol=1e-4)


def test_the_imported_block_is_part_with_heads_and_a_mask(page):
    """With one head and no masked key, unfinished_attention is `part`."""
    q, k, v = one_head()
    arrays = (x[None, :, None] for x in (q, k, v))
    seen = page.unfinished_attention(*arrays, jnp.full(4, 9), jnp.arange(4))
    for found, wanted in zip(seen, page.part(q, k, v), strict=True):
        np.testing.assert_allclose(found[0, 0, 0], wanted, rtol=1e-5)


def test_a_block_of_masked_keys_adds_nothing(page):
    """Merged with a block that is seen, it changes nothing; with -inf in its place, NaN."""
    q, k, v = (x[None, :, None] for x in one_head())
    seen = page.unfinished_attention(q, k, v, jnp.full(4, 9), jnp.arange(4))
    hidden = page.unfinished_attention(q, k, v, jnp.full(4, -1), jnp.arange(4))
    assert np.all(hidden[0] == np.float32(-1e30))
    for pair in ((seen, hidden), (hidden, seen)):
        found, wanted = page.finish(page.merge(*pair), q.dtype), page.finish(seen, q.dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    top, total, out = page.part(jnp.full((1, 1), -jnp.inf), jnp.ones((1, 1)), jnp.ones((1, 1)))
    assert top == -jnp.inf and np.isnan(total) and np.isnan(out)


def test_the_figures_show_who_has_what(page, monkeypatch):
    """The blocks of keys after each message, and rows and columns before and after all_to_all."""
    monkeypatch.syspath_prepend(BOOK / "figures")
    figure = importlib.import_module("context_parallel")
    n = figure.N
    assert n == page.n
    onward = [(device, (device + 1) % n) for device in range(n)]

    def ring(mine):
        held = [mine]
        for _ in range(1, n):
            held.append(jax.lax.ppermute(held[-1], "seq", onward))
        return jnp.stack(held)

    kept = jax.shard_map(ring, mesh=page.mesh, in_specs=P("seq"), out_specs=P(None, "seq"))
    shown = [[figure.source_of(device, number) for device in range(n)] for number in range(n)]
    assert kept(jnp.arange(n)).tolist() == shown

    to_heads = partial(jax.lax.all_to_all, axis_name="seq", split_axis=1, concat_axis=0, tiled=True)
    specs = {"in_specs": P("seq"), "out_specs": P(None, "seq")}
    tiles = jnp.array([[figure.before(row, column) for column in range(n)] for row in range(n)])
    found = jax.shard_map(to_heads, mesh=page.mesh, **specs)(tiles)
    assert found.tolist() == tiles.tolist()  # the same tiles, by columns
    for shard in found.addressable_shards:
        (column,) = range(n)[shard.index[1]]
        device = int(np.argwhere(page.mesh.devices == shard.device)[0, 1])
        assert {figure.after(row, column) for row in range(n)} == {device}


@contextlib.contextmanager
def attention_replaced(page, replacement):
    """`unfinished_attention` is another function; what JAX has traced before, or now, is forgotten."""
    jax.clear_caches()
    with mock.patch.dict(page.ring.__globals__, unfinished_attention=replacement):
        yield
    jax.clear_caches()


def largest_error(page, gradient):
    pairs = zip(*map(jax.tree.leaves, (gradient, page.true_gradient)), strict=True)
    return max(float(jnp.abs(found - true).max()) for found, true in pairs)


def test_positions_that_restart_are_plausible_and_wrong(page):
    """The loss is near the true one, and the gradient is wrong, without an error."""
    loss, gradient = page.wrong_step(page.model, page.batch)
    assert 0 < abs(loss - page.true_loss) < 0.1
    right = page.gather_step(page.model, page.batch)[1]
    assert largest_error(page, gradient) > 1e5 * largest_error(page, right)


def test_what_restarted_positions_do(page):
    """Queries see later tokens and miss earlier ones; a token 16 away has the same rotary position."""
    order = np.asarray(page.order_of(page.restarted))
    seen, true = order[:, None] >= order, np.tril(np.ones((64, 64), bool))
    assert (seen & ~true).any() and (true & ~seen).any()
    assert order[16] == order[0]


def test_one_line_catches_positions_that_restart(page):
    """check_positions accepts contiguous and striped order, and raises for positions that restart."""
    page.check_positions(page.contiguous)
    page.check_positions(lambda device: device + 4 * jnp.arange(16))
    with pytest.raises(AssertionError, match="repeat or are missing"):
        page.check_positions(page.restarted)


def test_held_must_say_what_the_devices_hold(page):
    """In striped order, the step is right if tokens and targets are reordered; if not, wrong without an error."""

    def striped(device):
        return device + 4 * jnp.arange(16)

    page.check_positions(striped)  # it cannot see the order of the tokens
    step = page.compiled(page.gather, striped)
    tokens, targets = (x[:, page.order_of(striped)] for x in page.batch)
    loss, gradient = step(page.model, (tokens, targets))
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    assert largest_error(page, gradient) < 1e-6
    assert largest_error(page, step(page.model, page.batch)[1]) > 1e-3


def test_other_layers_that_mix_tokens_restart_on_each_block(page):
    """A convolution is wrong at the start of each later block, a recurrence throughout; no error."""
    layers = {
        "convolution": lambda x: x + jnp.pad(x, ((0, 0), (1, 0)))[:, :-1],
        "recurrence": lambda x: jax.lax.cumsum(x, axis=1),
    }
    x, wrong = jnp.ones((2, 64)), {}
    block = P("data", "seq")
    for name, layer in layers.items():
        mapped = jax.shard_map(layer, mesh=page.mesh, in_specs=block, out_specs=block)
        wrong[name] = np.flatnonzero((jax.jit(mapped)(x) != layer(x)).any(0)).tolist()
    assert wrong == {"convolution": [16, 32, 48], "recurrence": list(range(16, 64))}


@pytest.mark.parametrize("heads", [(8, 2), (6, 4)])
def test_ulysses_needs_heads_divisible_by_devices(page, heads):
    """With two key heads, or six query heads, on four devices, all_to_all raises an error."""
    q, k = (jnp.ones((2, 64, count, 8)) for count in heads)
    mapped = on_mesh(page, page.ulysses, page.contiguous)
    with pytest.raises(ValueError):
        mapped(q, k, k)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercises(page, exercise):
    """Each check rejects the stub and a wrong answer, and accepts the solution."""
    check_exercise(page, PAGE, exercise)
