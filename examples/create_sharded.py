"""Create any Flax NNX model in its pieces: no device ever holds one of its weights whole.

    python examples/create_sharded.py                         on the devices JAX finds
    JAX_NUM_CPU_DEVICES=8 python examples/create_sharded.py   on eight simulated ones

`create_sharded(make, mesh)` places a model by its annotations (`out_sharding`), and
`create_sharded(make, mesh, rule)` one without annotations, by a rule on the paths of its
weights. Copy that function and `checked`; the rest is a model to try them on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Path = tuple[Any, ...]  # such as ("layers", 0, "up", "kernel")
Names = tuple[Any, ...]  # a mesh axis, a tuple of axes, or None, for each dimension
Rule = Callable[[Path, tuple[int, ...]], Names]


def create_sharded(make: Callable[[], Any], mesh: jax.sharding.Mesh, rule: Rule | None = None):
    """The model that make() returns, with every array made in its pieces on the mesh.

    Without a rule, the model's annotations say where; what has none is copied to every device.
    A rule gets the path and the shape of each array and replaces its annotation.
    """
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(make)  # shapes only, and a tied weight is still one variable
        variables = {".".join(map(str, path)): (path, variable) for path, variable in flat(model)}
        shardings = {}
        for name, (path, variable) in variables.items():
            if rule is not None:
                variable.set_metadata(out_sharding=tuple(rule(path, variable.shape)))
            names = variable.get_metadata().get("out_sharding") or ()
            shardings[name] = checked(name, variable.shape, names, mesh)

        # Named outputs with pinned shardings: the compiler carries them back to where each
        # number is drawn, and a tied weight comes out once.
        @functools.partial(jax.jit, out_shardings=shardings)
        def arrays():
            return {".".join(map(str, path)): array.get_value() for path, array in flat(make())}

        for name, array in arrays().items():
            variables[name][1].set_value(array)
    return model


def flat(model: Any) -> list[tuple[Path, nnx.Variable]]:
    """Path and variable of every array of a model, tied ones once."""
    return list(nnx.to_flat_state(nnx.state(model)))


def checked(name: str, shape: tuple[int, ...], names: Names, mesh: jax.sharding.Mesh):
    """The sharding that these names mean, or an error that says which weight is at fault."""
    what = f"{name} of shape {shape} is annotated {names}"
    if isinstance(names, str) or len(names) > len(shape):
        raise ValueError(f"{what}: give a tuple with one entry for each of its dimensions")
    for size, entry in zip(shape, names):
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(f"{what}: the mesh has no axis {axis!r}, only {mesh.axis_names}")
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ValueError(
                f"{what}: {axes} makes {parts} parts, which {size} does not divide into; "
                "pad that dimension, or give None to leave it whole"
            )
    return jax.NamedSharding(mesh, jax.P(*names))


# A model to try it on: nothing is annotated, and the embedding is the output layer as well.


class Block(nnx.Module):
    def __init__(self, D: int, F: int, rngs: nnx.Rngs):
        self.norm_in = nnx.RMSNorm(D, rngs=rngs)
        self.norm_up = nnx.RMSNorm(D, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(8, D, decode=False, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x_BSD):
        x_BSD = x_BSD + self.attend(self.norm_in(x_BSD))
        return x_BSD + self.down(jax.nn.silu(self.up(self.norm_up(x_BSD))))


class Transformer(nnx.Module):
    def __init__(self, V: int, D: int, F: int, L: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([Block(D, F, rngs) for _ in range(L)])
        self.head = self.embed  # tied: one variable, two names

    def __call__(self, tokens_BS):
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head.attend(x_BSD)


def make() -> Transformer:
    return Transformer(V=512, D=96, F=384, L=2, rngs=nnx.Rngs(0))


def rule(path: Path, shape: tuple[int, ...]) -> Names:
    """Tensor parallelism for Transformer: what widens by columns, what leads back by rows."""
    match path:
        case ("embed", "embedding"):  # (V, D)
            return ("model", None)
        case (*_, "attend", "query" | "key" | "value", "kernel"):  # (D, H, C)
            return (None, "model", None)
        case (*_, "attend", "out", "kernel"):  # (H, C, D)
            return ("model", None, None)
        case (*_, "up", "kernel"):  # (D, F)
            return (None, "model")
        case (*_, "down", "kernel"):  # (F, D)
            return ("model", None)
    return (None,) * len(shape)  # biases and norms are small: a copy on every device


def every_device() -> jax.sharding.Mesh:
    """All devices as a mesh: up to four along `model`, the rest along `data`."""
    model = math.gcd(jax.device_count(), 4)
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((jax.device_count() // model, model), ("data", "model"), axis_types=auto)


def main() -> None:
    mesh = every_device()
    model = create_sharded(make, mesh, rule)
    whole = held = 0
    print(f"{mesh.size} devices: {dict(mesh.shape)}")
    print(f"{'weight':32} {'shape':14} piece on a device")
    for path, weight in flat(model):
        piece = weight.sharding.shard_shape(weight.shape)
        print(f"{'.'.join(map(str, path)):32} {weight.shape!s:14} {piece}")
        whole += weight.nbytes
        held += math.prod(piece) * weight.dtype.itemsize
    logits_BSV = model(jnp.zeros((2 * mesh.shape["data"], 8), "int32"))
    print(f"{whole:,} bytes in all, {held:,} on each device; logits {logits_BSV.shape}")


if __name__ == "__main__":
    main()
