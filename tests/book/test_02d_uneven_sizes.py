"""The page "Sizes that do not divide: pad, and mask the padding": what it says is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from many_devices.checks import misplaced
from many_devices.helpers import attempt, put
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "02d-uneven-sizes"
P = jax.P
COLUMNS = (None, "model")


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


def test_the_uneven_head_is_whole_on_every_device(page):
    """Made inside of jax.jit, the head of ten classes is whole, and misplaced says so."""
    assert misplaced(page.head, page.mesh) == [
        "bias: no annotation",
        "kernel: annotated (None, 'model'), on each device (64, 10)",
    ]


def test_outside_the_head_of_ten_raises_and_names_the_size(page):
    """Outside of jax.jit the error names the dimension size 10."""
    with jax.set_mesh(page.mesh):
        raised = attempt(page.make_head, 10).replace("\n", " ")
    assert raised.startswith("IndivisibleError") and "dimension size is 10" in raised


def test_padding_is_less_than_a_column_for_each_part(page):
    """padded gives the next size that the parts divide."""
    assert [page.padded(size, 4) for size in (8, 9, 10, 12)] == [8, 12, 12, 12]
    assert page.w_DV.shape == (64, 12) and page.V == 12
    piece = put(page.w_DV, page.mesh, *COLUMNS).addressable_shards[0].data
    assert piece.shape == (64, 3)


def reference_of(page):
    """Log-probabilities of the head of ten columns, on one device."""
    ten = np.asarray(nnx.initializers.lecun_normal()(jax.random.key(1), (64, 10)))
    return jax.nn.log_softmax(page.x_host @ ten)


def test_the_masked_head_has_the_log_probabilities_of_ten_columns(page):
    """With the mask, ten classes have their log-probabilities, and the padding none."""
    ours = np.asarray(jax.nn.log_softmax(page.masked_BV))
    np.testing.assert_allclose(ours[:, :10], reference_of(page), atol=1e-5)
    assert np.all(np.isneginf(ours[:, 10:]))


def test_without_the_mask_every_class_loses_probability(page):
    """A logit of zero takes probability from all ten classes, in every row; a quarter in row 0."""
    unmasked = np.asarray(jax.nn.log_softmax(page.logits_BV))[:, :10]
    assert np.all(unmasked < reference_of(page) - 0.01)
    assert np.all(page.logits_BV[:, 10:] == 0)
    assert 0.2 < 1 - np.exp(unmasked[0]).sum() < 0.3


def test_one_hot_labels_and_the_mask_give_nan(page):
    """0 times minus infinity is NaN; with -1e9 the loss is right."""
    one_hot = jax.nn.one_hot(3, page.V)
    assert np.isnan((one_hot * jax.nn.log_softmax(page.masked_BV)[0]).sum())
    finite = jnp.where(jnp.arange(page.V) < 10, page.logits_BV[0], -1e9)
    found = (one_hot * jax.nn.log_softmax(finite)).sum()
    np.testing.assert_allclose(found, reference_of(page)[0, 3], atol=1e-5)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
