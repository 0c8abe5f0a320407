"""FSDP for a module whose code stays as it is: what the page says is true."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "09e-any-module"
P = jax.P


def assert_same(tree, expected):
    """Equal up to float32 rounding: eight devices add in another order than one."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def asked(page, wrapped, operation):
    """How many of an operation the gradient asks for, before XLA compiles it."""
    program = jax.make_jaxpr(page.on_eight(wrapped))(wrapped, page.x_BSD)
    return str(program).count(f" {operation}[")


# Annotations


def test_the_weights_of_attention_are_annotated(page):
    """Each kernel is sharded along its largest dimension that eight divides; each bias is whole."""
    specs = jax.tree.leaves(nnx.get_partition_spec(page.attention))
    assert sum("data" in spec for spec in specs) == 4 and specs.count(P()) == 4
    assert page.query.kernel.out_sharding == P("data", None, None)
    assert page.query.bias.out_sharding == P()


def test_annotating_shards_nothing(page):
    """Afterwards the module is whole, on one device."""
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(page.attention))


def test_of_the_network_seven_matrices_are_sharded(page):
    """Six of its layers and one of none; six biases stay whole."""
    assert page.sharded == 7 == 4 + 2 + 1 and len(page.specs) - page.sharded == 6


def test_a_weight_annotated_in_its_constructor_wants_a_mesh_unless_told_otherwise():
    """Flax shards it as soon as it is made; nnx.use_eager_sharding(False) turns that off."""

    def annotated():
        return nnx.Param(jnp.ones((8, 8)), out_sharding=("data", None))

    with pytest.raises(ValueError, match="mesh context or metadata is required"):
        annotated()
    with nnx.use_eager_sharding(False):
        weight = annotated()
    weight.set_metadata(out_sharding=P(None, "data"))
    assert weight.out_sharding == P(None, "data")


# The wrapper


def test_inside_shard_map_a_wrapped_weight_is_a_piece_and_gathered_it_is_whole(page):
    """Of the (32, 4, 8) of a kernel a device has (4, 4, 8)."""
    shapes = []

    def look(net):
        shapes.append(net.query.kernel.shape)
        shapes.append(page.gather_around_wrappers(net).query.kernel.shape)

    specs = nnx.get_partition_spec(page.attention)
    mapped = jax.shard_map(look, mesh=page.mesh, in_specs=(specs,), out_specs=P())
    jax.eval_shape(mapped, page.attention)
    assert shapes == [(4, 4, 8), (32, 4, 8)]


def test_the_gradient_of_attention_is_that_of_one_device(page):
    """Every number of it, and it is sharded as the weights are."""
    assert_same(page.attention_gradient, page.on_one(page.attention, page.x_BSD))
    kernel = page.attention_gradient.module.query.kernel
    assert kernel.sharding.shard_shape(kernel.shape) == (4, 4, 8)


def test_the_gradient_of_the_network_is_that_of_one_device(page):
    """Every number of it, with each layer wrapped and then the model."""
    assert_same(page.gradient, page.true_gradient)


def test_the_gradient_asks_for_13_gathers(page):
    """Twice for each of six matrices in the layers, once for w_DV; seven reduce-scatters."""
    assert asked(page, page.wrapped, "all_gather") == 13 == 2 * 6 + 1
    assert asked(page, page.wrapped, "reduce_scatter") == 7


@compiled_for_cpu
def test_compiled_for_cpu_the_second_gathers_stay(page):
    """Except with JAX 0.10, whose compiler keeps the result of the first: seven in all."""
    program = jax.jit(page.on_eight(page.wrapped)).lower(page.wrapped, page.x_BSD).compile()
    kinds = [move.kind for move in ms.collectives(program, page.mesh)]
    assert kinds.count("all-gather") == (13 if jax.__version_info__ >= (0, 11) else 7)


def test_a_wrapper_around_everything_holds_all_weights_at_once(page):
    """One wrapper around the model gathers all seven matrices in one call."""
    theirs = page.annotate(page.Theirs(nnx.Rngs(0)))
    program = jax.make_jaxpr(page.on_eight(page.Gathered(theirs, remat=page.unchanged)))(
        page.Gathered(theirs, remat=page.unchanged), page.x_BSD
    )
    body = str(program)
    first_product = body.index(" dot_general[")
    assert body[:first_product].count(" all_gather[") == 7
    nested = str(jax.make_jaxpr(page.on_eight(page.wrapped))(page.wrapped, page.x_BSD))
    assert nested[: nested.index(" dot_general[")].count(" all_gather[") == 1 + 4


def test_checkpoint_around_the_model_as_well_computes_layers_once_more(page):
    """With the outer wrapper in jax.checkpoint the gradient asks for more products."""
    products = asked(page, page.wrapped, "dot_general")
    assert products < asked(page, page.Gathered(page.theirs), "dot_general")


# The norm


def test_global_norm_is_the_norm_on_one_device(page):
    """0.273 for the wrapped model on eight devices and on one."""
    true_norm = optax.tree.norm(page.true_gradient)
    np.testing.assert_allclose(page.norm, true_norm, rtol=1e-5)
    assert f"{page.norm:.3f}" == "0.273"


def test_the_norm_of_own_pieces_is_another_on_each_device(page):
    """From 0.109 to 0.121, so none would clip at 0.2, where the gradient is to be scaled down."""
    local = np.asarray(page.norms_by_device)
    assert (f"{local.min():.3f}", f"{local.max():.3f}") == ("0.109", "0.121")
    assert local.max() < 0.2 < page.norm and len(np.unique(local)) > 1


def test_scaled_by_global_norm_the_gradient_is_what_optax_clips_on_one_device(page):
    """At 0.2 every number is that of optax.clip_by_global_norm on one device."""
    scale = jnp.minimum(1, 0.2 / page.norm)
    by_optax, _ = optax.clip_by_global_norm(0.2).update(page.true_gradient, None)
    assert_same(jax.tree.map(lambda leaf: leaf * scale, page.gradient), by_optax)


# The limits


class Counts(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x_BSD, *, scale=1):
        self.calls[...] += 1
        return scale * x_BSD


def test_what_a_call_changes_in_a_wrapped_module_is_lost(page):
    """A counter counts one call of the module, and none of the wrapped one; no error is raised."""

    def calls_after(wrap):
        def call(module, x_block_BSD):
            wrap(module)(x_block_BSD)
            return module.calls[...]

        mapped = jax.shard_map(call, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(mapped)(page.annotate(Counts()), page.x_BSD)

    assert calls_after(page.unchanged) == 1 and calls_after(page.Gathered) == 0


def test_arguments_by_name_raise(page):
    """Gathered is called with positions only."""
    wrapped = page.Gathered(page.annotate(Counts()))
    raised = attempt(lambda: wrapped(page.x_BSD, scale=2))
    assert raised.startswith("TypeError") and "scale" in raised


def test_the_path_of_a_weight_changes(page):
    """up.kernel is now up.module.kernel."""
    assert not hasattr(page.theirs.up, "kernel") and page.theirs.up.module.kernel is not None
    paths = {path for path, _ in nnx.to_flat_state(nnx.state(page.theirs))}
    assert ("up", "module", "kernel") in paths


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
