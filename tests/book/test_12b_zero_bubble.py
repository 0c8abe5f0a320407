"""The page "Zero-bubble pipelines"."""

import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from many_devices.pipeline import place_inputs
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again, source_of
from traced import equations

PAGE = "12b-zero-bubble"
NAMES = ["1F1B", "zero bubble"]


def assert_dense(page, loss, gradient):
    """Equal up to float32 rounding: microbatches are added in another order."""
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    for key, true in page.true_gradient.items():
        np.testing.assert_allclose(gradient[key], true, rtol=1e-4, atol=1e-5)


def mapped(page, name):
    """The program of a schedule, not compiled."""
    P = page.P
    return jax.shard_map(
        partial(page.pipeline, slots=page.slots[name]),
        mesh=page.line,
        in_specs=(P("stage"), P(), P(), P(None, "stage")),
        out_specs=(P(), P("stage")),
    )


def inputs_of(page, name="1F1B"):
    return page.params, page.x_MBD, page.target_MBD, page.tables[name]


def in_use(page, name):
    """Slots in use at once on the fullest stage: from the arrival of an input until B and W are done."""
    rows, peak = page.schedules[name], 0
    at = {op: tick for tick, row in enumerate(rows) for op in row if op}
    used = np.zeros((4, len(rows)), int)
    for (kind, stage, m), tick in at.items():
        if kind == "F":
            start = at["F", stage - 1, m] + 1 if stage else tick
            used[stage, start : max(at["B", stage, m], at["W", stage, m]) + 1] += 1
    return max(peak, used.max())


def test_both_schedules_have_the_loss_and_gradient_of_one_device(page):
    """1F1B and zero bubble equal one device."""
    assert list(page.results) == NAMES
    for loss, gradient in page.results.values():
        assert_dense(page, loss, gradient)


def test_three_updates_are_those_of_one_device(page):
    """Three steps of gradient descent give the weights of one device."""
    single = w = page.params
    gradient_of = jax.jit(jax.grad(page.single_loss))
    step = jax.jit(mapped(page, "zero bubble"))
    for _ in range(3):
        single = jax.tree.map(
            lambda w, g: w - 0.05 * g, single, gradient_of(single, page.x_MBD, page.target_MBD)
        )
        _, gradient = step(w, page.x_MBD, page.target_MBD, page.tables["zero bubble"])
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)
    for key, wanted in single.items():
        np.testing.assert_allclose(w[key], wanted, rtol=1e-4, atol=1e-5)


@compiled_for_cpu
def test_bfloat16_activations_are_kept_and_sent_as_bfloat16(page):
    """With weights and activations in bfloat16, the buffers are too; gradients are summed in float32."""
    *full, table = inputs_of(page)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), full)
    inputs = *half, table
    text = str(jax.make_jaxpr(mapped(page, "1F1B"))(*inputs))
    assert "bf16[5,8,32]" in text and "f32[5,8,32]" not in text.replace("bf16", "")
    _, gradient = jax.jit(mapped(page, "1F1B"))(*inputs)
    for key, true in page.true_gradient.items():
        assert gradient[key].dtype == "float32"
        error = jnp.linalg.norm(gradient[key] - true)
        assert error < 0.06 * jnp.linalg.norm(true)  # one device in bfloat16 has 0.04


def test_every_operation_is_done_once_and_after_what_it_needs(page):
    """A table has each F, B and W once, on its stage, and what it needs one tick earlier at least."""
    for name in NAMES:
        at = {}
        for tick, row in enumerate(page.schedules[name]):
            for s, op in enumerate(row):
                assert op is None or (op not in at and op.stage == s)
                at |= {op: tick} if op else {}
        assert len(at) == 3 * 8 * 4
        for op, tick in at.items():
            before = page.needs(op)
            assert before is None or at[before] < tick


def test_the_bubble_is_what_the_formulas_say(page):
    """3(n-1) idle ticks of 3M + 3(n-1), and n - 1 of 3M + n - 1 for zero bubble, on every stage."""
    for name, (work, idle) in dict(zip(NAMES, [(24, 9), (24, 3)])).items():
        rows = page.schedules[name]
        assert len(rows) == work + idle, name
        for s in range(4):
            assert sum(row[s] is None for row in rows) == idle, (name, s)


def test_the_page_prints_the_bubble_and_the_slots(page, capsys):
    """What the two cells print is what the formulas say."""
    run_again(page, PAGE, "schedules")
    said = re.findall(r"(\d+) ticks, (\d+) idle", capsys.readouterr().out)
    assert said == [("33", "9"), ("27", "3")]
    run_again(page, PAGE, "tables")
    assert re.findall(r"(\d+) slots", capsys.readouterr().out) == ["4", "4"]


def test_the_slots_are_what_the_formulas_say(page):
    """1F1B and zero bubble store n inputs."""
    assert page.slots == dict(zip(NAMES, [4, 4]))
    assert {name: in_use(page, name) for name in NAMES} == page.slots
    assert {name: table[..., 3].max() + 1 for name, table in page.tables.items()} == page.slots


@pytest.mark.parametrize("n, M", [(2, 2), (2, 6), (3, 3), (3, 9), (4, 16), (5, 15), (8, 24)])
def test_formulas_hold_for_other_pipelines(page, n, M):
    """From M = n on, bubbles and slots are what the formulas say."""
    with mock.patch.dict(page.one_f_one_b.__globals__, stages=n, M=M):
        for make, idle in [(page.one_f_one_b, 3 * (n - 1)), (page.zero_bubble, n - 1)]:
            rows = page.ticks([make(s) for s in range(n)])
            assert len(rows) == 3 * M + idle
            assert all(sum(row[s] is None for row in rows) == idle for s in range(n))
            assert 1 + max(place_inputs(rows).values()) == n


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
    jaxpr = jax.make_jaxpr(mapped(page, "1F1B"))(*inputs_of(page)).jaxpr
    (switch,) = [eqn for eqn, _ in equations(jaxpr, "cond") if len(eqn.params["branches"]) == 4]
    matmuls = [
        sum(times for _, times in equations(branch.jaxpr, "dot_general"))
        for branch in switch.params["branches"]
    ]
    layers = 2  # of a stage
    assert matmuls == [0, 2 * layers, 4 * layers, 6 * layers]


def test_forward_passes_before_the_first_backward_pass(page):
    """1F1B and zero bubble do 4, 3, 2 and 1 on stages 0 to 3."""
    for make in (page.one_f_one_b, page.zero_bubble):
        orders = ["".join(op.kind for op in make(s)) for s in range(4)]
        assert [len(order) - len(order.lstrip("F")) for order in orders] == [4, 3, 2, 1]


def test_stage_2_does_w_two_microbatches_late(page):
    """Stage s does each W s microbatches late: stage 2 does that of microbatch 0 after B of 2."""
    for s in range(4):
        order = [(op.kind, op.microbatch) for op in page.zero_bubble(s) if op.kind != "F"]
        for m in range(8 - s):
            assert order.index(("W", m)) == order.index(("B", m + s)) + 1


def test_what_arrives_has_a_slot_and_the_last_slot_is_spare(page):
    """An input or gradient that is needed is put into its own slot on the tick after it was sent."""
    for name in NAMES:
        rows, table = page.schedules[name], page.tables[name]
        slot_of = place_inputs(rows)
        assert table[..., 2:].max() == page.slots[name] - 1
        for tick, row in enumerate(rows[:-1]):
            for s in range(4):
                left, right = (row[s - 1] if s else None), (row[s + 1] if s < 3 else None)
                put_x = slot_of[s, left.microbatch] if left and left.kind == "F" else -1
                put_dy = slot_of[s, right.microbatch] if right and right.kind == "B" else -1
                assert table[tick + 1, s, 3:].tolist() == [put_x, put_dy]


def test_two_live_inputs_never_share_a_slot(page):
    """An arriving input never takes a slot that is still needed."""
    for name in NAMES:
        stages, owner, left = 4, {}, {}
        for row, now in zip(page.schedules[name], page.tables[name], strict=True):
            for s in range(stages):
                if row[s] is None:
                    continue
                kind, stage, m = row[s]
                key = s, int(now[s, 2])
                if kind == "F":
                    assert not left.get(key)
                    owner[key], left[key] = (stage, m), 2
                else:
                    assert owner[key] == (stage, m)
                    left[key] -= 1


def test_zero_bubble_keeps_a_gradient_longer(page):
    """It stays until W, which is up to three ticks of other work after B; in 1F1B W comes first."""
    held = {}
    for name in ("1F1B", "zero bubble"):
        at = {op: t for t, row in enumerate(page.schedules[name]) for op in row if op}
        held[name] = max(
            at["W", stage, m] - at["B", stage + 1, m] for stage in range(3) for m in range(8)
        )
    assert held["1F1B"] == 1 < held["zero bubble"]


def test_more_microbatches_shorten_the_bubble_and_take_no_more_slots(page):
    """With M = 16, 1F1B is idle for 15.8% of the step, and still has four slots."""
    text = source_of(PAGE).read_text("utf-8")
    with mock.patch.dict(page.one_f_one_b.__globals__, M=16):
        rows = page.ticks([page.one_f_one_b(s) for s in range(4)])
    idle = f"{sum(row[1] is None for row in rows) / len(rows):.1%}"
    assert f"With M = 16, 1F1B is idle for only {idle} of the step" in text
    assert 1 + max(place_inputs(rows).values()) == page.slots["1F1B"]


def test_zero_bubble_sends_what_1f1b_sends(page):
    """The same outputs and gradients leave each stage."""
    sent = [
        {op for row in page.schedules[name] for op in row if op and op.kind in "FB"}
        for name in NAMES
    ]
    assert sent[0] == sent[1]


def test_with_remat_the_split_costs_more_than_the_bubble_that_it_saves(page):
    """12 matmuls on 8 microbatches, with no bubble at all, are more than 8 on 8 + 3."""
    split, together = (
        2 + 4 + 6,
        2 + 6,
    )  # counted in test_matmuls_of_each_operation, and in test_12a_schedules
    assert split * page.M > together * (page.M + page.stages - 1)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
