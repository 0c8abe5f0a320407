# @title Helper: which parameters are not where their annotations say
def misplaced(model, mesh):
    """One line for each parameter that is not where its annotation says."""
    lines = []
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        names = weight.get_metadata().get("out_sharding")  # None if nobody annotated
        if names is None:
            lines.append(f"{name}: no annotation")
        else:
            wanted = jax.NamedSharding(mesh, jax.P(*names))
            if not weight.sharding.is_equivalent_to(wanted, weight.ndim):
                lines.append(f"{name}: annotated {names}, on each device "
                             f"{weight.sharding.shard_shape(weight.shape)}")
    return lines
