"""The mixture of experts of chapter 13: its router, its experts, and its program on a mesh.

Letters: B tokens, D width, E experts, F hidden width, R choices of a token, Q slots of a queue,
I pixels, V classes.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax

from many_devices.data import classes_B, pixels_BI

P = jax.P
shapes = {
    "in_ID": (64, 32),
    "router_DE": (32, 8),
    "up_EDF": (8, 32, 64),
    "down_EFD": (8, 64, 32),
    "out_DV": (32, 10),
}
specs = {name: P() for name in shapes}
specs |= {"up_EDF": P("expert"), "down_EFD": P("expert")}


def first_digits(count=512):
    """The first images of scikit-learn's digits, (count, 64) in -0.5 to 0.5, and their labels."""
    images_BI = (pixels_BI[:count] / 16 - 0.5).astype("float32")
    return images_BI, classes_B[:count].astype("int32")


def make_params(seed=1):
    """The weights of chapter 13, with the names and shapes of `shapes`, on one device."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / math.sqrt(shape[-2])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def route(x_BD, router_DE, k=2):
    """Probabilities of all experts; gates and numbers of the k that are chosen."""
    probs_BE = jax.nn.softmax(x_BD @ router_DE)
    gates_BR, experts_BR = jax.lax.top_k(probs_BE, k)
    gates_BR = gates_BR / gates_BR.sum(-1, keepdims=True)
    return probs_BE, gates_BR, experts_BR


def balance_of(probs_BE, experts_BR, axes=()):
    """The load-balancing loss, over the tokens of all devices along `axes`."""
    E = probs_BE.shape[-1]
    share_E = jax.nn.one_hot(experts_BR, E).mean((0, 1))
    prob_E = probs_BE.mean(0)
    if axes:
        share_E, prob_E = jax.lax.pmean((share_E, prob_E), axes)
    return E * jnp.sum(share_E * prob_E)


def feed_forward(x_EQD, up_EDF, down_EFD):
    """Each expert on the tokens in its own queue."""
    h_EQF = jax.nn.silu(jnp.einsum("EQD,EDF->EQF", x_EQD, up_EDF))
    return jnp.einsum("EQF,EFD->EQD", h_EQF, down_EFD)


def dense_mixture(params, x_BD, k=2):
    """The mixture without queues: nothing is dropped, and nothing is sent."""
    probs_BE, gates_BR, experts_BR = route(x_BD, params["router_DE"], k)
    E = probs_BE.shape[-1]
    x_EBD = jnp.broadcast_to(x_BD, (E, *x_BD.shape))
    y_EBD = feed_forward(x_EBD, params["up_EDF"], params["down_EFD"])
    gates_BE = jnp.einsum("BR,BRE->BE", gates_BR, jax.nn.one_hot(experts_BR, E))
    y_BD = jnp.einsum("BE,EBD->BD", gates_BE, y_EBD)
    return y_BD, balance_of(probs_BE, experts_BR), 0


def loss_of(params, batch, layer):
    """The loss of a model with this layer, and the number of routes that it dropped."""
    pixels_BI, labels_B = batch
    x_BD = jnp.tanh(pixels_BI @ params["in_ID"])
    y_BD, balance, dropped = layer(params, x_BD)
    logits_BV = (x_BD + y_BD) @ params["out_DV"]
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BV, labels_B)
    return losses_B.mean() + 0.01 * balance, dropped


def program_on(mesh, layer):
    """Loss, dropped routes and gradient, on all devices of this mesh."""
    axes = mesh.axis_names

    def mean_loss(params, batch_block):
        loss, dropped = loss_of(params, batch_block, partial(layer, axes=axes))
        return jax.lax.pmean(loss, axes), jax.lax.psum(dropped, axes)

    mapped = jax.shard_map(
        jax.value_and_grad(mean_loss, has_aux=True),
        mesh=mesh,
        in_specs=(specs, P(axes)),
        out_specs=((P(), P()), specs),
    )
    return jax.jit(mapped)


def train(program, weights, batch, steps=20):
    """Gradient descent; return the weights, and each step's loss and drops."""
    history = []
    for _ in range(steps):
        (loss, dropped), gradient = program(weights, batch)
        weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient)
        history.append((float(loss), int(dropped)))
    return weights, history


def gathered_exchange(
    rows, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Return what jax.lax.ragged_all_to_all does, where a compiler lacks it.

    Every device gathers the rows of all devices and picks its own, so it sends far more.
    """
    here = jax.lax.axis_index(axis_name)
    gathered = partial(jax.lax.all_gather, axis_name=axis_name)
    all_rows = gathered(rows)  # (devices, rows, D)
    # Of each device: where its rows for this one begin, how many there are, where they go
    begin, count, target = (
        gathered(numbers)[:, here, None] for numbers in (input_offsets, send_sizes, output_offsets)
    )
    nth = jnp.arange(len(rows)) - begin  # 0 for the first row that is for this device
    wanted = (0 <= nth) & (nth < count)
    target = jnp.where(wanted, target + nth, len(output))
    return output.at[target].set(all_rows, mode="drop")
