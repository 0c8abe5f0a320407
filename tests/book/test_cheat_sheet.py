"""The cheat sheet: what each of its boxes says is so."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.processes import run as run_processes
from many_devices.processes import say
from pages import cells_of, compiled_for_cpu, source_of

PAGE = "cheat-sheet"
P = jax.P


def table(page, first):
    """The rows of the table of a page whose first column has this name."""
    lines = source_of(page).read_text("utf-8").splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")]
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("| "):
            return rows
        rows.append([cell.strip() for cell in line.strip("| ").split(" | ")])


# Mesh, spec, place


def test_a_mesh_has_explicit_axes_unless_told(page):
    """Without axis_types= the axes are Explicit; the sheet's meshes are 2 by 4 and a row of 8."""
    assert page.mesh.shape == {"data": 2, "model": 4} and page.row.size == 8
    assert page.explicit.axis_types == (AxisType.Explicit,) * 2
    assert set(page.mesh.axis_types + page.row.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("row", table(PAGE, "`x` of (8, 16) on 2×4"), ids=lambda row: row[0])
def test_each_spec_gives_the_piece_and_the_copies_of_its_row(page, row):
    """For each spec of the table a device holds the piece, and as many hold it as the row says."""
    spec, piece, copies = eval(row[0].strip("`"), {"P": P}), eval(row[1]), int(row[2])
    shards = jax.device_put(page.x_host, jax.NamedSharding(page.mesh, spec)).addressable_shards
    assert {shard.data.shape for shard in shards} == {piece}
    assert sum(shard.index == shards[0].index for shard in shards) == copies


def test_no_axis_is_named_twice_and_sizes_must_divide(page):
    """A spec that names an axis twice raises, and so does a size that the axis does not divide."""
    with pytest.raises(Exception, match="[Dd]uplicate"):
        jax.NamedSharding(page.mesh, P("data", "data"))
    with pytest.raises(ValueError, match="divi"):
        jax.device_put(np.ones((8, 6), "float32"), page.columns)


def test_arrays_are_sharded_as_their_specs_say(page):
    """Placed from the host, made in place or pinned, each array is sharded as its spec says."""
    specs = {"x_BD": P("data"), "w_DF": P(None, "model"), "zeros_DF": P(None, "model")}
    for name, spec in (specs | {"h_BF": P("data")}).items():
        sharding = page.variables[name].sharding
        assert sharding.is_equivalent_to(jax.NamedSharding(page.mesh, spec), 2), name


# Constrain


def test_sharded_products_have_the_numbers_of_numpy(page):
    """The pinned layer and the typed product give what NumPy gives."""
    product = page.x_host @ page.w_host
    np.testing.assert_allclose(page.h_BF, np.tanh(product), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(page.y_BF, product, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(page.first_F, np.asarray(page.y_BF)[0])


def test_explicit_types_say_how_results_are_sharded(page):
    """After jax.reshard the type names both axes; a row taken with out_sharding= names one."""
    assert str(jax.typeof(page.y_BF)) == "float32[8@data,32@model]"
    assert str(jax.typeof(page.first_F)) == "float32[32@model]"


# Flax


def test_made_under_jit_weights_and_moments_are_sharded_as_annotated(page):
    """jax.jit(make)() shards both weights as annotated, and Adam's moments as their weights."""
    with jax.set_mesh(page.mesh):
        model, optimizer = jax.jit(page.make)()
    for state in (nnx.state(model), optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        assert state["w_DF"].sharding.shard_shape((16, 32)) == (16, 8)
        assert state["out"]["kernel"].sharding.shard_shape((32, 16)) == (8, 16)


def test_the_step_counts_because_the_optimizer_is_returned(page):
    """After one step the optimizer that came back has counted 1."""
    assert page.optimizer.step[...] == 1
    assert page.optimizer.opt_state[0].mu["w_DF"].sharding.shard_shape((16, 32)) == (16, 8)


def one_device(page):
    """The model on one device, before and after a step."""
    with nnx.use_eager_sharding(False):
        (model, _), donated = page.make(), page.make()
    stepped, _, _ = page.step(*donated, page.x_host)
    return model, stepped


def test_the_step_is_that_of_one_device(page):
    """Loss and weights of the sharded step are those of one device."""
    model, stepped = one_device(page)
    expected = np.mean((np.asarray(model(page.x_host)) - page.x_host) ** 2)
    np.testing.assert_allclose(page.loss, expected, rtol=1e-5)
    np.testing.assert_allclose(page.model.w_DF, stepped.w_DF, rtol=1e-3, atol=1e-5)


# By hand


def test_the_gradient_by_hand_is_that_of_one_device(page):
    """grad of the function in shard_map gives the gradient of one device, sharded by rows."""

    def mean_loss(w_DF):
        return jnp.mean((page.x_host @ w_DF) ** 2)

    expected_DF = jax.grad(mean_loss)(page.w_host)
    np.testing.assert_allclose(page.gradient_DF, expected_DF, rtol=1e-4, atol=1e-6)
    assert page.gradient_DF.addressable_shards[0].data.shape == (2, 32)


# Inspect


@compiled_for_cpu
def test_the_product_adds_up_a_devices_rows_of_the_result(page):
    """Compiled for CPU the product sends its sum: a device's four rows of 16 numbers."""
    assert page.moves.kinds == {"all-reduce"}
    assert page.moves.total_payload_bytes == page.memory.outputs == 4 * 16 * 4


def test_the_bytes_of_the_model_are_those_of_its_shapes(page):
    """A device holds a quarter of both weights, and the bias, of 4 bytes each."""
    assert page.held == 4 * ((16 * 32 + 32 * 16) // page.mesh.shape["model"] + 16)


def test_the_drawing_names_the_axis(page):
    """ms.show draws who holds what, and names the axis along which the weight is sharded."""
    assert "model" in str(page.drawing)


# Checkpoint; many processes


def test_what_was_loaded_is_on_the_other_mesh_with_the_same_numbers(page):
    """Loaded with a target on another mesh, the weights are whole on it, with the saved numbers."""
    w_DF = page.model.w_DF
    assert w_DF.sharding.mesh.axis_names == ("data",) and w_DF.sharding.is_fully_replicated
    _, stepped = one_device(page)
    np.testing.assert_allclose(w_DF, stepped.w_DF, rtol=1e-3, atol=1e-5)


def test_the_gathered_batch_is_the_whole(page):
    """process_allgather gives back all rows."""
    np.testing.assert_array_equal(page.whole, page.x_host)


def batches(code):
    """Run in each process: the sheet's own code, then what it warns of."""
    names = {"jax": jax}
    exec(code, names)
    x_host, rows, whole = names["x_host"], names["rows"], names["whole"]
    say("all rows, with a shape:", names["batch"].shape, "right:", (whole == x_host).all())
    make, first = jax.make_array_from_process_local_data, 4 * jax.process_index()
    own = make(rows, x_host[first : first + 4], x_host.shape)
    say("own rows, with a shape:", own.shape)
    say("all rows, without:", make(rows, x_host).shape)


@pytest.fixture(scope="module")
def said():
    """What each of two processes with four devices said of its batches."""
    used = ("given", "mesh", "place", "processes")
    cells = [cell.source for cell in cells_of(PAGE) if cell.id in used]
    assert len(cells) == len(used)
    lives = run_processes(batches, 2, 4, given={"code": "\n".join(cells)})
    return [life.log for life in lives]


def test_with_the_global_shape_a_batch_has_its_rows_once(said):
    """Two processes that run the sheet's cells have 8 rows, also if each gives all 8 of them."""
    for log in said:
        assert "all rows, with a shape: (8, 16) right: True" in log
        assert "own rows, with a shape: (8, 16)" in log


def test_without_the_global_shape_rows_are_there_twice(said):
    """Without the global shape the same call makes 16 rows of 8, and nothing says so."""
    for log in said:
        assert "all rows, without: (16, 16)" in log and log[-1] == "ended"


# Collectives: S bytes on n devices


def evaluated(formula, **sizes):
    """A formula of a table, for example $2S(n-1)/n$ or $16N/n + g$, in bytes."""
    products = re.sub(r"(?<=[\dSN)])(?=[SN(])", "*", formula.strip("$"))
    return eval(products, sizes)


def operations():
    """For each row: the operation on a row of eight devices, the type of its input, and its specs."""
    to_next = [(i, (i + 1) % 8) for i in range(8)]
    piece, term = (64, 8), (512, 8)  # of a whole array of (64, 8), sharded by rows
    sharded, whole = P("data"), P()
    return {
        "`psum`, `pmean`": (jax.lax.psum, term, sharded, whole),
        "`all_gather`": (partial(jax.lax.all_gather, tiled=True), piece, sharded, sharded),
        "`psum_scatter`": (partial(jax.lax.psum_scatter, tiled=True), term, sharded, sharded),
        "`all_to_all`": (
            partial(jax.lax.all_to_all, split_axis=1, concat_axis=0, tiled=True),
            piece,
            sharded,
            sharded,
        ),
        "`ppermute`": (partial(jax.lax.ppermute, perm=to_next), piece, sharded, sharded),
        '`pcast(to="varying")`': (partial(jax.lax.pcast, to="varying"), piece, whole, sharded),
    }


@compiled_for_cpu
@pytest.mark.parametrize("row", table(PAGE, "in `shard_map`"), ids=lambda row: row[0])
def test_each_operation_sends_its_formula_of_the_whole_array(page, row):
    """S is the whole array in bytes, of a sum its result: each operation sends what its row says."""
    operation, shape, taken, given = operations()[row[0]]
    mapped = jax.shard_map(
        lambda x: operation(x, axis_name="data"), mesh=page.row, in_specs=taken, out_specs=given
    )
    x = jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(page.row, taken))
    moves = ms.collectives(jax.jit(mapped).lower(x).compile(), page.row)
    S = 64 * 8 * 4
    assert sum(move.wire_bytes for move in moves) == evaluated(row[2], S=S, n=page.row.size)


@compiled_for_cpu
@pytest.mark.parametrize("row", table(PAGE, "in `shard_map`"), ids=lambda row: row[0])
def test_each_gradient_sends_what_its_operation_sends(page, row):
    """The gradient of each operation sends the bytes of the operation in the last column."""
    operation, shape, taken, given = operations()[row[0]]
    mapped = jax.shard_map(
        partial(operation, axis_name="data"), mesh=page.row, in_specs=taken, out_specs=given
    )
    x = jax.ShapeDtypeStruct(shape, "float32")
    y = jax.eval_shape(mapped, x)
    transposed = jax.linear_transpose(mapped, x)
    sharding = jax.NamedSharding(page.row, given)
    cotangent = jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=sharding)
    moves = ms.collectives(jax.jit(transposed).lower(cotangent).compile(), page.row)
    (name,) = re.findall(r"\w+", row[3])
    (backward,) = [
        other for other in table(PAGE, "in `shard_map`") if re.findall(r"\w+", other[0])[0] == name
    ]
    sent = sum(move.wire_bytes for move in moves)
    assert sent == evaluated(backward[2], S=64 * 8 * 4, n=page.row.size)


def test_the_formulas_are_those_of_other_pages():
    """The sheet, Notation and Five collectives give one formula for each collective."""
    notation = {row[0]: row[3] for row in table("notation", "Collective")}
    collectives = {row[0]: row[2] for row in table("01b-collectives", "Collective")}
    sheet = {row[0]: row[2] for row in table(PAGE, "in `shard_map`")}
    names = {
        "`psum`, `pmean`": "all-reduce",
        "`all_gather`": "all-gather",
        "`psum_scatter`": "reduce-scatter",
        "`all_to_all`": "all-to-all",
        "`ppermute`": "collective-permute",
    }
    for operation, kind in names.items():
        for other in (notation, collectives):
            theirs = re.sub(r"\\tfrac\{S\}\{n\}", "(S/n)", other[kind]).replace("\\,", "")
            assert theirs == sheet[operation], kind


# Strategies: N weights, n devices


@pytest.mark.parametrize(
    "strategy, program",
    [("data parallel", "train-dp"), ("ZeRO-1", "train-zero1"), ("FSDP", "train-fsdp")],
)
def test_gathers_in_a_step_are_those_of_compiled_programs(strategy, program):
    """In gathers of all weights, the stacked model's step sends 2 with data parallelism, with ZeRO-1 2 and
    with FSDP 3 as compiled for H100; CPU's compiler makes 2, 3 and 4 of them."""
    (row,) = [row for row in table(PAGE, "strategy") if row[0] == strategy]
    for compiler, told in zip(("gpu", "cpu"), row[4].split(", "), strict=True):

        def sent(name, compiler=compiler):
            return sum(move["wire"] for move in stored_program(name)[compiler]["moves"])

        gather = sent("train-dp") / 2  # its all-reduce scatters, then gathers
        assert round(sent(program) / gather, 1) == int(told), compiler


@pytest.mark.parametrize(
    "strategy, weights, adam",
    [("data parallel", P(), P()), ("ZeRO-1", P(), P("data")), ("FSDP", P("data"), P("data"))],
)
def test_bytes_on_a_device_are_those_of_arrays(page, strategy, weights, adam):
    """A bfloat16 weight and its gradient take 2 + 2 bytes, a float32 master and two moments 12:
    sharded as the strategy says, arrays take the bytes of its row (without the layers in use, g)."""
    (row,) = [row for row in table(PAGE, "strategy") if row[0] == strategy]
    made = [
        jnp.zeros((64, 64), dtype, device=jax.NamedSharding(page.row, spec))
        for dtype, spec, count in (("bfloat16", weights, 2), ("float32", adam, 3))
        for _ in range(count)
    ]
    assert ms.memory(made).bytes_per_device == evaluated(row[3], N=64 * 64, n=page.row.size, g=0)
