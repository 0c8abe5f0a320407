"""The page "Annotate Flax's layers": sizes that do not divide, inside jax.jit."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pages import compiled_for_cpu

PAGE = "flax-layers"
P = jax.P


def head(classes, *, bias=False, names=(None, "model")):
    return nnx.Linear(
        64, classes, use_bias=bias, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": names}
    )


def made(page, function):
    """What the jitted function returns in the page's mesh of 2 × 4."""
    with jax.set_mesh(page.mesh):
        return jax.jit(function)()


def parts(array):
    """Into how many different pieces an array is divided."""
    return len({str(shard.index) for shard in array.addressable_shards})


UNEVEN = [10, 6, 9, 3, 50257]  # four devices along model divide none of them


@pytest.mark.parametrize("classes", UNEVEN)
def test_outside_of_jit_an_uneven_size_raises(page, classes):
    """Outside of jax.jit an uneven size raises an IndivisibleError."""
    with jax.set_mesh(page.mesh), pytest.raises(ValueError) as error:
        head(classes)
    assert type(error.value).__name__ == "IndivisibleError"


@compiled_for_cpu
@pytest.mark.parametrize("classes", UNEVEN)
def test_inside_of_jit_an_uneven_weight_beside_another_result_silently_ends_whole(page, classes):
    """Inside, a program that returns more than this weight ends with it whole, or in fewer parts."""
    layer = made(page, lambda: head(classes, bias=True))
    assert parts(layer.kernel) in (1, 2)
    both = made(page, lambda: (head(classes), head(classes)))
    assert {parts(layer.kernel) for layer in both} <= {1, 2}


@compiled_for_cpu
@pytest.mark.parametrize("classes", [10, 6, 2, 18, 30])
def test_alone_in_a_program_it_stops_with_a_bare_key_error(page, classes):
    """A program that returns this array alone stops with KeyError: np.int64(2) on JAX 0.11 and
    0.12, where the size and the axis have a common factor; JAX 0.10 returns fewer parts."""
    if jax.__version_info__ < (0, 11):
        assert parts(made(page, lambda: head(classes)).kernel) in (1, 2)
        return
    with pytest.raises(KeyError) as error:
        made(page, lambda: head(classes))
    assert str(error.value) == "np.int64(2)"


@compiled_for_cpu
@pytest.mark.parametrize("classes", [9, 3, 50257])
def test_alone_and_odd_it_silently_ends_whole(page, classes):
    """A size without a common factor with the axis ends whole, also alone in its program."""
    assert parts(made(page, lambda: head(classes)).kernel) == 1


@compiled_for_cpu
def test_a_plain_constraint_as_the_only_result_stops_in_the_same_way(page):
    """The KeyError is JAX's, not Flax's: a plain constraint of (64, 10) raises it as well."""

    def constrained():
        return jax.lax.with_sharding_constraint(jnp.zeros((64, 10)), P(None, "model"))

    if jax.__version_info__ < (0, 11):
        assert parts(made(page, constrained)) in (1, 2)
        return
    with pytest.raises(KeyError, match="2"):
        made(page, constrained)


@compiled_for_cpu
def test_with_both_dimensions_sharded_the_error_is_about_a_shape_that_is_nowhere(page):
    """Both dimensions sharded: an IndivisibleError about the shape [2, 2, 2], which no array has."""

    def blocks():
        return head(10, names=("data", "model"))

    if jax.__version_info__ < (0, 11):
        assert parts(made(page, blocks).kernel) < page.mesh.size
        return
    with pytest.raises(ValueError) as error:
        made(page, blocks)
    assert type(error.value).__name__ == "IndivisibleError"
    assert str(error.value).startswith("shape=[2, 2, 2] is incompatible with mesh_shape")


def test_out_shardings_raise_an_error_that_names_the_shape(page):
    """jax.jit with out_shardings raises an IndivisibleError that names shape and dimension."""
    by_columns = jax.NamedSharding(page.mesh, P(None, "model"))

    def zeros():
        return jnp.zeros((64, 10))

    with pytest.raises(ValueError, match=r"\(64, 10\)|dimension size is 10") as error:
        jax.jit(zeros, out_shardings=by_columns)()
    assert type(error.value).__name__ == "IndivisibleError"


def test_an_annotation_written_later_moves_nothing(page):
    """Flax places an array by its annotation only when it makes the variable."""
    with jax.set_mesh(page.mesh):
        w = nnx.Param(jnp.ones((8, 16)))
        w.set_metadata(out_sharding=(None, "model"))
    assert w.sharding.is_fully_replicated
