"""The page "Why many devices, and which strategy": bytes per weight, what is divided, what is sent."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import meshscope as ms
from pages import compiled_for_cpu, source_of

PAGE = "strategies"
P = jax.P
AUTO = jax.sharding.AxisType.Auto


# How many weights there are, and how many bytes


def weight_shapes():
    """{name: shape} of all weights of Llama 3.1 8B; the L layers are stacked in one array."""
    L, D, V = 32, 4096, 128_256
    F, H, K, C = 14336, 32, 8, 128
    return {
        "embed_VD": (V, D),
        "q_LDHC": (L, D, H, C),
        "k_LDKC": (L, D, K, C),
        "v_LDKC": (L, D, K, C),
        "o_LHCD": (L, H, C, D),
        "gate_LDF": (L, D, F),
        "up_LDF": (L, D, F),
        "down_LFD": (L, F, D),
        "norm1_LD": (L, D),
        "norm2_LD": (L, D),
        "norm_D": (D,),
        "unembed_DV": (D, V),
    }


def test_the_model_has_as_many_weights_as_published(page):
    """The sizes in Llama's configuration give the number of weights that the page states."""
    assert page.N == sum(math.prod(shape) for shape in weight_shapes().values()) == 8_030_261_248
    assert (page.L, page.D) == weight_shapes()["norm1_LD"]
    assert (page.D, page.V) == weight_shapes()["unembed_DV"]


def test_each_weight_takes_sixteen_bytes(page):
    """bfloat16 with masters keeps 16 bytes for each weight, of which 12 are masters and moments."""
    weight = jnp.zeros((64, 96), "bfloat16")
    master = jnp.zeros((64, 96), "float32")
    adam, _ = optax.adam(1e-3).init(master)
    kept = [weight, jnp.zeros_like(weight), master, adam.mu, adam.nu]
    assert ms.memory(kept).bytes_per_device == 16 * weight.size
    assert ms.memory(kept[2:]).bytes_per_device == 12 * weight.size
    assert sum(page.STATE.values()) == 16
    assert page.STATE["masters"] + page.STATE["moments"] == 12


def test_what_training_needs_on_one_device(page):
    """128.5 GB of state and 5.3 GB of activations, at one sequence of 4,096 tokens: 133.8 GB."""
    needs = page.state, page.activations, page.state + page.activations
    assert [f"{size / 1e9:.1f}" for size in needs] == ["128.5", "5.3", "133.8"]
    assert 80e9 < page.state and sum(needs[:2]) < 192e9


def test_the_hours_of_llama():
    """1.46 million hours are 167 years on one device and 59 days on 1,024."""
    text = source_of(PAGE).read_text("utf-8")
    hours = 1e6 * float(re.search(r"took ([\d.]+) million GPU-hours", text)[1])
    assert f"that is {hours / 24 / 365.25:.0f} years" in text
    assert f"On 1,024 GPUs it would be {hours / 24 / 1024:.0f} days" in text
    assert f"{hours / 24 / 365.25:.0f} {hours / 24 / 1024:.0f}" == "167 59"


def kept_by_the_forward_pass(tokens, remat):
    """Bytes that the forward pass of a stack of layers hands to the backward pass, without weights."""

    def stack(weights, x_TD):
        def layer(x_TD, weights):
            gate_DF, up_DF, down_FD = weights
            return x_TD + (jax.nn.silu(x_TD @ gate_DF) * (x_TD @ up_DF)) @ down_FD, None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x_TD, weights)[0]

    L, D, F = weight_shapes()["up_LDF"]
    up, down = (L, D, F), (L, F, D)
    weights = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (up, up, down)]
    x_TD = jax.ShapeDtypeStruct((tokens, D), "bfloat16")
    backward = jax.eval_shape(lambda *inputs: jax.vjp(stack, *inputs)[1], weights, x_TD)
    leaves = [
        leaf for leaf in jax.tree.leaves(backward) if leaf.shape not in (up, down) and leaf.ndim > 1
    ]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_layers_that_compute_again_keep_only_their_inputs(page):
    """With rematerialisation the input of each layer is kept; without, over ten times as much."""
    inputs = page.layer_inputs * 1000 / 4096  # for 1,000 tokens: unlike the shape of any weight
    assert kept_by_the_forward_pass(1000, remat=True) == inputs
    assert kept_by_the_forward_pass(1000, remat=False) > 10 * inputs


def test_logits_count_twice(page):
    """The logits are float32, and their gradient is as large."""
    logits_TV = jax.ShapeDtypeStruct((4096, page.V), "float32")
    gradient_TV = jax.eval_shape(jax.grad(lambda z_TV: jax.nn.logsumexp(z_TV)), logits_TV)
    both = sum(4 * a.size for a in (logits_TV, gradient_TV))
    assert page.activations - page.layer_inputs == both


# FSDP sends 6N, because it drops what it gathered

LAYERS, WIDTH = 8, 64


def fsdp_by_hand():
    """Loss and gradients of FSDP over eight devices, one gather in each layer of a scan, compiled."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))

    def layer(x_BD, w_piece_DD):
        w_DD = jax.lax.all_gather(w_piece_DD, "data", axis=0, tiled=True)
        return x_BD + jnp.tanh(x_BD @ w_DD), None

    def loss(w_LDD, x_BD):
        x_BD, _ = jax.lax.scan(jax.checkpoint(layer), x_BD, w_LDD)
        return jax.lax.pmean((x_BD**2).mean(), "data")

    pieces = P(None, "data")
    both = jax.shard_map(
        jax.value_and_grad(loss), mesh=mesh, in_specs=(pieces, P("data")), out_specs=(P(), pieces)
    )
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
    batch = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    return jax.jit(both).lower(weights, batch).compile()


def in_gathers(program):
    """What a device sends, in gathers of all weights, and the gathers alone."""
    one = 7 / 8 * 4 * LAYERS * WIDTH**2
    totals = ms.collectives(program).by("kind")
    weights = {kind: total.wire_bytes for kind, total in totals.items() if kind != "all-reduce"}
    return sum(weights.values()) / one, weights["all-gather"] / one


@compiled_for_cpu
def test_fsdp_sends_three_gathers_of_all_weights():
    """Weights gathered in both passes and gradients scattered: three gathers of all weights, 6N."""
    assert in_gathers(fsdp_by_hand()) == (3, 2)


# The largest layer


def test_the_largest_layer_is_the_embedding():
    """It has more weights than one of the 32 layers."""
    shapes = weight_shapes()
    layer = sum(math.prod(shape[1:]) for name, shape in shapes.items() if "_L" in name)
    assert layer < math.prod(shapes["embed_VD"])


# What the strategies hold, from described arrays

FEATURES = {  # the dimension that `model` shards: H, K, F or V
    "q_LDHC": 2,
    "k_LDKC": 2,
    "v_LDKC": 2,
    "o_LHCD": 1,
    "gate_LDF": 2,
    "up_LDF": 2,
    "down_LFD": 1,
    "embed_VD": 0,
    "unembed_DV": 1,
}


def held_by(mesh, dtype, *axes):
    """Bytes on one device: features over model, the largest other dimension over data."""
    total = 0
    for name, shape in weight_shapes().items():
        entries = [None] * len(shape)
        if "model" in axes and name in FEATURES:
            entries[FEATURES[name]] = "model"
        if "data" in axes:
            free = [i for i in range(len(shape)) if entries[i] is None]
            entries[max(free, key=lambda i: shape[i])] = "data"
        sharding = jax.NamedSharding(mesh, P(*entries))
        total += ms.memory(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).bytes_per_device
    return total


def activations_in(examples):
    """Bytes on one of eight devices for eight sequences: inputs in so many pieces, logits in eight."""
    tokens = 8 * 4096
    return 2 * tokens * 4096 * 32 / examples + 2 * 4 * tokens * 128_256 / 8


def in_the_picture():
    """{strategy: (divisors of batch, weights, gradients and optimizer, total)}, as the figure says."""
    rows = re.findall(
        r"(?:\. |: )([\w× -]+): batch (\S+), weights (\S+), gradients (\S+), optimizer (\S+), "
        r"in total ([\d.]+) GB",
        source_of(PAGE).read_text("utf-8"),
    )
    return {
        name: ([1 if share == "all" else int(share[2:]) for share in shares], total)
        for name, *shares, total in rows
    }


def described():
    """{strategy: (mesh, axes of weights and gradients, axes of masters and moments, of the batch)}"""
    flat = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AUTO,))
    tall = jax.sharding.AbstractMesh((8,), ("model",), axis_types=(AUTO,))
    both = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    return {
        "Data parallel": (flat, (), (), "data"),
        "ZeRO-1": (flat, (), ("data",), "data"),
        "FSDP": (flat, ("data",), ("data",), "data"),
        "Tensor parallel": (tall, ("model",), ("model",), None),
        "FSDP × tensor": (both, ("data", "model"), ("data", "model"), "data"),
    }


def test_the_column_of_state_is_what_described_arrays_hold(page):
    """Three formulas of the page, and tensor parallelism as FSDP but for its copies of the norms."""
    norms = sum(math.prod(size) for name, size in weight_shapes().items() if name not in FEATURES)
    needed = page.needed(8)
    needed["FSDP"] -= 4 * math.prod(weight_shapes()["embed_VD"])
    stored = {name.lower(): size - page.activations for name, size in needed.items()}
    for name, (mesh, kept, moments, _) in described().items():
        measured = 2 * held_by(mesh, "bfloat16", *kept) + 3 * held_by(mesh, "float32", *moments)
        more = measured - stored.get(name.lower(), stored["fsdp"])
        assert abs(more) < 1 or ("model" in kept and 0 < more <= 16 * norms)


def test_the_picture_shows_how_described_arrays_are_divided():
    """Weights, gradients, optimizer and batch of each strategy, all or 1/2 or 1/8."""
    assert list(in_the_picture()) == list(described())
    for name, (mesh, kept, moments, batch) in described().items():
        divisors, _ = in_the_picture()[name]
        whole = held_by(mesh, "float32")
        by_weights, by_moments = (
            whole / held_by(mesh, "float32", *axes) for axes in (kept, moments)
        )
        x_TD = jax.ShapeDtypeStruct(
            (8 * 4096, 4096), "bfloat16", sharding=jax.NamedSharding(mesh, P(batch))
        )
        by_batch = x_TD.size * 2 / ms.memory(x_TD).bytes_per_device
        measured = [by_batch, by_weights, by_weights, by_moments]
        assert divisors == pytest.approx(measured, rel=1e-3)


def test_the_sums_of_the_picture(page):
    """133.8, 49.4, 21.3, 28.9 and 24.6 GB of state and activations on each of eight devices."""
    for (examples, weights, gradients, optimizer), total in in_the_picture().values():
        state = (2 / weights + 2 / gradients + 12 / optimizer) * page.N
        assert f"{(state + activations_in(examples)) / 1e9:.1f}" == total
    totals = [total for _, total in in_the_picture().values()]
    assert totals == ["133.8", "49.4", "21.3", "28.9", "24.6"]
    assert activations_in(examples=8) == page.activations  # those of one sequence


def test_zero1_never_fits_in_16_gb(page):
    """Weights and gradients are 32.1 GB on any number of devices, here on 8 and 64."""
    for devices in (8, 64):
        mesh = jax.sharding.AbstractMesh((devices,), ("data",), axis_types=(AUTO,))
        whole = 2 * held_by(mesh, "bfloat16")
        pieces = 3 * held_by(mesh, "float32", "data")
        assert page.needed(devices)["ZeRO-1"] == pytest.approx(whole + pieces + page.activations)
        assert f"{whole / 1e9:.1f}" == "32.1"


# The table of conditions


def test_the_code_is_the_table_of_conditions(page):
    """16N + a, 4N + 12N/n + a, 16N/n + a + the embedding."""
    text = source_of(PAGE).read_text("utf-8")
    for formula in ("$16N + a$ bytes", "$4N + 12N/n + a$", "$16N/n + a$ + the largest layer"):
        assert text.count(f"| {formula} |") == 1
    N, a, embedding = page.N, page.activations, 4 * math.prod(weight_shapes()["embed_VD"])
    for n in (8, 64):
        assert page.needed(n) == pytest.approx(
            {
                "data parallel": 16 * N + a,
                "ZeRO-1": 4 * N + 12 * N / n + a,
                "FSDP": 16 * N / n + a + embedding,
            }
        )


def first_that_fits(page, devices, gb):
    sizes = page.needed(devices)
    return next((name for name, size in sizes.items() if size <= gb * 1e9), None)


def test_which_strategy_fits_the_8b_model(page):
    """On eight devices of 80 GB ZeRO-1, of 16 GB none; on 64 devices of 16 GB FSDP."""
    assert first_that_fits(page, 8, 80) == "ZeRO-1"
    assert first_that_fits(page, 8, 16) is None
    assert first_that_fits(page, 64, 16) == "FSDP"


# Tokens per device


@compiled_for_cpu
def test_a_weight_takes_six_operations_per_token():
    """A linear layer and both of its gradients, so FSDP's 6N bytes need C/W tokens on each device."""
    tokens, D, F = 64, 96, 128

    def gradients(x_TD, w_DF, dy_TF):
        y_TF, back = jax.vjp(jnp.matmul, x_TD, w_DF)
        return y_TF, back(dy_TF)

    sizes = [(tokens, D), (D, F), (tokens, F)]
    arrays = [jax.ShapeDtypeStruct(size, "float32") for size in sizes]
    program = jax.jit(gradients).lower(*arrays).compile()
    assert program.cost_analysis()["flops"] == pytest.approx(6 * tokens * D * F, rel=0.02)


C_AND_W = {  # operations and bytes per second of one device, from what the makers publish
    "TPU v5e": (197e12, 90e9),
    "TPU v5p": (459e12, 180e9),
    "H100, in a node": (989e12, 450e9),
    "H100, between nodes": (989e12, 400e9),
}
PASSES = {  # operations per weight and token, and bytes per weight, in each pass
    "data parallelism": [(2, 0), (4, 4)],  # gradients are summed
    "ZeRO-1": [(2, 2), (4, 2)],  # new weights are gathered, gradients are scattered
    "FSDP": [(2, 2), (4, 4)],  # weights are gathered twice, gradients are scattered
}


def test_how_many_tokens_are_enough():
    """In the slowest pass 2,600 tokens are enough on all machines, so 4,096 are, and 3,072; 768 are not on a TPU, along all its axes."""
    text = source_of(PAGE).read_text("utf-8")
    assert "| data parallelism, ZeRO-1, FSDP | 2,600 tokens |" in text
    for strategy, passes in PASSES.items():
        sent = sum(bytes_ for _, bytes_ in passes)
        assert re.search(rf"(?m)^- (Under )?{strategy} .*\${sent}N\$", text)
        needed = [
            max(bytes_ / operations for operations, bytes_ in passes) * C / W
            for C, W in C_AND_W.values()
        ]
        assert 2_500 < max(needed) <= 2_600 < 3_072 < 4_096
    for chip, axes in [("TPU v5e", 2), ("TPU v5p", 3)]:
        C, W = C_AND_W[chip]
        assert 786_432 / 1_024 == 768 == 3_072 / 4 < C / W / axes


def test_how_many_hidden_units_are_enough():
    """Two thirds of C/W, at most 1,700; each of four devices has more of the 8B model's 14,336."""
    units = [2 / 3 * C / W for C, W in C_AND_W.values()]
    assert max(units) == pytest.approx(1_700)
    text = source_of(PAGE).read_text("utf-8")
    assert "| tensor parallelism | 1,700 hidden units |" in text
    assert "has 14,336 of them, so if four devices split them, each has 3,584" in text
    assert weight_shapes()["up_LDF"][-1] == 14_336 == 4 * 3_584 > 4 * 1_700
