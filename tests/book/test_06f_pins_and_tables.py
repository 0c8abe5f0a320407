"""The page "When should FSDP pin its activations?"."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.logical import Model, Rules, large, make_model, mesh_of, tiny
from many_devices.training import sent_mb
from meshscope import _hlo as hlo
from pages import compiled_for_cpu, source_of
from steps_by_table import IMAGES, RING, TOKENS_OF_AN_IMAGE, compiled, sent
from traced import equations

PAGE = "06f-pins-and-tables"


def step_of(page, config, B=IMAGES):
    return compiled(config, page.fsdp, page.mesh.devices.shape, B)


def wire(page, config, B=IMAGES):
    """What one device sends in a step that is compiled here."""
    return 1e6 * sent_mb(step_of(page, config, B)[0])


# What a pin changes


def test_the_model_pins_what_the_page_says():
    """By the table: what enters the first block, what leaves each, the logits; `Model` pins nothing."""
    B, S, D, V, L = 8, tiny.S, tiny.D, tiny.V, tiny.L
    inside = {"hidden": "model", "heads": "model", "vocab": "model"}
    for vocab, rules, mesh in [
        (None, Rules(batch="data", embed="data"), mesh_of(8, 1)),
        ("model", Rules(batch="data", embed="data", **inside), mesh_of(2, 4)),
    ]:
        x_BSI = np.zeros((B, S, tiny.I), "float32")
        with jax.set_mesh(mesh):
            model = nnx.eval_shape(functools.partial(make_model, tiny, rules))
            jaxpr = jax.make_jaxpr(type(model).__call__)(model, x_BSI).jaxpr
            plain = jax.make_jaxpr(Model.__call__)(model, x_BSI).jaxpr
        found = [
            (tuple(eqn.params["sharding"].spec), eqn.outvars[0].aval.shape, times)
            for eqn, times in equations(jaxpr, "sharding_constraint")
        ]
        batch = ("data", None, None), (B, S, D)
        assert found == [(*batch, 1), (*batch, L), (("data", vocab), (B, V), 1)]
        assert not list(equations(plain, "sharding_constraint"))


@compiled_for_cpu
def test_without_pins_no_weights_are_gathered(page):
    """Without pins next to no weights move, and the widest sum is of h, for all images."""
    program, mesh = step_of(page, page.free)
    moves = ms.collectives(program, mesh)
    gathered = sum(
        move.payload_bytes * move.executions for move in moves if move.kind == "all-gather"
    )
    weights = 4 * 12 * large.L * large.D**2  # bytes of the kernels in the blocks
    assert gathered < 1e-4 * weights
    widest = max(moves, key=lambda move: move.payload_bytes)
    assert widest.kind == "all-reduce" and widest.shape == (IMAGES, large.S, large.F)


@compiled_for_cpu
def test_the_stored_programs_for_cpu_are_those_that_are_compiled_here(page):
    """Compiled here, the two steps at 64 images send what is stored of them."""
    assert wire(page, large) == pytest.approx(sent("names-pinned", "cpu"))
    assert wire(page, page.free) == pytest.approx(sent("names-free", "cpu"))


# Memory


def test_the_table_of_h100_is_that_of_the_stored_programs():
    """With pins 7.3 GB of temporaries and 67.7 GB sent, without 15.0 and 11.3: twice, and a sixth."""
    text = source_of(PAGE).read_text("utf-8")
    needs = []
    for row, name in (("with pins", "names-pinned"), ("without", "names-free")):
        needs.append(stored_program(name)["gpu"]["memory"]["temporaries"] / 1e9)
        cells = f"{needs[-1]:.1f} GB | {sent(name, 'gpu') / 1e9:.1f} GB"
        assert f"\n| {row} | {cells} |\n" in text
    assert needs[1] / needs[0] == pytest.approx(2, rel=0.05)


def test_for_a_tpu_the_step_without_pins_does_not_compile():
    """The compiler for TPU v5e refuses it: a program can use 15.75 GiB."""
    words = stored_program("names-free")["tpu"]["refused"]
    assert "temporaries (19.83G) exceeds available HBM (15.75G)" in words
    assert "moves" in stored_program("names-pinned")["tpu"]


# The batch decides


@compiled_for_cpu
def test_with_pins_fsdp_sends_the_same_at_any_batch(page):
    """Within a thousandth at eight times the batch, on CPU and H100."""
    assert f"{page.sent_gb['with pins', 64]:.1f}" == "90.2"
    for compiler in ("cpu", "gpu"):
        few, many = sent("names-pinned", compiler), sent("names-pinned-512", compiler)
        assert many == pytest.approx(few, rel=1e-3)


@compiled_for_cpu
def test_without_pins_bytes_grow_with_the_batch(page):
    """Compiled for CPU, 512 images send eight times what 64 do, and 1,024 sixteen times."""
    few = page.sent_gb["without", 64]
    assert page.sent_gb["without", 1024] == pytest.approx(16 * few, rel=1e-3)
    assert wire(page, page.free, 512) == pytest.approx(8e9 * few, rel=1e-3)


@compiled_for_cpu
def test_compiled_for_cpu_both_send_as_much_at_512_images(page):
    """90.2 GB with pins and without: 2 D tokens. Below that pins cost bytes, above they save them."""
    pinned, free = page.sent_gb["with pins", 64], wire(page, page.free, 512) / 1e9
    assert f"{pinned:.1f}" == f"{free:.1f}" == "90.2"
    assert page.sent_gb["without", 64] < pinned < page.sent_gb["without", 1024]
    assert 512 * TOKENS_OF_AN_IMAGE == 2 * large.D


def test_for_h100_both_send_as_much_at_384_images():
    """For H100 it is six times at 64 images, so 384: 6,144 tokens, 1.5 D."""
    pinned, free = sent("names-pinned", "gpu"), sent("names-free", "gpu")
    assert (f"{pinned / 1e9:.1f}", f"{free / 1e9:.1f}") == ("67.7", "11.3")
    assert f"{pinned / free:.2f}" == "6.00"
    assert 384 * TOKENS_OF_AN_IMAGE == 6_144 == 1.5 * large.D


# Why: numbers that move for a kernel of D x n, by compiler
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


@compiled_for_cpu
def test_a_matmul_over_d_adds_up_forward_and_the_other_backward(page):
    """Without pins w_DF has its sum of F numbers a token forward, and w_FD backward."""
    program, _ = step_of(page, page.free)
    of_h = f"f32[{IMAGES},{large.S},{large.F}]"
    lines = [
        line.line
        for computation in hlo.parse(program.as_text()).computations.values()
        for line in computation.values()
        if line.opcode == "all-reduce" and of_h in line.line
    ]
    assert sorted("transpose(" in line for line in lines) == [False, True]


@pytest.mark.parametrize("compiler, unpinned", [("gpu", 1.5), ("cpu", 2)])
def test_pins_pay_from_so_many_tokens(compiler, unpinned):
    """FSDP sends as much with pins as without at 1.5 D tokens on H100 and 2 D on CPU."""
    times = sent("names-pinned", compiler) / sent("names-free", compiler)
    tokens = times * IMAGES * TOKENS_OF_AN_IMAGE
    assert tokens / large.D == pytest.approx(unpinned, rel=0.01)
    assert KERNEL[compiler] / 2 == unpinned  # K D n = 2 n tokens


# Against tensor parallelism


@pytest.mark.parametrize("compiler, times", [("gpu", 3), ("cpu", 2)])
def test_without_pins_fsdp_sends_three_times_what_tensor_parallelism_does(compiler, times):
    """24 D numbers for each token against 8 D on H100, at any batch (and 12 D on CPU)."""
    free, few = sent("names-free", compiler), sent("names-few", compiler)
    assert free / few == pytest.approx(times, rel=0.01)
    assert 2 * 12 == times * 2 * SUMS[compiler]


TABLE = [  # for H100: tokens in widths, and what sends least, second and most
    ("fewer than 1.5 D", (0.5, 1, 1.49), "tensor parallelism", "FSDP without", "FSDP with pins"),
    ("1.5 D to 4.5 D", (1.51, 3, 4.49), "tensor parallelism", "FSDP with pins", "FSDP without"),
    ("more than 4.5 D", (4.51, 9), "FSDP with pins", "tensor parallelism", "FSDP without"),
]


@pytest.mark.parametrize("row, widths, least, second, most", TABLE)
def test_what_sends_least_on_h100(row, widths, least, second, most):
    """Of FSDP with and without pins and tensor parallelism, by the bytes of the stored programs."""
    pinned, free, few = (sent(f"names-{name}", "gpu") for name in ("pinned", "free", "few"))
    for width in widths:
        more = width * large.D / (IMAGES * TOKENS_OF_AN_IMAGE)  # times 64 images
        sizes = {
            "FSDP with pins": pinned,
            "FSDP without": free * more,
            "tensor parallelism": few * more,
        }
        assert sorted(sizes, key=sizes.get) == [least, second, most]
    cells = " | ".join([row, least, second, most]).replace("FSDP without", "FSDP without pins")
    assert f"\n| {cells} |\n" in source_of(PAGE).read_text("utf-8")


def test_without_pins_fsdp_needs_more_memory_than_tensor_parallelism():
    """For H100, 15.0 GB of temporaries and not 9.1, and it sends 11.3 GB and not 3.76."""
    free, few = (stored_program(name)["gpu"]["memory"] for name in ("names-free", "names-few"))
    assert f"{free['temporaries'] / 1e9:.1f}" == "15.0"
    assert f"{few['temporaries'] / 1e9:.1f}" == "9.1"
    assert f"{sent('names-free', 'gpu') / 1e9:.1f}" == "11.3"
    assert f"{sent('names-few', 'gpu') / 1e9:.2f}" == "3.76"


def test_the_cpu_uses_no_reduce_scatter_and_the_others_do():
    """Under FSDP, the compiler for CPU all-reduces gradients; those for H100 and TPU v5e scatter them."""
    kinds = {
        compiler: {row["kind"] for row in stored_program("names-pinned")[compiler]["moves"]}
        for compiler in KERNEL
    }
    assert "reduce-scatter" in kinds["gpu"] and "reduce-scatter" in kinds["tpu"]
    assert "reduce-scatter" not in kinds["cpu"]
