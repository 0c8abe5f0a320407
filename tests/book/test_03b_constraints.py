"""The page "Constraints": what it says of the compiler's choice, and of a pin, is true."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from many_devices.compiled import stored_payload, stored_program
from many_devices.helpers import put
from many_devices.stack import make_stack, run_stack, small
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "03b-constraints"
P = jax.P
LAYERS, WIDTH, HIDDEN, CLASSES = 4, 64, 256, 16
WEIGHT, H_OF_16 = 64 * 128, 16 * 128  # elements that a gather along data gives a device


def rows_of(page, B):
    return put(np.ones((B, 64), "float32"), page.mesh, "data", None)


def program_of(page, function, model, B):
    with jax.set_mesh(page.mesh):
        return jax.jit(function).lower(model, rows_of(page, B)).compile()


def moves(page, program, kind):
    return [row for row in ms.collectives(program, page.mesh) if row.kind == kind]


def gathered(page, function, B):
    """The shapes that the function's all-gathers give, in order of size, and their bytes."""
    rows = moves(page, program_of(page, function, page.block, B), "all-gather")
    return sorted(row.shape for row in rows), sum(row.payload_bytes for row in rows)


def is_sharded(program, mesh, *spec):
    return program.output_shardings.is_equivalent_to(jax.NamedSharding(mesh, P(*spec)), 2)


# What the compiler chooses


@compiled_for_cpu
def test_the_output_changes_its_sharding_with_the_batch(page):
    """With 512 rows a device ends with its rows; with 16 rows with all rows and half of the features."""
    of_512, of_16 = (program_of(page, page.forward, page.block, B) for B in (512, 16))
    assert is_sharded(of_512, page.mesh, "data", None) and is_sharded(
        of_16, page.mesh, None, "data"
    )
    assert of_16.output_shardings.shard_shape((16, 64)) == (16, 32)


@compiled_for_cpu
def test_for_cpu_the_smaller_of_h_and_w_is_gathered(page):
    """With 512 rows it is w_FD, 128 x 64; with 16 rows it is h, 16 x 128. w_DF is in both."""
    assert gathered(page, page.forward, 512)[0] == [(64, 128), (128, 64)]
    assert gathered(page, page.forward, 16)[0] == [(16, 128), (64, 128)]
    assert 16 * 128 < 128 * 64 < 512 * 128


@pytest.mark.parametrize("compiler, size", [("gpu", 4), ("tpu", 2)])
def test_for_h100_and_tpu_the_same_is_gathered(compiler, size):
    """Without a pin w_DF and w_FD of 512 rows, w_DF and h of 16; pinned, both weights."""
    for name, numbers in [
        ("init-free-512", 2 * WEIGHT),
        ("init-free-16", WEIGHT + H_OF_16),
        ("init-pinned-16", 2 * WEIGHT),
    ]:
        rows = stored_program(name)[compiler]["moves"]
        (row,) = [row for row in rows if row["kind"] == "all-gather"]
        assert row["payload"] == size * numbers and row["axes"] == ["data"], name
        assert row["dtype"] == {4: "float32", 2: "bfloat16"}[size]


def layers_gathered(page, function, stack, B):
    """How many weights of a block a function of six blocks gathers, and how many other values."""
    with jax.set_mesh(page.mesh):
        program = jax.jit(function).lower(stack, rows_of(page, B)).compile()
    rows = moves(page, program, "all-gather")
    weights = [row for row in rows if row.shape in {(64, 128), (128, 64)}]
    return sum(row.executions for row in weights), len(rows) - len(weights)


def written_out(stack, x_BD):
    for number in range(small.L):
        block = jax.tree.map(operator.itemgetter(number), stack)
        x_BD = block(x_BD)
    return x_BD


@pytest.fixture(scope="module")
def stack(page):
    with jax.set_mesh(page.mesh):
        return jax.jit(lambda: make_stack(small))()


@compiled_for_cpu
def test_six_blocks_written_out_turn_with_the_batch(page, stack):
    """Of 16 rows activations move, and one weight of twelve is gathered; of 512 rows, all twelve."""
    assert layers_gathered(page, written_out, stack, 16) == (1, 1)
    assert layers_gathered(page, written_out, stack, 512) == (12, 0)


@compiled_for_cpu
def test_six_blocks_in_a_scan_do_not(page, stack):
    """A scan gathers all twelve weights, of 16 rows and of 512, and keeps the sharding of its input."""
    for B in (16, 512):
        assert layers_gathered(page, run_stack, stack, B) == (12, 0)
        with jax.set_mesh(page.mesh):
            y_BD = jax.jit(run_stack)(stack, rows_of(page, B))
        assert y_BD.sharding.is_equivalent_to(rows_of(page, B).sharding, 2)


def test_a_scan_and_a_loop_give_the_same_numbers(page, stack):
    """What is gathered changes no value."""
    with jax.set_mesh(page.mesh):
        by_loop, by_scan = (jax.jit(f)(stack, rows_of(page, 16)) for f in (written_out, run_stack))
    np.testing.assert_allclose(by_loop, by_scan, rtol=1e-3, atol=1e-5)


# A pin on the output


def test_a_pin_holds_for_every_compiler_and_batch(page):
    """With y pinned a device ends with its own rows."""
    for B in (16, 512):
        program = program_of(page, page.pin_output, page.block, B)
        assert is_sharded(program, page.mesh, "data", None)
    y_BD = page.after("pin").y_BD
    assert y_BD.sharding.shard_shape(y_BD.shape) == (8, 64)


@compiled_for_cpu
def test_pinned_both_weights_are_gathered(page):
    """With y pinned, 16 rows and 512 gather w_DF and w_FD, as 512 rows do without a pin."""
    expected = [(64, 128), (128, 64)], 4 * 2 * WEIGHT
    for function, B in [(page.pin_output, 16), (page.pin_output, 512), (page.forward, 512)]:
        assert gathered(page, function, B) == expected


@compiled_for_cpu
def test_a_pin_on_h_changes_nothing(page):
    """With h pinned the same is gathered as without a pin, and y is sharded by features."""
    assert gathered(page, page.pin_hidden, 16) == gathered(page, page.forward, 16)
    program = program_of(page, page.pin_hidden, page.block, 16)
    assert is_sharded(program, page.mesh, None, "data")


@compiled_for_cpu
def test_the_sum_along_model_is_the_same_in_each(page):
    """y is added up along model: 3,072 bytes are sent, with and without a pin."""
    for function in (page.forward, page.pin_hidden, page.pin_output):
        program = program_of(page, function, page.block, 16)
        (added,) = moves(page, program, "all-reduce")
        assert (added.axes, added.wire_bytes) == (("model",), 3_072)


def test_a_pin_changes_no_value(page):
    """All three functions compute tanh(x w_DF) w_FD."""
    x_BD = rows_of(page, 16)
    expected = jnp.tanh(x_BD @ page.block.w_DF) @ page.block.w_FD
    for function in (page.forward, page.pin_hidden, page.pin_output):
        with jax.set_mesh(page.mesh):
            y_BD = jax.jit(function)(page.block, x_BD)
        np.testing.assert_allclose(y_BD, expected, atol=1e-5)


@compiled_for_cpu
@pytest.mark.parametrize("rows", [64, 512])
def test_in_the_quick_start_a_pin_on_h_is_enough(rows):
    """There the columns of w_FD are whole, and with h pinned a step gathers weights alone."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.NamedSharding(mesh, P("data"))

    def loss(weights, x_BD):
        w_DF, w_FD = weights
        h_BF = jax.lax.with_sharding_constraint(jax.nn.relu(x_BD @ w_DF), by_rows)
        return ((h_BF @ w_FD - x_BD) ** 2).mean()

    shapes = [(96, 384), (384, 96), (rows, 96)]
    *weights, x_BD = (jax.ShapeDtypeStruct(it, "float32", sharding=by_rows) for it in shapes)
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, [by_rows, by_rows]))
    table = ms.collectives(step.lower(weights, x_BD).compile())
    assert {row.shape for row in table if row.kind == "all-gather"} == {(96, 384), (384, 96)}


# Its price


@compiled_for_cpu
def test_the_bytes_as_printed(page):
    """40,960, 65,536 and 65,536 bytes for H100 and CPU, and half of each for TPU v5e."""
    told = {}
    for way, (name, function, x_BD) in page.ways.items():
        stored = [stored_payload(name, other, "all-gather") for other in ("gpu", "tpu")]
        told[way] = [*stored, gathered(page, function, len(x_BD))[1]]
    assert list(told.values()) == [
        [40_960, 20_480, 40_960],
        [65_536, 32_768, 65_536],
        [65_536, 32_768, 65_536],
    ]


def test_a_gathered_weight_and_h_in_bytes():
    """A gathered weight has 32,768 bytes, and h of 16 rows 8,192."""
    assert (4 * WEIGHT, 4 * H_OF_16) == (32_768, 8_192)


# Annotations all the same


def test_without_annotations_a_device_holds_all_weights(page):
    """262,144 bytes in place of 32,768, although y is pinned and sharded by rows."""
    assert ms.memory(page.bare).bytes_per_device == 262_144 == 8 * 32_768
    assert ms.memory(page.block).bytes_per_device == 32_768
    assert page.y_BD.sharding.is_equivalent_to(rows_of(page, 16).sharding, 2)
    programs = [program_of(page, page.pin_output, model, 16) for model in (page.bare, page.block)]
    bare, annotated = (ms.memory(program).arguments for program in programs)
    assert bare - annotated == 7 * 32_768


# A whole step


def sent_in_a_step(rows, pins):
    """Bytes that a device sends for loss and gradients of a small model, FSDP over eight devices.

    An embedding, a scan of residual blocks and a head, all sharded over `data`. `pins` says which
    values are constrained to the rows of the batch: {"blocks"}, {"logits"}, or both.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def pinned(x, name):
        return jax.lax.with_sharding_constraint(x, P("data", None)) if name in pins else x

    def loss(weights, x_BD):
        w_DD, blocks, w_DV = weights

        def layer(x_BD, block):
            w_DF, w_FD = block
            return pinned(x_BD + jnp.tanh(x_BD @ w_DF) @ w_FD, "blocks"), None

        x_BD, _ = jax.lax.scan(layer, pinned(x_BD @ w_DD, "blocks"), blocks)
        return (pinned(x_BD @ w_DV, "logits") ** 2).mean()

    def shape(*lengths, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(lengths, "float32", sharding=sharding)

    blocks = (
        shape(LAYERS, WIDTH, HIDDEN, spec=P(None, "data", None)),
        shape(LAYERS, HIDDEN, WIDTH, spec=P(None, None, "data")),
    )
    embed, head = shape(WIDTH, WIDTH, spec=P(None, "data")), shape(WIDTH, CLASSES, spec=P("data"))
    weights = embed, blocks, head
    shardings = jax.tree.map(lambda weight: weight.sharding, weights)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
        program = step.lower(weights, shape(rows, WIDTH, spec=P("data"))).compile()
    kinds = ms.collectives(program).by("kind").values()
    return sum(totals.wire_bytes for totals in kinds)


@compiled_for_cpu
def test_pinned_at_each_block_a_step_sends_the_same_for_every_batch():
    """With a pin on the output of each block weights move, whatever the batch is."""
    assert len({sent_in_a_step(rows, {"blocks"}) for rows in (64, 1024, 4096)}) == 1


@compiled_for_cpu
def test_a_pin_on_the_logits_alone_leaves_it_to_the_compiler():
    """A pin on the logits alone is not enough: activations move, and more of them in a larger batch."""
    sent = {rows: sent_in_a_step(rows, {"logits"}) for rows in (2048, 4096)}
    assert sent[4096] / sent[2048] == pytest.approx(2, rel=0.1)
    assert sent[4096] > 5 * sent_in_a_step(4096, {"blocks"})
    assert sent[4096] == pytest.approx(sent_in_a_step(4096, set()), rel=0.1)  # as with no pin


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
