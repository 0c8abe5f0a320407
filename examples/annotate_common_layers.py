"""Flax's common layers, annotated for tensor parallelism, for FSDP, or for both.

    python examples/annotate_common_layers.py                         on the devices JAX finds
    JAX_NUM_CPU_DEVICES=8 python examples/annotate_common_layers.py   on eight simulated ones
    python examples/annotate_common_layers.py --fsdp                  sharded along `data` as well

Copy the lines of the layers that you need. An annotation has one entry for each dimension of
the weight: the mesh axis that shards it, or None for a dimension that stays whole. The program
prints where every weight went, and checks that sharding changed no number.
"""

from __future__ import annotations

import argparse
import math

import jax
import numpy as np
from flax import nnx


def along(*names):
    """Metadata for one weight: a mesh axis, or None, for each of its dimensions."""
    return {"out_sharding": names}


def common_layers(rngs, fsdp=None, tensor="model", D=64, F=256, H=8, V=512):
    """D: width, F: hidden width, H: heads, V: vocabulary."""
    return {
        "up": nnx.Linear(
            D,
            F,
            kernel_metadata=along(fsdp, tensor),
            bias_metadata=along(tensor),
            rngs=rngs,
        ),
        "down": nnx.Linear(
            F,
            D,
            kernel_metadata=along(tensor, fsdp),
            bias_metadata=along(None),
            rngs=rngs,
        ),
        "attend": nnx.MultiHeadAttention(
            num_heads=H,
            in_features=D,
            kernel_metadata=along(fsdp, tensor, None),
            bias_metadata=along(tensor, None),
            out_kernel_metadata=along(tensor, None, fsdp),
            out_bias_metadata=along(None),
            decode=False,
            rngs=rngs,
        ),
        "heads": nnx.Einsum(
            "BD,DHC->BHC",
            (D, H, D // H),
            kernel_metadata=along(fsdp, tensor, None),  # D, H, C
            rngs=rngs,
        ),
        "patches": nnx.Conv(
            3,
            D,
            (4, 4),
            kernel_metadata=along(None, None, None, fsdp or tensor),
            bias_metadata=along(fsdp or tensor),
            rngs=rngs,
        ),
        "embed": nnx.Embed(
            V,
            D,
            embedding_metadata=along(tensor, fsdp),
            rngs=rngs,
        ),
        "norm": nnx.RMSNorm(
            D,
            scale_metadata=along(None),
            rngs=rngs,
        ),
    }


def every_device() -> jax.sharding.Mesh:
    """All devices as a mesh: up to four along `model`, the rest along `data`."""
    model = math.gcd(jax.device_count(), 4)
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((jax.device_count() // model, model), ("data", "model"), axis_types=auto)


def weights(layers: dict[str, nnx.Module]):
    """Name and variable of every weight."""
    for name, layer in layers.items():
        for path, weight in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
            yield ".".join([name, *map(str, path)]), weight


def main(fsdp: str | None = None) -> None:
    mesh = every_device()
    with jax.set_mesh(mesh):  # an annotation is read where the layer is made
        layers = common_layers(nnx.Rngs(0), fsdp)
    with nnx.use_eager_sharding(False):  # the same layers, whole, on the first device
        whole = dict(weights(common_layers(nnx.Rngs(0))))

    print(f"{mesh.size} devices: {dict(mesh.shape)}")
    print(f"{'weight':22} {'shape':14} {'annotation':32} piece on a device")
    for name, weight in weights(layers):
        piece = weight.sharding.shard_shape(weight.shape)
        print(f"{name:22} {weight.shape!s:14} {weight.out_sharding!s:32} {piece}")
        np.testing.assert_array_equal(weight, whole[name], err_msg=f"{name} has other numbers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--fsdp", action="store_const", const="data", help="shard along `data` as well"
    )
    main(parser.parse_args().fsdp)
