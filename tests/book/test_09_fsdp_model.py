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


@lru_cache(maxsize=1)  # compiled once for a page
def new_model(page):
    """The page's model, sharded for FSDP and not trained."""
    return page.init_sharded(page.mesh, fsdp=True)


def batch_of_digits(page, first=0):
    rows = slice(first, first + 64)
    return page.images_BI[rows], page.labels_B[rows]


def gradient_on(page, mesh, model, loss=None):
    """The gradient of the mean loss on the first 64 digits, by shard_map on this mesh."""
    specs = nnx.get_partition_spec(model)
    mapped = jax.shard_map(
        jax.grad(loss or page.mean_loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs
    )
    return jax.jit(mapped)(model, batch_of_digits(page))


# The program of the page


def test_the_file_is_the_program_of_the_page():
    """Every definition of examples/fsdp_by_hand.py stands on the page as it is, except `main`, the
    lines that load the digits, which the page imports, and what a stack of layers changes."""
    on_page = shown(PAGE)
    in_file = definitions(FILE.read_text("utf-8"))
    for name in ("main", "digits", "images_BI", "labels_B"):
        del in_file[name]
    differ = {name for name in in_file if in_file[name] != on_page[name]}
    assert differ == {"fsdp_spec", "gather", "Model", "make"}
    assert in_file.keys() >= {"Layer", "gather_and_call", "init_sharded", "compiled_step", "train"}


def test_without_a_stack_the_files_rule_is_that_of_the_page(page):
    """So are those of the package, which later pages import."""
    program = program_at(FILE)
    for shape in [(96, 384), (384, 96), (96,), (7, 7, 3, 64), (65, 100), (32, 32), (64, 64, 16)]:
        wanted = page.fsdp_spec(shape, 8)
        assert program.fsdp_spec(shape, 8) == offered.fsdp_spec(shape, 8) == wanted, shape


def test_the_files_stack_computes_what_the_pages_list_does(page):
    """With the same weights, the gradient of the file's stacked model is that of the page's."""
    program, listed = program_at(FILE), new_model(page)

    def stack_of(layers):
        return jax.tree.map(lambda *weights: jnp.stack(weights), *layers)

    stacked = program.Model(L=2, D=96, F=384, rngs=nnx.Rngs(0))
    stacked.enter, stacked.leave = nnx.clone(listed.enter), nnx.clone(listed.leave)
    stacked.layers = stack_of(listed.layers)
    for path, weight in nnx.to_flat_state(nnx.state(stacked)):
        spec = program.fsdp_spec(weight.shape, 8, stacked="layers" in path)
        weight.set_metadata(out_sharding=spec)
    found = gradient_on(page, page.mesh, stacked)
    wanted = gradient_on(page, page.mesh, listed)
    for part in ("enter", "leave"):
        assert_same(getattr(found, part), getattr(wanted, part), rtol=1e-3)
    assert_same(jax.tree.leaves(found.layers), jax.tree.leaves(stack_of(wanted.layers)), rtol=1e-3)


# Which dimension to shard


def test_fsdp_spec_shards_the_largest_dimension_that_the_devices_divide(page):
    """The largest dimension that the devices divide; small weights stay whole."""
    spec = page.fsdp_spec
    assert spec((96, 384), 8) == P(None, "data")
    assert spec((384, 96), 8) == P("data", None)
    assert spec((96,), 8) == P()  # small
    assert spec((16, 96, 384), 8) == P(None, None, "data")
    assert spec((7, 7, 3, 60), 8) == P()  # nothing divides
    assert spec((65, 100), 8) == P() != spec((72, 100), 8)
    assert spec((65, 100), 4) == P(None, "data")
    assert spec((32, 32), 8) == P("data", None) != spec((31, 33), 8)


# A Flax model


def test_gather_makes_a_layer_whole(page):
    """Of a layer, a device stores 48 of 384 columns, and after gather has all."""
    seen = []

    def look(layer):
        seen.extend([layer.up.kernel.shape, page.gather(layer).up.kernel.shape])
        seen.append(page.gather(layer).down.kernel.shape)

    layer = new_model(page).layers[0]
    specs = nnx.get_partition_spec(layer)
    jax.eval_shape(jax.shard_map(look, mesh=page.mesh, in_specs=(specs,), out_specs=P()), layer)
    assert seen == [(96, 48), (96, 384), (384, 96)]


def kept(page):
    """Without jax.checkpoint, gathered weights are kept until the backward pass."""
    return mock.patch.dict(page.variables, gather_and_call=lambda module, x: page.gather(module)(x))


def gathers_and_scatters(page):
    """Of the gradient, traced."""
    specs = nnx.get_partition_spec(new_model(page))
    mapped = jax.shard_map(
        jax.grad(page.mean_loss), mesh=page.mesh, in_specs=(specs, P("data")), out_specs=specs
    )
    traced = jax.make_jaxpr(mapped)(new_model(page), batch_of_digits(page)).jaxpr
    gathers, scatters = equations(traced, "all_gather"), equations(traced, "reduce_scatter")
    return len(list(gathers)), len(list(scatters))


def test_the_models_layers_are_gathered_in_both_passes(page):
    """Once what enters, whose gradient does not need it, and up and down of two layers twice."""
    assert gathers_and_scatters(page) == (1 + 2 * 4, 1 + 4)


def test_without_checkpoint_the_models_weights_are_gathered_once(page):
    """They are kept until the backward pass."""
    with kept(page):
        assert gathers_and_scatters(page) == (1 + 4, 1 + 4)


def kept_shapes(page):
    """Of up and down, the shapes of what the backward pass needs on a device."""
    model, batch = new_model(page), batch_of_digits(page)
    specs = nnx.get_partition_spec(model), P("data")
    found = kept_for_backward(page.mean_loss, model, batch, page.mesh, specs)
    pieces, whole = {(96, 48), (48, 96)}, {(96, 384), (384, 96)}
    return sorted(shape for shape in found if shape in pieces | whole)


def test_only_with_checkpoint_a_device_keeps_its_pieces_of_the_layers(page):
    """Of each layer the backward pass needs one eighth of up and down; without jax.checkpoint all."""
    assert kept_shapes(page) == 2 * [(48, 96)] + 2 * [(96, 48)]
    with kept(page):
        assert kept_shapes(page) == 2 * [(96, 384)] + 2 * [(384, 96)]


def test_a_device_stores_85_672_bytes_of_weights(page):
    """One eighth of 153,600 numbers, and 2,218 that are whole, in 4 bytes each."""
    model = page.init_sharded(page.mesh, fsdp=True)
    leaves = jax.tree.leaves(model)
    whole = sum(leaf.size for leaf in leaves if leaf.is_fully_replicated)
    assert (whole, sum(leaf.size for leaf in leaves)) == (2_218, 2_218 + 153_600)
    assert ms.memory(model).bytes_per_device == 4 * (153_600 // 8 + 2_218) == 85_672


def test_every_weight_is_sharded_as_annotated_and_as_fsdp_spec_says(page):
    """The model is annotated by fsdp_spec, and sharded accordingly."""
    model = page.init_sharded(page.mesh, fsdp=True)
    for path, weight in nnx.to_flat_state(nnx.state(model)):
        spec = page.fsdp_spec(weight.shape, 8)
        assert weight.out_sharding == spec, path
        sharding = jax.NamedSharding(page.mesh, spec)
        assert weight.sharding.is_equivalent_to(sharding, weight.ndim), path


def test_without_fsdp_all_weights_are_copies(page):
    """Without `fsdp`, every weight gets P()."""
    model = page.init_sharded(page.mesh, fsdp=False)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(model))
    assert nnx.to_flat_state(nnx.state(model))[0][1].out_sharding == P()


@compiled_for_cpu
def test_no_device_ever_holds_a_whole_matrix(page):
    """The compiled constructor makes pieces: neither the model nor one layer's matrix is whole."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, new_model(page))
    program = jax.jit(partial(page.make, 8, True), out_shardings=shardings).lower().compile()
    ms.assert_no_full_copy(program, new_model(page))
    for shape in ("96,384", "384,96"):
        assert f"f32[{shape}]" not in program.as_text()


def test_the_models_gradient_is_that_of_one_device(page):
    """In every number, for data parallelism and for FSDP."""
    single = jax.device_put(new_model(page), jax.devices()[0])

    def plain_loss(model, batch):  # without shard_map, mesh, gather or pmean
        x_BI, labels_B = batch
        x_BD = model.enter(x_BI)
        for layer in model.layers:
            x_BD = layer(x_BD)
        scores = model.leave(x_BD)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels_B).mean()

    wanted = jax.jit(jax.grad(plain_loss))(single, batch_of_digits(page))
    assert_same(gradient_on(page, page.mesh, new_model(page)), wanted, rtol=1e-3)
    copies = page.init_sharded(page.mesh, fsdp=False)
    assert_same(gradient_on(page, page.mesh, copies), wanted, rtol=1e-3)


def trained_on_one_device(page):
    """The model and its losses on a mesh of one device."""
    auto, devices = (AxisType.Auto,), jax.devices()[:1]
    single = jax.make_mesh((1,), ("data",), axis_types=auto, devices=devices)
    return page.train(single, fsdp=False, steps=20)


def test_twenty_steps_give_the_losses_and_weights_of_one_device(page):
    """One device, data parallelism and FSDP: the same losses and weights after twenty steps."""
    single, losses = trained_on_one_device(page)
    assert len(losses) == 20 and losses[-1] < losses[0] / 5
    for name in ("data parallel", "FSDP"):
        trained, others = page.runs[name]
        np.testing.assert_allclose(others, losses, rtol=1e-3)
        assert_same(trained, single, rtol=1e-2, atol=1e-4)  # twenty steps of rounding


def test_the_weights_take_an_eighth_and_what_is_whole(page):
    """623,272 bytes as copies, 85,672 in pieces, also when trained."""
    held = {name: ms.memory(trained).bytes_per_device for name, (trained, _) in page.runs.items()}
    assert held == {"data parallel": 623_272, "FSDP": 85_672}


def test_large_weights_are_still_sharded_when_trained(page):
    """After training, each weight is sharded as it is annotated."""
    trained, _ = page.runs["FSDP"]
    for path, weight in nnx.to_flat_state(nnx.state(trained)):
        sharding = jax.NamedSharding(page.mesh, weight.out_sharding)
        assert weight.sharding.is_equivalent_to(sharding, weight.ndim), path


def test_momentum_is_kept_from_step_to_step(page):
    """The second step moves by the new gradient plus 0.9 times the momentum of the first."""
    model = page.init_sharded(page.mesh, fsdp=True)
    momentum = page.optimizer.init(model)
    one_step = page.compiled_step(page.mesh, model, momentum)
    model, momentum, _ = one_step(model, momentum, batch_of_digits(page))
    first = jax.device_get(jax.tree.leaves(momentum))
    gradient = gradient_on(page, page.mesh, model)
    norm = optax.tree.norm(jax.device_get(gradient))
    _, momentum, _ = one_step(model, momentum, batch_of_digits(page))
    for found, before, g in zip(jax.tree.leaves(momentum), first, jax.tree.leaves(gradient)):
        wanted = 0.9 * before + np.minimum(1, 1 / norm) * g
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def test_the_run_makes_its_momentum_in_pieces(page):
    """`train` makes the momentum outside jax.jit, so it is sharded as the weights are."""
    held, original = [], page.compiled_step

    def recorded(mesh, model, momentum):
        held.extend(ms.memory(tree).bytes_per_device for tree in (model, momentum))
        return original(mesh, model, momentum)

    with mock.patch.dict(page.variables, compiled_step=recorded):
        page.train(page.mesh, fsdp=True, steps=1)
    assert held == [85_672, 85_672]


def test_the_step_donates_and_returns_pieces(page):
    """The old weights and momentum are deleted, and the new ones are sharded as the old were."""
    model = page.init_sharded(page.mesh, fsdp=True)
    momentum = page.optimizer.init(model)
    held = ms.memory(model).bytes_per_device
    one_step = page.compiled_step(page.mesh, model, momentum)
    after = one_step(model, momentum, batch_of_digits(page))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((model, momentum)))
    assert ms.memory(after).bytes_per_device == 2 * held + 4  # and the loss


def test_the_step_keeps_the_shardings_that_it_gets(page):
    """A momentum that comes in whole goes out whole; the CPU's compiler alone would shard some of it."""
    model = page.init_sharded(page.mesh, fsdp=True)
    whole = jax.NamedSharding(page.mesh, P())
    momentum = jax.device_put(page.optimizer.init(model), whole)
    one_step = page.compiled_step(page.mesh, model, momentum)
    model, momentum, _ = one_step(model, momentum, batch_of_digits(page))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(momentum))
    assert ms.memory(model).bytes_per_device == 85_672


def test_right_answers_are_counted_over_all_devices(page):
    """psum adds the right answers of all devices, as many as the same model has on one device."""
    unseen = page.images_BI[1437:], page.labels_B[1437:]
    copies, _ = page.runs["data parallel"]  # for which gather does nothing
    specs = dict(in_specs=(nnx.get_partition_spec(copies), P("data")), out_specs=P())
    right = jax.jit(jax.shard_map(page.answer_count, mesh=page.mesh, **specs))(copies, unseen)
    single = jax.device_put(copies, jax.devices()[0])
    answers = jax.jit(page.Model.__call__)(single, unseen[0]).argmax(-1)
    assert int(right) == int((answers == unseen[1]).sum()) > len(unseen[1]) / 2


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
        jax.eval_shape(mapped, new_model(page), batch_of_digits(page))


def test_outside_shard_map_optax_clips_pieces_as_on_one_device(page):
    """Clipped by the page's own `clip`, sharded gradients are those that one device clips."""
    length = float(optax.tree.norm(jax.device_get(new_model(page))))
    for factor in (3 / length, 1 / (3 * length)):  # longer than the limit of 1, and shorter
        model = jax.tree.map(lambda leaf: factor * leaf, new_model(page))  # noqa: B023
        found, _ = jax.jit(lambda g: page.clip.update(g, None))(model)
        wanted, _ = page.clip.update(jax.device_get(model), None)
        assert_same(found, wanted)
        norm = float(optax.tree.norm(jax.device_get(found)))
        assert norm == pytest.approx(min(1, factor * length), rel=1e-4)
        assert ms.memory(found).bytes_per_device == ms.memory(new_model(page)).bytes_per_device


def test_the_page_clips_its_first_gradient(page):
    """The limit of 1.0 matters in the page's run: its first gradient is longer."""
    assert optax.tree.norm(jax.device_get(gradient_on(page, page.mesh, new_model(page)))) > 1.5


# Optimizer state


def test_momentum_and_moments_are_sharded_as_the_weights(page):
    """Made outside jax.jit, each array of the state is sharded as its weight is."""
    held, adam = ms.memory(new_model(page)).bytes_per_device, optax.adam(1e-3)
    for rule, times in ((page.optimizer, 1), (adam, 2)):
        state = rule.init(new_model(page))
        specs = jax.tree.leaves(nnx.get_partition_spec(state))
        for array, spec in zip(jax.tree.leaves(state), specs, strict=True):
            if array.ndim:
                assert array.sharding.spec == spec
            else:  # the counter
                assert spec == P()
        counter = 4 if rule is adam else 0
        assert ms.memory(state).bytes_per_device == times * held + counter


def test_made_inside_jit_the_moments_are_whole(page):
    """171,348 bytes outside jax.jit, 1,246,548 inside."""
    init = optax.adam(1e-3).init
    states = init(new_model(page)), jax.jit(init)(new_model(page))
    assert [ms.memory(state).bytes_per_device for state in states] == [171_348, 1_246_548]


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
    sends, and as much as that if gathered weights are kept. For TPU v5e about as much too."""
    count = sum(leaf.size for leaf in jax.tree.leaves(large_weights()))
    all_reduced = 2 * 7 / 8 * 4 * count
    assert sent("fsdp-freed", "gpu") / all_reduced == pytest.approx(1.5, rel=0.01)
    assert sent("fsdp-kept", "gpu") / all_reduced == pytest.approx(1, rel=0.01)


def test_for_tpu_v5e_fsdp_sends_about_as_many_bytes_because_it_gathers_in_bfloat16():
    """Of what it gathers of the large model, nearly all is in bfloat16."""
    count = sum(leaf.size for leaf in jax.tree.leaves(large_weights()))
    assert sent("fsdp-freed", "tpu") / (2 * 7 / 8 * 4 * count) == pytest.approx(1, abs=0.02)
    moves = stored_program("fsdp-freed")["tpu"]["moves"]
    gathers = [row for row in moves if row["kind"] == "all-gather"]
    halved = sum(row["wire"] for row in gathers if row["dtype"] == "bfloat16")
    assert halved > 0.99 * sum(row["wire"] for row in gathers)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
