"""The page "Divide a KV cache by positions": one softmax over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms

PAGE = "15a-divide-cache"
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
    """Every position is written where it belongs, and nothing else changes."""
    for part in "kv":
        np.testing.assert_array_equal(page.divided_cache[part], page.whole[part])


def test_position_20_is_in_slot_4_of_the_second_device(page):
    """On the first it would be slot 20, and each of the two stores 16 positions."""
    spec = jax.NamedSharding(page.serving, page.POSITIONS)
    shape = spec.shard_shape(page.cache["k"].shape)
    assert shape[2] == 16 and 20 - 16 == 4
    indices = spec.devices_indices_map(page.cache["k"].shape)
    holders = [device for device, index in indices.items() if 20 in range(32)[index[2]]]
    grid = page.serving.devices
    assert set(holders) == set(grid[:, :, 1].flat)


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
    spec = P("data", None, None, None, "group")
    shared = jax.jit(
        jax.shard_map(page.softmax_over_group, mesh=page.serving, in_specs=spec, out_specs=spec)
    )(score)
    exact = np.exp(score.astype("float64") - score.max(-1, keepdims=True))
    np.testing.assert_allclose(shared, exact / exact.sum(-1, keepdims=True), rtol=1e-4, atol=1e-7)
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(score)).any()


def test_a_device_holds_8_192_bytes_and_with_copies_16_384(page):
    assert ms.memory(page.divided_cache).bytes_per_device == 8192
    sharding = jax.NamedSharding(page.serving, P(None, "data", None, "kv"))
    copies = jax.tree.map(lambda array: jax.device_put(array, sharding), page.whole)
    assert ms.memory(copies).bytes_per_device == 16_384


def sent(program, mesh):
    return sorted((row.kind, row.wire_bytes) for row in ms.collectives(program, mesh))


def test_the_four_collectives_send_512_64_64_and_512_bytes(page):
    """Queries of a device; a maximum and a sum for 4 rows of 4 heads; half of what is scattered."""
    gathered, numbers = 4 * 2 * 16 * 4, 4 * 4 * 4
    found = sent(page.program, page.serving)
    assert found == [
        ("all-gather", gathered),
        ("all-reduce", numbers),
        ("all-reduce", numbers),
        ("reduce-scatter", numbers * 16 / 2),
    ]
    assert (gathered, numbers) == (512, 64) and sum(size for _, size in found) == 1152


@pytest.mark.parametrize("times", [2, 8])
def test_what_is_sent_does_not_grow_with_the_cache(page, times):
    longer = {name: jnp.concatenate([array] * times, axis=2) for name, array in page.cache.items()}
    given = page.q_BSHC, page.k_BSKC, page.v_BSKC, longer, page.position_BS
    program = page.divided.lower(*given).compile()
    assert sent(program, page.serving) == sent(page.program, page.serving)


def test_the_size_of_group_must_divide_the_positions(page):
    """33 positions on two devices raise an error."""
    cache = {
        name: jnp.pad(array, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0)))
        for name, array in page.cache.items()
    }
    with pytest.raises(ValueError, match="divisible"):
        page.divided(page.q_BSHC, page.k_BSKC, page.v_BSKC, cache, page.position_BS)
