"""The page "Why many devices, and which strategy": bytes per weight, what is divided, what is sent."""

import math
import re
import types

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


def weight_shapes(model):
    """{name: shape} of all weights of a Llama 3; the L layers are stacked in one array."""
    L, D, V = model.layers, model.width, model.vocabulary
    F, H, K, C = {2048: (8192, 32, 8, 64), 4096: (14336, 32, 8, 128)}[D]
    shapes = {
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
    }
    if D == 4096:  # in the smaller model the output embedding is the input embedding
        shapes["unembed_DV"] = (D, V)
    return shapes


def test_the_models_have_as_many_weights_as_published(page):
    """The sizes in Llama's configurations give the numbers of weights that the page states."""
    for model in (page.llama_1b, page.llama_8b):
        assert model.weights == sum(math.prod(shape) for shape in weight_shapes(model).values())
    counts = page.llama_1b.weights, page.llama_8b.weights
    assert counts == (1_235_814_400, 8_030_261_248)


def test_both_columns_are_sixteen_bytes(page):
    """bfloat16 with masters and all in float32 keep 16 bytes for each weight, of which 12 or 8 are
    masters and moments."""
    for dtype, masters in (("bfloat16", 1), ("float32", 0)):
        weight = jnp.zeros((64, 96), dtype)
        master = jnp.zeros((64, 96), "float32")
        adam, _ = optax.adam(1e-3).init(master)
        kept = [weight, jnp.zeros_like(weight), *[master] * masters, adam.mu, adam.nu]
        assert ms.memory(kept).bytes_per_device == 16 * weight.size
        assert ms.memory(kept[2:]).bytes_per_device == (8 + 4 * masters) * weight.size
    assert sum(page.STATE.values()) == 16
    assert page.STATE["masters"] + page.STATE["moments"] == 12


def test_the_lead_of_the_bars(page):
    """24.2 GB for the 1B model and 133.8 GB for the 8B model, at one sequence of 4,096 tokens."""
    needs = []
    for model in (page.llama_1b, page.llama_8b):
        activations = page.layer_inputs(model, 4096) + page.logits(model, 4096)
        needs.append((sum(page.STATE.values()) * model.weights + activations) / 1e9)
    assert [f"{gb:.1f}" for gb in needs] == ["24.2", "133.8"]
    assert 16 < needs[0] < 80 < needs[1] < 192


def test_the_hours_of_llama():
    """1.46 million hours are 167 years on one device and 59 days on 1,024."""
    text = source_of(PAGE).read_text("utf-8")
    hours = 1e6 * float(re.search(r"took ([\d.]+) million hours", text)[1])
    assert f"that is {hours / 24 / 365.25:.0f} years" in text
    assert f"On 1,024 GPUs it would be {hours / 24 / 1024:.0f} days" in text
    assert f"{hours / 24 / 365.25:.0f} {hours / 24 / 1024:.0f}" == "167 59"


def kept_by_the_forward_pass(model, tokens, remat):
    """Bytes that the forward pass of a stack of layers hands to the backward pass, without weights."""

    def stack(weights, x_TD):
        def layer(x_TD, weights):
            gate_DF, up_DF, down_FD = weights
            return x_TD + (jax.nn.silu(x_TD @ gate_DF) * (x_TD @ up_DF)) @ down_FD, None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x_TD, weights)[0]

    L, D, F = weight_shapes(model)["up_LDF"]
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
    for model in (page.llama_1b, page.llama_8b):  # 1,000 tokens: unlike the shape of any weight
        inputs = page.layer_inputs(model, 1000)
        assert kept_by_the_forward_pass(model, 1000, remat=True) == inputs
        assert kept_by_the_forward_pass(model, 1000, remat=False) > 10 * inputs


def test_logits_count_twice(page):
    """The logits are float32, and their gradient is as large."""
    for model in (page.llama_1b, page.llama_8b):
        logits_TV = jax.ShapeDtypeStruct((1000, model.vocabulary), "float32")
        gradient_TV = jax.eval_shape(jax.grad(lambda z_TV: jax.nn.logsumexp(z_TV)), logits_TV)
        assert page.logits(model, 1000) == sum(4 * a.size for a in (logits_TV, gradient_TV))


# FSDP sends 6N if it drops what it gathered, and 4N if it keeps it

LAYERS, WIDTH = 8, 64


def fsdp_by_hand(around_a_layer):
    """Loss and gradients of FSDP over eight devices, one gather in each layer of a scan, compiled."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))

    def layer(x_BD, w_piece_DD):
        w_DD = jax.lax.all_gather(w_piece_DD, "data", axis=0, tiled=True)
        return x_BD + jnp.tanh(x_BD @ w_DD), None

    def loss(w_LDD, x_BD):
        x_BD, _ = jax.lax.scan(around_a_layer(layer), x_BD, w_LDD)
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
def test_fsdp_that_drops_gathered_weights_sends_three_gathers(page):
    """Weights gathered in both passes and gradients scattered: three gathers of all weights, 6N."""
    assert in_gathers(fsdp_by_hand(jax.checkpoint)) == (3, 2)


@compiled_for_cpu
def test_fsdp_that_keeps_gathered_weights_sends_two_and_holds_them_all(page):
    """Kept for the backward pass, weights are gathered once, 4N, and a device holds all of them."""
    kept, dropped = fsdp_by_hand(lambda layer: layer), fsdp_by_hand(jax.checkpoint)
    assert in_gathers(kept) == (2, 1)
    more = ms.memory(kept).temporaries - ms.memory(dropped).temporaries
    all_weights = 4 * LAYERS * WIDTH**2
    assert more > 0.7 * all_weights  # all of them, in place of one or two at a time


# The largest layer


def test_the_largest_layer_is_the_embedding():
    """In both models; whole, with its gradient, it has 2 + 2 bytes for each of its weights."""
    for width, layers in [(2048, 16), (4096, 32)]:
        sizes = types.SimpleNamespace(layers=layers, width=width, vocabulary=128_256)
        shapes = weight_shapes(sizes)
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


def held_by(page, mesh, dtype, *axes):
    """Bytes on one device: features over model, the largest other dimension over data."""
    total = 0
    for name, shape in weight_shapes(page.llama_8b).items():
        entries = [None] * len(shape)
        if "model" in axes and name in FEATURES:
            entries[FEATURES[name]] = "model"
        if "data" in axes:
            free = [i for i in range(len(shape)) if entries[i] is None]
            entries[max(free, key=lambda i: shape[i])] = "data"
        sharding = jax.NamedSharding(mesh, P(*entries))
        total += ms.memory(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).bytes_per_device
    return total


def test_the_column_of_state_is_what_described_arrays_hold(page):
    """For each strategy; only tensor parallelism has more, because it copies the norms' scales."""
    flat = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AUTO,))
    tall = jax.sharding.AbstractMesh((8,), ("model",), axis_types=(AUTO,))
    both = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    placed = {  # mesh, axes of weights and gradients, axes of masters and moments
        "data parallel": (flat, (), ()),
        "ZeRO-1": (flat, (), ("data",)),
        "FSDP": (flat, ("data",), ("data",)),
        "tensor": (tall, ("model",), ("model",)),
        "FSDP x tensor": (both, ("data", "model"), ("data", "model")),
    }
    assert list(placed) == list(page.strategies)
    shapes = weight_shapes(page.llama_8b)
    norms = sum(math.prod(shape) for name, shape in shapes.items() if name not in FEATURES)
    for name, (mesh, kept, moments) in placed.items():
        measured = 2 * held_by(page, mesh, "bfloat16", *kept)
        measured += 3 * held_by(page, mesh, "float32", *moments)
        more = measured - page.state_per_device(page.llama_8b, page.strategies[name])
        assert 0 <= more <= 16 * norms
        assert more == 0 or "model" in kept


def activations_per_device(page, by):
    """Layer inputs are divided as the examples are, and logits over all eight devices."""
    tokens = 8 * 4096
    inputs = page.layer_inputs(page.llama_8b, tokens) / by.examples
    return inputs + page.logits(page.llama_8b, tokens) / 8


def test_the_inputs_of_layers_under_fsdp_and_tensor_parallelism(page):
    """On 2 x 4 a device has half of the rows, so half of the inputs of layers."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    model, by_rows = page.llama_8b, jax.NamedSharding(mesh, P("data"))
    x_TD = jax.ShapeDtypeStruct((8 * 4096, model.width), "bfloat16", sharding=by_rows)
    inputs = page.layer_inputs(model, 8 * 4096) / page.strategies["FSDP x tensor"].examples
    assert model.layers * ms.memory(x_TD).bytes_per_device == inputs


def test_the_sums_of_the_figure(page):
    """133.8, 49.4, 21.3, 28.9 and 24.6 GB of state and activations on each of eight devices."""
    sums = []
    for by in page.strategies.values():
        state = page.state_per_device(page.llama_8b, by)
        sums.append((state + activations_per_device(page, by)) / 1e9)
    assert [f"{gb:.1f}" for gb in sums] == ["133.8", "49.4", "21.3", "28.9", "24.6"]


def test_data_parallelism_divides_the_activations_and_not_the_state(page):
    """Each device holds all 128.5 GB of state, and the activations of its one sequence."""
    model, by = page.llama_8b, page.strategies["data parallel"]
    state = page.state_per_device(model, by)
    assert state == sum(page.STATE.values()) * model.weights and f"{state / 1e9:.1f}" == "128.5"
    one_sequence = page.layer_inputs(model, 4096) + page.logits(model, 4096)
    assert activations_per_device(page, by) == one_sequence


def test_zero1_keeps_four_bytes_whole(page):
    """44.2 GB of state on 8 devices and 33.6 GB on 64: 32.1 GB are whole, and 1.5 GB divided."""
    for devices, expected in [(8, "44.2"), (64, "33.6")]:
        mesh = jax.sharding.AbstractMesh((devices,), ("data",), axis_types=(AUTO,))
        whole = 2 * held_by(page, mesh, "bfloat16")
        pieces = 3 * held_by(page, mesh, "float32", "data")
        assert f"{(whole + pieces) / 1e9:.1f}" == expected
        assert f"{whole / 1e9:.1f}" == "32.1" and whole / 1e9 > 16
        assert devices == 8 or f"{pieces / 1e9:.1f}" == "1.5"


def test_with_512_devices_zero1_still_keeps_its_whole_bytes(page):
    """The last line that the page prints: 32.3 GB."""
    assert page.held == pytest.approx((4 + 12 / 512) * 8_030_261_248)
    assert f"{page.held / 1e9:.1f}" == "32.3"


# The table of conditions


def test_the_code_is_the_table_of_conditions(page):
    """16N + a, 4N + 12N/n + a, 16N/n + a + the embedding; state as in the cell about divisors."""
    for model in (page.llama_1b, page.llama_8b):
        a = page.layer_inputs(model, 4096) + page.logits(model, 4096)
        embedding = 4 * math.prod(weight_shapes(model)["embed_VD"])
        for n in (8, 64):
            state = [
                page.state_per_device(model, page.Divisors(n, whole, whole, optimizer))
                for whole, optimizer in [(1, 1), (1, n), (n, n)]
            ]
            assert page.needed(model, n) == pytest.approx(
                {
                    "data parallel": state[0] + a,
                    "ZeRO-1": state[1] + a,
                    "FSDP": state[2] + a + embedding,
                }
            )


def first_that_fits(page, devices, gb):
    sizes = page.needed(page.llama_8b, devices)
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
    """In the slowest pass, 2,600 tokens are enough on all machines, and 2,200 on v5e and in a node."""
    text = source_of(PAGE).read_text("utf-8")
    for strategy, passes in PASSES.items():
        sent = sum(bytes_ for _, bytes_ in passes)
        assert f"| {strategy} | ${sent}N$ bytes | 2,600 tokens |" in text
        needed = {
            machine: max(bytes_ / operations for operations, bytes_ in passes) * C / W
            for machine, (C, W) in C_AND_W.items()
        }
        assert 2_500 < max(needed.values()) == needed["TPU v5p"] <= 2_600
        assert (
            2_150 < min(needed.values()) == needed["TPU v5e"] < needed["H100, in a node"] <= 2_200
        )


def test_how_many_hidden_units_are_enough():
    """Two thirds of C/W: 1,700 on TPU v5p, 1,500 on TPU v5e and in a node of H100s."""
    units = {machine: 2 / 3 * C / W for machine, (C, W) in C_AND_W.items()}
    assert max(units.values()) == units["TPU v5p"] == pytest.approx(1_700)
    assert 1_450 < units["TPU v5e"] < units["H100, in a node"] <= 1_500
    text = source_of(PAGE).read_text("utf-8")
    assert "| tensor parallelism | partial results | 1,700 hidden units |" in text
