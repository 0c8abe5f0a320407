"""Chapter 4's program: data, model, loss, optimizer and step, for any of its strategies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from many_devices.data import images_BI, labels_B

P = jax.P
auto = (jax.sharding.AxisType.Auto,) * 2


@dataclasses.dataclass(frozen=True)
class Strategy:
    data: int  # devices along `data`, which shards the batch
    model: int  # devices along `model`, which shards the weights
    fsdp: str | None = None  # "data" for FSDP: this axis shards the weights too

    def mesh(self):
        sizes = (self.data, self.model)
        return jax.make_mesh(sizes, ("data", "model"), axis_types=auto)


strategies = {
    "data parallel": Strategy(8, 1),
    "FSDP": Strategy(8, 1, fsdp="data"),
    "tensor parallel": Strategy(1, 8),
    "FSDP x tensor": Strategy(2, 4, fsdp="data"),
}


def shuffled(epoch, size=64):
    """Shuffle the training rows and split them into batches of `size`."""
    rows = np.random.default_rng(epoch).permutation(1437)
    whole = len(rows) // size * size  # without the last 29
    return rows[:whole].reshape(-1, size)


def batch_of(rows, mesh):
    """Make a sharded batch of these rows: the images and their labels."""
    arrays = images_BI[rows], labels_B[rows]
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("data")))


@dataclasses.dataclass(frozen=True)
class Config:
    L: int  # layers
    D: int  # model width
    F: int  # hidden width
    I: int = 64  # pixels of an image
    V: int = 10  # digits


tiny = Config(L=2, D=96, F=384)
init = nnx.initializers.lecun_normal()


def rms_norm(x_BD, scale_D):
    """Divide each row by its root mean square, and multiply by learned scales."""
    rms_B1 = jnp.sqrt(jnp.mean(x_BD**2, axis=-1, keepdims=True) + 1e-6)
    return x_BD / rms_B1 * scale_D


def pinned(x_BD):
    """Constrain an activation: the batch along `data`, its features whole."""
    return jax.lax.with_sharding_constraint(x_BD, P("data"))


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


class Model(nnx.Module):
    def __init__(self, config, strategy, rngs):
        I, D, V, fsdp = config.I, config.D, config.V, strategy.fsdp
        self.w_ID = nnx.Param(init(rngs.params(), (I, D)), out_sharding=(None, fsdp))
        self.blocks = nnx.List([Block(config, strategy, rngs) for _ in range(config.L)])
        self.w_DV = nnx.Param(init(rngs.params(), (D, V)), out_sharding=(fsdp, None))

    def __call__(self, x_BI):
        x_BD = pinned(x_BI @ self.w_ID)
        for block in self.blocks:
            x_BD = pinned(block(x_BD))
        return pinned(x_BD @ self.w_DV)


def loss_of(model, batch):
    """Mean cross-entropy of the labels."""
    x_BI, labels_B = batch
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(model(x_BI), labels_B).mean()


adamw = optax.adamw(1e-3)


def make(config, strategy):
    """A new model and its optimizer."""
    model = Model(config, strategy, nnx.Rngs(0))
    return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)  # trains the Params


def step(model, optimizer, batch):
    """One training step: everything that changed, and the loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return model, optimizer, loss


def compiled_step(step, model, optimizer):
    """The jitted step: each output keeps its input's sharding and reuses its memory."""
    shardings = jax.tree.map(lambda array: array.sharding, (model, optimizer))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
