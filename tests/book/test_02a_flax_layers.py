"""The page "Annotate Flax's layers, and models that you did not write": what it says is true."""

import threading
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import misplaced
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic
from pages import BOOK, check_exercise, compiled_for_cpu, exercises_of
from printed import rows_of

PAGE = "02a-flax-layers"
P = jax.P
COLUMNS = (None, "model")


def forward(layer, x):
    return layer(x)


def sharded_as(array, mesh, *spec):
    return array.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(*spec)), array.ndim)


def weights_of(layers):
    """Every weight of a dict of layers, by its name."""
    return {
        ".".join([name, *path]): weight
        for name, layer in layers.items()
        for path, weight in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


# Annotate Flax's layers

TABLE = {  # the table of the page: FSDP, tensor parallelism
    "up.kernel": (("data", None), (None, "model")),
    "up.bias": ((None,), ("model",)),
    "down.kernel": ((None, "data"), ("model", None)),
    "down.bias": ((None,), (None,)),
    "attend.out.kernel": ((None, None, "data"), ("model", None, None)),
    "attend.out.bias": ((None,), (None,)),
    "heads.kernel": (("data", None, None), (None, "model", None)),
    "patches.kernel": ((None, None, None, "data"), (None, None, None, "model")),
    "embed.embedding": ((None, "data"), ("model", None)),
    "norm.scale": ((None,), (None,)),
}
for made in ("query", "key", "value"):
    TABLE[f"attend.{made}.kernel"] = (("data", None, None), (None, "model", None))
    TABLE[f"attend.{made}.bias"] = ((None, None), ("model", None))
CONV_BIAS = "patches.bias"  # along the axis that its kernel has


def test_each_argument_annotates_its_weight_as_the_table_says(page):
    """Under FSDP and tensor parallelism every weight has the annotation of the table."""
    for fsdp, tensor, column in [("data", None, 0), (None, "model", 1)]:
        with jax.set_mesh(page.mesh):
            weights = weights_of(page.common_layers(nnx.Rngs(0), fsdp, tensor))
        assert weights.keys() == TABLE.keys() | {CONV_BIAS}
        for name, row in TABLE.items():
            assert weights[name].out_sharding == row[column], name
            assert sharded_as(weights[name], page.mesh, *row[column]), name
        assert weights[CONV_BIAS].out_sharding == (fsdp or tensor,)


def test_for_both_strategies_fill_in_both_axes(page):
    """With fsdp="data" as well each weight has both axes, except Conv, which has one large dimension."""
    for name, weight in weights_of(page.layers).items():
        if name.startswith("patches"):
            assert weight.out_sharding[-1] == "data"
            continue
        both = tuple(a or b for a, b in zip(*TABLE[name], strict=True))
        assert weight.out_sharding == both and sharded_as(weight, page.mesh, *both), name
    for layer in page.layers.values():
        assert misplaced(layer, page.mesh) == []


def test_the_pieces_of_tensor_parallelism(page):
    """A device holds a quarter of hidden units, heads, channels and words, and whole norms."""
    with jax.set_mesh(page.mesh):
        weights = weights_of(page.common_layers(nnx.Rngs(0)))
    for name, shape in {
        "up.kernel": (64, 64),
        "up.bias": (64,),
        "down.kernel": (64, 64),
        "down.bias": (64,),
        "embed.embedding": (128, 64),
        "norm.scale": (64,),
        "heads.kernel": (64, 2, 8),
        "patches.kernel": (4, 4, 3, 16),
        "patches.bias": (16,),
        "attend.query.kernel": (64, 2, 8),
        "attend.query.bias": (2, 8),
        "attend.out.kernel": (2, 8, 64),
        "attend.out.bias": (64,),
    }.items():
        assert weights[name].addressable_shards[0].data.shape == shape, name


def test_sharding_changes_no_number(page):
    """The sharded layers hold the numbers of plain ones."""
    with nnx.use_eager_sharding(False):
        plain = weights_of(page.common_layers(nnx.Rngs(0)))
    for name, weight in weights_of(page.layers).items():
        np.testing.assert_array_equal(weight, plain[name])


def test_a_layer_norm_takes_scale_and_bias_metadata(page):
    """nnx.LayerNorm has the arguments that the table gives it."""
    whole = page.along(None)
    with jax.set_mesh(page.mesh):
        norm = nnx.LayerNorm(64, scale_metadata=whole, bias_metadata=whole, rngs=nnx.Rngs(0))
    assert norm.scale.out_sharding == norm.bias.out_sharding == (None,)
    assert misplaced(norm, page.mesh) == []


def test_the_kernel_of_up_is_sharded_by_columns(page):
    """kernel_metadata shards the kernel; the bias, which has no annotation, is a copy each."""
    assert sharded_as(page.up.kernel, page.mesh, *COLUMNS)
    assert page.up.kernel.out_sharding == COLUMNS
    assert page.up.bias.sharding.is_fully_replicated


# Shard an embedding along V or along D?


CHOICES = {  # a row of the table: name of its stored programs, sizes of the mesh, spec
    "tensor parallelism, V": ("tp-v", (2, 4), "model", None),
    "tensor parallelism, D": ("tp-d", (2, 4), None, "model"),
    "FSDP, V": ("fsdp-v", (8, 1), "data", None),
    "FSDP, D": ("fsdp-d", (8, 1), None, "data"),
}


@compiled_for_cpu
@pytest.mark.parametrize("choice", CHOICES)
def test_what_an_embedding_sends_is_ring_arithmetic(page, choice):
    """CPU: sums and gathers of vectors of tokens, or a gather of the whole matrix, in MB."""
    V, D, tokens = 32_768, 1024, 8 * 512
    vectors, matrix = 4 * tokens * D / 1e6, 4 * V * D / 1e6
    group = vectors / 2  # of the tokens of one of two groups along data
    n, eight = 3 / 4, 7 / 8  # (n - 1) / n on rings of four and eight
    wanted = {
        "tensor parallelism, V": (2 * group * n, 0),
        "tensor parallelism, D": (group * n, matrix * n),
        "FSDP, V": (2 * vectors * eight, vectors * eight),
        "FSDP, D": (vectors / 8 * eight, matrix * eight),
    }
    _, sizes, *spec = CHOICES[choice]
    mesh, embed, ids_BT, x_BTD = page.abstract_inputs(sizes, *spec)
    with jax.set_mesh(mesh):
        found = [
            traffic(page.lookup, embed, ids_BT, mesh=mesh),
            traffic(page.tied_loss, embed, x_BTD, ids_BT, mesh=mesh),
        ]
    sent = [sum(row.wire_bytes for row in moves) / 1e6 for moves in found]
    np.testing.assert_allclose(sent, wanted[choice], atol=0.15)  # ids and a few sums


@compiled_for_cpu
def test_tensor_parallelism_gathers_vectors_at_the_start_and_the_matrix_at_the_end(page):
    """The page's own count, along D: 6.3 MB and 100.7 MB."""
    sent = [sum(row.wire_bytes for row in moves) / 1e6 for moves in (page.at_start, page.at_end)]
    assert [f"{megabytes:.1f}" for megabytes in sent] == ["6.3", "100.7"]


def test_the_table_of_embeddings_is_what_three_compilers_made():
    """H100, TPU v5e and CPU: the megabytes of the eight stored programs."""
    (path,) = BOOK.rglob(f"{PAGE}.md")
    table = rows_of(path.read_text("utf-8"), "sharding")
    assert list(table) == list(CHOICES)
    for choice, row in table.items():
        for column, compiler in [("H100", "gpu"), ("TPU v5e", "tpu"), ("CPU", "cpu")]:
            names = [f"embed-{CHOICES[choice][0]}-{end}" for end in ("lookup", "tied-loss")]
            moves = [stored_program(name)[compiler]["moves"] for name in names]
            sent = [sum(move["wire"] for move in rows) / 1e6 for rows in moves]
            assert row[column] == ", ".join(f"{megabytes:.1f}" for megabytes in sent)


@compiled_for_cpu
def test_along_v_a_lookup_adds_up_vectors_and_along_d_it_gathers_them(page):
    """Along V an all-reduce along model, along D an all-gather, of one device's tokens."""
    for names, kind in [(("model", None), "all-reduce"), ((None, "model"), "all-gather")]:
        with jax.set_mesh(page.mesh):
            embed = nnx.Embed(512, 64, embedding_metadata=page.along(*names), rngs=nnx.Rngs(0))
            ids_BT = put(np.zeros((8, 4), "int32"), page.mesh, "data")
            moves = traffic(page.lookup, embed, ids_BT, mesh=page.mesh)
        assert [(move.kind, move.axes, move.shape) for move in moves] == [
            (kind, ("model",), (4, 4, 64))
        ]


def test_the_loss_is_that_of_whole_logits(page):
    """tied_loss on the mesh, in either form, is the cross-entropy that NumPy computes."""
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(8, 4, 64)).astype("float32")
    labels_BT = rng.integers(0, 512, (8, 4))
    losses = []
    for names in [("model", None), (None, "model")]:
        with jax.set_mesh(page.mesh):
            embed = nnx.Embed(512, 64, embedding_metadata=page.along(*names), rngs=nnx.Rngs(0))
            losses.append(page.tied_loss(embed, put(x_BTD, page.mesh, "data"), labels_BT))
    logits = x_BTD @ np.asarray(embed.embedding).T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(log_p, labels_BT[..., None], -1).mean()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_on_h100_v_and_d_cost_the_same_at_17_500_tokens():
    """FSDP: 2 T vectors along V; the matrix and T / 8 vectors along D: equal at V / 1.875 tokens."""
    V = 32_768
    equal = V / (2 - 1 / 8)
    assert round(equal, -2) == 17_500 and 0.5 < equal / V < 0.55


# A model that you did not write


def test_a_rule_and_load_place_every_leaf(page):
    """Every weight of the classifier is sharded by its rule, and has the values that were loaded."""
    n, total = page.mesh.shape["model"], ms.memory(page.trained).bytes_per_device
    sharded = 4 * (96 * 384 + 384 + 384 * 96)
    assert ms.memory(page.foreign).bytes_per_device == total - sharded + sharded // n
    for path, weight in nnx.to_flat_state(nnx.state(page.foreign, nnx.Param)):
        np.testing.assert_array_equal(weight, page.values[".".join(path)])
        assert weight.out_sharding == page.rule(path)
    assert page.foreign.up.kernel.sharding.shard_shape((96, 384)) == (96, 384 // n)
    assert page.foreign.down.kernel.sharding.shard_shape((384, 96)) == (384 // n, 96)
    assert misplaced(page.foreign, page.mesh) == []
    np.testing.assert_allclose(page.foreign(page.x_BI), page.trained(page.x_host), atol=1e-5)


def test_the_rule_applies_in_a_nested_model_and_raises_for_an_unknown_name(page):
    """It reads the last two names of a path, and raises a ValueError for a name it does not know."""
    assert page.rule(("blocks", 0, "up", "kernel")) == COLUMNS
    assert attempt(page.rule, ("up", "scale")).startswith("ValueError")


def test_load_checks_the_shape_which_update_does_not(page):
    """load raises a ValueError for another shape; set_value and nnx.update accept any."""
    wrong = page.values | {"up.kernel": np.ones((4, 4))}
    assert attempt(page.load, page.foreign, wrong).startswith("ValueError: up.kernel")
    linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    nnx.update(linear, {"kernel": jnp.ones((3, 3))})  # no message
    assert linear.kernel.shape == (3, 3)
    linear.kernel.set_value(jnp.ones((2, 2)))
    assert linear.kernel.shape == (2, 2)


def test_an_annotation_written_later_moves_nothing(page):
    """set_metadata moves nothing; set_value brings in the array that was moved."""
    late = nnx.Param(jnp.ones((8, 16)))
    late.set_metadata(out_sharding=COLUMNS)
    assert late.out_sharding == COLUMNS and len(late.devices()) == 1
    late.set_value(put(late[...], page.mesh, *COLUMNS))
    assert sharded_as(late, page.mesh, *COLUMNS)


# Sizes that do not divide


def head(classes, *, bias=False, names=(None, "model")):
    return nnx.Linear(
        64, classes, use_bias=bias, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": names}
    )


def made(page, function):
    """What the jitted function returns in the page's mesh of 2 × 4."""
    with jax.set_mesh(page.mesh):
        return jax.jit(function)()


def parts(array):
    """Into how many different pieces an array is divided."""
    return len({str(shard.index) for shard in array.addressable_shards})


UNEVEN = [10, 6, 9, 3, 50257]  # four devices along model divide none of them


@pytest.mark.parametrize("classes", UNEVEN)
def test_outside_of_jit_an_uneven_size_raises(page, classes):
    """Outside of jax.jit an uneven size raises an IndivisibleError."""
    with jax.set_mesh(page.mesh), pytest.raises(ValueError) as error:
        head(classes)
    assert type(error.value).__name__ == "IndivisibleError"


@compiled_for_cpu
@pytest.mark.parametrize("classes", UNEVEN)
def test_inside_of_jit_an_uneven_weight_beside_another_result_silently_ends_whole(page, classes):
    """Inside, a program that returns more than this weight ends with it whole, or in fewer parts."""
    layer = made(page, lambda: head(classes, bias=True))
    assert parts(layer.kernel) in (1, 2)
    both = made(page, lambda: (head(classes), head(classes)))
    assert {parts(layer.kernel) for layer in both} <= {1, 2}


@compiled_for_cpu
@pytest.mark.parametrize("classes", [10, 6, 2, 18, 30])
def test_alone_in_a_program_it_stops_with_a_bare_key_error(page, classes):
    """A program that returns this array alone stops with KeyError: np.int64(2) on JAX 0.11 and
    0.12, where the size and the axis have a common factor; JAX 0.10 returns fewer parts."""
    if jax.__version_info__ < (0, 11):
        assert parts(made(page, lambda: head(classes)).kernel) in (1, 2)
        return
    with pytest.raises(KeyError) as error:
        made(page, lambda: head(classes))
    assert str(error.value) == "np.int64(2)"


@compiled_for_cpu
@pytest.mark.parametrize("classes", [9, 3, 50257])
def test_alone_and_odd_it_silently_ends_whole(page, classes):
    """A size without a common factor with the axis ends whole, also alone in its program."""
    assert parts(made(page, lambda: head(classes)).kernel) == 1


@compiled_for_cpu
def test_a_plain_constraint_as_the_only_result_stops_in_the_same_way(page):
    """The KeyError is JAX's, not Flax's: a plain constraint of (64, 10) raises it as well."""

    def constrained():
        return jax.lax.with_sharding_constraint(jnp.zeros((64, 10)), P(None, "model"))

    if jax.__version_info__ < (0, 11):
        assert parts(made(page, constrained)) in (1, 2)
        return
    with pytest.raises(KeyError, match="2"):
        made(page, constrained)


@compiled_for_cpu
def test_with_both_dimensions_sharded_the_error_is_about_a_shape_that_is_nowhere(page):
    """Both dimensions sharded: an IndivisibleError about the shape [2, 2, 2], which no array has."""

    def blocks():
        return head(10, names=("data", "model"))

    if jax.__version_info__ < (0, 11):
        assert parts(made(page, blocks).kernel) < page.mesh.size
        return
    with pytest.raises(ValueError) as error:
        made(page, blocks)
    assert type(error.value).__name__ == "IndivisibleError"
    assert str(error.value).startswith("shape=[2, 2, 2] is incompatible with mesh_shape")


def test_out_shardings_raise_an_error_that_names_the_shape(page):
    """jax.jit with out_shardings raises an IndivisibleError that names shape and dimension."""
    by_columns = jax.NamedSharding(page.mesh, P(None, "model"))

    def zeros():
        return jnp.zeros((64, 10))

    with pytest.raises(ValueError, match=r"\(64, 10\)|dimension size is 10") as error:
        jax.jit(zeros, out_shardings=by_columns)()
    assert type(error.value).__name__ == "IndivisibleError"


def test_the_uneven_head_is_whole_on_every_device(page):
    """Made inside of jax.jit, the head of ten classes is whole, and misplaced says so."""
    assert misplaced(page.head, page.mesh) == [
        "bias: no annotation",
        "kernel: annotated (None, 'model'), on each device (64, 10)",
    ]


def test_outside_the_head_of_ten_raises_and_names_the_size(page):
    """Outside of jax.jit the error names the dimension size 10."""
    with jax.set_mesh(page.mesh):
        raised = attempt(page.make_head, 10).replace("\n", " ")
    assert raised.startswith("IndivisibleError") and "dimension size is 10" in raised


def test_padding_is_less_than_a_column_for_each_part(page):
    """padded gives the next size that the parts divide."""
    assert [page.padded(size, 4) for size in (8, 9, 10, 12)] == [8, 12, 12, 12]
    assert page.w_DV.shape == (64, 12) and page.V == 12
    piece = put(page.w_DV, page.mesh, *COLUMNS).addressable_shards[0].data
    assert piece.shape == (64, 3)


def reference_of(page):
    """Log-probabilities of the head of ten columns, on one device."""
    ten = np.asarray(nnx.initializers.lecun_normal()(jax.random.key(1), (64, 10)))
    return jax.nn.log_softmax(page.x_host @ ten)


def test_the_masked_head_has_the_log_probabilities_of_ten_columns(page):
    """With the mask, ten classes have their log-probabilities, and the padding none."""
    ours = np.asarray(jax.nn.log_softmax(page.masked_BV))
    np.testing.assert_allclose(ours[:, :10], reference_of(page), atol=1e-5)
    assert np.all(np.isneginf(ours[:, 10:]))


def test_without_the_mask_every_class_loses_probability(page):
    """A logit of zero takes probability from all ten classes, in every row; a quarter in row 0."""
    unmasked = np.asarray(jax.nn.log_softmax(page.logits_BV))[:, :10]
    assert np.all(unmasked < reference_of(page) - 0.01)
    assert np.all(page.logits_BV[:, 10:] == 0)
    assert 0.2 < 1 - np.exp(unmasked[0]).sum() < 0.3


def test_one_hot_labels_and_the_mask_give_nan(page):
    """0 times minus infinity is NaN; with -1e9 the loss is right."""
    one_hot = jax.nn.one_hot(3, page.V)
    assert np.isnan((one_hot * jax.nn.log_softmax(page.masked_BV)[0]).sum())
    finite = jnp.where(jnp.arange(page.V) < 10, page.logits_BV[0], -1e9)
    found = (one_hot * jax.nn.log_softmax(finite)).sum()
    np.testing.assert_allclose(found, reference_of(page)[0, 3], atol=1e-5)


# Traps


def test_five_spellings_leave_whole_copies(page):
    """A plural, two other keywords, a list and a string are not read: the weight stays whole."""
    assert len(page.unread) == 5
    for metadata in page.unread:
        with jax.set_mesh(page.mesh):
            w = nnx.Param(jnp.asarray(page.numbers), **metadata)
        assert w.sharding.is_fully_replicated and len(w.devices()) == page.mesh.size


def test_misplaced_reports_each_of_them(page):
    """misplaced catches each of the five."""
    for metadata in page.unread:
        with jax.set_mesh(page.mesh):
            listed = nnx.List([nnx.Param(jnp.asarray(page.numbers), **metadata)])
        assert len(misplaced(listed, page.mesh)) == 1


def test_attention_reuses_kernel_metadata_for_its_output_weight(page):
    """Without out_kernel_metadata a device has a quarter of every head, and misplaced is silent."""
    assert page.attend.out.kernel.out_sharding == page.attend.query.kernel.out_sharding
    assert page.attend.out.kernel.shape == (8, 16, 128) and page.piece == (8, 4, 128)
    assert [line for line in misplaced(page.attend, page.mesh) if "kernel" in line] == []


def whole_heads(page):
    """The same attention with out_kernel_metadata."""
    with jax.set_mesh(page.mesh):
        return nnx.MultiHeadAttention(
            num_heads=8,
            in_features=128,
            kernel_metadata=page.along(None, "model", None),
            out_kernel_metadata=page.along("model", None, None),
            decode=False,
            rngs=nnx.Rngs(0),
        )


def test_with_out_kernel_metadata_a_device_has_whole_heads(page):
    """The output weight is then in pieces of two whole heads; the numbers are the same."""
    right = whole_heads(page)
    assert right.out.kernel.sharding.shard_shape((8, 16, 128)) == (2, 16, 128)
    long_BTD = put(np.random.default_rng(1).normal(size=(4, 16, 128)), page.mesh, "data")
    np.testing.assert_allclose(page.attend(long_BTD), right(long_BTD), atol=1e-5)


@compiled_for_cpu
def test_the_wrong_pieces_cost_an_all_to_all(page):
    """Compiled for CPU each call makes an extra all-to-all."""
    x_BTD = put(np.ones((4, 16, 128), "float32"), page.mesh, "data")
    assert traffic(forward, page.attend, x_BTD, mesh=page.mesh).kinds == {
        "all-reduce",
        "all-to-all",
    }
    assert traffic(forward, whole_heads(page), x_BTD, mesh=page.mesh).kinds == {"all-reduce"}


# Older code


def test_a_wrapped_initialiser_annotates_too(page):
    """nnx.with_partitioning shards the kernel; given both, the wrapper wins; scaling it fails."""
    wrapped_init = nnx.with_partitioning(page.init, COLUMNS)
    with jax.set_mesh(page.mesh):
        wrapped = nnx.Linear(64, 256, kernel_init=wrapped_init, rngs=nnx.Rngs(0))
        rows = page.along("data", None)
        both = nnx.Linear(64, 256, kernel_init=wrapped_init, kernel_metadata=rows, rngs=nnx.Rngs(0))
    plain = nnx.Linear(64, 256, rngs=nnx.Rngs(0))  # no mesh, no annotation
    for layer in (page.up, wrapped, both):
        assert sharded_as(layer.kernel, page.mesh, *COLUMNS)
        assert layer.kernel.out_sharding == COLUMNS
        assert layer.bias.sharding.is_fully_replicated
        np.testing.assert_array_equal(layer.kernel, plain.kernel)
    with pytest.raises(TypeError, match="VariableMetadata"):
        0.5 * wrapped_init(jax.random.key(0), (8, 16))


@pytest.mark.parametrize("keyword", ["sharding", "sharding_names"])
def test_older_keywords_warn_and_are_stored_under_the_new_key(page, keyword):
    """sharding= and sharding_names= still shard, with a DeprecationWarning."""
    with warnings.catch_warnings(action="always", record=True) as caught:
        old = nnx.Param(page.numbers, mesh=page.mesh, **{keyword: COLUMNS})
    assert [warning.category for warning in caught] == [DeprecationWarning]
    assert sharded_as(old, page.mesh, *COLUMNS)
    assert old.out_sharding == COLUMNS and not old.has_metadata("sharding")


# Eager sharding


def make(page, value, **metadata):
    return nnx.Param(value, out_sharding=COLUMNS, **metadata)


def test_an_annotated_variable_needs_a_mesh(page):
    """Without a mesh Flax raises; with mesh= it accepts an array made before."""
    assert nnx.using_eager_sharding()
    assert attempt(make, page, page.numbers).startswith("ValueError: An auto mesh context")
    assert sharded_as(make(page, page.early, mesh=page.mesh), page.mesh, *COLUMNS)


def test_inside_the_mesh_an_array_of_one_device_raises(page):
    """NumPy arrays and arrays made inside are accepted, one made before only after device_put."""
    with jax.set_mesh(page.mesh):
        assert sharded_as(make(page, page.numbers), page.mesh, *COLUMNS)
        assert sharded_as(make(page, jnp.asarray(page.numbers)), page.mesh, *COLUMNS)
        assert attempt(make, page, page.early).startswith("TypeError")
        assert sharded_as(make(page, put(page.early, page.mesh)), page.mesh, *COLUMNS)


def test_eager_sharding_off_for_a_block_and_on_for_one_variable(page):
    """In the block annotations are notes; eager_sharding=True shards one variable all the same."""
    with nnx.use_eager_sharding(False):
        off = make(page, page.early)
        on = make(page, page.early, mesh=page.mesh, eager_sharding=True)
        assert not nnx.using_eager_sharding()
    assert sharded_as(on, page.mesh, *COLUMNS) and len(off.devices()) == 1
    assert on.out_sharding == off.out_sharding == COLUMNS  # kept as metadata in any case
    assert nnx.using_eager_sharding()  # back after the block


def test_eager_sharding_off_for_one_variable(page):
    """eager_sharding=False leaves one variable on one device, without a mesh."""
    assert len(make(page, page.early, eager_sharding=False).devices()) == 1


def test_the_call_holds_for_its_own_thread(page):
    """use_eager_sharding(False) is seen in its thread until the next call, and in no other."""
    seen = []

    def ask_a_worker():
        worker = threading.Thread(target=lambda: seen.append(nnx.using_eager_sharding()))
        worker.start()
        worker.join()

    nnx.use_eager_sharding(False)
    seen.append(nnx.using_eager_sharding())
    ask_a_worker()
    nnx.use_eager_sharding(True)
    flax.config.update("flax_always_shard_variable", False)  # the flag: for the others
    ask_a_worker()
    flax.config.update("flax_always_shard_variable", True)
    assert seen == [False, True, False] and nnx.using_eager_sharding()


def test_with_eager_sharding_off_every_weight_is_whole_on_the_first_device(page):
    """Annotations alone leave all weights on device 0, more than seven times what a device holds."""
    weights = weights_of(page.notes_only)
    assert {device for w in weights.values() for device in w.devices()} == {jax.devices()[0]}
    whole = ms.memory(page.notes_only)
    assert whole.bytes_per_device == whole.total_bytes
    assert whole.bytes_per_device > 7 * ms.memory(page.layers).bytes_per_device
    assert weights["up.kernel"].out_sharding == ("data", "model")


def test_a_large_model_fits_only_in_pieces(page):
    """32 pairs of 4096 x 16384 are 17.2 GB whole; sharded along model each device holds a quarter."""

    def pair():
        up = nnx.Linear(4096, 16384, kernel_metadata=page.along(*COLUMNS), rngs=nnx.Rngs(0))
        down = page.along("model", None)
        return nnx.List([up, nnx.Linear(16384, 4096, kernel_metadata=down, rngs=nnx.Rngs(0))])

    _, shapes = nnx.get_abstract_model(pair, page.mesh)  # shapes only: nothing is allocated
    kernels = [leaf for path, leaf in nnx.to_flat_state(shapes) if path[-1] == "kernel"]
    whole = sum(4 * leaf.size for leaf in kernels)
    held = sum(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in kernels)
    assert held == whole // 4 and 32 * whole > 16e9 and f"{32 * whole / 1e9:.1f}" == "17.2"


def test_an_initialiser_makes_its_array_whole_first(page):
    """Under the mesh an initialiser makes a whole copy on every device."""
    with jax.set_mesh(page.mesh):
        value = page.init(jax.random.key(0), (8, 16))
    assert {shard.data.shape for shard in value.addressable_shards} == {(8, 16)}
    assert len(value.addressable_shards) == page.mesh.size


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
