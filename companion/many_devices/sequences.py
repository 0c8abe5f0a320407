"""Attention over one block of keys, and how two such results become one: chapter 14.

Letters: B sequences, S queries, T keys, H query heads, K key heads, G = H / K, C the size of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp


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
