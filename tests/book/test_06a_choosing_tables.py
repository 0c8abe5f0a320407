"""The page "Choosing a table for your model"."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.logical import (
    Attention,
    Model,
    Rules,
    large,
    make,
    make_model,
    mesh_of,
    tiny,
)
from many_devices.training import sent_mb
from meshscope import _hlo as hlo
from pages import compiled_for_cpu, source_of
from steps_by_table import IMAGES, RING, TOKENS_OF_AN_IMAGE, compiled, sent

PAGE = "06a-choosing-tables"
P = jax.P


def step_of(page, config, name, B):
    rules, mesh = page.strategies[name]
    return compiled(config, rules, mesh.devices.shape, B)


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
    with jax.set_mesh(page.strategies["FSDP x tensor"][1]):
        layer = Attention(tiny, Rules(embed="data", heads="model"), nnx.Rngs(0))
    assert layer.w_q_DHC.sharding.spec == P("data", "model", None)
    assert layer.w_q_DHC.sharding.shard_shape(layer.w_q_DHC.shape) == (48, 2, 12)


def test_attention_computes_what_flax_computes(page):
    """With the same kernels, Attention gives the numbers of nnx.MultiHeadAttention."""
    with jax.set_mesh(page.strategies["one device"][1]):
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

    assert page.strategies.keys() == BY_HAND.keys()
    for name, (rules, mesh) in page.strategies.items():
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
    for name, (rules, mesh) in page.strategies.items():
        assert page.held[name] == bytes_of(large, rules, mesh), name


def test_momentum_is_as_large_as_the_weights(page):
    """The optimizer holds one running average for each weight, and a counter of four bytes."""
    for rules, mesh in page.strategies.values():
        for config in (tiny, large):
            build = functools.partial(make, config, rules)
            _, state = nnx.get_abstract_model(build, mesh)
            weights, optimizer = (ms.memory(part).bytes_per_device for part in (state[0], state[1]))
            assert weights == bytes_of(config, rules, mesh)
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
TIMES = {"gpu": 3, "tpu": 2, "cpu": 4}  # that FSDP moves a weight, with pins
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


@pytest.mark.parametrize("compiler", ["gpu", "cpu"])
def test_fsdp_sends_the_same_at_any_batch(compiler):
    """Within a thousandth at eight times the batch, with the activations constrained."""
    few, many = sent("names-pinned", compiler), sent("names-pinned-512", compiler)
    assert many == pytest.approx(few, rel=1e-3)


@pytest.mark.parametrize(
    "compiler, images, widths, tokens", [("gpu", 1152, 4.5, 18_432), ("tpu", 768, 3, 12_288)]
)
def test_tensor_parallelism_sends_less_up_to_so_many_images(compiler, images, widths, tokens):
    """Both send the same at 1,152 images on H100 and 768 on TPU v5e: 4.5 D and 3 D tokens."""
    times = sent("names-pinned", compiler) / sent("names-few", compiler)
    assert times * IMAGES == pytest.approx(images, rel=0.01)
    assert images * TOKENS_OF_AN_IMAGE == widths * large.D == tokens


def test_so_many_images_do_not_fit_a_tpu_v5e():
    """With FSDP not even 512 images fit; with tensor parallelism 64 take 95% of the memory."""
    assert "exceeds available HBM (15.75G)" in stored_program("names-pinned-512")["tpu"]["refused"]
    few = stored_program("names-few")["tpu"]["memory"]["peak"]
    assert 0.95 < few / (15.75 * 2**30) < 1


@pytest.mark.parametrize("compiler", TIMES)
def test_what_fsdp_moves_in_a_layer(compiler):
    """12 D² numbers, three times on H100, as if twice on TPU v5e (and four times on CPU)."""
    assert large.F == 4 * large.D == 4 * large.H * large.C  # four matrices of D², and two of 4 D²
    predicted = RING * 4 * TIMES[compiler] * large.L * 12 * large.D**2
    assert sent("names-pinned", compiler) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("compiler, widths", [("gpu", 4.5), ("tpu", 3)])
def test_both_are_equal_at_a_multiple_of_the_width(compiler, widths):
    """Of 36 D² = 8 D × tokens: 4.5 D on H100, and of 24 D² on TPU v5e: 3 D."""
    assert 12 * TIMES[compiler] / (2 * SUMS[compiler]) == widths


def test_in_bfloat16_with_gradients_in_float32_both_are_equal_at_6_d():
    """12 D² weights of 2 + 2 + 4 bytes, and 8 D numbers of 2 bytes for each token."""
    assert 12 * (2 + 2 + 4) / (2 * SUMS["gpu"] * 2) == 6


@pytest.mark.parametrize("compiler", SUMS)
def test_what_tensor_parallelism_moves_in_a_layer(compiler):
    """Four sums of D numbers for each token in a layer on H100 and TPU v5e (and six on CPU)."""
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


@compiled_for_cpu
def test_a_forward_sum_of_tensor_parallelism_is_harder_to_hide(page):
    """Forward, every matmul of a layer is before or after the sum; backward, some are neither."""
    program, _ = step_of(page, tiny, "tensor parallel", 32)
    parsed = hlo.parse(program.as_text())
    activation = f"f32[32,{tiny.S},{tiny.D}]"
    beside = {"forward": [], "backward": []}
    for lines in parsed.computations.values():
        sums = [one for one in lines.values() if one.opcode == "all-reduce"]
        for one in (one for one in sums if activation in one.line):
            after = {one.name}
            for line in lines.values():
                after |= {line.name} if after & set(line.operands) else set()
            before, names = set(), [one.name]
            while names:
                name = names.pop()
                if name not in before:
                    before.add(name)
                    names += [operand for operand in lines[name].operands if operand in lines]
            dots = {line.name for line in lines.values() if matmul(parsed, line)}
            way = "backward" if "transpose(" in one.line else "forward"
            beside[way].append(len(dots - before - after))
    assert beside["forward"] == [0, 0], beside
    assert beside["backward"] and any(beside["backward"]), beside


def matmul(parsed, line):
    """Is it one, or does it call a computation that holds one?"""
    within = [parsed.computations.get(name, {}) for _, name in line.called()]
    return line.opcode == "dot" or any(
        matmul(parsed, inner) for computation in within for inner in computation.values()
    )
