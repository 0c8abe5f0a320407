"""FSDP of two matrices in plain JAX: chapter 9's step, as chapter 11 trains it in many processes."""

import jax
import jax.numpy as jnp


def new_state(mesh):
    """Weights and momentum, made in pieces: each process makes its own."""

    def make():
        keys = jax.random.split(jax.random.key(0))
        weights = {
            "w_IF": jax.random.normal(keys[0], (64, 256)) / 8,
            "w_FV": jax.random.normal(keys[1], (256, 16)) / 16,
        }
        return weights, jax.tree.map(jnp.zeros_like, weights)

    pieces = jax.NamedSharding(mesh, jax.P(None, "data"))
    return jax.jit(make, out_shardings=pieces)()


def gather(piece):
    return jax.lax.all_gather(piece, "data", axis=1, tiled=True)


def mean_loss(pieces, batch_block):
    images_BI, labels_B, weights_B = batch_block
    whole = jax.tree.map(gather, pieces)
    logits_BV = jax.nn.silu(images_BI @ whole["w_IF"]) @ whole["w_FV"]
    log_p_BV = jax.nn.log_softmax(logits_BV)
    picked_B = jnp.take_along_axis(log_p_BV, labels_B[:, None], axis=1)[:, 0]
    sums = (picked_B * weights_B).sum(), weights_B.sum()
    total, count = jax.lax.psum(sums, "data")
    return -total / count


def step(weights, momentum, batch_block):
    loss, gradient = jax.value_and_grad(mean_loss)(weights, batch_block)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    weights = jax.tree.map(lambda w, m: w - 0.2 * m, weights, momentum)
    return weights, momentum, loss


def compiled_step(mesh):
    pieces, rows = jax.P(None, "data"), jax.P("data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(pieces, pieces, rows), out_specs=(pieces, pieces, jax.P())
    )
    return jax.jit(mapped, donate_argnums=(0, 1))
