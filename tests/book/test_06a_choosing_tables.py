"""The page "Choosing a table for your model"."""

import functools
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
    large,
    make,
    make_model,
    mesh_of,
    step_program,
    tiny,
)
from many_devices.training import sent_mb
from pages import compiled_for_cpu
from traced import equations

PAGE = "06a-choosing-tables"
P = jax.P
IMAGES = 64  # of the stored programs of the large model
TOKENS_OF_AN_IMAGE = 16
RING = 7 / 8  # of the whole, which a device of eight sends in a gather or a reduce-scatter


def sent(name, compiler):
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"])


@functools.cache
def compiled(config, rules, shape, B):
    """The step, compiled here, and its mesh."""
    mesh = mesh_of(*shape)
    return step_program(config, rules, mesh, B), mesh


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


def test_the_model_constrains_the_output_of_each_block(page):
    """By the table: what goes into the first block, what leaves each, the logits; `Model` has none."""
    rules, mesh = page.tables["FSDP x tensor"], page.meshes["FSDP x tensor"]
    x_BSI = np.zeros((8, tiny.S, tiny.I), "float32")
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(functools.partial(make_model, tiny, rules))
        jaxpr = jax.make_jaxpr(type(model).__call__)(model, x_BSI).jaxpr
        plain = jax.make_jaxpr(Model.__call__)(model, x_BSI).jaxpr
    found = [
        (tuple(eqn.params["sharding"].spec), eqn.outvars[0].aval.shape, times)
        for eqn, times in equations(jaxpr, "sharding_constraint")
    ]
    B, S, D, V, L = 8, tiny.S, tiny.D, tiny.V, tiny.L
    batch = ("data", None, None), (B, S, D)
    assert found == [(*batch, 1), (*batch, L), (("data", "model"), (B, V), 1)]
    assert not list(equations(plain, "sharding_constraint"))


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
    assert 0.75 * 80 < 3 * page.held["one device"] / 1e9 and 80 - 3 * page.held["one device"] / 1e9 < 3
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


@compiled_for_cpu
def test_the_stored_programs_for_cpu_are_those_that_are_compiled_here(page):
    """Compiled here, the three steps at 64 images send what is stored of them."""
    steps = [(large, "FSDP"), (page.free, "FSDP"), (large, "tensor parallel")]
    for (config, name), key in zip(steps, page.at_64_images.values(), strict=True):
        assert wire(page, config, name, IMAGES) == pytest.approx(sent(key, "cpu"))


# The batch decides


@compiled_for_cpu
def test_with_pins_fsdp_sends_the_same_at_any_batch(page):
    """Compiled for CPU, 90.2 GB at 64 and at 1,024 images, within a thousandth."""
    few, many = (wire(page, large, "FSDP", B) for B in (64, 1024))
    assert f"{few / 1e9:.1f}" == "90.2" and many == pytest.approx(few, rel=1e-3)


@compiled_for_cpu
def test_without_pins_and_with_tensor_parallelism_bytes_grow_with_the_batch(page):
    """Compiled for CPU, 1,024 images send sixteen times what 64 do."""
    for config, name in [(page.free, "FSDP"), (large, "tensor parallel")]:
        few, many = (wire(page, config, name, B) for B in (64, 1024))
        assert many == pytest.approx(16 * few, rel=1e-3)


@compiled_for_cpu
def test_compiled_for_cpu_both_send_as_much_at_512_images(page):
    """At 64 images FSDP sends eight times as much with pins as without, so at 512 the same."""
    pinned, free = (wire(page, config, "FSDP", 64) for config in (large, page.free))
    assert round(pinned / free) == 8 and round(64 * pinned / free) == 512
    of_512 = 1e6 * page.of_512
    assert of_512 == pytest.approx(pinned, rel=0.01) and f"{of_512 / 1e9:.1f}" == "90.2"
    assert 512 == 2 * large.D / large.S


def test_for_h100_both_send_as_much_at_384_images(page):
    """For H100 it is six times at 64 images, so 384: 6,144 tokens, 1.5 D."""
    pinned, free = sent("names-pinned", "gpu"), sent("names-free", "gpu")
    assert (f"{pinned / 1e9:.1f}", f"{free / 1e9:.1f}") == ("67.7", "11.3")
    assert f"{pinned / free:.2f}" == "6.00"
    assert 384 * TOKENS_OF_AN_IMAGE == 6_144 == 1.5 * large.D


@compiled_for_cpu
def test_without_pins_no_weights_are_gathered(page):
    """Without pins next to no weights move, and the widest sum is of h, for all images."""
    program, mesh = step_of(page, page.free, "FSDP", 64)
    moves = ms.collectives(program, mesh)
    gathered = sum(
        move.payload_bytes * move.executions for move in moves if move.kind == "all-gather"
    )
    assert gathered < 1e-4 * bytes_of(large, Rules(), mesh_of(1, 1))
    widest = max(moves, key=lambda move: move.payload_bytes)
    assert widest.kind == "all-reduce" and widest.shape == (64, large.S, large.F)


def test_without_pins_a_step_needs_more_memory():
    """For H100 15.0 GB of temporaries without pins, 7.3 with them, and 9.1 with tensor parallelism;
    TPU v5e refuses the first."""
    needs = {
        name: stored_program(name)["gpu"]["memory"]["temporaries"] / 1e9
        for name in ("names-pinned", "names-free", "names-few")
    }
    assert [f"{size:.1f}" for size in needs.values()] == ["7.3", "15.0", "9.1"]
    words = stored_program("names-free")["tpu"]["refused"]
    assert "temporaries (19.83G) exceeds available HBM (15.75G)" in words


def test_the_lines_cross_where_the_page_says(page):
    """For H100 FSDP with pins is flat; the others reach it at 384 and at 1,152 images, 4.5 D tokens."""
    pinned, free, tensor = (dict(line) for line in page.lines.values())
    assert pinned[64] == pinned[1152] == pytest.approx(sent("names-pinned", "gpu") / 1e9)
    assert free[384] == pytest.approx(pinned[384], rel=0.01)
    assert tensor[1152] == pytest.approx(pinned[1152], rel=0.01)
    assert 1_152 * TOKENS_OF_AN_IMAGE == 4.5 * large.D
    assert tensor[64] < free[64] < pinned[64]


# Why the lines cross: numbers that move for a kernel of D x n, by compiler
KERNEL = {"gpu": 3, "tpu": 2, "cpu": 4}  # times D x n, with pins
SUMS = {"gpu": 4, "tpu": 4, "cpu": 6}  # of tensor parallelism, a layer


@pytest.mark.parametrize("compiler", KERNEL)
def test_what_pins_move_for_each_kernel(compiler):
    """With pins a kernel moves 3 D n numbers on H100, 2 D n on TPU v5e and 4 D n on CPU."""
    kernels = large.L * 12 * large.D**2  # numbers in the blocks' kernels
    assert large.F == 4 * large.D
    predicted = RING * 4 * KERNEL[compiler] * kernels
    assert sent("names-pinned", compiler) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("compiler", ["gpu", "cpu"])
def test_what_moves_without_pins_for_each_kernel(compiler):
    """Without pins it is one all-reduce of n numbers for each token, on H100 and on CPU."""
    tokens, sides = IMAGES * large.S, large.L * 12 * large.D  # n in all: 12 D a layer
    predicted = RING * 4 * 2 * sides * tokens
    assert sent("names-free", compiler) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("compiler", SUMS)
def test_what_tensor_parallelism_moves_in_a_layer(compiler):
    """Four sums of D numbers for each token in a layer on H100 and TPU v5e, and six on CPU."""
    tokens = IMAGES * large.S
    predicted = RING * 4 * SUMS[compiler] * 2 * large.L * large.D * tokens
    assert sent("names-few", compiler) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("compiler, unpinned", [("gpu", 1.5), ("cpu", 2)])
def test_pins_pay_from_so_many_tokens(compiler, unpinned):
    """FSDP sends as much with pins as without at 1.5 D tokens on H100 and 2 D on CPU."""
    times = sent("names-pinned", compiler) / sent("names-free", compiler)
    tokens = times * IMAGES * TOKENS_OF_AN_IMAGE
    assert tokens / large.D == pytest.approx(unpinned, rel=0.01)
    assert KERNEL[compiler] / 2 == unpinned  # K D n = 2 n tokens


@pytest.mark.parametrize("compiler, widths", [("gpu", "4.5"), ("tpu", "3.0"), ("cpu", "4.0")])
def test_tensor_parallelism_sends_less_up_to_so_many_tokens(compiler, widths):
    """By bytes, tensor parallelism sends less than pinned FSDP below 4.5 D tokens on H100, 3 D on TPU
    v5e and 4 D on CPU: FSDP sends the same at any batch, tensor parallelism in proportion to it."""
    times = sent("names-pinned", compiler) / sent("names-few", compiler)
    tokens = times * IMAGES * TOKENS_OF_AN_IMAGE
    assert f"{tokens / large.D:.1f}" == widths
    assert f"{12 * KERNEL[compiler] / (2 * SUMS[compiler]):.1f}" == widths  # the formula


@pytest.mark.parametrize("compiler", ["cpu", "gpu"])
def test_what_pinned_fsdp_sends_does_not_grow_with_the_batch(compiler):
    """At eight times the batch, pinned FSDP sends the same bytes, within a thousandth."""
    few, many = sent("names-pinned", compiler), sent("names-pinned-512", compiler)
    assert many == pytest.approx(few, rel=1e-3)


def test_what_tensor_parallelism_sends_grows_with_the_batch():
    """At twice the batch, tensor parallelism sends twice the bytes (of the small model)."""
    for compiler in ("cpu", "tpu", "gpu"):
        ratio = sent("names-tensor-64", compiler) / sent("names-tensor", compiler)
        assert ratio == pytest.approx(2, rel=0.02)


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
