"""The page "Gradients in Explicit mode: unreduced, reduced, and one sum a step"."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic, type_of
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again

PAGE = "07b-explicit-gradients"
P = jax.P
RELEASE = jax.__version_info__


@pytest.fixture(autouse=True)
def mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@cache
def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def placed(array, *spec, **mark):
    return jax.device_put(array, jax.NamedSharding(jax.sharding.get_mesh(), P(*spec, **mark)))


def terms(sign=1):
    """An unreduced value: each device along `model` has one term of a sum."""
    h_BF, w_FD = placed(numbers(8, 32), "data", "model"), placed(sign * numbers(32, 16), "model")
    return jnp.dot(h_BF, w_FD, out_sharding=P("data", None, unreduced={"model"}))


def summed(value):
    """The value after its sum was taken, as NumPy has it."""
    spec = jax.typeof(value).sharding.spec
    return np.asarray(jax.reshard(value, P(*spec.partitions)))


def unreduced(value):
    return "{U:model}" in str(jax.typeof(value))


def plain():
    return numbers(8, 32) @ numbers(32, 16)


def check(function, *values):
    """The mark stays, and the result is that of the summed values."""
    found = jax.jit(function)(*values)
    assert unreduced(found), jax.typeof(found)
    wanted = function(*[jnp.asarray(summed(value)) for value in values])
    np.testing.assert_allclose(summed(found), wanted, rtol=1e-2, atol=5e-2)  # bfloat16


LINEAR = {
    "sum": lambda u: u.sum(1),
    "transpose": lambda u: u.T,
    "reshape": lambda u: u.reshape(8, 4, 4),
    "slice": lambda u: u[:2],
    "astype": lambda u: u.astype("bfloat16").astype("float32"),
}


@pytest.mark.parametrize("name", LINEAR)
def test_these_operations_keep_the_mark_in_every_release(name):
    """Sum, transpose, reshape, slice and astype keep an unreduced value unreduced."""
    check(LINEAR[name], terms())


def test_adding_two_keeps_the_mark_in_every_release():
    """Terms can be added to terms."""
    check(jnp.add, terms(), terms(-2))


@pytest.mark.parametrize("name", ["negative", "subtract"])
def test_negation_and_subtraction_keep_the_mark_since_0_12(name):
    """Negation and subtraction have a rule in JAX 0.12, and had none before."""
    function = getattr(jnp, name)
    values = (terms(), terms(-2))[: 1 if name == "negative" else 2]
    if RELEASE >= (0, 12):
        return check(function, *values)
    with pytest.raises(NotImplementedError):
        function(*values)


def test_a_product_with_a_value_needs_that_value_marked_reduced():
    """Terms can be multiplied by a value that is marked reduced, and by no other."""
    two = jnp.float32(2)
    with pytest.raises(Exception, match="should be reduced along the same axes"):
        terms() * two
    found = terms() * jax.reshard(two, P(reduced={"model"}))
    assert unreduced(found)
    np.testing.assert_allclose(summed(found), 2 * plain(), rtol=1e-4, atol=1e-5)


def test_a_quotient_by_a_reduced_value_has_a_rule_since_0_11_1():
    """Terms can be divided by a value that is marked reduced, since JAX 0.11.1."""
    two = jax.reshard(jnp.float32(2), P(reduced={"model"}))
    if RELEASE < (0, 11, 1):
        with pytest.raises(NotImplementedError):
            terms() / two
        return
    np.testing.assert_allclose(summed(terms() / two), plain() / 2, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="should be reduced"):
        terms() / jnp.float32(2)


@pytest.mark.parametrize("function", [jnp.cos, jnp.abs, lambda u: u @ u.T])
def test_what_is_not_linear_raises(function):
    """A cosine, an absolute value or a product of terms raises an error: in 0.12 it says why."""
    with pytest.raises(Exception) as raised:
        function(terms())
    if RELEASE >= (0, 12):
        assert type(raised.value).__name__ == "ShardingTypeError"


def test_the_maximum_of_an_unreduced_value_is_refused_or_wrong():
    """`max` of an unreduced value raises; JAX 0.11.1 and 0.11.2 return the largest term instead."""
    if not (0, 11, 1) <= RELEASE < (0, 12):
        with pytest.raises(ValueError):
            terms().max(1)
        return
    found = summed(terms().max(1))
    assert np.abs(found - plain().max(1)).max() > 1
    blocks = [numbers(8, 32)[:, i : i + 8] @ numbers(32, 16)[i : i + 8] for i in (0, 8, 16, 24)]
    np.testing.assert_allclose(found, np.max(blocks, axis=(0, 2)), rtol=1e-4)


def test_a_flip_has_no_rule():
    """A flip of an unreduced value raises NotImplementedError."""
    with pytest.raises(NotImplementedError):
        terms()[:, ::-1]


@compiled_for_cpu
def test_compiled_for_cpu_a_sum_stays_in_the_loop_over_microbatches(mesh):
    """CPU's compiler leaves the sum of a gradient in the loop, also of a weight in no other loop."""

    def loss(w_DD, x_BD):
        return (jnp.tanh(x_BD @ w_DD) ** 2).mean()

    def accumulated(w_DD, x_MBD):
        def add(total, x_BD):
            return total + jax.grad(loss)(w_DD, x_BD), None

        return jax.lax.scan(add, jnp.zeros_like(w_DD), x_MBD)[0]

    w_DD, x_MBD = placed(numbers(16, 16)), placed(numbers(4, 8, 16), None, "data")
    program = jax.jit(accumulated).lower(w_DD, x_MBD).compile()
    sums = [move for move in ms.collectives(program, mesh) if move.axes == ("data",)]
    assert [(move.kind, move.inside_loop, move.executions) for move in sums] == [
        ("all-reduce", True, 4)
    ]


# The page: types of gradients


def own_part(page):
    """Bytes of the weights on one device."""
    return 4 * sum(w.size for w in page.weights.values()) // page.mesh.shape["model"]


def test_the_gradient_of_a_weight_has_the_type_of_the_weight(page):
    """Sharded along both axes, and whole along data."""
    for spec in (P("data", "model"), P(None, "model")):
        w = jax.reshard(page.w_DF, spec)
        assert type_of(jax.grad(page.loss), w, page.x_BD) == str(jax.typeof(w))


def test_the_gradient_of_a_reduced_weight_is_unreduced(page):
    """In place of R the type of the gradient has U."""
    value, gradient = str(jax.typeof(page.w)), type_of(jax.grad(page.loss), page.w, page.x_BD)
    assert value == "float32[16,32@model]{R:data}"
    assert gradient == "float32[16,32@model]{U:data}"


def test_the_gradient_of_an_unreduced_value_is_reduced(page):
    """The pair the other way round."""

    def sum_of(y_BD):
        return jax.reshard(y_BD, P("data", None)).sum()

    found = type_of(jax.grad(sum_of), page.terms(page.h_BF, page.w_FD))
    assert found == "float32[8@data,16]{R:model}"


def test_an_unreduced_product_is_added_up_by_reshard(page):
    """terms is unreduced over model; added up it has the values of the product."""
    assert type_of(page.terms, page.h_BF, page.w_FD) == "float32[8@data,16]{U:model}"
    assert type_of(page.added_up, page.h_BF, page.w_FD) == "float32[8@data,16]"

    def at_once(h_BF, w_FD):
        return jnp.dot(h_BF, w_FD, out_sharding=P("data", None))

    found = jax.jit(page.added_up)(page.h_BF, page.w_FD)
    np.testing.assert_allclose(found, jax.jit(at_once)(page.h_BF, page.w_FD))


def test_a_cosine_of_terms_raises(page):
    """The message says that the value is unreduced."""
    assert "unreduced" in attempt(jnp.cos, page.terms(page.h_BF, page.w_FD))


@compiled_for_cpu
def test_the_sum_is_taken_by_the_reshard(page):
    """Compiled for CPU: the terms move nothing, adding them up is one all-reduce."""
    assert not traffic(page.terms, page.h_BF, page.w_FD)
    assert traffic(page.added_up, page.h_BF, page.w_FD).kinds == {"all-reduce"}


def test_marking_a_weight_reduced_moves_nothing(page):
    """The mark is a request to the backward pass alone."""

    def mark(w):
        return jax.reshard(w, P(None, "model", reduced={"data"}))

    assert type_of(mark, page.w_DF) == "float32[16,32@model]{R:data}"
    assert not traffic(mark, page.w_DF)


# The page: accumulation


def test_a_microbatch_has_rows_on_every_device(page):
    """Four microbatches of 16 rows along data; in the other order they would be sharded."""
    assert type_of(page.microbatches, page.big_x_BD) == "float32[4,16@data,96]"
    in_the_other_order = page.big_x_BD.reshape(page.M, -1, page.D)
    assert str(jax.typeof(in_the_other_order)) == "float32[4@data,16,96]"
    said = attempt(lambda: jax.lax.map(jnp.sum, in_the_other_order))
    assert "should be replicated" in said
    rows = jax.jit(page.microbatches)(page.big_x_BD)[1]
    np.testing.assert_array_equal(rows, np.asarray(page.big_x_BD)[1 :: page.M])


def test_both_versions_give_the_gradient_of_the_whole_batch(page):
    """Up to rounding."""
    direct = jax.jit(jax.grad(page.stack_loss))(page.weights, page.big_x_BD)
    for function in (page.every_time, page.once):
        for name, gradient in jax.jit(function)(page.weights, page.big_x_BD).items():
            np.testing.assert_allclose(gradient, direct[name], atol=1e-6)


@compiled_for_cpu
def test_once_sums_a_fourth_of_what_every_time_sums(page):
    """Compiled for CPU: 294,912 bytes over data, and four times as much."""
    assert page.summed(page.once) == own_part(page) == 294_912
    assert page.summed(page.every_time) == page.M * own_part(page) == 1_179_648


@compiled_for_cpu
def test_every_time_sums_each_layer_in_each_microbatch(page):
    """Compiled for CPU: two matrices, four layers, four microbatches, in the loop; once, after it."""
    over_model = []
    for function, inside in [(page.every_time, True), (page.once, False)]:
        moves = traffic(function, page.weights, page.big_x_BD, mesh=page.mesh)
        over_model.append(moves.by("axes").bytes(("model",)))
        sums = [move for move in moves if "data" in move.axes]
        assert {move.kind for move in sums} == {"all-reduce"}
        assert {move.inside_loop for move in sums} == {inside}
        wanted = 2 * page.L * page.M if inside else 2
        assert sum(move.executions for move in sums) == wanted
    assert over_model[0] == over_model[1]  # the row-parallel products


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_sum_the_same(page, compiler):
    """The stored programs: 1,179,648 bytes over data, and 294,912."""
    assert page.stored("sums-every-time", compiler) == 1_179_648
    assert page.stored("sums-once", compiler) == 294_912


def test_those_compilers_move_only_the_sums_of_weights_outside_of_scanned_layers():
    """Of chapter 4's model in four parts, a little less than four times the bytes of one step."""

    def sent(name, compiler):
        return sum(move["wire"] for move in stored_program(name)[compiler]["moves"])

    for compiler, low, high in [("gpu", 3.8, 3.95), ("tpu", 3.8, 3.95), ("cpu", 3.99, 4.01)]:
        assert low < sent("train-parts-4", compiler) / sent("train-dp", compiler) < high


@compiled_for_cpu
def test_once_needs_no_more_scratch_memory(page):
    """Compiled for CPU."""
    scratch = [
        ms.memory(jax.jit(f).lower(page.weights, page.big_x_BD).compile()).temporaries
        for f in (page.every_time, page.once)
    ]
    assert scratch[1] <= scratch[0]


@compiled_for_cpu
def test_with_fsdp_weights_are_gathered_once_and_the_total_may_end_in_pieces(page):
    """Compiled for CPU: a device holds whole weights and whole gradients during the step."""
    stored_as = {"w_LDF": P(None, "data", "model"), "w_LFD": P(None, "model", "data")}

    def ends_in_pieces(pieces, x_BD):
        weights = page.marked(pieces, reduced={"data"})  # gathered here
        zeros = page.marked(jax.tree.map(jnp.zeros_like, weights), unreduced={"data"})
        total = page.accumulate(weights, zeros, x_BD)
        return {name: jax.reshard(total[name], stored_as[name]) / page.M for name in total}

    pieces = {name: jax.reshard(page.weights[name], stored_as[name]) for name in page.weights}
    program = jax.jit(ends_in_pieces).lower(pieces, page.big_x_BD).compile()
    direct = jax.jit(jax.grad(page.stack_loss))(page.weights, page.big_x_BD)
    for name, gradient in program(pieces, page.big_x_BD).items():
        np.testing.assert_allclose(gradient, direct[name], atol=1e-6)
        assert gradient.sharding.spec == stored_as[name]
    gathers = [move for move in ms.collectives(program, page.mesh) if move.kind == "all-gather"]
    assert sum(m.payload_bytes * m.executions for m in gathers) == own_part(page)
    assert ms.memory(program).temporaries > 2 * own_part(page)


@compiled_for_cpu
def test_a_reduced_scale_or_bias_works_if_you_broadcast_it(page):
    """Its gradient waits for the one sum as well: 96 numbers more for each."""

    def spread(v_D, x_BD):
        spec = jax.typeof(x_BD).sharding.spec
        return jax.lax.broadcast_in_dim(v_D, x_BD.shape, (1,), out_sharding=spec)

    def with_bias(weights, x_BD):
        matrices = {name: weights[name] for name in ("w_LDF", "w_LFD")}
        x_BD = x_BD * spread(weights["scale_D"], x_BD) + spread(weights["b_D"], x_BD)
        return page.stack_loss(matrices, x_BD)

    specs = {**page.specs, "scale_D": (None,), "b_D": (None,)}
    vectors = {
        "scale_D": put(np.ones(96, "f4"), page.mesh),
        "b_D": put(np.zeros(96, "f4"), page.mesh),
    }

    def marked(arrays, **mark):
        return {name: jax.reshard(a, P(*specs[name], **mark)) for name, a in arrays.items()}

    def once(weights, x_BD):
        weights = marked(weights, reduced={"data"})
        zeros = marked(jax.tree.map(jnp.zeros_like, weights), unreduced={"data"})

        def add(total, x_RD):
            return jax.tree.map(jnp.add, total, jax.grad(with_bias)(weights, x_RD)), None

        total, _ = jax.lax.scan(add, zeros, page.microbatches(x_BD))
        return {name: jax.reshard(total[name], P(*specs[name])) / page.M for name in total}

    both = {**page.weights, **vectors}
    program = jax.jit(once).lower(both, page.big_x_BD).compile()
    direct = jax.jit(jax.grad(with_bias))(both, page.big_x_BD)
    for name, gradient in program(both, page.big_x_BD).items():
        np.testing.assert_allclose(gradient, direct[name], atol=1e-6)
    found = ms.collectives(program, page.mesh).by("axes").bytes(("data",))
    assert found == own_part(page) + 2 * 4 * 96


def test_adding_a_reduced_bias_to_sharded_rows_raises(page):
    """Until it is broadcast with the sharding of the rows."""
    b_F = put(np.ones(32, "float32"), page.mesh, "model")
    reduced = jax.reshard(b_F, P("model", reduced={"data"}))
    assert "reduced on" in " ".join(attempt(jnp.add, page.h_BF, reduced).split())


# The page: the guard, new in JAX 0.12

guarded_since_0_12 = pytest.mark.skipif(
    RELEASE < (0, 12), reason="jax.sharding.no_collectives is new in JAX 0.12"
)
FORBIDDEN = "Collective across axis 'data' is forbidden by `no_collectives`"


def without_collectives(function, axes=("data",)):
    """The function, with collectives along these axes forbidden while it is traced."""

    def guarded(*inputs):
        with jax.sharding.no_collectives(set(axes)):
            return function(*inputs)

    return guarded


def test_the_guard_is_there_since_0_12():
    """jax.sharding.no_collectives is new in JAX 0.12."""
    assert hasattr(jax.sharding, "no_collectives") == (RELEASE >= (0, 12))


def test_without_the_guard_the_page_says_so(page, monkeypatch, capsys):
    """On an older release the cell prints one sentence, and the rest of the page runs."""
    monkeypatch.delattr(jax.sharding, "no_collectives", raising=False)
    run_again(page, PAGE, "forbidden")
    assert "has no jax.sharding.no_collectives: it came in 0.12" in capsys.readouterr().out


def test_the_unreduced_loss_is_the_loss_and_has_its_gradient(page):
    """Added up it is the mean, and weights that are marked or not have the mean's gradient."""
    found = page.unreduced_loss(page.weights, page.big_x_BD)
    assert str(jax.typeof(found)) == "float32[]{U:data}"
    wanted = jax.jit(page.stack_loss)(page.weights, page.big_x_BD)
    np.testing.assert_allclose(jax.reshard(found, P()), wanted, rtol=1e-5)
    direct = jax.jit(jax.grad(page.stack_loss))(page.weights, page.big_x_BD)
    for weights in (page.weights, page.marked_weights):
        gradients = jax.jit(jax.grad(page.unreduced_loss))(weights, page.big_x_BD)
        for name in direct:
            gradient = jax.reshard(gradients[name], P(*page.specs[name]))
            np.testing.assert_allclose(gradient, direct[name], atol=1e-6)


@guarded_since_0_12
def test_the_guard_refuses_the_loop_with_plain_weights(page):
    """Under jit and without it, JAX raises at the product that sums a gradient over data."""
    for function in (page.guarded, jax.jit(page.guarded)):
        with pytest.raises(Exception, match="contracts over axis 'data'") as raised:
            function(page.weights, page.zeros, page.big_x_BD)
        assert type(raised.value).__name__ == "ForbiddenCollectiveError"
        assert FORBIDDEN in str(raised.value)


@guarded_since_0_12
@compiled_for_cpu
def test_the_guarded_loop_with_marked_weights_passes_and_each_matrix_is_summed_once(page):
    """Compiled for CPU: nothing along data in the loop, and one all-reduce for each matrix after."""

    def step(weights, x_BD):
        zeros = page.marked(jax.tree.map(jnp.zeros_like, weights), unreduced={"data"})
        total = page.guarded(page.marked(weights, reduced={"data"}), zeros, x_BD)
        return {name: jax.reshard(total[name], P(*page.specs[name])) / page.M for name in total}

    assert page.after("forbidden").moves.by("axes").bytes(("data",)) == 0
    moves = traffic(step, page.weights, page.big_x_BD, mesh=page.mesh)
    sums = [move for move in moves if "data" in move.axes]
    assert [(move.kind, move.executions) for move in sums] == [("all-reduce", 1)] * 2
    assert sum(move.payload_bytes for move in sums) == own_part(page)
    direct = jax.jit(jax.grad(page.stack_loss))(page.weights, page.big_x_BD)
    for name, gradient in jax.jit(step)(page.weights, page.big_x_BD).items():
        np.testing.assert_allclose(gradient, direct[name], atol=1e-6)


@guarded_since_0_12
def test_the_guard_refuses_the_mean_of_a_loss(page):
    """It adds up rows of different devices; that it is one number makes no difference."""
    with pytest.raises(Exception, match="`reduce_sum` loses sharding axis 'data'"):
        without_collectives(jax.grad(page.stack_loss))(page.marked_weights, page.big_x_BD)


@guarded_since_0_12
def test_a_lost_mark_of_one_matrix_is_refused(page):
    """One plain matrix among marked ones is enough."""
    weights = {**page.marked_weights, "w_LFD": page.weights["w_LFD"]}
    zeros = {**page.marked_zeros, "w_LFD": page.zeros["w_LFD"]}
    with pytest.raises(Exception, match=FORBIDDEN):
        page.guarded(weights, zeros, page.big_x_BD)


@guarded_since_0_12
def test_with_auto_axes_the_guard_refuses_nothing():
    """A sum over sharded rows passes, and all-reduces."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        x_BD = put(numbers(8, 16), mesh, "data")
        function = without_collectives(lambda x_BD: x_BD.sum(0))
        assert traffic(function, x_BD, mesh=mesh).kinds == {"all-reduce"}


@guarded_since_0_12
@compiled_for_cpu
@pytest.mark.parametrize(
    "function", [lambda x: x[2:4], lambda x: jnp.concatenate([x, x])], ids=["slice", "concatenate"]
)
def test_what_keeps_its_axis_passes_and_sends_bytes(page, function):
    """A slice of two rows and a concatenation pass the guard, and have collectives."""
    assert traffic(without_collectives(function), page.x_BD, mesh=page.mesh)


@guarded_since_0_12
def test_around_the_pullback_alone_the_guard_refuses_nothing(page):
    """A backward pass is checked under the guard of its forward pass, and under no other."""
    x_BD, w_DF = page.x_BD, jax.reshard(page.w_DF, P(None, "model"))

    def of_rows(w_DF):
        return ((x_BD @ w_DF) ** 2).sum(1)  # of each row: nothing is summed along data

    losses_B, pull_back = jax.vjp(of_rows, w_DF)
    (gradient,) = without_collectives(pull_back)(losses_B)
    assert str(jax.typeof(gradient)) == "float32[16,32@model]"  # summed along data
    losses_B, pull_back = without_collectives(partial(jax.vjp, of_rows))(w_DF)
    with pytest.raises(Exception, match=FORBIDDEN):
        pull_back(losses_B)


@guarded_since_0_12
def test_the_guard_takes_a_set_and_a_misspelt_name_refuses_nothing(page):
    """A name alone is a TypeError, and no mesh is asked for the names in a set."""
    with pytest.raises(TypeError, match="as set or frozenset"):
        jax.sharding.no_collectives("data").__enter__()
    function = without_collectives(lambda x_BD: x_BD.sum(0), axes=("date",))
    assert type_of(function, page.x_BD) == "float32[16]"


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
