"""The page "When a gather costs no time: see what hides with `ms.overlap`"."""

import gzip
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import meshscope as ms
from layers_of_fsdp import REMATS, in_one_layer
from many_devices.compiled import stored_program
from many_devices.stacked import tiny
from pages import BOOK, check_exercise, compiled_for_cpu, exercises_of, source_of

PAGE = "09c-fsdp-overlap"
TEXT = source_of(PAGE).read_text("utf-8")
NODE, NETWORK = "H100, inside a node", "H100, between nodes"
MATRICES = [[4096, 16384], [16384, 4096]]


def tokens(bytes_for_a_number, operations_for_a_row, flops, bandwidth):
    """How many rows hide what is sent for each number of a matrix."""
    return bytes_for_a_number / operations_for_a_row * flops / bandwidth


def in_a_pass(remat, sum_dtype, backward=True):
    """Bytes and operations for each number of a matrix, as the traced program has them."""
    counts = in_one_layer(REMATS[remat])
    if not backward:
        return 2 * 1, 2 * 1  # one gather in bfloat16; a multiplication and an addition
    size = 2 * (counts["gathers"] - 1) + sum_dtype * counts["scatters"]
    return size, 2 * (counts["matmuls"] - 1)


# How many tokens hide a gather


def test_c_over_w_of_the_published_peaks(page):
    """2,198 tokens inside a node, 2,472 with eight NICs, 2,550 on a TPU v5p."""
    found = [f"{flops / bandwidth:,.0f}" for flops, bandwidth in page.machines.values()]
    assert found == ["2,198", "2,472", "2,550"]
    assert list(page.machines)[:2] == [NODE, NETWORK]


def test_a_nic_for_each_gpu_needs_hardly_more_and_one_for_all_eight_times_as_many(page):
    """Less than 13 % more between nodes than inside; one NIC for all needs eight times as many."""
    node, network = (flops / bandwidth for flops, bandwidth in list(page.machines.values())[:2])
    one = page.machines[NETWORK][0] / 50e9
    assert one / network == 8 and network / node < 1.13


@compiled_for_cpu
def test_a_matmul_of_t_rows_is_2tdf_operations():
    """As XLA counts them."""
    T, D, F = 128, 256, 512
    product = jax.jit(jnp.matmul).lower(jnp.zeros((T, D)), jnp.zeros((D, F))).compile()
    assert product.cost_analysis()["flops"] == 2 * T * D * F


def test_by_the_peaks_a_gather_hides_from_c_over_w_tokens_on(page):
    """In bfloat16, and by the peaks, forward and backward need C/W tokens: 2,198 in a node."""
    machine = page.machines[NODE]
    forward = tokens(*in_a_pass("freed by a policy", 2, backward=False), *machine)
    backward = tokens(*in_a_pass("freed by a policy", 2), *machine)
    assert forward == backward == machine[0] / machine[1]
    assert f"{forward:,.0f}" == "2,198"


def test_slower_matmuls_need_fewer_tokens(page):
    """At half of the matmuls' peak half as many tokens hide a gather."""
    flops, bandwidth = page.machines[NODE]
    once = in_a_pass("freed by a policy", 2, backward=False)
    at_peak = tokens(*once, flops, bandwidth)
    assert tokens(*once, flops / 2, bandwidth) == pytest.approx(at_peak / 2)


# The backward pass


def test_the_backward_pass_gathers_again_scatters_and_has_two_matmuls():
    """As traced, with weights freed by a policy: 2 + 2 bytes and 4 operations; in float32 2 + 4."""
    counts = in_one_layer(REMATS["freed by a policy"])
    assert counts == {"gathers": 2, "scatters": 1, "matmuls": 3}  # one gather and matmul forward
    assert in_a_pass("freed by a policy", 2) == (2 + 2, 4)
    assert in_a_pass("freed by a policy", 4) == (2 + 4, 4)


# What can hide in your program


def beside(program):
    """For each gather of the forward pass, in order: which matmuls of the layer are beside it."""
    return [
        (shape, matmuls)
        for loop, _, shape, matmuls in stored_program(program)["gpu"]["schedule"]
        if loop == 0 and shape in MATRICES  # and not a bias
    ]


def test_by_default_the_gather_of_the_first_matrix_has_no_matmul_beside_it():
    """In the forward pass; the gather of the second is beside matmul 0."""
    first, second = MATRICES
    assert beside("overlap") == [(first, []), (second, [0])]


def test_gathering_ahead_puts_the_first_gather_beside_the_last_matmul_of_the_layer_before():
    """Beside matmul 1, when matmul 0 has used this layer's first matrix: so it is the next layer's."""
    first, second = MATRICES
    assert sorted(beside("overlap-ahead")) == [(first, [1]), (second, [0])]


@pytest.mark.parametrize("program", ["overlap", "overlap-ahead"])
def test_backward_two_of_four_have_a_matmul_beside_them_with_and_without_the_flag(program):
    """Two gathers and two scatters of the matrices in the backward pass."""
    rows = [
        (kind, matmuls)
        for loop, kind, shape, matmuls in stored_program(program)["gpu"]["schedule"]
        if loop == 1 and shape in MATRICES
    ]
    assert [kind for kind, _ in rows].count("all-gather") == 2
    assert [kind for kind, _ in rows].count("reduce-scatter") == 2
    assert len(rows) == 4 and sum(bool(matmuls) for _, matmuls in rows) == 2


@compiled_for_cpu
def test_on_cpu_every_collective_of_the_step_is_synchronous(page):
    """The step gathers in both of its loops, and the table says that CPU starts nothing early."""
    assert {row.beside for row in page.overlap} == {"synchronous"}
    trips = [row.trips for row in page.overlap if row.kind == "all-gather" and row.trips]
    assert trips == [tiny.L] * 4  # two kernels of a layer, forward and backward
    assert "XLA for CPU starts no collective early" in repr(page.overlap)


def test_for_h100s_half_of_the_bytes_wait_and_half_are_sent_during_the_third_matmul():
    """Six layers, compiled for eight H100s (tests/meshscope/fixtures/make_known.py)."""
    kept = (
        BOOK.parent / "tests" / "meshscope" / "fixtures" / "known" / "gpu" / "hidden_gathers.hlo.gz"
    )
    text = gzip.decompress(kept.read_bytes()).decode()
    overlap = ms.overlap(text, jax.sharding.AbstractMesh((8,), ("data",)))
    _, *table = repr(overlap.by("beside")).splitlines()
    assert "```text\n" + "\n".join(table) + "\n```" in TEXT
    first, second = overlap
    assert first.payload_bytes == second.payload_bytes == 3 * 2048 * 2048 * 2
    assert first.matmuls == () and second.matmuls == (2,)


def test_the_scheduler_that_hides_collectives_is_on_by_default():
    """Without it two of the six have a matmul beside them, and by default three."""
    counts = []
    for program in ("overlap-in-place", "overlap"):
        rows = stored_program(program)["gpu"]["schedule"]
        beside = [bool(matmuls) for _, _, shape, matmuls in rows if shape in MATRICES]
        assert len(beside) == 6
        counts.append(sum(beside))
    assert counts == [2, 3]


# Flags


def starts(*flags):
    """Does JAX start with these flags of XLA?"""
    env = os.environ | {"XLA_FLAGS": " ".join(flags)}
    code = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(code, env=env, capture_output=True).returncode == 0


def test_xla_knows_the_gpu_flags_of_the_page(page):
    """The four of the cell, which the list explains."""
    assert page.tried.returncode == 0 and len(page.flags) == 4
    for flag in page.flags:
        assert f"`{flag.partition('=')[0].removeprefix('--')}`" in TEXT


def test_an_unknown_flag_and_one_for_tpus_end_the_process():
    """XLA does not start with a flag that it does not know."""
    assert not starts("--xla_gpu_enable_pipelined_collectives=true")
    assert not starts("--xla_tpu_enable_latency_hiding_scheduler=true")


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)
