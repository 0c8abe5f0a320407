"""Chapter 15, "Serve from sharded weights: prefill, decode and a sharded KV cache"."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from defined import functions, shown
from fetched import fetched_by
from many_devices import serving
from pages import BOOK, cells_of, check_exercise, exercises_of

PAGE = "15-serving"
DIVIDED = "15a-divide-cache"
EXAMPLES = BOOK.parent / "examples"
P = jax.P
EXACT = dict(rtol=1e-4, atol=1e-4)  # float32; four devices add in another order than one


def shapes_of(page):
    """The shape of each weight, by its path."""
    return {name: shape for name, (shape, _) in page.WEIGHTS.items()}


def generated(page, forward, spec, steps=8, **others):
    """Tokens, logits and the cache after some steps from an empty cache."""
    given = dict(prompts_BS=page.prompts_BS, length_B=page.length_B, weights=page.weights)
    given |= others
    return page.generate(forward, cache=page.make_cache(spec), steps=steps, **given)


def moved(page, forward, cache):
    """(kind, axes, payload bytes, bytes sent, executions) of each collective of a step of decode."""
    rows = ms.collectives(page.decode_program(forward, cache), page.serving)
    return [(row.kind, row.axes, row.payload_bytes, row.wire_bytes, row.executions) for row in rows]


# How large a cache is


def test_a_token_of_llama_8b_takes_131_072_bytes(page):
    """2 L K C numbers of two bytes; sixty conversations take 64 GB, four times the weights."""
    assert page.token_bytes == 131_072
    sixty = 60 * 8192 * page.token_bytes
    stored = 2 * 8.03e9  # bytes of the weights in bfloat16
    assert f"{sixty / 1e9:.1f}" == "64.4" and 3.9 < sixty / stored < 4.1
    L, H, K, C, itemsize = 32, 32, 8, 128, 2
    assert page.token_bytes == 2 * L * K * C * itemsize
    assert 4 * page.token_bytes == 2 * L * H * C * itemsize  # every query head had its own


def test_the_formula_is_the_cache_of_the_page(page):
    """Bytes per token times rows times positions are the bytes of the two arrays."""
    (row,) = {array.nbytes for array in page.cache.values()}
    formula = 2 * page.L * page.K * page.C * 4
    assert formula == 768 and 2 * row == formula * page.B * page.T == 196_608


# The model


def flax_llama(page, monkeypatch, weights):
    """The Flax model of examples/llama.py with these weights, its mesh, and what it has by path."""
    monkeypatch.syspath_prepend(EXAMPLES)
    llama = importlib.import_module("llama")
    sizes = {letter: page.variables[letter] for letter in "VDFLHKC"}
    config = llama.Config(
        **sizes, tied=False, epsilon=1e-5, theta=10_000.0, scaling=None, dtype="float32"
    )
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=page.auto * 2)
    with jax.set_mesh(mesh):
        model = llama.Llama(config, nnx.Rngs(0))
    variables = llama.by_path(nnx.state(model, nnx.Param))
    shapes = {path: variable.shape for path, variable in variables.items()}
    graphdef, state = nnx.split(model)
    for path, variable in llama.by_path(state).items():
        variable.set_value(jnp.asarray(np.asarray(weights[path])))
    return nnx.merge(graphdef, state), mesh, shapes


def test_the_names_are_the_paths_of_the_flax_model(page, monkeypatch):
    """WEIGHTS has the paths and shapes of the model in Bring your own weights."""
    _, _, shapes = flax_llama(page, monkeypatch, page.trained)
    assert shapes == shapes_of(page) and page.SPECS.keys() == shapes.keys()


def test_the_model_is_that_of_bring_your_own_weights(page, monkeypatch):
    """Prefill on eight devices gives the logits of the Flax Llama of examples/llama.py."""
    model, mesh, _ = flax_llama(page, monkeypatch, page.trained)
    with jax.set_mesh(mesh):
        logits = model(jnp.asarray(page.prompts_BS))
    wanted = logits[jnp.arange(page.B), page.length_B - 1]
    _, found, _ = generated(page, page.with_copies, page.COPIES, steps=1)
    np.testing.assert_allclose(found[:, 0], wanted, **EXACT)


def test_the_reference_is_the_model_of_bring_your_own_weights(page, monkeypatch):
    """What the companion runs without a cache gives the logits of examples/llama.py, of all positions."""
    model, mesh, _ = flax_llama(page, monkeypatch, page.trained)
    with jax.set_mesh(mesh):
        wanted = model(jnp.asarray(page.prompts_BS))
    found = serving.without_cache(page.trained)(page.prompts_BS)
    np.testing.assert_allclose(found, wanted, **EXACT)


# The move


def test_training_holds_76_544_bytes_and_serving_163_584(page):
    """An eighth of the matrices; a quarter of them, and half of key and value."""
    sizes = {name: np.prod(shape) for name, shape in shapes_of(page).items()}
    scales = sum(size for name, size in sizes.items() if "scale" in name)
    shared = sizes["blocks/key/kernel"] + sizes["blocks/value/kernel"]
    others = sum(sizes.values()) - scales - shared
    assert (scales, shared, others) == (448, 12_288, 137_216)
    training = 4 * ((shared + others) // 8 + scales)
    serving = 4 * (others // 4 + shared // 2 + scales)
    assert ms.memory(page.trained).bytes_per_device == training == 76_544
    assert ms.memory(page.weights).bytes_per_device == serving == 163_584
    assert f"{serving / training:.1f}" == "2.1"


def test_the_weights_are_the_same_after_the_move(page):
    for name, weight in page.weights.items():
        assert weight.sharding == jax.NamedSharding(page.serving, page.SPECS[name])
        np.testing.assert_array_equal(weight, page.trained[name])


def test_device_put_fetches_what_differs_and_a_jitted_identity_nothing(page):
    """On the same eight devices, device_put takes each matrix through the host; move takes none."""
    fresh = jax.tree.map(jnp.copy, page.trained)
    matrices = sorted(shape for name, shape in shapes_of(page).items() if "scale" not in name)
    assert sorted(fetched_by(lambda: jax.device_put(fresh, page.shardings))) == matrices
    fresh = jax.tree.map(jnp.copy, page.trained)
    assert fetched_by(lambda: page.move(fresh)) == []


def test_in_another_order_of_devices_device_put_fetches_nothing(page):
    """With the same devices in another order, device_put compiles a program of its own."""
    order = np.array(jax.devices())[[0, 1, 3, 2, 4, 5, 7, 6]].reshape(2, 2, 2)
    other = jax.sharding.Mesh(order, page.serving.axis_names)
    shardings = {name: jax.NamedSharding(other, spec) for name, spec in page.SPECS.items()}
    fresh = jax.tree.map(jnp.copy, page.trained)
    assert fetched_by(lambda: jax.device_put(fresh, shardings)) == []


def test_cast_in_the_move_halves_the_bytes(page):
    """In bfloat16 each device holds half."""

    def cast(weights):
        return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)

    half = jax.jit(cast, out_shardings=page.shardings)(page.trained)
    assert 2 * ms.memory(half).bytes_per_device == ms.memory(page.weights).bytes_per_device


def test_in_bfloat16_it_serves_too(page):
    """Weights and cache in bfloat16: half of the cache, and logits that differ by rounding."""
    half = jax.tree.map(lambda weight: weight.astype("bfloat16"), page.weights)
    wanted = page.wanted_logits[:, 0]
    for attend, spec in [(page.attend_copies, page.COPIES), *divided(page)]:
        cache = page.make_cache(spec, dtype="bfloat16")
        held = ms.memory(page.make_cache(spec)).bytes_per_device
        assert 2 * ms.memory(cache).bytes_per_device == held
        forward = page.make_forward(attend, spec)
        given = dict(prompts_BS=page.prompts_BS, length_B=page.length_B, steps=1)
        _, logits, _ = page.generate(forward, half, cache, **given)
        assert logits.dtype == "bfloat16"
        off = np.abs(logits[:, 0].astype("float32") - wanted).max()
        assert off < 0.1 * np.abs(wanted).max()


def test_each_device_has_the_key_value_head_of_its_query_heads(page):
    """Query head h uses key-value head h // 4, and both are on the same device."""
    query = page.weights["blocks/query/kernel"].sharding.devices_indices_map((3, 64, 128))
    key = page.weights["blocks/key/kernel"].sharding.devices_indices_map((3, 64, 32))
    for device in jax.devices():
        columns = range(128)[query[device][2]]
        heads = {column // page.C for column in columns}
        of_key = {column // page.C for column in range(32)[key[device][2]]}
        assert len(heads) == 2 and {head // 4 for head in heads} == of_key


# The cache


def test_the_cache_is_divided_by_data_and_kv_and_copied_along_group(page):
    """Each device holds 49,152 bytes: half of the rows, one of two heads."""
    assert ms.memory(page.cache).bytes_per_device == 49_152
    shapes = {shard.data.shape for shard in page.cache["k"].addressable_shards}
    assert shapes == {(3, 4, 32, 1, 16)}
    assert page.COPIES == P(None, "data", None, "kv", None)


def test_the_copies_along_group_are_equal(page):
    """After 8 steps the devices along group have the same numbers."""
    for array in page.cache.values():
        by_index = {}
        for shard in array.addressable_shards:
            by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert len(by_index) == 4
        for one, other in by_index.values():
            np.testing.assert_array_equal(one, other)


def test_shard_map_rejects_copies_that_differ(page):
    """A cache that could differ along group is an error while tracing, by the promise of the specs."""

    def differs(q, k, v, cache, i, position_BS):
        k = k + 1e-9 * jax.lax.axis_index("group")
        return page.attend_copies(q, k, v, cache, i, position_BS)

    with pytest.raises((TypeError, ValueError), match="varying|vary|manual axes|replicat"):
        page.decode_program(page.make_forward(differs, page.COPIES), page.cache)


def test_padding_changes_nothing(page):
    """Other tokens behind a short prompt give the same logits, with all three caches."""
    behind = np.arange(12) >= page.length_B[:, None]
    others = np.where(behind, (page.prompts_BS + 100) % page.V, page.prompts_BS).astype("int32")
    for attend, spec in [(page.attend_copies, page.COPIES), *divided(page)]:
        forward = page.make_forward(attend, spec)
        _, logits, _ = generated(page, forward, spec, prompts_BS=others)
        np.testing.assert_allclose(logits, page.wanted_logits, **EXACT)


# Prefill and decode


def test_the_logits_are_those_of_recomputing_everything(page):
    """With copies: every logit of every step."""
    tokens, logits, _ = generated(page, page.with_copies, page.COPIES)
    np.testing.assert_array_equal(tokens, page.wanted_tokens)
    np.testing.assert_allclose(logits, page.wanted_logits, **EXACT)


def test_the_reference_computes_each_row_alone(page):
    """A row with no padding and no other rows beside it gives the same tokens."""
    logits_of = serving.without_cache(page.trained)
    for row in (2, 3):
        length = int(page.length_B[row])
        tokens = list(page.prompts_BS[row, :length])
        for step in range(3):
            logits = logits_of(np.array([tokens], "int32"))[0, -1]
            np.testing.assert_allclose(page.wanted_logits[row, step], logits, **EXACT)
            tokens.append(int(logits.argmax()))


def test_both_caches_hold_the_keys_of_the_prompts_and_of_the_new_tokens(page):
    """Up to each row's length plus seven, the two caches are equal."""
    attend, spec = by_positions(page)
    _, _, divided = generated(page, page.make_forward(attend, spec), spec)
    for n, length in enumerate(page.length_B):
        for part in "kv":
            one, other = (cache[part][:, n, : length + 7] for cache in (page.cache, divided))
            np.testing.assert_allclose(one, other, **EXACT)
            assert abs(np.asarray(one)).sum(axis=(0, 2, 3)).min() > 0
            assert not np.any(page.cache[part][:, n, max(12, length + 7) :])


def test_the_first_row_starts_at_0_with_a_count_of_5_and_then_at_5_6_7_with_1(page):
    """S, start and count of row 0 in each call, and that its padding is at positions 5 to 11."""
    calls = []

    def noted(weights, cache, tokens_BS, start_B, count_B):
        calls.append((tokens_BS.shape[1], int(start_B[0]), int(count_B[0])))
        return page.with_copies(weights, cache, tokens_BS, start_B, count_B)

    generated(page, noted, page.COPIES, steps=4)
    assert calls == [(12, 0, 5), (1, 5, 1), (1, 6, 1), (1, 7, 1)]


def test_two_programs_are_compiled(page):
    """One for prefill, one for decode."""
    forward = page.make_forward(page.attend_copies, page.COPIES)
    generated(page, forward, page.COPIES, steps=4)
    assert forward._cache_size() == 2


def test_the_cache_is_donated(page):
    """The old cache is gone after a call."""
    cache = page.make_cache(page.COPIES)
    page.generate(page.with_copies, page.weights, cache, page.prompts_BS, page.length_B, steps=1)
    assert all(array.is_deleted() for array in cache.values())


def test_more_tokens_than_the_cache_has_positions_raise(page):
    with pytest.raises(ValueError, match="12 . 21 tokens do not fit into 32"):
        generated(page, page.with_copies, page.COPIES, steps=21)


def test_the_logits_leave_sharded_along_v(page):
    one_B = np.ones(page.B, "int32")
    cache = page.make_cache(page.COPIES)
    logits, _ = page.with_copies(page.weights, cache, one_B[:, None], one_B, one_B)
    assert logits.addressable_shards[0].data.shape == (4, 64)


def test_a_step_runs_seven_all_reduces_of_1_024_bytes(page):
    """One for the embedding, two for each layer; 4 rows of 64 numbers."""
    rows = moved(page, page.with_copies, page.cache)
    assert {row[:3] for row in rows} == {("all-reduce", ("kv", "group"), 4 * 64 * 4)}
    assert sum(row[4] for row in rows) == 2 * page.L + 1 == 7


def longer(cache):
    """A cache with twice as many positions, sharded alike."""
    return {
        name: jax.device_put(np.concatenate([array, array], 2), array.sharding)
        for name, array in cache.items()
    }


def test_the_all_reduces_do_not_grow_with_the_context(page):
    """A cache of 64 positions moves as much as one of 32."""
    wanted = moved(page, page.with_copies, page.cache)
    assert moved(page, page.with_copies, longer(page.cache)) == wanted


# The cache divided by rows, and by positions


def by_positions(page):
    """Attention and spec of a cache divided by positions, from the cells of the deeper page."""
    variables = dict(page.variables)
    for cell in cells_of(DIVIDED):
        if cell.id.startswith("positions-") and cell.id != "positions-bytes":
            exec(cell.source, variables)
    return variables["attend_positions"], variables["POSITIONS"]


def divided(page):
    """Attention and spec of the two ways to divide the cache."""
    return [(page.attend_rows, page.ROWS), by_positions(page)]


def test_divided_the_logits_are_the_same(page):
    """By rows and by positions: every logit of every step, and half of the cache on each device."""
    for attend, spec in divided(page):
        assert ms.memory(page.make_cache(spec)).bytes_per_device == 24_576 == 49_152 // 2
        tokens, logits, _ = generated(page, page.make_forward(attend, spec), spec)
        np.testing.assert_array_equal(tokens, page.wanted_tokens)
        np.testing.assert_allclose(logits, page.wanted_logits, **EXACT)


def test_a_device_of_a_group_stores_two_rows_of_four(page):
    """Half of the replica's rows, of one key-value head, and no copies."""
    cache = page.make_cache(page.ROWS)
    assert {shard.data.shape for shard in cache["k"].addressable_shards} == {(3, 2, 32, 1, 16)}
    held = ms.memory(cache)
    assert held.total_bytes == held.unique_bytes


def test_divided_by_rows_two_all_to_alls_run_in_each_layer(page):
    """Queries and results, 512 numbers of four bytes on each device, of which it sends half."""
    rows = moved(page, page.with_rows, page.make_cache(page.ROWS))
    sent = [(row[0], row[3], row[4]) for row in rows if row[1] == ("group",)]
    assert sent == 2 * [("all-to-all", 4 * 2 * 16 * 4 / 2, 3)]


def test_what_is_sent_does_not_grow_with_the_conversations(page):
    """With twice as many positions, a step sends as much, by rows and by positions."""
    for attend, spec in divided(page):
        forward, cache = page.make_forward(attend, spec), page.make_cache(spec)
        assert moved(page, forward, longer(cache)) == moved(page, forward, cache)


def test_copies_waste_half_here_and_seven_eighths_with_eight(page):
    """n devices that share a head hold n copies."""
    for n, wasted in [(2, 1 / 2), (8, 7 / 8)]:
        mesh = jax.make_mesh((n,), ("group",), axis_types=page.auto)
        shape = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.NamedSharding(mesh, P()))
        held = ms.memory(shape)
        assert 1 - held.unique_bytes / held.total_bytes == wasted


# Silent failures


def test_at_the_same_position_only_the_longest_prompt_is_right(page):
    """Seven of eight rows are wrong; with equal lengths none is."""
    assert np.flatnonzero(page.off_B < 1e-4).tolist() == [3] and page.length_B[3] == 12
    assert np.delete(page.off_B, 3).min() > 0.5
    twelve = np.full(8, 12, "int32")
    wanted = page.generate_uncached(page.trained, page.prompts_BS, twelve, steps=2)
    _, logits, _ = generated(page, page.with_copies, page.COPIES, steps=2, length_B=twelve)
    np.testing.assert_allclose(logits, wanted[1], **EXACT)


def test_not_donated_a_step_needs_a_second_cache(page):
    """The difference is all of the cache, and the line of the page catches it."""
    held = ms.memory(page.cache).bytes_per_device
    donated, not_donated = (
        ms.memory(page.decode_program(forward, page.cache))
        for forward in (page.with_copies, page.not_donated)
    )
    assert not_donated.bytes_per_device - donated.bytes_per_device == held == 49_152
    assert donated.aliased >= held > not_donated.aliased == 0


# The figure, the example, the exercises


def test_the_figure_shows_the_prompts_of_the_page(page, monkeypatch):
    monkeypatch.syspath_prepend(BOOK / "figures")
    figure = importlib.import_module("kv_cache")
    assert figure.LENGTHS == page.length_B.tolist()
    assert (figure.T, figure.PADDED) == (page.T, page.prompts_BS.shape[1])


def test_the_file_has_the_functions_of_the_pages():
    """Every function of examples/serve.py is on this page, on 15a, or in the companion.

    Its own are `main`, and `without_cache`, which takes the sizes of the file.
    """
    known = functions(Path(serving.__file__).read_text("utf-8"))
    known |= shown(PAGE, functions) | shown(DIVIDED, functions)
    in_file = functions((EXAMPLES / "serve.py").read_text("utf-8"))
    assert in_file.pop("main") and in_file.pop("without_cache") and len(in_file) == 15
    assert in_file == {name: known.get(name) for name in in_file}


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
