"""Quick start: the same training on one device, data parallel, and with FSDP.

Needs JAX 0.7 or newer, and any number of devices from one up:

    python examples/quickstart.py

Each `# %%` begins a cell of the page "Quick start", book/quickstart.md, which shows this file.
"""
# ruff: noqa: E402 (an import stands where its cell needs it)

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # no effect if you have a GPU or TPU
import jax
import numpy as np

assert jax.__version_info__ >= (0, 7), "JAX is older than 0.7: pip install -U jax"
n = jax.device_count()
print(f"jax {jax.__version__}, {n} devices: {jax.devices()[0].device_kind}")

# %%
D = np.lcm(96, n)  # 96, or a multiple that n devices can share equally
x_BD = np.random.default_rng(0).random((64 * n, D))  # 64 examples per device
start = {
    "w_DF": np.random.default_rng(1).normal(0, 0.02, (D, 4 * D)),
    "w_FD": np.random.default_rng(2).normal(0, 0.02, (4 * D, D)),
}
print("one batch:", x_BD.shape)


# %%
def loss_of(weights, x_BD, y_BD, batch_at):
    h_BF = jax.nn.relu(x_BD @ weights["w_DF"])
    h_BF = jax.lax.with_sharding_constraint(h_BF, batch_at)  # examples stay in place
    return ((h_BF @ weights["w_FD"] - y_BD) ** 2).mean()


def step(weights, x_BD, y_BD, batch_at):
    loss, grads = jax.value_and_grad(loss_of)(weights, x_BD, y_BD, batch_at)
    return jax.tree.map(lambda w, g: w - g, weights, grads), loss


# %%
def train(weights_at, batch_at):
    weights = jax.device_put(start, weights_at)
    batch = jax.device_put((x_BD, np.sort(x_BD)), batch_at)  # inputs, sorted targets
    run = jax.jit(
        step,
        static_argnums=3,
        donate_argnums=0,
        out_shardings=(weights_at, None),
    )
    for i in range(4):
        weights, loss = run(weights, *batch, batch_at)
        print(f"step {i}: loss {loss:.6f}")
    print("w_DF on each device:", weights["w_DF"].addressable_shards[0].data.shape)


on_device_0 = jax.sharding.SingleDeviceSharding(jax.devices()[0])
train(weights_at=on_device_0, batch_at=on_device_0)

# %%
mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = jax.NamedSharding(mesh, jax.P("data"))
train(weights_at=jax.NamedSharding(mesh, jax.P()), batch_at=sharded)

# %%
train(weights_at=sharded, batch_at=sharded)

# %%
try:
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit("Flax is missing or too old: pip install -U flax") from error


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x_BD):
        h_BF = jax.lax.with_sharding_constraint(jax.nn.relu(self.up(x_BD)), sharded)
        return self.down(h_BF)


model = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


# %%
def flax_loss_of(model, x_BD, y_BD):
    return ((model(x_BD) - y_BD) ** 2).mean()


def flax_step(model, optimizer, x_BD, y_BD):
    loss, grads = nnx.value_and_grad(flax_loss_of)(model, x_BD, y_BD)
    optimizer.update(model, grads)
    return model, optimizer, loss


replicated = jax.NamedSharding(mesh, jax.P())
state = model, optimizer
shardings = jax.tree.map(lambda array: sharded if array.ndim else replicated, state)
model, optimizer = jax.device_put(state, shardings)
batch = jax.device_put((x_BD, np.sort(x_BD)), sharded)
run = jax.jit(flax_step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
for i in range(4):
    model, optimizer, loss = run(model, optimizer, *batch)
    print(f"step {i}: loss {loss:.6f}")

arrays = jax.tree.leaves((model, optimizer))
held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
print(f"each device holds {held:,} of {sum(array.nbytes for array in arrays):,} bytes")
