"""The page "Why many devices, and which strategy": bytes per weight, what is divided, what is sent."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import meshscope as ms
from pages import compiled_for_cpu, source_of

PAGE = "strategies"
P = jax.P
AUTO = jax.sharding.AxisType.Auto


# Sixteen bytes are Adam's


def bytes_per_weight(tx):
    """Bytes of training for each weight: bfloat16 weight and gradient, a float32 master, the state."""
    master = jnp.zeros((1024, 1024), "float32")
    weight = gradient = master.astype("bfloat16")
    kept = [weight, gradient + 0, master, tx.init(master)]
    return ms.memory(kept).bytes_per_device / master.size


@pytest.mark.parametrize(
    "tx, expected",
    [
        (optax.adam(1e-3), 16),
        (optax.sgd(1e-3, momentum=0.9), 12),
        (optax.adam(1e-3, mu_dtype="bfloat16"), 14),
    ],
    ids=["adam", "momentum", "adam, first moment in bfloat16"],
)
def test_training_keeps_sixteen_bytes_a_weight_with_adam_and_less_with_others(tx, expected):
    """With Adam training keeps 16 bytes a weight, with momentum 12, with a moment in bfloat16 14."""
    assert bytes_per_weight(tx) == pytest.approx(expected, abs=0.01)


# How many weights there are, and how many bytes


def test_the_models_have_as_many_weights_as_published(page):
    """Llama 3.2 1B has 1,235,814,400 weights and Llama 3.1 8B has 8,030,261,248."""
    counts = page.count(page.llama_1b), page.count(page.llama_8b)
    assert counts == (1_235_814_400, 8_030_261_248)
    per_layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert counts[1] == 32 * per_layer + 2 * 128256 * 4096 + 4096


def test_both_columns_are_sixteen_bytes(page):
    """bfloat16 with masters and all in float32 keep 16 bytes for each weight, 12 for the optimizer."""
    for dtype, masters in (("bfloat16", 1), ("float32", 0)):
        weight = jnp.zeros((64, 96), dtype)
        master = jnp.zeros((64, 96), "float32")
        adam, _ = optax.adam(1e-3).init(master)
        kept = [weight, jnp.zeros_like(weight), *[master] * masters, adam.mu, adam.nu]
        assert ms.memory(kept).bytes_per_device == 16 * weight.size
    assert sum(page.STATE.values()) == 16
    assert page.STATE["masters"] + page.STATE["moments"] == 12


def test_the_lead_of_the_bars(page):
    """24.2 GB for the 1B model and 133.8 GB for the 8B model, at one sequence of 4,096 tokens."""
    needs = []
    for model in (page.llama_1b, page.llama_8b):
        activations = page.layer_inputs(model, 4096) + page.logits(model, 4096)
        needs.append((16 * page.count(model) + activations) / 1e9)
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

    up, down = (model.L, model.D, model.F), (model.L, model.F, model.D)
    weights = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (up, up, down)]
    x_TD = jax.ShapeDtypeStruct((tokens, model.D), "bfloat16")
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
        logits_TV = jax.ShapeDtypeStruct((1000, model.V), "float32")
        gradient_TV = jax.eval_shape(jax.grad(lambda z_TV: jax.nn.logsumexp(z_TV)), logits_TV)
        assert page.logits(model, 1000) == sum(4 * a.size for a in (logits_TV, gradient_TV))


# What data parallelism divides


def test_data_parallelism_divides_the_activations_and_not_the_state(page):
    """Of eight sequences each device takes one, so its activations are an eighth; the state is whole."""
    model, tokens = page.llama_8b, 8 * 4096
    by = page.strategies["data parallel"]
    whole = page.layer_inputs(model, tokens) + page.logits(model, tokens)
    assert sum(page.activations_per_device(model, by, tokens)) == whole / 8
    assert page.state_per_device(model, by) == sum(page.STATE.values()) * page.count(model)


def test_each_device_needs_as_much_as_one_device_for_one_sequence(page):
    """With data parallelism each device needs 133.8 GB, as one device alone for one sequence."""
    model, by = page.llama_8b, page.strategies["data parallel"]
    one = (
        page.state_per_device(model, by) + page.layer_inputs(model, 4096) + page.logits(model, 4096)
    )
    each = page.state_per_device(model, by) + sum(page.activations_per_device(model, by, 8 * 4096))
    assert one == each and f"{each / 1e9:.1f}" == "133.8"


def test_the_other_four_strategies_divide_the_state_as_well(page):
    """The other four strategies divide the state as well."""
    whole = page.state_per_device(page.llama_8b, page.strategies["data parallel"])
    others = [by for name, by in page.strategies.items() if name != "data parallel"]
    assert len(others) == 4
    assert all(page.state_per_device(page.llama_8b, by) < whole for by in others)


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


def test_the_largest_layer_is_whole_beside_the_rest(page):
    """Of both models the largest layer is the embedding; whole, with its gradient, it has 2 + 2 bytes
    for each of its weights, 2.1 GB for the 8B model."""
    for model in (page.llama_1b, page.llama_8b):
        assert page.largest_layer(model) == 4 * model.V * model.D
    assert f"{page.largest_layer(page.llama_8b) / 1e9:.1f}" == "2.1"


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
    for name, shape in page.weight_shapes(page.llama_8b).items():
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
    shapes = page.weight_shapes(page.llama_8b)
    norms = sum(math.prod(shape) for name, shape in shapes.items() if name not in FEATURES)
    for name, (mesh, kept, moments) in placed.items():
        measured = 2 * held_by(page, mesh, "bfloat16", *kept)
        measured += 3 * held_by(page, mesh, "float32", *moments)
        more = measured - page.state_per_device(page.llama_8b, page.strategies[name])
        assert 0 <= more <= 16 * norms
        assert more == 0 or "model" in kept


def test_the_inputs_of_layers_under_fsdp_and_tensor_parallelism(page):
    """On 2 x 4 a device has half of the rows, so half of the inputs of layers."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    model, by_rows = page.llama_8b, jax.NamedSharding(mesh, P("data"))
    x_TD = jax.ShapeDtypeStruct((page.tokens, model.D), "bfloat16", sharding=by_rows)
    inputs, _ = page.activations_per_device(model, page.strategies["FSDP x tensor"], page.tokens)
    assert model.L * ms.memory(x_TD).bytes_per_device == inputs


def test_the_sums_of_the_figure(page):
    """133.8, 49.4, 21.3, 28.9 and 24.6 GB of state and activations on each of eight devices."""
    sums = []
    for by in page.strategies.values():
        parts = page.activations_per_device(page.llama_8b, by, page.tokens)
        sums.append((page.state_per_device(page.llama_8b, by) + sum(parts)) / 1e9)
    assert [f"{gb:.1f}" for gb in sums] == ["133.8", "49.4", "21.3", "28.9", "24.6"]


def test_zero1_keeps_four_bytes_whole(page):
    """44.2 GB of state on 8 devices and 33.6 GB on 64: 32.1 GB are whole, and 1.5 GB divided."""
    for devices, expected in [(8, "44.2"), (64, "33.6")]:
        mesh = jax.sharding.AbstractMesh((devices,), ("data",), axis_types=(AUTO,))
        whole = 2 * held_by(page, mesh, "bfloat16")
        pieces = 3 * held_by(page, mesh, "float32", "data")
        assert f"{(whole + pieces) / 1e9:.1f}" == expected
        assert f"{whole / 1e9:.1f}" == "32.1" and whole / 1e9 > 16
        assert devices == 8 or f"{pieces / 1e9:.1f}" == "1.5"


def test_with_512_devices_zero1_still_keeps_its_whole_bytes_and_fsdp_almost_none(page):
    """The last row that the page prints: 32.3 GB with ZeRO-1, and 0.3 GB with FSDP."""
    billions = 8.030261248  # weights of the 8B model
    zero1, fsdp = (4 + 12 / 512) * billions, 16 / 512 * billions
    assert page.held == pytest.approx([zero1, fsdp])
    assert [f"{gb:.1f}" for gb in page.held] == ["32.3", "0.3"]


def test_in_float32_zero1_keeps_eight_bytes_whole():
    """All in float32, weight and gradient are whole, 8N, and the moments are divided, 8N/n."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AUTO,))

    def array(*spec):
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((64, 96), "float32", sharding=sharding)

    kept = [array(), array(), array("data"), array("data")]
    assert ms.memory(kept).bytes_per_device == (8 + 8 / 8) * 64 * 96


# When communication decides

T, D, F = 64, 32, 128  # tokens per device (of the group, for tensor parallelism), sizes


def counted(function, in_specs, out_specs, *shapes):
    """Operations on one device, and {kind: numbers} of what a group of eight moves."""
    line = jax.make_mesh((8,), ("X",), axis_types=(AUTO,))
    mapped = jax.shard_map(function, mesh=line, in_specs=in_specs, out_specs=out_specs)
    inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    program = jax.jit(mapped).lower(*inputs).compile()
    moved = {}
    for move in ms.collectives(program, line):
        moved[move.kind] = moved.get(move.kind, 0) + move.payload_bytes // 4
    return program.cost_analysis()["flops"], moved


def fsdp_forward(x_TD, w_DF):
    return x_TD @ jax.lax.all_gather(w_DF, "X", axis=0, tiled=True)


def gradients(x_TD, w_DF, back_TF, *, gather, again=False):
    """Gradients of one weight and of its input; `again` computes the product once more."""
    whole_DF = jax.lax.all_gather(w_DF, "X", axis=0, tiled=True) if gather else w_DF
    if again:
        back_TF = back_TF * jnp.cos(x_TD @ whole_DF)
    dw_DF, dx_TD = x_TD.T @ back_TF, back_TF @ whole_DF.T
    if gather:
        return jax.lax.psum_scatter(dw_DF, "X", tiled=True), dx_TD
    return jax.lax.psum(dw_DF, "X"), dx_TD


def tensor_forward(x_TD, gate_DF, up_DF, down_FD):
    return jax.lax.psum(((x_TD @ gate_DF) * (x_TD @ up_DF)) @ down_FD, "X")


ROWS, COPIES, COLUMNS = P("X"), P(), P(None, "X")
X, W, Y = (8 * T, D), (D, F), (8 * T, F)


def close(flops, expected):
    return abs(flops / expected - 1) < 0.02  # it counts elementwise operations as well


@compiled_for_cpu
def test_fsdp_forward_fetches_the_weight_and_multiplies_the_tokens():
    """2tDF operations beside one gather of DF numbers."""
    flops, moved = counted(fsdp_forward, (ROWS, ROWS), ROWS, X, W)
    assert moved == {"all-gather": D * F} and close(flops, 2 * T * D * F)


@compiled_for_cpu
def test_the_backward_pass_has_twice_the_arithmetic_and_twice_the_bytes():
    """4tDF operations, beside the weight once more and its gradient."""
    backward = partial(gradients, gather=True)
    flops, moved = counted(backward, (ROWS, ROWS, ROWS), (ROWS, ROWS), X, W, Y)
    assert moved == {"all-gather": D * F, "reduce-scatter": D * F}
    assert close(flops, 4 * T * D * F)


@compiled_for_cpu
def test_computing_again_adds_arithmetic_and_no_bytes():
    """A layer that is computed again in the backward pass needs 6tDF operations and the same bytes."""
    backward = partial(gradients, gather=True, again=True)
    flops, moved = counted(backward, (ROWS, ROWS, ROWS), (ROWS, ROWS), X, W, Y)
    assert moved == {"all-gather": D * F, "reduce-scatter": D * F}
    assert close(flops, 6 * T * D * F)


@compiled_for_cpu
def test_data_parallelism_sends_only_in_the_backward_pass():
    """One all-reduce of the gradient, which travels twice, beside 4tDF operations."""
    backward = partial(gradients, gather=False)
    flops, moved = counted(backward, (ROWS, COPIES, ROWS), (COPIES, ROWS), X, W, Y)
    assert moved == {"all-reduce": D * F} and close(flops, 4 * T * D * F)


@compiled_for_cpu
def test_tensor_parallelism_adds_up_the_outputs_of_a_layer():
    """Three matmuls of 2TDF/m operations beside one all-reduce of TD numbers."""
    specs = (COPIES, COLUMNS, COLUMNS, ROWS)
    flops, moved = counted(tensor_forward, specs, COPIES, (T, D), W, W, (F, D))
    assert moved == {"all-reduce": T * D} and close(flops, 6 * T * D * F / 8)


def test_the_machines_agree_with_their_data_sheets(page):
    """Bytes per second agree with published totals to a tenth, and operations are those of the
    makers, without sparsity."""
    one_axis = {  # of both directions, over all links of a chip, as the makers publish it
        "TPU v5e": 400e9 / 2 / 2,  # half is sending; one of two axes
        "TPU v5p": 1200e9 / 2 / 3,  # half is sending; one of three axes
        "H100, in a node": 900e9 / 2,  # half is sending
        "H100, between nodes": 8 * 400e9 / 8,  # eight NICs of 400 gigabits per second
    }
    assert list(one_axis) == list(page.machines)
    for name, machine in page.machines.items():
        assert 0.9 <= machine.bandwidth / one_axis[name] <= 1
        assert 2150 < machine.flops / machine.bandwidth < 2600
    inside, between = page.H100, page.machines["H100, between nodes"]
    assert page.machines["TPU v5e"].flops == 197e12 and page.machines["TPU v5p"].flops == 459e12
    assert abs(inside.flops - 1979e12 / 2) < 1e12 and between.flops == inside.flops
    assert between.bandwidth == 8 * 50e9  # 400 gigabits per second each


def test_the_numbers_of_the_figure(page):
    """A layer of the 8B model has 436 MB, and on an H100 the arithmetic covers it from 2,198 tokens."""
    shapes = page.weight_shapes(page.llama_8b)
    layer = sum(math.prod(shape[1:]) for name, shape in shapes.items() if "_L" in name)
    assert round(2 * layer / 1e6) == 436
    assert f"{page.H100.flops / page.H100.bandwidth:,.0f}" == "2,198"


def test_tensor_parallelism_wants_1465_hidden_units(page):
    """On H100s in a node 1,465 hidden units per device: the 1B model can be divided over 4 devices
    and not over 8, the 8B model over 8."""
    assert f"{page.H100.flops / page.H100.bandwidth / 1.5:,.0f}" == "1,465"
    limits = [(page.llama_1b, 4, False), (page.llama_1b, 8, True), (page.llama_8b, 8, False)]
    for model, devices, bound in limits:
        arithmetic, sent = page.tensor_times(model, page.H100, devices, tokens=4096)
        assert bound == (sent > arithmetic)
        assert bound == (1.5 * model.F / devices < page.H100.flops / page.H100.bandwidth)
        ring = sent * (devices - 1) / devices  # the exact bytes of a ring: the same answer
        assert bound == (ring > arithmetic)
    assert f"{1.5 * 14336 / 8:,.0f}" == "2,688"


# The table of conditions


def test_the_choices_of_the_table(page):
    """Three models and numbers of devices, at 16, 80 and 192 GB each."""
    expected = {
        (page.llama_1b, 8): ["ZeRO-1", "data parallel", "data parallel"],
        (page.llama_8b, 8): ["does not fit", "ZeRO-1", "data parallel"],
        (page.llama_8b, 64): ["FSDP", "ZeRO-1", "data parallel"],
    }
    for (model, devices), names in expected.items():
        assert [page.choose(model, gb * 1e9, devices) for gb in (16, 80, 192)] == names


def test_the_choices_turn_at_the_formulas(page):
    """On both sides of each limit: 16N + a, 4N + 12N/n + a, 16N/n + a + the largest layer."""
    model, N = page.llama_8b, page.count(page.llama_8b)
    a = page.layer_inputs(model, 4096) + page.logits(model, 4096)
    for devices in (8, 64):
        divides = page.Divides(devices, devices, devices, devices)
        least = page.state_per_device(model, divides) + a + 4 * 128256 * 4096
        assert page.choose(model, least + 1, devices) == "FSDP"
        assert page.choose(model, least - 1, devices) == "does not fit"
        assert page.choose(model, 16 * N + a, devices) == "data parallel"
        assert page.choose(model, 16 * N + a - 1, devices) == "ZeRO-1"
        divides = page.Divides(devices, weights=1, gradients=1, optimizer=devices)
        second = page.state_per_device(model, divides) + a
        assert page.choose(model, second + 1, devices) == "ZeRO-1"
        assert page.choose(model, second - 1, devices) == "FSDP"


def test_the_example_of_1024_devices(page):
    """1,048,576 tokens on 1,024 devices are 1,024 each, too few; groups of 4 have 4,096."""
    limits = [machine.flops / machine.bandwidth for machine in page.machines.values()]
    t = 1_048_576 / 1_024
    assert t == 1024 < min(limits) and max(limits) < 4 * t == 4096
