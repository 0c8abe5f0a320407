"""The page "Constraints": a pin on each block, or on the logits alone."""

import jax
import jax.numpy as jnp
import pytest

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "constraints"
P = jax.P
LAYERS, WIDTH, HIDDEN, CLASSES = 4, 64, 256, 16


def sent_in_a_step(rows, pins):
    """Bytes that a device sends for loss and gradients of a small model, FSDP over eight devices.

    An embedding, a scan of residual blocks and a head, all sharded over `data`. `pins` says which
    values are constrained to the rows of the batch: {"blocks"}, {"logits"}, or both.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def pinned(x, name):
        return jax.lax.with_sharding_constraint(x, P("data", None)) if name in pins else x

    def loss(weights, x_BD):
        w_DD, blocks, w_DV = weights

        def layer(x_BD, block):
            w_DF, w_FD = block
            return pinned(x_BD + jnp.tanh(x_BD @ w_DF) @ w_FD, "blocks"), None

        x_BD, _ = jax.lax.scan(layer, pinned(x_BD @ w_DD, "blocks"), blocks)
        return (pinned(x_BD @ w_DV, "logits") ** 2).mean()

    def shape(*lengths, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(lengths, "float32", sharding=sharding)

    blocks = (
        shape(LAYERS, WIDTH, HIDDEN, spec=P(None, "data", None)),
        shape(LAYERS, HIDDEN, WIDTH, spec=P(None, None, "data")),
    )
    embed, head = shape(WIDTH, WIDTH, spec=P(None, "data")), shape(WIDTH, CLASSES, spec=P("data"))
    weights = embed, blocks, head
    places = jax.tree.map(lambda weight: weight.sharding, weights)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
        program = step.lower(weights, shape(rows, WIDTH, spec=P("data"))).compile()
    kinds = ms.collectives(program).by("kind").values()
    return sum(totals.wire_bytes for totals in kinds)


@compiled_for_cpu
def test_pinned_at_each_block_a_step_sends_the_same_for_every_batch():
    """With a pin on the output of each block weights move, whatever the batch is."""
    assert len({sent_in_a_step(rows, {"blocks"}) for rows in (64, 1024, 4096)}) == 1


@compiled_for_cpu
def test_a_pin_on_the_logits_alone_leaves_it_to_the_compiler():
    """A pin on the logits alone is not enough: activations move, and more of them in a larger batch."""
    sent = {rows: sent_in_a_step(rows, {"logits"}) for rows in (2048, 4096)}
    assert sent[4096] / sent[2048] == pytest.approx(2, rel=0.1)
    assert sent[4096] > 5 * sent_in_a_step(4096, {"blocks"})
    assert sent[4096] == pytest.approx(sent_in_a_step(4096, set()), rel=0.1)  # as with no pin
