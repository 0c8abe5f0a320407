"""The page "Divide a shared KV cache", and the program of examples/serve.py, which uses it."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from defined import program_at
from pages import BOOK

PAGE = "15a-divide-cache"
EXAMPLES = BOOK.parent / "examples"
P = jax.P


def test_it_gives_what_one_device_gives(page):
    """Attention over a whole cache in NumPy, one head after the other, by each row's own position."""
    for row in range(page.B):
        last = int(page.position_BS[row, 0])
        for head in range(page.H):
            own = head * page.K // page.H
            keys, values = (np.array(page.cache[part][0, row, :, own]) for part in "kv")
            keys[last], values[last] = page.k_BSKC[row, 0, own], page.v_BSKC[row, 0, own]
            score = keys[: last + 1] @ np.asarray(page.q_BSHC[row, 0, head]) / np.sqrt(page.C)
            share = np.exp(score - score.max())
            wanted = share @ values[: last + 1] / share.sum()
            np.testing.assert_allclose(page.mixed[row, 0, head], wanted, atol=1e-5)


def test_the_divided_cache_is_the_whole_one(page):
    """By rows and by positions, every token is written where it belongs, and nothing else changes."""
    for part in "kv":
        np.testing.assert_array_equal(page.divided_cache[part], page.whole[part])
        np.testing.assert_array_equal(page.rows_cache[part], page.whole[part])


def test_a_negative_slot_changes_the_cache_and_not_yet_the_result(page):
    """Written without `where`, rows 0 and 2 also land in positions 21 and 19, which no query sees."""

    def write_all(cache, i, position_BS, k_BSKC, v_BSKC):
        slot_BS = position_BS - cache["k"].shape[2] * jax.lax.axis_index("group")
        return page.write(cache, i, slot_BS, k_BSKC, v_BSKC)

    def attend(*given):
        return page.attend_positions(*given)

    with mock.patch.dict(page.attend_positions.__globals__, write_own=write_all):
        mixed, cache = page.on_mesh(attend, page.POSITIONS)(*page.given)
    np.testing.assert_allclose(mixed, page.wanted, atol=1e-5)
    for part in "kv":
        differs = np.asarray(cache[part] != np.asarray(page.whole[part]))[0].any((-1, -2))
        assert np.argwhere(differs).tolist() == [[0, 21], [2, 19]]
    with pytest.raises(AssertionError):
        page.check(mixed, cache)


def test_position_20_is_in_slot_4_of_the_second_device(page):
    """Each of the two stores 16 positions, and slot -11 is slot 5 of the second, position 21."""
    spec = jax.NamedSharding(page.serving, page.POSITIONS)
    shape = spec.shard_shape(page.cache["k"].shape)
    assert shape[2] == 16 and 20 - 16 == 4
    indices = spec.devices_indices_map(page.cache["k"].shape)
    holders = [device for device, index in indices.items() if 20 in range(32)[index[2]]]
    grid = page.serving.devices
    assert set(holders) == set(grid[:, 1])
    assert page.position_BS[1, 0] == 20 and 5 - 16 == -11 == 5 - shape[2]
    assert page.position_BS[0, 0] == 5 and range(16)[-11] == 5 and range(16, 32)[-11] == 21


def test_each_row_of_the_mesh_is_a_group_with_one_key_value_head(page):
    """Devices 0 and 1 hold copies of the same head, and devices 2 and 3 of the other."""
    ids = [[device.id for device in group] for group in page.serving.devices]
    assert ids == [[0, 1], [2, 3]]
    heads = {s.device.id: s.index[3] for s in page.copies["k"].addressable_shards}
    assert heads[0] == heads[1] != heads[2] == heads[3]
    assert page.copies["k"].addressable_shards[0].data.shape == (1, 4, 32, 1, 16)


def test_a_slot_beyond_the_end_is_dropped_and_a_negative_one_is_not(page):
    """mode="drop" ignores a slot of T, and -1 overwrites the last."""
    cache = {name: jnp.zeros((1, 1, 4, 1, 2)) for name in "kv"}
    new = jnp.ones((1, 1, 1, 2))
    for slot, written in [(4, []), (-1, [3]), (2, [2])]:
        slot_BS = jnp.full((1, 1), slot)
        done = page.write(cache, 0, slot_BS, new, new)["k"][0, 0, :, 0, 0]
        assert np.flatnonzero(done).tolist() == written


def test_without_the_maximum_large_scores_overflow(page):
    """With scores in the hundreds, the softmax is that of NumPy in float64."""
    score = 200 * np.random.default_rng(1).standard_normal((8, 1, 1, 4, 32)).astype("float32")
    spec = P(None, None, None, None, "group")
    shared = jax.jit(
        jax.shard_map(page.softmax_over_group, mesh=page.serving, in_specs=spec, out_specs=spec)
    )(score)
    exact = np.exp(score.astype("float64") - score.max(-1, keepdims=True))
    np.testing.assert_allclose(shared, exact / exact.sum(-1, keepdims=True), rtol=1e-4, atol=1e-7)
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(score)).any()


def test_a_device_holds_8_192_bytes_and_with_copies_16_384(page):
    for cache in (page.divided_cache, page.rows_cache):
        assert ms.memory(cache).bytes_per_device == 8192
    assert ms.memory(page.copies).bytes_per_device == 16_384


def sent(program, mesh):
    return sorted((row.kind, row.wire_bytes) for row in ms.collectives(program, mesh))


def test_the_four_collectives_send_512_64_64_and_512_bytes(page):
    """Queries of a device; a maximum and a sum for 4 rows of 4 heads; half of what is scattered."""
    gathered, numbers = 4 * 2 * 16 * 4, 4 * 4 * 4
    found = sent(page.divided.lower(*page.given).compile(), page.serving)
    assert found == [
        ("all-gather", gathered),
        ("all-reduce", numbers),
        ("all-reduce", numbers),
        ("reduce-scatter", numbers * 16 / 2),
    ]
    assert (gathered, numbers) == (512, 64) and sum(size for _, size in found) == 1152


def test_divided_by_rows_two_all_to_alls_send_512_bytes_together(page):
    """Queries and results, 512 bytes on each device, of which it sends half."""
    half = 4 * 2 * 16 * 4 / 2
    found = sent(page.with_rows.lower(*page.given).compile(), page.serving)
    assert found == 2 * [("all-to-all", half)] and 2 * 2 * half < 1152


def test_the_rows_are_divided_and_not_copied(page):
    """A device of a group stores two rows of four, of one key-value head."""
    shapes = {shard.data.shape for shard in page.rows_cache["k"].addressable_shards}
    assert shapes == {(1, 2, 32, 1, 16)}
    held = ms.memory(page.rows_cache)
    assert held.total_bytes == held.unique_bytes


def test_copies_waste_half_here_and_seven_eighths_with_eight(page):
    """n devices that share a head hold n copies."""
    for n, wasted in [(2, 1 / 2), (8, 7 / 8)]:
        mesh = jax.make_mesh((n,), ("group",), axis_types=page.auto)
        shape = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(mesh, P()))
        held = ms.memory(shape)
        assert 1 - held.unique_bytes / held.total_bytes == wasted


@pytest.mark.parametrize("times", [2, 8])
def test_what_is_sent_does_not_grow_with_the_cache(page, times):
    """By rows and by positions."""
    longer = {name: jnp.concatenate([array] * times, axis=2) for name, array in page.cache.items()}
    given = *page.given[:3], longer, 0, page.position_BS
    for step in (page.divided, page.with_rows):
        program, wanted = (step.lower(*some).compile() for some in (given, page.given))
        assert sent(program, page.serving) == sent(wanted, page.serving)


def test_in_the_model_of_the_example_all_give_the_tokens_of_no_cache(page, monkeypatch):
    """examples/serve.py with copies, rows and positions: every logit, and half of the cache."""
    monkeypatch.syspath_prepend(EXAMPLES)
    serve = program_at(EXAMPLES / "serve.py")
    random, weights = np.random.default_rng(0), {}
    for name, (shape, spec) in serve.WEIGHTS.items():
        values = random.standard_normal(shape).astype("float32")
        values = 1 + values / 10 if "scale" in name else values / shape[-2] ** 0.5
        weights[name] = jax.device_put(values, jax.NamedSharding(serve.serving, spec))
    length_B = np.array([5, 9, 3, 12, 7, 10, 4, 8], "int32")
    prompts_BS = random.integers(serve.V, size=(serve.B, 12)).astype("int32")
    tokens, logits = serve.generate_uncached(weights, prompts_BS, length_B, 4)
    for attend, on_page, of_rows, held in [
        (page.attend, page.COPIES, "data", 49_152),
        (page.attend_rows, page.ROWS, ("data", "group"), 24_576),
        (page.attend_positions, page.POSITIONS, "data", 24_576),
    ]:
        spec = P(None, of_rows, *on_page[2:])  # the program's mesh divides the rows along data too
        model, cache = serve.make_forward(attend, spec), serve.make_cache(spec)
        assert ms.memory(cache).bytes_per_device == held
        found = serve.generate(model, weights, cache, prompts_BS, length_B, 4)
        np.testing.assert_array_equal(found[0], tokens)
        np.testing.assert_allclose(found[1], logits, rtol=1e-4, atol=1e-4)


def test_the_size_of_group_must_divide_the_positions(page):
    """33 positions on two devices raise an error."""
    cache = {
        name: jnp.pad(array, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0)))
        for name, array in page.cache.items()
    }
    with pytest.raises(ValueError, match="divisible"):
        page.divided(*page.given[:3], cache, 0, page.position_BS)


def test_the_size_of_group_must_divide_the_rows_of_a_replica(page):
    """Two devices cannot divide three rows."""
    first = [x[:3] for x in (page.q_BSHC, page.k_BSKC, page.v_BSKC)]
    cache = {name: array[:, :3] for name, array in page.cache.items()}
    with pytest.raises(ValueError, match="divisible"):
        page.with_rows(*first, cache, 0, page.position_BS[:3])
