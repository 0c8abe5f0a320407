# @title One block: norm, two matmuls, residual (chapter 4)
import jax.numpy as jnp
from flax import nnx

def pinned(x, strategy, features=None):
    """Rows of the batch over `data`; features whole, or over the axis that is named."""
    if not strategy.pin:
        return x
    return jax.lax.with_sharding_constraint(x, jax.P("data", features))

class Block(nnx.Module):
    def __init__(self, config, strategy, rngs):
        init, fsdp = nnx.initializers.lecun_normal(), strategy.fsdp
        up, down = (config.D, config.F), (config.F, config.D)
        self.scale_D = nnx.Param(jnp.ones(config.D), out_sharding=(None,))
        self.w_DF = nnx.Param(init(rngs.params(), up), out_sharding=(fsdp, "model"))
        self.b_F = nnx.Param(jnp.zeros(config.F), out_sharding=("model",))
        self.w_FD = nnx.Param(init(rngs.params(), down), out_sharding=("model", fsdp))
        self.b_D = nnx.Param(jnp.zeros(config.D), out_sharding=(None,))

    def __call__(self, x_BD):
        x32_BD = x_BD.astype("float32")  # in bfloat16 a mean of squares is too coarse
        size_B1 = jnp.sqrt(jnp.mean(x32_BD**2, -1, keepdims=True) + 1e-6)
        norm_BD = (x32_BD / size_B1 * self.scale_D).astype(x_BD.dtype)
        h_BF = jax.nn.silu(norm_BD @ self.w_DF + self.b_F)
        return x_BD + h_BF @ self.w_FD + self.b_D
