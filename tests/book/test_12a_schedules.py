"""The page "GPipe and 1F1B by hand"."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from compared import assert_same
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again
from traced import equations

PAGE = "12a-schedules"
NAMES = ["GPipe", "1F1B"]


def assert_single(page, loss, gradient):
    """Equal up to float32 rounding: microbatches are added in another order."""
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    assert_same(gradient, page.true_gradient, atol=1e-5)


def leaves_of(*trees):
    """The arrays of some trees, side by side."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def inputs_of(page, name="1F1B"):
    return page.params, page.x_MBD, page.target_MBD, page.tables[name]


def fsdp_step(page, name):
    """The step with FSDP, as the page describes it, and its mesh."""
    mesh = jax.make_mesh((2, page.stages), ("data", "stage"), axis_types=2 * (page.auto,))
    spec, batch = jax.P("stage", "data"), jax.P(None, "data")

    def step(weights_block, x_block_MBD, target_block_MBD, table):
        weights = jax.tree.map(
            lambda w: jax.lax.all_gather(w, "data", axis=1, tiled=True), weights_block
        )
        slots = page.slots[name]
        loss, dw = page.pipeline(weights, x_block_MBD, target_block_MBD, table, slots)
        return jax.lax.pmean(loss, "data"), jax.tree.map(page.scatter, dw)

    specs = dict(in_specs=(spec, batch, batch, jax.P(None, "stage")), out_specs=(jax.P(), spec))
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs)), mesh


def mapped(page, name="1F1B"):
    """The step of a schedule."""
    return page.make_step(page.slots[name])


def ticks_of(schedule, n, M):
    """The tick of every operation: ("F", stage, microbatch) or ("B", stage, microbatch)."""
    return {
        (kind, s, m): tick
        for s in range(n)
        for m in range(M)
        for kind, tick in zip("FB", schedule(s, m), strict=True)
    }


def needed(kind, s, m, n):
    """What must be done before this operation, or None."""
    if kind == "F":
        return ("F", s - 1, m) if s else None
    return ("B", s + 1, m) if s < n - 1 else ("F", s, m)


def most_stored(at, s):
    """The largest number of inputs that stage s keeps at once, each from its F to its B."""
    passes = [
        (tick, at["B", s, m]) for (kind, stage, m), tick in at.items() if (kind, stage) == ("F", s)
    ]
    return max(sum(f <= t <= b for f, b in passes) for t in range(max(at.values())))


@pytest.mark.parametrize("n, M", [(2, 2), (2, 6), (3, 3), (3, 9), (4, 8), (5, 15), (8, 24)])
def test_formulas_hold_for_other_pipelines(page, n, M):
    """From M = n on: 2(n-1) of 2M + 2(n-1) ticks are idle on every stage; M and n slots.

    A stage does one operation on a tick, each after what it needs; microbatch m can use slot
    m % slots, because that slot is free again before its F.
    """
    with mock.patch.dict(page.gpipe.__globals__, stages=n, M=M):
        for schedule, slots in [(page.gpipe, M), (page.one_f_one_b, n)]:
            at = ticks_of(schedule, n, M)
            for (kind, s, m), tick in at.items():
                before = needed(kind, s, m, n)
                assert before is None or at[before] < tick
            assert max(at.values()) + 1 == 2 * M + 2 * (n - 1)
            for s in range(n):
                assert len({tick for (_, stage, _), tick in at.items() if stage == s}) == 2 * M
                assert most_stored(at, s) == (slots if schedule is page.gpipe else n - s)
                for m in range(slots, M):
                    assert at["F", s, m] > at["B", s, m - slots]


def test_what_arrives_is_used_on_the_same_tick(page):
    """F comes on the tick after F on the left, and B on the tick after B on the right."""
    for schedule in (page.gpipe, page.one_f_one_b):
        at = ticks_of(schedule, 4, 8)
        for s in range(3):
            for m in range(8):
                assert at["F", s + 1, m] == at["F", s, m] + 1
                assert at["B", s, m] == at["B", s + 1, m] + 1


def order_of(at, s):
    """The passes of stage s, one after another."""
    passes = [(tick, kind, m) for (kind, stage, m), tick in at.items() if stage == s]
    return [(kind, m) for _, kind, m in sorted(passes)]


def test_1f1b_does_forward_and_backward_passes_in_turn(page):
    """Stage s does 4 - s forward passes first, and then each B is followed by an F."""
    at = ticks_of(page.one_f_one_b, 4, 8)
    for s in range(4):
        order = "".join(kind for kind, _ in order_of(at, s))
        assert order == "F" * (4 - s) + "BF" * (4 + s) + "B" * (4 - s)


def test_with_first_forward_passes_back_to_back_1f1b_stores_and_waits_as_much(page):
    """Each stage runs its passes in the same order, each as soon as it can: 22 ticks, n - s inputs."""
    at = ticks_of(page.one_f_one_b, 4, 8)
    queues, early, tick = [order_of(at, s) for s in range(4)], {}, 0
    while any(queues):
        now = {}
        for s, queue in enumerate(queues):
            before = needed(queue[0][0], s, queue[0][1], 4) if queue else None
            if queue and (before is None or before in early):
                kind, m = queue.pop(0)
                now[kind, s, m] = tick
        early |= now  # for the next tick
        tick += 1
    assert tick == 22
    assert [early["F", 0, m] for m in range(4)] == [0, 1, 2, 3]  # back to back
    assert [most_stored(early, s) for s in range(4)] == [4, 3, 2, 1]
    assert [most_stored(at, s) for s in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_the_bubble_is_the_same_however_long_a_backward_pass_takes(page, name, backward):
    """If stages wait for nothing but their inputs, each is idle for (n-1) / (M+n-1) of the step."""
    n, M, long = 4, 8, {"F": 1, "B": backward}
    at = ticks_of(page.schedules[name], n, M)
    end, free = {}, [0] * n
    for kind, s, m in sorted(at, key=at.get):
        begin = max(free[s], end.get(needed(kind, s, m, n), 0))
        free[s] = end[kind, s, m] = begin + long[kind]
    total = max(free)
    work = M * (1 + backward)
    assert (total - work) / total == pytest.approx((n - 1) / (M + n - 1))


def test_counted_in_matmuls_a_stage_of_our_1f1b_is_idle_for_45_percent(page):
    """F is 2 matmuls and B is 6; a stage begins a tick when it and its neighbours ended the last."""
    matmuls = {}
    for name, table in page.tables.items():
        ended = np.zeros(page.stages, int)
        for row in table:
            near = np.stack([np.roll(np.pad(ended, 1), shift) for shift in (-1, 0, 1)])
            ended = near.max(0)[1:-1] + np.array([0, 2, 6])[row[:, 0]]
        matmuls[name] = int(ended.max())
    work = 8 * page.M
    idle = {name: f"{1 - work / total:.0%}" for name, total in matmuls.items()}
    assert idle == {"GPipe": "27%", "1F1B": "45%"}
    assert matmuls == {"GPipe": 2 * 44, "1F1B": 2 * 58} and page.total == 58


def test_in_1f1b_every_tick_after_the_first_four_has_a_backward_pass(page):
    """GPipe: 11 ticks of forward passes alone, then 11 of backward passes alone."""
    kinds = {name: [set(row) - {0} for row in page.tables[name][..., 0]] for name in NAMES}
    assert kinds["GPipe"] == 11 * [{1}] + 11 * [{2}]
    assert [2 in tick for tick in kinds["1F1B"]] == 4 * [False] + 18 * [True]


def test_the_page_prints_the_bubble_and_the_slots(page, capsys):
    """What the cells print is what the formulas say, and the bubble counted in matmuls."""
    run_again(page, PAGE, "bubble")
    said = re.findall(r"(\d+) ticks, (\d+) idle: ([\d.]+)%", capsys.readouterr().out)
    assert said == [("22", "6", "27.3"), ("22", "6", "27.3")]
    run_again(page, PAGE, "slots")
    said = re.findall(r"(\d+) slots, ([\d,]+) bytes", capsys.readouterr().out)
    assert said == [("8", "8,192"), ("4", "4,096")]
    run_again(page, PAGE, "matmuls")
    said = re.findall(r"(\w+) +takes (\d+), idle for (\d+%)", capsys.readouterr().out)
    assert said == [("GPipe", "44", "27%"), ("1F1B", "58", "45%")]


def test_the_slots_are_what_the_formulas_say(page):
    """GPipe stores M inputs on each stage; 1F1B n on stage 0, and one on the last."""
    assert page.slots == dict(zip(NAMES, [8, 4]))
    for name, first, last in [("GPipe", 8, 8), ("1F1B", 4, 1)]:
        at = ticks_of(page.schedules[name], 4, 8)
        assert (most_stored(at, 0), most_stored(at, 3)) == (first, last)
        assert max(most_stored(at, s) for s in range(4)) == page.slots[name]
    at = ticks_of(page.one_f_one_b, 4, 8)
    assert at["B", 0, 0] + 1 == at["F", 0, 4]  # one tick before it


def test_the_loop_carries_one_buffer_of_as_many_bytes(page):
    """GPipe's loop carries 8 inputs of 1,024 bytes from tick to tick, 1F1B's four."""
    for name, stored in dict(zip(NAMES, [8192, 4096])).items():
        jaxpr = jax.make_jaxpr(mapped(page, name))(*inputs_of(page, name)).jaxpr
        (loop,) = [eqn for eqn, _ in equations(jaxpr, "scan") if eqn.params["length"] == 22]
        carried = [var.aval for var in loop.outvars if var.aval.shape[1:] == (8, 32)]
        assert [aval.size * aval.dtype.itemsize for aval in carried] == [stored]


def test_the_table_says_what_each_stage_does(page):
    """Each F and B is in it once, on its tick and its stage."""
    for name, schedule in page.schedules.items():
        done = {
            ("-FB"[kind], s, int(m)): tick
            for tick, row in enumerate(page.tables[name])
            for s, (kind, m) in enumerate(row)
            if kind
        }
        assert done == ticks_of(schedule, 4, 8)
        assert (page.tables[name][..., 0] > 0).sum() == len(done)


def test_tick_4_is_as_the_page_reads_it_aloud(page):
    """F2 on stage 0, nothing on stage 1, F1 on stage 2, B0 on stage 3."""
    at = ticks_of(page.one_f_one_b, 4, 8)
    row = {stage: f"{kind}{m}" for (kind, stage, m), tick in at.items() if tick == 4}
    assert row == {0: "F2", 2: "F1", 3: "B0"}
    assert page.tables["1F1B"][4].tolist() == [[1, 2], [0, 0], [1, 1], [2, 0]]


# The program


def test_both_schedules_have_the_loss_and_gradient_of_one_device(page):
    """GPipe and 1F1B, on the axis `stage` alone, equal one device."""
    assert list(page.steps) == NAMES
    for name, step in page.steps.items():
        assert_single(page, *step(*inputs_of(page, name)))


def test_with_fsdp_both_schedules_have_the_loss_and_gradient_of_one_device(page):
    """With FSDP on the other axis, `pipeline` is the same, and the loss and gradient are too.

    Each device has one eighth of the gradient: half of one stage's layers.
    """
    for name in NAMES:
        step, _ = fsdp_step(page, name)
        loss, gradient = step(*inputs_of(page, name))
        assert_single(page, loss, gradient)
        for leaf in jax.tree.leaves(gradient):
            assert leaf.addressable_shards[0].data.size == leaf.size // 8


def test_three_updates_are_those_of_one_device(page):
    """Three steps of gradient descent give the weights of one device."""
    single = w = page.params
    for _ in range(3):
        _, true = page.single(single, page.x_MBD, page.target_MBD)
        single = jax.tree.map(lambda w, g: w - 0.05 * g, single, true)
        _, gradient = page.steps["1F1B"](w, page.x_MBD, page.target_MBD, page.tables["1F1B"])
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)
    assert_same(w, single, atol=1e-5)


def run_normed_layers(weights, x_BD):
    """Layers that divide by the norm of their input."""

    def layer(x_BD, weight):
        x_BD = x_BD / jnp.linalg.norm(x_BD, axis=-1, keepdims=True)
        return x_BD + jnp.tanh(x_BD @ weight["in_LDF"]) @ weight["out_LFD"], None

    return jax.lax.scan(layer, x_BD, weights)[0]


def test_zeros_are_safe_because_no_layer_runs_before_its_input_has_arrived(page):
    """Layers that divide by the norm of their input have the gradient of one device."""

    def loss(params):
        y_MBD = jax.vmap(run_normed_layers, in_axes=(None, 0))(params, page.x_MBD)
        return page.error(y_MBD, page.target_MBD)

    with mock.patch.dict(page.gpipe.__globals__, run_layers=run_normed_layers):
        _, by_table = mapped(page)(*inputs_of(page))
    assert_same(by_table, jax.grad(loss)(page.params), atol=1e-5)


@compiled_for_cpu
def test_bfloat16_activations_are_kept_and_sent_as_bfloat16(page):
    """With weights and activations in bfloat16, the buffer is too; gradients are summed in float32."""
    *full, table = inputs_of(page)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), full)
    jaxpr = jax.make_jaxpr(mapped(page))(*half, table)
    text = str(jaxpr)
    assert "bf16[4,8,32]" in text and "f32[4,8,32]" not in text.replace("bf16", "")
    sent = [eqn.outvars[0].aval for eqn, _ in equations(jaxpr.jaxpr, "ppermute")]
    assert [(aval.shape, aval.dtype) for aval in sent] == 2 * [((8, 32), "bfloat16")]
    _, gradient = mapped(page)(*half, table)
    for found, true in leaves_of(gradient, page.true_gradient):
        assert found.dtype == "float32"
        error = jnp.linalg.norm(found - true)
        assert error < 0.06 * jnp.linalg.norm(true)  # one device in bfloat16 has 0.04


def test_matmuls_of_each_operation(page):
    """Per layer, F has two matmuls and B six, because B repeats F."""
    jaxpr = jax.make_jaxpr(mapped(page))(*inputs_of(page)).jaxpr
    (switch,) = [eqn for eqn, _ in equations(jaxpr, "cond") if len(eqn.params["branches"]) == 3]
    matmuls = [
        sum(times for _, times in equations(branch.jaxpr, "dot_general"))
        for branch in switch.params["branches"]
    ]
    layers = 2  # of a stage
    assert matmuls == [0, 2 * layers, 6 * layers]


@compiled_for_cpu
def test_a_stage_sends_an_output_and_a_gradient_on_each_tick(page, capsys):
    """45,056 bytes, of which 16,384 are needed: one output and one gradient for each microbatch."""
    for name in NAMES:
        compiled = page.steps[name].lower(*inputs_of(page, name)).compile()
        moved = ms.collectives(compiled, page.line)
        rows = [row for row in moved if row.kind == "collective-permute"]
        assert [(row.executions, row.wire_bytes) for row in rows] == 2 * [(22, 1024)]
        assert sum(row.executions * row.wire_bytes for row in rows) == 45_056
        passes = [kind for kind, s, _ in ticks_of(page.schedules[name], 4, 8) if s == 1]
        assert len(passes) * 1024 == 16_384
    run_again(page, PAGE, "bytes")
    assert capsys.readouterr().out == "sent 45,056 bytes, needed 16,384\n"


def test_an_overwritten_input_leaves_the_loss_right_and_the_gradient_wrong(page):
    """With one slot too few the loss is right and the gradient is not; the last stage needs one."""
    at = ticks_of(page.one_f_one_b, 4, 8)
    assert most_stored(at, 3) == 1
    assert at["F", 0, 0] < at["F", 0, 3] < at["B", 0, 0]  # microbatch 3 comes too early for slot 0
    loss, gradient = page.wrong
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    wrong, true = gradient["in_LDF"], page.true_gradient["in_LDF"]
    assert np.abs(wrong - true).max() > 1e-2


def test_the_answer_runs_the_last_microbatch_backwards_first(page):
    """As autodiff does, which the tests of chapter 12 show."""
    assert [page.answer_reversed(3, m)[1] for m in range(8)] == list(range(18, 10, -1))


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
