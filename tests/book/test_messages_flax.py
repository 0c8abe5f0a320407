"""Messages of Flax: each program raises what its heading quotes, and each fix is right."""

import warnings
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-flax"
P = jax.P

ENTRIES = quoted_in_headings(PAGE)


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def type_of(x):
    return str(jax.typeof(x))


def piece(x):
    """The shape of what the first device holds of a variable."""
    return x.addressable_shards[0].data.shape


@pytest.mark.parametrize("slug", ENTRIES)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert ENTRIES[slug]
    assert_raised(page, slug, ENTRIES[slug])


def test_all_messages_have_an_entry():
    """No heading of the page is left out above but the table's, which quotes none."""
    assert len(ENTRIES) == 15


# Annotations and the mesh


def test_an_annotated_variable_needs_a_mesh(page):
    """It raises without one, in eval_shape too, and inside the older `with mesh:`."""

    def make():
        return nnx.Param(page.numbers, **page.by_columns)

    words = "An auto mesh context or metadata is required if creating a variable with annotation"
    assert words in said(make) and words in said(nnx.eval_shape, make)
    with warnings.catch_warnings(action="ignore"), page.mesh:  # the older form warns
        assert words in said(make)


def test_inside_set_mesh_it_is_sharded_at_once(page):
    """Each device has the columns of its position along model, and all rows."""
    w = page.after("with-mesh").w
    held = {shard.device: shard.data for shard in w.addressable_shards}
    columns = np.split(page.numbers, 4, axis=1)
    for (_, column), device in np.ndenumerate(page.mesh.devices):
        np.testing.assert_array_equal(held[device], columns[column])


def test_a_name_without_a_rule_is_taken_for_an_axis(page):
    """It raises without a table, and with a table that has the other name only."""
    words = "Resource axis: embed of P('embed', 'hidden') is not found in mesh"
    with jax.set_mesh(page.mesh):
        assert words in said(page.named)
        with nnx.logical_axis_rules([("hidden", "model")]):
            assert "Resource axis: embed" in said(page.named)


def test_with_a_rule_for_each_name_it_is_sharded(page):
    """The table shards hidden along model, and leaves embed whole."""
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.rules):
        assert piece(page.named()) == (8, 16 // 4)


def test_two_names_for_one_axis_raise_in_nnx_and_linen_leaves_the_second_whole(page):
    """NNX raises; Linen's spec has the axis once."""
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.both_along_model):
        raised = said(page.named)
    assert raised.startswith("DuplicateSpecError:")
    assert "has duplicate entries for `model`" in raised
    spec = nn.logical_to_mesh_axes(("embed", "hidden"), page.both_along_model)
    assert spec == P("model", None)


def test_two_names_for_two_axes_or_none_are_sharded(page):
    """Two axes give eighths, and None for one of the names gives quarters."""
    with jax.set_mesh(page.mesh):
        with nnx.logical_axis_rules(page.two_axes):
            assert piece(page.named()) == (8 // 2, 16 // 4)
        with nnx.logical_axis_rules([("embed", None), ("hidden", "model")]):
            assert piece(page.named()) == (8, 16 // 4)


def test_an_annotation_of_two_entries_is_too_long_for_a_bias(page):
    """The message says that the rank is 1."""
    with jax.set_mesh(page.mesh):
        raised = said(partial(page.linear, bias_metadata=page.by_columns))
    assert "One of with_sharding_constraint arguments is incompatible" in raised
    assert (
        "only valid for values of rank at least 2, but was applied to a value of rank 1" in raised
    )


def test_with_one_entry_the_bias_is_sharded_as_the_columns(page):
    """A device has a quarter of the columns and a quarter of the bias."""
    assert piece(page.up.kernel) == (8, 16 // 4) and piece(page.up.bias) == (16 // 4,)


def test_too_few_entries_raise_nothing_and_the_rest_stays_whole(page):
    """One entry for a matrix shards its rows."""
    with jax.set_mesh(page.mesh):
        assert piece(nnx.Param(page.numbers, out_sharding=("model",))) == (8 // 4, 16)


def test_mixed_axes_raise(page):
    """One Auto and one Explicit axis: the message says that all must be of one kind."""
    with jax.set_mesh(page.mixed):
        raised = said(lambda: nnx.Param(page.numbers, **page.by_columns))
    assert "Mesh must have all axes as Explicit or all axes as Auto" in raised


def test_with_axes_of_one_type_a_variable_is_sharded(page):
    """On the Auto and on the Explicit mesh a device has four of sixteen columns."""
    for mesh in (page.mesh, page.explicit_mesh):
        with jax.set_mesh(mesh):
            assert piece(nnx.Param(page.numbers, **page.by_columns)) == (8, 16 // 4)
    assert set(page.explicit_mesh.axis_types) == {jax.sharding.AxisType.Explicit}


# Models, optimizers and keys


def test_a_variable_from_outside_cannot_change_inside_jit_grad_or_scan(page):
    """A draw raises in jax.jit and in a scan, and a dropout in jax.grad."""
    assert "Cannot mutate RngCount from a different trace level" in said(jax.jit(page.draw))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    by_grad = said(jax.grad(lambda x: dropout(x).sum()), jnp.ones(4))
    by_scan = said(jax.lax.scan, lambda carry, _: (carry, page.draw()), 0, None, 3)
    for raised in (by_grad, by_scan):
        assert raised.startswith("TraceContextError: Cannot mutate")


def test_passed_in_it_draws_what_plain_python_draws(page):
    """The two draws differ, are those of plain Python, and are counted."""
    plain = nnx.Rngs(0)
    expected = [jax.random.normal(plain.params()) for _ in range(2)]
    np.testing.assert_allclose([page.first, page.second], expected, rtol=1e-6)
    assert page.first != page.second and int(page.after("passed-in").rngs.params.count[...]) == 2


def test_an_optimizer_needs_wrt(page):
    """Without it, the message asks for it."""
    raised = said(nnx.Optimizer, page.model, optax.sgd(0.1))
    assert raised.startswith("TypeError: Missing required argument `wrt`.")
    assert "As of Flax 0.11.0 the `wrt` argument is required" in raised


def test_with_wrt_there_is_a_moment_for_each_weight_and_for_no_key(page):
    """Of a layer and a dropout, the moments are those of kernel and bias."""
    assert page.optimizer.wrt is nnx.Param
    layers = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    moments = nnx.Optimizer(
        nnx.Sequential(*layers), optax.sgd(0.1, 0.9), wrt=page.optimizer.wrt
    ).opt_state
    assert sorted(x.shape for x in jax.tree.leaves(moments)) == [(2,), (4, 2)]


def test_update_needs_the_model_and_the_gradients(page):
    """update(grads) raises, and so does the older attribute `model`."""
    raised = said(page.optimizer.update, page.grads)
    assert "As of Flax 0.11.0 update requires both (model, grads) arguments to be" in raised
    older = said(lambda: page.optimizer.model)
    assert "Optimizer does not have attribute 'model' since Flax 0.11.0" in older


def test_with_both_the_step_is_that_of_sgd(page):
    """The kernel is w - 0.1 g, the step is counted, and the loss falls."""
    fresh = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    by_hand = fresh.kernel[...] - 0.1 * page.grads["kernel"][...]
    np.testing.assert_allclose(page.model.kernel, by_hand, rtol=1e-6)
    assert page.optimizer.step[...] == 1 and page.loss_of(page.model) < page.before


def test_a_list_of_layers_is_static_and_raises(page):
    """At once, or at the end of the constructor if it is filled afterwards."""

    class Filled(nnx.Module):
        def __init__(self, rngs):
            self.layers = []
            self.layers.append(nnx.Linear(4, 4, rngs=rngs))

    raised = said(page.Stack, nnx.Rngs(0))
    assert "Found data on value of type '<class 'list'>' assigned to static attribute" in raised
    assert "Found unexpected data on value of type" in said(Filled, nnx.Rngs(0))


def test_nnx_list_and_nnx_dict_hold_modules(page):
    """All six weights of three layers are found, in a list and in a dict."""

    class Named(nnx.Module):
        def __init__(self, rngs):
            layers = {f"layer{i}": nnx.Linear(4, 4, rngs=rngs) for i in range(3)}
            self.layers = nnx.Dict(layers)

    for model in (page.Stacked(nnx.Rngs(0)), Named(nnx.Rngs(0))):
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
        assert len(paths) == 6 and len({path[1] for path in paths}) == 3
    assert {path[1] for path, _ in nnx.to_flat_state(nnx.state(page.Stacked(nnx.Rngs(0))))} == {
        *range(3)
    }


def test_nnx_vmap_does_not_split_a_key(page):
    """With one key it raises."""
    with jax.set_mesh(page.mesh):
        raised = said(page.stack, nnx.Rngs(0))
    assert "vmap was requested to map its argument along axis 0" in raised
    assert "which implies that its rank should be at least 1, but is only 0" in raised


def test_split_makes_four_different_layers_with_three_entries(page):
    """The annotation has three entries, a device has all four layers, and they differ."""
    kernel = page.layers.kernel
    assert kernel.out_sharding == (None, None, "model") and piece(kernel) == (4, 8, 2)
    assert len({float(one.sum()) for one in kernel[...]}) == 4


def test_without_the_name_the_annotation_is_one_entry_short(page):
    """nnx.vmap without PARTITION_NAME raises nothing, and leaves two entries for three dimensions."""
    with jax.set_mesh(page.mesh):
        kernel = nnx.vmap(page.layer)(nnx.Rngs(0).split(4)).kernel
    assert kernel.ndim == 3 and kernel.out_sharding == (None, "model")


def test_jax_grad_wants_no_integers(page):
    """Of a model with a dropout it raises, for the counter is uint32."""
    raised = said(jax.grad(page.total), page.Noisy(nnx.Rngs(0)))
    assert "grad requires real- or complex-valued inputs" in raised
    assert "but got uint32" in raised


def test_nnx_grad_gives_the_slope_of_each_weight(page):
    """There are gradients of the layer alone; the bias's is the slope by finite differences."""
    assert list(page.noisy_grads) == ["linear"]

    def moved(size):
        model = page.Noisy(nnx.Rngs(0))
        model.linear.bias[...] += size
        return page.total(model)

    slope = moved(0.5) - moved(-0.5)  # the total is linear in the bias, so this is exact
    gradient = page.noisy_grads["linear"]["bias"][...]
    np.testing.assert_allclose(gradient.sum(), slope, rtol=1e-4)


def test_jax_lax_wants_the_array_of_a_variable(page):
    """jax.lax.dot raises for the variable; an operator takes it."""
    raised = said(jax.lax.dot, jnp.ones((2, 4)), page.w)
    assert "Triggering __jax_array__() during abstractification is no longer" in raised
    np.testing.assert_array_equal(jnp.ones((2, 4)) @ page.w, np.full((2, 3), 4.0))


def test_three_dots_are_the_array(page):
    """jax.lax.dot of w[...] is the product."""
    np.testing.assert_array_equal(page.product, np.full((2, 3), 4.0))


# Linen


def test_a_box_is_not_an_array_and_unboxed_it_gives_what_apply_gives(page):
    """A box has no shape and cannot be multiplied; unboxed, the product is that of apply."""
    ones = jnp.ones((2, 8))
    box = page.kernel
    raised = said(lambda: ones @ box)
    assert "unsupported operand type(s) for @:" in raised and "'Partitioned'" in raised
    assert "'Partitioned' object has no attribute 'shape'" in said(lambda: box.shape)
    variables = page.dense.init(jax.random.key(0), ones)
    for product in (page.unboxed_product, ones @ nn.meta.unbox(variables)["params"]["kernel"]):
        np.testing.assert_allclose(product, page.dense.apply(variables, ones), rtol=1e-6)


def test_linen_asks_for_the_name_of_the_new_dimension(page):
    """nn.scan without metadata_params raises."""
    raised = said(jax.eval_shape, page.unnamed().init, *page.inputs)
    assert raised.startswith("PartitioningUnspecifiedError:")
    assert '"partition_name" is not specified in metadata_params' in raised


def test_named_the_stack_has_three_entries(page):
    """None for the layers, and a kernel of four layers."""
    kernel = page.shapes["params"]["Dense_0"]["kernel"]
    assert kernel.names == (None, None, "model") and kernel.value.shape == (4, 8, 8)


# Variables on an Explicit mesh


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
