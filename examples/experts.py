"""Experts on a mesh axis: a mixture that sends tokens by two all-to-alls, and counts what it drops.

    python examples/experts.py                         on the devices JAX finds
    JAX_NUM_CPU_DEVICES=8 python examples/experts.py   on eight simulated ones

The page https://many-devices.github.io/one-program/book/13-experts.html explains it step by step. For
a model of your own, call `mixture` where its feed-forward layer is, inside `jax.shard_map`.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

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


def route(x_BD, router_DE, k=2):
    """Probabilities of all experts; gates and indices of the chosen k."""
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
    x_EBD = jnp.broadcast_to(x_BD, (E, *x_BD.shape))  # every token for every expert
    y_EBD = feed_forward(x_EBD, params["up_EDF"], params["down_EFD"])
    # The gate of each expert, or zero if the token did not choose it
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


def slots_of(experts_BR, E):
    """For each route, how many earlier routes of this device have the same expert."""
    # A row for each route, token by token, with a 1 in the column of its expert
    chosen = jax.nn.one_hot(experts_BR.ravel(), E, dtype="int32")
    earlier = jnp.cumsum(chosen, axis=0) - chosen  # in the rows above
    return jnp.sum(earlier * chosen, axis=-1).reshape(experts_BR.shape)


def fill_queues(x_BD, experts_BR, slots_BR, E, Q):
    """A queue for each expert; a token is copied for each of its routes."""
    queues_EQD = jnp.zeros((E, Q, x_BD.shape[-1]), x_BD.dtype)
    return queues_EQD.at[experts_BR, slots_BR].set(x_BD[:, None], mode="drop")


def to_experts(queues_EQD):
    """From (all experts, own tokens) to (own experts, tokens of all devices)."""
    return jax.lax.all_to_all(queues_EQD, "expert", split_axis=0, concat_axis=1, tiled=True)


def from_experts(y_block_EQD):
    """From (own experts, tokens of all devices) to (all experts, own tokens)."""
    return jax.lax.all_to_all(y_block_EQD, "expert", split_axis=1, concat_axis=0, tiled=True)


def combine(y_EQD, gates_BR, experts_BR, slots_BR):
    """Add the results of each token, times its gates; a dropped route adds zeros."""
    y_BRD = y_EQD.at[experts_BR, slots_BR].get(mode="fill", fill_value=0)
    return jnp.einsum("BR,BRD->BD", gates_BR, y_BRD)


def mixture(params, x_block_BD, Q, axes):
    """The mixture inside shard_map: tokens of this device, experts of all devices."""
    probs_BE, gates_BR, experts_BR = route(x_block_BD, params["router_DE"])
    E = probs_BE.shape[-1]
    slots_BR = slots_of(experts_BR, E)

    queues_EQD = fill_queues(x_block_BD, experts_BR, slots_BR, E, Q)
    x_block_EQD = to_experts(queues_EQD)
    y_block_EQD = feed_forward(x_block_EQD, params["up_EDF"], params["down_EFD"])
    y_EQD = from_experts(y_block_EQD)
    y_block_BD = combine(y_EQD, gates_BR, experts_BR, slots_BR)

    balance = balance_of(probs_BE, experts_BR, axes)
    return y_block_BD, balance, jnp.sum(slots_BR >= Q)


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


def capacity(tokens, factor, k=2, E=8):
    """Slots in each expert's queue, on a device with this many tokens."""
    return math.ceil(factor * k * tokens / E)


def train(program, weights, batch, steps=20):
    """Gradient descent; return the weights, and each step's loss and drops."""
    history = []
    for _ in range(steps):
        (loss, dropped), gradient = program(weights, batch)
        weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient)
        history.append((float(loss), int(dropped)))
    return weights, history


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare on TPU and GPU
    digits = load_digits()
    pixels_BI = (digits.data / 16 - 0.5).astype("float32")
    B = 512 // jax.device_count() * jax.device_count()
    batch = (pixels_BI[:B], digits.target[:B].astype("int32"))
    keys = jax.random.split(jax.random.key(1), len(shapes))
    params = {
        name: jax.random.normal(key, shape) / math.sqrt(shape[-2])
        for key, (name, shape) in zip(keys, shapes.items())
    }

    experts = math.gcd(8, jax.device_count())  # devices that share the eight experts
    sizes = (jax.device_count() // experts, experts)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh(sizes, ("data", "expert"), axis_types=auto * 2)
    shardings = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    placed = jax.device_put(params, shardings)
    tokens = B // mesh.size  # of each device
    print(f"{sizes[0]} x {sizes[1]} devices, {tokens} tokens on each")

    dense_program = jax.jit(jax.value_and_grad(partial(loss_of, layer=dense_mixture), has_aux=True))
    expected, _ = dense_program(params, batch)
    for factor in (4, 1.25):
        Q = capacity(tokens, factor)
        weights, history = train(program_on(mesh, partial(mixture, Q=Q)), placed, batch)
        (first, lost_first), (last, lost_last) = history[0], history[-1]
        print(
            f"factor {factor}: loss {first:.4f} to {last:.4f}, "
            f"dropped {lost_first} to {lost_last} of {2 * B:,} routes"
        )
        if factor == 4:
            assert lost_first == lost_last == 0, "the factor E/k drops nothing"
            np.testing.assert_allclose(first, expected[0], rtol=1e-5)
    print(f"dense:    loss {expected[0]:.4f} at first")


if __name__ == "__main__":
    main()
