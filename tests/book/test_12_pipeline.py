"""Chapter 12, "Pipeline parallelism"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "12-pipeline"
NAMES = ["GPipe", "1F1B", "interleaved", "zero bubble"]


def assert_dense(page, loss, gradient):
    """Equal up to float32 rounding: microbatches are added in another order."""
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    for key, true in page.true_gradient.items():
        np.testing.assert_allclose(gradient[key].reshape(true.shape), true, rtol=1e-4, atol=1e-5)


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
    moved = ms.collectives(page.programs[name], page.mesh)
    return [row for row in moved if row.kind == "collective-permute"]


def test_the_smallest_pipeline_has_the_loss_and_gradient_of_one_device(page):
    """Autodiff through ppermute in a scan gives the loss and gradient of the dense model."""
    assert_dense(page, *page.gradient_of(page.params, page.x_MBD, page.target_MBD))


def test_four_schedules_have_the_loss_and_gradient_of_one_device(page):
    """GPipe, 1F1B, interleaved and zero bubble, with FSDP on the other axis, equal the dense model."""
    assert list(page.results) == NAMES
    for loss, gradient in page.results.values():
        assert_dense(page, loss, gradient)


def test_three_updates_are_those_of_the_dense_model(page):
    """Three steps of gradient descent give the weights of the dense model."""
    dense, w = page.params, page.cut
    gradient_of = jax.jit(jax.grad(page.dense_loss))
    for _ in range(3):
        dense = jax.tree.map(lambda w, g: w - 0.05 * g, dense, gradient_of(dense))
        _, gradient = page.programs["zero bubble"](
            w, page.x_MBD, page.target_MBD, page.tables["zero bubble"]
        )
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)
    for key, wanted in dense.items():
        np.testing.assert_allclose(w[key].reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_every_operation_is_done_once_and_after_what_it_needs(page):
    """A table has each F, B and W once, on its stage, and what it needs one tick earlier at least."""
    for name in NAMES:
        parts = 4 * page.makers[name][1]
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
    for name, (work, idle) in dict(zip(NAMES, [(24, 9), (24, 9), (48, 9), (24, 3)])).items():
        rows = page.schedules[name]
        assert len(rows) == work + idle, name
        for s in range(4):
            assert sum(row[s] is None for row in rows) == idle, (name, s)


def test_the_slots_are_what_the_formulas_say(page):
    """GPipe stores M inputs, 1F1B and zero bubble n, interleaved 2(n-1) + (v-1)n + 1."""
    assert page.slots == dict(zip(NAMES, [8, 4, 11, 4]))
    assert {name: in_use(page, name) for name in NAMES} == page.slots


def test_slots_do_not_grow_with_microbatches(page):
    """With 16 microbatches 1F1B and zero bubble still store 4 inputs, GPipe 16."""
    scope = dict(page.variables)
    wanted = {"gpipe": 16, "one_f_one_b": 4, "zero_bubble": 4}
    old = page.gpipe.__globals__["M"]
    try:
        page.gpipe.__globals__["M"] = 16
        for name, slots in wanted.items():
            rows = page.ticks([scope[name](s) for s in range(4)], 4)
            assert page.table_of(rows, 4)[..., 3].max() + 1 == slots
    finally:
        page.gpipe.__globals__["M"] = old


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


@compiled_for_cpu
def test_each_tick_runs_two_permutes_of_a_microbatch(page):
    """Two permutes of 512 bytes on each tick: 33,792 bytes for GPipe."""
    for name in NAMES:
        rows = permutes(page, name)
        assert [row.executions for row in rows] == 2 * [len(page.schedules[name])]
        assert all(row.wire_bytes == 4 * 4 * 32 and row.axes == ("stage",) for row in rows)
    assert sum(row.executions * row.wire_bytes for row in permutes(page, "GPipe")) == 33_792


@compiled_for_cpu
def test_weights_are_gathered_and_scattered_once_a_step(page):
    """Along `data` each weight is gathered once and its gradient scattered once, outside the loop."""
    for name in NAMES:
        moved = ms.collectives(page.programs[name], page.mesh)
        for kind in ("all-gather", "reduce-scatter"):
            rows = [row for row in moved if row.kind == kind]
            assert len(rows) == 2
            assert all(row.executions == 1 and row.axes == ("data",) for row in rows)


def test_gradients_are_stored_as_the_weights_are(page):
    """Each device has one eighth of the gradient: half of one stage's layers."""
    for gradient in jax.tree.leaves(page.results["GPipe"][1]):
        assert gradient.addressable_shards[0].data.size == gradient.size // 8


def test_an_overwritten_input_leaves_the_loss_right_and_the_gradient_wrong(page):
    """With one slot too few the loss is right and the gradient is not."""
    loss, gradient = page.wrong
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    true = page.true_gradient["in_LDF"]
    assert np.abs(gradient["in_LDF"].reshape(true.shape) - true).max() > 1e-2


def test_ppermute_sends_to_the_right_and_is_transposed_to_the_left(page):
    """The transpose of sending to the right is sending to the left."""

    @jax.shard_map(mesh=page.line, in_specs=page.P("stage"), out_specs=page.P("stage"))
    def send(x):
        return jax.lax.ppermute(x, "stage", page.to_right)

    assert np.array_equal(send(jnp.arange(4.0)), [3, 0, 1, 2])
    transposed = jax.linear_transpose(send, jnp.arange(4.0))(jnp.arange(4.0))[0]
    assert np.array_equal(transposed, [1, 2, 3, 0])


def test_a_mean_over_stages_would_divide_the_loss_by_four(page):
    """Only the last stage adds to the loss, so pmean would return a quarter of it."""

    @partial(jax.shard_map, mesh=page.line, in_specs=page.P("stage"), out_specs=page.P())
    def mean(x):
        return jax.lax.pmean(x[0], "stage")

    assert mean(jnp.array([0.0, 0, 0, 8])) == 2


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
