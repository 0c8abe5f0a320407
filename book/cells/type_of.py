# @title Helper: the type of a result, without running anything
def type_of(function, *inputs):
    """The type of function(*inputs), such as float32[8@data,32]; nothing runs."""
    return str(jax.typeof(jax.eval_shape(function, *inputs)))
