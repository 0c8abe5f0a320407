"""Messages of Explicit mode: each program raises what its heading quotes, and each fix is right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from printed import assert_raised, run_and_read, said

PAGE = "messages-types"
P = jax.P

RAISED = {
    "kv-cache": ["dynamic_update_slice operand sharding must be equal to update sharding"],
    "vmap": [
        "Unmapped values passed to vmap cannot be sharded along the mesh axis you are vmapping over",
        "Mapped away dimension of inputs passed to vmap should be sharded the same",
    ],
    "repeat": ["Please pass sharding to `jnp.repeat` via `out_sharding` parameter"],
    "index-twice": [
        "DuplicateSpecError",
        "to at most one positional dimension, but",
        "has duplicate entries for",
    ],
    "whole-dimension": [
        "should be unsharded over the axis being reduced",
        "cannot be sharded on the axis being rolled over",
        "Operand cannot be sharded on dimension",
        "when the tiling is non-trivial",
        "unstack operand cannot be sharded on the unstacking axis",
    ],
    "nonzero": [
        "Cannot apply nonzero over sharded axes",
        "The input should be fully replicated when axis is not specified to",
    ],
    "linalg": [
        "must be unsharded on non-batch dimensions",
        "must be unsharded on the contracting axis",
        "select `which` must be scalar or have the same sharding as cases",
    ],
    "ragged-dot": [
        "Explicit sharding inference for ragged_dot_general is not currently implemented"
    ],
}
BEFORE = {  # a piece: the first release that says it, and what those before it say
    "cannot be sharded on the axis being rolled over": ((0, 11), "slicing on sharded dims"),
    "Cannot apply nonzero over sharded axes": (
        (0, 12),
        "The input should be fully replicated when axis is not specified to cumsum",
    ),
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once; its Explicit mesh stays set."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def type_of(x):
    return str(jax.typeof(x))


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug], BEFORE)


def test_an_update_of_the_caches_sharding_is_written_at_its_position(page):
    """Resharded like the cache, the update lands at position 3, and nothing else changes."""
    written = page.append(page.cache_BTKC, page.sharded_BTKC, 3)
    assert type_of(written) == "float32[2@data,16,4@model,8]"
    expected = np.zeros((2, 16, 4, 8))
    expected[:, 3] = 1
    np.testing.assert_array_equal(written, expected)


def test_attention_that_decodes_raises_until_its_cache_is_sharded_as_the_batch(page):
    """nnx.MultiHeadAttention: init_cache makes an unsharded cache; sharded, two steps decode what
    they decode on one device."""
    tokens_BSD = np.random.default_rng(0).normal(size=(8, 2, 16)).astype("float32")

    def decode(shard):
        layer = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
        layer.init_cache((8, 16, 16))
        for cache in (layer.cached_key, layer.cached_value):
            assert type_of(cache[...]) == "float32[8,16,4,4]"
            cache.set_value(shard(cache[...], P("data")))
        return [layer(shard(tokens_BSD[:, i : i + 1], P("data"))) for i in (0, 1)]

    unsharded = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
    unsharded.init_cache((8, 16, 16))
    assert "dynamic_update_slice operand sharding must" in said(unsharded, page.token_BSD)
    sharded, alone = decode(jax.reshard), decode(lambda x, _: jnp.asarray(x))
    assert type_of(sharded[1]) == "float32[8@data,1,16]"
    np.testing.assert_allclose(sharded[1], alone[1], rtol=1e-4, atol=1e-5)


def test_a_gathered_weight_and_an_equally_sharded_factor_pass_vmap(page):
    """The scores are the product with the weight, and each row is multiplied by its own factor."""
    x_BD, w_D = np.asarray(page.x_BD), np.arange(16.0)
    assert type_of(page.scores_B) == "float32[8@data]"
    np.testing.assert_allclose(page.scores_B, x_BD @ w_D, rtol=1e-6)
    assert type_of(page.scaled_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.scaled_BD, x_BD * np.arange(8.0)[:, None])


def test_vmap_is_refused_in_gradients_of_each_example_and_inside_searchsorted_and_interp(page):
    """Under FSDP vmap(grad) raises it, and so do two functions of jax.numpy that use vmap."""

    def loss(w_D, x_D):
        return x_D @ w_D

    by_example = jax.vmap(jax.grad(loss), (None, 0))
    x_B = page.put(np.arange(8.0, dtype="float32"), page.mesh, "data")
    for function, inputs in [
        (by_example, (page.w_D, page.x_BD)),
        (jnp.searchsorted, (x_B, x_B)),
        (jnp.interp, (x_B, x_B, x_B)),
    ]:
        assert "Unmapped values passed to vmap cannot be sharded" in said(function, *inputs)
    gathered = by_example(jax.reshard(page.w_D, P(None)), page.x_BD)
    np.testing.assert_array_equal(gathered, page.x_BD)


def test_repeated_heads_are_sharded_as_named_and_attention_needs_no_repeat(page):
    """With out_sharding= each head is repeated in place. dot_product_attention with fewer key heads
    equals attention with repeated ones."""
    k_BTKC = page.put(
        np.random.default_rng(0).normal(size=(2, 8, 4, 16)).astype("float32"),
        page.mesh,
        *("data", None, "model"),
    )
    repeated = jnp.repeat(k_BTKC, 2, axis=2, out_sharding=page.by_heads)
    assert type_of(repeated) == type_of(page.k_BTHC) == "float32[2@data,8,8@model,16]"
    np.testing.assert_array_equal(repeated, np.repeat(np.asarray(k_BTKC), 2, axis=2))
    attend = jax.nn.dot_product_attention
    np.testing.assert_allclose(
        attend(page.q_BSHC, k_BTKC, k_BTKC), attend(page.q_BSHC, repeated, repeated), rtol=1e-5
    )
    whole = jnp.repeat(k_BTKC, 2, axis=1)  # this dimension is not sharded
    assert type_of(whole) == "float32[2@data,16,4@model,16]"


def test_a_lookup_whose_result_would_be_sharded_twice_is_named(page):
    """get and set with out_sharding= give NumPy's values; set without it raises the same message;
    take_along_axis takes one column for each row and asks nothing."""
    x_BD = np.asarray(page.x_BD)
    assert type_of(page.chosen_BB) == "float32[8@data,8]"
    np.testing.assert_array_equal(page.chosen_BB, x_BD[:, :8])
    assert type_of(page.cleared_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.cleared_BD, np.where(np.arange(16) < 8, 0, x_BD))
    assert type_of(page.one_each_B1) == "float32[8@data,1]"
    np.testing.assert_array_equal(page.one_each_B1[:, 0], np.diag(x_BD[:, :8]))
    update = said(lambda: page.x_BD.at[:, page.columns_B].set(0.0))
    assert update.startswith("DuplicateSpecError")


@pytest.mark.parametrize("name", ["cumsum", "roll", "tile"])
def test_along_a_whole_dimension_each_operation_gives_numpys_values(page, name):
    """Resharded to whole columns, cumsum, roll and tile are right and keep the other sharding."""
    result = getattr(page, name)(page.columns_BD)
    assert type_of(result).endswith("16@model]")
    x_BD = np.asarray(page.x_BD)
    by_numpy = {
        "cumsum": np.cumsum(x_BD, 0),
        "roll": np.roll(x_BD, 1, 0),
        "tile": np.tile(x_BD, (2, 1)),
    }
    np.testing.assert_array_equal(result, by_numpy[name])


def test_auto_axes_rolls_along_the_sharded_dimension(page):
    """The result is NumPy's and keeps its rows along data."""
    assert type_of(page.rolled_BD) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.rolled_BD, np.roll(np.asarray(page.x_BD), 1, 0))


TABLE = {  # words of the table: the functions of their row
    "must be unsharded over the sorting dimension": {
        "sort": lambda x, v: jnp.sort(x, 0),
        "argsort": lambda x, v: jnp.argsort(x, 0),
        "lexsort": lambda x, v: jnp.lexsort((v, v)),
        "median": lambda x, v: jnp.median(x, 0),
        "quantile": lambda x, v: jnp.quantile(x, 0.5, axis=0),
        "unique": lambda x, v: jnp.unique(v, size=8),
        "random.permutation": lambda x, v: jax.random.permutation(jax.random.key(0), v),
    },
    "should be unsharded over the axis being reduced": {
        "cumsum": lambda x, v: jnp.cumsum(x, 0),
        "cumprod": lambda x, v: jnp.cumprod(x, 0),
        "cummax": lambda x, v: jax.lax.cummax(x, 0),
        "cumlogsumexp": lambda x, v: jax.lax.cumlogsumexp(x, 0),
    },
    "should be unsharded over the axis along which to compute the top_k values": {
        "top_k": lambda x, v: jax.lax.top_k(v, 2),
        "partition": lambda x, v: jnp.partition(v, 2),
    },
    "should be unsharded i.e. the spec of that dim should be `None`": {
        "approx_max_k": lambda x, v: jax.lax.approx_max_k(v, 2),
        "approx_min_k": lambda x, v: jax.lax.approx_min_k(v, 2),
    },
    "on sharded dims where out dim": {
        "x[0]": lambda x, v: jax.jit(lambda x: x[0])(x),
        "diff": lambda x, v: jax.jit(jnp.diff)(v),
        "split": lambda x, v: jax.jit(lambda x: jnp.split(x, 8))(x),
        "associative_scan": lambda x, v: jax.jit(lambda x: jax.lax.associative_scan(jnp.add, x))(x),
    },
    "Use `.at[...].get(out_sharding=)`": {
        "diag": lambda x, v: jnp.diag(x),
        "x[mask]": lambda x, v: v[v > 3],
    },
    "Use `.at[...].set/add/mul/...(out_sharding=)`": {
        "bincount": lambda x, v: jnp.bincount(v.astype(int), length=8),
        "segment_sum": lambda x, v: jax.ops.segment_sum(v, v.astype(int), 8),
    },
    "select `which` must be scalar or have the same sharding as cases": {
        "trace": lambda x, v: jnp.trace(x),
        "einsum": lambda x, v: jnp.einsum("ii", x[:, :8]),
    },
    "produces an illegally sharded result": {
        "outer": lambda x, v: jnp.outer(v, v),
        "cov": lambda x, v: jnp.cov(x),
        "isin": lambda x, v: jnp.isin(v, v),
    },
}
ROWS = [(words, name) for words, functions in TABLE.items() for name in functions]


@pytest.mark.parametrize("words, name", ROWS, ids=[name for _, name in ROWS])
def test_the_table_says_what_each_function_raises_along_a_sharded_dimension(page, words, name):
    """Each function of a row raises the words of its row."""
    v_B = page.put(np.arange(8, dtype="float32"), page.mesh, "data")
    assert words in said(TABLE[words][name], page.x_BD, v_B)


def test_these_ask_nothing_along_a_sharded_dimension(page):
    """sum, max, argmax, var, logsumexp, softmax, fft, flip and pad give NumPy's values."""
    x_BD, host = page.x_BD, np.asarray(page.x_BD)
    for found, expected in [
        (x_BD.sum(0), host.sum(0)),
        (x_BD.max(0), host.max(0)),
        (jnp.argmax(x_BD, 0), host.argmax(0)),
        (x_BD.var(0), host.var(0)),
        (jax.nn.logsumexp(x_BD, 0), np.log(np.exp(host - 127).sum(0)) + 127),
        (jax.nn.softmax(x_BD, 0)[:, 0], np.exp(host[:, 0] - 112) / np.exp(host[:, 0] - 112).sum()),
        (jnp.fft.fft(x_BD, axis=0), np.fft.fft(host, axis=0)),
        (jnp.flip(x_BD, 0), host[::-1]),
        (jnp.pad(x_BD, ((1, 1), (0, 0))), np.pad(host, ((1, 1), (0, 0)))),
    ]:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_a_whole_mask_has_positions_and_where_needs_none(page):
    """The positions are those of NumPy; jnp.where of three arguments keeps the sharding."""
    np.testing.assert_array_equal(page.positions, [5, 6, 7])
    assert type_of(page.large_B) == "float32[8@data]"
    np.testing.assert_array_equal(page.large_B, [0, 0, 0, 0, 0, 5, 6, 7])


def test_a_matrix_is_factorised_whole_and_a_batch_where_it_is_sharded(page):
    """The inverse of the whole matrix and the factors of the batch are right, the batch sharded."""
    np.testing.assert_array_equal(page.inverse, np.eye(8) / 2)
    factors = page.factorise(page.batch_BXX)
    assert type_of(factors) == "float32[8@data,3,3]"
    np.testing.assert_array_equal(factors, np.stack([2 * np.eye(3)] * 8))


def test_which_factorisations_accept_a_sharded_batch(page):
    """svd, eigh, pinv and det accept it; cholesky and qr raise one message, inv one of vmap."""
    for name in ("svd", "eigh", "pinv", "det"):
        first = jax.tree.leaves(getattr(jnp.linalg, name)(page.batch_BXX))[0]
        assert type_of(first).startswith("float32[8@data"), name
    for name in ("cholesky", "qr"):
        assert "select `which` must be scalar" in said(getattr(jnp.linalg, name), page.batch_BXX)
    assert "Mapped away dimension of inputs" in said(jnp.linalg.inv, page.batch_BXX)


@pytest.mark.parametrize("name", ["inv", "det", "qr", "svd", "eig"])
def test_factorisations_of_one_sharded_matrix_say_the_first_words(page, name):
    """lu, inside inv and det, qr, svd and eig want the whole matrix."""
    words = "must be unsharded on non-batch dimensions"
    assert words in said(getattr(jnp.linalg, name), page.matrix_BB)


@pytest.mark.parametrize("name", ["cholesky", "eigh"])
def test_those_that_add_the_transpose_raise_another_message(page, name):
    """cholesky and eigh of one sharded matrix would shard both dimensions of a sum alike."""
    illegal = said(getattr(jnp.linalg, name), page.matrix_BB)
    assert "produces an illegally sharded result" in illegal


def test_auto_axes_multiplies_each_group_by_its_expert_and_has_a_gradient(page):
    """Rows 0 to 2 meet the first expert, the others the second, forwards and backwards."""
    experts_EDF = np.stack([np.ones((16, 4)), np.full((16, 4), 2)]).astype("float32")
    placed = page.put(experts_EDF, page.mesh, None, None, "model")
    found = page.ragged_dot(page.x_BD, placed, page.tokens_of_each_E)
    assert type_of(found) == "float32[8@data,4@model]"
    x_BD = np.asarray(page.x_BD)
    expected = np.concatenate([x_BD[:3] @ experts_EDF[0], x_BD[3:] @ experts_EDF[1]])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    grads = jax.grad(lambda w: page.ragged_dot(page.x_BD, w, page.tokens_of_each_E).sum())(placed)
    for group, rows in enumerate((x_BD[:3], x_BD[3:])):
        np.testing.assert_allclose(np.asarray(grads)[group, :, 0], rows.sum(0), rtol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is how JAX lowers it for CPU")
def test_the_out_sharding_that_ragged_dot_asks_for_raises_on_cpu(page):
    """Its own advice leads to the message about `which`."""
    inputs = page.x_BD, page.experts_EDF, page.tokens_of_each_E
    named = said(lambda: jax.lax.ragged_dot(*inputs, out_sharding=P("data", "model")))
    assert "select `which` must be scalar or have the same sharding as cases" in named


# Entries whose advice was corrected


def test_a_product_inside_a_library_is_handed_to_the_compiler(page):
    """cg has no out_sharding=: it raises the message about contracting dimensions, and inside
    auto_axes it solves the system; the solution is sharded as named."""
    assert "Contractingdimensionsaresharded" in page.printed["library"]
    assert type_of(page.solution_B) == "float32[8@data]"
    np.testing.assert_allclose(page.solution_B, np.arange(8) / 2, rtol=1e-6)


def test_auto_axes_wants_every_array_by_position(page):
    """An array from outside, or one by keyword, keeps its Explicit type and raises."""
    words = "should match the aval mesh"
    auto = jax.sharding.auto_axes(page.solve, out_sharding=P("data"))
    assert words in said(lambda: auto(page.matrix_BB, b_B=page.b_B))
    outside = jax.sharding.auto_axes(lambda b_B: page.matrix_BB @ b_B, out_sharding=P("data"))
    assert words in said(outside, page.b_B)


def test_an_update_of_muon_is_handed_to_the_compiler_whole(page):
    """Muon multiplies inside `update`: it raises the message. Inside auto_axes, with the specs of
    its results, the update is that of one device, and keeps its sharding."""
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    weights = {"w": page.put(weight, page.mesh, "data", "model")}
    muon = optax.contrib.muon(1e-3)
    state = muon.init(weights)
    assert "Contracting dimensions" in said(muon.update, weights, state, weights)
    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (weights, state))
    auto = jax.sharding.auto_axes(muon.update, out_sharding=specs)
    update, _ = auto(weights, state, weights)
    assert type_of(update["w"]) == "float32[16@data,16@model]"
    whole = {"w": jnp.asarray(weight)}
    alone, _ = muon.update(whole, muon.init(whole), whole)
    np.testing.assert_allclose(update["w"], alone["w"], atol=1e-7)


def test_an_embedding_is_looked_up_with_the_sharding_of_its_result(page):
    """nnx.Embed raises the message about gather; embed(ids, out_sharding=) gives the rows."""
    embed = nnx.Embed(64, 16, rngs=nnx.Rngs(0))
    ids_BS = page.put(np.arange(32).reshape(8, 4), page.mesh, "data")
    assert "Use `.at[...].get(out_sharding=)`" in said(embed, ids_BS)
    rows = embed(ids_BS, out_sharding=P("data", None, None))
    assert type_of(rows) == "float32[8@data,4,16]"
    np.testing.assert_array_equal(rows.reshape(32, 16), np.asarray(embed.embedding[...])[:32])


def test_batch_dimensions_are_sharded_alike_since_0_11_1(page):
    """A batch dimension that only one operand shards raises since 0.11.1, and passed before."""
    k_HTC = page.put(np.ones((4, 8, 16), "float32"), page.mesh)
    scores = jax.tree_util.Partial(jnp.einsum, "hsc,htc->hst", page.q_HSC, k_HTC)
    if jax.__version_info__ >= (0, 11, 1):
        assert "dot_general requires lhs batch dimensions" in said(scores)
    else:
        assert type_of(scores()) == "float32[4@model,8,8]"
