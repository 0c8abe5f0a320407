"""Chapter 15, "Serve from sharded weights: prefill, decode and a sharded KV cache"."""

import dataclasses
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
from pages import BOOK, check_exercise, exercises_of

P = jax.P
PAGE = "15-serving"
DIVIDED = "15a-divide-cache"
EXAMPLES = BOOK.parent / "examples"
EXACT = dict(rtol=1e-4, atol=1e-4)  # float32; four devices add in another order than one


def shapes_of(page):
    """The shape of each weight, by its path."""
    return {name: weight.shape for name, weight in page.trained.items()}


def generated(page, steps=8, **others):
    """Tokens, logits and the cache after some steps from an empty cache."""
    given = dict(prompts_BS=page.prompts_BS, length_B=page.length_B, model=page.model)
    given |= others
    return page.generate(weights=page.weights, cache=page.make_cache(), steps=steps, **given)


def moved(page, cache):
    """(kind, axes, payload bytes, bytes sent, executions) of each collective of a step of decode."""
    rows = ms.collectives(page.decode_program(page.model, cache), page.serving)
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
    config = llama.Config(**dataclasses.asdict(serving.CONFIG), scaling=None)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=page.auto)
    with jax.set_mesh(mesh):
        model = llama.Llama(config, nnx.Rngs(0))
    variables = llama.by_path(nnx.state(model, nnx.Param))
    shapes = {path: variable.shape for path, variable in variables.items()}
    graphdef, state = nnx.split(model)
    for path, variable in llama.by_path(state).items():
        variable.set_value(jnp.asarray(np.asarray(weights[path])))
    return nnx.merge(graphdef, state), mesh, shapes


def test_the_names_are_the_paths_of_the_flax_model(page, monkeypatch):
    """The weights have the paths and shapes of the model in Bring your own weights."""
    _, _, shapes = flax_llama(page, monkeypatch, page.trained)
    assert shapes == shapes_of(page) and page.SPECS.keys() == shapes.keys()


def test_the_model_is_that_of_bring_your_own_weights(page, monkeypatch):
    """Prefill on eight devices gives the logits of the Flax Llama of examples/llama.py."""
    model, mesh, _ = flax_llama(page, monkeypatch, page.trained)
    with jax.set_mesh(mesh):
        logits = model(jnp.asarray(page.prompts_BS))
    wanted = logits[jnp.arange(page.B), page.length_B - 1]
    _, found, _ = generated(page, steps=1)
    np.testing.assert_allclose(found[:, 0], wanted, **EXACT)


def test_the_reference_is_the_model_of_bring_your_own_weights(page, monkeypatch):
    """What the companion runs without a cache gives the logits of examples/llama.py, of all positions."""
    model, mesh, _ = flax_llama(page, monkeypatch, page.trained)
    with jax.set_mesh(mesh):
        wanted = model(jnp.asarray(page.prompts_BS))
    found = serving.without_cache(page.trained)(page.prompts_BS)
    np.testing.assert_allclose(found, wanted, **EXACT)


# The move


def test_the_page_has_the_sizes_of_the_model(page):
    """With 8 query heads, and two devices along `model`."""
    config = serving.CONFIG
    assert all(page.variables[letter] == getattr(config, letter) for letter in "VDLKC")
    assert (config.H, config.K, page.serving.shape["model"]) == (8, 2, 2)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_trained_on_any_mesh_the_specs_for_serving_are_the_same(page, shape):
    """What `model` divides is in the annotations, and `data` is left out."""
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=page.auto)
    _, state = serving.abstract_llama(mesh)
    specs = {
        path: page.serving_spec(weight) for path, weight in serving.llama.by_path(state).items()
    }
    assert specs == page.SPECS


def test_a_dimension_that_both_axes_divide_keeps_model_alone(page):
    """An entry of a spec may be a tuple of axes."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=page.auto)
    for entry in [("data", "model"), ("model", "data"), "model"]:
        sharding = jax.NamedSharding(mesh, P(None, entry))
        weight = jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)
        assert page.serving_spec(weight) == P(None, "model")


def test_of_each_pair_of_matrices_one_is_divided_by_columns_and_one_by_rows(page):
    """The first by its last dimension, the second by the one before; the norms are whole."""
    divided = {path: [*spec].index("model") for path, spec in page.SPECS.items() if "model" in spec}
    columns = {f"blocks/{name}/kernel" for name in ("query", "key", "value", "gate", "up")}
    rows = {f"blocks/{name}/kernel" for name in ("out", "down")}
    assert {path for path, axis in divided.items() if axis == 2} == columns
    assert {path for path, axis in divided.items() if axis == 1} == rows | {"head/kernel"}
    assert divided["embed/embedding"] == 0 and len(divided) == 9
    assert all("data" not in spec for spec in page.SPECS.values())


def test_training_is_fsdp_over_eight_devices(page):
    """`data` divides every matrix over all of them, and `model` has one device."""
    for path, weight in page.trained.items():
        assert dict(weight.sharding.mesh.shape) == {"data": 8, "model": 1}
        assert ("data" in weight.sharding.spec) == ("scale" not in path)


def test_training_holds_76_544_bytes_and_serving_300_800(page):
    """An eighth of the matrices, and then half of them; all of the scales."""
    sizes = {name: np.prod(shape) for name, shape in shapes_of(page).items()}
    scales = sum(size for name, size in sizes.items() if "scale" in name)
    matrices = sum(sizes.values()) - scales
    assert (scales, matrices) == (448, 149_504)
    training = 4 * (matrices // 8 + scales)
    serving = 4 * (matrices // 2 + scales)
    assert ms.memory(page.trained).bytes_per_device == training == 76_544
    assert ms.memory(page.weights).bytes_per_device == serving == 300_800
    assert f"{serving / training:.1f}" == "3.9"


def test_the_weights_are_the_same_after_the_move(page):
    for name, weight in page.weights.items():
        assert weight.sharding == jax.NamedSharding(page.serving, page.SPECS[name])
        np.testing.assert_array_equal(weight, page.trained[name])


def test_device_put_fetches_what_differs_and_a_jitted_identity_nothing(page):
    """On the same eight devices, device_put takes each matrix through the host; move takes none."""
    fresh = jax.tree.map(jnp.copy, page.trained)
    shapes = sorted(shape for name, shape in shapes_of(page).items() if "scale" not in name)
    assert sorted(fetched_by(lambda: jax.device_put(fresh, page.shardings))) == shapes
    fresh = jax.tree.map(jnp.copy, page.trained)
    assert fetched_by(lambda: page.move(fresh)) == []


def test_in_another_order_of_devices_device_put_fetches_nothing(page):
    """With the same devices in another order, device_put compiles a program of its own."""
    order = np.array(jax.devices())[[0, 1, 3, 2, 4, 5, 7, 6]].reshape(4, 2)
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
    cache = page.make_cache(dtype="bfloat16")
    assert 2 * ms.memory(cache).bytes_per_device == ms.memory(page.make_cache()).bytes_per_device
    given = dict(prompts_BS=page.prompts_BS, length_B=page.length_B, steps=1)
    _, logits, _ = page.generate(page.model, half, cache, **given)
    assert logits.dtype == "bfloat16"
    off = np.abs(logits[:, 0].astype("float32") - wanted).max()
    assert off < 0.02 * np.abs(wanted).max()  # 0.016; with a norm in bfloat16 0.024


def test_in_bfloat16_the_norm_rounds_once():
    """It computes in float32, and casts only its result."""
    keys = jax.random.split(jax.random.key(0))
    x_BSD = jax.random.normal(keys[0], (8, 12, 64)).astype("bfloat16")
    scale_D = 1 + jax.random.normal(keys[1], (64,)).astype("bfloat16") / 10
    found = serving.norm(x_BSD, scale_D)
    wanted = serving.norm(x_BSD.astype("float32"), scale_D.astype("float32"))
    assert found.dtype == "bfloat16" and wanted.dtype == "float32"
    np.testing.assert_array_equal(found, wanted.astype("bfloat16"))


def test_each_device_has_the_key_value_head_of_its_query_heads(page):
    """Query head h uses key-value head h // 4, and both are on the same device."""
    query = page.weights["blocks/query/kernel"].sharding.devices_indices_map((3, 64, 128))
    key = page.weights["blocks/key/kernel"].sharding.devices_indices_map((3, 64, 32))
    for device in jax.devices():
        columns = range(128)[query[device][2]]
        heads = {column // page.C for column in columns}
        of_key = {column // page.C for column in range(32)[key[device][2]]}
        assert len(heads) == 4 and len(of_key) == 1 and {head // 4 for head in heads} == of_key


# The cache


def test_the_cache_is_divided_by_rows_and_heads_and_nothing_is_stored_twice(page):
    """Each device holds two rows of one head, 24,576 bytes."""
    cache = page.make_cache()
    held = ms.memory(cache)
    assert held.bytes_per_device == 24_576 and held.total_bytes == held.unique_bytes
    shapes = {shard.data.shape for shard in cache["k"].addressable_shards}
    assert shapes == {(3, 2, 32, 1, 16)}


def test_write_puts_each_row_at_its_own_position(page):
    """Row 0 at position 1 and row 1 at 4; a slot beyond the end is dropped."""
    empty = {name: jnp.zeros((1, 2, 6, 1, 1)) for name in "kv"}
    new = jnp.ones((2, 1, 1, 1))  # two rows, one token each
    written = page.write(empty, 0, jnp.array([[1], [4]]), new, new)
    for name in "kv":
        assert np.argwhere(np.asarray(written[name])[0, :, :, 0, 0]).tolist() == [[0, 1], [1, 4]]
    beyond = page.write(written, 0, jnp.array([[6], [6]]), 2 * new, 2 * new)
    np.testing.assert_array_equal(beyond["k"], written["k"])


def test_padding_changes_nothing(page):
    """Other tokens behind a short prompt give the same logits."""
    behind = np.arange(12) >= page.length_B[:, None]
    others = np.where(behind, (page.prompts_BS + 100) % page.V, page.prompts_BS).astype("int32")
    _, logits, _ = generated(page, prompts_BS=others)
    np.testing.assert_allclose(logits, page.wanted_logits, **EXACT)


# Prefill and decode


def test_the_logits_are_those_of_recomputing_everything(page):
    """Every logit of every step."""
    np.testing.assert_array_equal(page.tokens, page.wanted_tokens)
    np.testing.assert_allclose(page.logits, page.wanted_logits, **EXACT)


def test_prefill_and_decode_give_the_first_two_tokens(page):
    """The cell that calls the model by hand."""
    np.testing.assert_array_equal(page.first_B, page.wanted_tokens[:, 0])
    np.testing.assert_array_equal(page.second_B, page.wanted_tokens[:, 1])


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


def test_the_cache_holds_the_prompts_and_the_new_tokens(page):
    """Up to each row's length plus seven; behind that, and behind the padding, it is empty."""
    for n, length in enumerate(page.length_B):
        for part in "kv":
            held = np.asarray(page.cache[part][:, n])
            assert np.abs(held[:, : length + 7]).sum(axis=(0, 2, 3)).min() > 0
            assert not np.any(held[:, max(12, length + 7) :])


def test_two_programs_are_compiled(page):
    """One for prefill, one for decode."""
    model = jax.jit(lambda *given: page.mapped(*given), donate_argnums=1)  # with no programs yet
    generated(page, steps=4, model=model)
    assert model._cache_size() == 2


def test_the_cache_is_donated(page):
    """The old cache is gone after a call."""
    cache = page.make_cache()
    page.generate(page.model, page.weights, cache, page.prompts_BS, page.length_B, steps=1)
    assert all(array.is_deleted() for array in cache.values())


def test_more_tokens_than_the_cache_has_positions_raise(page):
    with pytest.raises(ValueError, match="12 . 21 tokens do not fit into 32"):
        generated(page, steps=21)


def test_the_logits_leave_sharded_along_v(page):
    one_B = np.ones(page.B, "int32")
    logits, _ = page.model(page.weights, page.make_cache(), one_B[:, None], one_B, one_B)
    assert logits.addressable_shards[0].data.shape == (2, 128)


def test_a_step_runs_seven_all_reduces_of_512_bytes(page):
    """One for the embedding, two for each layer; 2 rows of 64 numbers."""
    rows = moved(page, page.cache)
    assert {row[:3] for row in rows} == {("all-reduce", ("model",), 2 * 64 * 4)}
    assert sum(row[4] for row in rows) == 2 * page.L + 1 == 7


def longer(cache):
    """A cache with twice as many positions, sharded alike."""
    return {
        name: jax.device_put(np.concatenate([array, array], 2), array.sharding)
        for name, array in cache.items()
    }


def test_the_all_reduces_do_not_grow_with_the_context(page):
    """A cache of 64 positions moves as much as one of 32."""
    assert moved(page, longer(page.cache)) == moved(page, page.cache)


def test_two_key_value_heads_do_not_divide_over_four_devices(page):
    """With four devices along `model`, the 8 query heads divide, and the cache of 2 heads does not."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=page.auto)
    sharding = jax.NamedSharding(mesh, page.CACHE)
    assert serving.CONFIG.H % 4 == 0
    with pytest.raises(ValueError, match="evenly divide"):
        jax.device_put(np.zeros((page.L, page.B, page.T, page.K, page.C)), sharding)


# Silent failures


def test_at_the_same_position_only_the_longest_prompt_is_right(page):
    """Seven of eight rows are wrong; with equal lengths none is."""
    assert np.flatnonzero(page.off_B < 1e-4).tolist() == [3] and page.length_B[3] == 12
    assert np.delete(page.off_B, 3).min() > 0.5
    twelve = np.full(8, 12, "int32")
    wanted = page.generate_uncached(page.trained, page.prompts_BS, twelve, steps=2)
    _, logits, _ = generated(page, steps=2, length_B=twelve)
    np.testing.assert_allclose(logits, wanted[1], **EXACT)


def test_not_donated_a_step_needs_a_second_cache(page):
    """The difference is all of the cache, and the line of the page catches it."""
    held = ms.memory(page.cache).bytes_per_device
    donated, not_donated = (
        ms.memory(page.decode_program(model, page.cache))
        for model in (page.model, page.not_donated)
    )
    assert not_donated.bytes_per_device - donated.bytes_per_device == held == 24_576
    assert donated.aliased == held > not_donated.aliased == 0


# The figure, the example, the exercises


def test_the_figure_shows_the_prompts_of_the_page(page, monkeypatch):
    monkeypatch.syspath_prepend(BOOK / "figures")
    figure = importlib.import_module("kv_cache")
    assert figure.LENGTHS == page.length_B.tolist()
    assert (figure.T, figure.PADDED) == (page.T, page.prompts_BS.shape[1])


def test_the_file_has_the_functions_of_the_pages():
    """Of the functions of examples/serve.py, ten are on this page, on 15a, or in the companion.

    The others differ, because the file has two axes in place of `model` and two kinds of attention.
    test_15a_divide_cache.py compares what they compute.
    """
    known = functions(Path(serving.__file__).read_text("utf-8"))
    known |= shown(PAGE, functions) | shown(DIVIDED, functions)
    in_file = functions((EXAMPLES / "serve.py").read_text("utf-8"))
    differ = {name for name in in_file if in_file[name] != known.get(name)}
    own = {"main", "without_cache", "block", "forward", "make_forward", "make_cache"}
    assert differ == own | {"attend_copies"} and len(in_file) == 17


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
