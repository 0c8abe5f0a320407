"""The training step of page 16c: a transformer with FSDP, tensor parallelism and HSDP, by hand.

The mesh has the axes `replica`, `data` and `model`. Weights are float32; a layer gathers them along
`data` in the type of the activations, and sums partial results along `model`.
`examples/compile_ahead.py` has the same step in one file.

In the backward pass, each gather becomes a reduce-scatter of the weight's gradient, and each `pcast`
a sum over `replica`. The `pcast` comes before the gather, so gradients are scattered inside each
replica first, and only shards are summed over `replica`.

Names end in their dimensions: B sequences, S length (T where it is attended to), D model, F hidden,
H heads, K kv heads, C head size, V vocabulary, L layers.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

P = jax.P


class Config(NamedTuple):
    """Sizes of Llama 3.1 8B."""

    L: int = 32
    D: int = 4096
    F: int = 14336
    H: int = 32
    K: int = 8
    C: int = 128
    V: int = 128256
    dtype: str = "bfloat16"  # of activations and of gathered weights


def weights_of(config):
    """Shape and spec of each float32 weight, by name."""
    L, D, F, H, K, C, V, _ = config
    return {
        "embed_VD": ((V, D), P(None, "data")),
        "q_LDHC": ((L, D, H, C), P(None, "data", "model")),
        "k_LDKC": ((L, D, K, C), P(None, "data", "model")),
        "v_LDKC": ((L, D, K, C), P(None, "data", "model")),
        "o_LHCD": ((L, H, C, D), P(None, "model", None, "data")),
        "gate_LDF": ((L, D, F), P(None, "data", "model")),
        "up_LDF": ((L, D, F), P(None, "data", "model")),
        "down_LFD": ((L, F, D), P(None, "model", "data")),
        "norm1_LD": ((L, D), P()),
        "norm2_LD": ((L, D), P()),
        "norm_D": ((D,), P()),
        "head_DV": ((D, V), P("data", "model")),
    }


def abstract_mesh(**sizes):
    """A mesh without devices, with these axes in this order."""
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    shape = tuple(sizes.values())
    return jax.sharding.AbstractMesh(shape, tuple(sizes), axis_types=types)


def normed(x_BSD, scale_D):
    """RMSNorm, computed in float32."""
    mean_BS1 = jnp.mean(x_BSD.astype("float32") ** 2, axis=-1, keepdims=True)
    return (x_BSD * jax.lax.rsqrt(mean_BS1 + 1e-5) * scale_D).astype(x_BSD.dtype)


def gather_as(dtype, shard, axis=0):
    """Return a weight in `dtype`, whole along `data`; its gradient comes back as a shard."""
    shard = jax.lax.pcast(shard.astype(dtype), "replica", to="varying")
    return jax.lax.all_gather(shard, "data", axis=axis, tiled=True)


def layer(x_BSD, w):
    """Compute one layer for the sequences, heads and hidden features of one device."""
    x_BSD = checkpoint_name(x_BSD, "layer_input")
    gather = partial(gather_as, x_BSD.dtype)

    # attention, with the heads of this device
    h_BSD = normed(x_BSD, w["norm1_LD"])
    q_BSHC = jnp.einsum("BSD,DHC->BSHC", h_BSD, gather(w["q_LDHC"]))
    k_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BSD, gather(w["k_LDKC"]))
    v_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BSD, gather(w["v_LDKC"]))
    a_BSHC = jax.nn.dot_product_attention(q_BSHC, k_BTKC, v_BTKC, is_causal=True)
    partial_BSD = jnp.einsum("BSHC,HCD->BSD", a_BSHC, gather(w["o_LHCD"], axis=2))
    x_BSD += jax.lax.psum(partial_BSD, "model")

    # MLP, with the hidden features of this device
    h_BSD = normed(x_BSD, w["norm2_LD"])
    gate_BSF = jax.nn.silu(h_BSD @ gather(w["gate_LDF"]))
    h_BSF = gate_BSF * (h_BSD @ gather(w["up_LDF"]))
    partial_BSD = h_BSF @ gather(w["down_LFD"], axis=1)
    return x_BSD + jax.lax.psum(partial_BSD, "model"), None


def loss_of(weights, tokens_BS, config, policy):
    """Mean cross entropy of the next token, with the vocabulary sharded along `model`."""
    stack = {name: w for name, w in weights.items() if "_L" in name}
    x_BSD = gather_as(config.dtype, weights["embed_VD"], axis=1)[tokens_BS]
    x_BSD, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x_BSD, stack)
    x_BSD = normed(x_BSD, weights["norm_D"])
    logits_BSV = x_BSD @ gather_as(config.dtype, weights["head_DV"])
    logits_BSV = logits_BSV.astype("float32")  # of this device's part of V

    largest_BS = jax.lax.pmax(jax.lax.stop_gradient(logits_BSV).max(-1), "model")
    exp_BSV = jnp.exp(logits_BSV - largest_BS[..., None])
    log_sum_BS = largest_BS + jnp.log(jax.lax.psum(exp_BSV.sum(-1), "model"))
    part = logits_BSV.shape[-1]
    entry_V = jax.lax.axis_index("model") * part + jnp.arange(part)
    is_next_BSV = jnp.roll(tokens_BS, -1, axis=1)[..., None] == entry_V
    chosen_BS = jax.lax.psum(jnp.where(is_next_BSV, logits_BSV, 0).sum(-1), "model")
    return jax.lax.pmean((log_sum_BS - chosen_BS).mean(), ("replica", "data"))


adam = optax.scale_by_adam()


def step_on(mesh, config, B, S=4096, policy=None):
    """The jitted step, and the shapes of weights, moments and tokens on this mesh.

    No array is created, so the mesh may be one without devices. `policy` says what the backward
    pass may keep of a layer; by default it computes everything again from the layer's input.
    """

    def step(weights, moments, tokens_BS):
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens_BS, config, policy)
        updates, moments = adam.update(gradients, moments)
        weights = jax.tree.map(lambda w, u: w - 3e-4 * u, weights, updates)
        return weights, moments, loss

    def abstract_array(dims, spec, dtype="float32"):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))

    named = weights_of(config)
    specs = {name: spec for name, (_, spec) in named.items()}
    state, batch = (specs, optax.ScaleByAdamState(P(), specs, specs)), P(("replica", "data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*state, batch), out_specs=(*state, P()))
    weights = {name: abstract_array(*one) for name, one in named.items()}
    moments = optax.ScaleByAdamState(abstract_array((), P(), "int32"), weights, weights)
    tokens_BS = abstract_array((B, S), batch, "int32")
    return jax.jit(mapped, donate_argnums=(0, 1)), weights, moments, tokens_BS
