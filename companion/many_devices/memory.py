"""What a training step of `large` keeps on each device, counted from shapes."""

from functools import partial

import jax

import meshscope as ms
from many_devices.stacked import large, loss_of
from many_devices.training import shapes

ROWS = 32768  # of a batch: 4,096 on each of eight devices


def state(strategy, **options):
    """Bytes of weights, gradients and moments on each device."""
    model, optimizer, _ = shapes(large, strategy, ROWS, **options)
    moments = optimizer.opt_state[0]  # of Adam: mu and nu
    return {
        "weights": ms.memory(model).bytes_per_device,
        "gradients": ms.memory(moments.mu).bytes_per_device,  # as large as mu
        "moments": ms.memory(optimizer).bytes_per_device,
    }


def kept(strategy):
    """The arrays that the layers keep for the backward pass, as shapes."""
    model, _, batch = shapes(large, strategy, ROWS)

    def backward_pass(model, batch):
        return jax.vjp(partial(loss_of, batch=batch), model)[1]

    with jax.set_mesh(strategy.mesh()):
        arrays = jax.tree.leaves(jax.eval_shape(backward_pass, model, batch))
    return [array for array in arrays if array.shape[:2] == (large.L, ROWS)]


def kept_gb(strategy):
    """GB of these arrays on a device, if only their rows are sharded, along `data`."""
    whole = sum(array.size * array.dtype.itemsize for array in kept(strategy))
    return whole / strategy.data / 1e9
