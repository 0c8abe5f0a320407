"""The page "Choosing a table for your model"."""

import collections
import functools
import inspect
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt
from many_devices.logical import (
    Attention,
    Config,
    Model,
    Rules,
    attend,
    large,
    make,
    make_model,
    mesh_of,
    tiny,
)
from many_devices.training import sent_mb
from pages import compiled_for_cpu, source_of
from steps_by_table import IMAGES, RING, TOKENS_OF_AN_IMAGE, compiled, sent

PAGE = "06a-choosing-tables"
P = jax.P


def step_of(page, config, name, B):
    return compiled(config, page.tables[name], page.meshes[name].devices.shape, B)


def wire(page, config, name, B):
    """What one device sends in a step that is compiled here."""
    return 1e6 * sent_mb(step_of(page, config, name, B)[0])


def bytes_of(config, rules, mesh):
    """Bytes of the weights on one device, from a list of shapes and names."""
    D, F, V = (config.D, "embed"), (config.F, "hidden"), (config.V, "vocab")
    H, C = (config.H, "heads"), (config.C, "head_size")
    ends = [[(config.I, None), D], [(config.S, None), D], [D, V]]
    attention = [[D, H, C]] * 3 + [[H, C, D], [D]]
    block = attention + [[D], [D, F], [F], [F, D], [D]]
    total = 0
    for dimensions in ends + block * config.L:
        numbers = 1
        for size, name in dimensions:
            axes = jax.tree.leaves(getattr(rules, name)) if name else []
            numbers *= size // math.prod(mesh.shape[axis] for axis in axes)
        total += 4 * numbers
    return total


# The model and its names


def test_queries_are_named_embed_heads_and_head_size(page):
    """With embed along data and heads along model, w_q_DHC is sharded in both, head_size in none."""
    with jax.set_mesh(page.meshes["FSDP x tensor"]):
        layer = Attention(tiny, Rules(embed="data", heads="model"), nnx.Rngs(0))
    assert layer.w_q_DHC.sharding.spec == P("data", "model", None)
    assert layer.w_q_DHC.sharding.shard_shape(layer.w_q_DHC.shape) == (48, 2, 12)


def test_attention_computes_what_flax_computes(page):
    """With the same kernels, Attention gives the numbers of nnx.MultiHeadAttention."""
    with jax.set_mesh(page.meshes["one device"]):
        ours = Attention(tiny, Rules(), nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(tiny.H, tiny.D, decode=False, rngs=nnx.Rngs(0))
    for part, name in [
        (theirs.query, "w_q_DHC"),
        (theirs.key, "w_k_DHC"),
        (theirs.value, "w_v_DHC"),
        (theirs.out, "w_o_HCD"),
    ]:
        part.kernel.set_value(np.asarray(getattr(ours, name)))  # biases are zero
    x_BSD = np.random.default_rng(0).normal(size=(2, tiny.S, tiny.D)).astype("float32")
    np.testing.assert_allclose(ours(x_BSD), theirs(x_BSD), atol=1e-5)


BY_HAND = {  # the spec of each weight, by the letters of its dimensions; those left out are whole
    "one device": {},
    "data parallel": {},
    "FSDP": {
        "ID": P(None, "data"),
        "SD": P(None, "data"),
        "D": P("data"),
        "DHC": P("data", None, None),
        "HCD": P(None, None, "data"),
        "DF": P("data", None),
        "FD": P(None, "data"),
        "DV": P("data", None),
    },
    "tensor parallel": {
        "F": P("model"),
        "DHC": P(None, "model", None),
        "HCD": P("model", None, None),
        "DF": P(None, "model"),
        "FD": P("model", None),
        "DV": P(None, "model"),
    },
    "FSDP x tensor": {
        "ID": P(None, "data"),
        "SD": P(None, "data"),
        "D": P("data"),
        "F": P("model"),
        "DHC": P("data", "model", None),
        "HCD": P("model", None, "data"),
        "DF": P("data", "model"),
        "FD": P("model", "data"),
        "DV": P("data", "model"),
    },
}


def abstract_weights(make, mesh):
    return nnx.to_flat_state(nnx.get_abstract_model(make, mesh)[1])


def test_each_table_places_every_weight_as_written_by_hand(page):
    """Under each table all 13 weights have the specs that the picture shows, as Flax's context too."""

    class Named(Model):  # keeps names, for Flax's context to look up
        def __init__(self):
            super().__init__(tiny, lambda *names: names, nnx.Rngs(0))

    assert page.tables.keys() == BY_HAND.keys() == page.meshes.keys()
    for name, rules in page.tables.items():
        mesh = page.meshes[name]
        by_object = abstract_weights(functools.partial(make_model, tiny, rules), mesh)
        with nnx.logical_axis_rules(tuple(vars(rules).items())):
            by_context = abstract_weights(Named, mesh)
        assert len(by_object) == len(by_context) == 13
        for (path, ours), (_, flax) in zip(by_object, by_context, strict=True):
            letters = path[-1].split("_")[-1]  # w_q_DHC: DHC
            spec = BY_HAND[name].get(letters, P())
            spec = P(None, *spec) if path[0] == "blocks" else spec  # the axis of layers
            wanted = jax.NamedSharding(mesh, spec)
            assert ours.sharding.is_equivalent_to(wanted, ours.ndim), (name, path)
            assert flax.sharding.is_equivalent_to(wanted, ours.ndim), (name, path)


# What a device holds


def test_a_device_holds_the_sizes_divided_by_the_axes_of_the_table(page):
    """Bytes of the large model under each table: those of its shapes, divided where a row says so."""
    for name, rules in page.tables.items():
        assert page.held[name] == bytes_of(large, rules, page.meshes[name]), name


def test_momentum_is_as_large_as_the_weights(page):
    """The optimizer holds one running average for each weight, and a counter of four bytes."""
    for name, rules in page.tables.items():
        for config in (tiny, large):
            build = functools.partial(make, config, rules)
            _, state = nnx.get_abstract_model(build, page.meshes[name])
            weights, optimizer = (ms.memory(part).bytes_per_device for part in (state[0], state[1]))
            assert weights == bytes_of(config, rules, page.meshes[name])
            assert optimizer == weights + 4


def test_which_table_fits(page):
    """Of 6.4 billion weights a device needs 77.3 GB in all, or 9.7; with AdamW 103.1 or 12.9."""
    whole, sharded = ["one device", "data parallel"], ["FSDP", "tensor parallel", "FSDP x tensor"]
    assert f"{page.held['one device'] / 4e9:.1f}" == "6.4"
    for names, momentum, adamw in [(whole, "77.3", "103.1"), (sharded, "9.7", "12.9")]:
        for name in names:
            assert f"{3 * page.held[name] / 1e9:.1f}" == momentum
            assert f"{4 * page.held[name] / 1e9:.1f}" == adamw
    assert 3 * page.held["one device"] / 1e9 > 64  # GB of an H100 that a program can use
    for name in sharded:
        assert page.held[name] / page.held["one device"] == pytest.approx(1 / 8, rel=0.001)


@compiled_for_cpu
@pytest.mark.parametrize("name", ["FSDP", "FSDP x tensor"])
def test_the_program_asks_for_that_share(page, name):
    """The step's arguments are the weights, as much for momentum, its counter and a share of images."""
    images = IMAGES * (large.S * large.I + 1) * 4  # pixels and labels, four bytes each
    program, mesh = step_of(page, large, name, IMAGES)
    share = images // mesh.shape["data"]
    assert ms.memory(program).arguments == 2 * page.held[name] + 4 + share


# What a table sends


def payload(page, name, kind, axis):
    program, mesh = step_of(page, tiny, name, 32)
    return ms.collectives(program, mesh).by("kind", "axes").bytes(kind, (axis,))


@compiled_for_cpu
def test_data_parallelism_adds_up_every_gradient(page):
    """Four bytes for each weight, and the loss, in all-reduces; one device sends nothing."""
    weights = bytes_of(tiny, Rules(), mesh_of(1, 1))
    assert payload(page, "data parallel", "all-reduce", "data") == weights + 4
    for compiler in ("gpu", "tpu"):
        assert sent("names-data", compiler) == pytest.approx(2 * RING * weights, rel=1e-4)
    assert wire(page, tiny, "one device", 32) == 0


@compiled_for_cpu
def test_fsdp_gathers_weights_twice_and_adds_gradients_up(page):
    """Compiled for CPU, it gathers nearly all weights twice, and its all-reduces are over data."""
    weights = bytes_of(tiny, Rules(), mesh_of(1, 1))
    assert 0.95 < payload(page, "FSDP", "all-gather", "data") / (2 * weights) < 1
    assert payload(page, "FSDP", "all-reduce", "model") == 0
    for compiler, share in (("cpu", 1), ("gpu", 1), ("tpu", 0.5)):  # in bfloat16
        rows = stored_program("names-fsdp")[compiler]["moves"]
        gathered = sum(row["payload"] for row in rows if row["kind"] == "all-gather")
        assert gathered == pytest.approx(2 * weights * share, rel=0.02)


@compiled_for_cpu
def test_tensor_parallelism_adds_up_activations(page):
    """Compiled for CPU, six activations of D numbers a row and layer, in all-reduces over model."""
    program, mesh = step_of(page, tiny, "tensor parallel", 32)
    assert ms.collectives(program, mesh).kinds == {"all-reduce"}
    rows = 32 * tiny.S
    sums = 6 * tiny.L * tiny.D * rows * 4
    assert wire(page, tiny, "tensor parallel", 32) == pytest.approx(2 * RING * sums, rel=0.01)


# The batch decides

SUMS = {"gpu": 4, "tpu": 4, "cpu": 6}  # of tensor parallelism, a layer
STORED = {"FSDP": "names-pinned", "tensor parallel": "names-few"}  # at 64 images


def test_the_table_of_bytes_sent_is_that_of_the_stored_programs():
    """At 64 images, for H100 and TPU v5e, FSDP sends 67.65 and 45.11 GB, tensor parallelism 3.76."""
    text = source_of(PAGE).read_text("utf-8")
    for row, name in (("FSDP", "names-pinned"), ("tensor parallelism", "names-few")):
        gpu, tpu = (f"{sent(name, compiler) / 1e9:.2f}" for compiler in ("gpu", "tpu"))
        assert f"\n| {row} | {gpu} | {tpu} |\n" in text


def test_the_tpu_gathers_the_weights_in_bfloat16():
    """FSDP's gathers are in bfloat16 for TPU v5e, and in float32 for H100."""
    for compiler, dtype in (("tpu", "bfloat16"), ("gpu", "float32")):
        rows = stored_program("names-pinned")[compiler]["moves"]
        gathers = [row for row in rows if row["kind"] == "all-gather"]
        whole = sum(row["payload"] for row in gathers)
        assert sum(row["payload"] for row in gathers if row["dtype"] == dtype) > 0.99 * whole


@compiled_for_cpu
def test_the_stored_programs_for_cpu_are_those_that_are_compiled_here(page):
    """Compiled here, the steps at 64 images send what is stored of them."""
    for name, key in STORED.items():
        assert wire(page, large, name, IMAGES) == pytest.approx(sent(key, "cpu"))


@compiled_for_cpu
def test_fsdp_sends_the_same_at_any_batch(page):
    """Compiled for CPU, 90.2 GB at 64 and at 1,024 images; for H100 the same at eight times as many."""
    few = wire(page, large, "FSDP", IMAGES)
    assert f"{few / 1e9:.1f}" == "90.2"
    assert 1e9 * page.sent_gb["FSDP"] == pytest.approx(few, rel=1e-3)
    for compiler in ("cpu", "gpu"):
        stored = sent("names-pinned", compiler), sent("names-pinned-512", compiler)
        assert stored[1] == pytest.approx(stored[0], rel=1e-3)


@compiled_for_cpu
def test_tensor_parallelism_reaches_fsdp_at_1024_images(page):
    """Compiled for CPU, 1,024 images send sixteen times what 64 do, as much as with FSDP: 4 D tokens."""
    few = wire(page, large, "tensor parallel", IMAGES)
    many = 1e9 * page.sent_gb["tensor parallel"]
    assert many == pytest.approx(16 * few, rel=1e-3)
    assert many == pytest.approx(1e9 * page.sent_gb["FSDP"], rel=1e-3)
    assert 1024 * TOKENS_OF_AN_IMAGE == 4 * large.D


@compiled_for_cpu
def test_the_cpu_sums_queries_keys_and_values_one_by_one(page):
    """Six sums in a layer: three of them are of the gradients that enter the attention."""
    program, mesh = step_of(page, large, "tensor parallel", IMAGES)
    in_layers = [move for move in ms.collectives(program, mesh) if move.executions == large.L]
    assert {move.shape for move in in_layers} == {(IMAGES, large.S, large.D)}
    lines = collections.Counter(move.source_line for move in in_layers)
    assert sorted(lines.values()) == [1, 1, 1, 3] and len(in_layers) == SUMS["cpu"]
    number = int(lines.most_common(1)[0][0].split(":")[1])
    source, first = inspect.getsourcelines(attend)
    assert "q_BSHC = " in source[number - first]


def test_the_cpu_uses_no_reduce_scatter_and_the_others_do():
    """Under FSDP, the compiler for CPU all-reduces gradients; those for H100 and TPU v5e scatter them."""
    kinds = {
        compiler: {row["kind"] for row in stored_program("names-pinned")[compiler]["moves"]}
        for compiler in SUMS
    }
    assert "reduce-scatter" in kinds["gpu"] and "reduce-scatter" in kinds["tpu"]
    assert "reduce-scatter" not in kinds["cpu"]


@pytest.mark.parametrize(
    "compiler, images, widths", [("gpu", 1152, 4.5), ("tpu", 768, 3), ("cpu", 1024, 4)]
)
def test_tensor_parallelism_sends_less_up_to_so_many_images(compiler, images, widths):
    """Both send the same at 1,152 images on H100, 768 on TPU v5e and 1,024 on CPU: 4.5 D, 3 D, 4 D."""
    times = sent("names-pinned", compiler) / sent("names-few", compiler)
    assert times * IMAGES == pytest.approx(images, rel=0.01)
    assert images * TOKENS_OF_AN_IMAGE == widths * large.D


def test_so_many_images_do_not_fit_a_tpu_v5e():
    """With FSDP not even 512 images fit; with tensor parallelism 64 take 95% of the memory."""
    assert "exceeds available HBM (15.75G)" in stored_program("names-pinned-512")["tpu"]["refused"]
    few = stored_program("names-few")["tpu"]["memory"]["peak"]
    assert 0.95 < few / (15.75 * 2**30) < 1


@pytest.mark.parametrize("compiler", SUMS)
def test_what_tensor_parallelism_moves_in_a_layer(compiler):
    """Four sums of D numbers for each token in a layer on H100 and TPU v5e, and six on CPU."""
    tokens = IMAGES * large.S
    predicted = RING * 4 * SUMS[compiler] * 2 * large.L * large.D * tokens
    assert sent("names-few", compiler) == pytest.approx(predicted, rel=0.01)


def test_what_tensor_parallelism_sends_grows_with_the_batch():
    """At twice the batch, tensor parallelism sends twice the bytes (of the small model)."""
    for compiler in ("cpu", "tpu", "gpu"):
        ratio = sent("names-tensor-64", compiler) / sent("names-tensor", compiler)
        assert ratio == pytest.approx(2, rel=0.02)


def test_tensor_parallelism_needs_more_memory():
    """For H100 9.1 GB of temporaries at 64 images, and 7.3 with FSDP."""
    needs = [
        stored_program(name)["gpu"]["memory"]["temporaries"] / 1e9
        for name in ("names-few", "names-pinned")
    ]
    assert [f"{size:.1f}" for size in needs] == ["9.1", "7.3"]


# head_size along model

LONG = Config(L=2, D=1024, F=4096, H=8, C=128, S=2048)  # of the stored programs


@compiled_for_cpu
def test_head_size_may_take_a_free_axis(page):
    """head_size goes along any axis that its weight has free, without a change of the model."""
    rules, mesh = Rules(batch="data", embed="data", head_size="model"), mesh_of(2, 4)
    _, state = nnx.get_abstract_model(lambda: make(tiny, rules), mesh)
    attention = state[0]["blocks"]["attention"]
    assert attention["w_q_DHC"].sharding.spec == jax.P(None, "data", None, "model")
    assert attention["w_o_HCD"].sharding.spec == jax.P(None, None, "model", "data")


def test_head_size_adds_up_scores_and_heads_none():
    """Compiled for CPU, head_size along model adds up the S x S scores, twice in each layer."""
    by_size, mesh = compiled(LONG, Rules(head_size="model"), (1, 8), 8)
    by_heads, _ = compiled(LONG, Rules(heads="model"), (1, 8), 8)
    summed = [move for move in ms.collectives(by_size, mesh) if move.shape[-2:] == (LONG.S, LONG.S)]
    assert summed and all(move.kind == "all-reduce" for move in summed)
    scores = sum(move.payload_bytes * move.executions for move in summed)
    assert scores == 2 * LONG.L * 8 * LONG.H * LONG.S**2 * 4  # eight images, four bytes
    assert all(LONG.S not in move.shape[-1:] for move in ms.collectives(by_heads, mesh))


def test_head_size_divides_the_weights_as_evenly():
    """As much of the weights on each device as with heads along model."""
    tables = Rules(heads="model"), Rules(head_size="model")
    by_heads, by_size = (bytes_of(LONG, rules, mesh_of(1, 8)) for rules in tables)
    assert by_heads == by_size


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_what_head_size_along_model_sends(compiler):
    """17 times what heads along model send, on H100 and TPU v5e: the scores, twice in each layer."""
    by_size, by_heads = (sent(key, compiler) for key in ("names-head-size", "names-heads"))
    assert round(by_size / by_heads) == 17
    scores = 8 * LONG.H * LONG.S**2 * 4
    assert by_size - by_heads == pytest.approx(2 * RING * 2 * LONG.L * scores, rel=1e-3)


def test_six_heads_work_with_a_model_axis_of_two(page):
    """A mesh whose model axis divides the heads, such as mesh_of(4, 2), shards six of them."""
    six = replace(tiny, H=6)
    mesh = mesh_of(4, 2)
    build = functools.partial(make, six, Rules(heads="model"))
    _, state = nnx.get_abstract_model(build, mesh)
    kernel = state[0]["blocks"]["attention"]["w_q_DHC"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 96, 3, 12)
    not_divided = jax.NamedSharding(page.meshes["tensor parallel"], kernel.sharding.spec)
    assert "divi" in attempt(jax.device_put, np.zeros(kernel.shape), not_divided)
