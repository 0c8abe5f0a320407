"""Deeper page "When communication is the bottleneck": operations and bytes of each strategy."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import meshscope as ms
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "communication-bound"
P = jax.P
AUTO = jax.sharding.AxisType.Auto


T, D, F = 64, 32, 128  # tokens per device (of the group, for tensor parallelism), sizes


def counted(function, in_specs, out_specs, *shapes):
    """Operations on one device, and {kind: numbers} of what a group of eight moves."""
    line = jax.make_mesh((8,), ("X",), axis_types=(AUTO,))
    mapped = jax.shard_map(function, mesh=line, in_specs=in_specs, out_specs=out_specs)
    inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    program = jax.jit(mapped).lower(*inputs).compile()
    moved = {}
    for move in ms.collectives(program, line):
        moved[move.kind] = moved.get(move.kind, 0) + move.payload_bytes // 4
    return program.cost_analysis()["flops"], moved


def fsdp_forward(x_TD, w_DF):
    return x_TD @ jax.lax.all_gather(w_DF, "X", axis=0, tiled=True)


def gradients(x_TD, w_DF, back_TF, *, gather, again=False):
    """Gradients of one weight and of its input; `again` computes the product once more."""
    whole_DF = jax.lax.all_gather(w_DF, "X", axis=0, tiled=True) if gather else w_DF
    if again:
        back_TF = back_TF * jnp.cos(x_TD @ whole_DF)
    dw_DF, dx_TD = x_TD.T @ back_TF, back_TF @ whole_DF.T
    if gather:
        return jax.lax.psum_scatter(dw_DF, "X", tiled=True), dx_TD
    return jax.lax.psum(dw_DF, "X"), dx_TD


def tensor_forward(x_TD, gate_DF, up_DF, down_FD):
    return jax.lax.psum(((x_TD @ gate_DF) * (x_TD @ up_DF)) @ down_FD, "X")


ROWS, COPIES, COLUMNS = P("X"), P(), P(None, "X")
X, W, Y = (8 * T, D), (D, F), (8 * T, F)


def close(flops, expected):
    return abs(flops / expected - 1) < 0.02  # it counts elementwise operations as well


@compiled_for_cpu
def test_fsdp_forward_fetches_the_weight_and_multiplies_the_tokens():
    """2tDF operations beside one gather of DF numbers."""
    flops, moved = counted(fsdp_forward, (ROWS, ROWS), ROWS, X, W)
    assert moved == {"all-gather": D * F} and close(flops, 2 * T * D * F)


@compiled_for_cpu
def test_the_backward_pass_has_twice_the_arithmetic_and_twice_the_bytes():
    """4tDF operations, beside the weight once more and its gradient."""
    backward = partial(gradients, gather=True)
    flops, moved = counted(backward, (ROWS, ROWS, ROWS), (ROWS, ROWS), X, W, Y)
    assert moved == {"all-gather": D * F, "reduce-scatter": D * F}
    assert close(flops, 4 * T * D * F)


@compiled_for_cpu
def test_computing_again_adds_arithmetic_and_no_bytes():
    """A layer that is computed again in the backward pass needs 6tDF operations and the same bytes."""
    backward = partial(gradients, gather=True, again=True)
    flops, moved = counted(backward, (ROWS, ROWS, ROWS), (ROWS, ROWS), X, W, Y)
    assert moved == {"all-gather": D * F, "reduce-scatter": D * F}
    assert close(flops, 6 * T * D * F)


@compiled_for_cpu
def test_data_parallelism_sends_only_in_the_backward_pass():
    """One all-reduce of the gradient, which travels twice, beside 4tDF operations."""
    backward = partial(gradients, gather=False)
    flops, moved = counted(backward, (ROWS, COPIES, ROWS), (COPIES, ROWS), X, W, Y)
    assert moved == {"all-reduce": D * F} and close(flops, 4 * T * D * F)


@compiled_for_cpu
def test_tensor_parallelism_adds_up_the_outputs_of_a_layer():
    """Three matmuls of 2TDF/m operations beside one all-reduce of TD numbers."""
    specs = (COPIES, COLUMNS, COLUMNS, ROWS)
    flops, moved = counted(tensor_forward, specs, COPIES, (T, D), W, W, (F, D))
    assert moved == {"all-reduce": T * D} and close(flops, 6 * T * D * F / 8)


def test_the_machines_agree_with_their_data_sheets(page):
    """Bytes per second agree with published totals to a tenth, and operations are those of the
    makers, without sparsity."""
    one_axis = {  # of both directions, over all links of a chip, as the makers publish it
        "TPU v5e": 400e9 / 2 / 2,  # half is sending; one of two axes
        "TPU v5p": 1200e9 / 2 / 3,  # half is sending; one of three axes
        "H100, in a node": 900e9 / 2,  # half is sending
        "H100, between nodes": 8 * 400e9 / 8,  # eight NICs of 400 gigabits per second
    }
    assert list(one_axis) == list(page.machines)
    for name, machine in page.machines.items():
        assert 0.9 <= machine.bandwidth / one_axis[name] <= 1
        assert 2150 < machine.flops / machine.bandwidth < 2600
    inside, between = page.H100, page.machines["H100, between nodes"]
    assert page.machines["TPU v5e"].flops == 197e12 and page.machines["TPU v5p"].flops == 459e12
    assert abs(inside.flops - 1979e12 / 2) < 1e12 and between.flops == inside.flops
    assert between.bandwidth == 8 * 50e9  # 400 gigabits per second each


def test_the_numbers_of_the_figure(page):
    """A layer of the 8B model has 436 MB, and on an H100 the arithmetic covers it from 2,198 tokens."""
    D, F, kv = page.llama_8b.D, page.llama_8b.F, 8 * 128  # q, o; k, v; gate, up, down; norms
    layer = 2 * D * D + 2 * D * kv + 3 * D * F + 2 * D
    assert round(2 * layer / 1e6) == 436
    assert f"{page.H100.flops / page.H100.bandwidth:,.0f}" == "2,198"


def test_tensor_parallelism_wants_1465_hidden_units(page):
    """On H100s in a node 1,465 hidden units per device: the 1B model can be divided over 4 devices
    and not over 8, the 8B model over 8."""
    assert f"{page.H100.flops / page.H100.bandwidth / 1.5:,.0f}" == "1,465"
    limits = [(page.llama_1b, 4, False), (page.llama_1b, 8, True), (page.llama_8b, 8, False)]
    for model, devices, bound in limits:
        arithmetic, sent = page.tensor_times(model, page.H100, devices, tokens=4096)
        assert bound == (sent > arithmetic)
        assert bound == (1.5 * model.F / devices < page.H100.flops / page.H100.bandwidth)
        ring = sent * (devices - 1) / devices  # the exact bytes of a ring: the same answer
        assert bound == (ring > arithmetic)
    assert f"{1.5 * 14336 / 8:,.0f}" == "2,688"
    assert (8192 // 4, 8192 // 8) == (2048, 1024)  # hidden units per device, in the answer


def test_a_whole_layer_reaches_the_limit_earlier(page):
    """With sequences of 4,096 tokens: the 1B model over two H100s, the 8B model over four."""
    S, ratio = 4096, page.H100.flops / page.H100.bandwidth
    for (D, F), kv, limit in [(page.llama_1b, 8 * 64, 2), (page.llama_8b, 8 * 128, 4)]:
        feed_forward = 6 * D * F
        attention = 4 * D * D + 4 * D * kv + 2 * S * D  # q, o; k, v; scores of S / 2 tokens
        assert attention < feed_forward  # per token, beside the same all-reduce of 4D bytes
        layer = feed_forward + attention
        fits = [m for m in (1, 2, 4, 8) if layer / m / (2 * 4 * D) >= ratio]
        assert max(fits) == limit


@compiled_for_cpu
def test_groups_inside_a_node_leave_what_a_node_fetches():
    """On two nodes of four, each device fetches DF/4 numbers from the other node: by rows, then
    shared inside the node, or by features for its group."""
    grid = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AUTO,) * 2)

    def fsdp(w_DF):
        rows_DF = jax.lax.all_gather(w_DF, "node", axis=0, tiled=True)
        return jax.lax.all_gather(rows_DF, "gpu", axis=0, tiled=True).sum()[None]

    def groups(w_DF):
        return jax.lax.all_gather(w_DF, "node", axis=0, tiled=True).sum()[None]

    fetched = []
    for function, spec in [(fsdp, P(("gpu", "node"))), (groups, P("node", "gpu"))]:
        mapped = jax.shard_map(function, mesh=grid, in_specs=spec, out_specs=P(("node", "gpu")))
        program = jax.jit(mapped).lower(jax.ShapeDtypeStruct(W, "float32")).compile()
        moves = [move for move in ms.collectives(program, grid) if "node" in move.axes]
        fetched.append([(move.kind, move.payload_bytes) for move in moves])
    assert fetched == [[("all-gather", 4 * D * F / 4)]] * 2


def test_the_example_of_1024_devices(page):
    """786,432 tokens on 1,024 are 768 each, too few along three axes; groups of 4 have 3,072."""
    limits = [machine.flops / machine.bandwidth for machine in page.machines.values()]
    t = 786_432 / 1_024
    v5p = page.machines["TPU v5p"]
    assert t == 768 < v5p.flops / v5p.bandwidth / 3 and max(limits) < 4 * t == 3072


@compiled_for_cpu
def test_in_a_group_a_device_gathers_its_features_and_computes_them_for_the_group():
    """On 2 x 4 a device gathers 1/4 of the weight, and has the tokens of four: 2tDF operations."""
    grid = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    mapped = jax.shard_map(
        lambda x_TD, w_DF: x_TD @ jax.lax.all_gather(w_DF, "data", axis=0, tiled=True),
        mesh=grid,
        in_specs=(P("data"), P("data", "model")),
        out_specs=P("data", "model"),
    )
    inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in (X, W)]
    program = jax.jit(mapped).lower(*inputs).compile()
    (move,) = ms.collectives(program, grid)
    assert (move.kind, move.payload_bytes) == ("all-gather", 4 * D * F / 4)
    assert close(program.cost_analysis()["flops"], 2 * T * D * F)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
