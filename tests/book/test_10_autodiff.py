"""Chapter 10, "Autodiff and communication: every collective has a partner"."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from layers_of_fsdp import LAYERS, REMATS, D, gradient_of_stack
from many_devices.compiled import stored_program
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "10-autodiff"
P = jax.P
N = 8
OPERATIONS = ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"]


ROWS = P("data")


def assert_same(tree, expected, rtol=1e-3, atol=1e-5):
    """Equal up to float32 rounding: eight devices add in a different order from one."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def there_and_back(move, x_block):
    """A collective, then its backward pass."""
    y, backward = jax.vjp(move, x_block)
    return backward(y)[0]


def over_rows(page, function, out_specs=ROWS, check=True):
    """The function on the rows of each device."""
    return jax.shard_map(
        function, mesh=page.mesh, in_specs=P("data"), out_specs=out_specs, check_vma=check
    )


# Types


def test_a_weight_is_invariant_a_batch_and_the_product_vary_and_a_sum_is_invariant(page):
    """Of the weight, the batch, their product and its psum, the second and third are marked."""

    def marks(w, x_block):
        product = w * x_block
        total = jax.lax.psum(product, "data")
        found = ["{V:data}" in str(jax.typeof(v)) for v in (w, x_block, product, total)]
        assert found == [False, True, True, False]
        return total

    mapped = jax.shard_map(marks, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P())
    assert np.array_equal(mapped(page.w, page.x), [84.0]) and np.array_equal(page.total, [84.0])


def test_the_gradient_begins_with_a_cast_and_ends_in_its_partner_a_psum(page):
    """JAX casts the weight, and sums its gradients over devices: 28, not a device's own."""
    steps = page.operations(page.share_gradient, page.w, page.x).split(" → ")
    assert steps[:3] == ["pvary", "mul", "reduce_sum"]  # forward
    assert steps[3:] == ["pvary", "broadcast_in_dim", "mul", "reduce_sum", "psum"]
    assert page.share_gradient(page.w, page.x) == page.x.sum() == 28


def test_pcast_is_the_same_cast_by_hand(page):
    """jax.lax.pcast(w, "data", to="varying") is what JAX calls pvary."""

    def by_hand(w, x_block):
        return jax.lax.pcast(w, "data", to="varying") * x_block

    mapped = jax.shard_map(by_hand, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert page.operations(mapped, page.w, page.x) == "pvary → mul"


# Partners

PARTNERS = {
    "psum": "pvary",
    "all_gather": "reduce_scatter",
    "psum_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}
INNER = {"psum_scatter": "reduce_scatter"}


def forward(page, operation):
    out = P() if operation == "psum" else P("data")
    return jax.jit(over_rows(page, page.moves[operation], out))


def test_each_collective_has_this_partner(page):
    """psum and the cast, gather and scatter; all_to_all and ppermute are their own."""
    for operation, partner in PARTNERS.items():
        found = page.there_and_back(page.moves[operation])
        assert found == f"{INNER.get(operation, operation)} → {partner}"


def test_each_partner_is_the_transpose(page):
    """<move(x), y> = <x, back(y)>: the definition of a transpose."""
    for operation in OPERATIONS[1:]:
        move = page.moves[operation]
        there = forward(page, operation)(page.table)
        y = jnp.arange(float(there.size)).reshape(there.shape) % 7

        def back(x_block, y_block, move=move):
            return jax.vjp(move, x_block)[1](y_block)[0]

        backward = jax.shard_map(back, mesh=page.mesh, in_specs=P("data"), out_specs=P("data"))
        both = jnp.vdot(there, y), jnp.vdot(page.table, backward(page.table, y))
        assert np.isclose(*both, rtol=1e-4), operation


def test_the_moves_do_what_the_page_says(page):
    """all_to_all leaves device i column i of all rows; ppermute sends a block to the next device."""
    columns = forward(page, "all_to_all")(page.table)
    assert np.array_equal(np.ravel(columns), np.ravel(page.table.T))
    moved = np.asarray(forward(page, "ppermute")(page.table)).reshape(N, 8, 8)
    assert np.array_equal(np.roll(np.asarray(page.table).reshape(N, 8, 8), 1, axis=0), moved)


def test_pmax_and_pmin_cannot_be_differentiated(page):
    """They have no partner."""
    for name in ("pmax", "pmin"):
        pick = getattr(jax.lax, name)

        def picked(x_block, pick=pick):
            return jnp.sum(pick(x_block, "data"))

        with pytest.raises(NotImplementedError, match=f"rule for '{name}' not implemented"):
            over_rows(page, jax.grad(picked))(page.table)


def test_the_gradient_of_a_reduced_value_is_unreduced(page):
    """A gather to *reduced* has an unreduced gradient, and the scatter sums it."""

    def to_reduced(x_block):
        y, backward = jax.vjp(partial(page.moves["all_gather"], to="reduced"), x_block)
        assert "{R:data}" in str(jax.typeof(y))
        one = jnp.ones(y.shape) + 0 * x_block.sum()  # follows from the input: varying
        return backward(jax.lax.pcast(one, "data", to="unreduced"))[0]

    found = page.operations(over_rows(page, to_reduced), page.table)
    assert found.endswith("unreduced_reduce_scatter")


@compiled_for_cpu
def test_a_gather_and_the_scatter_that_is_its_partner_send_the_same(page):
    """Forward and backward, a gather and its scatter send the same bytes."""
    mapped = over_rows(page, partial(there_and_back, page.moves["all_gather"]))
    moves = ms.collectives(jax.jit(mapped).lower(page.table).compile(), page.mesh)
    sizes = {move.kind: move.wire_bytes for move in moves}
    assert sizes["all-gather"] == sizes["reduce-scatter"] and len(sizes) == 2


@compiled_for_cpu
@pytest.mark.parametrize("remat, passes", [("kept", 1), ("jax.checkpoint", 2)])
def test_inside_checkpoint_fsdp_sends_twice_as_much_backward_as_forward(remat, passes):
    """A layer of FSDP sends as much backward as forward, inside jax.checkpoint twice as much."""
    gradient, inputs = gradient_of_stack(REMATS[remat])
    moves = ms.collectives(jax.jit(gradient).lower(*inputs).compile())
    per_pass = 4 * LAYERS * D * D * (N - 1) / N
    kinds = {"all-gather", "reduce-scatter"}
    sent = sum(move.wire_bytes * move.executions for move in moves if move.kind in kinds)
    assert sent == (1 + passes) * per_pass


# Right, or eight times too large


def cast_first(page, params, batch_block):
    own = jax.lax.pcast(params, "data", to="varying")
    return jax.lax.pmean(jax.grad(page.loss_of)(own, batch_block), "data")


def outside(page, check):
    """The gradient around the whole shard_map, which returns the devices' losses."""

    def one_loss(params, batch_block):
        return page.loss_of(params, batch_block)[None]

    mapped = jax.shard_map(
        one_loss,
        mesh=page.mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=check,
    )
    mean = jax.jit(jax.grad(lambda params, batch: jnp.mean(mapped(params, batch))))
    return mean(page.params, page.batch)


def forms(page, check):
    """The gradient of each form that the page names."""
    by_rows = {
        "grad(pmean(loss))": jax.grad(page.mean_loss),
        "pmean(grad(loss))": page.mean_of_gradients,
        "cast, then pmean(grad(loss))": partial(cast_first, page),
    }
    in_pieces = {
        "FSDP: grad(pmean(loss))": jax.grad(page.fsdp_loss),
        "FSDP: grad(loss / 8), psum of the bias": page.answer_off,
    }
    found = {name: page.on_eight(way, check) for name, way in by_rows.items()}
    found |= {name: page.on_eight(way, check, page.fsdp_specs) for name, way in in_pieces.items()}
    return found | {"grad around shard_map": outside(page, check)}


def test_which_forms_are_right_with_the_check_on_and_off(page):
    """How many times the true gradient each form gives, for the matrix and for the bias."""
    right, eight, wrong = ("1x", "1x"), ("8x", "8x"), ("wrong", "wrong")
    wanted = {
        "grad(pmean(loss))": (right, wrong),
        "pmean(grad(loss))": (eight, right),
        "cast, then pmean(grad(loss))": (right, right),
        "FSDP: grad(pmean(loss))": (right, ("8x", "wrong")),
        "FSDP: grad(loss / 8), psum of the bias": (("1x", "8x"), right),
        "grad around shard_map": (right, right),
    }
    on, off = (forms(page, check) for check in (True, False))
    found = {
        form: tuple(tuple(page.factors(way[form]).values()) for way in (on, off)) for form in on
    }
    assert found == wanted


def test_the_page_prints_once_and_eight_times(page):
    """The mean inside the loss is right, and outside it the gradient is eight times too large."""
    right, wrong = page.on_eight(jax.grad(page.mean_loss)), page.on_eight(page.mean_of_gradients)
    assert_same(right, page.true_gradient)
    assert set(page.factors(right).values()) == {"1x"}
    assert set(page.factors(wrong).values()) == {"8x"}
    assert attempt(assert_same, wrong, page.true_gradient).startswith("AssertionError")


def test_adam_hides_the_factor(page):
    """A step of SGD is eight times as long with eight times the gradient, one of Adam is not."""

    def first_step(optimizer, factor):
        gradient = jax.tree.map(lambda true: factor * true, page.true_gradient)
        updates, _ = optimizer.update(gradient, optimizer.init(page.params))
        return optax.tree.norm(updates)

    ratios = [first_step(o, 8) / first_step(o, 1) for o in (optax.sgd(0.1), optax.adam(1e-3))]
    assert np.isclose(ratios[0], 8) and np.isclose(ratios[1], 1, atol=1e-3)


def test_the_check_refuses_a_varying_result_for_p(page):
    """out_specs=P() raises an error for a varying value."""
    with pytest.raises(ValueError, match="out_specs"):
        over_rows(page, jnp.sin, P())(page.x)


def test_with_the_check_off_the_partner_of_psum_is_psum(page):
    """It undoes the division: eight eighths."""
    assert page.there_and_back(page.moves["psum"], check=False) == "psum → psum"

    def of_an_eighth(x_block):
        _, backward = jax.vjp(page.moves["psum"], x_block)
        return backward(jnp.full_like(x_block, 1 / 8))[0]

    assert (over_rows(page, of_an_eighth, check=False)(page.x) == 1).all()


def test_with_the_check_off_grad_of_pmean_leaves_each_device_its_own_gradient(page):
    """That of its own eight rows."""

    def what_is_left(params, batch_block):
        return jax.tree.map(lambda g: g[None], jax.grad(page.mean_loss)(params, batch_block))

    mapped = jax.shard_map(
        what_is_left,
        mesh=page.mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    left = mapped(page.params, page.batch)
    for i in range(N):
        own = jax.tree.map(lambda rows, i=i: rows[8 * i : 8 * i + 8], page.batch)
        found = jax.tree.map(lambda g, i=i: g[i], left)
        assert_same(found, jax.grad(page.loss_of)(page.params, own))


def test_fsdp_with_the_check_off_is_eight_times_too_large_and_wrong(page):
    """The matrix 8 times, the bias wrong; with the check on, both right."""
    last = page.after("fsdp-off").gradient
    assert page.factors(last) == {"w_DF": "8x", "b_F": "wrong"}
    on = page.on_eight(jax.grad(page.fsdp_loss), True, page.fsdp_specs)
    assert_same(on, page.true_gradient)


def test_a_share_of_the_loss_and_a_psum_of_the_bias_are_right_with_the_check_off(page):
    """FSDP: the loss divided by eight, and a sum for the bias; with the check on the bias is 8 times."""
    off, on = (page.on_eight(page.answer_off, check, page.fsdp_specs) for check in (False, True))
    assert_same(off, page.true_gradient)
    assert page.factors(on) == {"w_DF": "1x", "b_F": "8x"}
    assert on["w_DF"].addressable_shards[3].data.shape == (4, 16)


# Microbatches


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
    return (*page.batch, jnp.float32(np.arange(64) < 61))  # 3 rows only fill up


def test_microbatches_give_the_gradient_of_one_batch(page):
    """Both ways, and every row counts once: rows of weight 0 in neither sum."""
    short = short_batch(page)
    wanted = jax.jit(jax.value_and_grad(partial(mean_of_rows, page)))(page.params, short)
    first_61 = jax.tree.map(lambda rows: rows[:61], page.batch)
    assert np.isclose(wanted[0], page.loss_of(page.params, first_61), rtol=1e-5)
    assert page.sums_of(page.params, short).rows == 61
    for program in page.programs.values():
        assert_same(program(page.params, short), wanted, rtol=1e-4, atol=1e-6)
        whole = program(page.params, page.rows_batch)
        assert_same(whole, (page.true_loss, page.true_gradient))


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

    def loss(params, batch_block):
        weights = params | {"b_F": page.to_varying(params["b_F"])}

        @jax.checkpoint
        def add(so_far, part):
            whole = weights | {"w_DF": page.gather_rows(weights["w_DF"])}
            return jax.tree.map(jnp.add, so_far, page.sums_of(whole, part)), None

        sums, _ = jax.lax.scan(add, page.zero_sums(), page.split(batch_block, 4))
        sums = jax.lax.psum(sums, "data")
        return sums.error / sums.rows

    mapped = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=page.mesh,
        in_specs=(page.fsdp_specs, P("data")),
        out_specs=(P(), page.fsdp_specs),
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


# Dropout


def folded(axes):
    """Dropout with a key into which the positions along these axes are folded."""

    def draw(key, ones_block):
        for axis in axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return nnx.Dropout(0.5)(ones_block, rngs=key)

    return draw


@pytest.fixture(scope="module")
def grid():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=auto * 2)


def outputs(draw, mesh):
    """64 equal rows after dropout: they differ by their masks alone."""
    mapped = jax.shard_map(draw, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    return jax.jit(mapped)(jax.random.key(0), jnp.ones((64, 32)))


def test_one_key_for_all_gives_eight_masks_and_a_folded_key_64(page):
    """Without the position, all devices draw the same masks for their 8 rows."""
    assert len(np.unique(outputs(partial(page.dropout, False), page.mesh), axis=0)) == 8
    assert len(np.unique(outputs(partial(page.dropout, True), page.mesh), axis=0)) == 64
    assert len(np.unique(page.dropped, axis=0)) == 64


def test_masks_are_the_same_again_on_the_same_mesh_and_others_on_another(page):
    """A run that restarts on the same mesh draws the masks of the interrupted one."""
    auto, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:4]
    four = jax.make_mesh((4,), ("data",), axis_types=auto, devices=devices)
    first, again, other = (
        outputs(partial(page.dropout, True), m) for m in (page.mesh, page.mesh, four)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def on_grid(grid, axes, spec, check=True):
    mapped = jax.shard_map(
        folded(axes), mesh=grid, in_specs=(P(), spec), out_specs=spec, check_vma=check
    )
    return jax.jit(mapped)(jax.random.key(0), jnp.ones((64, 32)))


def copies_that_differ(grid, axes):
    """For each block of rows, how many different copies of it the devices along `model` have."""
    blocks = {}
    for shard in on_grid(grid, axes, P("data"), check=False).addressable_shards:
        blocks.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return [len(different) for different in blocks.values()]


def test_one_axis_too_many_makes_copies_differ(page, grid):
    """Folded along `model` as well, devices with the same rows draw different masks."""
    assert len(np.unique(outputs(partial(page.dropout, True), grid), axis=0)) == 64
    assert copies_that_differ(grid, ("data",)) == [1, 1]
    assert copies_that_differ(grid, ("data", "model")) == [4, 4]


def test_the_check_refuses_one_axis_too_many(grid):
    """The message names the axis, and offers to disable the check."""
    with pytest.raises(ValueError, match="replicated across mesh axis 'model'") as caught:
        on_grid(grid, ("data", "model"), P("data"))
    assert "check_vma=False" in str(caught.value)


def test_where_model_shards_the_features_it_belongs_in_the_key(grid):
    """Else the four pieces of the features have the same masks."""

    def different(axes):
        dropped_BF = np.asarray(on_grid(grid, axes, P("data", "model")))
        return len({part.tobytes() for part in np.split(dropped_BF, 4, axis=1)})

    assert different(("data",)) == 1 and different(("data", "model")) == 4


def test_under_jit_each_row_has_its_own_mask(page):
    """Under jax.jit the batch is one array."""
    sharding = jax.NamedSharding(page.mesh, P("data"))
    ones = jax.device_put(jnp.ones((64, 32)), sharding)
    dropped = jax.jit(partial(page.dropout, False))(jax.random.key(0), ones)
    assert len(np.unique(dropped, axis=0)) == 64


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
