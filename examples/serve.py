"""Serve a small Llama from sharded weights: prefill and decode with a KV cache.

    JAX_NUM_CPU_DEVICES=8 python examples/serve.py

on eight devices. The page https://many-devices.github.io/one-program/book/15-serving.html explains it
step by step. For a model of your own, replace `trained` by the dictionary that `merged` in llama.py
returns, and set the sizes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import llama
import meshscope as ms

P = jax.P
V, D, F, L, H, K, C = 256, 64, 96, 3, 8, 2, 16
B, T = 8, 32  # rows of the batch, positions of the cache
auto = (jax.sharding.AxisType.Auto,)
training = jax.make_mesh((8,), ("data",), axis_types=auto)
serving = jax.make_mesh((2, 2, 2), ("data", "kv", "group"), axis_types=auto * 3)
tensor = ("kv", "group")  # four devices that share a model: key-value heads, query heads
WEIGHTS = {
    "embed/embedding": ((V, D), P(tensor, None)),
    "blocks/norm_attention/scale": ((L, D), P()),
    "blocks/query/kernel": ((L, D, H * C), P(None, None, tensor)),
    "blocks/key/kernel": ((L, D, K * C), P(None, None, "kv")),
    "blocks/value/kernel": ((L, D, K * C), P(None, None, "kv")),
    "blocks/out/kernel": ((L, H * C, D), P(None, tensor, None)),
    "blocks/norm_hidden/scale": ((L, D), P()),
    "blocks/gate/kernel": ((L, D, F), P(None, None, tensor)),
    "blocks/up/kernel": ((L, D, F), P(None, None, tensor)),
    "blocks/down/kernel": ((L, F, D), P(None, tensor, None)),
    "norm/scale": ((D,), P()),
    "head/kernel": ((D, V), P(None, tensor)),
}
SPECS = {name: spec for name, (_, spec) in WEIGHTS.items()}
COPIES = P(None, "data", None, "kv", None)
POSITIONS = P(None, "data", "group", "kv", None)


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


def block(w, x_BSD, position_BS, attend):
    """Run one layer. `attend` returns its result and the new cache."""
    rows, length, _ = x_BSD.shape

    def heads(name):
        return (y_BSD @ w[f"blocks/{name}/kernel"]).reshape(rows, length, -1, C)

    # attention, with the heads of this device
    y_BSD = norm(x_BSD, w["blocks/norm_attention/scale"])
    q_BSHC = rotate(heads("query"), position_BS)
    k_BSKC = rotate(heads("key"), position_BS)
    mixed, cache = attend(q_BSHC, k_BSKC, heads("value"))
    partial_BSD = mixed.reshape(rows, length, -1) @ w["blocks/out/kernel"]
    x_BSD += jax.lax.psum(partial_BSD, tensor)

    # MLP, with the hidden features of this device
    y_BSD = norm(x_BSD, w["blocks/norm_hidden/scale"])
    gate_BSF = jax.nn.silu(y_BSD @ w["blocks/gate/kernel"])
    h_BSF = gate_BSF * (y_BSD @ w["blocks/up/kernel"])
    partial_BSD = h_BSF @ w["blocks/down/kernel"]
    return x_BSD + jax.lax.psum(partial_BSD, tensor), cache


def make_cache(spec, dtype="float32"):
    """Return zeros, created sharded."""
    sharding = jax.NamedSharding(serving, spec)
    zeros = jax.jit(lambda: jnp.zeros((L, B, T, K, C), dtype), out_shardings=sharding)
    return {"k": zeros(), "v": zeros()}


def write(cache, i, slot_BS, k_BSKC, v_BSKC):
    """Put keys and values of layer i into these slots; drop those beyond the end."""
    rows = jnp.arange(slot_BS.shape[0])[:, None]
    return {
        "k": cache["k"].at[i, rows, slot_BS].set(k_BSKC, mode="drop"),
        "v": cache["v"].at[i, rows, slot_BS].set(v_BSKC, mode="drop"),
    }


def attend_copies(q, k, v, cache, i, position_BS):
    """Attend to all positions up to one's own, with no communication."""
    cache = write(cache, i, position_BS, k, v)
    seen = jnp.arange(cache["k"].shape[2]) <= position_BS[:, None, :, None]
    mixed = jax.nn.dot_product_attention(q, cache["k"][i], cache["v"][i], mask=seen)
    return mixed, cache


def look_up(table_block_VD, tokens_BS, axes):
    """Return the embeddings of the tokens on every device: each is on the device that has its row."""
    size = table_block_VD.shape[0]
    row = tokens_BS - size * jax.lax.axis_index(axes)
    here = (row >= 0) & (row < size)
    x_partial_BSD = table_block_VD[jnp.where(here, row, 0)] * here[:, :, None]
    return jax.lax.psum(x_partial_BSD, axes)


def forward(attend, weights, cache, tokens_BS, start_B, count_B):
    """Return the logits of each row's last real token, and the new cache."""
    rows, length = tokens_BS.shape
    position_BS = start_B[:, None] + jnp.arange(length)

    def layer(carry, inputs):
        x_BSD, cache = carry
        w, i = inputs  # the layer's weights, and its number
        attend_here = partial(attend, cache=cache, i=i, position_BS=position_BS)
        return block(w, x_BSD, position_BS, attend_here), None

    x_BSD = look_up(weights["embed/embedding"], tokens_BS, tensor)
    blocks = {n: w for n, w in weights.items() if n.startswith("blocks/")}
    (x_BSD, cache), _ = jax.lax.scan(layer, (x_BSD, cache), (blocks, jnp.arange(L)))
    x_BD = x_BSD[jnp.arange(rows), count_B - 1]  # of the last real token
    return norm(x_BD, weights["norm/scale"]) @ weights["head/kernel"], cache


def make_forward(attend, spec):
    """Return the model on the serving mesh, with this attention and spec of a cache."""
    cache_spec, of_rows = {"k": spec, "v": spec}, P("data")
    mapped = jax.shard_map(
        partial(forward, attend),
        mesh=serving,
        in_specs=(SPECS, cache_spec, of_rows, of_rows, of_rows),
        out_specs=(P("data", tensor), cache_spec),
    )
    return jax.jit(mapped, donate_argnums=1)  # the cache is updated in place


def write_own(cache, i, position_BS, k_BSKC, v_BSKC):
    """Write only what belongs to the positions on this device."""
    size = cache["k"].shape[2]  # positions on each device
    slot_BS = position_BS - size * jax.lax.axis_index("group")
    here = (slot_BS >= 0) & (slot_BS < size)
    slot_BS = jnp.where(here, slot_BS, size)  # not -1, which is the last slot
    return write(cache, i, slot_BS, k_BSKC, v_BSKC)


def score_here(q_BSKGC, k_BTKC, position_BS):
    """Score the positions on this device, and hide those after a token's own."""
    size = k_BTKC.shape[1]
    score_BSKGT = C**-0.5 * jnp.einsum(
        "bskgc,btkc->bskgt", q_BSKGC, k_BTKC, preferred_element_type="float32"
    )
    position_T = size * jax.lax.axis_index("group") + jnp.arange(size)
    seen = position_T <= position_BS[:, :, None, None, None]
    return jnp.where(seen, score_BSKGT, -jnp.inf)


def softmax_over_group(score_BSKGT):
    """Take the softmax over the positions of all devices."""
    top = jax.lax.pmax(score_BSKGT.max(-1, keepdims=True), "group")
    part_BSKGT = jnp.exp(score_BSKGT - top)
    total = jax.lax.psum(part_BSKGT.sum(-1, keepdims=True), "group")
    return part_BSKGT / total


def attend_positions(q, k, v, cache, i, position_BS):
    """Attend to the positions on this device, and combine over `group`."""
    cache = write_own(cache, i, position_BS, k, v)
    k_BTKC, v_BTKC = cache["k"][i], cache["v"][i]  # T: the positions on this device

    # Gather the query heads of the group: G of them share a key-value head.
    q_BSHC = jax.lax.all_gather(q, "group", axis=2, tiled=True)
    rows, length, heads, _ = q_BSHC.shape
    q_BSKGC = q_BSHC.reshape(rows, length, k_BTKC.shape[2], -1, C)
    share_BSKGT = softmax_over_group(score_here(q_BSKGC, k_BTKC, position_BS))
    share_BSKGT = share_BSKGT.astype(v_BTKC.dtype)

    # Average the values. Sum over the group, and keep this device's heads.
    mixed_BSKGC = jnp.einsum("bskgt,btkc->bskgc", share_BSKGT, v_BTKC)
    mixed_BSHC = mixed_BSKGC.reshape(rows, length, heads, C)
    mixed = jax.lax.psum_scatter(mixed_BSHC, "group", scatter_dimension=2, tiled=True)
    return mixed, cache


def generate(model, weights, cache, prompts_BS, length_B, steps):
    """Return the most likely tokens, (B, steps), their logits, and the cache."""
    if length_B.max() + steps > T:
        raise ValueError(f"{length_B.max()} + {steps} tokens do not fit into {T}")
    tokens_BS, start_B, count_B = prompts_BS, np.zeros_like(length_B), length_B
    logits = []
    for _ in range(steps):
        logits_BV, cache = model(weights, cache, tokens_BS, start_B, count_B)
        logits.append(np.asarray(logits_BV))
        start_B = start_B + count_B
        tokens_BS = logits[-1].argmax(-1)[:, None]
        count_B = np.ones_like(count_B)  # decode: one real token in each row
    logits_BSV = np.stack(logits, 1)
    return logits_BSV.argmax(-1), logits_BSV, cache


def without_cache(weights):
    """Return the Flax model on one device, as a function from tokens (B, S) to logits (B, S, V)."""
    config = llama.Config(
        *(V, D, F, L, H, K, C),
        tied=False,
        epsilon=1e-5,
        theta=10_000.0,
        scaling=None,
        dtype="float32",
    )
    auto, one = (jax.sharding.AxisType.Auto,) * 2, jax.devices()[:1]
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=auto, devices=one)

    def make():
        return llama.Llama(config, nnx.Rngs(0))

    with jax.set_mesh(mesh):
        graphdef, state = nnx.get_abstract_model(make, mesh)
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


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare on TPU and GPU
    random = np.random.default_rng(0)
    trained = {}
    for name, (shape, _) in WEIGHTS.items():
        values = random.standard_normal(shape).astype("float32")
        if "scale" in name:
            values, spec = 1 + values / 10, P()
        else:
            values /= shape[-2] ** 0.5
            spec = P(*[None] * (len(shape) - 1), "data")  # the last dimension
        trained[name] = jax.device_put(values, jax.NamedSharding(training, spec))
    shardings = {name: jax.NamedSharding(serving, spec) for name, spec in SPECS.items()}
    weights = jax.jit(lambda weights: weights, out_shardings=shardings)(trained)
    print(f"{ms.memory(weights).bytes_per_device:,} bytes of weights on each device")
    length_B = np.array([5, 9, 3, 12, 7, 10, 4, 8], "int32")
    prompts_BS = random.integers(V, size=(B, 12)).astype("int32")
    expected, _ = generate_uncached(trained, prompts_BS, length_B, steps=8)
    for name, attend, spec in [
        ("copies", attend_copies, COPIES),
        ("positions", attend_positions, POSITIONS),
    ]:
        model, cache = make_forward(attend, spec), make_cache(spec)
        tokens, _, cache = generate(model, weights, cache, prompts_BS, length_B, 8)
        held, equal = ms.memory(cache).bytes_per_device, (tokens == expected).all()
        print(f"{name}: {held:,} bytes of cache on each device, same tokens: {equal}")


if __name__ == "__main__":
    main()
