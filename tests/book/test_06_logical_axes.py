"""Chapter 6, "Name the axes of the model, not of the machine": what the page says is true."""

import itertools
import math

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices import logical
from many_devices.checks import misplaced
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "06-logical-axes"
P = jax.P


def mlp_under(page, rules, mesh):
    """The page's MLP, sharded by the table."""
    with jax.set_mesh(mesh):
        return page.MLP(64, 256, rules, nnx.Rngs(0))


# A name for each dimension, a table for the names


def test_a_table_places_the_weight_as_axes_of_the_mesh_would(page):
    """By columns and by rows, each device holds what out_sharding with mesh axes would give it."""
    for name, spec in [("by_columns", (None, "model")), ("by_rows", ("model", None))]:
        with jax.set_mesh(page.mesh):
            w_DF = page.make_weight(getattr(page, name))
            physical = nnx.Param(page.numbers, out_sharding=spec)
        assert w_DF.sharding == physical.sharding and w_DF.sharding.spec == P(*spec)
        held = {shard.device: shard.data for shard in w_DF.addressable_shards}
        parts = np.split(page.numbers, page.mesh.shape["model"], axis=spec.index("model"))
        for (_, i), device in np.ndenumerate(page.mesh.devices):
            np.testing.assert_array_equal(held[device], parts[i])


def test_a_misspelt_row_and_a_name_without_a_row_raise(page):
    """Rules(hiden=…) is a TypeError, and a name without a row an AttributeError."""
    rules = page.Rules(embed="data", hidden="model")
    assert attempt(lambda: page.Rules(hiden="model")).startswith("TypeError")
    for names in [("embed", "head"), ("model", "hidden")]:  # an axis is not a name
        assert attempt(rules, *names).startswith("AttributeError")


def test_a_table_returns_an_entry_for_each_name_in_order(page):
    """None stays whole, and a tuple stands for several mesh axes together."""
    rules = page.Rules(embed="data", hidden="model")
    assert rules("hidden", None, "embed") == P("model", None, "data")
    assert rules("embed", "hidden") == P("data", "model")
    assert page.Rules(hidden="model")("embed", "hidden") == P(None, "model")
    assert page.Rules(embed=("data", "model"))("embed", None) == P(("data", "model"), None)


def test_the_rules_that_other_pages_import_work_like_these(page):
    """many_devices.logical.Rules has these rows and more, returns the same specs, and checks them."""
    for axes in itertools.product((None, "data", ("data", "model")), repeat=2):
        ours = page.Rules(batch=axes[0], hidden=axes[1])
        theirs = logical.Rules(batch=axes[0], hidden=axes[1])
        assert vars(ours).items() < vars(theirs).items()
        for names in [("batch",), ("embed", "hidden"), ("hidden", None)]:
            assert ours(*names) == theirs(*names)
    rules, wide = logical.Rules(embed="data"), logical.Rules(embed=("data", "model"), heads="model")
    for message, table, names in [
        ("KeyError: \"no row for 'head'", rules, ("embed", "head")),
        ("KeyError: \"no row for 'data'", rules, ("data", "hidden")),
        ("ValueError: 'model' would be used twice", wide, ("embed", "heads")),
        ("ValueError: 'data' would be used twice", rules, ("embed", "embed")),
        ("ValueError: 'data' would", logical.Rules(embed=("data", "data")), ("embed",)),
    ]:
        assert attempt(table, *names).startswith(message)


# The model


def test_the_layer_is_sharded_by_its_names(page):
    """With embed along data and hidden along model, two rows shard all three weights of the MLP."""
    mlp = mlp_under(page, page.Rules(embed="data", hidden="model"), page.mesh)
    for weight, spec, held in [
        (mlp.w_DF, P("data", "model"), (32, 64)),
        (mlp.b_F, P("model"), (64,)),
        (mlp.w_FD, P("model", "data"), (64, 32)),
    ]:
        assert weight.out_sharding == weight.sharding.spec == spec
        assert weight.sharding.shard_shape(weight.shape) == held
    assert len(jax.tree.leaves(nnx.state(mlp, nnx.Param))) == 3


# Each strategy is a table


BY_HAND = {  # the spec of each weight; those left out are whole
    "one device": {},
    "data parallel": {},
    "FSDP": {"w_DF": P("data", None), "w_FD": P(None, "data")},
    "tensor parallel": {"w_DF": P(None, "model"), "b_F": P("model"), "w_FD": P("model", None)},
    "FSDP x tensor": {
        "w_DF": P("data", "model"),
        "b_F": P("model"),
        "w_FD": P("model", "data"),
    },
}
BATCH = {"data parallel": "data", "FSDP": "data", "FSDP x tensor": "data"}


def test_each_table_places_every_weight_as_written_by_hand(page):
    """The weights and the batch have the specs that the picture shows, as Flax's context too."""
    assert page.strategies.keys() == BY_HAND.keys()
    for name, (rules, mesh) in page.strategies.items():
        by_object = mlp_under(page, rules, mesh)
        with nnx.logical_axis_rules(tuple(vars(rules).items())):
            by_context = mlp_under(page, lambda *names: names, mesh)
        for weight in ("w_DF", "b_F", "w_FD"):
            ours, flax = getattr(by_object, weight), getattr(by_context, weight)
            wanted = jax.NamedSharding(mesh, BY_HAND[name].get(weight, P()))
            assert ours.sharding.is_equivalent_to(wanted, ours.ndim), (name, weight)
            assert flax.sharding.is_equivalent_to(wanted, ours.ndim), (name, weight)
        assert rules("batch", None) == P(BATCH.get(name), None)


def test_what_a_device_holds_under_each_table(page):
    """Of 132,096 bytes FSDP leaves 17,408 on a device, more than an eighth, because b_F is whole."""
    held = {
        name: ms.memory(mlp_under(page, *strategy)).bytes_per_device
        for name, strategy in page.strategies.items()
    }
    D, F = 64, 256
    assert held["one device"] == held["data parallel"] == 4 * (2 * D * F + F) == 132_096
    assert 132_096 // 8 == 16_512 == held["tensor parallel"]
    assert held["FSDP"] == 4 * (2 * D * F // 8 + F) == 17_408
    assert held["FSDP x tensor"] == 4 * (2 * D * F // 8 + F // 4)
    assert page.held == held["FSDP x tensor"]  # as the cell printed last
    assert all(math.prod(mesh.devices.shape) == 8 for _, mesh in list(page.strategies.values())[1:])


# The losses


def test_the_losses_agree_under_every_table_and_fall(page):
    """The third loss is the same, to 1e-5, under the five tables and an odd one, and below the first."""
    runs = dict(page.strategies)
    runs["odd"] = page.Rules(batch="data", embed="model", hidden="data"), page.mesh
    losses = {name: float(page.three_steps(*run)[1]) for name, run in runs.items()}
    mlp, falling = mlp_under(page, *page.strategies["one device"]), []
    for _ in range(3):
        with jax.set_mesh(page.strategies["one device"][1]):
            mlp, loss = page.step(mlp, page.images_BI[:32])
        falling.append(float(loss))
    assert len(losses) == 6 and (np.diff(falling) < 0).all()
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, falling[2], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(page.after("losses").loss, falling[2], rtol=1e-5)  # printed last


def test_a_step_leaves_the_weights_where_the_table_says(page):
    """After a step under each table, no weight has moved, and the model still has its table."""
    for rules, mesh in page.strategies.values():
        mlp = mlp_under(page, rules, mesh)
        with jax.set_mesh(mesh):
            stepped, _ = page.step(mlp, page.sharded_images(rules, mesh))
        assert stepped.rules == rules and not misplaced(stepped, mesh)


# Activations


def test_names_do_not_reach_activations(page):
    """JAX's constraint knows no names: inside Flax's context, a name is taken for a mesh axis."""

    def by_name(x_BD):
        return jax.lax.with_sharding_constraint(x_BD, P("batch", None))

    with jax.set_mesh(page.mesh), nnx.logical_axis_rules([("batch", "data")]):
        assert "Resource axis: batch" in attempt(by_name, page.numbers)
        variable = nnx.Param(page.numbers, out_sharding=("batch", None))
    assert variable.sharding.spec == P("data", None)


def gathered(page, module):
    """The shapes that a forward pass under FSDP gathers, and how its output is sharded."""
    rules, mesh = page.strategies["FSDP"]
    with jax.set_mesh(mesh):
        mlp = module(64, 256, rules, nnx.Rngs(0))
        moves = ms.collectives(page.forward.lower(mlp, page.x_BD).compile(), mesh)
        spec = page.forward(mlp, page.x_BD).sharding.spec
    assert moves.kinds == {"all-gather"}
    return {move.shape for move in moves}, spec


@compiled_for_cpu
def test_without_a_constraint_the_compiler_gathers_activations(page):
    """It gathers the hidden activations of all 32 images and not w_FD, and D is sharded."""
    shapes, spec = gathered(page, page.UnconstrainedMLP)
    assert shapes == {(64, 256), (32, 256)} and spec == P(None, "data")
    sharding = jax.NamedSharding(page.fsdp_mesh, spec)
    assert sharding.shard_shape((32, 64)) == (32, 8)


@compiled_for_cpu
def test_with_the_constraint_the_weights_move(page):
    """The page's MLP gathers both matrices and no activation, and the batch dimension is sharded."""
    shapes, spec = gathered(page, page.MLP)
    assert shapes == {(64, 256), (256, 64)} and spec == P("data")
    sharding = jax.NamedSharding(page.fsdp_mesh, spec)
    assert sharding.is_equivalent_to(jax.NamedSharding(page.fsdp_mesh, P("data", None)), 2)
    assert sharding.shard_shape((32, 64)) == (4, 64)


def test_the_constraint_changes_no_number(page):
    """Under FSDP, the MLP computes what the MLP without a constraint computes on one device."""
    with jax.set_mesh(page.fsdp_mesh):
        ours = page.forward(page.MLP(64, 256, page.fsdp_rules, nnx.Rngs(0)), page.x_BD)
    rules, mesh = page.strategies["one device"]
    with jax.set_mesh(mesh):
        reference = page.UnconstrainedMLP(64, 256, rules, nnx.Rngs(0))(page.images_BI[:32])
    np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_an_activation_with_batch_and_embed_collides_under_fsdp(page):
    """Both are mapped to data, so JAX raises an error, for an activation and for a weight."""
    spec = page.fsdp_rules("batch", "embed")
    with jax.set_mesh(page.fsdp_mesh):
        for refused in [
            attempt(jax.NamedSharding, page.fsdp_mesh, spec),
            attempt(jax.lax.with_sharding_constraint, page.x_BD, spec),
            attempt(lambda: nnx.Param(page.numbers, out_sharding=spec)),
        ]:
            assert refused.startswith("DuplicateSpecError")


def test_with_fsdp_only_the_weight_changes(page):
    """With embed="data" added to a table, the activations are sharded as before."""
    for embed in (None, "data"):
        rules = page.Rules(batch="data", hidden="model", embed=embed)
        assert rules("embed", "hidden") == P(embed, "model")
        assert rules("batch", None) == P("data", None)
        assert rules("batch", "hidden") == P("data", "model")


# Flax's own tables


def test_where_every_name_has_one_row_both_forms_place_alike(page):
    """Of all 64 tables for three names, object and Flax agree: 13 specs, and 51 errors."""
    names, axes = ("hidden", "embed", "batch"), (None, "data", "model", "fsdp")
    errors = 0
    for choice in itertools.product(axes, repeat=3):
        pairs = tuple(zip(names, choice))
        with jax.set_mesh(page.mesh):
            try:
                with nnx.logical_axis_rules(pairs):
                    flax = nnx.Param(np.ones((8, 8, 8)), out_sharding=names).sharding
            except Exception:
                flax = "an error"
            try:
                spec = page.Rules(**dict(pairs))(*names)
                ours = nnx.Param(np.ones((8, 8, 8)), out_sharding=spec).sharding
            except Exception:
                ours = "an error"
        assert ours == flax, (pairs, ours, flax)
        errors += ours == "an error"
    assert errors == 64 - 13  # 1 whole, 6 with one axis, 6 with both


# The old table


def test_a_jitted_function_remembers_the_table_it_read_first(page):
    """With another table outside, the compiled program of the first one runs."""
    assert page.init_weight._cache_size() == 1
    found = page.after("stale").w_DF
    assert page.current == page.by_rows  # the second table
    assert found.sharding.shard_shape((8, 16)) == (8, 4)  # of the first one
    with jax.set_mesh(page.mesh):
        assert page.make_weight(page.by_rows).sharding.shard_shape((8, 16)) == (2, 16)


def test_a_static_argument_is_looked_up(page):
    """With the table as a static argument there are two programs, and each table is obeyed."""
    init_by = jax.jit(page.make_weight, static_argnums=0)
    for rules, piece in [(page.by_columns, (8, 4)), (page.by_rows, (2, 16))]:
        with jax.set_mesh(page.mesh):
            assert init_by(rules).sharding.shard_shape((8, 16)) == piece
    assert init_by._cache_size() == 2
    assert "unhashable" in attempt(init_by, [("embed", "model")])


def test_a_table_object_from_outside_is_remembered_too(page):
    """A jitted constructor keeps the first table: the model says so, and misplaced does not notice."""
    outside = [page.Rules(embed="data"), page.Rules(hidden="model")]

    def make(rules):
        return page.MLP(64, 256, rules, nnx.Rngs(0))

    from_outside = jax.jit(lambda: make(outside[0]))
    by_argument = jax.jit(make, static_argnums=0)
    with jax.set_mesh(page.mesh):
        obeyed = [by_argument(table).rules for table in outside]
        first, new = from_outside(), outside.pop()
        outside[0] = new
        second = from_outside()
    assert obeyed == [first.rules, new] and second.rules == first.rules != new
    assert not misplaced(second, page.mesh)  # sharded by the first table: not noticed
    assert hash(page.Rules(embed="data")) == hash(page.Rules(embed="data")) != hash(page.Rules())


def test_the_training_step_looks_its_table_up(page):
    """The model is an argument, and its table is static in it: another table is another trace."""
    traces = []

    @jax.jit
    def traced(mlp):
        traces.append(mlp.rules)
        return mlp.b_F + 0

    tables = [page.Rules(), page.Rules(batch="data")]  # all weights are whole under both
    for rules in tables:
        mlp = mlp_under(page, rules, page.mesh)
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(mlp))
        traced(mlp)
        traced(mlp)
    assert traces == tables


def test_misplaced_finds_a_weight_that_was_assigned_elsewhere(page):
    """Of a model that a table object sharded, it names the weight that a load put elsewhere."""
    rules, mesh = page.strategies["FSDP"]
    mlp = mlp_under(page, rules, mesh)
    assert not misplaced(mlp, mesh)
    mlp.w_DF.set_value(jax.device_put(np.asarray(mlp.w_DF), jax.NamedSharding(mesh, P())))
    (found,) = misplaced(mlp, mesh)
    assert found.startswith("w_DF")


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
