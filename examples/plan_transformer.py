"""Which mesh and which table for a dense transformer? A template for `python -m meshscope plan`.

    python -m meshscope plan examples/plan_transformer.py --devices 64 --chip h100

It has the sizes of Llama 3 8B. Nothing is allocated: every candidate is traced and compiled from
shapes, in a second or two, on simulated devices. To plan for your own model, copy this file and
change what is above `step`; the command reads `step`, TABLES and AXES.

Names end in their dimensions: B sequences, S length (T where it is attended to), D model, F hidden,
K kv heads, G query heads for each of them, C head size, V vocabulary. Rotary embeddings are left
out, because they have no weights and take almost no time.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshscope as ms

P = jax.P


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of Llama 3 8B (https://arxiv.org/abs/2407.21783, table 3), and of a batch."""

    L: int = 32  # layers
    D: int = 4096
    F: int = 14336
    K: int = 8
    G: int = 4  # so there are 32 heads for queries
    C: int = 128
    V: int = 128256
    B: int = 128  # sequences in the whole batch
    S: int = 4096


CONFIG = Config()

# A table says which mesh axis shards which dimension; what it does not name stays whole. The command
# tries each with every mesh of `data` x `model` devices on which it says something new.
AXES = ("data", "model")  # the last numbers devices one by one: on GPUs it stays inside a node
INSIDE = {"heads": "model", "hidden": "model", "vocab": "model"}
TABLES = {
    "data parallel": {"batch": "data"},
    "FSDP": {"batch": "data", "embed": "data"},
    "tensor parallel": INSIDE,
    "FSDP x tensor": {"batch": "data", "embed": "data", **INSIDE},
    "HSDP": {"batch": ("data", "model"), "embed": "model"},  # shards inside, copies outside
}


def weight(rngs, rules, shape, *names):
    """A float32 weight, sharded as the rules say."""
    init = 0.02 * jax.random.normal(rngs.params(), shape)
    return nnx.Param(init, out_sharding=tuple(rules.get(name) for name in names))


def cast(weight):
    """A weight in the dtype of the computation."""
    return weight[...].astype(jnp.bfloat16)


def constrain(x, rules, *names):
    """Pin an activation, so that weights move and not activations where a table says so."""
    return jax.lax.with_sharding_constraint(x, P(*(rules.get(name) for name in names)))


def normed(x_BSD, scale_D):
    x32_BSD = x_BSD.astype(jnp.float32)
    size_BS1 = jnp.sqrt(jnp.mean(x32_BSD**2, -1, keepdims=True) + 1e-5)
    return (x32_BSD / size_BS1 * scale_D).astype(x_BSD.dtype)


class Block(nnx.Module):
    def __init__(self, config, rules, rngs):
        D, F, K, G, C = config.D, config.F, config.K, config.G, config.C
        self.norm1_D = nnx.Param(jnp.ones(D), out_sharding=(None,))
        self.norm2_D = nnx.Param(jnp.ones(D), out_sharding=(None,))
        self.q_DKGC = weight(rngs, rules, (D, K, G, C), "embed", "heads", None, None)
        self.k_DKC = weight(rngs, rules, (D, K, C), "embed", "heads", None)
        self.v_DKC = weight(rngs, rules, (D, K, C), "embed", "heads", None)
        self.o_KGCD = weight(rngs, rules, (K, G, C, D), "heads", None, None, "embed")
        self.gate_DF = weight(rngs, rules, (D, F), "embed", "hidden")
        self.up_DF = weight(rngs, rules, (D, F), "embed", "hidden")
        self.down_FD = weight(rngs, rules, (F, D), "hidden", "embed")

    def __call__(self, x_BSD, rules):
        h_BSD = normed(x_BSD, self.norm1_D)
        q_BSKGC = jnp.einsum("BSD,DKGC->BSKGC", h_BSD, cast(self.q_DKGC))
        k_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BSD, cast(self.k_DKC))
        v_BTKC = jnp.einsum("BTD,DKC->BTKC", h_BSD, cast(self.v_DKC))
        scores_BKGST = jnp.einsum("BSKGC,BTKC->BKGST", q_BSKGC, k_BTKC).astype(jnp.float32)
        S = x_BSD.shape[1]
        causal_ST = jnp.tril(jnp.ones((S, S), bool))
        scores_BKGST = jnp.where(causal_ST, scores_BKGST * q_BSKGC.shape[-1] ** -0.5, -1e30)
        a_BKGST = jax.nn.softmax(scores_BKGST).astype(x_BSD.dtype)
        y_BSKGC = jnp.einsum("BKGST,BTKC->BSKGC", a_BKGST, v_BTKC)
        x_BSD += jnp.einsum("BSKGC,KGCD->BSD", y_BSKGC, cast(self.o_KGCD))
        x_BSD = constrain(x_BSD, rules, "batch", None, None)

        h_BSD = normed(x_BSD, self.norm2_D)
        h_BSF = jax.nn.silu(h_BSD @ cast(self.gate_DF)) * (h_BSD @ cast(self.up_DF))
        x_BSD += h_BSF @ cast(self.down_FD)
        return constrain(x_BSD, rules, "batch", None, None)


class Transformer(nnx.Module):
    def __init__(self, config, rules, rngs):
        V, D = config.V, config.D
        self.embed_VD = weight(rngs, rules, (V, D), "vocab", "embed")
        stack = nnx.vmap(
            lambda rngs: Block(config, rules, rngs), transform_metadata={nnx.PARTITION_NAME: None}
        )
        self.blocks = stack(rngs.split(config.L))
        self.norm_D = nnx.Param(jnp.ones(D), out_sharding=(None,))
        self.head_DV = weight(rngs, rules, (D, V), "embed", "vocab")

    def __call__(self, tokens_BS, rules):
        """Logits in float32. A layer is computed again in the backward pass: only its input stays."""

        @jax.checkpoint
        def layer(x_BSD, block):
            return block(x_BSD, rules), None

        x_BSD = constrain(cast(self.embed_VD)[tokens_BS], rules, "batch", None, None)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, self.blocks)
        logits_BSV = normed(x_BSD, self.norm_D) @ cast(self.head_DV)
        return constrain(logits_BSV, rules, "batch", None, "vocab").astype(jnp.float32)


def loss_of(model, tokens_BS, rules):
    logits_BSV = model(tokens_BS, rules)
    next_BS = jnp.roll(tokens_BS, -1, axis=1)
    # Comparing, and not indexing: an index into sharded logits would gather them.
    is_next_BSV = next_BS[..., None] == jnp.arange(logits_BSV.shape[-1])
    chosen_BS = jnp.where(is_next_BSV, logits_BSV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_BSV, axis=-1) - chosen_BS).mean()


def activations(config, mesh, rules):
    """What tensor parallelism adds up, in bytes: all-reduces of the residual stream, in bfloat16.

    A layer has two sums forward and two backward. To compute it again takes one of the forward sums
    once more, that of attention, because the sum at the end of the layer is not needed. Around the
    layers there is one sum for the embedding, and one for the gradient of the last layer's output.
    """
    if "heads" not in rules:
        return {}
    batch = rules.get("batch") or ()
    shards = math.prod(mesh.shape[axis] for axis in ((batch,) if isinstance(batch, str) else batch))
    rows = config.B * config.S // shards
    return {("all-reduce", rules["heads"]): (5 * config.L + 2) * rows * config.D * 2}


optimizer_rule = optax.adamw(3e-4)


def step(mesh, rules, config=CONFIG):
    """The training step on this mesh with these rules, traced from shapes; and what it should send."""

    def make():
        model = Transformer(config, rules, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer_rule, wrt=nnx.Param)

    def train_step(model, optimizer, tokens_BS):
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens_BS, rules)
        optimizer.update(model, gradients)
        return model, optimizer, loss

    model, optimizer = nnx.merge(*nnx.get_abstract_model(make, mesh))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (model, optimizer))
    by_sequence = jax.NamedSharding(mesh, P(rules.get("batch")))
    tokens_BS = jax.ShapeDtypeStruct((config.B, config.S), "int32", sharding=by_sequence)
    jitted = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    return ms.Step(
        jitted.trace(model, optimizer, tokens_BS),
        weights=nnx.state(model, nnx.Param),
        sent_as="bfloat16",
        batch=rules.get("batch"),
        activations=activations(config, mesh, rules),
    )
