# @title data_mesh: one axis over all devices of all processes
def data_mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(Auto,))
