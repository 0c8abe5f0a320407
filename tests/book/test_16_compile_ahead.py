"""Chapter 16, "Compile for the machine you do not have"."""

import math
import re
import tomllib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import mesh_utils as mesh_utils_of_jax
from jax.experimental import mesh_utils

import meshscope as ms
from defined import program_at
from many_devices import compiled as tools
from many_devices import llama_step
from many_devices.compiled import stored, stored_memory, stored_program
from pages import BOOK, check_exercise, exercises_of, source_of

PAGE = "16-compile-ahead"
TEXT = source_of(PAGE).read_text("utf-8")
GIB, GB = 2**30, 1e9
MESHES = {  # of each stored program: the mesh, and sequences on each device
    "ahead-v5e-16": (dict(replica=1, data=16, model=1), 16),
    "ahead-v5e-256": (dict(replica=1, data=256, model=1), 256),
    "ahead-v5e-256-hsdp": (dict(replica=16, data=16, model=1), 256),
    "ahead-v5e-256-hsdp4": (dict(replica=4, data=64, model=1), 256),
    "ahead-v5e-256-tensor": (dict(replica=1, data=64, model=4), 256),
    "ahead-v5p-2048": (dict(replica=1, data=2048, model=1), 2048),
    "ahead-v5p-2048-hsdp": (dict(replica=8, data=256, model=1), 2048),
    "ahead-h100-8-large": (dict(replica=1, data=8, model=1), 128),
    "ahead-h100-64": (dict(replica=1, data=64, model=1), 64),
    "ahead-h100-64-inside": (dict(replica=1, data=8, model=8), 64),
    "ahead-h100-64-across": (dict(model=8, replica=1, data=8), 64),
}
TPU = [name for name in MESHES if "h100" not in name]
H100 = [name for name in MESHES if "h100" in name]


def made(name):
    """What the one compiler made of a stored program."""
    entry = stored_program(name)
    return entry["gpu"] if "gpu" in entry else entry["tpu"]


def payload(name, kind, axis, dtype="bfloat16"):
    rows = made(name)["moves"]
    wanted = kind, [axis], dtype
    return sum(row["payload"] for row in rows if (row["kind"], row["axes"], row["dtype"]) == wanted)


def sent(name):
    return sum(row["wire"] for row in made(name)["moves"])


def needs(name):
    """Bytes on each device, on TPU at the peak."""
    return stored_memory(name, "gpu" if "gpu" in stored_program(name) else "tpu").bytes_per_device


def in_message(name):
    """GiB that the compiler counted before it raised an error."""
    found = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", made(name)["refused"])
    return float(found[1])


# The step is right


def dense_loss(w, tokens_BS):
    """The same model without a mesh, one head after the other, in float32."""

    def normed(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    x_BSD = w["embed_VD"][tokens_BS]
    S = tokens_BS.shape[1]
    for n in range(w["q_LDHC"].shape[0]):
        h_BSD, heads = normed(x_BSD, w["norm1_LD"][n]), []
        H, K = w["q_LDHC"].shape[2], w["k_LDKC"].shape[2]
        for head in range(H):
            q = h_BSD @ w["q_LDHC"][n, :, head]
            k = h_BSD @ w["k_LDKC"][n, :, head * K // H]
            v = h_BSD @ w["v_LDKC"][n, :, head * K // H]
            scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
            scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
            heads.append(jax.nn.softmax(scores) @ v @ w["o_LHCD"][n, head])
        x_BSD = x_BSD + sum(heads)
        h_BSD = normed(x_BSD, w["norm2_LD"][n])
        h_BSF = jax.nn.silu(h_BSD @ w["gate_LDF"][n]) * (h_BSD @ w["up_LDF"][n])
        x_BSD = x_BSD + h_BSF @ w["down_LFD"][n]
    logits_BSV = normed(x_BSD, w["norm_D"]) @ w["head_DV"]
    labels_BS = jnp.roll(tokens_BS, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, labels_BS).mean()


AUTO = (jax.sharding.AxisType.Auto,) * 3


def start(page):
    """The page's step on a 2 × 2 × 2 mesh, and random weights, zero moments and tokens for it."""
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=AUTO)
    step, *shapes = page.step_on(mesh, page.tiny, B=8, S=16)
    rng = np.random.default_rng(3)
    weights = {
        name: (0.2 * rng.standard_normal(like.shape)).astype("float32")
        for name, like in shapes[0].items()
    }
    tokens_BS = rng.integers(0, page.tiny.V, (8, 16)).astype("int32")
    zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes[1])

    def run(*state):
        placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), [*state], shapes)
        return jax.device_get(step(*placed))

    return run, weights, zeros, tokens_BS


def first_steps(page):
    """Loss, gradient and updated weights of a dense model's first step; and what the page's gives."""
    run, weights, zeros, tokens_BS = start(page)
    loss, gradient = jax.value_and_grad(dense_loss)(weights, tokens_BS)
    updates, _ = llama_step.adam.update(gradient, zeros)
    updated = jax.tree.map(lambda w, u: w - 3e-4 * u, weights, updates)
    return (loss, gradient, updated), run(weights, zeros, tokens_BS)


def check_against_dense(wanted, found):
    (loss, gradient, updated), (weights, moments, found_loss) = wanted, found
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for name in gradient:  # after one step the first moment is a tenth of the gradient
        np.testing.assert_allclose(
            10 * moments.mu[name], gradient[name], rtol=2e-3, atol=2e-6, err_msg=name
        )
        np.testing.assert_allclose(weights[name], updated[name], atol=2e-5, err_msg=name)


def test_loss_gradient_and_updated_weights_are_those_of_a_dense_model(page):
    """On a 2 × 2 × 2 mesh, against a dense model that is written in another way."""
    check_against_dense(*first_steps(page))


def test_large_logits_do_not_overflow(page):
    """The softmax over `model` subtracts a maximum: logits in the hundreds give a dense loss."""
    run, weights, zeros, tokens_BS = start(page)
    weights["head_DV"] *= 5000
    wanted = dense_loss(weights, tokens_BS)
    assert wanted > 100
    np.testing.assert_allclose(run(weights, zeros, tokens_BS)[2], wanted, rtol=1e-4)


def test_two_steps_on_one_device_and_on_eight_agree(page):
    """The same losses, and weights and moments within 1e-6, with all three axes in use."""
    np.testing.assert_allclose(page.losses_8, page.losses, rtol=1e-6)
    assert page.gap < 1e-6 and page.losses[1] < page.losses[0]


def test_weights_stay_where_they_are(page):
    """The step returns weights and moments with the shardings that they came with."""
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=AUTO)
    step, *shapes = page.step_on(mesh, page.tiny, B=8, S=16)
    found = step.lower(*shapes).compile().output_shardings[:2]
    pairs = zip(jax.tree.leaves(shapes[:2]), jax.tree.leaves(found), strict=True)
    assert all(out.is_equivalent_to(like.sharding, like.ndim) for like, out in pairs)


def test_gradients_are_reduced_over_replicas_as_pieces(page):
    """Each replica's gradients are scattered first: only a piece is added up over `replica`."""
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=AUTO)
    step, *shapes = page.step_on(mesh, page.tiny, B=8, S=16)
    table = ms.collectives(step.lower(*shapes).compile()).by("kind", "axes")
    scattered = table["reduce-scatter", ("data",)].payload_bytes
    assert table["all-reduce", ("replica",)].payload_bytes * 2 == scattered  # pieces of two


# Without a device


def test_a_program_for_2048_devices_is_lowered_without_devices(page):
    """The mesh of the lowered text has 2,048 devices, and this process has eight."""
    text = page.after("lower").lowered.as_text()
    assert "mhlo.num_partitions = 2048" in text and '["data"=2048]' in text
    assert jax.device_count() < 2048


def test_it_has_8_billion_weights(page):
    assert page.count == 8_030_261_248


def test_the_state_takes_12_bytes_for_each_weight(page):
    """6.02 GB on each of 16 chips: a sixteenth, but for the small weights that are whole."""
    state = 12 * page.count / 16
    assert 6.02e9 < state < 6.03e9 and 0 < page.state_bytes - 16384 - state < 0.001 * state


@pytest.mark.parametrize("name", MESHES)
def test_arguments_are_what_shapes_say(page, name):
    """H100's compiler counts the arguments as `ms.memory` does, to the byte; TPU's pads a little."""
    sizes, batch = MESHES[name]
    _, *shapes = page.step_on(page.abstract_mesh(**sizes), page.llama_8b, B=batch)
    held = ms.memory(shapes).bytes_per_device
    arguments = made(name)["memory"]["arguments"]
    assert arguments == held if name in H100 else 0 <= arguments - held < 1e-3 * held


@pytest.mark.skipif(jax.__version__ != stored()["about"]["jax"], reason="of other releases")
@pytest.mark.parametrize("name", MESHES)
def test_the_stored_programs_are_those_of_the_page(page, name):
    """Lowered for TPU, the page's step has the hash that was stored."""
    sizes, batch = MESHES[name]
    assert stored_program(name)["mesh"] == sizes
    program = page.step_on(page.abstract_mesh(**sizes), page.llama_8b, B=batch)
    assert tools.digest(tools.lowered_for("tpu", *program)) == stored_program(name)["hash"]


# Remat and offload, before compiling


def test_remat_has_more_matmuls_and_offload_moves_to_the_host(page):
    """Matmuls in the lowered text grow with remat; only the right name moves anything."""
    kept, _ = page.count_matmuls_and_moves(page.policies.everything_saveable)
    remat, moves = page.count_matmuls_and_moves(None)
    assert remat - kept == 8 and moves == 0
    assert page.count_matmuls_and_moves(page.offload("layer_input")) == (remat, 1)


def test_a_wrong_name_offloads_nothing_and_says_nothing(page, recwarn):
    """A policy accepts any name: the program is that of plain remat."""
    assert page.count_matmuls_and_moves(
        page.offload("layer_inputs")
    ) == page.count_matmuls_and_moves(None)
    assert not [one for one in recwarn if "offload" in str(one.message)]


def test_on_simulated_devices_an_offloading_step_has_the_same_loss(page):
    """Offload changes where layer inputs are kept, and no result."""
    mesh = jax.make_mesh((1, 2, 1), ("replica", "data", "model"), axis_types=AUTO, devices=jax.devices()[:2])  # fmt: skip
    losses = []
    for policy in (None, page.offload("layer_input")):
        step, *shapes = page.step_on(mesh, page.tiny, B=2, S=8, policy=policy)

        def put(like):
            return jax.device_put(np.full(like.shape, 0.1, like.dtype), like.sharding)

        losses.append(float(step(*jax.tree.map(put, shapes))[2]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


# Does it fit


def test_the_message_counts_the_state(page):
    """19.67 GB against 16.91; with 1.07 GB more of state it is 20.74, so the 6.03 are in it."""
    assert (
        "HLO temporaries (18.32G) exceeds available HBM (15.75G)"
        in made("ahead-v5e-16-two")["refused"]
    )
    assert "CompileTimeHbmOom" in page.message and page.message.startswith("RESOURCE_EXHAUSTED")
    assert stored_program("ahead-v5e-16-two")["compiling"]["seconds"] <= 2
    assert in_message("ahead-v5e-16-two-more") - in_message("ahead-v5e-16-two") == pytest.approx(1)
    names = "ahead-v5e-16-two", "ahead-v5e-16-two-more", "ahead-v5e-16-more"
    counts = [page.counted_gb(name) for name in names]
    assert [f"{count:.2f}" for count in counts] == ["19.67", "20.74", "16.95"]
    assert counts[0] == pytest.approx(in_message("ahead-v5e-16-two") * GIB / GB)
    assert f"{page.state_bytes / GB:.2f} {counts[0] - page.V5E / GB:.2f}" == "6.03 2.76"
    assert f"{GIB / GB:.2f} {2 * GIB / GB:.2f}" == "1.07 2.15"


@pytest.mark.skipif(jax.__version__ != stored()["about"]["jax"], reason="of other releases")
@pytest.mark.parametrize("name, B, more", [("two-more", 32, 4), ("more", 16, 8)])
def test_the_programs_with_more_state_are_the_step_and_donated_arrays(page, name, B, more):
    """They are the page's step with `more` arrays of a quarter of a GiB on each device."""
    step, *shapes = page.step_on(page.sixteen, page.llama_8b, B=B)
    one = page.abstract_array(page.sixteen, (16 * 8192, 8192), page.P("data"))
    assert ms.memory(one).bytes_per_device == GIB / 4

    def with_more(weights, moments, tokens_BS, more):
        weights, moments, loss = step(weights, moments, tokens_BS)
        return weights, moments, loss, [x * loss for x in more]

    program = jax.jit(with_more, donate_argnums=(0, 1, 3)), *shapes, [one] * more
    assert (
        tools.digest(tools.lowered_for("tpu", *program))
        == stored_program(f"ahead-v5e-16-{name}")["hash"]
    )


def test_one_sequence_fits_although_the_sum_of_its_parts_does_not(page):
    """17.67 GB by the sum and 14.75 at the peak, of 16.91; 10.9 GB are left beside the state."""
    memory, parts = page.after("silent").memory, page.after("silent").parts
    assert memory == stored_memory("ahead-v5e-16", "tpu")
    assert "refused" not in made("ahead-v5e-16") and page.fits(memory, page.V5E)
    assert parts == pytest.approx(
        memory.arguments + memory.outputs + memory.temporaries - memory.aliased, rel=1e-5
    )
    assert memory.bytes_per_device == memory.peak < page.V5E < parts
    found = [f"{size / GB:.2f}" for size in (parts, memory.peak, page.V5E)]
    assert found == ["17.67", "14.75", "16.91"]
    assert f"{(page.V5E - page.state_bytes) / GB:.1f}" == "10.9"


def test_the_peak_is_what_the_compiler_counts(page):
    """With 2.15 GB more of state it counts 16.95: 14.8 without, the peak within 0.1 GB."""
    without = (in_message("ahead-v5e-16-more") - 2) * GIB
    assert f"{without / GB:.1f}" == "14.8"
    assert abs(without - page.after("silent").memory.peak) < 0.1e9


def test_for_gpus_there_is_no_error(page):
    """145.7 GB on H100s of 80 GB: compiled without an error."""
    memory = page.after("gpu").memory
    assert memory == stored_memory("ahead-h100-8-large", "gpu")
    assert f"{memory.bytes_per_device / GB:.1f}" == "145.7"
    assert "refused" not in made("ahead-h100-8-large")
    assert page.ms.CHIPS["h100"].hbm == 80e9 and not page.fits(memory, 80e9)


def test_it_fits_up_to_the_last_byte(page):
    """On TPU by the peak, elsewhere by arguments, outputs and temporaries, less what is aliased."""
    memory = ms.ProgramMemory(arguments=10, outputs=4, temporaries=6, aliased=4)
    assert page.fits(memory, 16) and not page.fits(memory, 15)
    memory = ms.ProgramMemory(arguments=10, outputs=4, temporaries=6, aliased=4, peak=13)
    assert page.fits(memory, 13) and not page.fits(memory, 12)


def test_no_tpu_program_that_compiled_needs_more_than_a_chip_has(page):
    """For TPU, compile() is the check."""
    available = {"v5e": page.V5E, "v5p": page.ms.CHIPS["v5p"].hbm}
    names = [*TPU, "ahead-v5e-16-offload", "ahead-v5e-16-two-offload"]
    assert all(needs(name) <= available[name.split("-")[1]] for name in names)


def test_offload_makes_two_sequences_fit_with_their_inputs_on_the_host(page):
    """2,147,483,648 bytes are predicted and on the host; 16.5 GB on the chip, 0.4 to spare."""
    memory = stored_memory("ahead-v5e-16-two-offload", "tpu")
    assert memory.host_bytes_per_device == page.inputs == 2_147_483_648
    peak = page.after("offloaded").memory.peak
    assert peak == needs("ahead-v5e-16-two-offload") and page.fits(memory, page.V5E)
    assert f"{peak / GB:.1f} {(page.V5E - peak) / GB:.1f}" == "16.5 0.4"
    assert in_message("ahead-v5e-16-two") * GIB > page.V5E


def test_without_remat_it_needs_172_gb(page):
    """Everything kept, of one sequence."""
    assert f"{page.counted_gb('ahead-v5e-16-kept'):.0f}" == "172"
    assert in_message("ahead-v5e-16-kept") == 159.99


# What is sent


def test_fsdp_gathers_30_gb(page):
    """2 bytes × 6.98 billion twice, and 2 × 1.05 billion once."""
    named = page.weights_of(page.llama_8b)
    sizes = {name: math.prod(dims) for name, (dims, spec) in named.items() if "data" in spec}
    layers = sum(size for name, size in sizes.items() if "_L" in name)
    others = sum(sizes.values()) - layers
    assert f"{layers / 1e9:.2f} {others / 2e9:.2f} {others / 1e9:.2f}" == "6.98 0.53 1.05"
    gathers = page.predicted_bytes(page.llama_8b, dict(replica=1, data=64, model=1), 1)["gathers"]
    assert gathers == 2 * (2 * layers + others) and f"{gathers / GB:.0f}" == "30"


def test_fsdp_and_tensor_parallelism_on_h100_are_predicted(page):
    """H100 sends what was written, to the byte: gathers, scatters and sums of both programs."""
    for name, sequences in [("ahead-h100-64", 1), ("ahead-h100-64-inside", 8)]:
        wanted = page.predicted_bytes(page.llama_8b, stored_program(name)["mesh"], sequences)
        assert payload(name, "all-gather", "data") == wanted["gathers"]
        assert payload(name, "reduce-scatter", "data") == wanted["scatters"]
        assert payload(name, "all-reduce", "model") == wanted["sums"]
        kinds = {key.split()[0] for key in page.compiled_bytes(name, "gpu")}
        assert kinds <= {"all-gather", "reduce-scatter", "all-reduce"}


def test_for_tpu_v5e_scatters_become_all_reduces_of_the_same_payload(page):
    """On 16 chips: gathers as predicted, and each scatter an all-reduce."""
    wanted = page.predicted_bytes(page.llama_8b, stored_program("ahead-v5e-16")["mesh"], 1)
    assert page.compiled_bytes("ahead-v5e-16", "tpu") == {
        "all-gather data": wanted["gathers"],
        "all-reduce data": wanted["scatters"],
    }


def test_for_2048_chips_in_one_axis_gathers_become_all_reduces_too(page):
    """Everything is an all-reduce: 92 GB sent, where gathers and scatters would send 46."""
    wanted = page.predicted_bytes(page.llama_8b, stored_program("ahead-v5p-2048")["mesh"], 1)
    both = wanted["gathers"] + wanted["scatters"]
    assert page.compiled_bytes("ahead-v5p-2048", "tpu") == {"all-reduce data": both}
    assert f"{both * 2047 / 2048 / GB:.0f}" == "46"
    assert f"{sent('ahead-v5p-2048') / GB:.0f}" == "92"


# Rank strategies


def test_the_table_of_strategies(page):
    """GB needed, sent, and sent with no matmul beside them, as the text has them."""
    rows = {}
    for name in ROWS:
        sizes = needs(name), *page.sent_and_exposed(stored_program(name))
        rows[name] = tuple(f"{size / GB:.1f}" for size in sizes)
    assert rows == ROWS and [f"ahead-{name}" for name in page.ranked] == list(ROWS)


ROWS = {
    "ahead-v5e-256": ("6.7", "63.0", "36.2"),
    "ahead-v5e-256-hsdp": ("13.6", "46.1", "20.4"),
    "ahead-v5e-256-hsdp4": ("8.1", "47.8", "20.9"),
    "ahead-v5e-256-tensor": ("9.4", "46.6", "39.9"),
    "ahead-v5p-2048": ("6.2", "92.1", "92.1"),
    "ahead-v5p-2048-hsdp": ("5.9", "59.3", "59.3"),
}


def test_tensor_parallelism_sends_32_gb_of_sums_with_no_matmul_beside_them():
    """32 of its 47 GB are along model."""
    entry = made("ahead-v5e-256-tensor")
    sums = sum(row["wire"] for row in entry["moves"] if row["axes"] == ["model"])
    assert f"{sums / GB:.0f} {sent('ahead-v5e-256-tensor') / GB:.0f}" == "32 47"
    assert not any(beside for _, axes, beside, _ in entry["beside"] if axes == ["model"])


def test_plain_fsdp_on_256_chips_turns_scatters_and_some_gathers_into_all_reduces(page):
    """46 GB were asked for and 63 are sent."""
    wanted = page.predicted_bytes(page.llama_8b, MESHES["ahead-v5e-256"][0], 1)
    found = page.compiled_bytes("ahead-v5e-256", "tpu")
    assert set(found) == {"all-gather data", "all-reduce data"}
    assert (
        found["all-reduce data"] > wanted["scatters"]
        and found["all-gather data"] < wanted["gathers"]
    )
    asked = (wanted["gathers"] + wanted["scatters"]) * 255 / 256
    assert f"{asked / GB:.0f} {sent('ahead-v5e-256') / GB:.0f}" == "46 63"


def test_hsdp_with_four_replicas_needs_less_memory_than_with_sixteen():
    assert needs("ahead-v5e-256-hsdp4") < needs("ahead-v5e-256-hsdp")
    assert sent("ahead-v5p-2048-hsdp") / sent("ahead-v5p-2048") == pytest.approx(2 / 3, abs=0.03)


def test_switches_for_v5e_raise_an_error_for_v5p():
    """They start gathers early, and the error warns of incorrect results on other chips."""
    entry = stored_program("ahead-v5p-2048-switch")
    said = entry["tpu"]["refused"]
    assert entry["machine"].startswith("v5p") and "xla_tpu_enable_async_collective_fusion" in said
    assert "platforms other than TPU v5e" in said and "incorrect results" in said
    table = tomllib.loads((BOOK / "compiled" / "claims.toml").read_text("utf-8"))
    switches = table["program"]["ahead-v5p-2048-switch"]["switches"]
    assert len(switches) == 3 and "xla_enable_async_all_gather" in switches


def test_a_gather_is_exposed_unless_a_matmul_is_beside_it(page):
    """Of a gather's payload, a chip sends (n - 1) / n."""
    entry = {
        "mesh": {"data": 4},
        "tpu": {
            "moves": [{"wire": 75}, {"wire": 30}],
            "beside": [["all-gather", ["data"], True, 40], ["all-gather", ["data"], False, 60]],
        },
    }
    assert page.sent_and_exposed(entry) == (105, 75)


# The order of a mesh


def test_nodes_of_groups(page):
    """model as the last axis is in one node; as the first it is in eight."""
    inside, across = (MESHES[f"ahead-h100-64-{name}"][0] for name in ("inside", "across"))
    assert page.nodes_of(inside, "model") == 1 and page.nodes_of(inside, "data") == 8
    assert page.nodes_of(across, "model") == 8 and page.nodes_of(across, "data") == 1


def test_the_order_changes_no_byte_and_the_link_by_nine(page):
    """The two orders send the same; along model by NVLink, or by one NIC with a ninth."""
    inside, across = "ahead-h100-64-inside", "ahead-h100-64-across"
    assert made(inside)["moves"] == made(across)["moves"]
    speeds = [page.h100.bandwidth(MESHES[name][0], ("model",)) for name in (inside, across)]
    assert speeds == [450e9, 50e9]
    model = sum(row["wire"] for row in made(inside)["moves"] if row["axes"] == ["model"])
    data = sum(row["wire"] for row in made(inside)["moves"] if row["axes"] == ["data"])
    assert [f"{1e3 * model / speed:.0f}" for speed in speeds] == ["168", "1513"]
    assert [f"{size / GB:.1f}" for size in (model, data)] == ["75.6", "6.7"]


class Chip(NamedTuple):
    """A TPU v5p as jax.make_mesh asks for it."""

    id: int
    coords: tuple
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    process_index: int = 0
    core_on_chip: int = 0
    slice_index: int = 0


def test_8_and_256_can_be_axes_of_8_16_16_and_4_cannot():
    """jax.make_mesh puts each axis onto whole dimensions of a torus, or raises an error."""
    places = [(x, y, z) for z in range(16) for y in range(16) for x in range(8)]
    chips = [Chip(n, place) for n, place in enumerate(places)]
    grid = mesh_utils.create_device_mesh((8, 256, 1), chips)
    assert len({chip.coords[0] for chip in grid[0].flat}) == 1  # a replica is one layer of 16 × 16
    with pytest.raises(NotImplementedError, match="^Failed to find assignment for logical_axis"):
        mesh_utils.create_device_mesh((1, 512, 4), chips)


def test_on_v5e_a_dimension_may_be_split(monkeypatch):
    """4 × 64 on 16 × 16 chips: jax.make_mesh allows it for v5e, and not for other chips."""
    asked = []
    monkeypatch.setattr(
        mesh_utils_of_jax,
        "create_device_mesh",
        lambda *_, **options: asked.append(options) or {}[0],
    )
    for kind in ("TPU v5 lite", "TPU v5"):
        chips = [Chip(n, (n % 16, n // 16, 0), device_kind=kind) for n in range(256)]
        with pytest.raises(KeyError):
            jax.make_mesh((4, 64), ("replica", "data"), axis_types=AUTO[:2], devices=chips)
    assert [options["allow_split_physical_axes"] for options in asked] == [True, False]
    grid = mesh_utils.create_device_mesh((4, 64), chips, allow_split_physical_axes=True)
    assert grid.shape == (4, 64)


# What it costs


def test_no_program_took_more_than_two_minutes_and_2_gb(page):
    """2,048 chips: about a minute of processor time, and less than 2 GB."""
    took = {name: stored_program(name)["compiling"] for name in MESHES}
    assert max(one["seconds"] for one in took.values()) <= 120
    assert max(one["gigabytes"] for one in took.values()) < 2
    assert 30 <= took["ahead-v5p-2048"]["seconds"] <= 90


# Figures


@pytest.fixture(scope="module")
def figure():
    path = BOOK / "figures" / "compile_ahead.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        return program_at(path)


def test_the_bars_are_what_was_stored(figure, page):
    """State, peak and host memory of the three programs."""
    assert f"{page.state_bytes / GB:.2f}" == f"{figure.STATE:.2f}"
    two, one, off = [(peak, host) for _, peak, host in figure.STEPS]
    assert two == (pytest.approx(in_message("ahead-v5e-16-two") * GIB / GB), 0)
    assert one == (float(f"{needs('ahead-v5e-16') / GB:.2f}"), 0)
    host = stored_memory("ahead-v5e-16-two-offload", "tpu").host_bytes_per_device
    peak = needs("ahead-v5e-16-two-offload")
    assert off == (float(f"{peak / GB:.2f}"), float(f"{host / GB:.2f}"))


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
