"""The page "Zero-bubble and interleaved pipelines"."""

import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from many_devices.pipeline import place_inputs
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again
from traced import equations

PAGE = "12a-zero-bubble"
NAMES = ["1F1B", "zero bubble", "interleaved"]


def assert_dense(page, loss, gradient):
    """Equal up to float32 rounding: microbatches are added in another order."""
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    for key, true in page.true_gradient.items():
        np.testing.assert_allclose(gradient[key].reshape(true.shape), true, rtol=1e-4, atol=1e-5)


def whole(page):
    """The weights as schedules with one part on each stage take them."""
    return jax.tree.map(partial(page.split_layers, chunks=1), page.params)


def mapped(page, name):
    """The step of a schedule with one part on each stage, not compiled."""
    return jax.shard_map(
        partial(page.step, slots=page.slots[name]),
        mesh=page.line,
        in_specs=(page.spec, page.P(), page.P(), page.spec),
        out_specs=(page.P(), page.spec),
    )


def in_use(page, name):
    """Slots in use at once on the fullest stage: from the arrival of an input until B and W are done."""
    rows, peak = page.schedules[name], 0
    at = {op: tick for tick, row in enumerate(rows) for op in row if op}
    used = np.zeros((4, len(rows)), int)
    for (kind, part, m), tick in at.items():
        if kind == "F":
            start = at["F", part - 1, m] + 1 if part else tick
            used[part % 4, start : max(at["B", part, m], at["W", part, m]) + 1] += 1
    return max(peak, used.max())


def permutes(page, name):
    moved = ms.collectives(page.programs[name], page.line)
    return [row for row in moved if row.kind == "collective-permute"]


def test_three_schedules_have_the_loss_and_gradient_of_one_device(page):
    """1F1B, zero bubble and interleaved equal the dense model."""
    assert list(page.results) == NAMES
    for loss, gradient in page.results.values():
        assert_dense(page, loss, gradient)


def test_three_updates_are_those_of_the_dense_model(page):
    """Three steps of gradient descent give the weights of the dense model."""
    dense, w = page.params, whole(page)
    gradient_of = jax.jit(jax.grad(page.dense_loss))
    for _ in range(3):
        dense = jax.tree.map(
            lambda w, g: w - 0.05 * g, dense, gradient_of(dense, page.x_MBD, page.target_MBD)
        )
        _, gradient = page.programs["zero bubble"](
            w, page.x_MBD, page.target_MBD, page.tables["zero bubble"]
        )
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)
    for key, wanted in dense.items():
        np.testing.assert_allclose(w[key].reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


@compiled_for_cpu
def test_bfloat16_activations_are_kept_and_sent_as_bfloat16(page):
    """With weights and activations in bfloat16, the buffers are too; gradients are summed in float32."""
    full = whole(page), page.x_MBD, page.target_MBD
    half = jax.tree.map(lambda x: x.astype("bfloat16"), full)
    inputs = *half, page.tables["1F1B"]
    text = str(jax.make_jaxpr(mapped(page, "1F1B"))(*inputs))
    assert "bf16[5,8,32]" in text and "f32[5,8,32]" not in text.replace("bf16", "")
    _, gradient = jax.jit(mapped(page, "1F1B"))(*inputs)
    for key, true in page.true_gradient.items():
        assert gradient[key].dtype == "float32"
        error = jnp.linalg.norm(gradient[key].reshape(true.shape) - true)
        assert error < 0.06 * jnp.linalg.norm(true)  # one device in bfloat16 has 0.04


def test_every_operation_is_done_once_and_after_what_it_needs(page):
    """A table has each F, B and W once, on its stage, and what it needs one tick earlier at least."""
    for name in NAMES:
        parts = page.parts[name]
        at = {}
        for tick, row in enumerate(page.schedules[name]):
            for s, op in enumerate(row):
                assert op is None or (op not in at and op.part % 4 == s)
                at |= {op: tick} if op else {}
        assert len(at) == 3 * 8 * parts
        for op, tick in at.items():
            before = page.needs(op, parts)
            assert before is None or at[before] < tick


def test_the_bubble_is_what_the_formulas_say(page):
    """3(n-1) idle ticks of 3vM + 3(n-1), and n - 1 of 3M + n - 1 for zero bubble, on every stage."""
    for name, (work, idle) in dict(zip(NAMES, [(24, 9), (24, 3), (48, 9)])).items():
        rows = page.schedules[name]
        assert len(rows) == work + idle, name
        for s in range(4):
            assert sum(row[s] is None for row in rows) == idle, (name, s)


def test_the_page_prints_the_bubble_the_slots_and_the_bytes(page, capsys):
    """What the three cells print is what the formulas say."""
    run_again(page, PAGE, "schedules")
    said = re.findall(r"(\d+) ticks, (\d+) idle", capsys.readouterr().out)
    assert said == [("33", "9"), ("27", "3"), ("57", "9")]
    run_again(page, PAGE, "tables")
    assert re.findall(r"(\d+) slots", capsys.readouterr().out) == ["4", "4", "11"]
    if jax.default_backend() == "cpu":
        run_again(page, PAGE, "bytes")
        said = re.findall(r"([\d,]+) bytes", capsys.readouterr().out)
        assert said == [f"{2 * ticks * 1024:,}" for ticks in (33, 27, 57)]


def test_the_slots_are_what_the_formulas_say(page):
    """1F1B and zero bubble store n inputs, interleaved 2(n-1) + (v-1)n + 1."""
    assert page.slots == dict(zip(NAMES, [4, 4, 11]))
    assert {name: in_use(page, name) for name in NAMES} == page.slots
    assert {name: table[..., 3].max() + 1 for name, table in page.tables.items()} == page.slots


@pytest.mark.parametrize("n, M", [(2, 2), (2, 6), (3, 3), (3, 9), (4, 16), (5, 15), (8, 24)])
def test_formulas_hold_for_other_pipelines(page, n, M):
    """From M = n on, bubbles and slots are what the formulas say; the last one needs n > 2, M >= 2n."""
    with mock.patch.dict(page.one_f_one_b.__globals__, stages=n, M=M):
        for v, maker, idle, slots in [
            (1, page.one_f_one_b, 3 * (n - 1), n),
            (1, page.zero_bubble, n - 1, n),
            (2, partial(page.interleaved, chunks=2), 3 * (n - 1), 2 * (n - 1) + n + 1),
            (3, partial(page.interleaved, chunks=3), 3 * (n - 1), 2 * (n - 1) + 2 * n + 1),
        ]:
            rows = page.ticks([maker(s) for s in range(n)], v * n)
            assert len(rows) == 3 * v * M + idle
            assert all(sum(row[s] is None for row in rows) == idle for s in range(n))
            if v == 1 or (n > 2 and M >= 2 * n):
                assert 1 + max(place_inputs(rows, v * n).values()) == slots


def test_only_the_place_of_w_differs_between_1f1b_and_zero_bubble(page):
    """Without W, both orders are the same on every stage."""
    for s in range(4):
        one, zero = (
            [op for op in make(s) if op.kind != "W"]
            for make in (page.one_f_one_b, page.zero_bubble)
        )
        assert one == zero


def test_matmuls_of_each_operation(page):
    """Per layer, F has two matmuls, B four and W six, because B and W repeat what came before."""
    inputs = (whole(page), page.x_MBD, page.target_MBD, page.tables["1F1B"])
    jaxpr = jax.make_jaxpr(mapped(page, "1F1B"))(*inputs).jaxpr
    (switch,) = [eqn for eqn, _ in equations(jaxpr, "cond") if len(eqn.params["branches"]) == 4]
    matmuls = [
        sum(times for _, times in equations(branch.jaxpr, "dot_general"))
        for branch in switch.params["branches"]
    ]
    layers = 2  # of a stage
    assert matmuls == [0, 2 * layers, 4 * layers, 6 * layers]


def test_two_live_inputs_never_share_a_slot(page):
    """An arriving input never takes a slot that is still needed."""
    for name in NAMES:
        stages, owner, left = 4, {}, {}
        for row, now in zip(page.schedules[name], page.tables[name], strict=True):
            for s in range(stages):
                if row[s] is None:
                    continue
                kind, part, m = row[s]
                key = s, int(now[s, 3])
                if kind == "F":
                    assert not left.get(key)
                    owner[key], left[key] = (part, m), 2
                else:
                    assert owner[key] == (part, m)
                    left[key] -= 1


def test_zero_bubble_keeps_a_gradient_longer(page):
    """It stays until W, which is up to three ticks of other work after B; in 1F1B W comes first."""
    held = {}
    for name in ("1F1B", "zero bubble"):
        at = {op: t for t, row in enumerate(page.schedules[name]) for op in row if op}
        held[name] = max(
            at["W", part, m] - at["B", part + 1, m] for part in range(3) for m in range(8)
        )
    assert held["1F1B"] == 1 < held["zero bubble"]


@compiled_for_cpu
def test_each_tick_runs_two_permutes_of_a_microbatch(page):
    """Two permutes of 1,024 bytes on each tick, so interleaved sends most."""
    for name in NAMES:
        rows = permutes(page, name)
        assert [row.executions for row in rows] == 2 * [len(page.schedules[name])]
        assert all(row.wire_bytes == 4 * 8 * 32 and row.axes == ("stage",) for row in rows)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
