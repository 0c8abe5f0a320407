"""The page "The bytes of FSDP": what it sends, what remat frees, and who writes it."""

import importlib.metadata as metadata
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from compared import assert_same
from many_devices import fsdp as chapter_9
from many_devices.compiled import digest, lowered_for, stored, stored_memory, stored_program
from many_devices.stacked import Model, Strategy, large, loss_of, tiny, unchanged
from pages import check_exercise, compiled_for_cpu, exercises_of, source_of
from printed import rows_of
from traced import equations

PAGE = "09a-fsdp-bytes"
P = jax.P
TEXT = source_of(PAGE).read_text("utf-8")
COMPILERS = {"H100": "gpu", "TPU v5e": "tpu", "CPU": "cpu"}
MATRICES = 4 * (tiny.L * 2 * tiny.D * tiny.F + (tiny.I + tiny.V) * tiny.D)  # bytes
STACK = 4 * large.L * 2 * large.D * large.F  # of the large model's layers
ONE_MATRIX = 4 * large.D * large.F


def sent(name, compiler):
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"])


def temporaries(name, compiler):
    """What a program takes besides its arguments and outputs: for TPU, of its peak."""
    memory = stored_memory(name, compiler)
    return memory.bytes_per_device - memory.arguments - memory.outputs + memory.aliased


def by_kind(program, page):
    return ms.collectives(program, page.mesh).by("kind")


def all_sent(program, page):
    table = by_kind(program, page)
    return sum(table.wire(kind) for kind in table)


@pytest.fixture(scope="module")
def programs(page):
    """Gradients of the large model, by name."""
    ddp_freed = replace(page.ddp, remat=jax.checkpoint)
    strategies = {"kept": page.fsdp, "freed": page.freed, "DDP": page.ddp, "DDP freed": ddp_freed}
    return {name: page.gradient_program(large, strategies[name]) for name in strategies}


# Predict every byte before it moves


def test_the_bytes_of_the_page_are_those_of_the_tiny_model(page):
    """302,592 numbers of matrices, and 2,305 of small arrays and the loss."""
    small = 4 * tiny.L * (2 * tiny.D + tiny.F) + 4  # and the loss
    assert (MATRICES, small) == (1_210_368, 9_220) == (page.matrices, page.small)
    assert page.predicted["all-gather"] == page.predicted["reduce-scatter"] == MATRICES * 7 / 8
    assert page.predicted["all-reduce"] == 2 * small * 7 / 8
    assert sum(page.predicted.values()) == 2_134_279 == 7 * 1_219_588 // 4


@compiled_for_cpu
def test_fsdp_sends_what_was_predicted(page):
    """Compiled for CPU, every kind of collective sends the bytes of the closed form."""
    found = page.after("sent").sent
    assert {kind: found.wire(kind) for kind in found} == page.predicted


@compiled_for_cpu
def test_data_parallelism_sends_as_many_bytes(page):
    """DDP all-reduces 2,134,279 bytes, and nothing else moves."""
    found = by_kind(page.gradient_program(tiny, page.ddp), page)
    assert found.wire("all-reduce") == 2_134_279 and set(found) == {"all-reduce"}


def test_fsdp_scatters_gradients_and_gathers_weights(page):
    """The traced program names the operations that the page predicts, on any machine."""
    gradient, model, batch = page.gradient_of(tiny, page.fsdp)
    text = str(jax.make_jaxpr(gradient)(model, batch))
    assert "all_gather[" in text and "reduce_scatter[" in text


# What other compilers make of it


def test_the_stored_program_is_the_one_of_the_page(page):
    """On the releases that were stored, the program of the page has the stored hash."""
    about = stored()["about"]
    if (jax.__version__, metadata.version("flax")) != (about["jax"], about["flax"]):
        pytest.skip("other releases than the stored")
    lowered = lowered_for("tpu", *page.gradient_of(tiny, page.fsdp))
    assert digest(lowered) == stored_program("fsdp-tiny")["hash"]


def moves(compiler):
    return {
        (move["kind"], move["dtype"]): move["wire"]
        for move in stored_program("fsdp-tiny")[compiler]["moves"]
    }


def test_h100_sends_what_is_predicted_to_the_byte(page):
    """For H100 the bytes are identical to CPU's, which are those predicted."""
    assert moves("gpu") == moves("cpu")
    assert {kind: size for (kind, _), size in moves("gpu").items()} == page.predicted


def test_tpu_gathers_some_weights_in_bfloat16_and_pads_what_it_scatters(page):
    """Compiled for TPU v5e, some gathers have half the bytes, and scatters up to 1 % more."""
    tpu = moves("tpu")
    gathers = {dtype: size for (kind, dtype), size in tpu.items() if kind == "all-gather"}
    assert set(gathers) == {"bfloat16", "float32"}
    assert 2 * gathers["bfloat16"] + gathers["float32"] == page.predicted["all-gather"]
    padded = tpu["reduce-scatter", "float32"] / page.predicted["reduce-scatter"]
    assert 1 < padded < 1.01
    assert 0 < tpu["collective-permute", "float32"] < 10_000
    assert tpu["all-reduce", "float32"] == page.predicted["all-reduce"]


def test_of_the_large_model_the_tpu_gathers_nearly_all_weights_in_bfloat16():
    """The compiler for TPU v5e gathers in bfloat16 what only matmuls read; the others do not."""
    for compiler in ("cpu", "tpu", "gpu"):
        rows = stored_program("fsdp-freed")[compiler]["moves"]
        gathers = {row["dtype"]: row["wire"] for row in rows if row["kind"] == "all-gather"}
        in_bfloat16 = gathers.get("bfloat16", 0) / sum(gathers.values())
        assert in_bfloat16 > 0.99 if compiler == "tpu" else in_bfloat16 == 0
    for name in ("fsdp-kept", "fsdp-freed"):
        assert sent(name, "tpu") < sent(name, "gpu")


def test_the_cell_prints_h100_and_tpu_under_their_names(page):
    """The last stored program that the cell prints is the one for TPU v5e."""
    assert (page.after("stored").name, page.after("stored").compiler) == ("TPU v5e", "tpu")
    assert page.after("stored").stored == stored_program("fsdp-tiny")


# Free gathered weights


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name, words", [("kept", "gathered weights kept"), ("freed", "freed")])
def test_the_table_of_temporaries_and_bytes_sent(compiler, name, words):
    """Kept, H100 and CPU need more than all 17.2 GB of weights, and a TPU v5e about half of them."""
    table, key = rows_of(TEXT, "One gradient of the large model"), COMPILERS[compiler]
    (held,) = [row[compiler] for said, row in table.items() if f"temporaries, {words}" in said]
    program = f"fsdp-{name}"
    assert held == f"{temporaries(program, key) / 1e9:.1f} GB"
    assert table[f"sent, {name}"][compiler] == f"{sent(program, key) / 1e9:.1f} GB"
    if name == "kept":
        assert (temporaries(program, key) > 17.2e9) == (compiler != "TPU v5e")


@compiled_for_cpu
def test_the_stored_numbers_for_cpu_are_those_of_the_page(page, programs):
    """The programs of the page and the stored ones are the same."""
    for name in ("kept", "freed"):
        assert all_sent(programs[name], page) == sent(f"fsdp-{name}", "cpu")
        found = ms.memory(programs[name]).temporaries
        assert f"{found / 1e9:.1f}" == f"{temporaries(f'fsdp-{name}', 'cpu') / 1e9:.1f}"


@compiled_for_cpu
def test_kept_the_gathered_layers_are_among_the_temporaries(page):
    """Compiled for CPU: all 17.2 GB of layers, three matrices, and 0.1 GB of activations."""
    kept = ms.memory(page.gradient_program(large, page.fsdp)).temporaries
    assert kept > STACK > 17.1e9 and f"{ONE_MATRIX / 1e9:.2f}" == "0.27"
    assert f"{(kept - STACK - 3 * ONE_MATRIX) / 1e9:.1f}" == "0.1"


@compiled_for_cpu
def test_freed_the_temporaries_are_below_1_gb(page):
    """With jax.checkpoint around a layer the gathered layers are gone."""
    assert ms.memory(page.gradient_program(large, page.freed)).temporaries < 1e9


@compiled_for_cpu
def test_the_cell_shows_what_freeing_saves_and_costs(page):
    """The program that the cell compiles last has few temporaries and sends 45.1 GB."""
    assert page.temporaries < 1 and f"{page.gigabytes:.1f}" == "45.1"


@compiled_for_cpu
def test_data_parallelism_without_remat_keeps_copies_of_its_layers(programs):
    """DDP has 18.3 GB of temporaries, and with remat less than 1.1."""
    kept = ms.memory(programs["DDP"]).temporaries
    assert 0 < kept - STACK - 4 * ONE_MATRIX < 0.1e9 and f"{kept / 1e9:.1f}" == "18.3"
    assert ms.memory(programs["DDP freed"]).temporaries < 1.1e9


@compiled_for_cpu
def test_fsdp_stores_an_eighth_and_needs_less_in_all_kept_or_freed(programs):
    """Weights are 2.1 GB in pieces; with gradients and Adam's moments 8.6 GB, where DDP has 68.7."""
    arguments = {name: ms.memory(program).arguments for name, program in programs.items()}
    assert f"{arguments['kept'] / 1e9:.1f}" == "2.1" and round(STACK / 1e9, 1) == 17.2
    held = {name: 4 * size / 1e9 for name, size in arguments.items()}
    assert f"{held['kept']:.1f} {held['DDP']:.1f}" == "8.6 68.7"
    together = {n: held[n] + ms.memory(programs[n]).temporaries / 1e9 for n in programs}
    assert together["kept"] < together["DDP freed"] / 2
    assert together["freed"] < together["kept"]


@compiled_for_cpu
def test_data_parallelism_sends_30_gb_and_freed_fsdp_half_as_many_again(page, programs):
    """Kept, FSDP sends what DDP's all-reduce sends, 30.1 GB; the second gather adds 15."""
    by_ddp = all_sent(programs["DDP freed"], page)
    assert f"{by_ddp / 1e9:.1f}" == "30.1" and f"{STACK * 7 / 8 / 1e9:.0f}" == "15"
    assert ms.collectives(programs["DDP freed"], page.mesh).kinds == {"all-reduce"}
    assert all_sent(programs["kept"], page) == pytest.approx(by_ddp, rel=1e-6)
    assert all_sent(programs["freed"], page) / by_ddp == pytest.approx(1.5, abs=0.001)


@pytest.mark.parametrize(
    "compiler, kept, freed", [("gpu", 1, 1.5), ("cpu", 1, 1.5), ("tpu", 0.76, 1.01)]
)
def test_fsdp_sends_so_many_times_the_bytes_of_data_parallelism(compiler, kept, freed):
    """For H100 and CPU, as many kept and half as many again freed; for TPU v5e three quarters as many,
    and freed about as many."""
    ddp = sent("fsdp-kept", "cpu")  # the same number, as the page predicts
    assert sent("fsdp-kept", compiler) / ddp == pytest.approx(kept, abs=0.002)
    assert sent("fsdp-freed", compiler) / ddp == pytest.approx(freed, abs=0.002)


def test_for_h100_bfloat16_halves_gathers_and_scatter():
    """In bfloat16, an H100 sends 15.0 GB of gathers and 7.5 of scatters, in float32 30.1 and 15.0."""

    def wire(name, kind):
        rows = stored_program(name)["gpu"]["moves"]
        return sum(row["wire"] for row in rows if row["kind"] == kind) / 1e9

    found = [f"{wire('train-mixed', kind):.1f}" for kind in ("all-gather", "reduce-scatter")]
    assert found == ["15.0", "7.5"]
    for kind in ("all-gather", "reduce-scatter"):
        half = wire("train-mixed", kind) / wire("fsdp-freed", kind)
        assert half == pytest.approx(1 / 2, abs=0.001)


def test_autodiff_keeps_a_gathered_layer_without_remat_and_not_with_it(page):
    """Traced on any machine: kept are more than both whole matrices, freed less than a fifth."""

    def residuals(strategy):
        """Bytes that one device keeps of one layer for its backward pass."""
        model = jax.eval_shape(page.constructor(tiny, strategy, page.mesh))
        layer = jax.tree.map(lambda weight: jnp.zeros(weight.shape[1:]), model.blocks)
        specs = jax.tree.map(lambda spec: P(*spec[1:]), nnx.get_partition_spec(model.blocks))

        def count_bytes(layer, x_block_BD):
            def run(layer):
                return strategy.use(layer)(x_block_BD)

            _, backward = jax.vjp(strategy.remat(run), layer)
            return jnp.zeros(sum(leaf.nbytes for leaf in jax.tree.leaves(backward)))

        counted = jax.shard_map(
            count_bytes, mesh=page.mesh, out_specs=P(), in_specs=(specs, P("data"))
        )
        return jax.eval_shape(counted, layer, jnp.zeros((64, tiny.D))).size

    one_layer = 4 * 2 * tiny.D * tiny.F  # both matrices, whole
    assert residuals(page.fsdp) > one_layer > 5 * residuals(page.freed)


def one_device_mesh():
    axis_types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("data",), axis_types=axis_types, devices=jax.devices()[:1])


def twenty_steps(page, strategy, mesh):
    """The trained model, and the losses of twenty steps."""
    optimizer = optax.sgd(0.005, momentum=0.9)

    def step(model, momentum, batch_block):
        loss, gradient = jax.value_and_grad(page.mean_loss)(model, batch_block)
        updates, momentum = optimizer.update(gradient, momentum)
        return optax.apply_updates(model, updates), momentum, loss

    model = page.constructor(tiny, strategy, mesh)()
    momentum, losses = optimizer.init(model), []
    specs = nnx.get_partition_spec((model, momentum))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()))
    train_step = jax.jit(mapped)
    for first in range(0, 20 * 64, 64):
        model, momentum, loss = train_step(model, momentum, page.digits_from(first))
        losses.append(float(loss))
    return model, losses


@pytest.fixture(scope="module")
def single(page):
    """The model after twenty steps on one device, and its losses."""
    return twenty_steps(page, page.ddp, one_device_mesh())


def test_freed_fsdp_trains_with_the_losses_of_one_device(page, single):
    """Twenty losses agree to 1e-4."""
    _, losses = twenty_steps(page, page.freed, page.mesh)
    np.testing.assert_allclose(losses, single[1], rtol=1e-4)


def traced(jaxpr):
    """(operation, shape of its result) for gathers, matmuls and scatters, in order."""
    wanted = "all_gather", "dot_general", "reduce_scatter"
    every = (one for one, _ in equations(jaxpr) if one.primitive.name in wanted)
    return [(one.primitive.name, one.outvars[0].aval.shape) for one in every]


def test_a_freed_layer_gathers_and_computes_gathers_again_and_scatters_last(page):
    """The order of the figure: forward, both gathers again, backward, two scatters."""

    def sum_of_layer(layer, x_block_BD):
        def run(layer, x_block_BD):
            return page.fsdp.use(layer)(x_block_BD)

        return jax.lax.psum(page.freed.remat(run)(layer, x_block_BD).sum(), "data")

    blocks = jax.eval_shape(page.constructor(tiny, page.freed, page.mesh)).blocks
    layer = jax.tree.map(lambda weight: jnp.zeros(weight.shape[1:]), blocks)
    specs = jax.tree.map(lambda spec: P(*spec[1:]), nnx.get_partition_spec(blocks)), P("data")
    mapped = jax.shard_map(
        jax.grad(sum_of_layer, argnums=(0, 1)), mesh=page.mesh, in_specs=specs, out_specs=specs
    )
    D, F, B = tiny.D, tiny.F, 8  # rows of one device
    both = [("all_gather", (D, F)), ("all_gather", (F, D))]  # w_DF, w_FD
    assert traced(jax.make_jaxpr(mapped)(layer, jnp.zeros((64, D))).jaxpr) == [
        *both,
        ("dot_general", (B, F)),
        ("dot_general", (B, D)),  # h, y
        *both,
        ("dot_general", (B, F)),  # h, again
        ("dot_general", (D, F)),
        ("dot_general", (B, F)),  # dw_FD (transposed), dh
        ("dot_general", (F, D)),
        ("dot_general", (B, D)),  # dw_DF (transposed), dx
        ("reduce_scatter", (F // 8, D)),
        ("reduce_scatter", (D, F // 8)),
    ]


# Should you write it by hand?


@compiled_for_cpu
def test_for_cpu_only_by_hand_gradients_are_scattered(page):
    """In Explicit and Auto mode whole gradients are all-reduced, twice the bytes of the scatter."""
    rows = {name: by_kind(program, page) for name, program in page.programs.items()}
    assert set(rows) == {"Explicit", "Auto", "by hand"}
    for name in ("Explicit", "Auto"):
        assert rows[name].wire("all-gather") == rows["by hand"].wire("all-gather")
        assert rows[name].wire("reduce-scatter") == 0 < rows["by hand"].wire("reduce-scatter")
        summed = rows[name].wire("all-reduce") - rows["by hand"].wire("all-reduce")
        assert summed / rows["by hand"].wire("reduce-scatter") == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "mode, program",
    [("Explicit", "fsdp-explicit"), ("Auto", "fsdp-auto"), ("by hand", "fsdp-freed")],
)
def test_the_table_of_three_modes(mode, program, compiler):
    """H100 and TPU v5e form reduce-scatters in all three modes, CPU only by hand."""
    key = COMPILERS[compiler]
    said = rows_of(TEXT, "One gradient of the large model, freed: GB sent")[mode][compiler]
    assert said == f"{sent(program, key) / 1e9:.1f}"
    kinds = {move["kind"] for move in stored_program(program)[key]["moves"]}
    assert ("reduce-scatter" in kinds) == (compiler != "CPU" or mode == "by hand")


@pytest.mark.parametrize("compiler", ["tpu", "gpu"])
def test_for_h100_and_tpu_the_three_modes_send_the_same(compiler):
    """For the loss, 7 bytes, more or less."""
    names = ("fsdp-freed", "fsdp-explicit", "fsdp-auto")
    found = [sent(name, compiler) for name in names]
    assert max(found) - min(found) <= 7


@compiled_for_cpu
@pytest.mark.parametrize("mode", ["Explicit", "Auto"])
def test_the_large_model_of_the_table_is_that_of_the_page(page, mode):
    """Compiled for CPU, the large model sends what the table says: 30 GB of gathers and 30 of sums."""
    use, mesh = {
        "Explicit": (page.reshard, page.explicit_mesh),
        "Auto": (page.constrain, page.mesh),
    }[mode]
    found = by_kind(page.jit_program(large, use, mesh), page)
    assert f"{found.wire('all-reduce') / 1e9:.0f} {found.wire('all-gather') / 1e9:.0f}" == "30 30"
    assert sum(found.wire(kind) for kind in found) == sent(f"fsdp-{mode.lower()}", "cpu")


@pytest.mark.parametrize("mode", ["Explicit", "Auto"])
def test_explicit_and_auto_give_the_gradient_of_one_device(page, single, mode):
    """With sharded weights, reshard and constrain give one device's gradient, to 1e-4."""
    use, mesh = {
        "Explicit": (page.reshard, page.explicit_mesh),
        "Auto": (page.constrain, page.mesh),
    }[mode]
    trained, batch = single[0], page.digits_from(0)
    wanted = jax.jit(jax.grad(loss_of))(trained, batch)
    form = jax.eval_shape(page.constructor(tiny, replace(page.freed, use=use), mesh))
    shardings = jax.tree.map(lambda weight: weight.sharding, form)
    model = jax.tree.unflatten(jax.tree.structure(form), jax.tree.leaves(trained))
    model = jax.device_put(model, shardings)
    batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss_of), out_shardings=shardings)(model, batch)
    assert_same(gradient, wanted)


@compiled_for_cpu
@pytest.mark.parametrize("constrained, gathered", [(False, 2_390_016), (True, 1_210_368)])
def test_without_remat_auto_gathers_layers_once_if_weights_are_constrained(
    page, constrained, gathered
):
    """With the stacked model's annotations: the layers twice, or all once if weights are constrained at use."""
    use = page.constrain if constrained else unchanged
    strategy = Strategy(8, 1, fsdp="data", use=use)
    mesh = strategy.mesh()

    def make():
        with nnx.use_eager_sharding(False):
            return Model(tiny, strategy, nnx.Rngs(0))

    specs = nnx.get_partition_spec(jax.eval_shape(make))
    shardings = jax.tree.map(partial(jax.NamedSharding, mesh), specs)
    form = jax.eval_shape(jax.jit(make, out_shardings=shardings))
    shardings = jax.tree.map(lambda weight: weight.sharding, form)
    batch = jax.device_put(page.digits_from(0), jax.NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss_of), out_shardings=shardings)
        program = gradient.lower(form, batch).compile()
    assert ms.collectives(program, mesh).by("kind").bytes("all-gather") == gathered


def test_for_sixteen_tpu_chips_scatters_by_hand_become_all_reduces():
    """XLA makes all-reduces of them: no reduce-scatter is left, and twice the bytes travel."""
    sixteen = {row["kind"]: row["wire"] for row in stored_program("fsdp-freed-16")["tpu"]["moves"]}
    assert "reduce-scatter" not in sixteen
    scattered = sum(
        row["wire"]
        for row in stored_program("fsdp-freed-16")["gpu"]["moves"]
        if row["kind"] == "reduce-scatter"
    )
    assert sixteen["all-reduce"] == pytest.approx(2 * scattered, rel=1e-3)


def test_the_companion_shards_as_chapter_9_does():
    """A vector of length 2,048 is sharded, one of 384 is not; a stack never along its layers."""
    assert chapter_9.fsdp_spec((3, 2048), 8, stacked=True) == P(None, "data")
    assert chapter_9.fsdp_spec((3, 384), 8, stacked=True) == P()
    assert chapter_9.fsdp_spec((65, 100), 8) == P()


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)
