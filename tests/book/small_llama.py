"""The small Llama of "Bring your own weights" and of the LoRA page: loaded, its weights, its logits."""

from functools import partial

import jax
import numpy as np
from flax import nnx
from llama_in_numpy import forward

from many_devices.llama import CONFIG


def loaded(page, folder=None, mesh=None, rank=0):
    """A model from a directory, with the functions that the page has; with a rank, also adapters."""
    folder, mesh = folder or page.folder, mesh or page.mesh
    model = page.load(partial(page.read, folder), page.read_config(folder), mesh)
    if rank:
        with jax.set_mesh(mesh):
            page.add_adapters(model, rank)
    return model


def weights_of(model):
    """{path joined by "/": variable} of all parameters."""
    return {
        "/".join(map(str, path)): weight
        for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def numpy_logits(tensors, tokens):
    """The logits of the small Llama, by NumPy alone."""
    return forward(CONFIG | {"rope_scaling": None}, tensors, np.asarray(tokens))
