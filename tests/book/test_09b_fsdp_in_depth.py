"""The page "FSDP in depth: keep less, send less"."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compared
import meshscope as ms
from layers_of_fsdp import REMATS, in_one_layer
from many_devices.compiled import stored_program
from many_devices.helpers import traffic
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again

PAGE = "09b-fsdp-in-depth"
P = jax.P
POLICIES = jax.checkpoint_policies
WHOLE = 4 * 4 * 64 * 64  # bytes of all matrices
assert_same = partial(compared.assert_same, rtol=1e-3, atol=1e-5)


def plain_loss(params, batch):
    """The loss on one device, in a Python loop and without a gather."""
    x_BD, labels_B = batch
    for w_DD, b_D in zip(params["w_DD"], params["b_D"]):
        x_BD = x_BD + jnp.tanh(x_BD @ w_DD + b_D)
    log_p_BV = jax.nn.log_softmax(x_BD[:, :10])
    return -jnp.mean(log_p_BV[jnp.arange(len(labels_B)), labels_B])


def step_with(page, remat):
    """The page's step with another remat."""
    loss = partial(page.loss_of, run=partial(page.stack, remat=remat))
    return jax.shard_map(
        jax.grad(loss), mesh=page.mesh, in_specs=(page.pieces, P("data")), out_specs=page.pieces
    )


def kept_by(page, policy, use=None):
    return page.bytes_kept(partial(jax.checkpoint, policy=policy), use or page.gather_layer)


# One step, and what it sends


def test_the_gradient_is_that_of_one_device(page):
    """In every number."""
    found = jax.jit(page.step)(page.params, page.digits_from(0))
    assert_same(found, jax.jit(jax.grad(plain_loss))(page.params, page.digits_from(0)))


@compiled_for_cpu
def test_matrices_are_gathered_twice_scattered_once_and_biases_all_reduced(page):
    """131,072 bytes are gathered, 65,536 scattered, 1,024 all-reduced."""
    assert page.params["w_DD"].nbytes == WHOLE == 65_536
    sent = {kind: page.sent.bytes(kind) for kind in page.sent}
    biases = page.params["b_D"].nbytes
    assert sent == {"all-gather": 131_072, "reduce-scatter": 65_536, "all-reduce": biases}
    assert biases == 1_024


def test_the_compiler_for_h100_does_the_same_and_that_for_tpu_gathers_in_bfloat16():
    """For the large model: two gathers and a scatter of 17.2 GB; TPU v5e's gathers are in bfloat16."""
    sizes = {}
    for compiler in ("gpu", "tpu"):
        rows = stored_program("fsdp-freed")[compiler]["moves"]
        gathers = [row for row in rows if row["kind"] == "all-gather"]
        dtypes = {row["dtype"] for row in gathers if row["payload"] > 1e8}
        assert dtypes == ({"float32"} if compiler == "gpu" else {"bfloat16"}), compiler
        sizes[compiler] = sum(row["payload"] for row in gathers)
    assert sizes["gpu"] / 17.18e9 == pytest.approx(2, abs=0.01)
    assert sizes["tpu"] / 17.18e9 == pytest.approx(1, abs=0.05)


# Remat policies


def test_what_a_device_keeps_without_remat_with_the_policy_and_with_plain_checkpoint(page):
    """81,920, 24,576 and 17,408 bytes; the policy frees 7/8 of the matrices, 57,344 bytes."""
    sizes = {name: page.bytes_kept(remat) for name, remat in page.remats.items()}
    rows, bias = 8 * 64 * 4, 64 * 4
    assert rows == 64 * 64 * 4 // 8 == 2_048 and bias == 256  # input, tanh or piece
    assert sizes["jax.checkpoint"] == 17_408 == 4 * (rows + rows + bias)
    older = jax.__version_info__ < (0, 12) and sizes["free_gathers"] == 4 * 4 * rows
    assert sizes["free_gathers"] == 24_576 == 4 * 3 * rows or older
    assert sizes["no remat"] - sizes["free_gathers"] == WHOLE * 7 // 8 == 57_344
    assert sizes["no remat"] == 81_920 or older
    assert sizes["no remat"] == kept_by(page, POLICIES.everything_saveable)
    assert sizes["jax.checkpoint"] == kept_by(page, POLICIES.nothing_saveable)


def test_a_policy_that_frees_gathers_computes_no_matmul_twice():
    """Freed by a policy, weights are gathered twice and no matmul is computed twice."""
    kept, freed = in_one_layer(REMATS["kept"]), in_one_layer(REMATS["freed by a policy"])
    assert freed == kept | {"gathers": 2 * kept["gathers"]}


def test_plain_checkpoint_computes_the_forward_matmul_again():
    """Plain jax.checkpoint gathers twice, too, and computes each layer's matmul twice."""
    freed, again = in_one_layer(REMATS["freed by a policy"]), in_one_layer(REMATS["jax.checkpoint"])
    assert again == freed | {"matmuls": freed["matmuls"] + 1}


@pytest.mark.parametrize("name", REMATS)
def test_gradients_are_scattered_once(name):
    """Whatever is kept, a layer's gradient is scattered once."""
    assert in_one_layer(REMATS[name])["scatters"] == 1


def test_the_pages_policy_saves_work_and_no_communication(page):
    """Its step has one matmul less than plain jax.checkpoint's, and the same gradient."""
    freed, some = step_with(page, page.remats["free_gathers"]), page.digits_from(0)
    assert_same(jax.jit(freed)(page.params, some), jax.jit(page.step)(page.params, some))
    matmuls, gathers = (
        [str(jax.make_jaxpr(f)(page.params, some)).count(name) for f in (page.step, freed)]
        for name in ("dot_general[", "all_gather[")
    )
    assert matmuls == [4, 3] and gathers == [2, 2]  # forward, again, and two backward


@compiled_for_cpu
def test_both_send_the_same(page):
    """As compiled for CPU, gathers and scatters of both have the same bytes."""
    freed, some = step_with(page, page.remats["free_gathers"]), page.digits_from(0)
    sent = traffic(freed, page.params, some, mesh=page.mesh).by("kind")
    for kind in ("all-gather", "reduce-scatter"):
        assert sent.bytes(kind) == page.sent.bytes(kind)


def test_in_a_loop_without_a_scan_the_policy_frees_as_well(page):
    """With the layers in a Python loop, all matrices that the backward pass needs are freed."""

    def kept_by_loop(rule):
        remat = partial(jax.checkpoint, policy=rule) if rule else page.no_remat

        def layer(x_BD, weights):
            weights = page.gather_layer(weights)
            return x_BD + jnp.tanh(x_BD @ weights["w_DD"] + weights["b_D"])

        def residuals(params, x_block_BD):
            def run(params):
                y = x_block_BD
                for n in range(4):
                    y = remat(layer)(y, jax.tree.map(lambda leaf: leaf[n], params))  # noqa: B023
                return y

            backward = jax.vjp(run, params)[1]
            return jnp.zeros(sum(leaf.nbytes for leaf in jax.tree.leaves(backward)))

        specs = page.pieces, P("data")
        mapped = jax.shard_map(residuals, mesh=page.mesh, in_specs=specs, out_specs=P())
        return jax.eval_shape(mapped, page.params, page.images_BI[:64]).size

    rules = (None, page.free_gathers, POLICIES.nothing_saveable)
    everything, freed, nothing = map(kept_by_loop, rules)
    needed = WHOLE * 3 // 4  # no gradient needs the first matrix
    assert everything > needed and everything - freed == needed * 7 // 8
    assert nothing < freed


def test_a_weight_computed_from_a_gathered_one_is_kept_whole(page):
    """Scaled after the gather, nothing is freed, and the factor is kept as well."""
    after = kept_by(page, page.free_gathers, page.scaled_after)
    assert after - page.bytes_kept(page.remats["free_gathers"]) >= 57_344
    older = jax.__version_info__ < (0, 12)
    assert after - page.bytes_kept(page.no_remat) == 4 or older

    def scaled_before(weights):
        return page.gather_layer(weights | {"w_DD": 2 * weights["w_DD"]})

    assert kept_by(page, page.free_gathers, scaled_before) < after - 40_000


def test_everything_except_these_names_keeps_everything(page):
    """save_anything_except_these_names returns True whatever it is called with, and frees nothing."""
    stub = POLICIES.save_anything_except_these_names("whole")
    assert stub(None, name="whole") is True and stub(None) is True
    assert page.bytes_kept(page.by_name, page.named) == page.bytes_kept(page.no_remat)
    assert kept_by(page, page.but_whole, page.named) == page.bytes_kept(page.no_remat)
    other_name = POLICIES.save_only_these_names("whole")
    assert (
        kept_by(page, other_name, page.named) - page.bytes_kept(jax.checkpoint) == 57_344
    )  # it is named


def test_to_free_a_named_weight_refuse_both_gather_and_name(page):
    """Naming is an operation with a result of its own."""

    def free_both(primitive, *_, **__):
        return primitive.name not in ("all_gather", "name")

    assert kept_by(page, page.free_gathers, page.named) == page.bytes_kept(page.no_remat)
    assert kept_by(page, free_both, page.named) == page.bytes_kept(page.remats["free_gathers"])


def test_save_only_these_names_costs_57_344_bytes_and_saves_a_gather(page):
    """Compared with plain jax.checkpoint; everything else is computed twice."""
    rule = partial(jax.checkpoint, policy=POLICIES.save_only_these_names("whole"))
    run = partial(page.stack, use=page.named, remat=rule)
    saved = jax.shard_map(
        jax.grad(partial(page.loss_of, run=run)),
        mesh=page.mesh,
        in_specs=(page.pieces, P("data")),
        out_specs=page.pieces,
    )
    text = str(jax.make_jaxpr(saved)(page.params, page.digits_from(0)))
    assert text.count("all_gather[") == 1 and text.count("dot_general[") == 4
    assert page.bytes_kept(rule, page.named) - page.bytes_kept(jax.checkpoint) == 57_344


def test_save_any_names_but_these_keeps_as_little_as_plain_checkpoint(page):
    """It keeps nothing that has no name."""
    rule = POLICIES.save_any_names_but_these("whole")
    assert kept_by(page, rule, page.named) == page.bytes_kept(jax.checkpoint)


def test_dots_saveable_keeps_results_of_matmuls_also_a_weight_that_is_one(page):
    """It frees gathered weights here, and keeps a weight that is itself a product."""
    results = 4 * 8 * 64 * 4  # of four matmuls, for 8 rows
    assert kept_by(page, POLICIES.dots_saveable) == page.bytes_kept(jax.checkpoint) + results

    def merged(piece, x_block):
        return jnp.sum(jnp.tanh(x_block @ (page.gather(piece, 0) @ jnp.eye(32))))

    def kept_of_merged(rule):
        def residuals(piece, x_block):
            _, backward = jax.vjp(jax.checkpoint(merged, policy=rule), piece, x_block)
            return jnp.zeros(sum(leaf.nbytes for leaf in jax.tree.leaves(backward)))

        mapped = jax.shard_map(residuals, mesh=page.mesh, in_specs=P("data"), out_specs=P())
        return jax.eval_shape(mapped, jnp.zeros((64, 32)), jnp.zeros((64, 64))).size

    dots, nothing = map(kept_of_merged, (POLICIES.dots_saveable, POLICIES.nothing_saveable))
    assert dots >= nothing + 64 * 32 * 4  # the whole product


# bfloat16


def test_converted_first_gather_and_sum_are_in_bfloat16_and_with_the_remedy_the_gather_alone(page):
    """Not converted, both are in float32; with the remedy the sum is in float32."""
    ways = (page.gather, page.in_bf16, page.sum_in_float32)
    assert [page.dtypes_asked(way) for way in ways] == [
        {"all_gather": gathered, "reduce_scatter": summed}
        for gathered, summed in (("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32"))
    ]


@compiled_for_cpu
def test_cpu_carries_bfloat16_collectives_as_float32(page):
    """So the bytes of CPU programs cannot tell."""
    in_bf16 = partial(page.in_bf16, axis=0)
    mapped = jax.shard_map(in_bf16, mesh=page.mesh, in_specs=P("data"), out_specs=P("data"))
    compiled = jax.jit(mapped).lower(jnp.ones((64, 16))).compile()
    assert {row.dtype for row in ms.collectives(compiled, page.mesh)} == {"float32"}


def test_a_sum_in_bfloat16_is_off_by_more_with_more_devices(page):
    """0.3 % at 8 devices, 18.7 % at 1,024."""
    errors = [float(page.ring_error(n)) for n in (8, 64, 256, 1024)]
    assert errors == sorted(errors) and errors[0] < 0.005 and 0.15 < errors[3] < 0.22


def test_late_terms_are_rounded_away(page):
    """From 1/2 on, bfloat16's numbers are 1/256 apart, and a term of less than half is lost."""
    half = jnp.bfloat16(0.5)
    assert half + jnp.bfloat16(1 / 1024) == half
    assert half + jnp.bfloat16(1.1 / 512) == half + jnp.bfloat16(1 / 256)
    terms = np.asarray((jax.random.normal(jax.random.key(0), (1024, 4096)) + 1) / 1024)
    assert np.mean(terms) == pytest.approx(1 / 1024, rel=0.01) and np.mean(terms > 0) > 0.8
    assert np.mean(terms > 1 / 512) < 1 / 6  # five of six are lost

    def one_more(so_far, term):
        return so_far + term, None

    nothing = jnp.zeros(4096, jnp.bfloat16)
    ends, _ = jax.lax.scan(one_more, nothing, terms.astype(jnp.bfloat16))
    assert 0.78 < np.mean(ends, dtype=np.float32) < 0.84  # and not 1


def plain_losses(page):
    """The losses of one device, with momentum by hand."""
    weights, speed = page.params, jax.tree.map(jnp.zeros_like, page.params)
    value, losses = jax.jit(jax.value_and_grad(plain_loss)), []
    for n in range(20):
        loss, gradient = value(weights, page.digits_from(64 * n))
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, gradient)
        weights = jax.tree.map(lambda w, v: w - 0.05 * v, weights, speed)
        losses.append(float(loss))
    return losses


def test_twenty_steps_in_float32_have_the_losses_of_one_device(page):
    """With momentum by hand, and on new digits in each step."""
    np.testing.assert_allclose(page.in_float32, plain_losses(page), rtol=1e-3)
    assert len(page.in_float32) == 20 and page.in_float32[-1] < page.in_float32[0] / 2


def test_in_bfloat16_the_losses_are_close_and_not_equal(page):
    """Layers in bfloat16 train as well as in float32."""
    gaps = np.abs(np.subtract(page.in_bfloat16, page.in_float32))
    assert 1e-5 < gaps.max() < 5e-2


def test_weights_and_momentum_stay_in_float32_and_in_pieces(page):
    """After twenty steps in bfloat16."""
    for leaf in jax.tree.leaves((page.weights, page.momentum)):
        assert leaf.dtype == jnp.float32
    assert "data" in page.weights["w_DD"].sharding.spec


def test_no_gradient_is_summed_in_bfloat16(page):
    """Neither the matrices' nor the biases', and the gradients are float32."""

    def loss(params, batch_block):
        x_BD, labels_B = batch_block
        run = partial(page.stack, use=page.gather_layer_in_bf16)
        return page.loss_of(params, (x_BD.astype(jnp.bfloat16), labels_B), run)

    specs = dict(in_specs=(page.pieces, P("data")), out_specs=page.pieces)
    mapped = jax.jit(jax.shard_map(jax.grad(loss), mesh=page.mesh, **specs))
    some = page.digits_from(0)
    gradient = jax.eval_shape(mapped, page.params, some)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
    sums = re.findall(
        r"stablehlo.(?:all_reduce|reduce_scatter).*?\) : \(tensor<[\dx]*?(\w+)>",
        mapped.lower(page.params, some).as_text(),
        re.DOTALL,
    )
    assert "f32" in sums[0] and not any("bf16" in dtype for dtype in sums)


def test_in_bfloat16_the_policy_frees_7_8_of_32_768_bytes(page):
    """`free_gathers` finds the gather inside the function with a backward pass of its own."""
    names = ("no remat", "free_gathers")
    everything, freed = (
        page.bytes_kept(page.remats[name], page.gather_layer_in_bf16, "bfloat16") for name in names
    )
    assert everything - freed == 32_768 * 7 // 8 and 32_768 == WHOLE // 2


def test_with_remat_a_step_sends_12_bytes_a_number_and_with_the_remedy_8(page):
    """Two gathers and a scatter: 4 + 4 + 4 bytes, and 2 + 2 + 4."""
    size = {"f32": 4, "bf16": 2}
    for way, total in ((page.gather, 12), (page.sum_in_float32, 8)):
        asked = page.dtypes_asked(way)
        assert 2 * size[asked["all_gather"]] + size[asked["reduce_scatter"]] == total


# The guard, new in JAX 0.12

guarded_since_0_12 = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax.sharding.no_collectives is new in JAX 0.12"
)
FORBIDDEN = "Collective across axis 'data' is forbidden by `no_collectives`, but `psum` acts on"


def test_without_the_guard_the_page_says_so(page, monkeypatch, capsys):
    """On an older release the cell prints one sentence, and the rest of the page runs."""
    monkeypatch.delattr(jax.sharding, "no_collectives", raising=False)
    run_again(page, PAGE, "forbidden")
    assert "has no jax.sharding.no_collectives: it came in 0.12" in capsys.readouterr().out


def test_a_forgotten_bias_is_summed_in_bfloat16_by_a_psum_that_jax_adds(page):
    """Without the guard it compiles: its gradient is summed in bfloat16, and the gathers' are not."""

    def summed_in(use):
        loss = partial(page.loss_of, run=partial(page.stack, use=use))
        specs = {"in_specs": (page.pieces, P("data")), "out_specs": page.pieces}
        step = jax.shard_map(jax.grad(loss), mesh=page.mesh, **specs)
        x_BD, labels_B = page.digits_from(0)
        text = jax.jit(step).lower(page.params, (x_BD.astype("bfloat16"), labels_B)).as_text()
        line = r'"?stablehlo.(all_reduce|reduce_scatter).*?: \(tensor<[\dx]*x(\w+)>\)'
        return dict(re.findall(line, text, re.DOTALL))

    assert summed_in(page.bias_forgotten) == {"all_reduce": "bf16", "reduce_scatter": "f32"}
    assert summed_in(page.gather_layer_in_bf16) == {"all_reduce": "f32", "reduce_scatter": "f32"}


@guarded_since_0_12
def test_the_guard_refuses_the_forgotten_bias(page):
    """Of what the layer computes, only the bias's gradient needs a collective."""
    with pytest.raises(Exception, match=FORBIDDEN) as raised:
        page.guarded_step(page.bias_forgotten)(page.params, page.digits_from(0))
    assert type(raised.value).__name__ == "ForbiddenCollectiveError"


@guarded_since_0_12
@compiled_for_cpu
def test_the_guarded_step_with_its_cast_sends_and_computes_the_same(page):
    """Compiled for CPU: gathers, scatters and the biases' all-reduce, and the same gradient."""
    batch = page.digits_from(0)
    step = page.guarded_step(page.gather_layer_in_bf16)
    moves = traffic(step, page.params, batch, mesh=page.mesh)
    assert moves.kinds == {"all-gather", "all-reduce", "reduce-scatter"}
    expected = jax.grad(plain_loss)(page.params, batch)
    assert_same(jax.jit(step)(page.params, batch), expected, rtol=0.1, atol=2e-3)


@guarded_since_0_12
def test_the_guard_refuses_a_gather_by_its_name_and_axis_index_passes(page):
    """Inside shard_map a collective along the axis is refused; axis_index moves nothing."""

    def traced(function):
        def guarded(x_block):
            with jax.sharding.no_collectives({"data"}):
                return function(x_block)

        specs = {"in_specs": P("data"), "out_specs": P("data")}
        return jax.eval_shape(jax.shard_map(guarded, mesh=page.mesh, **specs), jnp.ones(8))

    with pytest.raises(Exception, match="`all_gather` acts on axis 'data'"):
        traced(partial(page.gather, axis=0))
    traced(lambda x_block: x_block + jax.lax.axis_index("data"))


@guarded_since_0_12
def test_the_guard_refuses_a_mean_that_comes_after_the_gradient(page):
    """Chapter 9's mistake: the gradient of a weight with P() is summed already, by JAX's psum."""

    def error_of(w_DF, x_BD):
        return jnp.mean(jnp.tanh(x_BD @ w_DF) ** 2)

    def average_afterwards(gradient, w_DF, x_block_BD):
        return jax.lax.pmean(gradient(w_DF, x_block_BD), "data")

    def local(w_DF, x_block_BD):
        with jax.sharding.no_collectives({"data"}):
            return jax.grad(error_of)(w_DF, x_block_BD)

    w_DF, x_BD = jnp.full((64, 16), 0.01), page.digits_from(0)[0]
    on_rows = partial(jax.shard_map, mesh=page.mesh, in_specs=(P(), P("data")), out_specs=P())
    gradient = jax.grad(error_of)
    wrong = on_rows(partial(average_afterwards, gradient))(w_DF, x_BD)
    np.testing.assert_allclose(wrong, 8 * gradient(w_DF, x_BD), rtol=1e-4, atol=1e-6)
    with pytest.raises(Exception, match=FORBIDDEN):
        on_rows(partial(average_afterwards, local))(w_DF, x_BD)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
