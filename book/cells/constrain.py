# @title constrain: shard an activation by the table
def constrain(x, rules, *names):
    """Shard an activation by the table: a name, or None, for each dimension."""
    if len(names) != x.ndim:
        raise ValueError(f"{names} for the shape {x.shape}")
    return jax.lax.with_sharding_constraint(x, rules(*names))
