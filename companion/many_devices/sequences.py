"""Chapter 14: a model whose attention is an argument, and attention block by block, as in a ring.

`unfinished_attention` computes the softmax over one block of keys without dividing, `merge` makes one
of two such results, and `finish` divides. They keep their sums in float32 for a model in bfloat16 too,
because otherwise every merge would round them. A masked score is -1e30 and not -inf, which would make
NaN if all keys of a block are masked. With -1e30, `merge` multiplies the sums of such a block by zero.

Letters: B sequences, S queries, T keys, H query heads, K key heads, G = H / K, C the size of a head,
D the width, V the size of the vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def rotate(x_BSHC, position_S):
    """Turn the features c and c + C/2 of each head by an angle that grows with the position."""
    half = x_BSHC.shape[-1] // 2
    frequency = 100.0 ** (-jnp.arange(half) / half)  # often 10,000 or more
    angle = position_S[:, None, None] * frequency  # (S, 1, C/2): the same for all heads
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BSHC, 2, axis=-1)
    rotated = [a * cos - b * sin, a * sin + b * cos]
    return jnp.concatenate(rotated, axis=-1).astype(x_BSHC.dtype)  # the angles are float32


class Model(nnx.Module):
    """An embedding, one attention layer with rotary positions, and an output layer.

    Weights are in float32. `dtype` is that of the arithmetic.
    """

    def __init__(self, rngs, V=50, D=32, H=8, K=4, C=8, dtype="float32"):
        linear = partial(nnx.LinearGeneral, use_bias=False, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(V, D, dtype=dtype, rngs=rngs)
        self.query = linear(D, (H, C))
        self.key = linear(D, (K, C))
        self.value = linear(D, (K, C))
        self.out = linear((H, C), D, axis=(-2, -1))
        self.logits = linear(D, V)

    def __call__(self, tokens_BS, position_S, attend):
        """Logits of the next token, (B, S, V). `attend(q, k, v)` computes the attention."""
        x_BSD = self.embed(tokens_BS)
        q_BSHC = rotate(self.query(x_BSD), position_S)
        k_BTKC = rotate(self.key(x_BSD), position_S)
        v_BTKC = self.value(x_BSD)
        attended_BSHC = attend(q_BSHC, k_BTKC, v_BTKC)
        return self.logits(x_BSD + self.out(attended_BSHC))


def loss_of(model, batch, position_S, attend):
    """The mean loss of the next token, for a batch of tokens and targets, each (B, S)."""
    tokens_BS, targets_BS = batch
    logits_BSV = model(tokens_BS, position_S, attend).astype("float32")
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS)
    return losses_BS.mean()


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
