"""The page "Names for a model that has none: somebody else's, or your own"."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import assert_placed
from many_devices.compiled import stored_program
from many_devices.helpers import attempt
from many_devices.logical import Rules, make_model, tiny
from many_devices.logical import weight as new_weight
from pages import compiled_for_cpu

PAGE = "06b-annotate-third-party"
P = jax.P
BY_HYBRID = {  # the spec of each weight, by its layer and its name
    ("tokens", "embedding"): P("model", "data"),
    ("norm", "scale"): P("data"),
    ("norm", "bias"): P("data"),
    ("into", "kernel"): P("data", "model", None),  # of queries, keys and values
    ("into", "bias"): P("model", None),
    ("out", "kernel"): P("model", None, "data"),
    ("out", "bias"): P("data"),
    ("up", "kernel"): P("data", "model"),
    ("up", "bias"): P("model"),
    ("down", "kernel"): P("model", "data"),
    ("down", "bias"): P("data"),
}


# Annotate a third-party model


def weights_of(model):
    return nnx.to_flat_state(nnx.state(model, nnx.Param))


def test_every_weight_is_sharded_by_the_table(page):
    """After the five steps all 15 weights have the specs that the table gives their names."""
    flat = weights_of(page.encoder)
    assert len(flat) == 15
    for (*_, layer, part), weight in flat:
        layer = "into" if layer in ("query", "key", "value") else layer
        wanted = jax.NamedSharding(page.mesh, BY_HYBRID[layer, part])
        assert weight.sharding.is_equivalent_to(wanted, weight.ndim), (layer, part)


def test_attention_is_sharded_as_that_of_chapter_6(page):
    """Named by path, the kernel of a query has the spec that chapter 6's model gives it."""
    _, ours = nnx.get_abstract_model(lambda: make_model(tiny, page.hybrid), page.mesh)
    spec = page.encoder.attend.query.kernel.sharding.spec
    assert ours["blocks"]["attention"]["w_q_DHC"].sharding.spec == P(None, *spec)
    assert spec == page.hybrid("embed", "heads", "head_size") == P("data", "model", None)


def test_it_is_still_the_same_model(page):
    """On eight devices the outputs and the loss are those of one device, to 1e-4."""
    np.testing.assert_allclose(page.after_BSD, page.before_BSD, atol=1e-4)
    np.testing.assert_allclose(page.loss, (page.before_BSD**2).mean(), atol=1e-4)


def test_an_annotation_moves_nothing(page):
    """After annotate all weights are whole on one device, and assert_placed says so."""
    encoder, mesh = page.Encoder(nnx.Rngs(0)), page.mesh_of(8, 1)
    page.annotate(encoder, page.names_of, page.Rules(batch="data", embed="data"))
    state = nnx.state(encoder, nnx.Param)
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(state))
    raised = attempt(assert_placed, encoder, mesh)
    assert raised.startswith("AssertionError") and "whole on one device" in raised
    wanted = nnx.get_named_sharding(state, mesh)  # needs no context
    assert wanted["up"]["kernel"].get_value().spec == P("data", None)


def test_a_path_without_names_a_collision_and_too_few_names_raise(page):
    """annotate raises an error for each of them."""
    layer = nnx.Conv(3, 4, (2, 2), rngs=nnx.Rngs(0))
    encoder = page.Encoder(nnx.Rngs(0))
    collision = page.Rules(embed="model", hidden="model")
    assert "no names for" in attempt(page.names_of, ("convolution", "kernel"))
    assert "no names for" in attempt(page.annotate, layer, page.names_of, page.hybrid)
    assert "used twice" in attempt(page.annotate, encoder, page.names_of, collision)
    one_name = attempt(page.annotate, encoder, lambda path: ("embed",), page.hybrid)
    assert "for the shape" in one_name.replace("\n", " ")


def test_moments_are_where_the_weights_are(page):
    """An optimizer that is made after step 3 has moments with the weights' specs."""
    momentum = optax.sgd(0.01, momentum=0.9)
    with jax.set_mesh(page.mesh):
        moments = nnx.Optimizer(page.encoder, momentum, wrt=nnx.Param).opt_state[0].trace
    for (path, weight), moment in zip(
        weights_of(page.encoder), jax.tree.leaves(moments), strict=True
    ):
        assert weight.shape == moment.shape
        assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim), path
    assert moments["up"]["kernel"].sharding.spec == P("data", "model")


# Their activations


@compiled_for_cpu
@pytest.mark.parametrize(
    "pinned, largest, gathered", [(False, (64, 16, 384), 0), (True, (512, 96), 6)]
)
def test_compiled_for_cpu_fsdp_without_a_pin_moves_activations(page, pinned, largest, gathered):
    """Without the constraint FSDP's table moves activations and gathers no kernel; with it the step
    gathers all six, and moves no array larger than the embedding's gradient."""
    fsdp, mesh = page.Rules(batch="data", embed="data"), page.mesh_of(8, 1)
    encoder = page.Encoder(nnx.Rngs(0))
    page.annotate(encoder, page.names_of, fsdp)
    weights = nnx.state(encoder, nnx.Param)
    nnx.update(encoder, jax.device_put(weights, nnx.get_named_sharding(weights, mesh)))
    tokens_BS = np.arange(64 * 16).reshape(64, 16) % 512
    tokens_BS = jax.device_put(tokens_BS, jax.NamedSharding(mesh, fsdp("batch")))

    def loss(model, tokens_BS):
        y_BSD = model(tokens_BS)
        if pinned:
            y_BSD = page.constrain(y_BSD, fsdp, "batch", None, None)
        return (y_BSD**2).mean()

    with jax.set_mesh(mesh):
        program = jax.jit(nnx.grad(loss)).lower(encoder, tokens_BS).compile()
    moves = ms.collectives(program, mesh)
    kernels = [(96, 384), (384, 96), (96, 8, 12), (8, 12, 96)]
    gathers = [move for move in moves if move.kind == "all-gather" and move.shape in kernels]
    assert max(moves, key=lambda move: move.payload_bytes).shape == largest
    assert len(gathers) == gathered


@pytest.mark.parametrize("compiler", ["cpu", "tpu", "gpu"])
def test_each_compiler_turns_fsdp_without_a_pin_into_tensor_parallelism(compiler):
    """Compiled for CPU, TPU v5e and H100 the step without the constraint gathers no weight, and sends
    more than five times as much as with it."""

    def moves(name):
        return stored_program(name)[compiler]["moves"]

    def sent(name):
        return sum(row["wire"] for row in moves(name))

    gathered = [row["payload"] for row in moves("names-theirs") if row["kind"] == "all-gather"]
    smallest_kernel = 96 * 96 * 2  # bytes, in bfloat16
    assert sum(gathered) < smallest_kernel
    assert sent("names-theirs") > 5 * sent("names-theirs-pinned")


class WithWords(nnx.Module):
    """An encoder, or a few of them, and logits for 512 words."""

    def __init__(self, encoders, with_head):
        rngs = nnx.Rngs(0)
        self.encoders = encoders
        self.head = nnx.Linear(96, 512, rngs=rngs) if with_head else None

    def __call__(self, tokens_BS, pin_inside):
        x_BSD = self.encoders[0](tokens_BS)
        for layer in self.encoders[1:]:
            x_BSD = pin_inside(x_BSD)
            x_BSD = x_BSD + layer.attend(layer.norm(x_BSD))
            x_BSD = x_BSD + layer.down(nnx.gelu(layer.up(x_BSD)))
        return self.head(pin_inside(x_BSD)) if self.head else x_BSD


def megabytes_sent(page, layers, with_head, pin_inside, pin_result):
    """What a device sends for one gradient by FSDP's table, with or without constraints."""
    fsdp, mesh = page.Rules(batch="data", embed="data"), page.mesh_of(8, 1)

    def names_of(path):
        if "head" in path:
            return ("embed", "vocab")[1 if path[-1] == "bias" else 0 :]
        return page.names_of(path)

    def pin(x, really):
        return page.constrain(x, fsdp, "batch", None, None) if really else x

    def make():
        encoders = nnx.List([page.Encoder(nnx.Rngs(layer)) for layer in range(layers)])
        return WithWords(encoders, with_head)

    model = nnx.eval_shape(make)
    page.annotate(model, names_of, fsdp)
    graphdef, weights, rest = nnx.split(model, nnx.Param, ...)
    places = nnx.get_named_sharding(weights, mesh)
    weights = jax.tree.map(lambda x, place: x.update(sharding=place), weights, places)

    def loss(weights, tokens_BS):
        model = nnx.merge(graphdef, weights, rest)
        return (pin(model(tokens_BS, lambda x: pin(x, pin_inside)), pin_result) ** 2).mean()

    by_rows = jax.NamedSharding(mesh, P("data"))
    tokens_BS = jax.ShapeDtypeStruct((64, 16), "int32", sharding=by_rows)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss), out_shardings=places)
        moves = ms.collectives(gradient.lower(weights, tokens_BS).compile(), mesh)
    return sum(move.wire_bytes * move.executions for move in moves) / 1e6


LAYERS = 3


@compiled_for_cpu
def test_compiled_for_cpu_one_constraint_on_what_the_last_layer_returns_is_enough(page):
    """A constraint on what the last layer returns keeps FSDP from turning into tensor parallelism:
    one after each layer changes nothing."""
    one = megabytes_sent(page, LAYERS, False, pin_inside=False, pin_result=True)
    each = megabytes_sent(page, LAYERS, False, pin_inside=True, pin_result=True)
    none = megabytes_sent(page, LAYERS, False, pin_inside=False, pin_result=False)
    assert one == pytest.approx(each, rel=0.01) and none > 5 * one


@compiled_for_cpu
def test_compiled_for_cpu_one_constraint_on_the_logits_is_not_enough(page):
    """With an output layer for 512 words, a device sends 35 MB with one constraint on the logits, and
    4 MB with one after each layer, too."""
    one = megabytes_sent(page, LAYERS, True, pin_inside=False, pin_result=True)
    each = megabytes_sent(page, LAYERS, True, pin_inside=True, pin_result=True)
    assert (f"{one:.0f}", f"{each:.0f}") == ("35", "4")


# From mesh axes to names


def test_the_recipe_finds_the_one_weight_that_would_move(page):
    """Of chapter 4's MLP under names, b_D alone is sharded otherwise than before."""
    assert set(page.before) == set(dict(page.state))
    moved = [
        name
        for name, spec in page.before.items()
        if not page.state[name].sharding.is_equivalent_to(
            jax.NamedSharding(page.mesh, spec), page.state[name].ndim
        )
    ]
    assert moved == ["b_D"] and page.state["b_D"].sharding.spec == P("data")


def test_chapter_4_wrote_these_specs(page):
    """The specs that the recipe compares with are those of chapter 4's block, for FSDP x tensor."""
    from many_devices import model as chapter_4

    strategy = chapter_4.strategies["FSDP x tensor"]

    def make():
        return chapter_4.Block(chapter_4.tiny, strategy, nnx.Rngs(0))

    _, state = nnx.get_abstract_model(make, page.mesh)
    for name, spec in page.before.items():
        written = jax.NamedSharding(page.mesh, spec)
        assert state[name].sharding.is_equivalent_to(written, state[name].ndim)


# Flax's own tables


NAMES = ("embed", "hidden")


def test_an_axis_that_no_mesh_has_raises_when_the_spec_meets_a_mesh(page):
    """A mesh axis that does not exist raises an error later than the table's call."""
    spec = Rules(embed="fsdp")("embed", "hidden")
    with pytest.raises(ValueError, match="fsdp"):
        jax.NamedSharding(page.mesh, spec)


def test_a_size_that_devices_do_not_divide_raises_when_the_weight_is_made(page):
    """Six columns over four devices raise an IndivisibleError; get_abstract_model does not notice."""
    by_columns = Rules(hidden="model")
    pairs = tuple(vars(by_columns).items())

    def six_columns(names):
        with jax.set_mesh(page.mesh), nnx.logical_axis_rules(pairs):
            return nnx.Param(np.ones((8, 6)), out_sharding=names)

    for names in (NAMES, by_columns(*NAMES)):  # both forms
        odd = attempt(six_columns, names).replace("\n", " ")
        assert odd.startswith("IndivisibleError") and "but the dimension size is 6" in odd

    def six_linear():
        metadata = {"out_sharding": by_columns(*NAMES)}
        return nnx.Linear(8, 6, use_bias=False, kernel_metadata=metadata, rngs=nnx.Rngs(0))

    _, six = nnx.get_abstract_model(six_linear, page.mesh)
    assert six["kernel"].shape == (8, 6) and six["kernel"].sharding.spec == P(None, "model")


def test_too_few_names_are_noticed_by_weight_and_constrain(page):
    """Both raise an error if a table object gets fewer names than the array has dimensions."""
    spec = page.hybrid("embed")
    assert "for the shape" in attempt(new_weight, nnx.Rngs(0), (8, 8), spec)
    with jax.set_mesh(page.mesh):
        raised = attempt(page.constrain, np.ones((8, 8)), page.hybrid, "embed")
    assert "for the shape" in raised


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


def test_the_context_belongs_to_one_thread(page):
    """A table set in one thread is not seen in another."""

    def in_a_thread():
        with jax.set_mesh(page.mesh):
            return attempt(page.Layer)

    with (
        jax.set_mesh(page.mesh),
        nnx.logical_axis_rules(page.rows),
        ThreadPoolExecutor(1) as pool,
    ):
        assert page.Layer().w_DF.sharding.spec == P("model", None)
        assert "Resource axis: embed" in pool.submit(in_a_thread).result()


def test_three_wrong_tables_raise(page):
    """A missing row, an axis that the mesh does not have, and a collision raise in Flax."""
    assert page.spec_of(page.columns, *NAMES) == P(None, "model")  # as meant
    for message, table in [
        ("Resource axis: embed of", [("hidden", "model")]),
        ("Resource axis: fsdp of", [("embed", "fsdp"), ("hidden", "model")]),
        ("DuplicateSpecError", [("embed", "model"), ("hidden", "model")]),
    ]:
        assert message in attempt(page.spec_of, table, *NAMES)
    assert "too many values" in attempt(page.spec_of, dict(page.columns), *NAMES)


def test_four_mistakes_pass(page):
    """A name that is an axis, a row that nothing uses, two rows for a name, too few names."""
    spec_of = page.spec_of
    assert spec_of(page.forgotten_row, "model", "hidden") == P("model", None)
    assert spec_of(page.misspelt, *NAMES) == P(None, "model")
    assert spec_of(page.two_rows, *NAMES) == P(None, "model")
    assert spec_of(page.two_rows[::-1], *NAMES) == P("data", "model")  # the last row wins
    assert spec_of(page.columns, "hidden") == P("model")
    assert spec_of(page.columns, "embed") == P(None)


def test_two_rows_for_a_name_are_a_syntax_error_in_a_table_object():
    """Two rows for embed would be a SyntaxError."""
    with pytest.raises(SyntaxError, match="keyword argument repeated: embed"):
        compile('Rules(embed="data", embed=None)', "a table", "eval")


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


def test_assert_placed_compares_with_the_spec_that_a_table_object_gave(page):
    """It needs no context, finds a weight that was assigned elsewhere, and no old table object."""
    old, new = page.hybrid, page.Rules(batch="data", embed="data")
    with jax.set_mesh(page.mesh):
        model = make_model(tiny, old)
    assert_placed(model, page.mesh)
    assert model.rules == old != new  # which the model's own table tells
    whole = jax.device_put(np.asarray(model.w_ID), jax.NamedSharding(page.mesh, P()))
    model.w_ID.set_value(whole)
    raised = attempt(assert_placed, model, page.mesh)
    assert raised.startswith("AssertionError: ('w_ID',) is sharded as P()")
