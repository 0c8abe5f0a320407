"""The page "FSDP on two axes: HSDP, and FSDP with tensor parallelism"."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import compared
import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import traffic
from pages import check_exercise, compiled_for_cpu, exercises_of, source_of

PAGE = "09d-fsdp-two-axes"
P = jax.P
TEXT = source_of(PAGE).read_text("utf-8")
COMPILERS = {"H100": "gpu", "TPU v5e": "tpu", "CPU": "cpu"}
assert_same = partial(compared.assert_same, rtol=1e-3, atol=1e-5)


# HSDP


def test_a_device_stores_a_quarter_of_the_matrix(page):
    """Weights are sharded along fsdp only, so along data there are copies; the batch along both."""
    matrix = jax.NamedSharding(page.nodes, P("fsdp"))
    assert matrix.shard_shape((32, 16)) == (8, 16) and page.small["w_DF"].nbytes == 2_048
    assert 4 * 8 * 16 == 512
    rows = jax.NamedSharding(page.nodes, P(("data", "fsdp")))
    assert rows.shard_shape((64, 32)) == (8, 32)


@pytest.mark.parametrize("cast_early", [False, True])
def test_hsdp_gives_the_gradient_of_one_device(page, cast_early):
    """With the cast early or late, to 1e-4."""
    wanted = jax.jit(jax.grad(page.error_of))(page.small, page.batch)
    found = jax.jit(page.hsdp(cast_early))(page.small, page.batch)
    assert_same(found, wanted, rtol=1e-4, atol=1e-6)


def moved(page, cast_early):
    table = traffic(page.hsdp(cast_early), page.small, page.batch, mesh=page.nodes)
    return table.by("kind", "axes")


@compiled_for_cpu
def test_without_the_early_cast_the_whole_gradient_is_reduced_between_nodes(page):
    """2,048 bytes over data, and the gather over fsdp is of as many."""
    table = moved(page, False)
    assert table.bytes("all-reduce", "data") == 2048
    assert table.bytes("all-gather", "fsdp") == 2048


@compiled_for_cpu
def test_with_the_early_cast_only_a_piece_is_reduced_between_nodes(page):
    """512 bytes over data, a quarter; gathers are the same, and none is over data."""
    table = moved(page, True)
    assert table.bytes("all-reduce", "data") == 512
    assert table.bytes("all-gather", "fsdp") == 2048
    assert {axes for kind, axes in table if kind == "all-gather"} == {("fsdp",)}


def test_the_early_cast_scatters_before_it_reduces(page):
    """In the traced program, on any machine: the sum over data is of a piece of 8 rows."""

    def sums_over_data(cast_early):
        text = str(jax.make_jaxpr(page.hsdp(cast_early))(page.small, page.batch))
        return [line.strip() for line in text.splitlines() if "psum" in line and "'data'" in line]

    pieces = [line for line in sums_over_data(True) if "f32[8,16]" in line]
    whole = [line for line in sums_over_data(True) if "f32[32,16]" in line]
    assert pieces and not whole
    assert any("f32[32,16]" in line for line in sums_over_data(False))


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "row, program",
    [
        ("JAX casts, after the gather", "hsdp-late"),
        ("you cast, before the gather", "hsdp-early"),
    ],
)
def test_the_table_of_what_crosses_the_network(row, program, compiler):
    """H100 and CPU reduce the whole matrix without the early cast, TPU v5e a piece in both."""
    lines = TEXT.splitlines()
    head = next(line for line in lines if line.startswith("| bytes of the gradient reduced"))
    (line,) = [line for line in lines if line.startswith(f"| {row} |")]
    names, cells = ([cell.strip() for cell in text.strip("|").split("|")] for text in (head, line))
    (move,) = [
        move
        for move in stored_program(program)[COMPILERS[compiler]]["moves"]
        if move["axes"] == ["data"]
    ]
    assert move["kind"] == "all-reduce"
    assert dict(zip(names, cells, strict=True))[compiler] == f"{move['payload']:,}"


# FSDP with tensor parallelism


def test_fsdp_takes_the_dimension_that_tensor_parallelism_leaves_whole(page):
    """with_fsdp adds data to D of both matrices."""
    assert page.mlp_specs == {"w_DF": P("data", "model"), "w_FD": P("model", "data")}


def test_with_fsdp_leaves_what_has_data_or_what_nothing_divides(page):
    """A spec with data, and one without a free dimension that two divides, stay as they are."""
    assert page.with_fsdp((32, 64), P("data", "model")) == P("data", "model")
    assert page.with_fsdp((32, 64, 8), P("data", None, "model")) == P("data", None, "model")
    assert page.with_fsdp((7, 64), P(None, "model")) == P(None, "model")


def test_fsdp_with_tensor_parallelism_gives_the_gradient_of_one_device(page):
    """To 1e-3."""

    def mlp_of_one_device(weights, batch):
        x_BD, target_BD = batch
        y_BD = jnp.tanh(x_BD @ weights["w_DF"]) @ weights["w_FD"]
        return jnp.mean((y_BD - target_BD) ** 2)

    batch = page.x_BD, page.x_BD
    wanted = jax.jit(jax.grad(mlp_of_one_device))(page.weights, batch)
    assert_same(jax.jit(page.mlp)(page.weights, batch), wanted)


@compiled_for_cpu
def test_weights_move_along_data_and_activations_along_model(page):
    """Of 16,384 bytes of weights a quarter is gathered and scattered; y is summed, 4,096 bytes."""
    both = sum(weight.nbytes for weight in page.weights.values())
    assert both == 16_384 == 4 * 4_096 and 32 * 32 * 4 == 4_096
    found = {key: total.payload_bytes for key, total in page.sent.items()}
    assert found == {
        ("all-gather", ("data",)): both // 4,
        ("reduce-scatter", ("data",)): both // 4,
        ("all-reduce", ("model",)): 4_096,
    }


def test_for_h100_it_is_the_same():
    """The stored program for H100 moves what the one for CPU does."""
    stored = stored_program("fsdp-tensor")
    assert stored["gpu"]["moves"] == stored["cpu"]["moves"]


def test_for_tpu_gathers_are_bfloat16_and_one_scatter_is_an_all_reduce():
    """2,048 bytes of gathers, one reduce-scatter and one all-reduce over data."""
    moves = {
        (move["kind"], *move["axes"]): move
        for move in stored_program("fsdp-tensor")["tpu"]["moves"]
    }
    gather = moves["all-gather", "data"]
    assert (gather["dtype"], gather["payload"]) == ("bfloat16", 2_048)
    for kind in ("reduce-scatter", "all-reduce"):
        assert moves[kind, "data"]["executions"] == 1
    cpu = {(m["kind"], *m["axes"]): m for m in stored_program("fsdp-tensor")["cpu"]["moves"]}
    assert cpu["reduce-scatter", "data"]["executions"] == 2


@compiled_for_cpu
def test_the_gradient_of_x_is_a_second_sum_along_model(page):
    """For a layer below, the backward pass adds up activations along model once more."""

    def with_x(weights, x_BD, target_BD):
        return page.mlp_error(weights, (x_BD, target_BD))

    mapped = jax.shard_map(
        jax.grad(with_x, argnums=(0, 1)),
        mesh=page.grid,
        in_specs=(page.mlp_specs, P("data"), P("data")),
        out_specs=(page.mlp_specs, P("data")),
    )
    program = jax.jit(mapped).lower(page.weights, page.x_BD, page.x_BD).compile()
    table = ms.collectives(program, page.grid).by("kind", "axes")
    assert table.bytes("all-reduce", "model") == 2 * 4_096


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)
