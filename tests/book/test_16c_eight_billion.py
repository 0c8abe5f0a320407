"""The page "Eight billion weights on 16 to 2,048 chips": memory and collectives of stored programs."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshscope as ms
from defined import program_at
from many_devices import compiled as tools
from many_devices import llama_step
from many_devices.compiled import stored, stored_memory, stored_program
from pages import BOOK, check_exercise, exercises_of
from stored_steps import GB, GIB, H100, MESHES, in_message, made, needs, payload, sent

PAGE = "16c-eight-billion"


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


AXES, AUTO = ("replica", "data", "model"), (jax.sharding.AxisType.Auto,) * 3
TINY = llama_step.Config(L=2, D=32, F=64, H=4, K=2, C=8, V=96, dtype="float32")


def mesh_of(*sizes):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, AXES, axis_types=AUTO, devices=devices)


def start(*sizes):
    """The step on a mesh of these sizes, and random weights, zero moments and tokens for it."""
    step, *shapes = llama_step.step_on(mesh_of(*sizes), TINY, B=8, S=16)
    rng = np.random.default_rng(3)
    weights = {
        name: (0.2 * rng.standard_normal(like.shape)).astype("float32")
        for name, like in shapes[0].items()
    }
    tokens_BS = rng.integers(0, TINY.V, (8, 16)).astype("int32")
    zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes[1])

    def run(*state):
        placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), [*state], shapes)
        return jax.device_get(step(*placed))

    return run, weights, zeros, tokens_BS


def test_loss_gradient_and_updated_weights_are_those_of_a_dense_model():
    """On a 2 × 2 × 2 mesh, against a dense model that is written in another way."""
    run, weights, zeros, tokens_BS = start(2, 2, 2)
    loss, gradient = jax.value_and_grad(dense_loss)(weights, tokens_BS)
    updates, _ = llama_step.adam.update(gradient, zeros)
    updated = jax.tree.map(lambda w, u: w - 3e-4 * u, weights, updates)
    found, moments, found_loss = run(weights, zeros, tokens_BS)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for name in gradient:  # after one step the first moment is a tenth of the gradient
        np.testing.assert_allclose(
            10 * moments.mu[name], gradient[name], rtol=2e-3, atol=2e-6, err_msg=name
        )
        np.testing.assert_allclose(found[name], updated[name], atol=2e-5, err_msg=name)


def test_large_logits_do_not_overflow():
    """The softmax over `model` subtracts a maximum: logits in the hundreds give a dense loss."""
    run, weights, zeros, tokens_BS = start(2, 2, 2)
    weights["head_DV"] *= 5000
    wanted = dense_loss(weights, tokens_BS)
    assert wanted > 100
    np.testing.assert_allclose(run(weights, zeros, tokens_BS)[2], wanted, rtol=1e-4)


def two_steps(*sizes):
    run, weights, moments, tokens_BS = start(*sizes)
    losses = []
    for _ in range(2):
        weights, moments, loss = run(weights, moments, tokens_BS)
        losses.append(loss)
    return losses, (weights, moments)


def test_two_steps_on_one_device_and_on_eight_agree():
    """The same losses, weights and moments, with all three axes in use."""
    (losses, state), (losses_8, state_8) = two_steps(1, 1, 1), two_steps(2, 2, 2)
    np.testing.assert_allclose(losses_8, losses, rtol=1e-6)
    assert losses[1] < losses[0]
    gaps = jax.tree.map(lambda one, eight: abs(one - eight).max(), state, state_8)
    assert max(jax.tree.leaves(gaps)) < 1e-5


def test_weights_stay_where_they_are():
    """The step returns weights and moments with the shardings that they came with."""
    step, *shapes = llama_step.step_on(mesh_of(2, 2, 2), TINY, B=8, S=16)
    found = step.lower(*shapes).compile().output_shardings[:2]
    pairs = zip(jax.tree.leaves(shapes[:2]), jax.tree.leaves(found), strict=True)
    assert all(out.is_equivalent_to(like.sharding, like.ndim) for like, out in pairs)


def test_gradients_are_reduced_over_replicas_as_shards():
    """Each replica's gradients are scattered first: only a shard is added up over `replica`."""
    step, *shapes = llama_step.step_on(mesh_of(2, 2, 2), TINY, B=8, S=16)
    table = ms.collectives(step.lower(*shapes).compile()).by("kind", "axes")
    scattered = table["reduce-scatter", ("data",)].payload_bytes
    assert table["all-reduce", ("replica",)].payload_bytes * 2 == scattered  # shards of two


# Without a device


def test_a_program_for_2048_chips_is_lowered_without_them(page):
    """A mesh without devices is enough; this process has eight."""
    many = page.abstract_mesh(replica=1, data=2048, model=1)
    assert isinstance(many, jax.sharding.AbstractMesh)
    step, *shapes = page.step_on(many, page.llama_8b, B=2048)
    text = step.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert "mhlo.num_partitions = 2048" in text and jax.device_count() < 2048


def test_it_has_8_billion_weights(page):
    assert page.count == 8_030_261_248


def test_the_state_takes_12_bytes_for_each_weight(page):
    """6.02 GB on each of 16 chips: one sixteenth, but for the small weights that are whole."""
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


# Does it fit


def test_the_message_counts_the_state(page):
    """19.67 GB against 16.91; with one GiB more of state it is one GiB more, so the 6.03 are in it."""
    refused = page.message
    assert refused.startswith("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom")
    assert "HLO temporaries (18.32G) exceeds available HBM (15.75G)" in refused
    assert in_message("ahead-v5e-16-two-more") - in_message("ahead-v5e-16-two") == pytest.approx(1)
    assert "(19.32G)" in stored_program("ahead-v5e-16-two-more")["tpu"]["refused"]
    counted = in_message("ahead-v5e-16-two") * GIB
    found = page.state_bytes, counted, page.V5E, counted - page.V5E, GIB
    assert [f"{size / GB:.2f}" for size in found] == ["6.03", "19.67", "16.91", "2.76", "1.07"]
    assert f"{GIB / GB:.3f}" == "1.074" and f"{page.V5E / GB:.1f}" == "16.9"


@pytest.mark.skipif(jax.__version__ != stored()["about"]["jax"], reason="of other releases")
@pytest.mark.parametrize("name, B, more", [("two-more", 32, 4), ("more", 16, 8)])
def test_the_programs_with_more_state_are_the_step_and_donated_arrays(page, name, B, more):
    """They are the page's step with `more` arrays of a quarter of a GiB on each device."""
    step, *shapes = page.step_on(page.sixteen, page.llama_8b, B=B)
    by_rows = jax.NamedSharding(page.sixteen, jax.P("data"))
    one = jax.ShapeDtypeStruct((16 * 8192, 8192), "float32", sharding=by_rows)
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
    memory = page.after("silent").memory
    assert memory == stored_memory("ahead-v5e-16", "tpu")
    assert "refused" not in made("ahead-v5e-16")
    parts = memory.arguments + memory.temporaries
    assert parts == pytest.approx(parts + memory.outputs - memory.aliased, rel=1e-5)
    assert memory.bytes_per_device == memory.peak < page.V5E < parts
    found = [f"{size / GB:.2f}" for size in (parts, memory.peak, page.V5E)]
    assert found == ["17.67", "14.75", "16.91"]
    assert f"{(page.V5E - page.state_bytes) / GB:.1f}" == "10.9"


def test_the_peak_is_what_the_compiler_counts(page):
    """With 2.15 GB more of state it counts 16.95: 14.8 without, the peak within 0.1 GB."""
    without = (in_message("ahead-v5e-16-more") - 2) * GIB
    assert f"{without / GB:.1f}" == "14.8"
    assert abs(without - page.after("silent").memory.peak) < 0.1e9


def test_on_four_machines_it_fits(page):
    """With one sequence on each chip, FSDP over all; what an H100 has by default is 64 GB."""
    assert page.ms.CHIPS["v5p"].hbm == page.machines["2,048 TPU v5p"][2] == 95e9
    assert page.machines["64 H100s"][2] == 64e9
    for name, compiler, available in page.machines.values():
        sizes, sequences = MESHES[name]
        assert sizes == {"replica": 1, "data": sequences, "model": 1}
        assert compiler in stored_program(name)
        assert needs(name) <= available


def test_from_256_to_2048_chips_only_the_state_shrinks(page):
    """The state to one eighth, what the step needs by less than a tenth; most is not state."""
    few, many = needs("ahead-v5e-256"), needs("ahead-v5p-2048")
    state = [made(name)["memory"]["arguments"] for name in ("ahead-v5e-256", "ahead-v5p-2048")]
    assert state[0] == pytest.approx(8 * state[1], rel=0.06)  # the norms are whole
    assert 0.9 * few < many < few and state[0] < 0.1 * few


def test_from_16_to_256_chips_most_of_what_shrinks_is_state():
    """The step needs less than half, and more than half of the difference are its arguments."""
    few, many = "ahead-v5e-16", "ahead-v5e-256"
    state = [made(name)["memory"]["arguments"] for name in (few, many)]
    assert needs(many) < needs(few) / 2
    assert state[0] - state[1] > (needs(few) - needs(many)) / 2


def test_eight_h100s_with_16_sequences_compile_and_do_not_fit():
    """145.7 GB of 64, without an error, and with 39 GB gathered for 30."""
    sizes, sequences = MESHES["ahead-h100-8-large"]
    assert math.prod(sizes.values()) == 8 and sequences == 8 * 16
    assert f"{needs('ahead-h100-8-large') / GB:.1f}" == "145.7"
    assert "refused" not in made("ahead-h100-8-large")
    large, small = "ahead-h100-8-large", "ahead-h100-64"
    gathers = [payload(name, "all-gather", "data") for name in (large, small)]
    assert [f"{size / GB:.0f}" for size in gathers] == ["39", "30"]  # XLA gathers some again


# What is sent


def predicted():
    """Bytes of the sharded weights: in the layers gathered twice, all scattered once."""
    named = llama_step.weights_of(llama_step.Config())
    sizes = {name: math.prod(dims) for name, (dims, spec) in named.items() if "data" in spec}
    layers = sum(size for name, size in sizes.items() if "_L" in name)
    others = sum(sizes.values()) - layers
    return {"gathers": 2 * (2 * layers + others), "scatters": 2 * (layers + others)}


def test_fsdp_gathers_30_gb(page):
    """2 bytes × 6.98 billion twice, and 2 × 1.05 billion once; the norms hardly count."""
    assert f"{page.layers / 1e9:.2f} {page.others / 1e9:.2f}" == "6.98 1.05"
    assert [f"{size / GB:.0f}" for size in (page.gathers, page.scatters)] == ["30", "16"]
    assert page.llama_8b == llama_step.Config()
    found = {"gathers": page.gathers, "scatters": page.scatters}
    assert found == pytest.approx(predicted(), rel=1e-4)


def bfloat16_bytes(name):
    """Payload of a stored program's collectives in bfloat16, by kind."""
    found = collections.Counter()
    for row in made(name)["moves"]:
        if row["dtype"] == "bfloat16":
            found[row["kind"]] += row["payload"]
    return found


def test_fsdp_on_h100_is_predicted(page):
    """H100 sends what was written, to the byte: gathers and scatters, and nothing else in bfloat16."""
    wanted, found = predicted(), bfloat16_bytes("ahead-h100-64")
    assert found == {"all-gather": wanted["gathers"], "reduce-scatter": wanted["scatters"]}
    of_page = {"all-gather": page.gathers, "reduce-scatter": page.scatters}
    assert found == pytest.approx(of_page, rel=1e-4)
    assert wanted["gathers"] == payload("ahead-h100-64", "all-gather", "data")


def test_for_tpu_v5e_scatters_become_all_reduces_of_the_same_payload():
    """On 16 chips: gathers as predicted, and each scatter an all-reduce."""
    wanted = predicted()
    assert bfloat16_bytes("ahead-v5e-16") == {
        "all-gather": wanted["gathers"],
        "all-reduce": wanted["scatters"],
    }


def test_an_all_reduce_sends_twice_what_a_scatter_would():
    """For the same payload, by the rows of both programs."""
    moves = made("ahead-h100-64")["moves"]
    (scatter,) = [row for row in moves if row["kind"] == "reduce-scatter"]
    rows = made("ahead-v5e-16")["moves"]
    (reduce,) = [row for row in rows if (row["kind"], row["dtype"]) == ("all-reduce", "bfloat16")]
    assert reduce["payload"] == scatter["payload"]
    assert reduce["wire"] / (15 / 16) == 2 * scatter["wire"] / (63 / 64)


def test_for_256_chips_some_gathers_become_all_reduces_too(page):
    """The payload is the same in all; more than the scatters of it is in all-reduces."""
    wanted, found = predicted(), bfloat16_bytes("ahead-v5e-256")
    assert set(found) == {"all-gather", "all-reduce"}
    assert found["all-reduce"] > wanted["scatters"] and found["all-gather"] < wanted["gathers"]
    assert sum(found.values()) == sum(wanted.values())


def test_for_2048_chips_in_one_axis_gathers_become_all_reduces_too():
    """Everything is an all-reduce: 92 GB sent, where gathers and scatters would send 46."""
    wanted = predicted()
    both = wanted["gathers"] + wanted["scatters"]
    assert bfloat16_bytes("ahead-v5p-2048") == {"all-reduce": both}
    assert f"{both * 2047 / 2048 / GB:.0f}" == "46"
    assert f"{sent('ahead-v5p-2048') / GB:.0f}" == "92"


# What it costs


def test_no_program_took_more_than_two_minutes():
    """For 2,048 chips it took 75 seconds of processor time, and about 2 GB."""
    took = {name: stored_program(name)["compiling"] for name in MESHES}
    assert max(one["seconds"] for one in took.values()) <= 120
    assert took["ahead-v5p-2048"]["seconds"] == 75
    assert f"{max(one['gigabytes'] for one in took.values()):.0f}" == "2"


def test_compiling_for_more_chips_hardly_takes_longer():
    """For 16 chips 69 seconds; for 256 and 2,048 with FSDP at most a quarter longer."""
    names = ("v5e-16", "v5e-256", "v5p-2048")
    few, *more = (stored_program(f"ahead-{name}")["compiling"]["seconds"] for name in names)
    assert few == 69 and max(more) <= 1.25 * few


# The figure


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
