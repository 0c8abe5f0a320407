"""Hold a training step to its shardings, its collectives and its bytes, in your own CI.

Copy this file, put your model between the two lines, change the numbers, and run
`pytest --update-sharding` once, then `pytest`. The step is compiled from shapes and no array is
made: a model of billions is tested like this one. Eight devices are simulated, so no accelerator
is needed. When w_FD loses its sharding, it says

    AssertionError: w_FD is stored as P(), not as P('data', None)

and the last test shows what else changed, from `sharding_snapshots/step.txt`, which
`pytest --update-sharding` writes for you to read and to commit. Both come with meshscope.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # both are read when JAX starts

import jax
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P

import meshscope as ms

# ---- your model, for example a small one with fully sharded data parallelism (FSDP) ---------

B, D, F = 64, 256, 1024
sgd = optax.sgd(0.1)


class Model(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.w_DF = nnx.Param(init(rngs.params(), (D, F)), out_sharding=("data", None))
        self.w_FD = nnx.Param(init(rngs.params(), (F, D)), out_sharding=("data", None))

    def __call__(self, x_BD):
        h_BF = jax.lax.with_sharding_constraint(jax.nn.relu(x_BD @ self.w_DF), P("data"))
        return jax.lax.with_sharding_constraint(h_BF @ self.w_FD, P("data"))


def make():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, sgd, wrt=nnx.Param)


def step(model, optimizer, x_BD):
    gradients = nnx.grad(lambda model: (model(x_BD) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return model, optimizer


# ---- what it must keep to -------------------------------------------------------------------

n, KERNEL = jax.device_count(), 4 * D * F  # bytes of a weight; two of them
mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="module")
def program():
    with jax.set_mesh(mesh):
        model, optimizer = nnx.merge(*nnx.get_abstract_model(make, mesh))
        x_BD = jax.ShapeDtypeStruct((B, D), "float32", sharding=NamedSharding(mesh, P("data")))
        return jax.jit(step, donate_argnums=(0, 1)).lower(model, optimizer, x_BD).compile()


def test_shardings(program):
    """As they come back from a step, so that a drift shows as well."""
    for path, weight in nnx.to_flat_state(nnx.state(program.out_info[0], nnx.Param)):
        name, found = ".".join(map(str, path)), weight.get_value()
        wanted = P("data", None) if found.ndim > 1 else P()  # biases and scales stay whole
        as_wanted = found.sharding.is_equivalent_to(NamedSharding(mesh, wanted), found.ndim)
        assert as_wanted, f"{name} is stored as {found.sharding.spec}, not as {wanted}"


def test_collectives(program):
    both = 2 * KERNEL if n > 1 else 0
    weights, gradients = ("all-gather", "data"), ("all-reduce", "data")
    ms.expect(program, {weights: both, gradients: both}, mesh)  # and nothing else


def test_bytes(program):
    held = ms.memory(program)
    assert held.arguments == (2 * KERNEL + 4 * B * D) // n + 4  # weights, batch, step counter
    assert held.aliased == 2 * KERNEL // n + 4  # all of the state is donated
    assert held.temporaries < 5 * KERNEL  # gathered weights and their gradients, no third copy


@pytest.mark.skipif(n != 8, reason="sharding_snapshots/step.txt was written with eight devices")
def test_snapshot(program, sharding_snapshot):
    """All of it as it was last looked at, also after an upgrade of JAX."""
    sharding_snapshot(program, "step", mesh)
