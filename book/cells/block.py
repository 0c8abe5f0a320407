# @title One block: norm, two matmuls, residual (explained in chapter 4)
import jax.numpy as jnp
from flax import nnx

def pinned(x, strategy):
    """Rows of the batch over `data`, every feature on the device that has the row."""
    return jax.lax.with_sharding_constraint(x, jax.P("data")) if strategy.pin else x

class Block(nnx.Module):
    def __init__(self, config, strategy, rngs):
        init, rows = nnx.initializers.lecun_normal(), strategy.rows
        up, down = (config.D, config.F), (config.F, config.D)
        self.scale_D = nnx.Param(jnp.ones(config.D), out_sharding=(None,))
        self.w_DF = nnx.Param(init(rngs.params(), up), out_sharding=(rows, "model"))
        self.b_F = nnx.Param(jnp.zeros(config.F), out_sharding=("model",))
        self.w_FD = nnx.Param(init(rngs.params(), down), out_sharding=("model", rows))
        self.b_D = nnx.Param(jnp.zeros(config.D), out_sharding=(None,))

    def __call__(self, x_BD):
        size = jnp.sqrt(jnp.mean(x_BD**2, -1, keepdims=True) + 1e-6)
        h_BF = jax.nn.silu(x_BD / size * self.scale_D @ self.w_DF + self.b_F)
        return x_BD + h_BF @ self.w_FD + self.b_D
