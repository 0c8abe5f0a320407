"""The step of examples/train.py under every strategy, each against something else that knows.

In this process, on its eight simulated devices, with a model of two layers.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dataset
import meshscope as ms
import model
import steps
import strategies
import train

P = jax.P
SIZES = dict(L=2, D=64, F=128, H=8, K=4, C=8, V=256, S=16, theta=1e4)
SMALL = model.Config(**SIZES)
RECIPE = steps.Recipe(1e-2, 2, 40, 0.1, 0.1, 0.95, 0.5, seed=0)  # its first norms are clipped
ROWS = 16
QUICK = {"xla_backend_optimization_level": 0}
MESHES = {  # of each strategy, with microbatches where they differ
    "data-parallel": {}, "data-parallel, 2 microbatches": {}, "zero1": {}, "fsdp": {},
    "fsdp, 2 microbatches": {}, "hsdp": {}, "hsdp, 2 microbatches": {},
    "tensor": {"model": 4}, "fsdp-tensor": {},
}  # fmt: skip


class Trained(NamedTuple):
    """A step, compiled, and what it did in four steps."""

    mesh: jax.sharding.Mesh
    program: jax.stages.Compiled
    places: steps.Run
    run: steps.Run
    first: steps.Run  # donated
    losses: list
    norms: list


def splits_of(batch=ROWS, accumulate=1, sizes=SIZES):
    dimensions = {letter: sizes[letter] for letter in "DHKFV"}
    return functools.partial(
        strategies.splits_of, dimensions=dimensions, batch=batch, accumulate=accumulate
    )


def tokens_of(number, size=ROWS, S=SIZES["S"]):
    return np.random.default_rng(number).integers(256, size=(size, S + 1)).astype("int32")


@functools.cache
def compiled(name, devices=8, config=SMALL, recipe=RECIPE):
    """The shapes of a run and its step, from shapes alone."""
    strategy, _, more = name.partition(", ")
    accumulate = int(more.split()[0]) if more else 1
    asked = MESHES.get(name, {})
    mesh = strategies.make_mesh(strategy, asked, splits_of(), jax.devices()[:devices])
    make = functools.partial(steps.make_run, config, strategy, steps.optimizer_of(recipe), 0)
    with jax.set_mesh(mesh):
        shapes = nnx.merge(*nnx.get_abstract_model(make, mesh))
        places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        step = steps.compiled_step(places, mesh, accumulate)
        lowered = step.lower(shapes, steps.batch_shape(mesh, ROWS, config.S))
        program = lowered.compile(QUICK)
    return mesh, make, places, program


@functools.cache
def trained(name, devices=8, config=SMALL, recipe=RECIPE):
    mesh, make, places, program = compiled(name, devices, config, recipe)
    by_rows = jax.NamedSharding(mesh, P(strategies.ROWS))
    with jax.set_mesh(mesh):
        run = first = jax.jit(make, out_shardings=places)()
    losses, norms = [], []
    for number in range(4):
        run, loss, norm = program(run, jax.device_put(tokens_of(number), by_rows))
        losses.append(float(loss))
        norms.append(float(norm))
    return Trained(mesh, program, places, run, first, losses, norms)


def numbers_of(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf, "float64")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# ---- one model, whatever the strategy ----------------------------------------------------------


TRAINED = [name for name in MESHES if "microbatches" not in name or name.startswith("hsdp")]


@pytest.mark.parametrize("name", TRAINED)
def test_same_losses_norms_moments_and_weights(name):
    """Each strategy adds up the same float32 numbers in another order."""
    alone, run = trained("data-parallel", devices=1), trained(name)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-6)
    np.testing.assert_allclose(run.norms, alone.norms, rtol=1e-5)  # before clipping, and true
    assert alone.norms[0] > RECIPE.clip, "nothing would be clipped"
    ours, theirs = (
        numbers_of(run.run.optimizer.opt_state),
        numbers_of(alone.run.optimizer.opt_state),
    )
    for key, array in theirs.items():
        assert np.abs(ours[key] - array).max() <= 1e-5 * np.abs(array).max(), key
    ours, theirs = numbers_of(run.run.model), numbers_of(alone.run.model)
    for key, array in theirs.items():  # rounding decides where a moment is nearly nothing
        assert np.abs(ours[key] - array).max() < 1e-3, key
    assert run.losses[3] != run.losses[0]


@pytest.mark.parametrize("name", TRAINED)
def test_nothing_drifts_and_memory_is_donated(name):
    run = trained(name)
    for leaf, place in zip(jax.tree.leaves(run.run), jax.tree.leaves(run.places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(run.first)), "nothing was donated"
    held = steps.bytes_held(run.run)
    assert ms.memory(run.program).aliased == held == ms.memory(run.run).bytes_per_device
    assert run.run.optimizer.step[...] == 4


def test_bytes_held_follow_from_the_sizes():
    """Closed forms against what the program adds up from the shardings of its arrays."""
    D, F, H, K, C, V, L = (SIZES[letter] for letter in "DFHKCVL")
    matrices = L * (2 * D * (H + K) * C + 3 * D * F) + 2 * V * D
    scales, counters = (2 * L + 1) * D, 3 * 4
    expected = {
        "data-parallel": 12 * (matrices + scales),
        "zero1": 4 * (matrices + scales) + 8 * (matrices // 8 + scales),
        "fsdp": 12 * (matrices // 8 + scales),
        "hsdp": 12 * (matrices // 4 + scales),
        "tensor": 12 * (matrices // 4 + scales),
        "fsdp-tensor": 12 * (matrices // 8 + scales),
    }
    held = {name: steps.bytes_held(trained(name).run) for name in expected}
    assert held == {name: count + counters for name, count in expected.items()}
    assert matrices == model.matmul_weights(SMALL) + V * D


# ---- what moves --------------------------------------------------------------------------------


def moved(name, kind, axis):
    """Payload bytes of one step, of arrays, over this axis alone or with others."""
    rows = ms.collectives(compiled(name)[3])
    found = [row for row in rows if row.kind == kind and axis in row.axes and row.shape != ()]
    return sum(row.payload_bytes * row.executions for row in found), {row.shape for row in found}


def weights_in(name):
    return [leaf.shape for leaf in jax.tree.leaves(nnx.state(trained(name).run.model, nnx.Param))]


def test_gradients_cross_data_once_a_step_however_many_microbatches():
    weights = sum(4 * np.prod(shape) for shape in weights_in("data-parallel"))
    for name in ("data-parallel", "data-parallel, 2 microbatches"):
        sent, _ = moved(name, "all-reduce", "data")
        assert weights <= sent < 1.01 * weights, name
    for name in ("hsdp", "hsdp, 2 microbatches"):  # over `data`, each device its fourth
        rows = [row for row in ms.collectives(compiled(name)[3]) if "data" in row.axes]
        sent = sum(row.payload_bytes * row.executions for row in rows)
        assert weights / 4 <= sent < weights / 2, name
    one, two = (moved(f"fsdp{more}", "all-reduce", "fsdp")[0] for more in ("", ", 2 microbatches"))
    assert 1.9 * one < two < 2.1 * one, "FSDP sums after each microbatch, and says so"


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "fsdp-tensor"])
def test_fsdp_gathers_weights_and_no_activation(name):
    _, shapes = moved(name, "all-gather", "fsdp")
    rows = {ROWS, ROWS // 2, ROWS // 4, ROWS // 8}
    assert shapes, "nothing is gathered"
    for shape in shapes:
        assert not {SIZES["S"], SIZES["S"] + 1} & {*shape} or not rows & {*shape}, shape


@pytest.mark.parametrize("name", ["tensor", "fsdp-tensor"])
def test_tensor_parallelism_adds_up_activations_and_gathers_none(name):
    assert moved(name, "all-gather", "model") == (0, set())
    sent, _ = moved(name, "all-reduce", "model")
    mesh = compiled(name)[0]
    rows = ROWS // (mesh.shape["data"] * mesh.shape["fsdp"])
    activation = 4 * rows * SIZES["S"] * SIZES["D"]
    # Two sums a layer and direction, the embedding and the head; and the softmax's small numbers.
    assert 4 * SIZES["L"] * activation <= sent <= (8 * SIZES["L"] + 6) * activation


def test_gradients_are_added_up_in_the_dtype_of_the_reduction():
    """A CPU would widen bfloat16, so this looks at the program before it is compiled."""
    found = {}
    for reduce in ("float32", "bfloat16"):
        config = model.Config(**SIZES, compute="bfloat16", reduce=reduce)
        mesh = compiled("fsdp")[0]
        with jax.set_mesh(mesh):
            weights = nnx.eval_shape(lambda config=config: model.Model(config, nnx.Rngs(0)))
            tokens = steps.batch_shape(mesh, ROWS, SIZES["S"])
            text = str(jax.make_jaxpr(jax.grad(model.loss_of))(weights, tokens))
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products and all("bf16" in line or "f32[" in line for line in products)
        found[reduce] = len([line for line in products if re.search(r":f32\[64,", line)])
    assert found["float32"] > found["bfloat16"] == 0, found


def test_remat_saves_memory_and_changes_no_loss():
    memory, losses = {}, {}
    alone = trained("data-parallel", devices=1)
    weights = alone.run.model
    with jax.set_mesh(alone.mesh):
        for policy in model.REMAT:
            changed = nnx.clone(weights)
            changed.config = model.Config(**(SIZES | {"S": 128}), remat=policy)
            graphdef, state = nnx.split(changed)

            def loss(state, graphdef=graphdef):
                return model.loss_of(nnx.merge(graphdef, state), tokens_of(0, 8, 128))

            program = jax.jit(jax.value_and_grad(loss)).lower(state).compile(QUICK)
            losses[policy] = float(program(state)[0])
            memory[policy] = ms.memory(program).temporaries
    np.testing.assert_allclose([*losses.values()], losses["none"], rtol=1e-6)
    assert memory["full"] < memory["products"] < memory["none"], memory


def test_bfloat16_computes_and_float32_remembers():
    config = model.Config(**SIZES, compute="bfloat16")
    run, exact = trained("fsdp", config=config), trained("fsdp")
    apart = np.abs(np.subtract(run.losses, exact.losses)).max()
    assert 1e-4 < apart < 0.05, apart
    floats = {
        leaf.dtype for leaf in jax.tree.leaves(run.run) if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert floats == {jnp.dtype("float32")}, "masters and moments must not be rounded"
    assert np.any(np.asarray(run.run.model.w_DV[...]).view("uint32") & 0xFFFF)


# ---- the model, against NumPy ------------------------------------------------------------------


def logits_by_numpy(run, tokens_S):
    """One row, in float64, head by head and position by position."""
    weights = {key: np.asarray(leaf, "float64") for key, leaf in nnx.to_pure_dict(
        nnx.state(run.model, nnx.Param))["blocks"].items()}  # fmt: skip
    S, C, per = SIZES["S"], SIZES["C"], SIZES["H"] // SIZES["K"]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x, position):
        """Pairs (c, c + C/2) as complex numbers, turned by an angle."""
        pairs = x[: C // 2] + 1j * x[C // 2 :]
        pairs = pairs * np.exp(1j * position * 1e4 ** (-np.arange(0, C, 2) / C))
        return np.concatenate([pairs.real, pairs.imag])

    x_SD = np.asarray(run.model.embedding_VD[...], "float64")[tokens_S]
    for layer in range(SIZES["L"]):
        w = {name: array[layer] for name, array in weights.items()}
        h_SD, out_SD = norm(x_SD, w["attention_scale_D"]), np.zeros_like(x_SD)
        for head in range(SIZES["H"]):
            q = [turn(h_SD[s] @ w["w_query_DHC"][:, head], s) for s in range(S)]
            k = [turn(h_SD[s] @ w["w_key_DKC"][:, head // per], s) for s in range(S)]
            v_SC = h_SD @ w["w_value_DKC"][:, head // per]
            for s in range(S):
                scores = np.array([q[s] @ k[t] for t in range(s + 1)]) / np.sqrt(C)
                shares = np.exp(scores - scores.max())
                mixed_C = shares / shares.sum() @ v_SC[: s + 1]
                out_SD[s] += mixed_C @ w["w_out_HCD"][head]
        x_SD = x_SD + out_SD
        h_SD = norm(x_SD, w["mlp_scale_D"])
        gate_SF = h_SD @ w["w_gate_DF"]
        x_SD = x_SD + (gate_SF / (1 + np.exp(-gate_SF)) * (h_SD @ w["w_up_DF"])) @ w["w_down_FD"]
    final = norm(x_SD, np.asarray(run.model.scale_D[...], "float64"))
    return final @ np.asarray(run.model.w_DV[...], "float64")


def test_logits_and_loss_are_those_of_a_numpy_model():
    run, tokens_BS = trained("data-parallel", devices=1), tokens_of(9, 1)
    with jax.set_mesh(run.mesh):
        logits = jax.jit(lambda model, tokens: model(tokens))(run.run.model, tokens_BS[:, :-1])
        loss = jax.jit(model.loss_of)(run.run.model, tokens_BS)
    expected = logits_by_numpy(run.run, tokens_BS[0, :-1])
    np.testing.assert_allclose(np.asarray(logits)[0], expected, atol=2e-5)
    by_optax = optax.softmax_cross_entropy_with_integer_labels(logits[0], tokens_BS[0, 1:]).mean()
    assert np.isclose(loss, by_optax, rtol=1e-6)


def test_norms_do_not_decay_and_matrices_do():
    still = steps.Recipe(1e-2, 0, 40, 1.0, 0.5, 0.95, 0.0, seed=0)
    tx = steps.optimizer_of(still)
    weights = nnx.state(trained("data-parallel", devices=1).run.model, nnx.Param)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = tx.update(nothing, tx.init(weights), weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        assert bool(jnp.any(leaf != 0)) == ("scale" not in name), name


def test_schedule():
    rates = [float(steps.schedule_of(RECIPE)(step)) for step in (0, 1, 2, 21, 40, 1000)]
    np.testing.assert_allclose(rates, [0, 5e-3, 1e-2, 5.5e-3, 1e-3, 1e-3], rtol=1e-5)


# ---- the test and the sample -------------------------------------------------------------------


@pytest.mark.parametrize("most, size", [(16, 16), (21, 16), (5, 8)])
def test_the_test_is_exact_over_uneven_batches(most, size):
    _, test, _ = dataset.open_tokens(train.options.HERE / "data" / "book.txt", SIZES["S"], 256)
    run = trained("fsdp")
    with jax.set_mesh(run.mesh):
        loss = steps.compiled_test(test, most, size, run.mesh)(run.run.model)
    alone = trained("data-parallel", devices=1)
    rows = np.stack([test[number] for number in range(most)])
    with jax.set_mesh(alone.mesh):
        each = jax.jit(model.losses_of)(alone.run.model, rows)
    assert np.isclose(loss, np.asarray(each, "float64").mean(), rtol=1e-5)


def test_a_sample_is_the_same_on_every_mesh_and_begins_with_the_prompt():
    texts = set()
    for name in ("fsdp-tensor", "hsdp"):
        run = trained(name)
        with jax.set_mesh(run.mesh):
            sample = steps.compiled_sample(run.mesh, SIZES["S"])
            texts.add(sample(run.run.model, b"The ", 20, seed=1))  # longer than a row
    assert len(texts) == 1 and len(min(texts)) == 24 and min(texts).startswith(b"The ")
