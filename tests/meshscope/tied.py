"""Trees in which memory stands more than once: `python tied.py NUMBER ADDRESS` measures them in one of two processes."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms


def array(mesh, spec, shape=(8, 16), dtype="float32"):
    """An array of its own, whatever a process holds of it."""
    fill = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(mesh, spec))
    return fill()


def rebuilt(x):
    """Another array of the same buffers."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


class Tied(nnx.Module):
    """A model whose last layer is its first one's table."""

    def __init__(self, rngs):
        metadata = {"out_sharding": ("data", None)}
        self.embed = nnx.Embed(64, 16, rngs=rngs, embedding_metadata=metadata)
        self.hidden = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Param(self.embed.embedding.get_value())
        self.table = self.embed.embedding


def model(mesh):
    with jax.set_mesh(mesh):
        made = nnx.jit(lambda: Tied(nnx.Rngs(0)))()
        made.head.set_value(made.embed.embedding.get_value())
    return made


def trees(mesh):
    x, y = array(mesh, P("data")), array(mesh, P("data"))
    whole = array(mesh, P())
    keys = jax.jit(
        lambda: jax.random.split(jax.random.key(0), 8), out_shardings=NamedSharding(mesh, P("data"))
    )()
    tied = model(mesh)
    gone = array(mesh, P("model"))
    gone.delete()
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        left, right = array(explicit, P(None, "model")), array(explicit, P("model", None), (16, 8))
        sums = jax.jit(lambda a, b: jnp.dot(a, b, out_sharding=P(None, None, unreduced={"model"})))(
            left, right
        )
    return {
        "one": [x],
        "twice": [x, x],
        "thrice, deep": {"a": x, "b": {"c": [x, {"d": x}]}},
        "two of the same shape": [x, y],
        "other arrays of the same buffers": [x, rebuilt(x), rebuilt(rebuilt(x))],
        "placed again where it is": [x, jax.device_put(x, x.sharding)],
        "replicated twice": [whole, whole, rebuilt(whole)],
        "keys twice": [keys, keys],
        "partial sums twice": [sums, sums],
        "an optimizer's trees": {"params": {"w": x, "v": y}, "ema": {"w": x, "v": rebuilt(y)}},
        "deleted beside alive": [gone, x, x],
        "a model with tied weights": tied,
        "its state": nnx.state(tied),
        "its state and itself": [nnx.state(tied), tied],
    }


def measured(tree):
    told = ms.memory(tree)
    shares = {leaf.path: leaf.shares for leaf in told.leaves}
    return [told.bytes_per_device, told.unique_bytes, told.total_bytes, shares]


def grid():
    """All devices, by four to a process where there are two of them."""
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def of_one_process(mesh):
    """Trees that one process alone cannot have: (bytes per device, unique, total)."""
    mine = np.array([d for d in mesh.devices.flat if d.process_index == jax.process_index()])
    other = np.array([d for d in mesh.devices.flat if d.process_index != jax.process_index()])
    rows = [jax.sharding.Mesh(devices, ("data",)) for devices in (mine, other)]
    here = array(rows[0], P("data"), (4, 16))  # 64 bytes on each of my devices
    pieces = [shard.data for shard in here.addressable_shards]
    line = jax.sharding.Mesh(mesh.devices.reshape(-1), ("data",))
    # Half of its pieces are those of `here`; the other process has the rest.
    everywhere = jax.make_array_from_single_device_arrays(
        (8, 16), NamedSharding(line, P("data")), pieces
    )
    copies = array(rows[0], P(), (4, 16))  # 256 bytes on each of my devices
    pieces = [shard.data for shard in copies.addressable_shards]
    whole = jax.make_array_from_single_device_arrays((4, 16), NamedSharding(line, P()), pieces)
    there = [
        jax.make_array_from_single_device_arrays(
            (4, 16), NamedSharding(rows[1], P("data")), [], dtype=np.float32
        )
        for _ in range(2)
    ]
    found = {
        "half of its pieces": [here, everywhere],
        "half of its copies": [copies, whole],
        "elsewhere, twice": [there[0], there[0]],
        "elsewhere, two arrays": there,
    }
    return {name: measured(tree)[:3] for name, tree in found.items()}


if __name__ == "__main__":
    number, address = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, number)
    found = {name: measured(tree) for name, tree in trees(grid()).items()}
    print(json.dumps({"trees": found, "parts": of_one_process(grid())}))
