"""examples/fsdp_by_hand.py: chapter 9's program for a stack of layers, of which JAX compiles one."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_by_hand as example
import meshscope as ms
from defined import definitions
from layers_of_fsdp import large_weights
from many_devices import fsdp as offered
from many_devices.stacked import large
from traced import equations, kept_for_backward

P = jax.P


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def test_it_trains_with_both_strategies(capsys):
    """Called as its head says, on eight devices: the same losses, and an eighth of the bytes."""
    example.main()
    said = capsys.readouterr().out
    losses = re.findall(r"loss ([\d.]+) at step 0, ([\d.]+) at step 19", said)
    assert len(losses) == 2 and losses[0][0] == losses[1][0]
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=2e-4)
    assert re.findall(r"([\d,]+) bytes", said) == ["1,061,416", "143,912"]


def test_fsdp_spec_never_shards_the_first_dimension_of_a_stack():
    """The largest dimension that the devices divide, never L; small weights stay whole."""
    spec = example.fsdp_spec
    assert spec((16, 96, 384), 8, stacked=True) == P(None, None, "data")
    assert spec((512, 96, 48), 8, stacked=True) == P(None, "data", None)
    assert spec((512, 96, 48), 8) == P("data", None, None)
    assert spec((512, 96), 8, stacked=True) == P()  # small
    shapes = [leaf.shape for leaf in jax.tree.leaves(large_weights())]
    assert all(spec(shape, 8, len(shape) > 2 or shape[0] == large.L) != P() for shape in shapes)


def test_every_weight_is_sharded_as_annotated_and_no_stack_by_layers(mesh):
    with jax.set_mesh(mesh):
        model, _ = example.create(fsdp=True)
    for path, weight in nnx.to_flat_state(nnx.state(model)):
        stacked = path[0] == "layers"
        spec = example.fsdp_spec(weight.shape, 8, stacked)
        assert weight.out_sharding == spec, path
        assert weight.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), weight.ndim), path
        assert not stacked or weight.sharding.shard_shape(weight.shape)[0] == weight.shape[0] == 4


def abstract(mesh, L):
    """A model of L layers as shapes, annotated, and a batch."""

    def make():
        model = example.Model(L, D=64, F=512, rngs=nnx.Rngs(0))
        for path, weight in nnx.to_flat_state(nnx.state(model)):
            spec = example.fsdp_spec(weight.shape, mesh.size, stacked="layers" in path)
            weight.set_metadata(out_sharding=spec)
        return model

    return jax.eval_shape(make), (example.images_BI[:64], example.labels_B[:64])


def mapped(mesh, function, model, out_specs):
    specs = nnx.get_partition_spec(model), P("data")
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs)


def test_gather_makes_a_layer_of_the_stack_whole(mesh):
    """Of a layer that the scan takes out, a device has 64 of 512 columns, after gather all."""
    model, batch = abstract(mesh, 4)
    seen = []

    def look(model, batch_block):
        layer = jax.tree.map(lambda stack: stack[0], model.layers)
        seen.extend([layer.up.kernel.shape, example.gather(layer).up.kernel.shape])
        seen.append(example.gather(layer).down.kernel.shape)

    jax.eval_shape(mapped(mesh, look, model, P()), model, batch)
    assert seen == [(64, 64), (64, 512), (512, 64)]


def test_the_package_offers_the_same_rule_and_gather(mesh):
    """Later pages import both from many_devices.fsdp; traced, its `gather` is the file's."""
    (spec,), (offered_spec,) = (
        definitions(inspect.getsource(rule)).values()
        for rule in (example.fsdp_spec, offered.fsdp_spec)
    )
    assert spec == offered_spec
    model, batch = abstract(mesh, 4)

    def traced(gather):
        def whole(model, batch_block):
            return jax.lax.pmean(jax.tree.map(jnp.sum, gather(model)), "data")

        return str(jax.make_jaxpr(mapped(mesh, whole, model, P()))(model, batch))

    assert traced(example.gather) == traced(offered.gather)
    assert "all_gather" in traced(offered.gather)


@pytest.mark.parametrize("L", [4, 80])
def test_the_program_contains_one_layer(mesh, L):
    """However many there are, up and down are written once in each pass, and run L times."""
    model, batch = abstract(mesh, L)
    gradient = mapped(
        mesh, jax.grad(example.mean_loss), model, out_specs=nnx.get_partition_spec(model)
    )
    traced = jax.make_jaxpr(gradient)(model, batch).jaxpr
    times = sorted(n for _, n in equations(traced, "all_gather"))
    assert times == [L, L, L, L]  # up and down in two passes
    assert sorted(n for _, n in equations(traced, "reduce_scatter")) == [L, L]


@pytest.mark.parametrize(
    "checkpoint, wanted", [(True, [(4, 64, 64)] * 2), (False, [(4, 64, 512), (4, 512, 64)])]
)
def test_only_with_checkpoint_a_device_keeps_its_pieces(mesh, monkeypatch, checkpoint, wanted):
    """Of up and down, in all four layers, the backward pass needs one eighth on each device; without
    jax.checkpoint all of them."""
    if not checkpoint:
        monkeypatch.setattr(example, "gather_and_call", lambda module, x: example.gather(module)(x))
    model, batch = abstract(mesh, 4)
    specs = nnx.get_partition_spec(model), P("data")
    kept = kept_for_backward(example.mean_loss, model, batch, mesh, specs)
    weights = {(4, 64, 64), (4, 64, 512), (4, 512, 64)}
    assert sorted(shape for shape in kept if shape in weights) == wanted


def test_twenty_steps_give_the_losses_of_one_device(monkeypatch):
    """And the trained weights are in pieces."""
    auto, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:1]
    single = jax.make_mesh((1,), ("data",), axis_types=auto, devices=devices)
    trained, losses = example.train(fsdp=True)
    monkeypatch.setattr(example, "mesh", single)
    _, wanted = example.train(fsdp=False)
    np.testing.assert_allclose(losses, wanted, rtol=1e-3)
    assert ms.memory(trained).bytes_per_device == 143_912
