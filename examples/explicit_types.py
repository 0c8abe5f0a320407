"""Type-check a model in Explicit mode for a mesh that you do not have, in seconds and without
memory.

    python examples/explicit_types.py                 on 64 x 16 devices, data x model
    python examples/explicit_types.py --mesh 2 4      on another mesh

Copy `check` and `like`. `check` traces the loss and its gradient on an abstract mesh. If a line
leaves a sharding ambiguous, or if a size is not a multiple of the devices that shard it, JAX
raises an error here instead of on the cluster. Nothing is computed, so `check` cannot tell you
what the program moves or how fast it is.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

P = jax.P


def check(make: Callable[[], Any], loss: Callable[..., Any], *inputs: Any) -> dict[str, str]:
    """The type of every weight of make(), by name, if loss(model, *inputs) and its gradient pass.

    Call it inside `jax.sharding.use_abstract_mesh(mesh)`. JAX raises an error at the first line
    that leaves a sharding ambiguous. A weight whose gradient has a different type raises TypeError.
    """
    model = jax.eval_shape(make)
    gradients = jax.eval_shape(jax.grad(loss), model, *inputs)
    types = named_types(model)
    for name, found in named_types(gradients).items():
        if found != types[name]:
            raise TypeError(f"{name} is {types[name]}, but its gradient is {found}")
    return types


def named_types(model: Any) -> dict[str, str]:
    """Name and type of every variable."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): str(jax.typeof(v.get_value())) for path, v in flat}


def like(
    mesh: AbstractMesh, shape: tuple[int, ...], *spec: Any, dtype: str = "float32"
) -> jax.ShapeDtypeStruct:
    """An input without numbers, sharded by jax.P(*spec)."""
    sharding = jax.NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# A model to try it on: every weight says its sharding where it is made.


class Block(nnx.Module):
    def __init__(self, D: int, F: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        columns = partial(init, out_sharding=P("data", "model"))
        rows = partial(init, out_sharding=P("model", "data"))
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, use_bias=False, kernel_init=columns, rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=rows, rngs=rngs)

    def __call__(self, x_BD: Any) -> Any:
        h_BF = jax.nn.silu(self.up(self.norm(x_BD), out_sharding=P("data", "model")))
        return x_BD + self.down(h_BF, out_sharding=P("data", None))


class Model(nnx.Module):
    def __init__(self, L: int, D: int, F: int, V: int, rngs: nnx.Rngs):
        table = partial(nnx.initializers.normal(0.02), out_sharding=P(None, "model"))
        self.embed = nnx.Embed(V, D, embedding_init=table, rngs=rngs)
        self.blocks = jax.vmap(lambda rngs: Block(D, F, rngs))(rngs.split(L))

    def __call__(self, tokens_B: Any) -> Any:
        x_BD = self.embed(tokens_B, out_sharding=P("data", None))
        x_BD, _ = jax.lax.scan(lambda x_BD, block: (block(x_BD), None), x_BD, self.blocks)
        return self.embed.attend(x_BD, out_sharding=P("data", None))


def make() -> Model:
    return Model(L=32, D=4096, F=16384, V=32768, rngs=nnx.Rngs(0))


def loss(model: Model, tokens_B: Any, labels_B: Any) -> Any:
    log_p_BV = jax.nn.log_softmax(model(tokens_B))
    return -jnp.take_along_axis(log_p_BV, labels_B[:, None], axis=1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Type-check a model for a mesh.")
    parser.add_argument("--mesh", type=int, nargs=2, default=(64, 16), metavar=("DATA", "MODEL"))
    sizes = tuple(parser.parse_args().mesh)
    mesh = AbstractMesh(sizes, ("data", "model"), (AxisType.Explicit,) * 2)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            tokens = like(mesh, (4096,), "data", dtype="int32")
            types = check(make, loss, tokens, tokens)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if frame.filename == __file__][-1]
        first = str(error).split(" This error occurs at source")[0].strip().split("\n\n")[0]
        raise SystemExit(
            f"on {sizes[0]} x {sizes[1]} devices, line {mine.lineno}, {mine.line}\n"
            f"{type(error).__name__}: {first}\n"
            "Fix it in that line, with out_sharding=, with jax.reshard, or with another size."
        ) from None
    for name, found in types.items():
        print(f"{name:24} {found}")
    print(f"the loss and its gradient have types on {mesh.size:,} devices")


if __name__ == "__main__":
    main()
