"""FSDP by hand: train a Flax NNX model whose weights are gathered inside `jax.shard_map`.

    python examples/fsdp_by_hand.py                         on the devices JAX finds
    JAX_NUM_CPU_DEVICES=8 python examples/fsdp_by_hand.py   on eight simulated ones

The page https://many-devices.github.io/one-program/book/09-fsdp-model.html explains it step by step.
Here the layers are in a stack, so that JAX compiles only one of them. To use it for a model of your own,
call each part of the model through `gather_and_call`, and put the name of your stack into `make`.
"""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import meshscope as ms

P = jax.P
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)


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


def is_weight(x):
    return isinstance(x, nnx.Variable)


def gather(module):
    """The module (or a single variable) with every sharded weight gathered."""

    def gather_weight(weight):
        spec = weight.out_sharding
        if "data" not in spec:
            return weight
        axis = spec.index("data") - len(spec)  # from the end, because scan drops L
        block = weight[...]  # the array inside the variable
        whole = jax.lax.all_gather(block, "data", axis=axis, tiled=True)
        return weight.replace(whole)  # the same variable with the whole array

    return jax.tree.map(gather_weight, module, is_leaf=is_weight)


@jax.checkpoint  # free the gathered weights after use
def gather_and_call(layer, x):
    return gather(layer)(x)


class Layer(nnx.Module):
    def __init__(self, D, F, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x_BD):
        h_BF = jax.nn.silu(self.up(self.norm(x_BD)))
        return x_BD + self.down(h_BF)


class Model(nnx.Module):
    """From the pixels of an image to scores for ten digits, through a stack of L layers."""

    def __init__(self, L, D, F, rngs):
        stack = nnx.vmap(lambda rngs: Layer(D, F, rngs))
        self.layers = stack(rngs.split(L))
        self.last = nnx.Linear(D, 10, rngs=rngs)

    def __call__(self, x_BD):
        def next_layer(x_BD, layer):
            return gather_and_call(layer, x_BD), None

        x_BD, _ = jax.lax.scan(next_layer, x_BD, self.layers)
        return gather_and_call(self.last, x_BD)


def make(fsdp):
    """A new model, annotated for FSDP or for data parallelism, and its optimizer."""

    def annotated(path, weight):
        stacked = "layers" in jax.tree_util.keystr(path)  # the model's own name
        spec = fsdp_spec(weight.shape, mesh.size, stacked) if fsdp else P()
        return nnx.Param(weight[...], out_sharding=spec)

    model = Model(L=4, D=64, F=512, rngs=nnx.Rngs(0))  # 64 pixels
    model = jax.tree.map_with_path(annotated, model, is_leaf=is_weight)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))
    return model, nnx.Optimizer(model, clipped, wrt=nnx.Param)


create = jax.jit(make, static_argnames="fsdp")  # not an array


def mean_loss(model, batch_block):
    x_BD, labels_B = batch_block
    losses_B = optax.softmax_cross_entropy_with_integer_labels(model(x_BD), labels_B)
    return jax.lax.pmean(losses_B.mean(), "data")


def loss_and_gradient(model, batch):
    specs = nnx.get_partition_spec(model)
    mapped = jax.shard_map(
        jax.value_and_grad(mean_loss),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(P(), specs),
    )
    return mapped(model, batch)


def step(model, optimizer, batch):
    """One training step: everything that changed, and the loss."""
    loss, gradient = loss_and_gradient(model, batch)
    optimizer.update(model, gradient)
    return model, optimizer, loss


def compiled_step(step, model, optimizer):
    """The jitted step: each output keeps its input's sharding and reuses its memory."""
    shardings = jax.tree.map(lambda array: array.sharding, (model, optimizer))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))


digits = load_digits()
images_BI = (digits.data / 16).astype("float32")  # 1,797 images of 64 pixels
labels_B = digits.target.astype("int32")


def batch_of(rows):
    """The images and labels of these rows, sharded along `data`."""
    arrays = images_BI[rows], labels_B[rows]
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("data")))


def train(fsdp, steps=20):
    """The trained model, and the loss of each step."""
    losses = []
    with jax.set_mesh(mesh):
        model, optimizer = create(fsdp=fsdp)
        train_step = compiled_step(step, model, optimizer)
        for number in range(steps):
            batch = batch_of(slice(64 * number, 64 * (number + 1)))
            model, optimizer, loss = train_step(model, optimizer, batch)
            losses.append(loss)
    return model, [float(loss) for loss in losses]


def main():
    for name, fsdp in [("data parallel", False), ("FSDP", True)]:
        model, losses = train(fsdp)
        held = ms.memory(model).bytes_per_device
        print(f"{name:13} {held:9,} bytes of weights on each of {mesh.size} devices")
        print(f"{'':13} loss {losses[0]:.4f} at step 0, {losses[-1]:.4f} at step 19")


if __name__ == "__main__":
    main()
