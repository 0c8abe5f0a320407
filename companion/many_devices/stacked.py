"""The model of chapter 4 with its blocks in a stack, for large models, and with more to choose.

`Strategy` has three fields more than chapter 4's, each with a default that changes nothing: `pin` and
`use` are introduced in chapter 9, `remat` on the page about memory. Norm and loss compute in float32
for models in bfloat16, the ten logits are padded to sixteen, which eight devices divide, and rows have
weights, for batches that are padded too.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

init = nnx.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True)
class Config:
    L: int  # layers
    D: int  # model width
    F: int  # hidden width
    I: int = 64  # pixels of an image
    V: int = 16  # ten classes, padded to a number that eight devices divide


def unchanged(x):
    return x


@dataclasses.dataclass(frozen=True)
class Strategy:
    data: int  # devices along `data`, which shards the batch
    model: int  # devices along `model`, which shards the weights
    fsdp: str | None = None  # "data": weights are sharded along it as well, FSDP
    pin: bool = True  # activations stay sharded as the strategy says
    use: Callable = unchanged  # what weights pass through before use
    remat: Callable = unchanged  # around a layer; jax.checkpoint computes it again

    def mesh(self):
        axis_types, count = (jax.sharding.AxisType.Auto,) * 2, self.data * self.model
        return jax.make_mesh(
            (self.data, self.model),
            ("data", "model"),
            axis_types=axis_types,
            devices=jax.devices()[:count],
        )


tiny, large = Config(L=4, D=96, F=384), Config(L=32, D=4096, F=16384)
strategies = {
    "one device": Strategy(1, 1),
    "data parallel": Strategy(8, 1),
    "FSDP": Strategy(8, 1, fsdp="data"),
    "tensor parallel": Strategy(1, 8),
    "FSDP x tensor": Strategy(2, 4, fsdp="data"),
}


def pinned(x, strategy, features=None):
    """Rows of the batch over `data`; features whole, or over the axis that is named."""
    if not strategy.pin:
        return x
    return jax.lax.with_sharding_constraint(x, jax.P("data", features))


def rms_norm(x_BD, scale_D):
    """Divide each row by its root mean square, in float32, and multiply by learned scales."""
    x32_BD = x_BD.astype("float32")
    rms_B1 = jnp.sqrt(jnp.mean(x32_BD**2, -1, keepdims=True) + 1e-6)
    return (x32_BD / rms_B1 * scale_D).astype(x_BD.dtype)


class Block(nnx.Module):
    def __init__(self, config, strategy, rngs):
        D, F, fsdp = config.D, config.F, strategy.fsdp
        self.w_DF = nnx.Param(init(rngs.params(), (D, F)), out_sharding=(fsdp, "model"))
        self.w_FD = nnx.Param(init(rngs.params(), (F, D)), out_sharding=("model", fsdp))
        self.b_F = nnx.Param(jnp.zeros(F), out_sharding=("model",))
        self.b_D = nnx.Param(jnp.zeros(D), out_sharding=(None,))
        self.scale_D = nnx.Param(jnp.ones(D), out_sharding=(None,))

    def __call__(self, x_BD):
        norm_BD = rms_norm(x_BD, self.scale_D)
        h_BF = jax.nn.silu(norm_BD @ self.w_DF + self.b_F)
        return x_BD + h_BF @ self.w_FD + self.b_D


def make_stack(config, strategy, rngs):
    """One Block whose weights have a first dimension L, the layers."""

    def make_layer(rngs):
        return Block(config, strategy, rngs)

    over_layers = nnx.vmap(make_layer, transform_metadata={nnx.PARTITION_NAME: None})
    return over_layers(rngs.split(config.L))


class Model(nnx.Module):
    def __init__(self, config, strategy, rngs):
        I, D, V, fsdp = config.I, config.D, config.V, strategy.fsdp
        self.w_ID = nnx.Param(init(rngs.params(), (I, D)), out_sharding=("model", fsdp))
        self.blocks = make_stack(config, strategy, rngs)
        self.w_DV = nnx.Param(init(rngs.params(), (D, V)), out_sharding=(fsdp, "model"))
        self.strategy = strategy

    def __call__(self, x_BI):
        use, remat = self.strategy.use, self.strategy.remat  # by default: no change
        w_ID, w_DV = use(self.w_ID), use(self.w_DV)
        x_BD = pinned(x_BI.astype(w_ID.dtype) @ w_ID, self.strategy)

        def layer(x_BD, block):
            return pinned(use(block)(x_BD), self.strategy), None

        x_BD, _ = jax.lax.scan(remat(layer), x_BD, self.blocks)
        return pinned(x_BD @ w_DV, self.strategy, features="model")


def loss_of(model, batch):
    """Mean over rows by weight; logits beyond the ten classes are masked."""
    x_BI, labels_B, weights_B = batch
    logits_BV = model(x_BI).astype("float32")
    class_V = jnp.arange(logits_BV.shape[-1])
    digits_BV = jnp.where(class_V < 10, logits_BV, -jnp.inf)
    log_p_BV = jax.nn.log_softmax(digits_BV)
    is_label_BV = labels_B[:, None] == class_V  # each device asks its own classes
    correct_B = jnp.where(is_label_BV, log_p_BV, 0).sum(-1)
    return -(correct_B * weights_B).sum() / weights_B.sum()
