"""The page "Out of memory?": remat and bfloat16, what they save and what they cost."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from compared import apart, host
from many_devices import llama_step
from many_devices.compiled import stored_memory, stored_program
from many_devices.memory import ROWS, kept, kept_gb, state
from many_devices.stacked import Strategy, large, loss_of, tiny
from many_devices.training import QUICK, batch_of, place, sent_mb, shapes, step_program
from pages import compiled_for_cpu, run, source_of
from printed import rows_of

PAGE = "04c-less-memory"
P = jax.P
TEXT = source_of(PAGE).read_text("utf-8")
COMPILERS = {"H100": "gpu", "TPU v5e": "tpu", "CPU": "cpu"}


def gb(tree_or_program):
    return ms.memory(tree_or_program).bytes_per_device / 1e9


# Remat


def test_with_remat_a_layer_keeps_its_input_only(page):
    """One array in place of 20: 2.1 of 43 GB."""
    assert kept_gb(page.recomputed) == 4 * large.L * 4096 * large.D / 1e9
    assert f"{kept_gb(page.recomputed):.1f}" == "2.1"
    assert len(kept(page.recomputed)) == 1
    assert round(kept_gb(page.fsdp) / kept_gb(page.recomputed)) == 20


@compiled_for_cpu
def test_remat_costs_a_sixth_more_arithmetic_and_no_digits():
    """The gradients are the same to 1e-6, and of a layer's matmuls one in six is done again."""
    gradients, flops, batch = [], [], batch_of(np.arange(64), Strategy(1, 1).mesh())
    for strategy in (Strategy(1, 1), Strategy(1, 1, remat=jax.checkpoint)):
        model, _ = place(strategy)
        with jax.set_mesh(strategy.mesh()):
            gradient = jax.jit(jax.grad(loss_of)).lower(model, batch).compile(QUICK)
        gradients.append(host(gradient(model, batch)))
        flops.append(gradient.cost_analysis()["flops"])  # of one layer: a loop counts once
    assert apart(*gradients) < 1e-6
    assert abs(flops[1] / flops[0] - 7 / 6) < 0.02


LAYER = llama_step.Config(L=1)  # one layer of Llama 3.1 8B
DOT = re.compile(
    r"dot_general .*contracting_dims = \[(?P<dims>[\d, ]+)\] x "
    r".* : \(tensor<(?P<left>[\dx]+)x\w+>, .* -> tensor<(?P<result>[\dx]+)x\w+>"
)


def matmuls_of_a_llama_layer(wrapped):
    """Operations of each matmul, forward and backward, for one sequence of 4,096 tokens."""

    def loss(weights, x_BSD):
        x_BSD, _ = wrapped(x_BSD, weights)
        return jax.lax.psum(jnp.sum(x_BSD.astype("float32") ** 2), ("replica", "data"))

    mesh = llama_step.abstract_mesh(replica=1, data=1, model=1)
    weights = {
        name: jax.ShapeDtypeStruct(dims[1:], "float32")
        for name, (dims, _) in llama_step.weights_of(LAYER).items()
        if "_L" in name
    }
    x_BSD = jax.ShapeDtypeStruct((1, 4096, LAYER.D), LAYER.dtype)
    gradient = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=(P(), P()), out_specs=P()
    )
    lowered = jax.jit(gradient).trace(weights, x_BSD).lower(lowering_platforms=("cpu",))
    for dot in DOT.finditer(lowered.as_text()):
        left, result = ([int(size) for size in dot[name].split("x")] for name in ("left", "result"))
        contracted = [left[int(dim)] for dim in dot["dims"].split(",")]
        yield 2 * math.prod(result + contracted)


def test_remat_of_a_llama_layer_costs_a_quarter_more_arithmetic():
    """Of its nine matmuls in the forward pass only the last is not done again; all would be 1/3."""
    plain, remat = (
        list(matmuls_of_a_llama_layer(wrapped))
        for wrapped in (llama_step.layer, jax.checkpoint(llama_step.layer))
    )
    forward = 9  # seven with weights, and two with queries, keys and values
    assert len(plain) == 3 * forward and len(remat) == len(plain) + forward - 1
    last = 2 * 4096 * LAYER.F * LAYER.D
    assert sum(remat) - sum(plain) == pytest.approx(sum(plain) / 3 - last)
    assert 0.245 < sum(remat) / sum(plain) - 1 < 0.265


# bfloat16


def test_a_bfloat16_weight_loses_small_updates(page):
    """1,000 times 0.001 is lost, because the next bfloat16 after 1 is about 1.008."""
    assert float(page.weight) == 1.0 and jnp.float32(1.0) + jnp.float32(0.001) > 1.0
    after_1 = jnp.nextafter(jnp.asarray(1, "bfloat16"), jnp.asarray(2, "bfloat16"))
    assert f"{float(after_1):.3f}" == "1.008"


def test_bfloat16_halves_what_is_kept_after_remat(page):
    """1.1 of 2.1 GB."""
    assert kept_gb(page.mixed) == kept_gb(page.recomputed) / 2
    assert f"{kept_gb(page.mixed):.1f}" == "1.1"


def test_masters_moments_and_gradients_are_float32(page):
    """In bfloat16 training the weights, the moments and the gradients stay float32."""
    model, _, batch = shapes(tiny, page.mixed, 64)
    with jax.set_mesh(page.mixed.mesh()):
        gradients = jax.eval_shape(jax.grad(loss_of), model, batch)
    for tree in (page.rounded.model, page.rounded.optimizer.opt_state[0], gradients):
        floats = {leaf.dtype for leaf in jax.tree.leaves(tree) if leaf.dtype != "int32"}
        assert floats == {jnp.dtype("float32")}


def test_matmuls_are_bfloat16_and_the_norm_and_the_loss_float32(page):
    """Sums over many terms need digits: only products have bfloat16 results."""
    model, _, batch = shapes(tiny, page.mixed, 64)
    with jax.set_mesh(page.mixed.mesh()):
        forward = str(jax.make_jaxpr(loss_of)(model, batch))

    def results_of(primitives):
        called = re.compile(rf" = ({primitives})\b")
        lines = [line for line in forward.splitlines() if called.search(line)]
        return [line.split(" = ")[0] for line in lines]

    exact = results_of("reduce_sum|integer_pow|square|sqrt|exp|log")
    assert len(exact) >= 6 and all(":f32[" in result for result in exact)
    products = results_of("dot_general")
    assert len(products) == 4 and all(":bf16[" in result for result in products)


def test_the_tiny_model_trains_in_bfloat16_with_slightly_other_losses(page):
    """Twenty losses agree to 5 %, and not to 1e-5."""
    np.testing.assert_allclose(page.rounded.losses, page.plain.losses, rtol=0.05, atol=0.02)
    assert not np.allclose(page.rounded.losses, page.plain.losses, rtol=1e-5)


def number(page, pattern):
    """A number in the text of a page, which must say it once."""
    (found,) = set(re.findall(pattern, source_of(page).read_text("utf-8")))
    return float(found)


def test_bfloat16_is_about_twice_as_fast_as_float32_by_default_and_many_times_as_highest():
    """On the H200, bfloat16 multiplies about twice as fast as float32 at JAX's default precision,
    and many times as fast as with "highest"."""
    operations = 2 * 8192**3
    by_default = operations / (1e-3 * number("04-train", r"took ([\d.]+) ms by default")) / 1e12
    highest = operations / (1e-3 * number("04-train", r"and ([\d.]+) ms with `\"highest\"`")) / 1e12
    bfloat16 = number("communication-bound", r"reached at best (\d+) of the 989 TFLOP/s")
    assert 1.8 < bfloat16 / by_default < 2.2
    assert bfloat16 / highest > 10
    assert "about twice as fast as in float32 at JAX's default precision" in TEXT


@pytest.mark.parametrize("compiler", ["tpu", "gpu"])
def test_tpu_and_h100_add_up_gradients_in_bfloat16(compiler):
    """Where layers compute in bfloat16, sums of gradients over devices are bfloat16 too.

    Only the norms' scales and the loss are summed in float32: too few bytes for one kernel. (For TPU
    the kernels' sums are carried by collective-permutes, also in bfloat16.)
    """
    sums = {"all-reduce", "reduce-scatter"}
    moves = stored_program("train-mixed")[compiler]["moves"]
    assert "bfloat16" in {move["dtype"] for move in moves if move["kind"] in sums}
    in_float32 = sum(move["payload"] for move in moves if move["dtype"] == "float32")
    assert in_float32 < 4 * large.D * large.F / 8


# Does it fit?


def test_only_the_activations_shrink(page):
    """The bars: 51.6, 10.8 and 9.7 GB, of which 8.6 GB are weights, gradients and moments in each."""
    totals = [f"{sum(row.values()) / 1e9:.1f}" for row in page.memory.values()]
    assert totals == ["51.6", "10.8", "9.7"]
    for row in page.memory.values():
        assert f"{(sum(row.values()) - row['activations']) / 1e9:.1f}" == "8.6"
    activations = [f"{row['activations'] / 1e9:.1f}" for row in page.memory.values()]
    assert activations == ["43.0", "2.1", "1.1"]


@pytest.mark.parametrize("compiler", ["tpu", "gpu"])
def test_a_compiled_step_holds_what_the_bars_count_and_temporary_results(page, compiler):
    """Compiled for H100 and TPU v5e, a step asks for up to 3 GB more than was counted."""
    for bar, (stored, _) in zip(page.memory.values(), STEPS.values(), strict=True):
        program = stored_program(stored)[compiler]
        if "refused" not in program:
            planned = ms.ProgramMemory(**program["memory"]).bytes_per_device
            assert 0 < planned - sum(bar.values()) < 3e9


STEPS = {
    "float32, everything kept": ("train-large-fsdp", "fsdp"),
    "float32, remat": ("train-remat", "recomputed"),
    "bfloat16, remat": ("train-mixed", "mixed"),
}


@pytest.mark.parametrize("compiler", [name for name in COMPILERS if name != "CPU"])
@pytest.mark.parametrize("row", STEPS)
def test_the_table_says_what_two_compilers_plan(row, compiler):
    """Arguments and temporaries of the stored programs, or that the program does not compile."""
    stored = stored_program(STEPS[row][0])[COMPILERS[compiler]]
    said = rows_of(TEXT, "FSDP, a whole step")[row][compiler]
    if "refused" in stored:
        assert said == "too large: compile fails" and "Ran out of memory" in stored["refused"]
    else:
        assert said == f"{ms.ProgramMemory(**stored['memory']).bytes_per_device / 1e9:.1f} GB"


@compiled_for_cpu
def test_the_stored_steps_are_what_the_cpu_compiler_plans_here(page):
    """Compiled here, the steps of the last two rows need what is stored, on the releases of the book."""
    stored, in_jax_0_10 = stored_memory("train-mixed", "cpu").bytes_per_device / 1e9, "12.3"
    assert f"{gb(step_program(large, page.mixed, ROWS)):.1f}" in (f"{stored:.1f}", in_jax_0_10)
    assert f"{gb(step_program(large, page.recomputed, ROWS)):.1f} GB" == "12.2 GB"


def test_on_a_tpu_v5e_the_step_fits_with_remat_and_not_without():
    """A program can have 15.75 GiB, 16.9 GB; without remat the compiler says that it has too little."""
    available = 15.75 * 2**30
    assert "exceeds available HBM (15.75G)" in stored_program("train-large-fsdp")["tpu"]["refused"]
    wanted = [
        stored_memory(name, "tpu").bytes_per_device for name in ("train-remat", "train-mixed")
    ]
    assert wanted[1] < wanted[0] < available
    assert f"{available / 1e9:.1f}" == "16.9"


# What remat sends


@compiled_for_cpu
def test_neither_remat_nor_bfloat16_sends_a_byte_more(page):
    """In this program FSDP gathers in both passes anyway, so that remat adds no gather."""
    sent = sent_mb(step_program(tiny, page.fsdp, 64))
    halved = replace(page.fsdp, use=page.in_bfloat16)
    for strategy in (halved, page.recomputed, page.mixed):
        assert sent_mb(step_program(tiny, strategy, 64)) == sent


@pytest.mark.parametrize("compiler", ["tpu", "gpu"])
def test_on_other_compilers_remat_and_bfloat16_send_no_more_either(compiler):
    """For H100, remat sends what everything kept sends, and bfloat16 half; for TPU, no more."""

    def sent(name):
        return sum(move["wire"] for move in stored_program(name)[compiler]["moves"])

    assert sent("train-mixed") <= sent("train-remat")
    if compiler == "gpu":
        assert sent("train-remat") == sent("train-large-fsdp")
        assert sent("train-mixed") / sent("train-remat") == pytest.approx(1 / 2, abs=1e-3)


def test_the_table_of_ways_says_what_was_counted(page):
    """To one twentieth, one half and one eighth in the large model; FSDP sends half as much again."""
    told = {way: row["What gets smaller"] for way, row in rows_of(TEXT, "Way").items()}
    data_parallel = page.strategies["data parallel"]
    whole, sharded = state(data_parallel), state(page.fsdp)
    with run("04d-zero1", until="make-zero1") as next_page:
        zero1 = state(data_parallel, make=next_page.make_zero1)
    shares = {
        "activations, to one twentieth": kept_gb(page.fsdp) / kept_gb(page.recomputed) / 20,
        "activations, to one half": kept_gb(page.recomputed) / kept_gb(page.mixed) / 2,
        "moments, to one eighth": whole["moments"] / zero1["moments"] / 8,
        "all but activations, to one eighth": sum(whole.values()) / sum(sharded.values()) / 8,
    }
    assert list(told.values())[:4] == list(shares)
    assert list(shares.values()) == pytest.approx([1] * 4, rel=0.03)
    assert rows_of(TEXT, "Way")["FSDP"]["The price"] == "1.5 times the bytes to send"
    sent = [
        sum(move["wire"] for move in stored_program(name)["gpu"]["moves"])
        for name in ("train-dp", "train-fsdp")
    ]
    assert sent[1] / sent[0] == pytest.approx(1.5, abs=0.03)
