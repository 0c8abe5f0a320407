"""Attention with the sequence split over devices: by gather, by two kinds of ring, by Ulysses.

    python examples/ring_attention.py                         on the first n devices JAX finds
    JAX_NUM_CPU_DEVICES=4 python examples/ring_attention.py   on four simulated ones

The page https://many-devices.github.io/one-program/book/14-sequences.html explains it step by step,
and https://many-devices.github.io/one-program/book/deeper/14a-balanced-ring.html the balanced ring.
In a program of your own, set S and n, and take rotary positions from the same `held` as the mask;
for the balanced ring, which does half of the work, that is `zigzag`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

P = jax.P
S = 64  # tokens in a sequence
n = 4  # devices that share a sequence
half = S // (2 * n)  # tokens in a half block


def attention(q_BSHC, k_BTKC, v_BTKC, position_S, position_T):
    """Each query sees the keys at its own position and at earlier ones."""
    seen_ST = position_S[:, None] >= position_T
    return jax.nn.dot_product_attention(q_BSHC, k_BTKC, v_BTKC, mask=seen_ST)


def contiguous(device):
    """The positions of the tokens that a device holds."""
    return device * (S // n) + jnp.arange(S // n)


def order_of(held):
    """The positions of all tokens, one device after another."""
    return jnp.concatenate([held(device) for device in range(n)])


def gather(q_block_BSHC, k_block_BTKC, v_block_BTKC, held):
    k_gathered_BTKC = jax.lax.all_gather(k_block_BTKC, "seq", axis=1, tiled=True)
    v_gathered_BTKC = jax.lax.all_gather(v_block_BTKC, "seq", axis=1, tiled=True)
    mine_S, all_T = held(jax.lax.axis_index("seq")), order_of(held)
    return attention(q_block_BSHC, k_gathered_BTKC, v_gathered_BTKC, mine_S, all_T)


def unfinished_attention(q_BSHC, k_BTKC, v_BTKC, position_S, position_T):
    """Maximum, sum and weighted values of a softmax that is not divided yet, in float32."""
    B, S, H, C = q_BSHC.shape
    K = k_BTKC.shape[2]
    q_BSKGC = q_BSHC.reshape(B, S, K, H // K, C)  # G query heads share a key head
    einsum = partial(jnp.einsum, preferred_element_type="float32")  # also in bfloat16
    scores_BKGST = einsum("BSKGC,BTKC->BKGST", q_BSKGC, k_BTKC) / C**0.5
    seen_ST = position_S[:, None] >= position_T  # the causal mask
    scores_BKGST = jnp.where(seen_ST, scores_BKGST, -1e30)
    # It keeps exp in range and cancels in the end, so it needs no gradient
    top_BKGS = jax.lax.stop_gradient(scores_BKGST.max(-1))
    weights_BKGST = jnp.exp(scores_BKGST - top_BKGS[..., None])
    out_BKGSC = einsum("BKGST,BTKC->BKGSC", weights_BKGST.astype(v_BTKC.dtype), v_BTKC)
    return top_BKGS, weights_BKGST.sum(-1), out_BKGSC


def merge(one, two):
    """The softmax over the keys of both (online softmax)."""
    (top_1, total_1, out_1), (top_2, total_2, out_2) = one, two
    top = jnp.maximum(top_1, top_2)
    a, b = jnp.exp(top_1 - top), jnp.exp(top_2 - top)
    return top, a * total_1 + b * total_2, a[..., None] * out_1 + b[..., None] * out_2


def finish(unfinished, dtype):
    """Divide by the sum of exponentials, put the heads back together, and round to dtype."""
    _, total_BKGS, out_BKGSC = unfinished
    B, K, G, S, C = out_BKGSC.shape
    out_BKGSC = out_BKGSC / total_BKGS[..., None]
    return jnp.moveaxis(out_BKGSC, 3, 1).reshape(B, S, K * G, C).astype(dtype)


def ring(q_block_BSHC, k_block_BTKC, v_block_BTKC, held):
    me = jax.lax.axis_index("seq")
    onward = [(device, (device + 1) % n) for device in range(n)]
    block = k_block_BTKC, v_block_BTKC
    softmax = unfinished_attention(q_block_BSHC, *block, held(me), held(me))
    for hop in range(1, n):
        block = jax.lax.ppermute(block, "seq", onward)
        theirs_T = held((me - hop) % n)
        more = unfinished_attention(q_block_BSHC, *block, held(me), theirs_T)
        softmax = merge(softmax, more)
    return finish(softmax, q_block_BSHC.dtype)


def zigzag(device):
    """The positions of the tokens that a device holds."""
    early = device * half + jnp.arange(half)
    late = (2 * n - 1 - device) * half + jnp.arange(half)
    return jnp.concatenate([early, late])


def early_half(block):
    """The early tokens of a block of arrays and their positions."""
    *arrays, positions = block
    return *[x[:, :half] for x in arrays], positions[:half]


def late_half(block):
    *arrays, positions = block
    return *[x[:, half:] for x in arrays], positions[half:]


def attend(queries, keys):
    (q_BSHC, position_S), (k_BTKC, v_BTKC, position_T) = queries, keys
    return unfinished_attention(q_BSHC, k_BTKC, v_BTKC, position_S, position_T)


def from_smaller(early, late, queries, keys):
    """All queries see the early half of the keys."""
    keys = early_half(keys)
    early = merge(early, attend(early_half(queries), keys))
    return early, merge(late, attend(late_half(queries), keys))


def from_larger(early, late, queries, keys):
    """The late queries see all keys."""
    return early, merge(late, attend(late_half(queries), keys))


def balanced_ring(q_block_BSHC, k_block_BTKC, v_block_BTKC):
    me = jax.lax.axis_index("seq")
    onward = [(device, (device + 1) % n) for device in range(n)]
    block = k_block_BTKC, v_block_BTKC
    queries, keys = (q_block_BSHC, zigzag(me)), (*block, zigzag(me))
    early = attend(early_half(queries), early_half(keys))
    late = attend(late_half(queries), keys)
    for hop in range(1, n):
        block = jax.lax.ppermute(block, "seq", onward)
        source = (me - hop) % n  # the block comes from `hop` devices back
        keys = *block, zigzag(source)
        early, late = jax.lax.cond(
            source < me, from_smaller, from_larger, early, late, queries, keys
        )
    dtype = q_block_BSHC.dtype
    return jnp.concatenate([finish(early, dtype), finish(late, dtype)], axis=1)


def ulysses(q_block_BSHC, k_block_BTKC, v_block_BTKC, held):
    exchange = partial(jax.lax.all_to_all, axis_name="seq", tiled=True)
    q_BSHC = exchange(q_block_BSHC, split_axis=2, concat_axis=1)
    k_BTKC = exchange(k_block_BTKC, split_axis=2, concat_axis=1)
    v_BTKC = exchange(v_block_BTKC, split_axis=2, concat_axis=1)
    all_S = order_of(held)
    out_BSHC = attention(q_BSHC, k_BTKC, v_BTKC, all_S, all_S)
    return exchange(out_BSHC, split_axis=1, concat_axis=2)


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare on TPU and GPU
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

    variants = {
        "gather": (partial(gather, held=contiguous), contiguous),
        "ring": (partial(ring, held=contiguous), contiguous),
        "balanced ring": (balanced_ring, zigzag),
        "Ulysses": (partial(ulysses, held=contiguous), contiguous),
    }
    for name, (attend, held) in variants.items():
        order = order_of(held)
        block = P(None, "seq")
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=block, out_specs=block)
        forward = error_of(jax.jit(mapped), full, order)
        backward = error_of(gradient_of(mapped), gradient_of(full), order)
        print(f"{name:13} forward: error {forward:.0e}, backward: error {backward:.0e}")


if __name__ == "__main__":
    main()
