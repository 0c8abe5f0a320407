"""Chapter 2, "A variable carries its sharding": who reads an annotation, and when."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

PAGE = "02-variables"
P = jax.P


def lies(array, mesh, *spec):
    return array.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(*spec)), array.ndim)


class OneWeight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((256, 512)), out_sharding=(None, "model"))


def test_flax_places_the_array_once_when_the_variable_is_made(page):
    """Flax places the array by the annotation once; another annotation later moves nothing."""
    with jax.set_mesh(page.mesh):
        model = OneWeight()
        assert lies(model.w, page.mesh, None, "model")
        model.w.set_metadata(out_sharding=("data", None))
    assert lies(model.w, page.mesh, None, "model")


def test_the_optimizer_reads_the_annotation_later(page):
    """nnx.Optimizer reads the annotation when it is made, and nothing compares it with the array."""
    with jax.set_mesh(page.mesh):
        model = OneWeight()
        model.w.set_metadata(out_sharding=("data", None))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    moment = optimizer.opt_state[0].mu.w
    assert lies(moment, page.mesh, "data", None) and lies(model.w, page.mesh, None, "model")


def test_adams_moments_follow_their_weights(page):
    """Adam's moments get the annotation of their weight, and lie where it lies."""
    with jax.set_mesh(page.mesh):
        optimizer = nnx.Optimizer(page.model, optax.adam(1e-3), wrt=nnx.Param)
    for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        assert lies(moments.w_DF, page.mesh, None, "model")
        assert lies(moments.w_FD, page.mesh, "model", None)
