"""The page "Names for a model that has none: somebody else's, or your own"."""

import jax
import pytest
from flax import nnx

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "annotate-third-party"
P = jax.P


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
