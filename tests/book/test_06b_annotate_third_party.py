"""The page "Names for a model that has none: somebody else's, or your own"."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import assert_placed
from many_devices.compiled import stored_program
from many_devices.helpers import attempt
from many_devices.logical import make_model, tiny
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
    """After the three steps all 15 weights have the specs that the table gives their names."""
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
    kernel = page.encoder.attend.query.kernel
    assert kernel.shape == (96, 8, 12) and kernel.sharding.shard_shape(kernel.shape) == (48, 2, 12)


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
