"""Deeper page to chapter 10, "Gradient accumulation in `shard_map`: sum over devices once"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from many_devices.compiled import stored_program
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "10b-accumulation"
P = jax.P


def assert_same(tree, expected, rtol=1e-3, atol=1e-5):
    """Equal up to float32 rounding: eight devices add in a different order from one."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def operations(mapped, *inputs):
    """The names of the operations on each device."""
    [call] = jax.make_jaxpr(mapped)(*inputs).eqns
    names = [operation.primitive.name for operation in call.params["jaxpr"].eqns]
    return [name.removesuffix("_invariant") for name in names]


def test_a_plain_loop_sums_for_every_microbatch_and_a_cast_before_it_once(page):
    """Four casts inside the loop have four partners; both gradients are the sum of all numbers."""
    for loop, times in ((page.plain_loop, 4), (page.cast_first, 1)):
        gradient = jax.shard_map(
            jax.grad(loop), mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        steps = operations(gradient, page.w, page.x)
        assert steps.count("psum") == times
        assert gradient(page.w, page.x) == page.x.sum() == 496
    of_cast_first = steps
    assert of_cast_first[0] == "pvary" and of_cast_first[-1] == "psum"


@compiled_for_cpu
def test_four_microbatches_reduce_8456_bytes_and_with_the_cast_2120(page):
    """4 x 2,112 + 8 bytes if nothing is cast, 2,112 + 8 if the weights are cast before the loop."""
    assert 2_112 == sum(weight.nbytes for weight in page.params.values())
    assert 2_112 == 4 * (32 * 16 + 16) and 8_456 == 4 * 2_112 + 8 and 2_120 == 2_112 + 8
    for name, reduced in (("nothing cast", 8_456), ("cast before", 2_120)):
        moved = ms.collectives(page.programs[name], page.mesh).by("kind")
        assert moved.bytes("all-reduce") == reduced, name


def mean_of_rows(page, params, batch):
    x_BD, target_BF, weight_B = batch
    out_BF = jnp.tanh(x_BD @ params["w_DF"] + params["b_F"])
    return jnp.sum(jnp.mean((out_BF - target_BF) ** 2, 1) * weight_B) / weight_B.sum()


def short_batch(page):
    return (*page.rows_batch[:2], jnp.float32(np.arange(64) < 61))  # 3 rows only fill up


def test_microbatches_give_the_gradient_of_one_batch(page):
    """Both ways, and every row counts once: rows of weight 0 in neither sum."""
    one_device = jax.jit(jax.value_and_grad(partial(mean_of_rows, page)))
    short = short_batch(page)
    x_BD, target_BF = [rows[:61] for rows in page.rows_batch[:2]]
    out_BF = jnp.tanh(x_BD @ page.params["w_DF"] + page.params["b_F"])
    of_61 = jnp.mean((out_BF - target_BF) ** 2)
    assert np.isclose(one_device(page.params, short)[0], of_61, rtol=1e-5)
    assert page.sums_of(page.params, short).rows == 61
    for program in page.programs.values():
        for batch in (short, page.rows_batch):
            wanted = one_device(page.params, batch)
            assert_same(program(page.params, batch), wanted, rtol=1e-4, atol=1e-6)


def test_a_mean_of_means_is_wrong_if_rows_only_fill_up(page):
    """It counts five rows as eight."""
    short = short_batch(page)
    eighths = [jax.tree.map(lambda rows, i=i: rows[i : i + 8], short) for i in range(0, 64, 8)]
    means = [mean_of_rows(page, page.params, rows) for rows in eighths]
    assert not np.isclose(np.mean(means), mean_of_rows(page, page.params, short), rtol=1e-4)


def test_the_all_reduce_of_a_cast_comes_after_the_loop(page):
    """One loop with all forward passes, one with all backward passes, which compute the tanh again,
    then the partner of the cast; without the cast, the sum is inside the second loop."""

    def outline(prepare):
        mapped = jax.shard_map(
            jax.value_and_grad(partial(page.accumulated, prepare, 4)),
            mesh=page.mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
        )
        [call] = jax.make_jaxpr(mapped)(page.params, page.rows_batch).eqns
        names = [e.primitive.name.removesuffix("_invariant") for e in call.params["jaxpr"].eqns]
        forward, backward = (i for i, name in enumerate(names) if name == "scan")
        for loop in (forward, backward):
            assert "= tanh" in str(call.params["jaxpr"].eqns[loop])
        return names[backward:].count("psum")

    weights = len(page.params)
    assert (outline(page.to_varying), outline(page.unchanged)) == (weights, 0)


@compiled_for_cpu
def test_with_fsdp_every_microbatch_gathers_and_a_cast_helps_the_bias_alone(page):
    """Pieces vary already, so the cast leaves a gather and a scatter for every microbatch."""

    specs = {"w_DF": P("data"), "b_F": P()}

    def loss(params, batch_block):
        weights = params | {"b_F": page.to_varying(params["b_F"])}

        @jax.checkpoint
        def add(so_far, part):
            whole = weights | {
                "w_DF": jax.lax.all_gather(weights["w_DF"], "data", axis=0, tiled=True)
            }
            return jax.tree.map(jnp.add, so_far, page.sums_of(whole, part)), None

        sums, _ = jax.lax.scan(add, page.zero_sums(), page.split(batch_block, 4))
        sums = jax.lax.psum(sums, "data")
        return sums.error / sums.rows

    mapped = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=page.mesh,
        in_specs=(specs, P("data")),
        out_specs=(P(), specs),
    )
    short = short_batch(page)
    program = jax.jit(mapped).lower(page.params, short).compile()
    moved = ms.collectives(program, page.mesh).by("kind")
    assert moved.bytes("all-reduce") == 64 + 8  # only what is still whole
    assert moved.bytes("all-gather") >= 4 * 2_048  # in every microbatch
    assert moved.bytes("reduce-scatter") == 4 * 2_048
    wanted = jax.jit(jax.value_and_grad(partial(mean_of_rows, page)))(page.params, short)
    assert_same(program(page.params, short), wanted, rtol=1e-4, atol=1e-6)


def reduced(name, compiler):
    rows = stored_program(name)[compiler]["moves"]
    return sum(row["payload"] for row in rows if row["kind"] == "all-reduce")


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_other_compilers_move_the_sum_out_for_one_layer_and_not_for_four(compiler):
    """H100's and TPU v5e's compilers sum once for this model, cast or not, but four layers in a scan
    four times."""
    assert reduced("sums-not-cast", compiler) <= 2_120
    assert reduced("sums-cast", compiler) == 2_120
    assert reduced("sums-not-cast-stack", compiler) >= 4 * 1_048_576


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
