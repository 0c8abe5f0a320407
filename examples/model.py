"""A decoder-only transformer: RoPE, grouped-query attention, RMSNorm and a gated MLP, as in Llama.

Weights name the mesh axes that split them, `fsdp` and `model`; the batch is split over `data` and
`fsdp` (strategies.py). Weights are float32, and each product casts them to the dtype of the
computation.

Names end in their dimensions: B batch, S positions, D model width, H heads, K heads of keys and
values, C head size, F hidden width, L layers, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from strategies import ROWS, P

# What the backward pass finds of each layer; the rest it computes again.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,  # everything: the fastest, if it fits
    # The results of products with weights. A policy for dots would not find them in a custom_vjp.
    "products": jax.checkpoint_policies.save_only_these_names("product"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input: the least memory
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, and how the model computes."""

    L: int
    D: int
    F: int
    H: int
    K: int
    C: int
    V: int
    S: int
    theta: float  # the base of RoPE's wavelengths
    compute: str = "float32"  # dtype of products and activations
    reduce: str = "float32"  # dtype in which weights' gradients are added up over devices
    remat: str = "none"  # a name of REMAT
    attention: Literal["xla", "cudnn"] = "xla"  # the second never stores S x S scores


def initial(key: jax.Array, shape: tuple[int, ...], inputs: int) -> jax.Array:
    """Normal numbers that keep the size of what they multiply, a sum of so many inputs."""
    return jax.random.normal(key, shape, jnp.float32) * inputs**-0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(formula: str, x: jax.Array, w: jax.Array, reduce: str) -> jax.Array:
    """einsum of activations with a float32 weight, in the activations' dtype.

    Each device computes the weight's gradient from its own rows, and then they are added up over
    the devices. A plain einsum would round them to the activations' dtype before that sum.
    """
    return jnp.einsum(formula, x, w.astype(x.dtype))


def product_forward(formula: str, x: jax.Array, w: jax.Array, reduce: str) -> tuple[Any, Any]:
    return product(formula, x, w, reduce), (x, w)


def product_backward(formula: str, reduce: str, saved: Any, dy: jax.Array) -> tuple[Any, Any]:
    (x, w), (inputs, result) = saved, formula.split("->")
    left, right = inputs.split(",")
    dx = jnp.einsum(f"{result},{right}->{left}", dy, w.astype(dy.dtype))
    dw = jnp.einsum(f"{left},{result}->{right}", x, dy, preferred_element_type=jnp.dtype(reduce))
    return dx, dw.astype(w.dtype)


product.defvjp(product_forward, product_backward)


def normalized(x_BSD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """RMSNorm, in float32: squares and their mean lose too much in bfloat16."""
    x32_BSD = x_BSD.astype(jnp.float32)
    mean_BS1 = jnp.mean(x32_BSD**2, -1, keepdims=True)
    return (x32_BSD * jax.lax.rsqrt(mean_BS1 + 1e-6) * scale_D).astype(x_BSD.dtype)


def rotated(x_BSHC: jax.Array, theta: float) -> jax.Array:
    """RoPE: pair c of a head turns by S / theta**(2c / C) (https://arxiv.org/abs/2104.09864)."""
    S, C = x_BSHC.shape[1], x_BSHC.shape[3]
    speeds = theta ** (-jnp.arange(0, C, 2, dtype=jnp.float32) / C)
    angles = jnp.arange(S, dtype=jnp.float32)[:, None] * speeds
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]  # the same for every head
    first, second = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BSHC.dtype)


class Block(nnx.Module):
    """Attention, then a gated MLP, each added to the layer's input."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        D, F, H, K, C = config.D, config.F, config.H, config.K, config.C

        def weight(shape: tuple[int, ...], inputs: int, *axes: str | None) -> nnx.Param:
            return nnx.Param(initial(rngs.params(), shape, inputs), out_sharding=axes)

        self.attention_scale_D = nnx.Param(jnp.ones(D), out_sharding=(None,))
        self.w_query_DHC = weight((D, H, C), D, "fsdp", "model", None)
        self.w_key_DKC = weight((D, K, C), D, "fsdp", "model", None)
        self.w_value_DKC = weight((D, K, C), D, "fsdp", "model", None)
        self.w_out_HCD = weight((H, C, D), H * C, "model", None, "fsdp")
        self.mlp_scale_D = nnx.Param(jnp.ones(D), out_sharding=(None,))
        self.w_gate_DF = weight((D, F), D, "fsdp", "model")
        self.w_up_DF = weight((D, F), D, "fsdp", "model")
        self.w_down_FD = weight((F, D), F, "model", "fsdp")

    def __call__(self, x_BSD: jax.Array, config: Config, rows: tuple[str, ...]) -> jax.Array:
        def times(formula: str, x: jax.Array, w: nnx.Param) -> jax.Array:
            return checkpoint_name(product(formula, x, w[...], config.reduce), "product")

        h_BSD = normalized(x_BSD, self.attention_scale_D[...])
        q_BSHC = rotated(times("bsd,dhc->bshc", h_BSD, self.w_query_DHC), config.theta)
        k_BSKC = rotated(times("bsd,dkc->bskc", h_BSD, self.w_key_DKC), config.theta)
        v_BSKC = times("bsd,dkc->bskc", h_BSD, self.w_value_DKC)
        mixed_BSHC = jax.nn.dot_product_attention(
            q_BSHC, k_BSKC, v_BSKC, is_causal=True, implementation=config.attention
        )
        x_BSD = x_BSD + pinned(times("bshc,hcd->bsd", mixed_BSHC, self.w_out_HCD), rows)

        h_BSD = normalized(x_BSD, self.mlp_scale_D[...])
        gate_BSF = jax.nn.silu(times("bsd,df->bsf", h_BSD, self.w_gate_DF))
        up_BSF = times("bsd,df->bsf", h_BSD, self.w_up_DF)
        return x_BSD + pinned(times("bsf,fd->bsd", gate_BSF * up_BSF, self.w_down_FD), rows)


class Model(nnx.Module):
    """Tokens to vectors, a stack of blocks, vectors to logits of the next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        V, D = config.V, config.D
        embedding = jax.random.normal(rngs.params(), (V, D)) * D**-0.5
        self.embedding_VD = nnx.Param(embedding, out_sharding=("model", "fsdp"))
        stack = nnx.vmap(
            lambda rngs: Block(config, rngs), transform_metadata={nnx.PARTITION_NAME: None}
        )
        self.blocks = stack(rngs.split(config.L))
        self.scale_D = nnx.Param(jnp.ones(D), out_sharding=(None,))
        w_DV = initial(rngs.params(), (D, V), D)
        self.w_DV = nnx.Param(w_DV, out_sharding=("fsdp", "model"))
        self.config = config

    def __call__(self, tokens_BS: jax.Array, rows: tuple[str, ...] = ROWS) -> jax.Array:
        """Logits in float32, split over `rows` and, along the vocabulary, over `model`."""
        config = self.config
        embedding_VD = self.embedding_VD[...].astype(config.compute)
        embedding_VD = jax.lax.with_sharding_constraint(embedding_VD, P("model", None))
        x_BSD = pinned(embedding_VD[tokens_BS], rows)

        def layer(x_BSD: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return pinned(block(x_BSD, config, rows), rows), None

        if (policy := REMAT[config.remat]) is not None:  # a scan needs no barrier against CSE
            layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, self.blocks)
        x_BSD = normalized(x_BSD, self.scale_D[...])
        logits_BSV = product("bsd,dv->bsv", x_BSD, self.w_DV[...], config.reduce)
        return pinned(logits_BSV, rows, "model").astype(jnp.float32)


def pinned(x_BSD: jax.Array, rows: tuple[str, ...], last: str | None = None) -> jax.Array:
    """Without this the compiler may move activations where the strategy says to move weights."""
    return jax.lax.with_sharding_constraint(x_BSD, P(rows, None, last))


def losses_of(model: Model, tokens_BS: jax.Array, rows: tuple[str, ...] = ROWS) -> jax.Array:
    """Cross entropy of each row, in nats for a token: the mean over its positions.

    `tokens_BS` has one position more than the model sees: the last is only predicted.
    """
    logits_BSV, next_BS = model(tokens_BS[:, :-1], rows), tokens_BS[:, 1:]
    # Picking a logit by its index would gather logits that are split; comparing does not.
    chosen_BSV = next_BS[..., None] == jnp.arange(logits_BSV.shape[-1])
    right_BS = jnp.where(chosen_BSV, logits_BSV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_BSV, -1) - right_BS).mean(-1)


def loss_of(model: Model, tokens_BS: jax.Array, rows: tuple[str, ...] = ROWS) -> jax.Array:
    return losses_of(model, tokens_BS, rows).mean()


def matmul_weights(config: Config) -> int:
    """Numbers in the weights that multiply each token; the embedding only looks one up."""
    attention = 2 * config.D * (config.H + config.K) * config.C
    return config.L * (attention + 3 * config.D * config.F) + config.D * config.V


def flops_per_token(config: Config) -> float:
    """Of a training step: 6 for each weight, and 12 L H C S for attention.

    Source: PaLM, appendix B, https://arxiv.org/abs/2204.02311. It counts the whole S x S square of
    scores, of which a causal model needs half, and nothing that remat computes again.
    """
    attention = 12 * config.L * config.H * config.C * config.S
    return 6.0 * matmul_weights(config) + attention
