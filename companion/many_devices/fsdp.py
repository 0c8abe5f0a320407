"""Chapter 9's FSDP by hand, for the model of chapter 4: in `Strategy`, `use` is `gather`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from many_devices.data import images_BI, labels_B
from many_devices.model import Model, Strategy, loss_of

P = jax.P


def fsdp_spec(shape, devices, stacked=False):
    """Shard the largest dimension that the devices divide; a small weight stays whole.

    The shape of a stacked weight begins with the layers, which are never sharded.
    """
    first = 1 if stacked else 0
    if np.prod(shape[first:]) < 1024:
        return P()
    divisible = [i for i in range(first, len(shape)) if shape[i] % devices == 0]
    if not divisible:
        return P()
    largest = max(divisible, key=lambda i: shape[i])
    entries = [None] * len(shape)
    entries[largest] = "data"
    return P(*entries)


def gather(module):
    """The module, or one variable, with every sharded weight whole."""

    def gather_weight(weight):
        spec = weight.out_sharding
        if "data" not in spec:
            return weight
        axis = spec.index("data") - len(spec)  # from the end: in a scan L is gone
        block = weight[...]
        whole = jax.lax.all_gather(block, "data", axis=axis, tiled=True)
        return weight.replace(whole)  # the same variable with another array

    def is_weight(x):
        return isinstance(x, nnx.Variable)

    return jax.tree.map(gather_weight, module, is_leaf=is_weight)


def global_norm(gradient):
    """The norm of all gradients together, inside shard_map."""
    sharded, whole = 0.0, 0.0
    for _, weight in nnx.to_flat_state(nnx.state(gradient)):
        square = jnp.sum(weight[...] ** 2)
        if "data" in weight.out_sharding:
            sharded += square  # other devices have the rest
        else:
            whole += square  # the same on all devices
    return jnp.sqrt(whole + jax.lax.psum(sharded, "data"))


ddp = Strategy(8, 1, pin=False)
fsdp = Strategy(8, 1, fsdp="data", pin=False, use=gather)


def annotated(config, strategy, devices):
    """Chapter 4's model, each weight annotated with its spec; without FSDP with P()."""
    with nnx.use_eager_sharding(False):  # the annotations that it is made with are replaced
        model = Model(config, strategy, nnx.Rngs(0))
    for path, weight in nnx.to_flat_state(nnx.state(model)):
        spec = fsdp_spec(weight.shape, devices, stacked="blocks" in path)
        weight.set_metadata(out_sharding=spec if strategy.fsdp else P())
    return model


def constructor(config, strategy, mesh):
    """A compiled constructor of the model: each device creates only what it stores."""
    make = partial(annotated, config, strategy, mesh.size)
    specs = nnx.get_partition_spec(jax.eval_shape(make))
    shardings = jax.tree.map(partial(jax.NamedSharding, mesh), specs)
    return jax.jit(make, out_shardings=shardings)


def digits_from(first):
    """64 images, their labels, and a weight for each row."""
    rows = slice(first, first + 64)
    return images_BI[rows], labels_B[rows], np.ones(64, "float32")


def mean_loss(model, batch_block):
    """The loss of the whole batch, inside shard_map."""
    return jax.lax.pmean(loss_of(model, batch_block), "data")
