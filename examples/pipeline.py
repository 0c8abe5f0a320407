"""A pipeline of layers: `ppermute` in a `scan` inside `jax.shard_map`, differentiated by JAX.

    python examples/pipeline.py                          on the devices JAX finds
    JAX_NUM_CPU_DEVICES=4 python examples/pipeline.py    on four simulated ones

The page https://many-devices.github.io/one-program/book/12-pipeline.html explains it. To use it for
a model of your own, replace `Block` and `error`; the input and output of a stage must have the
same shape.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

P = jax.P


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x_BD):
        return x_BD + self.down(jnp.tanh(self.up(x_BD)))


def run_layers(layers, x_BD):
    def layer(x_BD, block):
        return block(x_BD), None

    y_BD, _ = jax.lax.scan(layer, x_BD, layers)
    return y_BD


def error(y_BD, target_BD):
    return jnp.mean((y_BD - target_BD) ** 2)


def make_pipeline(mesh):
    """The mean error over microbatches; the stack of layers is sharded along the axis `stage`."""
    stages = mesh.shape["stage"]
    to_right = [(s, s + 1) for s in range(stages - 1)]

    @jax.shard_map(mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=P())
    def pipeline_loss(layers_block, x_MBD, target_MBD):
        M = len(x_MBD)
        stage = jax.lax.axis_index("stage")

        def tick(from_left_BD, t):
            new_BD = x_MBD[jnp.minimum(t, M - 1)]
            x_BD = jnp.where(stage == 0, new_BD, from_left_BD)
            y_BD = run_layers(layers_block, x_BD)
            return jax.lax.ppermute(y_BD, "stage", to_right), y_BD

        start_BD = jax.lax.pcast(x_MBD[0], "stage", to="varying")  # a real input
        _, outputs = jax.lax.scan(tick, start_BD, jnp.arange(M + stages - 1))
        y_MBD = outputs[stages - 1 :]  # on the last stage, the outputs of all microbatches
        loss = jnp.where(stage == stages - 1, error(y_MBD, target_MBD), 0)
        return jax.lax.psum(loss, "stage")

    return pipeline_loss


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare on TPU and GPU
    stages = len(jax.devices())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((stages,), ("stage",), axis_types=auto)
    M, B, D = 2 * stages, 8, 32
    layers = jax.vmap(Block)(nnx.Rngs(0).split(2 * stages))  # one Block with a first dimension
    x_MBD = jax.random.normal(jax.random.key(0), (M, B, D))
    target_MBD = jnp.sin(x_MBD)

    def single_loss(layers):
        y_BD = run_layers(layers, x_MBD.reshape(-1, D))
        return error(y_BD, target_MBD.reshape(-1, D))

    loss, gradient = jax.jit(jax.value_and_grad(make_pipeline(mesh)))(layers, x_MBD, target_MBD)
    true_loss, true_gradient = jax.jit(jax.value_and_grad(single_loss))(layers)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-5)

    def assert_close(found, true):
        atol = 1e-4 * np.abs(true).max()  # entries near zero are sums of large ones
        np.testing.assert_allclose(found, true, rtol=1e-4, atol=atol)

    jax.tree.map(assert_close, gradient, true_gradient)
    bubble = (stages - 1) / (M + stages - 1)
    print(f"{stages} stages, {M} microbatches, bubble {bubble:.1%}: loss {loss:.4f}")
    print("loss and gradient are those of one device")


if __name__ == "__main__":
    main()
