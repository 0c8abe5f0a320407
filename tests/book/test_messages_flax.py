"""Messages of Flax: each program raises what its heading quotes, and each fix is right."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from printed import assert_raised, run_and_read, said

PAGE = "messages-flax"
P = jax.P

RAISED = {
    "types-for-broadcasting": [
        "Incompatible types for broadcasting: input type=",
        "and requested type=",
    ]
}


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def type_of(x):
    return str(jax.typeof(x))


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug])


def test_a_batch_norm_with_sharded_statistics_normalises_sharded_features(page):
    """Its result and its running mean are those of one device, sharded along model."""
    alone = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(page.y_BD, alone(page.numbers), rtol=1e-4, atol=1e-5)
    assert type_of(page.norm.mean[...]) == "float32[16@model]"
    np.testing.assert_allclose(page.norm.mean[...], alone.mean[...], rtol=1e-6)
    np.testing.assert_allclose(page.norm.var[...], alone.var[...], rtol=1e-5)


def test_whole_features_around_the_norm_need_no_sharded_statistics(page):
    """With the features gathered the layer runs, and its running mean moves."""
    with jax.set_mesh(page.explicit_mesh):
        norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        y_BD = norm(jax.reshard(page.features_BD, P("data", None)))
    assert type_of(y_BD) == "float32[8@data,16]"
    np.testing.assert_allclose(norm.mean[...], page.norm.mean[...], rtol=1e-6)


def test_writing_into_a_variable_keeps_its_type_and_set_value_replaces_it(page):
    """`variable[...] = array` accepts an array of fewer marks and keeps the variable's; set_value
    takes the array's type."""
    with jax.set_mesh(page.explicit_mesh):
        variable = nnx.Param(page.features_BD)
        page.assign(variable, jnp.zeros((8, 16)))
        assert type_of(variable[...]) == "float32[8@data,16@model]"
        variable.set_value(jax.reshard(page.features_BD, P("data", None)))
    assert type_of(variable[...]) == "float32[8@data,16]"
    np.testing.assert_array_equal(variable[...], page.numbers)


# The table of layers and transforms


@pytest.fixture
def explicit(page):
    """The Explicit mesh of the page in context."""
    with jax.set_mesh(page.explicit_mesh):
        yield page.explicit_mesh


def sharded(shape, *spec):
    """Numbers of this shape on the mesh in context, and the same on the host."""
    numbers = np.random.default_rng(0).normal(size=shape).astype("float32")
    return jax.reshard(jnp.asarray(numbers), P(*spec)), numbers


def annotated(*spec, of="kernel"):
    return {f"{of}_metadata": {"out_sharding": spec}}


def linear(*spec):
    return nnx.Linear(16, 16, rngs=nnx.Rngs(0), **annotated(*spec))


class Row(NamedTuple):
    words: str
    layer: object  # makes it; called again with the mesh unset, it is the same on one device
    input: tuple  # its shape, then its spec
    answer: object  # calls the layer with the input as the table says
    wanted: str  # the type of the result


def named(*spec):
    def call(layer, x, mesh_is_set):
        return layer(x, out_sharding=P(*spec)) if mesh_is_set else layer(x)

    return call


def whole_features(layer, x, mesh_is_set):
    return layer(jax.reshard(x, P("data")) if mesh_is_set else x)


def initial_carry(count):
    def call(layer, x, mesh_is_set):
        zeros = jnp.zeros((4, 32), out_sharding=P("data") if mesh_is_set else None)
        return layer(x, initial_carry=zeros if count == 1 else (zeros,) * count)

    return call


def general():
    return nnx.LinearGeneral(
        (4, 4), 8, axis=(-2, -1), rngs=nnx.Rngs(0), **annotated("model", None, None)
    )


def heads():
    return nnx.MultiHeadAttention(
        4,
        16,
        decode=False,
        rngs=nnx.Rngs(0),
        **annotated(None, "model", None),
        **annotated("model", None, None, of="out_kernel"),
    )


class Attend(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(64, 16, rngs=nnx.Rngs(0), **annotated(None, "model", of="embedding"))

    def __call__(self, x, **options):
        return self.embed.attend(x, **options)


def conv(*spec):
    return nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0), **annotated(*spec))


SUM = "Contracting dimensions are sharded"
CONV = "output sharding via `out_sharding` parameter of `conv_general_dilated`"
CARRY = "carry input and carry output must have equal types"
BOTH, IMAGE = ((8, 16), "data", "model"), (4, 8, 8, 8)
ROWS = {
    "Linear, second of a block": Row(
        SUM, lambda: linear("model", None), BOTH, named("data", None), "float32[8@data,16]"
    ),
    "LinearGeneral": Row(
        SUM, general, ((8, 4, 4), "data", "model"), named("data", None), "float32[8@data,8]"
    ),
    "Einsum": Row(
        SUM,
        lambda: nnx.Einsum("bd,df->bf", (16, 32), rngs=nnx.Rngs(0), **annotated("model", None)),
        BOTH,
        named("data", None),
        "float32[8@data,32]",
    ),
    "MultiHeadAttention": Row(
        SUM, heads, ((4, 8, 16), "data"), named("data", None, None), "float32[4@data,8,16]"
    ),
    "Embed.attend": Row(SUM, Attend, BOTH, named("data", None), "float32[8@data,64]"),
    "Linear, FSDP": Row(
        "produces an illegally sharded result",
        lambda: linear(None, "data"),
        ((8, 16), "data"),
        named("data", None),
        "float32[8@data,16]",
    ),
    "Conv, channels of the image": Row(
        CONV,
        lambda: conv(None, None, None, None),
        (IMAGE, "data", None, None, "model"),
        named("data"),
        "float32[4@data,8,8,16]",
    ),
    "Conv, channels of the kernel": Row(
        CONV,
        lambda: conv(None, None, None, "model"),
        (IMAGE, "data"),
        named("data"),
        "float32[4@data,8,8,16]",
    ),
    "GroupNorm, reshape": Row(
        "This reshape is not supported",
        lambda: nnx.GroupNorm(8, num_groups=2, rngs=nnx.Rngs(0)),
        (IMAGE, "data", None, None, "model"),
        whole_features,
        "float32[4@data,8,8,8]",
    ),
    "GroupNorm, repeat": Row(
        "Please pass sharding to `jnp.repeat`",
        lambda: nnx.GroupNorm(8, num_groups=4, rngs=nnx.Rngs(0)),
        (IMAGE, "data", None, None, "model"),
        whole_features,
        "float32[4@data,8,8,8]",
    ),
    "RNN": Row(
        CARRY,
        lambda: nnx.RNN(nnx.GRUCell(16, 32, rngs=nnx.Rngs(0))),
        ((4, 8, 16), "data"),
        initial_carry(1),
        "float32[4@data,8,32]",
    ),
    "RNN of an LSTM": Row(
        CARRY,
        lambda: nnx.RNN(nnx.OptimizedLSTMCell(16, 32, rngs=nnx.Rngs(0))),
        ((4, 8, 16), "data"),
        initial_carry(2),
        "float32[4@data,8,32]",
    ),
    "LoRA": Row(
        SUM,
        lambda: nnx.LoRA(16, 2, 16, base_module=linear("model", None), rngs=nnx.Rngs(0)),
        BOTH,
        whole_features,
        "float32[8@data,16]",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_layer_raises_what_the_table_says_and_the_answer_gives_the_value_of_one_device(
    explicit, name
):
    """The layer raises the words of its row. Called as the table says, its result has the type that
    was asked for, and the values that the same layer gives without a mesh."""
    row = ROWS[name]
    shape, *spec = row.input
    x, host = sharded(shape, *spec)
    assert row.words in said(lambda: row.layer()(x))
    result = row.answer(row.layer(), x, mesh_is_set=True)
    assert type_of(result) == row.wanted
    with jax.set_mesh(None), nnx.use_eager_sharding(False):
        alone = row.answer(row.layer(), jnp.asarray(host), mesh_is_set=False)
    np.testing.assert_allclose(result, alone, rtol=1e-3, atol=1e-4)


def test_an_embedding_of_sharded_ids_names_its_result(explicit):
    """nnx.Embed raises the words about gather; named, it returns the rows of its table."""
    embed = nnx.Embed(64, 16, rngs=nnx.Rngs(0))
    ids_BS = jax.reshard(jnp.arange(32).reshape(8, 4), P("data"))
    assert "Use `.at[...].get(out_sharding=)`" in said(embed, ids_BS)
    rows = embed(ids_BS, out_sharding=P("data"))
    assert type_of(rows) == "float32[8@data,4,16]"
    np.testing.assert_array_equal(rows.reshape(32, 16), np.asarray(embed.embedding[...])[:32])


def test_a_decoding_attention_raises_the_words_about_its_cache(explicit):
    """Its fix is tested with the entry to which the table leads."""
    attention = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((8, 16, 16))
    token, _ = sharded((8, 1, 16), "data")
    assert "dynamic_update_slice operand sharding" in said(attention, token)


def test_a_spectral_norm_wants_a_whole_weight_and_auto_axes_loses_its_statistics(explicit):
    """It multiplies by its sharded kernel, which raises; with a whole kernel it runs and counts.
    Inside auto_axes it runs as well, and its statistics stay as they were."""
    x, _ = sharded((8, 16), "data")

    def norm(*spec):
        return nnx.SpectralNorm(linear(*spec), rngs=nnx.Rngs(0))

    assert SUM in said(lambda: norm(None, "model")(x, update_stats=True))

    def statistics(norm):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(norm, nnx.BatchStat))]

    whole = norm(None, None)
    before = statistics(whole)
    whole(x, update_stats=True)
    assert not all(np.array_equal(*pair) for pair in zip(before, statistics(whole), strict=True))

    lost = norm(None, "model")
    before = statistics(lost)
    auto = jax.sharding.auto_axes(
        lambda layer, x: layer(x, update_stats=True), out_sharding=P("data")
    )
    auto(lost, x)
    assert all(np.array_equal(*pair) for pair in zip(before, statistics(lost), strict=True))


def stack(count, *spec):
    """So many linear layers in one, as nnx.vmap makes them."""
    whole_layers = nnx.vmap(
        lambda rngs: nnx.Linear(16, 16, rngs=rngs, **annotated(*spec)),
        transform_metadata={nnx.PARTITION_NAME: None},
    )
    return whole_layers(nnx.Rngs(0).split(count))


def loop(transform, layer, x, reshard):
    """x through three layers, or three times through one, by this transform."""

    def once(layer, x):
        return reshard(layer(x), P("data", None))

    if transform == "scan":
        scan = nnx.scan(
            once,
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        return scan(layer, x)
    if transform == "fori_loop":
        return nnx.fori_loop(0, 3, lambda i, both: (both[0], once(*both)), (layer, x))[1]

    def going_on(carried):
        return carried[0] < 3

    def body(carried):
        count, layer, x = carried
        return count + 1, layer, once(layer, x)

    return nnx.while_loop(going_on, body, (jnp.array(0), layer, x))[2]


@pytest.mark.parametrize("transform", ["scan", "fori_loop", "while_loop"])
def test_a_loop_whose_layer_changes_the_type_of_the_carry_wants_it_resharded(explicit, transform):
    """It raises the words about the carry; resharded, its result is that of plain Python."""
    layer = stack(3, None, "model") if transform == "scan" else linear(None, "model")
    x, host = sharded((8, 16), "data")
    assert CARRY in said(loop, transform, layer, x, lambda y, _: y)
    result = loop(transform, layer, x, jax.reshard)
    assert type_of(result) == "float32[8@data,16]"
    kernels = np.asarray(layer.kernel[...])
    biases = np.asarray(layer.bias[...])
    for i in range(3):
        kernel, bias = (kernels[i], biases[i]) if transform == "scan" else (kernels, biases)
        host = host @ kernel + bias
    np.testing.assert_allclose(result, host, rtol=1e-3, atol=1e-4)


def test_branches_of_two_types_are_resharded_to_one(explicit):
    """nnx.cond raises the words of the table; with one branch resharded it returns the layer's."""
    layer = linear(None, "model")
    x, _ = sharded((8, 16), "data")

    def branch(reshard):
        def other(layer, x):
            return reshard(x, P("data", "model"))

        return nnx.cond(True, lambda layer, x: layer(x), other, layer, x)

    assert "cond branches must have equal output types" in said(branch, lambda x, _: x)
    np.testing.assert_array_equal(branch(jax.reshard), layer(x))


def test_nnx_vmap_over_a_sharded_batch_wants_a_gathered_weight(explicit):
    """A weight along the axis of the batch raises; gathered, each row is multiplied by it."""
    layer = linear(None, "data")
    x, host = sharded((8, 16), "data")
    by_row = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    assert "Unmapped values passed to vmap" in said(by_row, layer, x)
    layer.kernel.set_value(jax.reshard(layer.kernel[...], P(None, None)))
    result = by_row(layer, x)
    assert type_of(result) == "float32[8@data,16]"
    np.testing.assert_allclose(result, host @ np.asarray(layer.kernel[...]), rtol=1e-4, atol=1e-5)


def test_nnx_vmap_over_a_stack_wants_stack_and_batch_sharded_alike(explicit):
    """Eight experts that are whole and rows along data raise; both along data give each row its own
    expert's product."""
    experts = stack(8, None, None)
    x, host = sharded((8, 16), "data")
    each = nnx.vmap(lambda layer, x: layer(x))
    assert "Mapped away dimension of inputs" in said(each, experts, x)
    for variable in (experts.kernel, experts.bias):
        variable.set_value(jax.reshard(variable[...], P("data")))
    result = each(experts, x)
    assert type_of(result) == "float32[8@data,16]"
    expected = np.einsum("bd,bdf->bf", host, np.asarray(experts.kernel[...]))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_over_a_sharded_vocabulary_takes_one_hot_labels(explicit):
    """With integer labels it raises the words about gather; with one-hot labels it is the loss of
    one device, for each token."""
    logits, host = sharded((4, 8, 16), "data", None, "model")
    labels = np.random.default_rng(1).integers(0, 16, (4, 8))
    labels_BS = jax.reshard(jnp.asarray(labels), P("data"))
    by_integer = optax.softmax_cross_entropy_with_integer_labels
    assert "Use `.at[...].get(out_sharding=)`" in said(by_integer, logits, labels_BS)
    loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels_BS, 16))
    assert type_of(loss) == "float32[4@data,8]"
    with jax.set_mesh(None):
        alone = by_integer(jnp.asarray(host), jnp.asarray(labels))
    np.testing.assert_allclose(loss, alone, rtol=1e-5)


def direct(layer, x):
    return layer(x)


SILENT = {
    "Dropout": (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), BOTH),
    "LayerNorm": (lambda: nnx.LayerNorm(16, rngs=nnx.Rngs(0)), BOTH),
    "RMSNorm": (lambda: nnx.RMSNorm(16, rngs=nnx.Rngs(0)), BOTH),
    "InstanceNorm": (lambda: nnx.InstanceNorm(8, rngs=nnx.Rngs(0)), (IMAGE, "data")),
    "pooling": (lambda: lambda x: nnx.max_pool(x, (2, 2), (2, 2)), (IMAGE, "data")),
    "Conv": (lambda: conv(None, None, None, None), (IMAGE, "data")),
    "nnx.jit": (lambda: nnx.jit(linear(None, "model")), ((8, 16), "data")),
    "nnx.remat": (lambda: partial(nnx.remat(direct), linear(None, "model")), ((8, 16), "data")),
}


@pytest.mark.parametrize("name", SILENT)
def test_these_ask_nothing(explicit, name):
    """They give the values of one device, on a sharded batch or sharded features."""
    make, (shape, *spec) = SILENT[name]
    x, host = sharded(shape, *spec)
    result = make()(x)
    with jax.set_mesh(None), nnx.use_eager_sharding(False):
        alone = make()(jnp.asarray(host))
    np.testing.assert_allclose(result, alone, rtol=1e-3, atol=1e-4)


def test_nnx_grad_asks_nothing(explicit):
    """The gradient of a sharded weight has its type and its values."""
    layer = linear(None, "model")
    x, host = sharded((8, 16), "data")
    gradient = nnx.grad(lambda layer: layer(x).sum())(layer)["kernel"][...]
    assert type_of(gradient) == "float32[16,16@model]"
    expected = np.repeat(host.sum(0)[:, None], 16, axis=1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
