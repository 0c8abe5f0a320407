"""The block of chapter 3, which has two weights, and a stack of such blocks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

init = nnx.initializers.lecun_normal()


@dataclass(frozen=True)
class Config:
    L: int  # layers
    D: int  # model width
    F: int  # hidden width
    axes_DF: tuple = ("data", "model")  # the annotation of w_DF
    axes_FD: tuple = ("model", "data")  # the annotation of w_FD


small = Config(L=6, D=64, F=512)
large = Config(L=32, D=4096, F=16384)


class Block(nnx.Module):
    def __init__(self, config, rngs):
        D, F = config.D, config.F
        self.w_DF = nnx.Param(init(rngs.params(), (D, F)), out_sharding=config.axes_DF)
        self.w_FD = nnx.Param(init(rngs.params(), (F, D)), out_sharding=config.axes_FD)

    def __call__(self, x_BD):
        h_BF = jnp.tanh(x_BD @ self.w_DF)
        return h_BF @ self.w_FD


def make_stack(config):
    """One Block whose weights have a first dimension L, the layers."""

    def make_layer(rngs):
        return Block(config, rngs)

    over_layers = nnx.vmap(make_layer, transform_metadata={nnx.PARTITION_NAME: None})
    return over_layers(nnx.Rngs(0).split(config.L))


def run_stack(stack, x_BD):
    """One layer after another."""

    def layer(x_BD, block):
        return block(x_BD), None

    x_BD, _ = jax.lax.scan(layer, x_BD, stack)
    return x_BD
