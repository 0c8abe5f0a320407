"""The page "A model that you did not write: annotate it by a rule on paths": what it says is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from compared import sharded_as
from many_devices.checks import misplaced
from many_devices.helpers import attempt, put
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "02c-annotate-by-path"
P = jax.P
COLUMNS = (None, "model")
x_BI = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")


def test_the_rule_places_every_leaf(page):
    """Every weight of the classifier is sharded by its rule, and the numbers are what they were."""
    plain, foreign = page.Classifier(10, nnx.Rngs(0)), page.Classifier(10, nnx.Rngs(0))
    n = page.mesh.shape["model"]
    assert len(misplaced(foreign, page.mesh)) == 8
    page.place_by_rule(foreign, page.rule, page.mesh)
    total = ms.memory(plain).bytes_per_device
    sharded = 4 * (96 * 384 + 384 + 384 * 96)
    assert ms.memory(foreign).bytes_per_device == total - sharded + sharded // n
    values = dict(nnx.to_flat_state(nnx.state(plain, nnx.Param)))
    for path, weight in nnx.to_flat_state(nnx.state(foreign, nnx.Param)):
        np.testing.assert_array_equal(weight, values[path])
        assert weight.out_sharding == page.rule(path)
    assert foreign.up.kernel.sharding.shard_shape((96, 384)) == (96, 384 // n)
    assert foreign.down.kernel.sharding.shard_shape((384, 96)) == (384 // n, 96)
    assert misplaced(foreign, page.mesh) == []
    np.testing.assert_allclose(foreign(x_BI), plain(x_BI), atol=1e-5)


def test_the_rule_applies_in_a_nested_model_and_raises_for_an_unknown_name(page):
    """It reads the last two names of a path, and raises a ValueError for a name it does not know."""
    assert page.rule(("blocks", 0, "up", "kernel")) == COLUMNS
    assert attempt(page.rule, ("up", "scale")).startswith("ValueError")

    def whole(path):
        return (None,)

    forgotten = page.Classifier(10, nnx.Rngs(0))
    page.place_by_rule(forgotten, whole, page.mesh)  # no error,
    assert misplaced(forgotten, page.mesh) == []  # and nothing to notice
    assert forgotten.up.kernel.sharding.is_fully_replicated


def test_load_keeps_every_sharding_and_compares_shapes(page):
    """load puts the numbers in, keeps the sharding of every weight, and raises for another shape."""
    trained = page.Classifier(10, nnx.Rngs(1))
    assert misplaced(page.foreign, page.mesh) == []
    np.testing.assert_allclose(page.foreign(x_BI), trained(x_BI), atol=1e-5)
    other = page.arrays | {("up", "kernel"): np.ones((3, 3), "float32")}
    assert attempt(page.load, page.foreign, other).startswith("ValueError")
    assert misplaced(page.foreign, page.mesh) == []


def test_load_keeps_the_dtype_of_every_weight(page):
    """From arrays in bfloat16, load makes float32 weights; set_value alone takes on their dtype."""
    half = {path: array.astype("bfloat16") for path, array in page.arrays.items()}
    model = page.Classifier(10, nnx.Rngs(0))
    page.place_by_rule(model, page.rule, page.mesh)
    page.load(model, half)
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert weight.dtype == "float32" and misplaced(model, page.mesh) == []
        np.testing.assert_array_equal(weight, half[path].astype("float32"))
    model.up.kernel.set_value(jnp.asarray(half["up", "kernel"]))
    assert model.up.kernel.dtype == "bfloat16"


def test_set_value_and_update_accept_any_shape():
    """set_value and nnx.update accept another shape, without a message."""
    linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    nnx.update(linear, {"kernel": jnp.ones((3, 3))})
    assert linear.kernel.shape == (3, 3)
    linear.kernel.set_value(jnp.ones((2, 2)))
    assert linear.kernel.shape == (2, 2)


def test_an_annotation_written_later_moves_nothing(page):
    """set_metadata moves nothing; set_value brings in the array that was moved."""
    late = nnx.Param(jnp.ones((8, 16)))
    late.set_metadata(out_sharding=COLUMNS)
    assert late.out_sharding == COLUMNS and len(late.devices()) == 1
    late.set_value(put(late[...], page.mesh, *COLUMNS))
    assert sharded_as(late, page.mesh, *COLUMNS)


# New values


class Holder(nnx.Module):
    def __init__(self, mesh):
        self.w = nnx.Param(np.zeros((64, 256), "float32"), out_sharding=(None, "model"), mesh=mesh)


@pytest.mark.parametrize(
    "replace",
    [
        pytest.param(lambda holder, new: holder.w.set_value(new), id="set_value"),
        pytest.param(lambda holder, new: nnx.update(holder, {"w": new}), id="update"),
    ],
)
def test_a_new_array_brings_its_own_sharding(page, replace):
    """set_value and nnx.update bring the sharding of the new array."""
    holder = Holder(page.mesh)
    replace(holder, page.loaded)
    told = ["w: annotated (None, 'model'), on each device (64, 256)"]
    assert misplaced(holder, page.mesh) == told
    replace(holder, put(page.loaded, page.mesh, None, "model"))
    assert misplaced(holder, page.mesh) == []
    np.testing.assert_array_equal(holder.w, page.loaded)


def test_replaced_the_weight_is_whole_on_every_device(page):
    """After set_value a device holds all 65,536 bytes, four times as many; the annotation is kept."""
    assert page.swapped == page.zeros_DF.nbytes == 65_536
    assert {shard.data.shape for shard in page.loaded.addressable_shards} == {(64, 256)}
    assert page.weight.out_sharding == (None, "model")  # the annotation is kept


def test_a_weight_that_is_whole_is_sharded_again_by_its_annotation(page):
    """Brought into the annotated sharding before set_value, the weight is in quarters."""
    holder = Holder(page.mesh)
    holder.w.set_value(page.loaded)
    wanted = jax.NamedSharding(page.mesh, P(*holder.w.out_sharding))
    holder.w.set_value(jax.device_put(page.loaded, wanted))
    assert misplaced(holder, page.mesh) == []
    assert ms.memory(holder.w).bytes_per_device == 65_536 // 4
    np.testing.assert_array_equal(holder.w, page.loaded)


def test_the_everyday_line_keeps_the_sharding(page):
    """device_put with w.sharding, then set_value, leaves the weight as it was sharded."""
    holder = Holder(page.mesh)
    holder.w.set_value(jax.device_put(page.loaded, holder.w.sharding))
    assert misplaced(holder, page.mesh) == []


@compiled_for_cpu
def test_an_assignment_keeps_pieces_only_by_the_compilers_choice(page):
    """Assigned, a whole value leaves the pieces; one in columns along data makes the weight whole."""
    numbers = np.arange(128, dtype="float32").reshape(8, 16)
    ends = {}
    for spec in [P(), P(None, "data"), P("data", None), P("model", None)]:
        w = nnx.Param(numbers, out_sharding=(None, "model"), mesh=page.mesh)
        w[...] = put(2 * numbers, page.mesh, *spec)
        ends[spec] = w.sharding.shard_shape(w.shape)
        np.testing.assert_array_equal(w, 2 * numbers)
    assert ends[P()] == ends[P("model", None)] == (8, 4)  # kept
    assert ends[P(None, "data")] == (8, 16)  # neither sharding is kept
    assert ends[P("data", None)] == (4, 4)  # sharded along both


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
