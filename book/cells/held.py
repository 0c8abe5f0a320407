# @title Helpers: kept_gb counts activations from shapes, held asks the compiled step
def kept(strategy):
    """The arrays that the layers of `large` keep for the backward pass, as shapes."""
    model, _, batch = shapes(large, strategy, 32768)
    def backward(model, batch):
        return jax.vjp(partial(loss_of, batch=batch), model)[1]
    with jax.set_mesh(strategy.mesh()):
        arrays = jax.tree.leaves(jax.eval_shape(backward, model, batch))
    return [array for array in arrays if array.shape[:2] == (large.L, 32768)]

def kept_gb(strategy):
    """What they need on each device, in GB."""
    whole = sum(array.size * array.dtype.itemsize for array in kept(strategy))
    return whole / strategy.data / 1e9

def held(strategy, make=make, step=step):
    """Bytes on each device in a step of the large model, by kind."""
    model, optimizer, _ = shapes(large, strategy, 32768, make)
    moments = optimizer.opt_state[0]  # mu, like nu, has one number for each gradient
    parts = {"weights": ms.memory(model).bytes_per_device,
             "moments": ms.memory(optimizer).bytes_per_device,
             "gradients": ms.memory(moments.mu).bytes_per_device}
    try:
        program = step_program(large, strategy, 32768, make, step)
    except jax.errors.JaxRuntimeError as refusal:  # a compiler that refuses: too large
        print(str(refusal).splitlines()[0])
        return parts
    rest = ms.memory(program).bytes_per_device - sum(parts.values())
    return parts | {"activations and scratch": rest}

def total_gb(parts):
    """All kinds together, in GB."""
    return sum(parts.values()) / 1e9
