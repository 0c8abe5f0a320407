"""Silent failures: what each entry shows is so, and its line passes only on the repaired program.

That the line raises on the broken program is shown by the planted faults, which name the cell of
the line (tests/pages/silent-failures.toml).
"""

import threading
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from orbax.checkpoint import v1 as ocp

import meshscope as ms
from many_devices.checks import misplaced
from many_devices.helpers import attempt, put, traffic
from pages import cells_of, compiled_for_cpu, tables

PAGE = "silent-failures"
P = jax.P
W_DF = np.ones((16, 4), "float32")  # the weight of which page.right is the gradient


# The line of each entry


def test_for_each_line_a_mistake_is_planted():
    """Each entry ends in a line that catches it, and for each of these lines a fault is planted."""
    ids = [cell.id for cell in cells_of(PAGE) if cell.in_view and cell.id != "given"]
    entries = [id for id in ids if not id.endswith(("-seen", "-line"))]
    planted = {fault["fails"] for fault in tables()[PAGE]["fault"]}
    assert entries and {f"cell:{entry}-line" for entry in entries} <= planted


# The counter of steps


def test_a_step_that_returns_only_the_model_counts_no_step_and_the_loss_falls(page):
    """A step that returns only the model trains it, and the optimizer's counter stays at 0."""
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    before = page.loss_of(model, page.x_host)
    for _ in range(3):
        model = page.forgetful_step(model, optimizer, page.x_host)
    assert optimizer.step[...] == 0
    assert page.loss_of(model, page.x_host) < before


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
    w_DF = put(np.ones((64, 16)), page.row, "data")
    with jax.set_mesh(page.row):
        mu = jax.jit(page.adam.init)(w_DF)[0].mu
    assert mu.sharding.is_fully_replicated and len(mu.devices()) == 8


def test_with_explicit_axes_they_inherit_the_sharding(page):
    """With Explicit axes and the mesh set, moments made inside jax.jit are sharded as the weight."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    w_DF = put(np.ones((64, 16)), mesh, "data")
    with jax.set_mesh(mesh):
        state = jax.jit(page.adam.init)(w_DF)
    assert state[0].mu.sharding.is_equivalent_to(w_DF.sharding, 2)


def test_outside_jit_or_by_out_shardings_they_are_sharded_as_the_weight(page):
    """init outside jax.jit, or with out_shardings=, shards the moments as the weight."""
    w_DF = put(np.ones((64, 16)), page.row, "data")
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


# FSDP that became tensor parallelism


@compiled_for_cpu
def test_without_pins_the_batch_is_gathered_and_no_weight(page):
    """Without pins the compiler for CPU gathers the batch and sums partial products."""
    now = page.after("fsdp-line")
    moves = traffic(now.layers, now.x_BD, now.w_DF, now.w_FD, mesh=page.row)
    gathered = {move.shape for move in moves if move.kind == "all-gather"}
    assert gathered == {(64, 16)} and gathered.isdisjoint({now.w_DF.shape, now.w_FD.shape})
    assert moves.kinds == {"all-gather", "all-reduce"}


@compiled_for_cpu
def test_with_pins_both_weights_are_gathered_and_nothing_else_moves(page):
    """With activations pinned by rows, a step gathers both weights, and sends nothing else."""
    now = page.after("fsdp-line")
    assert now.moves.kinds == {"all-gather"} and now.gathered == {(16, 128), (128, 16)}


def test_pins_change_no_values(page):
    """Pinned and unpinned, the layers give the numbers of NumPy."""
    now = page.after("fsdp-line")
    expected = np.tanh(page.x_host @ np.ones((16, 128))) @ np.ones((128, 16))
    for function in (now.layers, now.pinned_layers):
        found = jax.jit(function)(now.x_BD, now.w_DF, now.w_FD)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


# A weight that comes back with another sharding


@compiled_for_cpu
def test_unpinned_the_bias_comes_back_sharded(page):
    """With outputs unpinned, a bias that was whole comes back sharded over `model` on CPU."""
    once = page.after("drift").once
    assert page.after("drift").weights["b_F"].sharding.spec == P()
    assert once["b_F"].sharding.spec == P("model")
    assert jax.tree.map(lambda w: w.sharding, once) != page.shardings


@compiled_for_cpu
def test_unpinned_the_second_step_is_compiled_again(page):
    """Unpinned, two steps need two programs; pinned, one program is enough."""
    weights, x_BD = page.after("drift").weights, put(page.x_host, page.mesh, "data")
    for shardings, programs in ((None, 2), (page.shardings, 1)):

        def descend(weights, x_BD):  # a new function, which nothing has compiled yet
            return page.descend(weights, x_BD)

        step = jax.jit(descend, out_shardings=shardings)
        step(step(weights, x_BD), x_BD)
        assert step._cache_size() == programs


def test_pinned_outputs_have_the_same_numbers(page):
    """Pinning the outputs changes no numbers."""
    unpinned, pinned = page.after("drift").once, page.after("drift-line").once
    for name in ("w_DF", "b_F"):
        np.testing.assert_allclose(unpinned[name], pinned[name], rtol=1e-5)


# The second step compiles again


@pytest.mark.parametrize("first, programs", [("jax", 2), ("numpy", 2), ("placed", 1)])
def test_a_first_state_that_is_not_committed_compiles_twice(page, first, programs):
    """A scalar that is uncommitted, or NumPy's, makes two programs; one placed on the mesh, one."""
    zero = np.zeros((), "float32")
    total = {"jax": jnp.zeros(()), "numpy": zero, "placed": put(zero, page.mesh)}[first]
    x_BD = put(page.x_host, page.mesh, "data")
    page.add_up.clear_cache()
    for _ in range(3):
        total = page.add_up(total, x_BD)
    assert page.add_up._cache_size() == programs
    assert np.isclose(total, 3 * page.x_host.sum(), rtol=1e-4)


def test_the_total_that_comes_back_is_on_all_devices(page):
    """The first total is on one device and not committed, and what comes back is on all eight."""
    first = jnp.zeros(())
    total = page.add_up(first, put(page.x_host, page.mesh, "data"))
    assert not first.committed and len(first.devices()) == 1
    assert total.committed and len(total.devices()) == 8


# float(loss) in each step


def test_a_call_returns_before_the_step_has_run(page):
    """JAX queues steps: three calls return while the first of them cannot end."""
    w_D, x_BD = put(np.ones(16), page.mesh), put(page.x_host, page.mesh, "data")
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
    w_D, x_BD = put(np.ones(16), page.mesh), put(page.x_host, page.mesh, "data")
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


# Ten classes over four devices


def test_outside_jit_an_uneven_size_raises(page):
    """Ten columns over four devices: placing them raises, and so does asking for the piece."""
    ten_BV = np.ones((64, 10), "float32")
    with pytest.raises(ValueError, match="divi"):
        jax.device_put(ten_BV, page.columns)
    assert "divi" in attempt(page.columns.shard_shape, ten_BV.shape).lower()


@compiled_for_cpu
def test_inside_jit_ten_columns_are_in_at_most_two_pieces(page):
    """Inside jit ten columns are in two pieces, with JAX 0.10 in one: every device holds all ten."""
    expected = (64, 5) if jax.__version_info__ >= (0, 11) else (64, 10)
    assert page.logits_BV.addressable_shards[0].data.shape == expected


def test_twelve_columns_are_in_four_pieces_with_the_same_products(page):
    """Padded to twelve, a device holds three columns, and the first ten are the same products."""
    assert page.padded_BV.addressable_shards[0].data.shape == (64, 3)
    np.testing.assert_allclose(page.padded_BV[:, :10], page.logits_BV, rtol=1e-6)


# Tied weights


def test_jax_jit_makes_two_weights_of_one(page):
    """From jax.jit a variable with two names comes back as two, which take twice the bytes."""
    assert page.untied.head is not page.untied.embed
    assert len(jax.tree.leaves(nnx.state(page.untied))) == 2
    assert ms.memory(page.untied).total_bytes == 2 * 32 * 16 * 4


def test_nnx_jit_keeps_one_weight(page):
    """From nnx.jit it comes back as one."""
    tied = page.after("tied-line").model
    assert tied.head is tied.embed and len(jax.tree.leaves(nnx.state(tied))) == 1
    assert ms.memory(tied).total_bytes == 32 * 16 * 4


# A checkpoint in bfloat16


def test_a_narrower_target_loses_bits_without_a_message(page):
    """A float32 array loaded with a bfloat16 target is rounded, and nothing says so."""
    target = {"w_DF": jax.ShapeDtypeStruct((64, 16), "bfloat16", sharding=page.columns)}
    with warnings.catch_warnings(action="error"):
        found = ocp.load(f"{page.disk.name}/run", target)["w_DF"]
    rounded = page.x_host.astype(jnp.bfloat16).astype("float32")
    for loaded in (found, page.after("dtype").loaded["w_DF"]):
        assert loaded.dtype == "bfloat16" != page.stored["w_DF"].dtype
        np.testing.assert_array_equal(loaded.astype("float32"), rounded)
    assert page.error == np.abs(page.x_host - rounded).max() > 0.001


def test_a_target_of_the_same_dtype_loses_none(page):
    """With the dtype that is on disk, every number comes back."""
    target = page.after("dtype-line").target
    found = ocp.load(f"{page.disk.name}/run", target)["w_DF"]
    np.testing.assert_array_equal(found, page.x_host)


# Donation


@compiled_for_cpu
def test_an_output_of_another_sharding_reuses_nothing(page):
    """Unpinned, the output is sharded over both axes on CPU, and no byte of the input is reused."""
    program = page.donating.lower(page.state_DF, page.gradient_DF).compile()
    assert ms.memory(program).aliased == 0
    result = jax.jit(page.update)(page.state_DF, page.gradient_DF)
    assert result.sharding.shard_shape(result.shape) == (32, 8)


@compiled_for_cpu
def test_a_pinned_output_reuses_the_whole_input(page):
    """Pinned as the donated array, the output takes over its memory: 4,096 bytes on each device."""
    assert ms.memory(page.after("donation-line").program).aliased == 64 * 32 * 4 // 2


@compiled_for_cpu
def test_for_another_sharding_jax_does_not_warn(page):
    """A donated array that only its sharding keeps from being reused is not deleted, and no
    warning says so."""
    state_DF = put(np.ones((64, 32), "float32"), page.mesh, "data")
    with warnings.catch_warnings(action="error"):
        result = page.donating(state_DF, page.gradient_DF)
    assert not state_DF.is_deleted() and not np.any(result)


@compiled_for_cpu
def test_for_another_shape_jax_warns():
    """A donated array that no output can reuse by its shape gives a warning."""
    summed = jax.jit(jnp.sum, donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        summed(jnp.ones((64, 32)))


# Gradients eight times too large


def test_the_mean_of_the_gradient_is_eight_times_too_large(page):
    """pmean of a gradient that JAX has summed already is eight times the gradient."""
    found = jax.jit(page.by_rows(page.averaged))(W_DF, page.x_host)
    np.testing.assert_allclose(found, 8 * page.right, rtol=1e-4)
    message = attempt(np.testing.assert_allclose, found, page.right, 1e-4)  # the line
    assert message.startswith("AssertionError")


def test_with_the_check_off_the_mean_of_the_gradient_is_right(page):
    """With check_vma=False, pmean of the gradient is right."""
    found = jax.jit(page.by_rows(page.averaged, check_vma=False))(W_DF, page.x_host)
    np.testing.assert_allclose(found, page.right, rtol=1e-4)


def test_the_gradient_of_the_mean_loss_is_right(page):
    """grad(pmean(loss)) is the gradient of one device."""
    np.testing.assert_allclose(page.after("gradients-line").found, page.right, rtol=1e-4)


def test_adam_takes_the_same_step_with_a_gradient_eight_times_too_large(page):
    """Adam divides the factor away: its first step is the same."""
    adam = optax.adam(1e-3)
    steps = [adam.update(g, adam.init(W_DF))[0] for g in (8 * page.right, page.right)]
    np.testing.assert_allclose(*steps, rtol=1e-3)


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

    w_DF = put(W_DF, page.row, "data")
    x_BD = put(page.x_host, page.row, "data")
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


# One device's result


def test_unchecked_you_read_the_sum_of_one_device(page):
    """Without the psum and with check_vma=False, 1,024 ones add up to 128, the first device's sum."""
    ones_BD = jnp.ones((64, 16))
    for function, total in ((page.rows_sum, 64 * 16 / 8), (page.whole_sum, 64 * 16)):
        assert page.over_rows(function, check_vma=False)(ones_BD) == total


def test_checked_the_function_without_the_psum_raises(page):
    """With the check on, JAX raises a ValueError about out_specs, and the summing function passes."""
    ones_BD = jnp.ones((64, 16))
    message = attempt(page.over_rows(page.rows_sum, check_vma=True), ones_BD)
    assert message.startswith("ValueError") and "out_specs" in message
    assert page.after("one-device-line").total == 64 * 16


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


# The maximum of an unreduced value


def test_the_largest_of_unreduced_values_is_refused_or_the_largest_term(page):
    """JAX 0.11.1 and 0.11.2 return 8, a term, in place of 32, the sum; others raise ValueError."""
    with jax.set_mesh(page.typed_mesh):
        if (0, 11, 1) <= jax.__version_info__ < (0, 12):
            assert float(page.largest(page.h_BF, page.w_FD)) == 8
        else:
            for name in ("max", "min"):
                with pytest.raises(ValueError):
                    getattr(page.terms(page.h_BF, page.w_FD), name)()


def test_the_largest_of_the_sums_is_right(page):
    """After the reshard no mark is left, and the maximum is that of NumPy."""
    wanted = np.asarray(page.h_BF) @ np.asarray(page.w_FD)
    np.testing.assert_array_equal(page.after("largest-line").y_BD, wanted)
    assert wanted.max() == 32


# A maximum over devices drops NaN


@compiled_for_cpu
@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
def test_a_maximum_or_minimum_over_devices_drops_nan_and_a_sum_keeps_it(page, reduce):
    """Along the rows, which stay on a device, NaN is kept; on one device it always is."""
    sharded = put(page.broken, page.mesh, "data")
    assert np.isfinite(reduce(sharded)) and np.isnan(sharded.sum())
    assert np.isnan(reduce(sharded, axis=1)[3]) and np.isnan(reduce(jnp.asarray(page.broken)))
    wrong = put(np.full((64, 16), np.nan, "float32"), page.mesh, "data")
    assert (abs(wrong - sharded).max() < 1e-4) and not (abs(wrong - sharded) < 1e-4).all()


# Averages of a padded batch


def test_the_mean_of_device_means_is_a_quarter_too_small(page):
    """Two of eight devices have no row, and count as much as the others: 6.5 becomes 4.875."""
    found = page.over_rows(page.device_mean)(page.losses_B, page.counts_B)
    assert np.isclose(found, 6.5 * 6 / 8) and not np.isclose(found, 6.5)


def test_sums_divided_once_are_the_mean_of_the_rows(page):
    """The sum over all rows, divided by their count, is the mean on one device."""
    assert np.isclose(page.mean, 6.5) and page.losses_B[page.counts_B == 1].mean() == 6.5


# Random numbers


def test_with_one_key_all_devices_draw_the_same_numbers(page):
    """With the same key in each device, the eight blocks of 64 rows are equal."""
    drawn_BD = np.asarray(page.on_rows(page.noise)(jax.random.key(0), page.x_host))
    blocks = drawn_BD.reshape(8, 8, 16)
    assert (blocks == blocks[0]).all() and len(np.unique(drawn_BD, axis=0)) == 8


def test_with_the_index_folded_in_no_row_occurs_twice(page):
    """With the device's index folded into the key, all 64 rows differ."""
    drawn_BD = page.after("random-line").drawn_BD
    assert len(np.unique(drawn_BD, axis=0)) == len(drawn_BD) == 64


# The annotation is not read


@pytest.mark.parametrize(
    "unread", [{"out_shardings": (None, "model")}, {"out_sharding": [None, "model"]}]
)
def test_a_plural_or_a_list_leaves_the_weight_whole(page, unread):
    """Neither is an error: every device holds the whole weight, and misplaced names it."""
    with jax.set_mesh(page.mesh):
        model = nnx.Dict(w_DF=page.weight(**unread))
    assert model.w_DF.sharding.is_fully_replicated
    assert misplaced(model, page.mesh)[0].startswith("w_DF: ")


def test_read_the_annotation_shards_the_weight(page):
    """With out_sharding= and a tuple, each device holds eight of 32 columns."""
    with jax.set_mesh(page.mesh):
        model = nnx.Dict(w_DF=page.weight(out_sharding=(None, "model")))
    assert model.w_DF.sharding.shard_shape((16, 32)) == (16, 8)
    assert not misplaced(model, page.mesh)


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
    assert misplaced(stack, page.mesh)[0].startswith("w_DF: annotated ('data', 'model')")
    assert not misplaced(page.after("stack-line").stack, page.mesh)


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


# New values


def test_set_value_brings_its_own_sharding_and_keeps_the_annotation(page):
    """After set_value of an unplaced array the weight is whole, still annotated, and misplaced."""
    with jax.set_mesh(page.mesh):
        model = nnx.Dict(w_DF=page.weight(out_sharding=(None, "model")))
        assert not misplaced(model, page.mesh)
        model.w_DF.set_value(jnp.zeros((16, 32)))
    assert model.w_DF.out_sharding == (None, "model")
    assert model.w_DF.sharding.is_fully_replicated and misplaced(model, page.mesh)


def test_nnx_update_brings_its_own_sharding_too(page):
    """nnx.update replaces the array in the same way."""
    with jax.set_mesh(page.mesh):
        model = nnx.Dict(w_DF=page.weight(out_sharding=(None, "model")))
        nnx.update(model, {"w_DF": jnp.zeros((16, 32))})
    assert model.w_DF.out_sharding == (None, "model")
    assert model.w_DF.sharding.is_fully_replicated and misplaced(model, page.mesh)


def test_values_placed_first_stay_sharded(page):
    """Placed before set_value, the new values are sharded as annotated."""
    w_DF = page.after("swapped-line").model.w_DF
    assert w_DF.addressable_shards[0].data.shape == (16, 8) and not np.any(w_DF[...])


# A new table of logical axes


TO_MODEL = [("embed", None), ("hidden", "model")]


def test_under_a_second_table_the_first_program_is_found(page):
    """The table is read while jit traces: under a second table the weight is sharded by the first,
    also by another jax.jit of the same function."""
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(TO_MODEL):
        for made in (page.init_sharded(), jax.jit(page.make_linear)()):
            assert made.kernel.sharding.spec == P(None, "data")
            assert not made.kernel.sharding.is_equivalent_to(page.wanted, 2)


def test_a_new_function_reads_the_current_table(page):
    """A new function is traced anew: the weight is sharded by the second table, with equal numbers."""
    kernel = page.after("table-line").linear.kernel
    assert kernel.sharding.spec == P(None, "model")
    np.testing.assert_array_equal(kernel, page.after("table").linear.kernel)


# A reshape that sends the batch around


@compiled_for_cpu
def test_blocks_of_rows_move(page):
    """Microbatches that are blocks of rows need rows from other devices."""
    x_BD = put(page.x_host, page.row, "data")
    moves = traffic(partial(page.spread, page.microbatches), x_BD, mesh=page.row)
    assert moves.kinds and moves.total_payload_bytes > 0


@compiled_for_cpu
def test_every_fourth_row_does_not_move(page):
    """Microbatches of every fourth row send nothing."""
    assert page.after("reshape-line").moves.total_payload_bytes == 0


def test_both_ways_have_the_same_rows_in_another_order(page):
    """Every fourth row makes microbatches of the same shape, of the same rows in another order."""
    ours, blocks = page.every_fourth(page.x_host), page.microbatches(page.x_host)
    assert ours.shape == blocks.shape and not np.array_equal(ours, blocks)
    np.testing.assert_array_equal(np.sort(ours.ravel()), np.sort(blocks.ravel()))
    np.testing.assert_array_equal(ours[1], page.x_host[1::4])


# A write past the end


def written(page, cache_BT, size, at):
    new = np.full((2, size), 7, "float32")
    return np.asarray(jax.jit(page.write)(cache_BT, new, at))


@compiled_for_cpu
def test_a_write_past_the_end_of_a_sharded_dimension_is_lost(page):
    """One device overwrites the last place; with the cache on four devices nothing is written."""
    cache_BT = np.zeros((2, 8), "float32")
    sharded = put(cache_BT, page.mesh, None, "model")
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
    sharded = put(cache_BT, page.mesh, None, "model")
    for at in (8 - size, 8, 100):
        found = written(page, sharded, size, at)
        np.testing.assert_array_equal(found, written(page, cache_BT, size, at))
        np.testing.assert_array_equal(found[0], [0] * (8 - size) + [7] * size)


def test_with_explicit_axes_the_write_raises(page):
    """With an Explicit axis along the written dimension, JAX raises a ShardingTypeError."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharded = put(np.zeros((2, 8), "float32"), mesh, None, "model")
    new = put(np.full((2, 1), 7, "float32"), mesh)
    with pytest.raises(Exception, match="dynamic_update_slice operand sharding must be equal"):
        jax.jit(page.write)(sharded, new, 8)


# A constraint that constrains nothing


def test_a_constraint_that_nobody_uses_changes_nothing(page):
    """The result is sharded as its input was, and not as the unused constraint says."""
    found = page.doubled(put(page.x_host, page.mesh, "data"))
    assert not found.sharding.is_equivalent_to(page.columns_BD, 2)
    assert found.sharding.is_equivalent_to(jax.NamedSharding(page.mesh, P("data")), 2)
    np.testing.assert_array_equal(found, page.after("unused-line").y_BD)


def test_linens_constraint_does_nothing_without_a_mesh_or_a_table(page):
    """Without a mesh nn.with_logical_constraint leaves an array on one device; without a table,
    where it was."""
    names = ("batch", "embed")
    alone = nn.with_logical_constraint(jnp.asarray(page.x_host), names)
    assert len(alone.sharding.device_set) == 1
    x_BD = put(page.x_host, page.mesh)
    table = [("batch", "data"), ("embed", None)]
    with jax.set_mesh(page.mesh):
        constrain = partial(nn.with_logical_constraint, logical_axis_resources=names)
        without = jax.jit(lambda x_BD: constrain(x_BD))(x_BD)
        with nn.logical_axis_rules(table):
            told = jax.jit(lambda x_BD: constrain(x_BD))(x_BD)
    assert without.sharding.is_fully_replicated and not told.sharding.is_fully_replicated


# Idle devices


def test_a_batch_from_numpy_runs_on_one_device(page):
    """With a batch from NumPy one device of eight works; with one placed on the mesh, all do."""
    alone = page.product(page.x_host)
    assert len(alone.sharding.device_set) == 1
    together = page.after("idle-line").y_DD
    assert len(together.sharding.device_set) == 8
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-4)


# Copies that disagree


def test_copies_that_differ_are_called_replicated(page):
    """Eight different copies make an array that is called replicated, and shows the first one."""
    w_D = page.after("copies").w_D
    assert w_D.is_fully_replicated
    assert len({np.asarray(shard.data).tobytes() for shard in w_D.addressable_shards}) == 8
    np.testing.assert_array_equal(w_D, np.zeros(4))


# A batch handed over whole


def test_without_the_global_shape_sixteen_rows_become_thirty_two(page):
    """Two processes with all 16 rows make a batch of 32, and with the global shape one of 16."""
    for life in page.ended:
        assert "without the global shape: 32 rows" in life.log
        assert "with it: 16 rows" in life.log and life.log[-1] == "ended"


def test_with_the_global_shape_jax_takes_the_rows_that_a_process_needs(page):
    """Process 0 keeps rows 0 to 7 and process 1 the others, so that each row occurs once."""
    first, second = (life.log for life in page.ended)
    assert "here: 0 1 2 3 4 5 6 7" in first and "here: 8 9 10 11 12 13 14 15" in second


def test_rows_that_occur_twice_give_the_same_loss(page):
    """The mean over every row twice is the mean over every row once, to rounding."""
    twice = np.concatenate([page.x_host, page.x_host])
    once = page.loss(W_DF, page.x_host)
    np.testing.assert_allclose(page.loss(W_DF, twice), once, rtol=1e-5)
