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
from compared import assert_same
from defined import definitions, shown
from pages import (
    BOOK,
    cells_of,
    check_exercise,
    compiled_for_cpu,
    exercises_of,
    run,
    run_again,
    source_of,
)
from test_12a_schedules import assert_single, most_stored, ticks_of
from traced import equations

PAGE = "12-pipeline"


def inputs_of(page):
    return page.layers, page.x_MBD, page.target_MBD


def loops_over_ticks(gradient_of, page, ticks=11):
    """The two scans over ticks in a gradient: the forward pipeline and the backward pipeline."""
    jaxpr = jax.make_jaxpr(gradient_of)(*inputs_of(page)).jaxpr
    return [eqn for eqn, _ in equations(jaxpr, "scan") if eqn.params["length"] == ticks]


def test_the_smallest_pipeline_has_the_loss_and_gradient_of_one_device(page):
    """Autodiff through ppermute in a scan gives the loss and gradient of one device."""
    assert_single(page, *page.gradient_of(*inputs_of(page)))


def test_three_updates_are_those_of_one_device(page):
    """Three steps of gradient descent give the weights of one device, with FSDP too."""
    single_gradient = jax.jit(jax.grad(page.single_loss))
    single = alone = with_fsdp = page.layers

    def descend(w, gradient):
        return jax.tree.map(lambda w, g: w - 0.05 * g, w, gradient)

    for _ in range(3):
        single = descend(single, single_gradient(single))
        alone = descend(alone, page.gradient_of(alone, page.x_MBD, page.target_MBD)[1])
        with_fsdp = descend(with_fsdp, page.by_examples(with_fsdp, page.x_MBD, page.target_MBD)[1])
    assert_same(alone, single, atol=1e-5)
    assert_same(with_fsdp, single, atol=1e-5)


def test_a_scan_over_the_stack_is_the_eight_blocks_one_after_another(page):
    """The stack is eight blocks, each with its own weights, and run_layers calls them in turn."""
    x_BD = y_BD = page.x_MBD[0]
    for i in range(8):
        block = jax.tree.map(lambda w, i=i: w[i], page.layers)
        y_BD = y_BD + block.down(jnp.tanh(block.up(y_BD)))
    np.testing.assert_allclose(page.run_layers(page.layers, x_BD), y_BD, rtol=1e-5, atol=1e-5)
    kernels = np.array(page.layers.up.kernel[...])
    assert kernels.shape == (8, 32, 64) and not np.allclose(kernels[0], kernels[1])


def test_the_stack_has_no_annotations(page):
    """So plain jax.vmap loses none."""
    for variable in jax.tree.leaves(
        page.layers, is_leaf=lambda leaf: hasattr(leaf, "get_metadata")
    ):
        assert "out_sharding" not in variable.get_metadata()


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
    """examples/pipeline.py sends the same messages and has the same loss; its tick is inside."""
    (right,) = [cell.source for cell in cells_of(PAGE) if cell.id == "right"]
    in_file = statements((BOOK.parent / "examples" / "pipeline.py").read_text("utf-8"))
    assert right.splitlines()[0] in in_file["make_pipeline"]
    on_page = shown(PAGE, statements)
    assert in_file["tick"] == on_page["tick"][2:]  # M and stage are known there
    assert on_page["tick"][:2] == on_page["pipeline_loss"][:2]
    given = "one_tick = partial(tick, layers_block, x_MBD)"
    outer = [line for line in on_page["pipeline_loss"] if line != given]
    inside = [line for line in in_file["pipeline_loss"] if not line.startswith("def ")]
    assert inside == [line.replace("one_tick", "tick") for line in outer]


def test_microbatches_move_as_in_the_table_and_take_eleven_ticks(page):
    """Stage s has microbatch t - s on tick t; microbatch m leaves stage 3 on tick m + 3.

    The layers are replaced by one that adds the stage, so an output tells which input it was.
    """
    table = re.findall(r"(?m)^\| (\d) \| (.+) \|$", source_of(PAGE).read_text("utf-8"))
    for t, row in table:
        wanted = [str(int(t) - s) if int(t) >= s else "–" for s in range(4)]
        assert row.split(" | ") == wanted
    assert len(table) == 4
    forward, _ = loops_over_ticks(jax.value_and_grad(lambda *args: page.on_line(*args)), page)
    assert forward.params["length"] == page.M + 3

    def add_100(layers, x_BD):
        return x_BD + 100 + 0 * layers.up.kernel[...].sum()

    seen = {}
    with mock.patch.dict(
        page.error.__globals__,
        run_layers=add_100,
        error=lambda y_MBD, target_MBD: seen.update(shape=y_MBD.shape) or jnp.sum(y_MBD[:, 0, 0]),
    ):
        x_MBD = jnp.broadcast_to(jnp.arange(8.0)[:, None, None], (8, 16, 32))
        summed = jax.jit(lambda *args: page.on_line(*args))(page.layers, x_MBD, page.target_MBD)
    assert seen["shape"] == (8, 16, 32)
    assert summed == sum(range(8)) + 8 * 400  # each microbatch once, through four stages


def run_normed_layers(layers, x_BD):
    """Layers that divide by the norm of their input."""

    def layer(x_BD, block):
        return block(x_BD / jnp.linalg.norm(x_BD, axis=-1, keepdims=True)), None

    return jax.lax.scan(layer, x_BD, layers)[0]


def test_ticks_that_nobody_uses_give_no_nan(page):
    """Layers that divide by the norm of their input have the gradient of one device."""
    with mock.patch.dict(page.error.__globals__, run_layers=run_normed_layers):
        found = jax.grad(lambda *args: page.on_line(*args))(*inputs_of(page))
        wanted = jax.grad(lambda layers: page.single_loss(layers))(page.layers)
    assert_same(found, wanted, atol=1e-5)


def test_from_zeros_such_layers_would_give_nan(page):
    """A NaN that nobody uses reaches the gradient, because 0 times NaN is NaN."""
    zeros = re.sub(
        r"jax.lax.pcast\(x_MBD\[0\]", "jax.lax.pcast(0 * x_MBD[0]", source("smallest-loss")
    )
    variables = dict(page.variables, run_layers=run_normed_layers)
    exec(source("tick"), variables)
    exec(zeros, variables)
    P = page.P
    from_zeros = jax.shard_map(
        variables["pipeline_loss"],
        mesh=page.line,
        in_specs=(P("stage"), P(), P()),
        out_specs=P(),
    )
    loss, gradient = jax.value_and_grad(from_zeros)(*inputs_of(page))
    assert np.isfinite(loss) and not np.isfinite(gradient.up.kernel[...]).all()


def source(id):
    """The code of one cell."""
    (cell,) = [cell for cell in cells_of(PAGE) if cell.id == id]
    return cell.source


def test_ppermute_sends_to_the_right_and_is_transposed_to_the_left(page):
    """The transpose of sending to the right is sending to the left; stage 0 receives zeros."""

    @jax.shard_map(mesh=page.line, in_specs=page.P("stage"), out_specs=page.P("stage"))
    def send(x):
        return jax.lax.ppermute(x, "stage", page.to_right)

    assert np.array_equal(send(jnp.arange(1.0, 5)), [0, 1, 2, 3])
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
    forward, _ = loops_over_ticks(jax.grad(lambda *args: page.on_line(*args)), page)
    assert (11, 2, 16, 64) in [var.aval.shape for var in forward.outvars]


def test_with_checkpoint_autodiff_stores_only_the_inputs_of_every_tick(page):
    """Of activations, jax.checkpoint around run_layers leaves the inputs of 11 ticks, (16, 32) each."""
    saved = jax.checkpoint(page.run_layers)
    with mock.patch.dict(page.error.__globals__, run_layers=saved):
        forward, _ = loops_over_ticks(jax.grad(lambda *args: page.on_line(*args)), page)
    stored = [var.aval.shape for var in forward.outvars if len(var.aval.shape) > 2]
    assert set(stored) == {(11, 16, 32)} and len(stored) == 2  # inputs, and the scan's own outputs


def test_autodiff_runs_the_ticks_backwards_after_all_forward_ticks(page):
    """First a loop over 11 ticks, then one from the last tick to the first."""
    loops = loops_over_ticks(page.gradient_of, page)
    assert [loop.params["reverse"] for loop in loops] == [False, True]


# With FSDP


def test_with_fsdp_the_pipeline_has_the_loss_and_gradient_of_one_device(page):
    """FSDP on the other axis, inside the loss, changes neither."""
    assert_single(page, *page.by_examples(*inputs_of(page)))


def test_gradients_are_stored_as_the_weights_are(page):
    """With FSDP, each device has one eighth of the gradient: half of one stage's layers."""
    _, gradients = page.by_examples(*inputs_of(page))
    for gradient in jax.tree.leaves(gradients):
        assert gradient.addressable_shards[0].data.size == gradient.size // 8


@compiled_for_cpu
def test_weights_are_gathered_and_scattered_once_a_step(page):
    """Along `data` each weight is gathered once and its gradient scattered once, outside the loop."""
    moved = ms.collectives(page.by_examples.lower(*inputs_of(page)).compile(), page.mesh)
    for kind in ("all-gather", "reduce-scatter"):
        rows = [row for row in moved if row.kind == kind]
        assert len(rows) == len(jax.tree.leaves(page.layers)) == 4
        assert all(row.executions == 1 and row.axes == ("data",) for row in rows)


def test_a_device_holds_all_weights_and_gradients_of_its_stage(page):
    """With FSDP, the loops read the gathered weights of a stage, and add up gradients as large."""
    forward, backward = loops_over_ticks(page.by_examples, page)
    for weight in jax.tree.leaves(page.layers):
        whole = weight.size // 4
        assert whole in [var.aval.size for var in forward.invars]
        assert whole in [var.aval.size for var in backward.outvars], weight.shape


def test_each_of_two_pipelines_has_all_eight_microbatches(page):
    """With P(None, "data"), both loops have 11 ticks, and a microbatch has 8 of its 16 examples."""
    loops = loops_over_ticks(page.by_examples, page)
    assert len(loops) == 2
    assert (11, 8, 32) in [var.aval.shape for var in loops[0].outvars]


def test_sharded_microbatches_leave_the_gradient_right_and_lengthen_the_bubble(page):
    """With P("data"), the loops have 7 ticks with all 16 examples: idle 43% instead of 27%."""
    assert_single(page, *page.by_microbatches(*inputs_of(page)))
    loops = loops_over_ticks(page.by_microbatches, page, ticks=7)
    assert len(loops) == 2
    assert (7, 16, 32) in [var.aval.shape for var in loops[0].outvars]
    assert f"{1 - 8 / 11:.0%}" == "27%" and f"{1 - 4 / 7:.0%}" == "43%"


def test_the_page_prints_the_bubble(page, capsys):
    """What the cell prints is counted: stage s works on tick t if t - s is a microbatch."""
    run_again(page, PAGE, "bubble")
    printed = re.findall(r"(\d+) microbatches: idle for (\d+)%", capsys.readouterr().out)
    counted = []
    for M in (4, 8, 16, 32):
        ticks = range(M + 3)
        (idle,) = {sum(not 0 <= t - s < M for t in ticks) for s in range(4)}
        counted.append((str(M), f"{100 * idle / len(ticks):.0f}"))
    assert printed == counted
    assert printed[:2] == [("4", "43"), ("8", "27")]


# The picture


@pytest.fixture(scope="module")
def schedules():
    """The tick of each pass, from the functions that the picture is drawn with."""
    with run("12a-schedules", until="one-f-one-b") as page:
        return {
            "GPipe": ticks_of(page.gpipe, 4, 8),
            "1F1B": ticks_of(page.one_f_one_b, 4, 8),
        }


def test_both_schedules_take_22_ticks_and_idle_on_6(schedules):
    """Each stage has 16 passes in 22 ticks."""
    for at in schedules.values():
        assert max(at.values()) + 1 == 22
        assert all(22 - sum(stage == s for _, stage, _ in at) == 6 for s in range(4))


def test_gpipe_runs_every_forward_pass_first_and_1f1b_does_not(schedules):
    """In 1F1B, the last stage runs the backward pass of a microbatch right after its forward pass."""
    gpipe, interleaved = schedules["GPipe"], schedules["1F1B"]
    for s in range(4):
        assert max(gpipe["F", s, m] for m in range(8)) < min(gpipe["B", s, m] for m in range(8))
    for m in range(8):
        assert interleaved["B", 3, m] == interleaved["F", 3, m] + 1


def test_the_framed_tick_is_as_the_page_reads_it_aloud(schedules):
    """F2 on stage 0, nothing on stage 1, F1 on stage 2, B0 on stage 3."""
    at = schedules["1F1B"].items()
    row = {stage: f"{kind}{m}" for (kind, stage, m), tick in at if tick == 4}
    assert row == {0: "F2", 2: "F1", 3: "B0"}


def test_gpipe_stores_eight_inputs_and_1f1b_four(schedules):
    """Stage 0 stores M and n; other stages store no more. The page of schedules tries other sizes."""
    for name, most in [("GPipe", 8), ("1F1B", 4)]:
        at = schedules[name]
        assert most_stored(at, 0) == max(most_stored(at, s) for s in range(4)) == most
    at = schedules["1F1B"]
    assert at["B", 0, 0] + 1 == at["F", 0, 4]  # one tick before it


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
