"""Attention with the sequence split over devices: by gather, by a ring in zigzag order, by Ulysses.

    python examples/ring_attention.py                         on the first n devices JAX finds
    JAX_NUM_CPU_DEVICES=4 python examples/ring_attention.py   on four simulated ones

The page https://many-devices.github.io/one-program/book/14-sequences.html explains it step by step.
In a program of your own, set S and n, and pass the same `held` to rotary positions and to attention.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

P = jax.P
S = 64  # tokens in a sequence
n = 4  # devices that share a sequence


def unfinished_attention(q_BSHC, k_BTKC, v_BTKC, position_S, position_T):
    """Maximum, sum and weighted values of a softmax that is not divided yet."""
    B, S, H, C = q_BSHC.shape
    K = k_BTKC.shape[2]
    q_BSKGC = q_BSHC.reshape(B, S, K, H // K, C)
    scores_BKGST = jnp.einsum("BSKGC,BTKC->BKGST", q_BSKGC, k_BTKC) / C**0.5
    seen_ST = position_S[:, None] >= position_T[None, :]  # the causal mask
    scores_BKGST = jnp.where(seen_ST, scores_BKGST, -1e30)
    # It keeps exp in range and cancels in the end, so it needs no gradient
    top_BKGS = jax.lax.stop_gradient(scores_BKGST.max(-1))
    weights_BKGST = jnp.exp(scores_BKGST - top_BKGS[..., None])
    out_BKGSC = jnp.einsum("BKGST,BTKC->BKGSC", weights_BKGST, v_BTKC)
    return top_BKGS, weights_BKGST.sum(-1), out_BKGSC


def finish(unfinished):
    """Divide by the sum of exponentials, and put the heads back together."""
    _, total_BKGS, out_BKGSC = unfinished
    B, K, G, S, C = out_BKGSC.shape
    out_BKGSC = out_BKGSC / total_BKGS[..., None]
    return jnp.moveaxis(out_BKGSC, 3, 1).reshape(B, S, K * G, C)


def attention(q_BSHC, k_BTKC, v_BTKC, position_S, position_T):
    return finish(unfinished_attention(q_BSHC, k_BTKC, v_BTKC, position_S, position_T))


def contiguous(device):
    """The positions of the tokens that a device holds."""
    return device * (S // n) + jnp.arange(S // n)


def zigzag(device):
    half = S // (2 * n)
    early = device * half + jnp.arange(half)
    late = (2 * n - 1 - device) * half + jnp.arange(half)
    return jnp.concatenate([early, late])


def order_of(held):
    """The positions of all tokens, one device after another."""
    return jnp.concatenate([held(device) for device in range(n)])


def gather(q_block_BSHC, k_block_BTKC, v_block_BTKC, held):
    k_gathered_BTKC = jax.lax.all_gather(k_block_BTKC, "seq", axis=1, tiled=True)
    v_gathered_BTKC = jax.lax.all_gather(v_block_BTKC, "seq", axis=1, tiled=True)
    mine_S, all_T = held(jax.lax.axis_index("seq")), order_of(held)
    return attention(q_block_BSHC, k_gathered_BTKC, v_gathered_BTKC, mine_S, all_T)


def merge(one, two):
    """The softmax over the keys of both (online softmax)."""
    (top_1, total_1, out_1), (top_2, total_2, out_2) = one, two
    top = jnp.maximum(top_1, top_2)
    a, b = jnp.exp(top_1 - top), jnp.exp(top_2 - top)
    return top, a * total_1 + b * total_2, a[..., None] * out_1 + b[..., None] * out_2


def needed(position_S, position_T):
    """Whether any of these queries sees any of these keys."""
    return position_S[-1] >= position_T[0]


def add(softmax, *pair):
    return merge(softmax, unfinished_attention(*pair))


def skip(softmax, *pair):
    return softmax


def attend_halves(softmaxes, q_block_BSHC, kv_block, mine_S, theirs_T):
    """Add one block of keys to the unfinished softmax of each half of the queries."""
    arrays = q_block_BSHC, *kv_block
    q_halves, k_halves, v_halves = (jnp.split(x, 2, axis=1) for x in arrays)
    updated = []
    for softmax, q, q_at in zip(softmaxes, q_halves, jnp.split(mine_S, 2)):
        for k, v, k_at in zip(k_halves, v_halves, jnp.split(theirs_T, 2)):
            pair = q, k, v, q_at, k_at
            softmax = jax.lax.cond(needed(q_at, k_at), add, skip, softmax, *pair)
        updated.append(softmax)
    return updated


def ring(q_block_BSHC, k_block_BTKC, v_block_BTKC, held):
    me = jax.lax.axis_index("seq")
    onward = [(device, (device + 1) % n) for device in range(n)]

    def step(carry, number):
        softmaxes, block = carry
        arriving = jax.lax.ppermute(block, "seq", onward)
        theirs_T = held((me - number) % n)  # the block comes from `number` devices back
        softmaxes = attend_halves(softmaxes, q_block_BSHC, block, held(me), theirs_T)
        return (softmaxes, arriving), None

    B, L, H, C = q_block_BSHC.shape
    K = k_block_BTKC.shape[2]
    # Not jnp.zeros: both branches of a cond need one type, varying over devices as q
    zeros = jnp.zeros_like(q_block_BSHC, shape=(B, K, H // K, L // 2, C))
    empty = zeros[..., 0] - 1e30, zeros[..., 0], zeros
    carry = [empty, empty], (k_block_BTKC, v_block_BTKC)
    (softmaxes, block), _ = jax.lax.scan(step, carry, jnp.arange(n - 1))
    theirs_T = held((me + 1) % n)  # the last block is not sent on
    softmaxes = attend_halves(softmaxes, q_block_BSHC, block, held(me), theirs_T)
    return jnp.concatenate([finish(softmax) for softmax in softmaxes], axis=1)


def ulysses(q_block_BSHC, k_block_BTKC, v_block_BTKC, held):
    exchange = partial(jax.lax.all_to_all, axis_name="seq", tiled=True)
    to_heads = partial(exchange, split_axis=2, concat_axis=1)
    to_tokens = partial(exchange, split_axis=1, concat_axis=2)
    q_BSHC, k_BTKC, v_BTKC = map(to_heads, (q_block_BSHC, k_block_BTKC, v_block_BTKC))
    all_S = order_of(held)
    return to_tokens(attention(q_BSHC, k_BTKC, v_BTKC, all_S, all_S))


def main():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((n,), ("seq",), axis_types=auto, devices=jax.devices()[:n])
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (8, 4, 4)  # of queries, keys and values
    q, k, v = (jax.random.normal(key, (2, S, count, 8)) for key, count in zip(keys, heads))
    positions = jnp.arange(S)

    def full(q, k, v):
        return attention(q, k, v, positions, positions)

    def error_of(function, reference, order):
        """The largest difference, with the arguments and the reference in this order."""
        found = function(q[:, order], k[:, order], v[:, order])
        wanted = reference(q, k, v)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted))
        return np.max([np.abs(a - b[:, order]).max() for a, b in pairs])  # keeps NaN

    def gradient_of(attend):
        def loss(q, k, v):
            return jnp.sum(attend(q, k, v) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    for attend, held in [(gather, contiguous), (ring, zigzag), (ulysses, contiguous)]:
        order = order_of(held)
        block = P(None, "seq")
        mapped = jax.shard_map(
            partial(attend, held=held), mesh=mesh, in_specs=block, out_specs=block
        )
        forward = error_of(jax.jit(mapped), full, order)
        backward = error_of(gradient_of(mapped), gradient_of(full), order)
        print(f"{attend.__name__:8} forward: error {forward:.0e}, backward: error {backward:.0e}")


if __name__ == "__main__":
    main()
