"""Chapter 10, "Autodiff and communication: every collective has a partner"."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshscope as ms
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again

PAGE = "10-autodiff"
P = jax.P
N = 8
OPERATIONS = ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"]
ROWS = P("data")


def assert_same(tree, expected, rtol=1e-3, atol=1e-5):
    """Equal up to float32 rounding: eight devices add in a different order from one."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def over_rows(page, function, out_specs=ROWS, check=True):
    """The function on the rows of each device."""
    return jax.shard_map(
        function, mesh=page.mesh, in_specs=P("data"), out_specs=out_specs, check_vma=check
    )


# Types


def test_a_weight_is_invariant_a_batch_and_the_product_vary_and_a_sum_is_invariant(page):
    """Of the weight, the batch, their product and its psum, the second and third are marked."""

    def marks(w, x_block):
        product = w * x_block
        total = jax.lax.psum(product, "data")
        found = ["{V:data}" in str(jax.typeof(v)) for v in (w, x_block, product, total)]
        assert found == [False, True, True, False]
        return total

    mapped = jax.shard_map(marks, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P())
    assert np.array_equal(mapped(page.w, page.x), [84.0]) and np.array_equal(page.total, [84.0])


def test_the_gradient_begins_with_a_cast_and_ends_in_its_partner_a_psum(page):
    """JAX casts the weight, and sums its gradients over devices: 28, not a device's own."""
    steps = page.operations(page.local_sum_gradient, page.w, page.x).split(" → ")
    assert steps[:3] == ["pvary", "mul", "reduce_sum"]  # forward
    assert steps[3:] == ["pvary", "broadcast_in_dim", "mul", "reduce_sum", "psum"]
    assert page.local_sum_gradient(page.w, page.x) == page.x.sum() == 28


def test_pcast_is_the_same_cast_by_hand(page):
    """jax.lax.pcast(w, "data", to="varying") is what JAX calls pvary."""

    def by_hand(w, x_block):
        return jax.lax.pcast(w, "data", to="varying") * x_block

    mapped = jax.shard_map(by_hand, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert page.operations(mapped, page.w, page.x) == "pvary → mul"


# Partners

PARTNERS = {
    "psum": "pvary",
    "all_gather": "reduce_scatter",
    "psum_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}
INNER = {"psum_scatter": "reduce_scatter"}


def forward(page, operation):
    out = P() if operation == "psum" else P("data")
    return jax.jit(over_rows(page, page.collectives[operation], out))


def test_each_collective_has_this_partner(page):
    """psum and the cast, gather and scatter; all_to_all and ppermute are their own."""
    for operation, partner in PARTNERS.items():
        found = page.there_and_back(page.collectives[operation])
        assert found == f"{INNER.get(operation, operation)} → {partner}"


def test_each_partner_is_the_transpose(page):
    """<move(x), y> = <x, back(y)>: the definition of a transpose."""
    for operation in OPERATIONS[1:]:
        move = page.collectives[operation]
        there = forward(page, operation)(page.table)
        y = jnp.arange(float(there.size)).reshape(there.shape) % 7

        def back(x_block, y_block, move=move):
            return jax.vjp(move, x_block)[1](y_block)[0]

        backward = jax.shard_map(back, mesh=page.mesh, in_specs=P("data"), out_specs=P("data"))
        both = jnp.vdot(there, y), jnp.vdot(page.table, backward(page.table, y))
        assert np.isclose(*both, rtol=1e-4), operation


def test_the_moves_do_what_the_page_says(page):
    """all_to_all leaves device i column i of all rows; ppermute sends a block to the next device."""
    columns = forward(page, "all_to_all")(page.table)
    assert np.array_equal(np.ravel(columns), np.ravel(page.table.T))
    moved = np.asarray(forward(page, "ppermute")(page.table)).reshape(N, 8, 8)
    assert np.array_equal(np.roll(np.asarray(page.table).reshape(N, 8, 8), 1, axis=0), moved)


def test_pmax_and_pmin_cannot_be_differentiated(page):
    """They have no partner."""
    for name in ("pmax", "pmin"):
        pick = getattr(jax.lax, name)

        def picked(x_block, pick=pick):
            return jnp.sum(pick(x_block, "data"))

        with pytest.raises(NotImplementedError, match=f"rule for '{name}' not implemented"):
            over_rows(page, jax.grad(picked))(page.table)


@compiled_for_cpu
def test_data_parallelism_sends_nothing_forward_and_the_gradients_backward(page):
    """The cast sends nothing; its partner is an all-reduce of the gradients."""

    def own_loss(params, batch_block):
        return page.loss_of(params, batch_block)[None]

    gradients = jax.grad(page.loss_of)
    for function, out_specs, kinds in [
        (own_loss, P("data"), set()),
        (gradients, P(), {"all-reduce"}),
    ]:
        mapped = jax.shard_map(
            function, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=out_specs
        )
        program = jax.jit(mapped).lower(page.params, page.batch).compile()
        assert ms.collectives(program, page.mesh).kinds == kinds


# Right, or eight times too large


def test_the_page_prints_once_and_eight_times(page):
    """The mean inside the loss is right, and outside it the gradient is eight times too large."""
    right, wrong = page.on_eight(jax.grad(page.mean_loss)), page.on_eight(page.mean_of_gradients)
    assert_same(right, page.true_gradient)
    assert set(page.factors(right).values()) == {"1x"}
    assert set(page.factors(wrong).values()) == {"8x"}
    assert attempt(assert_same, wrong, page.true_gradient).startswith("AssertionError")


def test_adam_hides_the_factor(page):
    """A step of SGD is eight times as long with eight times the gradient, one of Adam is not."""

    def first_step(optimizer, factor):
        gradient = jax.tree.map(lambda true: factor * true, page.true_gradient)
        updates, _ = optimizer.update(gradient, optimizer.init(page.params))
        return optax.tree.norm(updates)

    ratios = [first_step(o, 8) / first_step(o, 1) for o in (optax.sgd(0.1), optax.adam(1e-3))]
    assert np.isclose(ratios[0], 8) and np.isclose(ratios[1], 1, atol=1e-3)


# With the check off


def test_the_check_refuses_a_varying_result_for_p(page):
    """out_specs=P() raises an error for a varying value."""
    with pytest.raises(ValueError, match="out_specs"):
        over_rows(page, jnp.sin, P())(page.x)


def test_with_the_check_off_the_partner_of_psum_is_psum(page):
    """It undoes the division: eight eighths."""
    assert page.there_and_back(page.collectives["psum"], check=False) == "psum → psum"

    def of_an_eighth(x_block):
        _, backward = jax.vjp(page.collectives["psum"], x_block)
        return backward(jnp.full_like(x_block, 1 / 8))[0]

    assert (over_rows(page, of_an_eighth, check=False)(page.x) == 1).all()


def test_the_page_prints_the_partner_of_psum_with_the_check_on_and_off(page):
    """A cast with the check on, a second psum with it off."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_again(page, PAGE, "check-off")
    assert printed.getvalue().splitlines() == [
        "check_vma=True  psum → pvary",
        "check_vma=False psum → psum",
    ]


def test_with_the_check_off_there_is_no_cast(page):
    """A weight that meets a device's own rows stays as it is, and so its gradient is not summed."""
    unchecked = jax.shard_map(
        jax.grad(page.local_sum),
        mesh=page.mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    steps = page.operations(unchecked, page.w, page.x)
    assert "pvary" not in steps and "psum" not in steps


def test_a_cast_by_hand_leaves_each_device_the_gradient_of_its_own_rows(page):
    """Exercise 2: no psum of the gradient is left, and the eight gradients differ."""

    def stacked(params, batch_block):
        return jax.tree.map(lambda array: array[None], page.answer_own(params, batch_block))

    mapped = jax.shard_map(stacked, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert "psum" not in page.operations(mapped, page.params, page.batch)
    found = jax.jit(mapped)(page.params, page.batch)
    assert_same(jax.tree.map(lambda g: g.mean(0), found), page.true_gradient)
    assert len(np.unique(found["b_F"], axis=0)) == N


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
