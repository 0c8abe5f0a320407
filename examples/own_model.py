"""Train your own Flax NNX model with FSDP, save it, and resume on another number of devices.

    python examples/own_model.py                         on the devices JAX finds
    JAX_NUM_CPU_DEVICES=8 python examples/own_model.py   on eight simulated ones

The page https://many-devices.github.io/one-program/book/own-model.html explains it line by line. The
model is plain Flax; RULES shard it. It learns the source code of its own attention layer.
"""

import inspect
import pathlib
import re
import sys
import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from orbax.checkpoint import v1 as ocp

import meshscope as ms

P = jax.P


class Block(nnx.Module):
    def __init__(self, D, H, rngs):
        self.norm_in = nnx.RMSNorm(D, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)  # no cache
        self.norm_up = nnx.RMSNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x_BSD):
        causal = nnx.make_causal_mask(x_BSD[:, :, 0])  # only the shape, B × S, counts
        x_BSD = x_BSD + self.attend(self.norm_in(x_BSD), mask=causal)
        x_BSD = x_BSD + self.down(jax.nn.gelu(self.up(self.norm_up(x_BSD))))
        return jax.lax.with_sharding_constraint(x_BSD, P("data"))


class Transformer(nnx.Module):
    def __init__(self, V, D, H, L, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([Block(D, H, rngs) for _ in range(L)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BS):
        x_BSD = jax.lax.with_sharding_constraint(self.embed(tokens_BS), P("data"))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))


def weights_of(model):
    """Return the path and the variable of each weight."""
    return nnx.to_flat_state(nnx.state(model, nnx.Param))


RULES = [  # the end of a path, and its spec: one entry for each dimension
    (r"embed/embedding", P("data", None)),  # V × D, for a vocabulary of V
    (r"(query|key|value)/kernel", P("data", None, None)),  # D × H × C: heads of size C
    (r"out/kernel", P(None, None, "data")),  # H × C × D
    (r"up/kernel", P("data", None)),  # D × 4D
    (r"down/kernel", P(None, "data")),  # 4D × D
    (r"head/kernel", P("data", None)),  # D × V
    (r"(bias|scale)", P()),  # small: a copy on every device
]


def spec_of(path):
    """Return the spec of the first rule that matches the end of this path."""
    name = "/".join(map(str, path))
    for pattern, spec in RULES:
        if re.search(rf"(^|/){pattern}$", name):
            return spec
    raise KeyError(f"no rule for {name}")


def shard(model):
    """Shard the weights of a model by RULES."""
    for path, weight in weights_of(model):
        spec = spec_of(path)
        weight.set_metadata(out_sharding=spec)
        weight.set_value(jax.lax.with_sharding_constraint(weight[...], spec))


def make():
    """Make a model, sharded by RULES, and its optimizer."""
    model = Transformer(V=256, D=64, H=4, L=2, rngs=nnx.Rngs(0))
    shard(model)
    return model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)


def mesh_of(devices):
    """Make a mesh of these devices with a single axis, `data`."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)


def loss_of(model, tokens_BS):
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(model(tokens_BS[:, :-1]), tokens_BS[:, 1:]).mean()


def step(model, optimizer, tokens_BS):
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens_BS)
    optimizer.update(model, gradients)
    return model, optimizer, loss


def compiled_step(step, model, optimizer):
    """The jitted step: each output keeps its input's sharding and reuses its memory."""
    shardings = jax.tree.map(lambda array: array.sharding, (model, optimizer))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))


source = inspect.getsource(nnx.MultiHeadAttention)
TEXT = np.frombuffer(source.encode(), np.uint8).astype("int32")


def batch_of(number, mesh, size=16, length=65):
    """Return the batch of this step, the same on every mesh and in every run."""
    starts = np.random.default_rng(number).integers(len(TEXT) - length, size=size)
    tokens_BS = np.stack([TEXT[start : start + length] for start in starts])
    return jax.device_put(tokens_BS, jax.NamedSharding(mesh, P("data")))


def train(model, optimizer, mesh, until):
    """Train from the optimizer's step to `until`; also return the loss of each step."""
    losses = {}
    with jax.set_mesh(mesh):
        train_step = compiled_step(step, model, optimizer)
        for number in range(int(optimizer.step[...]), until):
            model, optimizer, losses[number] = train_step(model, optimizer, batch_of(number, mesh))
    return model, optimizer, jax.device_get(losses)


def check_shardings(model, mesh):
    """Raise AssertionError if a weight is not sharded by its rule."""
    for path, weight in weights_of(model):
        wanted = jax.NamedSharding(mesh, spec_of(path))
        assert weight.sharding.is_equivalent_to(wanted, weight.ndim), f"{path} differs"


def check_moves(model, optimizer, mesh, tokens_BS):
    """Raise AssertionError if the step moves anything but weights and gradients."""
    with jax.set_mesh(mesh):  # compile the step, without running it
        jitted = compiled_step(step, model, optimizer)
        compiled = jitted.lower(model, optimizer, tokens_BS).compile()
    moved = {collective.shape for collective in ms.collectives(compiled)}
    allowed = {weight.shape for _, weight in weights_of(model)} | {()}  # () is the loss
    assert moved <= allowed, f"activations move: {sorted(moved - allowed)}"


def save(path, model, optimizer):
    ocp.save(path, nnx.state((model, optimizer)))


def resume(path, mesh):
    """Load model and optimizer from a checkpoint, sharded for this mesh."""
    graphdef, target = nnx.get_abstract_model(make, mesh)
    return nnx.merge(graphdef, ocp.load(path, target))


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).resolve()
    mesh = mesh_of(jax.devices())
    with jax.set_mesh(mesh):
        model, optimizer = jax.jit(make)()
    held = ms.memory(model)
    each = f"{held.bytes_per_device:,} of the model's {held.unique_bytes:,} bytes"
    print(f"{mesh.size} devices, each with {each}")

    model, optimizer, losses = train(model, optimizer, mesh, until=40)
    check_shardings(model, mesh)
    check_moves(model, optimizer, mesh, batch_of(0, mesh))
    for number in (0, 39):
        print(f"step {number}: loss {losses[number]:.3f}")
    save(folder / "40", model, optimizer)
    _, _, expected = train(model, optimizer, mesh, until=42)

    half = mesh_of(jax.devices()[: max(1, mesh.size // 2)])
    model, optimizer = resume(folder / "40", half)
    model, optimizer, losses = train(model, optimizer, half, until=80)
    check_shardings(model, half)
    check_moves(model, optimizer, half, batch_of(0, half))
    print(f"resumed on {half.size} devices")
    for number in (40, 41):
        restarted = f"step {number}: loss {losses[number]:.3f}"
        print(f"{restarted}, without the restart {expected[number]:.3f}")
    print(f"step 79: loss {losses[79]:.3f}")


if __name__ == "__main__":
    main()
