"""What the chapter on serving imports: a Llama, its parts for `shard_map`, and runs without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from many_devices import llama

P = jax.P
CONFIG = llama.Config(
    *(256, 64, 96, 3, 8, 2, 16),  # V, D, F, L, H, K, C
    tied=False,
    epsilon=1e-5,
    theta=10_000.0,
    dtype="float32",
)


def abstract_llama(mesh):
    """Return the graph of the Flax model, and its state: shapes with their shardings on this mesh."""

    def make():
        return llama.Llama(CONFIG, nnx.Rngs(0))

    with jax.set_mesh(mesh):
        return nnx.get_abstract_model(make, mesh)


def random_llama():
    """Return the Flax model with random weights, sharded by FSDP over all devices."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.device_count(), 1), ("data", "model"), axis_types=auto)
    graphdef, state = abstract_llama(mesh)
    random = np.random.default_rng(0)
    for path, variable in llama.by_path(state).items():
        values = random.standard_normal(variable.shape).astype("float32")
        values = 1 + values / 10 if "scale" in path else values / variable.shape[-2] ** 0.5
        variable.set_value(jax.device_put(values, variable.sharding))
    return nnx.merge(graphdef, state)


def norm(x, scale):
    """Divide each vector by the root of its mean square, and scale it (RMSNorm)."""
    x32 = x.astype("float32")  # for models in bfloat16
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)
    return (normed * scale).astype(x.dtype)


def rotate(x_BSHC, position_BS):
    """Turn the features of each head by an angle that grows with the position."""
    C = x_BSHC.shape[-1]
    turn = 10_000.0 ** (-jnp.arange(0, C, 2) / C)
    angle = position_BS[:, :, None, None] * turn
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x_BSHC, 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x_BSHC.dtype)


def look_up(table_block_VD, tokens_BS, axes):
    """Return the embeddings of the tokens on every device: each is on the device that has its row."""
    size = table_block_VD.shape[0]
    row = tokens_BS - size * jax.lax.axis_index(axes)
    here = (row >= 0) & (row < size)
    x_partial_BSD = table_block_VD[jnp.where(here, row, 0)] * here[:, :, None]
    return jax.lax.psum(x_partial_BSD, axes)


def mlp(w, x_BSD):
    """Run the MLP, with the hidden features of this device."""
    y_BSD = norm(x_BSD, w["blocks/norm_hidden/scale"])
    gate_BSF = jax.nn.silu(y_BSD @ w["blocks/gate/kernel"])
    h_BSF = gate_BSF * (y_BSD @ w["blocks/up/kernel"])
    partial_BSD = h_BSF @ w["blocks/down/kernel"]
    return x_BSD + jax.lax.psum(partial_BSD, "model")


def write(cache, i, slot_BS, k_BSKC, v_BSKC):
    """Put keys and values of layer i into these slots; drop those beyond the end."""
    rows = jnp.arange(slot_BS.shape[0])[:, None]
    return {
        "k": cache["k"].at[i, rows, slot_BS].set(k_BSKC, mode="drop"),
        "v": cache["v"].at[i, rows, slot_BS].set(v_BSKC, mode="drop"),
    }


def attend(q, k, v, cache, i, position_BS):
    """Write keys and values; attend to all positions up to one's own."""
    cache = write(cache, i, position_BS, k, v)
    seen = jnp.arange(cache["k"].shape[2]) <= position_BS[:, None, :, None]
    mixed = jax.nn.dot_product_attention(q, cache["k"][i], cache["v"][i], mask=seen)
    return mixed, cache


def without_cache(weights):
    """Return the Flax model on one device, as a function from tokens (B, S) to logits (B, S, V)."""
    auto, one = (jax.sharding.AxisType.Auto,) * 2, jax.devices()[:1]
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=auto, devices=one)
    graphdef, state = abstract_llama(mesh)
    for path, variable in llama.by_path(state).items():
        variable.set_value(jax.device_put(weights[path], jax.NamedSharding(mesh, P())))
    model = jax.jit(lambda state, tokens_BS: nnx.merge(graphdef, state)(tokens_BS))

    def logits_of(tokens_BS):
        with jax.set_mesh(mesh):
            return np.asarray(model(state, np.asarray(tokens_BS)))

    return logits_of


def generate_uncached(weights, prompts_BS, length_B, steps):
    """Return the most likely tokens, (B, steps), and their logits: all positions, at every step."""
    logits_of = without_cache(weights)
    tokens_BT = np.pad(prompts_BS, [(0, 0), (0, steps)])
    row, logits = np.arange(len(length_B)), []
    for step in range(steps):
        last = length_B + step - 1
        logits.append(logits_of(tokens_BT)[row, last])
        tokens_BT[row, last + 1] = logits[-1].argmax(-1)
    logits_BSV = np.stack(logits, 1)
    return logits_BSV.argmax(-1), logits_BSV
