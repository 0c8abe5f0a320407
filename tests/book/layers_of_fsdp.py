"""For tests of FSDP: the gradient of a stack of layers, how often it gathers and multiplies, and the
weights of the large model.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import nnx

from many_devices.stacked import Model, large, strategies

P = jax.P
LAYERS, D = 4, 64


def free_gathers(primitive, *_, **__):
    """A policy that frees what was gathered, and keeps the rest."""
    return primitive.name != "all_gather"


REMATS = {
    "kept": lambda layer: layer,
    "freed by a policy": partial(jax.checkpoint, policy=free_gathers),
    "jax.checkpoint": jax.checkpoint,
}


def gather(piece):
    return jax.lax.all_gather(piece, "data", axis=0, tiled=True)


def gradient_of_stack(remat, gather=gather):
    """The gradient of a stack of layers by FSDP on eight devices, and its inputs as shapes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def layer(x_BD, w_block_DD):
        return jnp.tanh(x_BD @ gather(w_block_DD)), None

    def loss(w_LDD, x_BD):
        y_BD, _ = jax.lax.scan(remat(layer), x_BD, w_LDD)
        return jax.lax.pmean((y_BD**2).mean(), "data")

    pieces = P(None, "data")
    gradient = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(pieces, P("data")), out_specs=pieces
    )
    shapes = [(LAYERS, D, D), (64, D)]
    return gradient, [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def in_one_layer(remat):
    """How often the gradient gathers, scatters and multiplies for one layer, forward and backward."""
    gradient, inputs = gradient_of_stack(remat)
    text = str(jax.make_jaxpr(gradient)(*inputs))
    names = {"gathers": "all_gather", "scatters": "reduce_scatter", "matmuls": "dot_general"}
    return {name: text.count(f"{primitive}[") for name, primitive in names.items()}


@cache
def large_weights():
    """Chapter 4's model in the size of the large one, as shapes."""
    with nnx.use_eager_sharding(False):
        return jax.eval_shape(lambda: Model(large, strategies["one device"], nnx.Rngs(0)))
