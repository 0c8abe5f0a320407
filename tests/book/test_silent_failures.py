"""Silent failures: what each entry shows is so, and its line passes only on the repaired program.

Of the entries whose claims are not in a strip on the page.
"""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import meshscope as ms
from pages import cells_of, compiled_for_cpu, run, tables, with_fault

PAGE = "silent-failures"
P = jax.P
W_DF = np.ones((16, 4), "float32")  # the weight of which page.right is the gradient


def placed(array, mesh, *spec):
    return jax.device_put(array, jax.NamedSharding(mesh, P(*spec)))


# The line of each entry


NEEDED = {  # cells of other entries, whose names an entry uses
    "check-off": ["gradients"],
    "clipped": ["gradients", "check-off"],
    "bf16": ["gradients", "check-off"],
}
ENTRIES = (
    "optimizer moments waits check-off clipped bf16 ppermute stack past-the-end whole-batch".split()
)
FAULTS = [
    pytest.param(entry, fault, id=fault["name"])
    for fault in tables()[PAGE]["fault"]
    for entry in ENTRIES
    if fault["fails"].removeprefix("cell:") == f"{entry}-line"
]


def test_each_entry_has_a_fault():
    """For the line of each of these entries one mistake is planted."""
    assert [entry for entry, _ in (fault.values for fault in FAULTS)] == ENTRIES


@pytest.mark.parametrize("entry, fault", FAULTS)
def test_the_line_fails_on_the_broken_program(entry, fault):
    """With the mistake planted, the entry's line is the first to raise."""
    cells = cells_of(PAGE)
    shared = [cell.id for cell in cells[: 1 + [cell.id for cell in cells].index("given")]]
    wanted = [*shared, *NEEDED.get(entry, []), entry, f"{entry}-seen", f"{entry}-line"]
    changed = with_fault(cells, fault["find"], fault["replace"])
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        with run(PAGE, cells=[cell for cell in changed if cell.id in wanted]):
            pass
    assert caught.value.cell == f"{entry}-line"


# The counter of steps


def test_the_line_that_counts_steps_passes_in_a_run_that_resumes(page):
    """Run once more, with an optimizer that has counted three steps, the line passes at six."""
    (cell,) = [cell for cell in cells_of(PAGE) if cell.id == "optimizer-line"]
    variables = dict(vars(page.after("optimizer-line")))
    assert variables["optimizer"].step[...] == 3
    exec(cell.source, variables)
    assert variables["optimizer"].step[...] == 6


# An optimizer made inside jax.jit


def test_inside_jit_the_moments_are_whole_on_one_device(page):
    """Made by jax.jit(init), Adam's moments are whole, on one device."""
    mu = page.after("moments").state[0].mu
    assert len(mu.devices()) == 1 and mu.sharding.shard_shape(mu.shape) == (64, 16)


def test_inside_jit_and_set_mesh_every_device_holds_all_moments(page):
    """Inside jax.set_mesh of a mesh with Auto axes, they are whole on every device."""
    w_DF = placed(np.ones((64, 16)), page.row, "data")
    with jax.set_mesh(page.row):
        mu = jax.jit(page.adam.init)(w_DF)[0].mu
    assert mu.sharding.is_fully_replicated and len(mu.devices()) == 8


def test_with_explicit_axes_they_inherit_the_sharding(page):
    """With Explicit axes and the mesh set, moments made inside jax.jit are sharded as the weight."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    w_DF = placed(np.ones((64, 16)), mesh, "data")
    with jax.set_mesh(mesh):
        state = jax.jit(page.adam.init)(w_DF)
    assert state[0].mu.sharding.is_equivalent_to(w_DF.sharding, 2)


def test_outside_jit_or_by_out_shardings_they_are_sharded_as_the_weight(page):
    """init outside jax.jit, or with out_shardings=, shards the moments as the weight."""
    w_DF = placed(np.ones((64, 16)), page.row, "data")
    shardings = jax.tree.map(
        lambda leaf: w_DF.sharding if leaf.ndim else jax.NamedSharding(page.row, P()),
        jax.eval_shape(page.adam.init, w_DF),
    )
    told = jax.jit(page.adam.init, out_shardings=shardings)(w_DF)
    for state in (page.adam.init(w_DF), told, page.after("moments-line").state):
        assert state[0].mu.sharding == state[0].nu.sharding == w_DF.sharding


def test_nnx_optimizer_of_annotated_weights_may_be_made_inside_jit(page):
    """nnx.Optimizer reads the annotations: inside jax.jit its moments are sharded as the weights."""

    def make():
        along = {"out_sharding": ("data", "model")}
        model = nnx.Linear(16, 32, kernel_metadata=along, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    with jax.set_mesh(page.mesh):
        model, optimizer = jax.jit(make)()
    mu = optimizer.opt_state[0].mu["kernel"]
    assert mu.sharding == model.kernel.sharding
    assert mu.sharding.shard_shape(mu.shape) == (8, 8)


# float(loss) in each step


def test_a_call_returns_before_the_step_has_run(page):
    """JAX queues steps: three calls return while the first of them cannot end."""
    w_D, x_BD = placed(np.ones(16), page.mesh), placed(page.x_host, page.mesh, "data")
    page.may_end.set()
    jax.block_until_ready(page.long_step(w_D, x_BD))  # compiled
    page.may_end.clear()
    losses = []
    for _ in range(3):
        w_D, latest = page.long_step(w_D, x_BD)
        losses.append(latest)
    assert not any(page.is_over(each) for each in losses)
    page.may_end.set()


@pytest.mark.parametrize("read", [float, str, np.asarray])
def test_float_print_and_asarray_wait_for_the_step(page, read):
    """Reading the loss returns only after the step was allowed to end."""
    w_D, x_BD = placed(np.ones(16), page.mesh), placed(page.x_host, page.mesh, "data")
    page.may_end.clear()
    _, latest = page.long_step(w_D, x_BD)
    assert not page.is_over(latest)
    threading.Timer(0.2, page.may_end.set).start()
    read(latest)
    assert page.may_end.is_set() and page.is_over(latest)


def test_with_float_in_each_step_the_devices_are_done_before_the_next_call(page):
    """With float(loss) the devices had nothing left to do after all three calls; without, never."""
    assert page.after("waits-seen").idle == 3
    assert page.after("waits-line").idle == 0


@compiled_for_cpu
def test_the_transfer_guard_stops_no_read_on_cpu():
    """On CPU, jax.transfer_guard_device_to_host("disallow") lets float(loss) pass."""
    with jax.transfer_guard_device_to_host("disallow"):
        assert float(jnp.ones(8).sum()) == 8


# FSDP with check_vma=False


@pytest.mark.parametrize("check, factor", [(True, 1), (False, 8)])
def test_unchecked_the_gradient_of_fsdp_is_eight_times_too_large(page, check, factor):
    """grad(pmean(loss)) of a gathered weight is right with the check, 8 times too large without."""
    found = jax.jit(page.in_pieces(jax.grad(page.gathered_loss), check_vma=check))
    expected = factor * page.right
    np.testing.assert_allclose(found(W_DF, page.x_host), expected, rtol=1e-4)


@pytest.mark.parametrize("check", [True, False])
def test_dividing_the_loss_is_right_with_the_check_and_without(page, check):
    """The gradient of the loss divided by the number of devices is right either way."""
    found = jax.jit(page.in_pieces(jax.grad(page.share_of_loss), check_vma=check))
    np.testing.assert_allclose(found(W_DF, page.x_host), page.right, rtol=1e-4)


def test_unchecked_a_whole_weight_needs_a_psum_of_its_own(page):
    """With the check off, the gradient of a weight that every device holds whole must be summed."""

    def share(w_DF, x_block_BD):
        return page.loss(w_DF, x_block_BD) / jax.lax.axis_size("data")

    def gradient(w_DF, x_block_BD):
        own = jax.grad(share)(w_DF, x_block_BD)
        return own[None], jax.lax.psum(own, "data")

    mapped = jax.shard_map(
        gradient,
        mesh=page.row,
        in_specs=(P(), P("data")),
        out_specs=(P("data"), P()),
        check_vma=False,
    )
    alone, summed = jax.jit(mapped)(W_DF, page.x_host)
    np.testing.assert_allclose(summed, page.right, rtol=1e-4)
    assert not any(np.allclose(each, page.right, rtol=1e-2) for each in alone)


# Clipping by the global norm


def test_clipped_by_piece_the_gradient_is_sqrt_8_times_too_long(page):
    """Each of the eight pieces is clipped to 1, so that all have √8, and another direction."""
    found = np.asarray(page.after("clipped").clipped)
    pieces = np.linalg.norm(found.reshape(8, -1), axis=1)
    np.testing.assert_allclose(pieces, np.ones(8), rtol=1e-5)
    assert np.linalg.norm(found) == pytest.approx(8**0.5, rel=1e-5)
    cosine = np.vdot(found, page.right) / np.linalg.norm(found) / np.linalg.norm(page.right)
    assert cosine < 0.99


def test_the_norm_of_equal_pieces_is_too_small_by_sqrt_8(page):
    """Inside shard_map optax takes the norm of a piece: by √8 too small, if the pieces are alike."""
    norms = page.in_pieces(lambda w_block_DF, x_block_BD: optax.tree.norm(w_block_DF)[None])
    alike_DF = np.ones((16, 4), "float32")
    np.testing.assert_allclose(
        norms(alike_DF, page.x_host), optax.tree.norm(alike_DF) / 8**0.5, rtol=1e-6
    )


def test_with_squares_added_up_it_is_clipped_as_on_one_device(page):
    """psum of the squares gives what optax gives on one device; so does optax under jax.jit."""
    alone, _ = page.clip.update(page.right, page.clip.init(W_DF))
    np.testing.assert_allclose(page.after("clipped-line").clipped, alone, rtol=1e-4)

    @jax.jit
    def global_arrays(w_DF, x_BD):
        return page.clip.update(jax.grad(page.loss)(w_DF, x_BD), page.clip.init(w_DF))[0]

    w_DF = placed(W_DF, page.row, "data")
    x_BD = placed(page.x_host, page.row, "data")
    np.testing.assert_allclose(global_arrays(w_DF, x_BD), alone, rtol=1e-4)


def test_with_a_whole_weight_jax_raises(page):
    """If another weight is whole on every device, clipping by piece is a ValueError."""

    def clipped(weights, x_block_BD):
        def error(weights):
            return page.gathered_loss(weights["w_DF"], x_block_BD) + jnp.sum(weights["b_F"])

        gradient = jax.grad(error)(weights)
        return page.clip.update(gradient, page.clip.init(weights))[0]

    specs = {"w_DF": P("data"), "b_F": P()}
    mapped = jax.shard_map(clipped, mesh=page.row, in_specs=(specs, P("data")), out_specs=specs)
    with pytest.raises(ValueError, match="out_specs"):
        mapped({"w_DF": W_DF, "b_F": jnp.ones(4)}, page.x_host)


# Sums in bfloat16


def test_bfloat16_has_no_odd_numbers_above_256():
    """From 256 to 512 the numbers of bfloat16 are the even ones."""
    numbers = np.arange(256, 513, dtype="float32")
    exact = numbers[numbers == numbers.astype(jnp.bfloat16).astype("float32")]
    np.testing.assert_array_equal(exact, np.arange(256, 513, 2))


@compiled_for_cpu
def test_on_cpu_the_sum_is_rounded_once(page):
    """Cast before the gather, 256 + 7 is 264 on CPU: the sum in float32, rounded to bfloat16."""
    cast_first = jax.jit(page.in_pieces(partial(page.gradient_of, page.cast_and_gather)))
    np.testing.assert_array_equal(
        cast_first(jnp.zeros(8), page.after("bf16").x_BD), np.full(8, 264)
    )


def test_a_ring_that_rounds_at_each_addition_stays_at_256():
    """Added one after the other in bfloat16, seven ones leave 256 as it was."""
    total = jnp.bfloat16(256)
    for _ in range(7):
        total = total + jnp.bfloat16(1)
    assert total.dtype == jnp.bfloat16 and total == 256


def test_cast_after_the_gather_jax_sums_in_float32(page):
    """The program that JAX traces sums in float32 if the cast comes after the gather."""
    sums = page.after("bf16-line").sums
    assert len(sums) == 1 and "f32[1]" in sums[0]
    cast_first = page.in_pieces(partial(page.gradient_of, page.cast_and_gather))
    program = str(jax.make_jaxpr(cast_first)(jnp.zeros(8), np.ones((8, 8), "float32")))
    (scatter,) = [line for line in program.splitlines() if "reduce_scatter" in line]
    assert "bf16[1]" in scatter


# ppermute


def test_ppermute_with_axes_in_another_order(page):
    """Before JAX 0.11.1 numbers come from the wrong device; since then it is a RuntimeError."""
    if jax.__version_info__ < (0, 11, 1):
        wrong = page.shifted(("model", "data"))
        np.testing.assert_array_equal(wrong, [7, 6, 0, 1, 2, 3, 4, 5])
    else:
        with pytest.raises(RuntimeError, match="ppermute is in the same order"):
            page.shifted(("model", "data"))


def test_ppermute_in_the_order_of_the_mesh_moves_each_number_by_one(page):
    """With the axes as the mesh names them, each number goes to the next device."""
    assert page.mesh.axis_names == ("data", "model")
    np.testing.assert_array_equal(page.moved, np.roll(np.arange(8), 1))


# The moments of a stack


def without_entry(page, vmap, layers):
    """Weight and moment of a stack made by vmap, which leaves the annotation as it was."""

    def make():
        stack = vmap(page.make_layer)(nnx.Rngs(0).split(layers))
        return stack, nnx.Optimizer(stack, optax.adam(1e-3), wrt=nnx.Param)

    with jax.set_mesh(page.mesh):
        stack, optimizer = jax.jit(make)()
    return stack, optimizer.opt_state[0].mu["w_DF"]


@pytest.mark.parametrize("vmap", [nnx.vmap, jax.vmap])
def test_moments_of_a_stack_are_sharded_by_the_annotation_of_one_layer(page, vmap):
    """The weights are in P(None, data, model), their moments over layers and D, if these divide."""
    for layers, spec in [(4, P("data", "model")), (3, P(None, "model"))]:
        stack, moment = without_entry(page, vmap, layers)
        assert stack.w_DF.out_sharding == ("data", "model")
        assert stack.w_DF.sharding.spec == P(None, "data", "model")
        assert moment.sharding.is_equivalent_to(jax.NamedSharding(page.mesh, spec), 3)


def test_moments_of_three_layers_take_twice_the_bytes_of_their_weights(page):
    """Three layers do not divide over two devices: a moment takes twice the bytes of its weight."""
    stack, moment = without_entry(page, nnx.vmap, 3)
    weight = ms.memory(stack).bytes_per_device
    assert ms.memory(moment).bytes_per_device == 2 * weight == 2 * 3 * 16 * 32 * 4 // 8


def test_misplaced_names_the_weight_of_the_stack(page):
    """misplaced compares the weight with its annotation, and names it."""
    stack, _ = without_entry(page, nnx.vmap, 3)
    assert page.misplaced(stack, page.mesh)[0].startswith("w_DF: annotated ('data', 'model')")
    assert not page.misplaced(page.after("stack-line").stack, page.mesh)


def test_with_an_entry_for_the_layers_moments_are_sharded_as_weights(page):
    """With transform_metadata= annotation, weight and moments have an entry for the layers."""
    stack = page.after("stack-line").stack
    assert stack.w_DF.out_sharding == (None, "data", "model")
    moments = page.after("stack-line").optimizer.opt_state[0]
    for moment in (moments.mu["w_DF"], moments.nu["w_DF"]):
        assert moment.sharding.spec == stack.w_DF.sharding.spec == P(None, "data", "model")


def test_after_jax_vmap_an_annotation_written_by_hand_is_enough(page):
    """The entry may be written into the annotation after jax.vmap, before the optimizer is made."""

    def make():
        stack = jax.vmap(page.make_layer)(nnx.Rngs(0).split(3))
        stack.w_DF.set_metadata(out_sharding=(None, "data", "model"))
        return stack, nnx.Optimizer(stack, optax.adam(1e-3), wrt=nnx.Param)

    with jax.set_mesh(page.mesh):
        stack, optimizer = jax.jit(make)()
    assert optimizer.opt_state[0].mu["w_DF"].sharding == stack.w_DF.sharding


# A write past the end


def written(page, cache_BT, size, at):
    new = np.full((2, size), 7, "float32")
    return np.asarray(jax.jit(page.write)(cache_BT, new, at))


@compiled_for_cpu
def test_a_write_past_the_end_of_a_sharded_dimension_is_lost(page):
    """One device overwrites the last place; with the cache on four devices nothing is written."""
    cache_BT = np.zeros((2, 8), "float32")
    sharded = placed(cache_BT, page.mesh, None, "model")
    for at in (8, 9, 100):
        np.testing.assert_array_equal(written(page, cache_BT, 1, at)[0], [0] * 7 + [7])
        assert not written(page, sharded, 1, at).any()
    for at in range(8):
        np.testing.assert_array_equal(written(page, cache_BT, 1, at), written(page, sharded, 1, at))


@compiled_for_cpu
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_longer_update_past_the_end_is_written_as_on_one_device(page, size):
    """Updates of two places or more are moved back to fit, on four devices as on one."""
    cache_BT = np.zeros((2, 8), "float32")
    sharded = placed(cache_BT, page.mesh, None, "model")
    for at in (8 - size, 8, 100):
        found = written(page, sharded, size, at)
        np.testing.assert_array_equal(found, written(page, cache_BT, size, at))
        np.testing.assert_array_equal(found[0], [0] * (8 - size) + [7] * size)


def test_with_explicit_axes_the_write_raises(page):
    """With an Explicit axis along the written dimension, JAX raises a ShardingTypeError."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharded = placed(np.zeros((2, 8), "float32"), mesh, None, "model")
    new = placed(np.full((2, 1), 7, "float32"), mesh)
    with pytest.raises(Exception, match="dynamic_update_slice operand sharding must be equal"):
        jax.jit(page.write)(sharded, new, 8)


# A batch handed over whole


@pytest.fixture(scope="module")
def printed(page):
    """What process 0 of two prints: the page's program, whose rows have numbers here, and more."""
    numbered = page.PROGRAM.replace('np.ones((16, 4), "float32")', "np.arange(64.0).reshape(16, 4)")
    assert numbered != page.PROGRAM
    more = """
print(float(batch_BD[:, 0].sum()), "is", float(x_BD[:, 0].sum()))
print(*(float(shard.data[0, 0]) for shard in batch_BD.addressable_shards))
"""
    lines = page.in_two_processes(numbered + more).splitlines()
    return [line for line in lines if not line.startswith("[Gloo]")]


def test_without_the_global_shape_sixteen_rows_become_thirty_two(printed):
    """Two processes with all 16 rows make a batch of 32, and with the global shape one of 16."""
    assert printed[:2] == ["without the global shape: 32 rows", "with it: 16 rows"]


def test_with_the_global_shape_jax_takes_the_rows_that_a_process_needs(printed):
    """Process 0 keeps rows 0 to 7, two on each device, and each row occurs once."""
    assert printed[2] == "480.0 is 480.0"
    assert printed[3] == "0.0 8.0 16.0 24.0"


def test_rows_that_occur_twice_give_the_same_loss(page):
    """The mean over every row twice is the mean over every row once, to rounding."""
    twice = np.concatenate([page.x_host, page.x_host])
    once = page.loss(W_DF, page.x_host)
    np.testing.assert_allclose(page.loss(W_DF, twice), once, rtol=1e-5)
