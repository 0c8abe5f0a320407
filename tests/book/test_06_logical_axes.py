"""Chapter 6, "Name the axes of the model, not of the machine": what the page says is true."""

import itertools
import math
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices import logical
from many_devices.checks import misplaced
from many_devices.helpers import attempt
from pages import check_exercise, exercises_of
from traced import equations

PAGE = "06-logical-axes"
P = jax.P
NAMES = ("embed", "hidden")
PAIRS = (("embed", None), ("hidden", "model"))  # by_columns, as a table of Flax


def init(page, rules, mesh):
    """A new model and its optimizer, sharded by the table."""
    with jax.set_mesh(mesh):
        return page.init(page.tiny, rules)


# A name for each dimension, a table for the names


def test_a_table_places_the_weight_as_axes_of_the_mesh_would(page):
    """By columns and by rows, each device holds what out_sharding with mesh axes would give it."""
    for name, spec in [("by_columns", (None, "model")), ("by_rows", ("model", None))]:
        w_DF = page.weights[name]
        with jax.set_mesh(page.mesh):
            physical = nnx.Param(page.numbers, out_sharding=spec)
        assert w_DF.sharding == physical.sharding and w_DF.sharding.spec == P(*spec)
        held = {shard.device: shard.data for shard in w_DF.addressable_shards}
        parts = np.split(page.numbers, page.mesh.shape["model"], axis=spec.index("model"))
        for (_, i), device in np.ndenumerate(page.mesh.devices):
            np.testing.assert_array_equal(held[device], parts[i])


def test_the_weight_stores_the_finished_spec(page):
    """A weight made with a table object stores mesh axes, not names."""
    with jax.set_mesh(page.mesh):
        assert page.make_weight(page.by_columns).out_sharding == P(None, "model")


def test_the_compiled_program_knows_only_the_mesh(page):
    """Names cost nothing: a program that makes the weight by names is the one that uses axes."""

    def by_axes():
        return nnx.Param(page.numbers, out_sharding=(None, "model"))

    ways = [
        lambda: page.make_weight(page.by_columns)[...],
        lambda: nnx.Param(page.numbers, out_sharding=NAMES)[...],
        lambda: by_axes()[...],
    ]
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(PAIRS):
        by_object, by_context, physical = (jax.jit(way).lower().as_text() for way in ways)
    assert by_object == by_context == physical and '"model"' in physical


def test_a_misspelt_row_a_missing_row_and_a_collision_raise(page):
    """Rules(hiden=…) is a TypeError, a name without a row a KeyError, a collision a ValueError."""
    Rules, rules = page.Rules, page.Rules(embed="data", hidden="model")
    assert attempt(lambda: Rules(hiden="data")).startswith("TypeError")
    wide = Rules(embed=("data", "model"), heads="model")
    for message, table, names in [
        ("KeyError: \"no row for 'head'", rules, ("embed", "head")),
        ("KeyError: \"no row for 'model'", rules, ("model", "hidden")),
        ("ValueError: 'model' would be used twice", Rules(embed="model", hidden="model"), NAMES),
        ("ValueError: 'model' would be used twice", wide, ("embed", "heads")),
        ("ValueError: 'data' would be used twice", Rules(embed=("data", "data")), ("embed",)),
    ]:
        assert attempt(table, *names).startswith(message)


def test_a_table_returns_an_entry_for_each_name_in_order(page):
    """None stays whole, and a tuple stands for several mesh axes together."""
    rules = page.Rules(embed="data", hidden="model")
    assert rules("hidden", None, "embed") == P("model", None, "data")
    assert rules("embed", "hidden") == P("data", "model")
    assert page.Rules(hidden="model")("embed", "hidden") == P(None, "model")
    assert page.Rules(embed=("data", "model"))("embed", None) == P(("data", "model"), None)


# Activations


def test_names_do_not_reach_activations(page):
    """JAX's constraint knows no names: inside Flax's context, a name is taken for a mesh axis."""

    def by_name(x_BD):
        return jax.lax.with_sharding_constraint(x_BD, P("batch", None))

    with jax.set_mesh(page.mesh), nnx.logical_axis_rules([("batch", "data")]):
        assert "Resource axis: batch" in attempt(by_name, page.numbers)
        variable = nnx.Param(page.numbers, out_sharding=("batch", None))
    assert variable.sharding.spec == P("data", None)


def test_constrain_shards_by_the_table_inside_jit_and_outside(page):
    """With FSDP's table, constrain shards the batch along data."""
    mesh, rules = page.mesh, page.fsdp_rules
    with jax.set_mesh(mesh):
        kept = page.constrain(page.numbers, rules, "batch", None)
        in_jit = jax.jit(lambda x: page.constrain(x, rules, "batch", None))(page.numbers)
    assert kept.sharding.shard_shape((8, 16)) == (8 // mesh.shape["data"], 16)
    assert kept.sharding.is_equivalent_to(in_jit.sharding, 2)


def test_an_activation_with_batch_and_embed_collides_under_fsdp(page):
    """In FSDP batch and embed are both sharded along data, so an activation's embed is None."""
    with jax.set_mesh(page.mesh):
        raised = attempt(page.constrain, page.numbers, page.fsdp_rules, "batch", "embed")
    assert raised.startswith("ValueError: 'data' would be used twice")


def test_constrain_wants_a_name_or_none_for_each_dimension(page):
    """Too few names for an activation raise an error."""
    with jax.set_mesh(page.mesh):
        raised = attempt(page.constrain, page.numbers, page.fsdp_rules, "batch")
    assert raised.startswith("ValueError: ('batch',) for the shape")


def test_with_fsdp_only_the_weight_changes(page):
    """With embed="data" added to a table, the activations are sharded as before."""
    for embed in (None, "data"):
        rules = page.Rules(batch="data", hidden="model", embed=embed)
        assert rules("embed", "hidden") == P(embed, "model")
        assert rules("batch", None) == P("data", None)
        assert rules("batch", "hidden") == P("data", "model")


# The model


def test_the_layer_is_sharded_by_its_names(page):
    """With embed along data and hidden along model, two rows shard all four weights of the MLP."""
    mlp = page.mlp
    for weight, spec, held in [
        (mlp.w_DF, P("data", "model"), (48, 96)),
        (mlp.b_F, P("model"), (96,)),
        (mlp.w_FD, P("model", "data"), (96, 48)),
        (mlp.b_D, P("data"), (48,)),
    ]:
        assert weight.out_sharding == spec
        assert jax.NamedSharding(page.mesh, spec).shard_shape(weight.shape) == held


def test_queries_are_named_embed_heads_and_head_size(page):
    """With embed along data and heads along model, w_q_DHC is sharded in both, head_size in none."""
    with jax.set_mesh(page.mesh):
        layer = logical.Attention(page.tiny, page.Rules(embed="data", heads="model"), nnx.Rngs(0))
    assert layer.w_q_DHC.sharding.spec == P("data", "model", None)
    assert layer.w_q_DHC.sharding.shard_shape(layer.w_q_DHC.shape) == (48, 2, 12)


def test_the_model_constrains_the_output_of_each_block(page):
    """By the table: what goes into the first block, what leaves each, the logits; `Model` has none."""
    rules, x_BSI = page.tables["FSDP x tensor"], page.x_BSI[:8]
    with jax.set_mesh(page.mesh):
        model = nnx.eval_shape(partial(logical.make_model, page.tiny, rules))
        jaxpr = jax.make_jaxpr(type(model).__call__)(model, x_BSI).jaxpr
        plain = jax.make_jaxpr(page.Model.__call__)(model, x_BSI).jaxpr
    found = [
        (tuple(eqn.params["sharding"].spec), eqn.outvars[0].aval.shape, times)
        for eqn, times in equations(jaxpr, "sharding_constraint")
    ]
    B, S, D, V, L = 8, page.tiny.S, page.tiny.D, page.tiny.V, page.tiny.L
    batch = ("data", None, None), (B, S, D)
    assert found == [(*batch, 1), (*batch, L), (("data", "model"), (B, V), 1)]
    assert not list(equations(plain, "sharding_constraint"))


def test_attention_computes_what_flax_computes(page):
    """With the same kernels, Attention gives the numbers of nnx.MultiHeadAttention."""
    tiny = page.tiny
    with jax.set_mesh(page.mesh):
        ours = logical.Attention(tiny, page.Rules(), nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(tiny.H, tiny.D, decode=False, rngs=nnx.Rngs(0))
    for part, name in [
        (theirs.query, "w_q_DHC"),
        (theirs.key, "w_k_DHC"),
        (theirs.value, "w_v_DHC"),
        (theirs.out, "w_o_HCD"),
    ]:
        part.kernel.set_value(np.asarray(getattr(ours, name)))  # biases are zero
    x_BSD = np.random.default_rng(0).normal(size=(2, tiny.S, tiny.D)).astype("float32")
    np.testing.assert_allclose(ours(x_BSD), theirs(x_BSD), atol=1e-5)


# Each strategy is a table


BY_HAND = {  # the spec of each weight, by the letters of its dimensions; those left out are whole
    "one device": {},
    "data parallel": {},
    "FSDP": {
        "ID": P(None, "data"),
        "SD": P(None, "data"),
        "D": P("data"),
        "DHC": P("data", None, None),
        "HCD": P(None, None, "data"),
        "DF": P("data", None),
        "FD": P(None, "data"),
        "DV": P("data", None),
    },
    "tensor parallel": {
        "F": P("model"),
        "DHC": P(None, "model", None),
        "HCD": P("model", None, None),
        "DF": P(None, "model"),
        "FD": P("model", None),
        "DV": P(None, "model"),
    },
    "FSDP x tensor": {
        "ID": P(None, "data"),
        "SD": P(None, "data"),
        "D": P("data"),
        "F": P("model"),
        "DHC": P("data", "model", None),
        "HCD": P("model", None, "data"),
        "DF": P("data", "model"),
        "FD": P("model", "data"),
        "DV": P("data", "model"),
    },
}


def abstract_weights(make, mesh):
    return nnx.to_flat_state(nnx.get_abstract_model(make, mesh)[1])


def test_each_table_places_every_weight_as_written_by_hand(page):
    """Under each table all 13 weights have the specs that the picture shows, as Flax's context too."""

    class Named(page.Model):  # keeps names, for Flax's context to look up
        def __init__(self):
            super().__init__(page.tiny, lambda *names: names, nnx.Rngs(0))

    assert page.tables.keys() == BY_HAND.keys() == page.meshes.keys()
    for name, rules in page.tables.items():
        mesh = page.meshes[name]
        by_object = abstract_weights(partial(logical.make_model, page.tiny, rules), mesh)
        with nnx.logical_axis_rules(tuple(vars(rules).items())):
            by_context = abstract_weights(Named, mesh)
        assert len(by_object) == len(by_context) == 13
        for (path, ours), (_, flax) in zip(by_object, by_context, strict=True):
            letters = path[-1].split("_")[-1]  # w_q_DHC: DHC
            spec = BY_HAND[name].get(letters, P())
            spec = P(None, *spec) if path[0] == "blocks" else spec  # the axis of layers
            wanted = jax.NamedSharding(mesh, spec)
            assert ours.sharding.is_equivalent_to(wanted, ours.ndim), (name, path)
            assert flax.sharding.is_equivalent_to(wanted, ours.ndim), (name, path)


def test_what_a_device_holds_under_each_table(page):
    """Of 903,936 bytes FSDP leaves 115,680 on a device, because b_F stays whole."""
    held, tiny = {}, page.tiny
    for name, rules in page.tables.items():
        make = partial(logical.make_model, tiny, rules)  # the weights of Model
        _, state = nnx.get_abstract_model(make, page.meshes[name])
        held[name] = ms.memory(state).bytes_per_device
    assert page.held == held["FSDP x tensor"]  # as the cell printed last
    assert held["one device"] == held["data parallel"] == 903_936 == 4 * 225_984
    assert 903_936 // 8 == 112_992
    assert held["FSDP"] == 115_680 == 4 * (28_152 + 768) and 28_152 * 8 + 768 == 225_984
    whole = 4 * tiny.D + 16 * tiny.D + tiny.L * 3 * tiny.D  # what tensor parallelism leaves whole
    assert held["tensor parallel"] == 121_728 == 4 * ((225_984 - whole) // 8 + whole)
    weights = abstract_weights(lambda: logical.make_model(tiny, page.Rules()), page.mesh)
    shapes = {path[-1]: weight.shape for path, weight in weights}
    assert sum(math.prod(shape) for shape in shapes.values()) == 225_984
    assert shapes["b_F"] == (2, 384) and shapes["w_q_DHC"] == (2, 96, 8, 12)


# The losses


def test_the_losses_agree_under_every_table_and_fall(page):
    """Three steps give the same losses, to 1e-5, under the five tables and an odd one."""
    runs = {name: (page.tables[name], page.meshes[name]) for name in page.tables}
    odd = page.Rules(batch="data", embed="model", hidden="data", head_size="data")
    runs["odd"] = odd, page.mesh
    losses = {name: page.three_steps(*run) for name, run in runs.items()}
    reference = np.array(losses["one device"])
    assert len(losses) == 6 and len(reference) == 3 and (np.diff(reference) < 0).all()
    for name, values in losses.items():
        np.testing.assert_allclose(values, reference, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(page.losses, reference, rtol=1e-5)  # as printed last
    model, _ = init(page, odd, page.mesh)
    assert model.blocks.mlp.w_DF.sharding.spec == P(None, "model", "data")


# Flax's own tables


def test_where_every_name_has_one_row_both_forms_place_alike(page):
    """Of all 64 tables for three names, object and Flax agree: 13 specs, and 51 errors."""
    names, axes = ("hidden", "embed", "batch"), (None, "data", "model", "fsdp")
    errors = 0
    for choice in itertools.product(axes, repeat=3):
        pairs = tuple(zip(names, choice))
        try:
            with jax.set_mesh(page.mesh), nnx.logical_axis_rules(pairs):
                flax = nnx.Param(np.ones((8, 8, 8)), out_sharding=names).sharding
        except Exception:
            flax = "an error"
        try:
            ours = jax.NamedSharding(page.mesh, page.Rules(**dict(pairs))(*names))
        except ValueError:
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
    assert page.init_by._cache_size() == 2
    for rules, piece in [(page.by_columns, (8, 4)), (page.by_rows, (2, 16))]:
        with jax.set_mesh(page.mesh):
            assert page.init_by(rules).sharding.shard_shape((8, 16)) == piece
    assert page.w_DF.sharding.shard_shape((8, 16)) == (2, 16)  # as the cell left it
    assert "unhashable" in attempt(page.init_by, [("embed", "model")])


@pytest.mark.slow
def test_a_table_object_from_outside_is_remembered_too(page):
    """A jitted constructor keeps the first object; as a static argument each is obeyed."""
    outside = [page.Rules(embed="data"), page.Rules(hidden="model")]
    from_outside = jax.jit(lambda: logical.make_model(page.tiny, outside[0]))
    by_argument = jax.jit(logical.make_model, static_argnums=(0, 1))
    with jax.set_mesh(page.mesh):
        obeyed = [by_argument(page.tiny, table).rules for table in outside]
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
    def traced(model):
        traces.append(model.rules)
        return model.w_ID + 0

    for name in ("one device", "data parallel"):  # all weights are whole under both
        model, _ = init(page, page.tables[name], page.mesh)
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(model))
        traced(model)
        traced(model)
    assert traces == [page.tables["one device"], page.tables["data parallel"]]


def test_misplaced_finds_a_weight_that_was_assigned_elsewhere(page):
    """Of a model that a table object sharded, it names the weight that a load put elsewhere."""
    model, _ = init(page, page.tables["FSDP"], page.meshes["FSDP"])
    assert not misplaced(model, page.meshes["FSDP"])
    whole = jax.device_put(np.asarray(model.w_ID), jax.NamedSharding(page.meshes["FSDP"], P()))
    model.w_ID.set_value(whole)
    (found,) = misplaced(model, page.meshes["FSDP"])
    assert found.startswith("w_ID")


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
