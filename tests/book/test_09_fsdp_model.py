"""Chapter 9, "FSDP by hand for a Flax model". Its program for a stack of layers, in
examples/fsdp_by_hand.py, has more tests in tests/examples/test_fsdp_by_hand.py.
"""

from functools import lru_cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import meshscope as ms
from compared import assert_same
from defined import definitions, program_at, shown
from layers_of_fsdp import large_weights
from many_devices import fsdp as offered
from many_devices.compiled import stored_program
from pages import BOOK, check_exercise, compiled_for_cpu, exercises_of, run
from traced import equations, kept_for_backward

PAGE = "09-fsdp-model"
FILE = BOOK.parent / "examples" / "fsdp_by_hand.py"
P = jax.P


@lru_cache(maxsize=2)  # compiled once for a page
def new_run(page, fsdp):
    """The page's model and optimizer, not trained."""
    with jax.set_mesh(page.mesh):
        return page.create(fsdp=fsdp)


def new_model(page, fsdp=True):
    model, _ = new_run(page, fsdp)
    return model


def first_batch(page):
    return page.batch_of(slice(0, 64))


def gradient_on(page, model, loss=None):
    """The gradient of the mean loss on the first 64 digits, by shard_map on the page's mesh."""
    specs = nnx.get_partition_spec(model)
    mapped = jax.shard_map(
        jax.grad(loss or page.mean_loss),
        mesh=page.mesh,
        in_specs=(specs, P("data")),
        out_specs=specs,
    )
    return jax.jit(mapped)(model, first_batch(page))


# The program of the page


def test_the_file_is_the_program_of_the_page():
    """Every definition of examples/fsdp_by_hand.py stands on the page as it is, except `main`, the
    lines that load the digits and chapter 4's `compiled_step`, which the page imports, and what a
    stack of layers or the number of devices changes."""
    on_page = shown(PAGE) | {"compiled_step": shown("04-train")["compiled_step"]}
    in_file = definitions(FILE.read_text("utf-8"))
    for name in ("main", "digits", "images_BI", "labels_B"):
        del in_file[name]
    differ = {name for name in in_file if in_file[name] != on_page[name]}
    assert differ == {"mesh", "fsdp_spec", "gather", "Model", "make"}
    assert in_file.keys() >= {"Layer", "gather_and_call", "loss_and_gradient", "step", "train"}


def test_without_a_stack_the_files_rule_is_that_of_the_page(page):
    """So are those of the package, which later pages import."""
    program = program_at(FILE)
    for shape in [(64, 512), (512, 64), (64,), (7, 7, 3, 64), (65, 100), (32, 32), (64, 64, 16)]:
        wanted = page.fsdp_spec(shape, 8)
        assert program.fsdp_spec(shape, 8) == offered.fsdp_spec(shape, 8) == wanted, shape


def test_the_files_stack_computes_what_the_pages_list_does(page):
    """With the same weights, the gradient of the file's stacked model is that of the page's."""
    program, listed = program_at(FILE), new_model(page)

    def stack_of(layers):
        return jax.tree.map(lambda *weights: jnp.stack(weights), *layers)

    def annotated(path, weight):
        spec = program.fsdp_spec(weight.shape, 8, stacked="layers" in jax.tree_util.keystr(path))
        weight.set_metadata(out_sharding=spec)
        return weight

    stacked = program.Model(L=2, D=64, F=512, rngs=nnx.Rngs(0))
    stacked.last = nnx.clone(listed.last)
    stacked.layers = stack_of(listed.layers)
    stacked = jax.tree.map_with_path(annotated, stacked, is_leaf=page.is_weight)
    found, wanted = gradient_on(page, stacked), gradient_on(page, listed)
    assert_same(found.last, wanted.last, rtol=1e-3)
    assert_same(jax.tree.leaves(found.layers), jax.tree.leaves(stack_of(wanted.layers)), rtol=1e-3)


# Which dimension to shard


def test_fsdp_spec_shards_the_largest_dimension_that_the_devices_divide(page):
    """The largest dimension that the devices divide; small weights stay whole."""
    spec = page.fsdp_spec
    assert spec((64, 512), 8) == P(None, "data")
    assert spec((512, 64), 8) == P("data", None)
    assert spec((64,), 8) == P()  # small
    assert spec((16, 96, 384), 8) == P(None, None, "data")
    assert spec((7, 7, 3, 60), 8) == P()  # nothing divides
    assert spec((65, 100), 8) == P() != spec((72, 100), 8)
    assert spec((65, 100), 4) == P(None, "data")
    assert spec((32, 32), 8) == P("data", None) != spec((31, 33), 8)


# A Flax model


def test_gather_makes_a_layer_whole(page):
    """Of a layer, a device stores 64 of 512 columns, and after gather has all."""
    seen = []

    def look(layer):
        seen.extend([layer.up.kernel.shape, page.gather(layer).up.kernel.shape])
        seen.append(page.gather(layer).down.kernel.shape)

    layer = new_model(page).layers[0]
    specs = nnx.get_partition_spec(layer)
    jax.eval_shape(jax.shard_map(look, mesh=page.mesh, in_specs=(specs,), out_specs=P()), layer)
    assert seen == [(64, 64), (64, 512), (512, 64)]


def test_only_with_is_leaf_a_map_stops_at_variables(page):
    """Without it, the function would get bare arrays, which have no annotation."""
    layer = new_model(page).layers[0]
    assert not any(hasattr(leaf, "out_sharding") for leaf in jax.tree.leaves(layer))
    assert all(leaf.out_sharding is not None for leaf in jax.tree.leaves(layer, page.is_weight))


def kept(page):
    """Without jax.checkpoint, gathered weights are kept until the backward pass."""
    return mock.patch.dict(page.variables, gather_and_call=lambda module, x: page.gather(module)(x))


def traced_gradient(page):
    specs = nnx.get_partition_spec(new_model(page))
    mapped = jax.shard_map(
        jax.grad(page.mean_loss), mesh=page.mesh, in_specs=(specs, P("data")), out_specs=specs
    )
    return jax.make_jaxpr(mapped)(new_model(page), first_batch(page)).jaxpr


def times(page, *primitives):
    """How often each occurs in the gradient, traced."""
    traced = traced_gradient(page)
    return [len(list(equations(traced, name))) for name in primitives]


def test_the_models_layers_are_gathered_in_both_passes(page):
    """Up and down of two layers twice."""
    assert times(page, "all_gather", "reduce_scatter") == [2 * 4, 4]


def test_without_checkpoint_the_models_weights_are_gathered_once(page):
    """They are kept until the backward pass."""
    with kept(page):
        assert times(page, "all_gather", "reduce_scatter") == [4, 4]


def test_checkpoint_repeats_the_forward_computation_of_a_layer(page):
    """The gradient multiplies by `up` once more in each layer; of `down`, the backward pass does
    not need the result. A policy that frees only what was gathered repeats no product."""
    (freed,) = times(page, "dot_general")
    with kept(page):
        (once,) = times(page, "dot_general")
    assert freed > once

    def free_gathers(primitive, *_, **__):
        return primitive.name != "all_gather"

    policy = partial(jax.checkpoint, policy=free_gathers)
    freely = policy(lambda layer, x: page.gather(layer)(x))
    with mock.patch.dict(page.variables, gather_and_call=freely):
        assert times(page, "all_gather", "dot_general") == [2 * 4, once]


def kept_shapes(page):
    """Of up and down, the shapes of what the backward pass needs on a device."""
    model, batch = new_model(page), first_batch(page)
    specs = nnx.get_partition_spec(model), P("data")
    found = kept_for_backward(page.mean_loss, model, batch, page.mesh, specs)
    pieces, whole = {(64, 64)}, {(64, 512), (512, 64)}
    return sorted(shape for shape in found if shape in pieces | whole)


def test_only_with_checkpoint_a_device_keeps_its_pieces_of_the_layers(page):
    """Of each layer the backward pass needs one eighth of up and down; without jax.checkpoint all."""
    assert kept_shapes(page) == 4 * [(64, 64)]
    with kept(page):
        assert kept_shapes(page) == 2 * [(64, 512)] + 2 * [(512, 64)]


def test_a_device_stores_73_256_bytes_of_weights(page):
    """One eighth of 131,072 numbers, and 1,930 that are whole, in 4 bytes each. One eighth of all
    would be 66,501; what is whole are the biases, the scales and the kernel of `last`."""
    leaves = jax.tree.leaves(new_model(page))
    whole = sum(leaf.size for leaf in leaves if leaf.is_fully_replicated)
    assert (whole, sum(leaf.size for leaf in leaves)) == (1_930, 1_930 + 131_072)
    assert ms.memory(new_model(page)).bytes_per_device == 4 * (131_072 // 8 + 1_930) == 73_256
    assert 4 * (1_930 + 131_072) == 8 * 66_501
    flat = nnx.to_flat_state(nnx.state(new_model(page)))
    names = {path for path, weight in flat if weight[...].is_fully_replicated}
    assert {path[-1] for path in names - {("last", "kernel")}} == {"bias", "scale"}
    assert ("last", "kernel") in names


def test_every_weight_is_sharded_as_annotated_and_as_fsdp_spec_says(page):
    """The model is annotated by fsdp_spec, and sharded accordingly."""
    for path, weight in nnx.to_flat_state(nnx.state(new_model(page))):
        spec = page.fsdp_spec(weight.shape, 8)
        assert type(weight) is nnx.Param and weight.out_sharding == spec, path
        sharding = jax.NamedSharding(page.mesh, spec)
        assert weight.sharding.is_equivalent_to(sharding, weight.ndim), path


def test_without_fsdp_all_weights_are_copies(page):
    """Without `fsdp`, every weight gets P()."""
    model = new_model(page, fsdp=False)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(model))
    assert all(weight.out_sharding == P() for _, weight in nnx.to_flat_state(nnx.state(model)))


@compiled_for_cpu
def test_no_device_ever_holds_a_whole_matrix(page):
    """The compiled constructor makes pieces: neither the model nor one layer's matrix is whole."""
    with jax.set_mesh(page.mesh):
        program = page.create.lower(fsdp=True).compile()
    ms.assert_no_full_copy(program, new_model(page))
    for shape in ("64,512", "512,64"):
        assert f"f32[{shape}]" not in program.as_text()


def test_the_models_gradient_is_that_of_one_device(page):
    """In every number, for data parallelism and for FSDP."""
    single = jax.device_put(new_model(page), jax.devices()[0])

    def plain_loss(model, batch):  # without shard_map, mesh, gather or pmean
        x_BD, labels_B = batch
        for layer in model.layers:
            x_BD = layer(x_BD)
        scores = model.last(x_BD)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels_B).mean()

    batch = jax.device_put(first_batch(page), jax.devices()[0])
    wanted = jax.jit(jax.grad(plain_loss))(single, batch)
    for fsdp in (True, False):
        model = new_model(page, fsdp)
        assert_same(gradient_on(page, model), wanted, rtol=1e-3)
        _, found = jax.jit(page.loss_and_gradient)(model, first_batch(page))
        assert_same(found, wanted, rtol=1e-3)
        for weight, gradient in zip(jax.tree.leaves(model), jax.tree.leaves(found), strict=True):
            assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)


def trained_on_one_device(page):
    """The model and its losses on a mesh of one device."""
    auto, devices = (AxisType.Auto,), jax.devices()[:1]
    single = jax.make_mesh((1,), ("data",), axis_types=auto, devices=devices)
    with mock.patch.dict(page.variables, mesh=single):
        return page.train(fsdp=False, steps=20)


def test_twenty_steps_give_the_losses_and_weights_of_one_device(page):
    """One device, data parallelism and FSDP: the same losses and weights after twenty steps."""
    single, losses = trained_on_one_device(page)
    assert len(losses) == 20 and losses[-1] < losses[0] / 5
    for name in ("data parallel", "FSDP"):
        trained, others = page.runs[name]
        np.testing.assert_allclose(others, losses, rtol=1e-3)
        assert_same(trained, single, rtol=1e-2, atol=1e-4)  # twenty steps of rounding


def test_the_weights_take_an_eighth_and_what_is_whole(page):
    """532,008 bytes as copies, 73,256 in pieces, also when trained."""
    held = {name: ms.memory(trained).bytes_per_device for name, (trained, _) in page.runs.items()}
    assert held == {"data parallel": 532_008, "FSDP": 73_256}


def test_large_weights_are_still_sharded_when_trained(page):
    """After training, each weight is sharded as it is annotated."""
    trained, _ = page.runs["FSDP"]
    for path, weight in nnx.to_flat_state(nnx.state(trained)):
        sharding = jax.NamedSharding(page.mesh, weight.out_sharding)
        assert weight.sharding.is_equivalent_to(sharding, weight.ndim), path


def test_momentum_is_kept_from_step_to_step(page):
    """The second step moves by the new gradient plus 0.9 times the momentum of the first."""
    with jax.set_mesh(page.mesh):
        model, optimizer = page.create(fsdp=True)
    one_step = jax.jit(page.step)
    model, optimizer, _ = one_step(model, optimizer, first_batch(page))
    first = jax.device_get(jax.tree.leaves(optimizer.opt_state))
    gradient = gradient_on(page, model)
    _, optimizer, _ = one_step(model, optimizer, first_batch(page))
    second = jax.tree.leaves(optimizer.opt_state)
    assert optimizer.step[...] == 2
    for found, before, g in zip(second, first, jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(found, 0.9 * before + g, rtol=1e-3, atol=1e-5)


def recorded(page, fsdp, steps=1):
    """Models and optimizers that `train` steps with, as they come in; and the last as it comes out."""
    seen, original = [], page.compiled_step

    def recording(step, model, optimizer):
        train_step = original(step, model, optimizer)

        def one_step(model, optimizer, batch):
            seen.append((model, optimizer))
            out = train_step(model, optimizer, batch)
            seen.append(out[:2])
            return out

        return one_step

    with mock.patch.dict(page.variables, compiled_step=recording):
        page.train(fsdp=fsdp, steps=steps)
    return seen


def test_the_step_donates_and_returns_pieces(page):
    """The old weights and momentum are deleted, and the new ones are sharded as the old were."""
    before, after = recorded(page, fsdp=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    held = ms.memory(new_model(page)).bytes_per_device
    assert ms.memory(after).bytes_per_device == 2 * held + 4  # and the count of steps


def test_right_answers_are_counted_over_all_devices(page):
    """psum adds the right answers of all devices, as many as the same model has on one device."""
    assert len(page.unseen[1]) == 360
    single = jax.device_put(page.trained, jax.devices()[0])
    copies, _ = page.runs["data parallel"]  # for which gather does nothing
    x_BD, labels_B = jax.device_get(page.unseen)
    for model in (page.trained, copies):
        whole = jax.device_get(model)
        for _, weight in nnx.to_flat_state(nnx.state(whole)):
            weight.set_metadata(out_sharding=P())
        right = (whole(x_BD).argmax(-1) == labels_B).sum()
        specs = nnx.get_partition_spec(model), P("data")
        count = jax.shard_map(page.count_correct, mesh=page.mesh, in_specs=specs, out_specs=P())
        assert int(jax.jit(count)(model, page.unseen)) == right > 180
    assert ms.memory(single).bytes_per_device == 532_008


def test_the_trained_model_cannot_be_called_outside_shard_map(page):
    """There is no axis `data` to gather along."""
    with pytest.raises(NameError, match="data"):
        jax.eval_shape(page.Model.__call__, page.trained, page.unseen[0])


# Clip by the global norm


@pytest.fixture(scope="module")
def matrix(compiled_once):
    """The page before, whose one weight is in pieces."""
    with run("09-fsdp", until="fsdp") as executed:
        yield executed


@pytest.fixture(scope="module")
def all_in_pieces(matrix):
    """optax's update on one device, and inside shard_map where every weight is in pieces."""

    def step_of(rule, loss, w_DF, batch):
        updates, _ = rule.update(jax.grad(loss)(w_DF, batch), rule.init(w_DF))
        return updates

    def on_one_and_on_eight(rule):
        mapped = jax.shard_map(
            partial(step_of, rule, matrix.fsdp_mean_error),
            mesh=matrix.mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        single = jax.jit(partial(step_of, rule, matrix.error_of))(matrix.w_DF, matrix.batch)
        return single, jax.jit(mapped)(matrix.w_DF, matrix.batch)

    return on_one_and_on_eight


def test_in_pieces_adam_takes_the_step_of_one_device(all_in_pieces):
    """Adam updates each number by itself, so pieces are enough."""
    assert_same(*all_in_pieces(optax.adam(0.1)), rtol=1e-3)


def test_clipped_on_each_device_the_gradient_is_8_to_the_half_times_too_long(all_in_pieces):
    """optax.clip_by_global_norm inside shard_map: each device clips its own pieces to the limit."""
    norms = map(optax.tree.norm, all_in_pieces(optax.clip_by_global_norm(0.05)))
    assert np.allclose([*norms], [0.05, 0.05 * 8**0.5], rtol=1e-4)


def test_if_one_weight_is_whole_jax_refuses_to_clip_on_each_device(page):
    """Its copies would become unequal."""

    def clipped(model, batch_block):
        gradient = jax.grad(page.mean_loss)(model, batch_block)
        return optax.clip_by_global_norm(0.01).update(gradient, None)[0]

    specs = nnx.get_partition_spec(new_model(page))
    mapped = jax.shard_map(clipped, mesh=page.mesh, in_specs=(specs, P("data")), out_specs=specs)
    with pytest.raises(ValueError, match="could not infer replication"):
        jax.eval_shape(mapped, new_model(page), first_batch(page))


def test_outside_shard_map_optax_clips_pieces_as_on_one_device(page):
    """Clipped as the page says, sharded gradients are those that one device clips."""
    clip = optax.clip_by_global_norm(1.0)
    length = float(optax.tree.norm(jax.device_get(new_model(page))))
    for factor in (3 / length, 1 / (3 * length)):  # longer than the limit of 1, and shorter
        model = jax.tree.map(lambda leaf: factor * leaf, new_model(page))  # noqa: B023
        found, _ = jax.jit(lambda g: clip.update(g, None))(model)
        wanted, _ = clip.update(jax.device_get(model), None)
        assert_same(found, wanted)
        norm = float(optax.tree.norm(jax.device_get(found)))
        assert norm == pytest.approx(min(1, factor * length), rel=1e-4)
        assert ms.memory(found).bytes_per_device == ms.memory(new_model(page)).bytes_per_device


def test_an_optimizer_that_clips_limits_the_step_of_the_page(page):
    """The page's chain of clipping and SGD, in an nnx.Optimizer: 0.05 times a gradient of norm 1."""
    model = jax.tree.map(jnp.copy, new_model(page))
    loss_gradient = gradient_on(page, model)
    assert optax.tree.norm(jax.device_get(loss_gradient)) > 1.5  # so the limit matters
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05))
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
    before = jax.device_get(model)
    after, _, _ = jax.jit(page.step)(model, optimizer, first_batch(page))
    moved = jax.tree.map(lambda a, b: a - b, jax.device_get(after), before)
    assert float(optax.tree.norm(moved)) == pytest.approx(0.05, rel=1e-3)


# Optimizer state


def test_momentum_is_sharded_as_the_weights(page):
    """`create` makes it inside jax.jit, and nnx.Optimizer gives it the annotation of its weight."""
    for fsdp in (True, False):
        model, optimizer = new_run(page, fsdp)
        pairs = zip(jax.tree.leaves(model), jax.tree.leaves(optimizer.opt_state), strict=True)
        for weight, momentum in pairs:
            assert momentum.shape == weight.shape
            assert momentum.sharding.is_equivalent_to(weight.sharding, weight.ndim)
        held = [ms.memory(tree).bytes_per_device for tree in (model, optimizer)]
        assert held[1] == held[0] + 4  # and the count of steps


@pytest.mark.parametrize("in_context", [False, True])
def test_made_inside_jit_the_moments_are_whole(page, in_context):
    """146,516 bytes outside jax.jit, 1,064,020 inside, where optax alone sees annotated weights."""
    init = optax.adam(1e-3).init
    with jax.set_mesh(page.mesh if in_context else None):
        states = init(new_model(page)), jax.jit(init)(new_model(page))
    assert [ms.memory(state).bytes_per_device for state in states] == [146_516, 1_064_020]


def moment(axis_type, jitted, in_context):
    """Adam's first moment of a weight in eight pieces."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    w = jax.device_put(np.ones((64, 32), "float32"), jax.NamedSharding(mesh, P("data")))
    init = optax.adam(1e-3).init
    with jax.set_mesh(mesh if in_context else None):
        state, *_ = (jax.jit(init) if jitted else init)(w)
    return state.mu


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_context", [False, True])
def test_outside_jit_moments_are_made_in_pieces(axis_type, in_context):
    """Outside jax.jit, zeros_like inherits the sharding of the weight."""
    assert moment(axis_type, False, in_context).sharding.spec[0] == "data"


def test_inside_jit_and_without_a_mesh_zeros_are_whole_on_one_device():
    """Inside jax.jit, without a mesh in the context, zeros are made whole on one device."""
    assert len(moment(AxisType.Auto, True, False).devices()) == 1


# What FSDP costs


def sent(name, compiler):
    """The bytes that a device sends."""
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"])


def test_with_checkpoint_fsdp_sends_1_5_times_the_bytes_of_data_parallelism():
    """Compiled for H100s, the large model in float32: 1.5 times what an all-reduce of all gradients
    sends, and as much as that if gathered weights are kept."""
    count = sum(leaf.size for leaf in jax.tree.leaves(large_weights()))
    all_reduced = 2 * 7 / 8 * 4 * count
    assert sent("fsdp-freed", "gpu") / all_reduced == pytest.approx(1.5, rel=0.01)
    assert sent("fsdp-kept", "gpu") / all_reduced == pytest.approx(1, rel=0.01)


# On your own model


def test_the_devices_have_to_divide_the_batch(page):
    """Sixty rows cannot be sharded over eight devices."""
    with pytest.raises(ValueError, match="evenly divide"):
        page.batch_of(slice(0, 60))


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
