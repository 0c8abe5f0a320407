"""The page "Forbid early sums of gradients: `no_collectives`"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from many_devices.helpers import put, traffic, type_of
from pages import compiled_for_cpu, run_again
from random_arrays import numbers

PAGE = "07e-forbid-early-sums"
P = jax.P
pytestmark = pytest.mark.usefixtures("explicit_row")
RELEASE = jax.__version_info__


def whole_gradient(page):
    """Of the mean over all rows, as every microbatch has as many rows."""

    def mean(w_LDD):
        return jnp.stack([page.mean_loss(w_LDD, x_BD) for x_BD in page.x_MBD]).mean()

    return jax.jit(jax.grad(mean))(page.w_LDD)


@compiled_for_cpu
def test_without_the_mark_the_gradient_is_summed_in_every_microbatch(page):
    """Compiled for CPU: nothing along data with the marks, and M gradients without them."""
    assert page.summed(page.accumulate, page.marked_w_LDD, page.marked_zeros_LDD) == 0
    found = page.summed(page.accumulate, page.w_LDD, page.zeros_LDD)
    assert found == page.M * page.w_LDD.nbytes == 1_179_648
    moves = traffic(page.accumulate, page.w_LDD, page.zeros_LDD, page.x_MBD, mesh=page.mesh)
    assert {m.inside_loop for m in moves if "data" in m.axes} == {True}


def test_without_the_mark_the_gradient_is_right(page):
    """Nothing tells: plain and marked, the loop adds up the same gradient."""
    wanted = whole_gradient(page)
    for w_LDD, zeros_LDD in [
        (page.w_LDD, page.zeros_LDD),
        (page.marked_w_LDD, page.marked_zeros_LDD),
    ]:
        total_LDD = jax.jit(page.accumulate)(w_LDD, zeros_LDD, page.x_MBD)
        total_LDD = jax.reshard(total_LDD, P())
        np.testing.assert_allclose(total_LDD / page.M, wanted, atol=1e-6)


def test_a_mark_that_is_lost_on_one_side_raises(page):
    """An unreduced gradient or total and one without a mark cannot be added."""
    for w_LDD, zeros_LDD in [
        (page.w_LDD, page.marked_zeros_LDD),
        (page.marked_w_LDD, page.zeros_LDD),
    ]:
        with pytest.raises(Exception, match="nreduced"):
            page.accumulate(w_LDD, zeros_LDD, page.x_MBD)


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
    """On an older release one cell prints one sentence, and the other prints nothing."""
    monkeypatch.delattr(jax.sharding, "no_collectives", raising=False)
    run_again(page, PAGE, "forbidden")
    assert "has no jax.sharding.no_collectives: it came in 0.12" in capsys.readouterr().out
    run_again(page, PAGE, "once")
    assert not capsys.readouterr().out


def test_the_unreduced_loss_is_the_loss_and_has_its_gradient(page):
    """Added up it is the mean, and weights that are marked or not have the mean's gradient."""
    x_BD = page.x_MBD[0]
    found = page.unreduced_loss(page.w_LDD, x_BD)
    assert str(jax.typeof(found)) == "float32[]{U:data}"
    wanted = jax.jit(page.mean_loss)(page.w_LDD, x_BD)
    np.testing.assert_allclose(jax.reshard(found, P()), wanted, rtol=1e-5)
    direct = jax.jit(jax.grad(page.mean_loss))(page.w_LDD, x_BD)
    for w_LDD in (page.w_LDD, page.marked_w_LDD):
        gradient_LDD = jax.jit(jax.grad(page.unreduced_loss))(w_LDD, x_BD)
        gradient_LDD = jax.reshard(gradient_LDD, P())
        np.testing.assert_allclose(gradient_LDD, direct, atol=1e-6)


@guarded_since_0_12
def test_the_guard_refuses_the_loop_with_plain_weights(page):
    """Under jit and without it, JAX raises at the product that sums a gradient over data."""
    for function in (page.guarded, jax.jit(page.guarded)):
        with pytest.raises(Exception, match="contracts over axis 'data'") as raised:
            function(page.w_LDD, page.zeros_LDD, page.x_MBD)
        assert type(raised.value).__name__ == "ForbiddenCollectiveError"
        assert FORBIDDEN in str(raised.value)


@guarded_since_0_12
@compiled_for_cpu
def test_the_guarded_loop_with_marked_weights_passes_and_one_sum_follows(page):
    """Compiled for CPU: nothing along data in the loop, and one all-reduce after it."""

    def step(w_LDD, x_MBD):
        marked = jax.reshard(w_LDD, P(reduced={"data"}))
        spec = P(unreduced={"data"})
        total_LDD = page.guarded(marked, jax.reshard(jnp.zeros_like(w_LDD), spec), x_MBD)
        return jax.reshard(total_LDD, P()) / page.M

    assert page.summed(page.guarded, page.marked_w_LDD, page.marked_zeros_LDD) == 0
    moves = traffic(step, page.w_LDD, page.x_MBD, mesh=page.mesh)
    sums = [move for move in moves if "data" in move.axes]
    assert [(move.kind, move.executions) for move in sums] == [("all-reduce", 1)]
    assert sums[0].payload_bytes == page.w_LDD.nbytes
    assert str(jax.typeof(page.total_LDD)) == "float32[2,192,192]{U:data}"
    assert str(jax.typeof(page.gradient_LDD)) == "float32[2,192,192]"
    for gradient_LDD in (page.gradient_LDD, jax.jit(step)(page.w_LDD, page.x_MBD)):
        np.testing.assert_allclose(gradient_LDD, whole_gradient(page), atol=1e-6)


@guarded_since_0_12
def test_the_guard_refuses_the_mean_of_a_loss(page):
    """It adds up rows of different devices; that it is one number makes no difference."""
    with pytest.raises(Exception, match="`reduce_sum` loses sharding axis 'data'"):
        without_collectives(jax.grad(page.mean_loss))(page.marked_w_LDD, page.x_MBD[0])


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
    "function", [lambda x: x[:8], lambda x: jnp.concatenate([x, x])], ids=["slice", "concatenate"]
)
def test_what_keeps_its_axis_passes_and_sends_bytes(page, function):
    """A slice of eight rows and a concatenation pass the guard, and have collectives."""
    assert traffic(without_collectives(function), page.x_MBD[0], mesh=page.mesh)


@guarded_since_0_12
def test_around_the_pullback_alone_the_guard_refuses_nothing(page):
    """A backward pass is checked under the guard of its forward pass, and under no other."""
    x_BD, w_DD = page.x_MBD[0], page.w_LDD[0]

    def of_rows(w_DD):
        return ((x_BD @ w_DD) ** 2).sum(1)  # of each row: nothing is summed along data

    losses_B, pull_back = jax.vjp(of_rows, w_DD)
    (gradient,) = without_collectives(pull_back)(losses_B)
    assert str(jax.typeof(gradient)) == "float32[192,192]"  # summed along data
    losses_B, pull_back = without_collectives(partial(jax.vjp, of_rows))(w_DD)
    with pytest.raises(Exception, match=FORBIDDEN):
        pull_back(losses_B)


@guarded_since_0_12
def test_the_guard_takes_a_set_and_a_misspelt_name_refuses_nothing(page):
    """A name alone is a TypeError, and no mesh is asked for the names in a set."""
    with pytest.raises(TypeError, match="as set or frozenset"):
        jax.sharding.no_collectives("data").__enter__()
    function = without_collectives(lambda x_BD: x_BD.sum(0), axes=("date",))
    assert type_of(function, page.x_MBD[0]) == "float32[192]"
