"""Chapter 12, "Pipeline parallelism"."""

import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again
from traced import equations

PAGE = "12-pipeline"
NAMES = ["GPipe", "1F1B", "interleaved", "zero bubble"]


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
    batch = page.P(None, "data")
    return jax.shard_map(
        partial(page.step, slots=page.slots[name]),
        mesh=page.mesh,
        in_specs=(page.spec, batch, batch, page.P(None, "stage")),
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
    moved = ms.collectives(page.programs[name], page.mesh)
    return [row for row in moved if row.kind == "collective-permute"]


def test_the_smallest_pipeline_has_the_loss_and_gradient_of_one_device(page):
    """Autodiff through ppermute in a scan gives the loss and gradient of the dense model."""
    assert_dense(page, *page.gradient_of(page.params, page.x_MBD, page.target_MBD))


def test_ticks_that_nobody_uses_give_no_nan(page):
    """Layers that divide by the norm of their input have the gradient of one device."""

    def run_layers(weights, x_BD):
        def layer(x_BD, weight):
            x_BD = x_BD / jnp.linalg.norm(x_BD, axis=-1, keepdims=True)
            return x_BD + jnp.tanh(x_BD @ weight["in_LDF"]) @ weight["out_LFD"], None

        return jax.lax.scan(layer, x_BD, weights)[0]

    with mock.patch.dict(page.gpipe.__globals__, run_layers=run_layers):
        found = jax.grad(lambda *args: page.pipeline_loss(*args))(
            page.params, page.x_MBD, page.target_MBD
        )
        wanted = jax.grad(lambda params: page.dense_loss(params))(page.params)
    for key, true in wanted.items():
        np.testing.assert_allclose(found[key], true, rtol=1e-4, atol=1e-5)


@compiled_for_cpu
def test_bfloat16_activations_are_kept_and_sent_as_bfloat16(page):
    """With weights and activations in bfloat16, the buffers are too; gradients are summed in float32."""
    full = whole(page), page.x_MBD, page.target_MBD
    half = jax.tree.map(lambda x: x.astype("bfloat16"), full)
    inputs = *half, page.tables["1F1B"]
    text = str(jax.make_jaxpr(mapped(page, "1F1B"))(*inputs))
    assert "bf16[5,4,32]" in text and "f32[5,4,32]" not in text.replace("bf16", "")
    _, gradient = jax.jit(mapped(page, "1F1B"))(*inputs)
    for key, true in page.true_gradient.items():
        assert gradient[key].dtype == "float32"
        error = jnp.linalg.norm(gradient[key].reshape(true.shape) - true)
        assert error < 0.06 * jnp.linalg.norm(true)  # one device in bfloat16 has 0.04


def test_four_schedules_have_the_loss_and_gradient_of_one_device(page):
    """GPipe, 1F1B, interleaved and zero bubble, with FSDP on the other axis, equal the dense model."""
    assert list(page.results) == NAMES
    for loss, gradient in page.results.values():
        assert_dense(page, loss, gradient)


def test_three_updates_are_those_of_the_dense_model(page):
    """Three steps of gradient descent give the weights of the dense model."""
    dense, w = page.params, whole(page)
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
    for name, (work, idle) in dict(zip(NAMES, [(24, 9), (24, 9), (48, 9), (24, 3)])).items():
        rows = page.schedules[name]
        assert len(rows) == work + idle, name
        for s in range(4):
            assert sum(row[s] is None for row in rows) == idle, (name, s)


def test_the_page_prints_the_bubble_the_slots_and_the_bytes(page, capsys):
    """What the three cells print is what the formulas say."""
    run_again(page, PAGE, "bubble")
    said = re.findall(r"(\d+) ticks, (\d+) idle", capsys.readouterr().out)
    assert said == [("33", "9"), ("33", "9"), ("57", "9"), ("27", "3")]
    run_again(page, PAGE, "slots")
    assert re.findall(r"(\d+) slots", capsys.readouterr().out) == ["8", "4", "11", "4"]
    if jax.default_backend() == "cpu":
        run_again(page, PAGE, "bytes")
        said = re.findall(r"([\d,]+) bytes", capsys.readouterr().out)
        assert said == [f"{2 * ticks * 512:,}" for ticks in (33, 33, 57, 27)]


def test_the_slots_are_what_the_formulas_say(page):
    """GPipe stores M inputs, 1F1B and zero bubble n, interleaved 2(n-1) + (v-1)n + 1."""
    assert page.slots == dict(zip(NAMES, [8, 4, 11, 4]))
    assert {name: in_use(page, name) for name in NAMES} == page.slots
    assert {name: table[..., 3].max() + 1 for name, table in page.tables.items()} == page.slots


@pytest.mark.parametrize("n, M", [(2, 2), (2, 6), (3, 3), (3, 9), (4, 16), (5, 15), (8, 24)])
def test_formulas_hold_for_other_pipelines(page, n, M):
    """From M = n on, bubbles and slots are what the formulas say; the last one needs n > 2, M >= 2n."""
    with mock.patch.dict(page.gpipe.__globals__, stages=n, M=M):
        for v, maker, idle, slots in [
            (1, page.gpipe, 3 * (n - 1), M),
            (1, page.one_f_one_b, 3 * (n - 1), n),
            (1, page.zero_bubble, n - 1, n),
            (2, partial(page.interleaved, chunks=2), 3 * (n - 1), 2 * (n - 1) + n + 1),
            (3, partial(page.interleaved, chunks=3), 3 * (n - 1), 2 * (n - 1) + 2 * n + 1),
        ]:
            rows = page.ticks([maker(s) for s in range(n)], v * n)
            assert len(rows) == 3 * v * M + idle
            assert all(sum(row[s] is None for row in rows) == idle for s in range(n))
            if v == 1 or (n > 2 and M >= 2 * n):
                assert 1 + max(page.place_inputs(rows, v * n).values()) == slots


def test_only_the_place_of_w_differs_between_1f1b_and_zero_bubble(page):
    """Without W, both orders are the same on every stage."""
    for s in range(4):
        one, zero = (
            [op for op in make(s) if op.kind != "W"]
            for make in (page.one_f_one_b, page.zero_bubble)
        )
        assert one == zero


def test_the_rows_of_the_table_say_what_the_text_says(page):
    """Stage 2 of 1F1B: on tick 2 an input arrives in slot 0 and F runs; its gradient comes on tick 6."""
    column = page.tables["1F1B"][:, 2]
    kind, chunk, m, slot, put_x, put_dy = column[2]
    assert (kind, chunk, m, slot, put_x, put_dy) == (1, 0, 0, 0, 0, -1)
    assert list(column[:7, 5]) == 6 * [-1] + [0]


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


def test_a_device_holds_all_weights_and_gradients_of_its_stage(page):
    """The loop reads the gathered weights of a stage, and carries gradients of the same shapes."""
    inputs = (whole(page), page.x_MBD, page.target_MBD, page.tables["1F1B"])
    jaxpr = jax.make_jaxpr(mapped(page, "1F1B"))(*inputs).jaxpr
    (loop,) = [eqn for eqn, _ in equations(jaxpr, "scan") if eqn.params["length"] == 33]
    shapes = [var.aval.shape for var in loop.invars if len(var.aval.shape) == 4]
    for key, weight in page.params.items():
        layers = len(weight) // 4
        assert shapes.count((1, layers, *weight.shape[1:])) == 2, key


def test_autodiff_stores_activations_of_every_tick(page):
    """Hidden activations of 11 ticks and 2 layers, of which 8 ticks on each stage count."""
    inputs = (page.params, page.x_MBD, page.target_MBD)
    jaxpr = jax.make_jaxpr(jax.grad(page.pipeline_loss))(*inputs).jaxpr
    stored = [var.aval.shape for eqn, _ in equations(jaxpr, "scan") for var in eqn.outvars]
    assert (11, 2, 8, 64) in stored


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
