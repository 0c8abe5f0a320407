"""Chapter 12, "Pipeline parallelism"."""

import ast
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from defined import definitions, shown
from pages import BOOK, cells_of, check_exercise, compiled_for_cpu, exercises_of, run_again
from traced import equations

PAGE = "12-pipeline"
NAMES = ["GPipe", "1F1B"]


def assert_dense(page, loss, gradient):
    """Equal up to float32 rounding: microbatches are added in another order."""
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    assert_close(gradient, page.true_gradient)


def assert_close(tree, wanted):
    """Two stacks of layers, weight by weight."""
    for found, true in leaves_of(tree, wanted):
        np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-5)


def leaves_of(*trees):
    """The arrays of some trees, side by side."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def inputs_of(page, name="1F1B"):
    return page.layers, page.x_MBD, page.target_MBD, page.tables[name]


def mapped(page, name="1F1B"):
    """The step of a schedule, not compiled."""
    return page.make_step(page.slots[name])


def mapped_with_fsdp(page, name="1F1B"):
    """The step of a schedule with FSDP on the other axis, not compiled."""
    batch = page.P(None, "data")
    return jax.shard_map(
        partial(page.fsdp_step, slots=page.slots[name]),
        mesh=page.mesh,
        in_specs=(page.spec, batch, batch, page.P(None, "stage")),
        out_specs=(page.P(), page.spec),
    )


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


def test_the_smallest_pipeline_has_the_loss_and_gradient_of_one_device(page):
    """Autodiff through ppermute in a scan gives the loss and gradient of the dense model."""
    assert_dense(page, *page.gradient_of(page.layers, page.x_MBD, page.target_MBD))


def test_a_scan_over_the_stack_is_the_eight_blocks_one_after_another(page):
    """The stack is eight blocks, each with its own weights, and run_layers calls them in turn."""
    x_BD = y_BD = page.x_MBD[0]
    for i in range(8):
        block = jax.tree.map(lambda w, i=i: w[i], page.layers)
        y_BD = y_BD + block.down(jnp.tanh(block.up(y_BD)))
    np.testing.assert_allclose(page.run_layers(page.layers, x_BD), y_BD, rtol=1e-5, atol=1e-5)
    kernels = np.array(page.layers.up.kernel[...])
    assert kernels.shape == (8, 32, 64) and not np.allclose(kernels[0], kernels[1])


def test_the_file_has_the_block_of_the_page():
    """examples/pipeline.py runs the same Block, the same layers and the same error."""
    on_page = shown(PAGE)
    in_file = definitions((BOOK.parent / "examples" / "pipeline.py").read_text("utf-8"))
    for name in ("Block", "run_layers", "error"):
        assert in_file[name] == on_page[name]


def statements(source):
    """Of each function, also of those inside others, its statements as text."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {node.name: [ast.unparse(statement) for statement in node.body] for node in nodes}


def test_the_file_has_the_pipeline_of_the_page():
    """examples/pipeline.py sends the same messages, and its loss differs only by a line that counts M."""
    (right,) = [cell.source for cell in cells_of(PAGE) if cell.id == "right"]
    in_file = statements((BOOK.parent / "examples" / "pipeline.py").read_text("utf-8"))
    assert right.splitlines()[0] in in_file["make_pipeline"]
    in_file["pipeline_loss"].remove("M = len(x_MBD)")
    assert in_file["pipeline_loss"] == shown(PAGE, statements)["pipeline_loss"]


def run_normed_layers(layers, x_BD):
    """Layers that divide by the norm of their input."""

    def layer(x_BD, block):
        return block(x_BD / jnp.linalg.norm(x_BD, axis=-1, keepdims=True)), None

    return jax.lax.scan(layer, x_BD, layers)[0]


def test_ticks_that_nobody_uses_give_no_nan(page):
    """Layers that divide by the norm of their input have the gradient of one device.

    The program that reads a table may start from zeros, because it runs no layer on them.
    """
    with mock.patch.dict(page.gpipe.__globals__, run_layers=run_normed_layers):
        found = jax.grad(lambda *args: page.pipeline_loss(*args))(
            page.layers, page.x_MBD, page.target_MBD
        )
        wanted = jax.grad(lambda layers: page.dense_loss(layers))(page.layers)
        _, by_table = mapped(page)(*inputs_of(page))
    assert_close(found, wanted)
    assert_close(by_table, wanted)


def test_ppermute_sends_to_the_right_and_is_transposed_to_the_left(page):
    """The transpose of sending to the right is sending to the left."""

    @jax.shard_map(mesh=page.line, in_specs=page.P("stage"), out_specs=page.P("stage"))
    def send(x):
        return jax.lax.ppermute(x, "stage", page.to_right)

    transposed = jax.linear_transpose(send, jnp.arange(4.0))(jnp.arange(1.0, 5))[0]
    assert np.array_equal(transposed, [2, 3, 4, 0])


def test_a_mean_over_stages_would_divide_the_loss_by_four(page):
    """Only the last stage adds to the loss, so pmean would return a quarter of it."""

    @partial(jax.shard_map, mesh=page.line, in_specs=page.P("stage"), out_specs=page.P())
    def mean(x):
        return jax.lax.pmean(x[0], "stage")

    assert mean(jnp.array([0.0, 0, 0, 8])) == 2


def test_autodiff_stores_activations_of_every_tick(page):
    """Hidden activations of 11 ticks and 2 layers, of which 8 ticks on each stage count."""
    inputs = (page.layers, page.x_MBD, page.target_MBD)
    jaxpr = jax.make_jaxpr(jax.grad(page.pipeline_loss))(*inputs).jaxpr
    stored = [var.aval.shape for eqn, _ in equations(jaxpr, "scan") for var in eqn.outvars]
    assert (11, 2, 8, 64) in stored


def test_with_checkpoint_autodiff_stores_only_the_inputs_of_every_tick(page):
    """Of activations, jax.checkpoint around run_layers leaves the inputs of 11 ticks, (8, 32) each."""
    inputs = (page.layers, page.x_MBD, page.target_MBD)
    saved = jax.checkpoint(page.run_layers)
    with mock.patch.dict(page.gpipe.__globals__, run_layers=saved):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *args: page.pipeline_loss(*args)))(*inputs).jaxpr
    forward = next(eqn for eqn, _ in equations(jaxpr, "scan") if eqn.params["length"] == 11)
    stored = [var.aval.shape for var in forward.outvars if len(var.aval.shape) > 2]
    assert set(stored) == {(11, 8, 32)} and len(stored) == 2  # inputs, and the scan's own outputs


# Schedules


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


def test_1f1b_does_forward_and_backward_passes_in_turn(page):
    """Stage s does 4 - s forward passes first, and then each B is followed by an F."""
    for s in range(4):
        at = {
            tick: kind
            for (kind, stage, _), tick in ticks_of(page.one_f_one_b, 4, 8).items()
            if stage == s
        }
        order = "".join(at[tick] for tick in sorted(at))
        assert order == "F" * (4 - s) + "BF" * (4 + s) + "B" * (4 - s)


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


def test_in_the_loop_of_the_page_1f1b_takes_a_third_longer(page):
    """F is 2 matmuls and B is 6; a stage begins a tick when it and its neighbours ended the last."""
    matmuls = {}
    for name, table in page.tables.items():
        ended = np.zeros(page.stages, int)
        for row in table:
            near = np.stack([np.roll(np.pad(ended, 1), shift) for shift in (-1, 0, 1)])
            ended = near.max(0)[1:-1] + np.array([0, 2, 6])[row[:, 0]]
        matmuls[name] = int(ended.max())
    assert matmuls == {"GPipe": 88, "1F1B": 116}
    assert round(116 / 88 - 1, 1) == 0.3


def test_the_page_prints_the_bubble_and_the_slots(page, capsys):
    """What the two cells print is what the formulas say."""
    run_again(page, PAGE, "bubble")
    said = re.findall(r"(\d+) ticks, (\d+) idle", capsys.readouterr().out)
    assert said == [("22", "6"), ("22", "6")]
    run_again(page, PAGE, "slots")
    assert re.findall(r"(\d+) slots", capsys.readouterr().out) == ["8", "4"]


def test_the_slots_are_what_the_formulas_say(page):
    """GPipe stores M inputs on each stage; 1F1B n on stage 0, and one on the last."""
    assert page.slots == dict(zip(NAMES, [8, 4]))
    for name, first, last in [("GPipe", 8, 8), ("1F1B", 4, 1)]:
        at = ticks_of(page.schedules[name], 4, 8)
        assert (most_stored(at, 0), most_stored(at, 3)) == (first, last)
        assert max(most_stored(at, s) for s in range(4)) == page.slots[name]
    at = ticks_of(page.one_f_one_b, 4, 8)
    assert at["B", 0, 0] + 1 == at["F", 0, 4]  # one tick before it


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
    """GPipe and 1F1B, on the axis `stage` alone, equal the dense model."""
    assert list(page.steps) == NAMES
    for name, step in page.steps.items():
        assert_dense(page, *step(*inputs_of(page, name)))


def test_with_fsdp_both_schedules_have_the_loss_and_gradient_of_one_device(page):
    """With FSDP on the other axis, `pipeline` is the same, and the loss and gradient are too."""
    assert_dense(page, *page.with_fsdp)
    assert_dense(page, *jax.jit(mapped_with_fsdp(page, "GPipe"))(*inputs_of(page, "GPipe")))


def test_three_updates_are_those_of_the_dense_model(page):
    """Three steps of gradient descent give the weights of the dense model."""
    dense = w = page.layers
    gradient_of = jax.jit(jax.grad(page.dense_loss))
    for _ in range(3):
        dense = jax.tree.map(lambda w, g: w - 0.05 * g, dense, gradient_of(dense))
        _, gradient = page.steps["1F1B"](w, page.x_MBD, page.target_MBD, page.tables["1F1B"])
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)
    assert_close(w, dense)


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


def test_a_device_holds_all_weights_and_gradients_of_its_stage(page):
    """With FSDP, the loop reads the gathered weights of a stage, and carries gradients as large."""
    jaxpr = jax.make_jaxpr(mapped_with_fsdp(page))(*inputs_of(page)).jaxpr
    (loop,) = [eqn for eqn, _ in equations(jaxpr, "scan") if eqn.params["length"] == 22]
    shapes = [var.aval.shape for var in loop.invars]
    for weight in jax.tree.leaves(page.layers):
        assert shapes.count((2, *weight.shape[1:])) == 2, weight.shape


@compiled_for_cpu
def test_weights_are_gathered_and_scattered_once_a_step(page):
    """Along `data` each weight is gathered once and its gradient scattered once, outside the loop."""
    compiled = jax.jit(page.fsdp_mapped).lower(*inputs_of(page)).compile()
    moved = ms.collectives(compiled, page.mesh)
    for kind in ("all-gather", "reduce-scatter"):
        rows = [row for row in moved if row.kind == kind]
        assert len(rows) == len(jax.tree.leaves(page.layers)) == 4
        assert all(row.executions == 1 and row.axes == ("data",) for row in rows)


def test_gradients_are_stored_as_the_weights_are(page):
    """With FSDP, each device has one eighth of the gradient: half of one stage's layers."""
    for gradient in jax.tree.leaves(page.with_fsdp[1]):
        assert gradient.addressable_shards[0].data.size == gradient.size // 8


def test_an_overwritten_input_leaves_the_loss_right_and_the_gradient_wrong(page):
    """With one slot too few the loss is right and the gradient is not."""
    at = ticks_of(page.one_f_one_b, 4, 8)
    assert at["F", 0, 0] < at["F", 0, 3] < at["B", 0, 0]  # microbatch 3 comes too early for slot 0
    loss, gradient = page.wrong
    np.testing.assert_allclose(loss, page.true_loss, rtol=1e-5)
    wrong, true = gradient.up.kernel[...], page.true_gradient.up.kernel[...]
    assert np.abs(wrong - true).max() > 1e-2


def test_autodiff_runs_the_last_microbatch_backwards_first(page):
    """The loop over ticks is transposed to one that runs from the last tick to the first."""
    assert [page.answer_reversed(3, m)[1] for m in range(8)] == list(range(18, 10, -1))
    jaxpr = jax.make_jaxpr(jax.grad(page.pipeline_loss))(page.layers, page.x_MBD, page.target_MBD)
    loops = [eqn.params for eqn, _ in equations(jaxpr.jaxpr, "scan") if eqn.params["length"] == 11]
    assert [loop["reverse"] for loop in loops] == [False, True]


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
