"""Checks of a Flax model: is each parameter sharded as its annotation says?"""

import jax
from flax import nnx


def misplaced(model, mesh):
    """One line for each parameter that is not where its annotation says."""
    lines = []
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        names = weight.get_metadata().get("out_sharding")  # None if nobody annotated
        if names is None:
            lines.append(f"{name}: no annotation")
        elif len(names) > weight.ndim:
            lines.append(f"{name}: annotated {names}, too long for {weight.shape}")
        else:
            wanted = jax.NamedSharding(mesh, jax.P(*names))
            if not weight.sharding.is_equivalent_to(wanted, weight.ndim):
                lines.append(
                    f"{name}: annotated {names}, on each device "
                    f"{weight.sharding.shard_shape(weight.shape)}"
                )
    return lines


def assert_placed(model, mesh):
    """Every weight is sharded as its names and the current table say; else an AssertionError."""
    state = nnx.state(model, nnx.Param)
    wanted = jax.tree.leaves(nnx.get_named_sharding(state, mesh))
    for (path, weight), sharding in zip(nnx.to_flat_state(state), wanted, strict=True):
        if len(sharding.spec) > weight.ndim:
            raise AssertionError(f"{path} has more axis names than dimensions")
        if not weight.sharding.is_equivalent_to(sharding, weight.ndim):
            found = getattr(weight.sharding, "spec", "whole on one device")
            raise AssertionError(f"{path} is sharded as {found}, not as {sharding.spec}")
