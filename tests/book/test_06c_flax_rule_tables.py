"""The page "Flax's own tables: `logical_axis_rules` and `sharding_rules`"."""

import jax
import numpy as np
import optax
from flax import nnx

from many_devices.checks import assert_placed
from many_devices.helpers import attempt
from many_devices.logical import Rules

PAGE = "06c-flax-rule-tables"
P = jax.P
NAMES = ("embed", "hidden")


def test_flax_places_a_variable_by_its_own_table_or_by_the_context(page):
    """Both forms of Flax's table place the array as mesh axes do, and the variable keeps its names."""
    with jax.set_mesh(page.mesh):
        physical = nnx.Param(page.numbers, out_sharding=(None, "model"))
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.columns):
        inside = page.Layer().w_DF
    by_object = Rules(hidden="model")(*NAMES)
    for weight in (page.own, inside):
        assert weight.sharding == physical.sharding and weight.out_sharding == NAMES
        assert weight.sharding == jax.NamedSharding(page.mesh, by_object)  # as the object's
        np.testing.assert_array_equal(weight, page.numbers)


def named_layer():
    """A layer of Flax's own whose kernel has names."""
    metadata = {"out_sharding": NAMES}
    return nnx.Linear(8, 16, use_bias=False, kernel_metadata=metadata, rngs=nnx.Rngs(0))


def optimizer_of(model):
    return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def test_inside_the_context_every_reader_of_names_looks_them_up(page):
    """Constructors, get_abstract_model and get_partition_spec follow the table in the context."""
    for table, spec in [(page.columns, P(None, "model")), (page.rows, P("model", None))]:
        for make, name in [(page.Layer, "w_DF"), (named_layer, "kernel")]:
            with jax.set_mesh(page.mesh), nnx.logical_axis_rules(table):
                made, (_, shapes) = make(), nnx.get_abstract_model(make, page.mesh)
                read = nnx.get_partition_spec(nnx.state(made))[name].get_value()
            made_spec = getattr(made, name).sharding.spec
            assert [made_spec, shapes[name].sharding.spec, read] == [spec] * 3


def test_outside_the_context_readers_of_names_raise(page):
    """A constructor, get_abstract_model, get_named_sharding and Optimizer raise a ValueError."""
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.rows):
        layer = page.Layer()
    no_axis = "ValueError: Resource axis: embed of P('embed', 'hidden') is not found"
    with jax.set_mesh(page.mesh):
        for reader in (
            page.Layer,
            named_layer,
            lambda: nnx.get_abstract_model(page.Layer, page.mesh),
            lambda: nnx.get_named_sharding(nnx.state(layer), page.mesh),
            lambda: optimizer_of(layer),
        ):
            assert attempt(reader).startswith(no_axis)


def test_get_partition_spec_returns_names_without_a_table(page):
    """It looks at no mesh, so outside the context it returns a spec of names."""
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.rows):
        layer = page.Layer()
    with jax.set_mesh(page.mesh):
        of_names = nnx.get_partition_spec(nnx.state(layer))["w_DF"].get_value()
    assert of_names == P("embed", "hidden")


def test_a_variable_with_a_table_of_its_own_needs_no_context(page):
    """Its readers work outside a context, and a context with other rules raises an error."""

    class Own(nnx.Module):
        def __init__(self):
            self.w_DF = nnx.Param(page.numbers, out_sharding=NAMES, sharding_rules=page.columns)

    with jax.set_mesh(page.mesh):
        own = Own()
        state = nnx.state(own)
        specs = [
            nnx.get_abstract_model(Own, page.mesh)[1]["w_DF"].sharding.spec,
            nnx.get_named_sharding(state, page.mesh)["w_DF"].get_value().spec,
            nnx.get_partition_spec(state)["w_DF"].get_value(),
            optimizer_of(own).opt_state[0].mu["w_DF"].sharding.spec,
        ]
        assert specs == [P(None, "model")] * 4
        with nnx.logical_axis_rules(page.rows):
            assert "Inconsistent logical axis annotations for embed" in attempt(Own)


def specs_by(page, init):
    """What init makes under the two tables, one after the other."""
    found = []
    for table in (page.columns, page.rows):
        with jax.set_mesh(page.mesh), nnx.logical_axis_rules(table):
            found.append(init(table).w_DF.sharding.spec)
    return found


def test_a_jitted_constructor_remembers_the_old_table(page):
    """With another table in the context, the compiled program of the first one runs."""
    assert page.init_layer._cache_size() == 1
    assert specs_by(page, lambda table: page.init_layer()) == [P(None, "model")] * 2
    assert specs_by(page, lambda table: page.Layer()) == [P(None, "model"), P("model", None)]


def test_assert_placed_catches_the_old_table_of_names(page):
    """Of a model with names it compares with the table in the context, and names the weight."""
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.rows):
        raised = attempt(assert_placed, page.layer, page.mesh)
        assert raised.startswith("AssertionError: ('w_DF',) is sharded as P(None, 'model')")
    for table in (page.columns, page.rows):
        with jax.set_mesh(page.mesh), nnx.logical_axis_rules(table):
            assert_placed(page.Layer(), page.mesh)
            assert_placed(page.init_layer_by(table), page.mesh)


def test_assert_placed_names_a_weight_with_more_names_than_dimensions(page):
    """A vector with the names of a matrix is an AssertionError, which says so."""
    layer = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(np.ones(16), out_sharding=NAMES, eager_sharding=False)
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.rows):
        raised = attempt(assert_placed, layer, page.mesh)
        assert raised == "AssertionError: ('kernel',) has more axis names than dimensions"


def test_a_static_argument_is_looked_up(page):
    """With the table as a static argument there are two programs, and each table is obeyed."""
    assert page.init_layer_by._cache_size() == 2
    for table, piece in [(page.columns, (8, 4)), (page.rows, (2, 16))]:
        with jax.set_mesh(page.mesh):
            made = page.init_layer_by(table).w_DF
        assert made.sharding.shard_shape((8, 16)) == piece
    assert page.w_DF.sharding.shard_shape((8, 16)) == (2, 16)  # as the cell left it
