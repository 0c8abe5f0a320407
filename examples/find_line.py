"""Find the line of a model that makes an array whole, or moves more than it should.

    JAX_NUM_CPU_DEVICES=8 python examples/find_line.py          a model with such a line
    JAX_NUM_CPU_DEVICES=8 python examples/find_line.py --mended  the same model without it

Copy `walk` and call it with a compiled program: `jax.jit(step).lower(*inputs).compile()`. It needs
no run and no numbers: inputs may be `jax.ShapeDtypeStruct`s with shardings. Wrap the parts of your
model in `jax.named_scope`, and the names of the parts appear in the list.

What it lists is what this compiler does. Compile for the machine that you will use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import meshscope as ms

P = jax.P


def walk(compiled: Any, mesh: jax.sharding.Mesh, count: int = 5) -> list[ms.Collective]:
    """Print scratch memory and the largest collectives of a program; return them, largest first.

    Bytes are those of all executions in one run. A name belongs to the value that moves: if its
    line looks innocent, look at the lines that use the value.
    """

    def total(move: ms.Collective) -> int:
        return move.payload_bytes * (move.executions or 1)

    held = ms.memory(compiled)
    print(f"arguments {held.arguments:13,} bytes per device")
    print(f"scratch   {held.temporaries:13,} bytes per device")
    moves = sorted(ms.collectives(compiled, mesh), key=total, reverse=True)
    for move in moves[:count]:
        line = move.source_line or "(no line)"
        print(f"{move.kind:18} {total(move):13,} bytes over {', '.join(move.axes)}  {line}")
        print(f"    {move.op_name or '(no name)'}")
    if len(moves) > count:
        print(f"and {len(moves) - count} smaller ones")
    return moves


# A model with a line that makes an activation whole on every device.


def clip_by_percentile(h_BF: jax.Array) -> jax.Array:
    limit = jnp.quantile(jnp.abs(h_BF), 0.999)  # needs all elements, sorted
    return jnp.clip(h_BF, -limit, limit)


def clip_by_deviation(h_BF: jax.Array) -> jax.Array:
    limit = 3.3 * jnp.std(h_BF)  # devices add up their shares
    return jnp.clip(h_BF, -limit, limit)


def forward(clip: Callable[[jax.Array], jax.Array], weights: Any, x_BD: jax.Array) -> jax.Array:
    for number, (w_DF, w_FD) in enumerate(weights):
        with jax.named_scope(f"layer_{number}"):
            h_BF = jax.nn.silu(x_BD @ w_DF)
            h_BF = clip(h_BF) if number == 2 else h_BF
            x_BD = x_BD + h_BF @ w_FD
    return (x_BD**2).mean()


def compiled_step(clip: Callable[[jax.Array], jax.Array], mesh: jax.sharding.Mesh) -> Any:
    """Loss and gradients of four layers, compiled from shapes alone."""

    def like(rows: int, columns: int, *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((rows, columns), "float32", sharding=sharding)

    D, F = 256, 1024
    weights = [(like(D, F, None, "model"), like(F, D, "model", None)) for _ in range(4)]
    step = jax.value_and_grad(lambda weights, x_BD: forward(clip, weights, x_BD))
    return jax.jit(step).lower(weights, like(512, D, "data", None)).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the line that makes an array whole.")
    parser.add_argument("--mended", action="store_true", help="clip by the standard deviation")
    clip = clip_by_deviation if parser.parse_args().mended else clip_by_percentile
    count = jax.device_count()
    if count < 8:
        raise SystemExit(
            f"This example needs 8 devices and found {count}. Without accelerators, run it with "
            "JAX_NUM_CPU_DEVICES=8 to simulate them."
        )
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types, devices=jax.devices()[:8])
    walk(compiled_step(clip, mesh), mesh)


if __name__ == "__main__":
    main()
