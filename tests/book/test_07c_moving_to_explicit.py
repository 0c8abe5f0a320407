"""The page "Moving a Flax model to Explicit mode"."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import lowered_for
from many_devices.helpers import attempt, put, type_of
from many_devices.stacked import pinned
from many_devices.training import adamw, batch_of, step
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "07c-moving-to-explicit"
P = jax.P
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
MATRIX = 4 * 4096 * 16384  # bytes of the large model's weight
lecun = nnx.initializers.lecun_normal()


def message(function, *inputs):
    """What JAX raises, on one line."""
    return " ".join(attempt(function, *inputs).split())


def call(layer, *inputs):
    return layer(*inputs)


def leaves(tree):
    return jax.tree.leaves(nnx.state(tree))


def types(tree):
    return [str(jax.typeof(leaf)) for leaf in leaves(tree)]


def first_model(make, mesh):
    with jax.set_mesh(mesh):
        return jax.jit(make)()


# Three messages


def test_the_model_can_be_made_on_the_explicit_mesh(page):
    """Its annotated weights have the types that their annotations say."""
    assert str(jax.typeof(page.annotated_model.w_ID.get_value())) == "float32[64@model,96@data]"
    w_LDF = page.annotated_model.blocks.w_DF.get_value()
    assert str(jax.typeof(w_LDF)) == "float32[4,96@data,384@model]"


def test_its_first_product_would_have_data_twice(page):
    """Calling it raises an error, because rows of the batch and columns of the weight are on data."""
    said = message(jax.eval_shape, call, page.annotated_model, page.x_BI)
    assert "illegally sharded result: f32[64@data,96@data]" in said


def test_out_sharding_fixes_the_first_product(page):
    """The batch keeps data, and the values are those of the product."""
    rows = partial(jnp.dot, out_sharding=P("data", None))
    w_ID = put(np.ones((64, 96), "float32"), page.mesh, "model", "data")
    assert type_of(rows, page.x_BI, w_ID) == "float32[64@data,96]"
    np.testing.assert_allclose(rows(page.x_BI, w_ID), np.full((64, 96), 64.0))


def test_the_second_product_of_a_block_sums_over_a_sharded_dimension(page):
    """Calling one block raises the error of the row-parallel product."""
    said = message(jax.eval_shape, call, page.annotated_block, page.inner_x_BD)
    assert said.startswith("ShardingTypeError: Contracting dim")
    assert "lhs_contracting_spec=('model',) and rhs_contracting_spec=('model',)" in said


def test_a_constraint_checks_a_type(page):
    """Chapter 4's constraint passes where the type is that, and raises for the logits."""
    assert "acts as an assert" in message(pinned, page.logits_BV, page.strategy)
    assert "did not match" in message(pinned, page.logits_BV, page.strategy)
    same = pinned(page.inner_x_BD, page.strategy)
    assert jax.typeof(same) == jax.typeof(page.inner_x_BD)


def test_the_constraints_of_the_model_pass(page):
    """Those on activations and on logits, at the types that the Explicit model has there."""
    x_BD = jax.eval_shape(call, page.explicit_block, page.inner_x_BD)
    assert type_of(lambda x: pinned(x, page.strategy), x_BD) == "float32[64@data,96]"
    logits_BV = jax.eval_shape(call, page.explicit_model, page.x_BI)
    found = type_of(lambda x: pinned(x, page.strategy, features="model"), logits_BV)
    assert found == "float32[64@data,16@model]"


def test_reshard_moves_where_a_constraint_only_checks(page):
    """The logits become whole along the classes."""
    moved = jax.reshard(page.logits_BV, P("data", None))
    assert str(jax.typeof(moved)) == "float32[64@data,16]"


# Weights initialised sharded


@compiled_for_cpu
def test_an_annotated_weight_is_made_whole_on_the_explicit_mesh(page):
    """Compiled for CPU, the whole matrix is in that program, and in the other two it is not."""
    found = ["[4096,16384]" in program.as_text() for program in programs(page)]
    assert found == [False, True, False]


def programs(page):
    return page.auto_init, page.annotated_init, page.sharded_init


def test_each_device_keeps_one_eighth_of_268_mb(page):
    """All three programs end in the same pieces."""
    assert f"{MATRIX / 1e6:.0f}" == "268"
    assert [ms.memory(program).outputs for program in programs(page)] == [MATRIX // 8] * 3


@compiled_for_cpu
def test_made_whole_it_takes_four_times_the_matrix_of_scratch(page):
    """Compiled for CPU; in Auto mode, and with the sharding in the initialiser, less than one."""
    auto, whole, sharded = (ms.memory(program).temporaries for program in programs(page))
    assert round(whole / MATRIX) == 4
    assert 7 * auto < 3 * MATRIX
    assert abs(auto - sharded) < MATRIX / 1000
    assert [f"{size / 1e6:,.0f}" for size in (auto, whole)] == ["101", "1,074"]


def test_no_device_has_the_whole_matrix_if_the_initialiser_has_the_sharding(page):
    sharding = jax.NamedSharding(page.mesh, P("data", "model"))
    matrix = jax.ShapeDtypeStruct((4096, 16384), "float32", sharding=sharding)
    ms.assert_no_full_copy(page.sharded_init, [matrix])


def whole_by_type(make, mesh, platform):
    """How often the program for that platform says that an array of the matrix's size is whole."""
    with jax.set_mesh(mesh):
        text = lowered_for(platform, make)[0].mlir_module()
    return len(re.findall(r"sharding_constraint .*\[\{\}, \{\}\]> : tensor<4096x16384x", text))


def test_the_program_for_tpu_or_gpu_says_that_the_random_array_is_whole(page):
    """On the Explicit mesh, before a compiler sees it; not in Auto mode or from the initialiser."""
    for platform in ("tpu", "cuda"):
        assert whole_by_type(page.annotated_weight, page.mesh, platform) > 0
        assert whole_by_type(page.annotated_weight, page.auto_mesh, platform) == 0
        assert whole_by_type(page.sharded_weight, page.mesh, platform) == 0


def test_a_random_array_without_a_sharding_is_whole_by_type(page):
    """What jax.random and an initialiser return has no @ in its type."""
    key = jax.random.key(0)
    assert type_of(lambda: jax.random.normal(key, (8, 16))) == "float32[8,16]"
    assert type_of(lambda: page.lecun(key, (8, 16))) == "float32[8,16]"


# The model


def test_types_out_of_the_block_and_the_model(page):
    """Rows along data out of a block, and logits sharded over the classes out of the model."""
    assert type_of(call, page.explicit_block, page.inner_x_BD) == "float32[64@data,96]"
    assert type_of(call, page.explicit_model, page.x_BI) == "float32[64@data,16@model]"


def test_vmap_adds_the_dimension_of_layers_to_a_type(page):
    """A stack of four layers has 4 in front, unsharded, without transform_metadata."""
    w_LDF = page.explicit_model.blocks.w_DF.get_value()
    assert str(jax.typeof(w_LDF)) == "float32[4,96@data,384@model]"


@compiled_for_cpu
def test_the_stack_is_made_sharded_without_communication(page):
    """Compiled for CPU, the program that makes the model has no whole matrix, and no collective."""
    with jax.set_mesh(page.mesh):
        program = jax.jit(page.make_explicit).lower().compile()
    text, config = program.as_text(), page.tiny
    for layers in ("", f"{config.L},"):  # one layer's matrix, or the stack of all layers
        for shape in (f"{config.D},{config.F}", f"{config.F},{config.D}"):
            assert f"[{layers}{shape}]" not in text
    ms.assert_no_full_copy(program, first_model(page.make_explicit, page.mesh))
    assert not ms.collectives(program, page.mesh)


# Training


@pytest.fixture(scope="module")
def trained(page):
    """Both models, trained for three steps on one batch: model, optimizer, losses."""
    return three_steps(page.make_explicit, page.mesh), three_steps(
        page.make_annotated, page.auto_mesh
    )


def three_steps(make, mesh):
    train_step, losses = jax.jit(step), []
    with jax.set_mesh(mesh):
        model, batch = jax.jit(make)(), batch_of(np.arange(64), mesh)
        optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
        for _ in range(3):
            model, optimizer, loss = train_step(model, optimizer, batch)
            losses.append(float(loss))
    return model, optimizer, losses


def test_both_models_start_from_the_same_weights(page):
    """Bit for bit, in pieces of the same shapes."""
    mine = leaves(first_model(page.make_explicit, page.mesh))
    theirs = leaves(first_model(page.make_annotated, page.auto_mesh))
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
        shape = one.shape
        assert one.sharding.shard_shape(shape) == other.sharding.shard_shape(shape)


def test_the_losses_in_view_agree(page):
    """Of the first weights, on one batch."""
    losses = [
        float(page.first_loss(make, mesh))
        for make, mesh in ((page.make_explicit, page.mesh), (page.make_annotated, page.auto_mesh))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_after_three_steps_the_losses_and_the_weights_agree(trained):
    """Up to the order of sums, which AdamW enlarges."""
    (model, _, losses), (auto_model, _, auto_losses) = trained
    np.testing.assert_allclose(losses, auto_losses, atol=1e-4)
    assert losses[2] < losses[0]
    for one, other in zip(leaves(model), leaves(auto_model), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-4)


def test_after_three_steps_the_optimizers_agree(trained):
    """Three steps are counted, and the averages of the gradients are equal."""
    optimizers = [optimizer for _, optimizer, _ in trained]
    assert int(optimizers[0].step[...]) == 3
    mine, theirs = (optimizer.opt_state[0].mu for optimizer in optimizers)
    for one, other in zip(leaves(mine), leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_no_weight_drifts(page, trained):
    """Weights before and after training, and their averages in AdamW, have the same types."""
    first = types(first_model(page.make_explicit, page.mesh))
    model, optimizer, _ = trained[0]
    mu = optimizer.opt_state[0].mu
    assert first == types(page.explicit_model) == types(model) == types(mu)


def test_a_batch_on_the_auto_mesh_raises(page):
    """The message names the mesh in context and that of the argument."""
    said = message(jax.eval_shape, call, page.explicit_model, page.auto_x_BI)
    assert "context mesh" in said and "should match the aval mesh" in said
    assert "(Auto, Auto)" in said


# What works in Explicit mode: a function and its inputs, made on types alone


def like(shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(MESH, P(*spec)))


def layer(kind, *sizes, **options):
    """The parameters of a layer, as types."""
    return jax.eval_shape(lambda: kind(*sizes, **options, rngs=nnx.Rngs(0)))


def sharded(*spec):
    """An initialiser that makes its weight sharded like this."""
    return partial(lecun, out_sharding=P(*spec))


def say(*spec):
    """A call that says how its result is sharded."""
    return lambda layer, *inputs: layer(*inputs, out_sharding=P(*spec))


x, h = like((8, 32), "data", None), like((8, 32), "data", "model")
ids, ids_BS = like((8,), "data", dtype="int32"), like((8, 16), "data", dtype="int32")
x_BSD, h_BSF = like((8, 16, 32), "data"), like((8, 16, 32), "data", None, "model")
q_BSHC, image = like((8, 16, 4, 8), "data", None, "model"), like((8, 8, 8, 16), "data")


def column():
    return layer(nnx.Linear, 32, 64, kernel_init=sharded(None, "model"))


def row():
    return layer(nnx.Linear, 32, 64, kernel_init=sharded("model", None))


def heads():
    init = sharded(None, "model", None)
    return layer(nnx.Einsum, "bsd,dhc->bshc", (32, 4, 8), kernel_init=init)


def embed(*spec):
    return layer(nnx.Embed, 64, 32, embedding_init=sharded(*spec))


def attention():
    return layer(
        nnx.MultiHeadAttention,
        4,
        32,
        decode=False,
        kernel_init=nnx.with_partitioning(lecun, (None, "model", None)),
        out_kernel_init=nnx.with_partitioning(lecun, ("model", None, None)),
    )


def conv():
    init = sharded(None, None, None, "model")
    return layer(nnx.Conv, 16, 32, (3, 3), kernel_init=init)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 32))


def sum_by_rows(x):
    return jax.lax.scan(lambda total, row: (total + row.sum(), None), 0.0, x)[0]


def largest(h):
    return jax.lax.top_k(h, 2)[0]


def auto(function, *spec):
    return jax.sharding.auto_axes(function, out_sharding=P(*spec))


sort, cumsum = partial(jnp.sort, axis=1), partial(jnp.cumsum, axis=1)
by_segment = partial(jax.ops.segment_sum, num_segments=8)

# what, the function, what makes its inputs, the type of its result
ACCEPTED = [
    ("Linear", call, lambda: (layer(nnx.Linear, 32, 64), x), "[8@data,64]"),
    ("Linear, column-parallel", call, lambda: (column(), x), "[8@data,64@model]"),
    ("Linear, row-parallel, said", say("data"), lambda: (row(), h), "[8@data,64]"),
    ("Linear on sequences, said", say("data"), lambda: (row(), h_BSF), "[8@data,16,64]"),
    ("Einsum to heads", call, lambda: (heads(), x_BSD), "[8@data,16,4@model,8]"),
    (
        "LinearGeneral to heads",
        call,
        lambda: (layer(nnx.LinearGeneral, 32, (4, 8), kernel_init=sharded(None, "model")), x_BSD),
        "[8@data,16,4@model,8]",
    ),
    *[
        (f"Embed {spec}, said", say("data"), lambda s=spec: (embed(*s), ids), "[8@data,32]")
        for spec in [(None, None), (None, "model"), ("model", None)]
    ],
    (
        "Embed on sequences, said",
        say("data"),
        lambda: (embed("model", None), ids_BS),
        "[8@data,16,32]",
    ),
    ("LayerNorm, features whole", call, lambda: (layer(nnx.LayerNorm, 32), x), "[8@data,32]"),
    ("LayerNorm", call, lambda: (layer(nnx.LayerNorm, 32), h), "[8@data,32@model]"),
    ("RMSNorm, features whole", call, lambda: (layer(nnx.RMSNorm, 32), x), "[8@data,32]"),
    ("RMSNorm", call, lambda: (layer(nnx.RMSNorm, 32), h), "[8@data,32@model]"),
    ("attention, said", say("data"), lambda: (attention(), x_BSD), "[8@data,16,32]"),
    (
        "dot_product_attention",
        jax.nn.dot_product_attention,
        lambda: (q_BSHC, q_BSHC, q_BSHC),
        "[8@data,16,4@model,8]",
    ),
    (
        "Conv, said",
        say("data", None, None, "model"),
        lambda: (conv(), image),
        "[8@data,8,8,32@model]",
    ),
    ("cross-entropy, classes whole", cross_entropy, lambda: (x, ids), "[8@data]"),
    ("cross-entropy, auto_axes", auto(cross_entropy, "data"), lambda: (h, ids), "[8@data]"),
    ("cross-entropy, one-hot", one_hot, lambda: (h, ids), "[8@data]"),
    ("checkpoint", jax.checkpoint(jnp.sin), lambda: (h,), "[8@data,32@model]"),
    ("vmap", jax.vmap(jnp.sin), lambda: (h,), "[8@data,32@model]"),
    ("scan, whole", lambda x: sum_by_rows(jax.reshard(x, P())), lambda: (x,), "[]"),
    ("sort, auto_axes", auto(sort, "data", None), lambda: (h,), "[8@data,32]"),
    ("cumsum, auto_axes", auto(cumsum, "data", None), lambda: (h,), "[8@data,32]"),
    ("top-k, auto_axes", auto(largest, "data", None), lambda: (h,), "[8@data,2]"),
    (
        "sort, resharded",
        lambda h: sort(jax.reshard(h, P("data", None))),
        lambda: (h,),
        "[8@data,32]",
    ),
    ("segment_sum, auto_axes", auto(by_segment), lambda: (x, ids), "[8,32]"),
]
if jax.__version_info__ < (0, 11):  # its gradient raised
    ACCEPTED = [row for row in ACCEPTED if row[0] != "sort, resharded"]

# what, the function, what makes its inputs, words of the error
RAISING = [
    ("Linear, row-parallel", call, lambda: (row(), h), "Contracting"),
    *[
        (
            f"Embed {spec}",
            call,
            lambda s=spec: (embed(*s), ids),
            "Use `.at[...].get(out_sharding=)`",
        )
        for spec in [(None, None), (None, "model"), ("model", None)]
    ],
    ("attention", call, lambda: (attention(), x_BSD), "Contracting"),
    ("Conv", call, lambda: (conv(), image), "conv_general_dilated"),
    ("cross-entropy", cross_entropy, lambda: (h, ids), "Use `.at[...].get(out_sharding=)`"),
    ("scan", sum_by_rows, lambda: (x,), "should be replicated"),
    ("sort", sort, lambda: (h,), "nsharded"),
    ("cumsum", cumsum, lambda: (h,), "nsharded"),
    ("top-k", largest, lambda: (h,), "nsharded"),
    ("segment_sum", by_segment, lambda: (x, ids), "set/add/mul"),
]


def by_name(rows):
    return [pytest.param(*rest, id=name) for name, *rest in rows]


@pytest.mark.parametrize("function, make, expected", by_name(ACCEPTED))
def test_it_is_accepted_forward_and_backward(page, function, make, expected):
    """The result has this type, and each gradient has the type of what it is the gradient of."""
    inputs = make()
    assert type_of(function, *inputs) == "float32" + expected
    about = [i for i, it in enumerate(inputs) if getattr(it, "dtype", None) != "int32"]

    def loss(*inputs):
        return (function(*inputs) ** 2).sum()

    gradients = jax.eval_shape(jax.grad(loss, about), *inputs)
    for gradient, i in zip(gradients, about, strict=True):
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(inputs[i]), strict=True):
            assert str(jax.typeof(one)) == str(jax.typeof(other))


@pytest.mark.parametrize("function, make, words", by_name(RAISING))
def test_it_raises_an_error_without_a_sharding(page, function, make, words):
    """As it is, the part of the model raises an error, of these words."""
    assert words in message(jax.eval_shape, function, *make())


@pytest.mark.parametrize("spec", [(None, None), (None, "model"), ("model", None)])
def test_an_embedding_attends_as_it_is(page, spec):
    """Logits from the table of an embedding, which then need no sharding from you."""
    found = type_of(lambda embed, x: embed.attend(x), embed(*spec), x)
    assert found.startswith("float32[8@data,64")


def test_adamw_with_clipping_keeps_types(page):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    updates, _ = jax.eval_shape(lambda h: optimizer.update(h, optimizer.init(h), h), h)
    assert str(jax.typeof(updates)) == "float32[8@data,32@model]"


def noisy(x, **said):
    return x + jax.random.normal(jax.random.key(0), x.shape, **said)


def dropped(x):
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0))(x)


@compiled_for_cpu
@pytest.mark.parametrize(
    "function, whole",
    [
        pytest.param(noisy, True, id="random"),
        pytest.param(partial(noisy, out_sharding=P("data", "model")), False, id="random, said"),
        pytest.param(dropped, False, id="dropout"),
    ],
)
def test_random_is_whole_on_every_device_and_dropout_is_not(page, function, whole):
    """Compiled for CPU, jax.random makes the whole array, dropout and out_sharding= only a piece."""
    program = jax.jit(function).lower(like((512, 4096), "data", "model")).compile()
    assert ("[512,4096]" in program.as_text()) == whole


def test_the_loss_with_integer_labels_is_handed_over(page):
    """As it is it raises; handed over, it has the rows along data, and the right values."""
    assert "ShardingTypeError" in message(page.cross_entropy, page.logits_BV, page.labels_B)
    assert type_of(page.by_compiler, page.logits_BV, page.labels_B) == "float32[64@data]"
    host = np.random.default_rng(0).normal(size=(8, 32)).astype("float32")
    whole, sharded = put(host, MESH, "data", None), put(host, MESH, "data", "model")
    ids = put(np.arange(8, dtype="int32"), MESH, "data")
    found = page.by_compiler(sharded, ids)
    np.testing.assert_allclose(found, page.cross_entropy(whole, ids), rtol=1e-5)


# auto_axes around a module


def running_mean(step, h_BF):
    """The mean of a new layer, after one call."""
    norm = nnx.BatchNorm(32, use_running_average=False, rngs=nnx.Rngs(0))
    step(norm, h_BF)
    return norm.mean[...]


def with_whole_features(norm, h_BF):
    normed_BF = norm(jax.reshard(h_BF, P("data", None)))
    return jax.reshard(normed_BF, P("data", "model"))


def test_the_running_mean_of_sharded_features_changes_its_type(page):
    """From 32 to 32@model; between reshards it stays 32."""
    assert type_of(partial(running_mean, call), h) == "float32[32@model]"
    assert type_of(partial(running_mean, with_whole_features), h) == "float32[32]"


def test_a_scan_over_steps_raises_for_a_running_mean_that_changes_its_type(page):
    """The carry's type differs after a step; between reshards it does not."""

    def steps(step, h_BF):
        def one(mean, _):
            norm = nnx.BatchNorm(32, use_running_average=False, rngs=nnx.Rngs(0))
            norm.mean[...] = mean
            step(norm, h_BF)
            return norm.mean[...], None

        return jax.lax.scan(one, jnp.zeros(32), length=2)[0]

    assert "carry" in message(jax.eval_shape, partial(steps, call), h)
    assert type_of(partial(steps, with_whole_features), h) == "float32[32]"


def test_through_auto_axes_the_running_mean_is_lost(page):
    """It is zero after a call, without a message; between reshards it is a hundredth of the mean."""
    host = np.random.default_rng(0).normal(size=(8, 32)).astype("float32")
    h_BF = put(host, MESH, "data", "model")
    right = 0.01 * host.mean(axis=0)  # momentum 0.99, from zero
    found = jax.jit(partial(running_mean, with_whole_features))(h_BF)
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-6)
    assert right.all()
    assert not jax.jit(partial(running_mean, auto(call, "data", "model")))(h_BF).any()


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
