# @title Helper: put an array on a mesh
def put(x, mesh, *spec):
    """The array x on the mesh, sharded by jax.P(*spec); without entries, copies."""
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
