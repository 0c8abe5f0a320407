"""A program that JAX 0.10.2 and later releases compile differently, for the page "How it is tested".

    python tests/meshscope/upgraded.py    prints its snapshot

fixtures/upgraded-jax-0.10.2.txt is what JAX 0.10.2 prints.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

P = jax.P
L, B, D, F = 4, 16, 64, 256


def layers(weights, x_BD):
    """The mean square of what four layers make, whose weights are sharded over all eight devices."""

    def layer(h_BD, pair):
        w_DF, v_FD = pair
        out_BD = jnp.tanh(h_BD @ w_DF) @ v_FD
        return jax.lax.with_sharding_constraint(out_BD, P("data")), None

    out_BD, _ = jax.lax.scan(jax.checkpoint(layer), x_BD, weights)
    return (out_BD**2).mean()


def program():
    """Its gradient, compiled for CPU."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def shape(spec, *dims):
        return jax.ShapeDtypeStruct(dims, "float32", sharding=jax.NamedSharding(mesh, spec))

    every = P(None, ("data", "model"))
    with jax.set_mesh(mesh):
        weights = shape(every, L, D, F), shape(every, L, F, D)
        return jax.jit(jax.grad(layers)).lower(weights, shape(P("data"), B, D)).compile()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from meshscope import testing

    print(testing.snapshot(program()), end="")
