"""The page "Gradient accumulation in Explicit mode: one sum over devices per step"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic, type_of
from pages import check_exercise, compiled_for_cpu, exercises_of
from random_arrays import numbers

PAGE = "07g-sum-once"
P = jax.P
pytestmark = pytest.mark.usefixtures("explicit_row")


def test_a_microbatch_has_rows_on_every_device(page):
    """Four microbatches of 16 rows along data; in the other order they would be sharded."""
    assert type_of(page.microbatches, page.x_BD) == "float32[4,16@data,192]"
    rows = jax.jit(page.microbatches)(page.x_BD)[1]
    np.testing.assert_array_equal(rows, np.asarray(page.x_BD)[1 :: page.M])


def test_in_the_other_order_a_loop_over_microbatches_raises(page):
    """Their dimension would be sharded: here for two microbatches on two devices."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x_BD = put(numbers(64, 16), mesh, "data", None)
        in_the_other_order = x_BD.reshape(4, -1, 16)
        assert str(jax.typeof(in_the_other_order)) == "float32[4@data,16,16]"
        said = attempt(lambda: jax.lax.map(jnp.sum, in_the_other_order))
        assert "should be replicated" in said


def test_in_the_other_order_four_microbatches_raise_in_the_reshape_and_eight_in_the_scan(page):
    """Four cannot be sharded over eight devices; eight are, and a scan over them raises."""
    said = attempt(lambda: page.x_BD.reshape(4, -1, page.D))
    assert "reshape" in said
    eight = page.x_BD.reshape(8, -1, page.D)
    assert str(jax.typeof(eight)) == "float32[8@data,8,192]"
    assert "should be replicated" in attempt(lambda: jax.lax.map(jnp.sum, eight))


def test_both_versions_give_the_gradient_of_the_whole_batch(page):
    """Up to rounding."""
    direct_LDD = jax.jit(jax.grad(page.mean_loss))(page.w_LDD, page.x_BD)
    for function in (page.every_time, page.once):
        gradient_LDD = jax.jit(function)(page.w_LDD, page.x_BD)
        assert str(jax.typeof(gradient_LDD)) == "float32[2,192,192]"
        np.testing.assert_allclose(gradient_LDD, direct_LDD, atol=1e-6)


@compiled_for_cpu
def test_once_sums_a_fourth_of_what_every_time_sums(page):
    """Compiled for CPU: 294,912 bytes over data, and four times as much."""
    assert page.summed(page.once) == page.w_LDD.nbytes == 294_912
    assert page.summed(page.every_time) == page.M * page.w_LDD.nbytes == 1_179_648


@compiled_for_cpu
def test_every_time_sums_each_layer_in_each_microbatch(page):
    """Compiled for CPU: two layers, four microbatches, in the loop; once, after it."""
    for function, inside in [(page.every_time, True), (page.once, False)]:
        moves = traffic(function, page.w_LDD, page.x_BD, mesh=page.mesh)
        assert {(move.kind, move.axes) for move in moves} == {("all-reduce", ("data",))}
        assert {move.inside_loop for move in moves} == {inside}
        wanted = page.L * page.M if inside else 1
        assert sum(move.executions for move in moves) == wanted


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_sum_the_same(compiler):
    """The stored programs: 1,179,648 bytes over data, and 294,912."""

    def stored(name):
        moves = stored_program(name)[compiler]["moves"]
        return sum(move["payload"] for move in moves if move["axes"] == ["data"])

    assert stored("sums-every-time") == 1_179_648
    assert stored("sums-once") == 294_912


def test_those_compilers_move_only_the_sums_of_weights_outside_of_scanned_layers():
    """Of the stacked model in four parts, a little less than four times the bytes of one step."""

    def sent(name, compiler):
        return sum(move["wire"] for move in stored_program(name)[compiler]["moves"])

    for compiler, low, high in [("gpu", 3.8, 3.95), ("tpu", 3.8, 3.95), ("cpu", 3.99, 4.01)]:
        assert low < sent("train-parts-4", compiler) / sent("train-dp", compiler) < high


@compiled_for_cpu
def test_compiled_for_cpu_a_sum_stays_in_the_loop_over_microbatches(explicit_row):
    """CPU's compiler leaves the sum of a gradient in the loop, also of a weight in no other loop."""

    def loss(w_DD, x_BD):
        return (jnp.tanh(x_BD @ w_DD) ** 2).mean()

    def accumulated(w_DD, x_MBD):
        def add(total, x_BD):
            return total + jax.grad(loss)(w_DD, x_BD), None

        return jax.lax.scan(add, jnp.zeros_like(w_DD), x_MBD)[0]

    w_DD, x_MBD = (
        put(numbers(16, 16), explicit_row),
        put(numbers(4, 8, 16), explicit_row, None, "data"),
    )
    program = jax.jit(accumulated).lower(w_DD, x_MBD).compile()
    sums = [move for move in ms.collectives(program, explicit_row) if move.axes == ("data",)]
    assert [(move.kind, move.inside_loop, move.executions) for move in sums] == [
        ("all-reduce", True, 4)
    ]


def test_zeros_and_gradients_need_the_same_mark(page):
    """A scan keeps the type of what it carries, so one mark alone raises an error."""
    marked_w_LDD = jax.reshard(page.w_LDD, P(reduced={"data"}))
    marked_zeros_LDD = jax.reshard(jnp.zeros_like(page.w_LDD), P(unreduced={"data"}))
    for w_LDD, zeros_LDD in [(marked_w_LDD, page.w_LDD), (page.w_LDD, marked_zeros_LDD)]:
        with pytest.raises(Exception, match="nreduced"):
            jax.eval_shape(page.accumulate, w_LDD, zeros_LDD, page.x_BD)


@compiled_for_cpu
def test_without_marks_once_becomes_every_time(page):
    """Compiled for CPU: the same bytes, and the right gradient."""

    def lost(w_LDD, x_BD):
        total_LDD = page.accumulate(w_LDD, jnp.zeros_like(w_LDD), x_BD)
        return jax.reshard(total_LDD, P()) / page.M

    assert page.summed(lost) == page.summed(page.every_time)
    gradient_LDD = jax.jit(lost)(page.w_LDD, page.x_BD)
    np.testing.assert_allclose(gradient_LDD, page.direct_LDD, atol=1e-6)


def test_of_unequal_microbatches_the_mean_of_means_is_wrong_and_one_division_is_right(page):
    """48 rows and 16: the sum of the gradients of summed losses, over all rows, is the batch's."""
    x_BD = np.asarray(page.x_BD)
    parts = [put(part, page.mesh, "data", None) for part in (x_BD[:48], x_BD[48:])]

    def summed_loss(w_LDD, x_BD):
        return page.mean_loss(w_LDD, x_BD) * len(x_BD)

    def added(loss):
        return sum(jax.jit(jax.grad(loss))(page.w_LDD, part) for part in parts)

    wrong_LDD = added(page.mean_loss) / 2
    largest = jnp.abs(page.direct_LDD).max()
    assert jnp.abs(wrong_LDD - page.direct_LDD).max() > 0.05 * largest
    np.testing.assert_allclose(added(summed_loss) / 64, page.direct_LDD, atol=1e-6)


@compiled_for_cpu
def test_with_fsdp_weights_are_gathered_once_and_the_total_may_end_in_pieces(page):
    """Compiled for CPU: a device holds whole weights and whole gradients during the step."""

    def ends_in_pieces(w_pieces_LDD, x_BD):
        w_LDD = jax.reshard(w_pieces_LDD, P(reduced={"data"}))  # gathered here
        zeros_LDD = jax.reshard(jnp.zeros(w_LDD.shape), P(unreduced={"data"}))
        total_LDD = page.accumulate(w_LDD, zeros_LDD, x_BD)
        return jax.reshard(total_LDD, page.stored_as) / page.M

    program = jax.jit(ends_in_pieces).lower(page.w_pieces_LDD, page.x_BD).compile()
    gradient_LDD = program(page.w_pieces_LDD, page.x_BD)
    np.testing.assert_allclose(gradient_LDD, page.direct_LDD, atol=1e-6)
    assert gradient_LDD.sharding.spec == page.stored_as
    moves = ms.collectives(program, page.mesh).by("kind")
    assert moves.bytes("all-gather") == page.w_LDD.nbytes
    assert ms.memory(program).temporaries > 2 * page.w_LDD.nbytes


@compiled_for_cpu
def test_a_reduced_scale_or_bias_works_if_you_broadcast_it(page):
    """Its gradient waits for the one sum as well: 192 numbers more for each."""

    def spread(v_D, x_BD):
        spec = jax.typeof(x_BD).sharding.spec
        return jax.lax.broadcast_in_dim(v_D, x_BD.shape, (1,), out_sharding=spec)

    def with_bias(weights, x_BD):
        x_BD = x_BD * spread(weights["scale_D"], x_BD) + spread(weights["b_D"], x_BD)
        return page.mean_loss(weights["w_LDD"], x_BD)

    def marked(arrays, **mark):
        return {name: jax.reshard(array, P(**mark)) for name, array in arrays.items()}

    def once(weights, x_BD):
        weights = marked(weights, reduced={"data"})
        zeros = marked(jax.tree.map(jnp.zeros_like, weights), unreduced={"data"})

        def add(total, x_RD):
            return jax.tree.map(jnp.add, total, jax.grad(with_bias)(weights, x_RD)), None

        total, _ = jax.lax.scan(add, zeros, page.microbatches(x_BD))
        return {name: jax.reshard(total[name], P()) / page.M for name in total}

    weights = {
        "w_LDD": page.w_LDD,
        "scale_D": put(np.ones(page.D, "float32"), page.mesh),
        "b_D": put(np.zeros(page.D, "float32"), page.mesh),
    }
    program = jax.jit(once).lower(weights, page.x_BD).compile()
    direct = jax.jit(jax.grad(with_bias))(weights, page.x_BD)
    for name, gradient in program(weights, page.x_BD).items():
        np.testing.assert_allclose(gradient, direct[name], atol=1e-6)
    found = ms.collectives(program, page.mesh).by("axes").bytes(("data",))
    assert found == page.w_LDD.nbytes + 2 * 4 * page.D


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
