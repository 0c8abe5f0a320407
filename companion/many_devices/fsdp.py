"""Chapter 9's FSDP by hand, for the model of chapter 4: in `Strategy`, `use` is `gather`."""

from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from many_devices.data import images_BI, labels_B
from many_devices.stacked import Model, Strategy, loss_of

P = jax.P


def fsdp_spec(shape, devices, stacked=False):
    """Shard the largest dimension that `devices` divides; small weights stay whole."""
    first = 1 if stacked else 0  # the first dimension of a stack is L
    divisible = [i for i in range(first, len(shape)) if shape[i] % devices == 0]
    if not divisible or np.prod(shape[first:]) < 1024:
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


Trained = namedtuple("Trained", "weights momentum losses")


def train(loss_and_gradient, weights, dtype="float32"):
    """Twenty steps of SGD with momentum, each on 64 images of this dtype."""
    sgd = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(weights, momentum, batch):
        loss, gradient = loss_and_gradient(weights, batch)
        updates, momentum = sgd.update(gradient, momentum)
        return optax.apply_updates(weights, updates), momentum, loss

    momentum, losses = sgd.init(weights), []
    for number in range(20):
        x_BI, labels_B, _ = digits_from(64 * number)
        weights, momentum, loss = step(weights, momentum, (x_BI.astype(dtype), labels_B))
        losses.append(float(loss))
    return Trained(weights, momentum, losses)
