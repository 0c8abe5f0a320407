# @title The training step of chapter 4, compiled for a table
from functools import partial
import optax

jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
momentum = optax.sgd(0.01, momentum=0.9)

def make(config, rules):
    """A new model and its optimizer."""
    model = make_model(config, rules)
    return model, nnx.Optimizer(model, momentum, wrt=nnx.Param)

def step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return model, optimizer, loss

def step_program(config, rules, mesh, B):
    """The step for a batch of B images, compiled from shapes and not run."""
    state = nnx.merge(*nnx.get_abstract_model(lambda: make(config, rules), mesh))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    by_images = jax.NamedSharding(mesh, rules("batch"))
    like = partial(jax.ShapeDtypeStruct, sharding=by_images)
    batch = like((B, config.S, config.I), "float32"), like((B,), "int32")
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, None))
        return jitted.lower(*state, batch).compile()
