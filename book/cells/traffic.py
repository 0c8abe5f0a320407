# @title Helper: what a function moves, once compiled
def traffic(function, *inputs, mesh=None):
    """The collectives of the program that jax.jit makes of function and inputs."""
    return ms.collectives(jax.jit(function).lower(*inputs).compile(), mesh)
