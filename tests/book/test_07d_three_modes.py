"""The page "One training step in Auto, Explicit and Manual mode"."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from many_devices.compiled import stored_program
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again
from stored_moves import stored_moves

PAGE = "07d-three-modes"
P = jax.P


def message(function, *inputs):
    """What JAX raises, on one line."""
    return " ".join(attempt(function, *inputs).split())


X_BYTES, W_BYTES = 4 * 16 * 96, 4 * 384 * 96  # the batch of 16 rows, the weight


@functools.cache
def moved(page, way, axis_type, B):
    """Kinds and payloads of a step, compiled here."""
    return [(move.kind, move.payload_bytes) for move in page.moves_of(way, axis_type, B)]


GATHERED_AND_SUMMED = [("all-gather", W_BYTES), ("all-reduce", W_BYTES)]


@compiled_for_cpu
def test_in_auto_mode_the_batch_size_decides_what_is_gathered(page):
    """Compiled for CPU: the batch at 16 rows, and up to 376; the weight from 384 rows on."""
    assert X_BYTES < W_BYTES < 2048 // 16 * X_BYTES
    for B in (16, 376):
        found = moved(page, page.auto_step, AxisType.Auto, B)
        assert found == [("all-gather", B * 96 * 4)]
    for B in (384, 2048):
        assert moved(page, page.auto_step, AxisType.Auto, B) == GATHERED_AND_SUMMED


def test_in_explicit_mode_the_step_raises_until_it_says_what_is_gathered(page):
    """As it is, the step would have data twice in its product."""
    said = message(page.moves_of, page.auto_step, AxisType.Explicit, 2048)
    assert "illegally sharded" in said


@compiled_for_cpu
@pytest.mark.parametrize("B", [16, 2048])
def test_explicit_and_manual_mode_gather_the_weight_at_every_size(page, B):
    """Compiled for CPU: Explicit sums the whole gradient, and by hand it is scattered."""
    assert moved(page, page.explicit_step, AxisType.Explicit, B) == GATHERED_AND_SUMMED
    by_hand = [("all-gather", W_BYTES), ("reduce-scatter", W_BYTES)]
    assert moved(page, page.manual_step, AxisType.Auto, B) == by_hand


@compiled_for_cpu
@pytest.mark.parametrize("B", [16, 2048])
def test_a_resharded_batch_is_gathered_at_every_size(page, B):
    """Compiled for CPU: in Explicit mode you may gather the batch instead."""

    def gathers_the_batch(w_FD, x_BD):
        return page.step_with(page.not_gathered, w_FD, jax.reshard(x_BD, P(None, None)))

    found = page.moves_of(gathers_the_batch, AxisType.Explicit, B)
    assert [(move.kind, move.payload_bytes) for move in found] == [("all-gather", 4 * B * 96)]


@compiled_for_cpu
def test_a_constraint_gathers_the_weight_in_auto_mode(page):
    """Compiled for CPU: with_sharding_constraint as `gather`, at 16 rows."""
    assert page.constrained_moves == GATHERED_AND_SUMMED
    assert moved(page, page.constrained_step, AxisType.Auto, 16) == GATHERED_AND_SUMMED


def test_the_compilers_for_h100_and_tpu_scatter_in_all_three_modes(page):
    """The stored programs: the batch, or the weight and a reduce-scatter; the TPU in bfloat16."""
    for compiler, dtype, share in [("gpu", "float32", 1), ("tpu", "bfloat16", 2)]:
        assert stored_moves("step-auto-16", compiler, "kind", "dtype", "wire") == [
            ("all-gather", dtype, X_BYTES * 7 // 8 // share)
        ]
        for name in ("auto-2048", "told-16", "manual-16"):
            assert stored_moves(f"step-{name}", compiler, "kind", "dtype", "wire") == [
                ("all-gather", dtype, W_BYTES * 7 // 8 // share),
                ("reduce-scatter", "float32", W_BYTES * 7 // 8),
            ]


def printed_rows(page, capsys, cell):
    run_again(page, PAGE, cell)
    _, *rows = capsys.readouterr().out.splitlines()
    return [re.split("  +", row.strip()) for row in rows]


@compiled_for_cpu
def test_the_table_says_what_is_gathered(page, capsys):
    """One row for each program: H100 and CPU gather the same array."""
    assert printed_rows(page, capsys, "table") == [
        ["Auto, 16 rows", "batch", "batch"],
        ["Auto, 2,048 rows", "weight", "weight"],
        ["Explicit, 16 rows", "weight", "weight"],
        ["Manual, 16 rows", "weight", "weight"],
    ]


@compiled_for_cpu
def test_the_second_table_says_what_sums_the_gradient(page, capsys):
    """H100 finds the reduce-scatter in every mode, CPU has it only where it is written."""
    assert printed_rows(page, capsys, "sums") == [
        ["Auto, 2,048 rows", "reduce-scatter", "all-reduce"],
        ["Explicit, 16 rows", "reduce-scatter", "all-reduce"],
        ["Manual, 16 rows", "reduce-scatter", "reduce-scatter"],
    ]


@compiled_for_cpu
def test_a_reduce_scatter_sends_half_of_what_an_all_reduce_sends(page):
    """Compiled for CPU: the sum of the gradient by hand, and in Explicit mode."""
    scatter = page.moves_of(page.manual_step, AxisType.Auto, 16)
    whole = page.moves_of(page.explicit_step, AxisType.Explicit, 16)
    (scattered,) = [move.wire_bytes for move in scatter if move.kind == "reduce-scatter"]
    (summed,) = [move.wire_bytes for move in whole if move.kind == "all-reduce"]
    assert 2 * scattered == summed == 2 * W_BYTES * 7 // 8


@compiled_for_cpu
def test_the_sum_of_the_gradient_has_as_many_bytes_as_the_weight(page):
    """Of the stored programs for H100, and as compiled for CPU; for Auto and 16 rows, none."""
    for name, *how in page.by_mode.values():
        stored = [(m["kind"], m["payload"]) for m in stored_program(name)["gpu"]["moves"]]
        for moves in stored, moved(page, *how):
            sizes = [size for kind, size in moves if kind != "all-gather"]
            assert sizes == ([] if name == "step-auto-16" else [W_BYTES])


@compiled_for_cpu
def test_the_stored_steps_are_those_of_the_page(page):
    """Compiled here, the four steps of the printed table send what was stored for CPU."""
    for name, *how in page.by_mode.values():
        here = sorted((m.kind, m.dtype, m.wire_bytes) for m in page.moves_of(*how))
        assert here == sorted(stored_moves(name, "cpu", "kind", "dtype", "wire"))


def test_all_three_modes_return_the_same_weight(page):
    """The step changes the weight, and returns the same one in each mode as on one device."""
    rng = np.random.default_rng(0)
    w_host = rng.normal(size=(384, 96)).astype("float32") / 10
    x_host = rng.normal(size=(16, 96)).astype("float32")
    with jax.set_mesh(None):
        alone = page.step_with(page.not_gathered, jnp.asarray(w_host), jnp.asarray(x_host))
    assert np.abs(alone - w_host).max() > 1e-3
    for step, axis_type in [
        (page.auto_step, AxisType.Auto),
        (page.explicit_step, AxisType.Explicit),
        (page.manual_step, AxisType.Auto),
    ]:
        row = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        by_rows = jax.NamedSharding(row, P("data"))
        with jax.set_mesh(row):
            inputs = jax.device_put((w_host, x_host), by_rows)
            updated = jax.jit(step, out_shardings=by_rows)(*inputs)
        np.testing.assert_allclose(updated, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
