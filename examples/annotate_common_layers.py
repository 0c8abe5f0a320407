"""Flax's common layers, each with the annotation that is usual for tensor parallelism.

    python examples/annotate_common_layers.py                         on the devices JAX finds
    JAX_NUM_CPU_DEVICES=8 python examples/annotate_common_layers.py   on eight simulated ones

Copy the lines of the layers that you need. An annotation has one entry for each dimension of
the weight: the mesh axis that shards it, or None for a dimension that stays whole. The program
prints where every weight went, and checks that sharding changed no number.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from flax import nnx


def along(*names):
    """Metadata for one weight: a mesh axis, or None, for each of its dimensions."""
    return {"out_sharding": names}


# The metadata of a weight on a line of its own, to be copied:
# fmt: off
def common_layers(rngs, D=64, F=256, H=8, V=512):
    """D: width, F: hidden width, H: heads, V: vocabulary."""
    return {
        "up": nnx.Linear(D, F, rngs=rngs, kernel_metadata=along(None, "model"),
                         bias_metadata=along("model")),
        "down": nnx.Linear(F, D, rngs=rngs, kernel_metadata=along("model", None),
                           bias_metadata=along(None)),
        "embed": nnx.Embed(V, D, rngs=rngs, embedding_metadata=along("model", None)),
        "heads": nnx.Einsum("BD,DHC->BHC", (D, H, D // H), rngs=rngs,
                            kernel_metadata=along(None, "model", None)),
        "patches": nnx.Conv(3, D, (4, 4), rngs=rngs, bias_metadata=along("model"),
                            kernel_metadata=along(None, None, None, "model")),
        "attend": nnx.MultiHeadAttention(
            H, D, decode=False, rngs=rngs,
            kernel_metadata=along(None, "model", None),
            bias_metadata=along("model", None),
            out_kernel_metadata=along("model", None, None),
            out_bias_metadata=along(None)),
        "norm": nnx.RMSNorm(D, rngs=rngs, scale_metadata=along(None)),
    }


# fmt: on
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


def main() -> None:
    mesh = every_device()
    with jax.set_mesh(mesh):  # an annotation is read where the layer is made
        layers = common_layers(nnx.Rngs(0))
    with nnx.use_eager_sharding(False):  # the same layers, whole, on the first device
        whole = dict(weights(common_layers(nnx.Rngs(0))))

    print(f"{mesh.size} devices: {dict(mesh.shape)}")
    print(f"{'weight':22} {'shape':14} {'annotation':32} piece on a device")
    for name, weight in weights(layers):
        piece = weight.sharding.shard_shape(weight.shape)
        print(f"{name:22} {weight.shape!s:14} {weight.out_sharding!s:32} {piece}")
        np.testing.assert_array_equal(weight, whole[name], err_msg=f"{name} has other numbers")


if __name__ == "__main__":
    main()
