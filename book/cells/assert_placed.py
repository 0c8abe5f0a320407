# @title assert_placed: does each weight lie where its names say?
def assert_placed(model, mesh):
    """Every weight lies where its names and the table of now say."""
    state = nnx.state(model, nnx.Param)
    wanted = jax.tree.leaves(nnx.get_named_sharding(state, mesh))
    for (path, weight), sharding in zip(nnx.to_flat_state(state), wanted, strict=True):
        if not weight.sharding.is_equivalent_to(sharding, weight.ndim):
            lies = getattr(weight.sharding, "spec", "whole on one device")
            raise AssertionError(f"{path} lies as {lies}, not as {sharding.spec}")
