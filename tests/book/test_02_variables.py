"""Chapter 2, "A variable carries its sharding as an annotation": what the page says is true."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from compared import sharded_as
from many_devices.helpers import put, traffic
from pages import check_exercise, compiled_for_cpu, exercises_of, run_again
from stored_moves import stored_moves

PAGE = "02-variables"
P = jax.P


# Annotate one weight


def test_the_first_weight_is_sharded_by_columns(page):
    """Made inside jax.set_mesh, the first weight is in four pieces of 8 x 4, two copies of each."""
    w = page.after("param").w
    assert w.out_sharding == (None, "model") and sharded_as(w, page.mesh, None, "model")
    for (_, i), device in np.ndenumerate(page.mesh.devices):
        (held,) = [shard.data for shard in w.addressable_shards if shard.device == device]
        np.testing.assert_array_equal(held, page.numbers[:, 4 * i : 4 * i + 4])


def test_products_take_a_variable_as_its_array(page):
    """Arithmetic, jax.numpy and == take a variable as its array; >, != and jax.lax need w[...]."""
    ints = np.arange(128, dtype="float32").reshape(8, 16)
    w = nnx.Param(ints, out_sharding=(None, "model"), mesh=page.mesh)
    a_BD = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
    for y in (a_BD @ w, (w.T @ a_BD.T).T, jnp.dot(a_BD, w), jax.lax.dot(a_BD, w[...])):
        np.testing.assert_allclose(y, a_BD @ ints, rtol=1e-5, atol=1e-3)
    for raises in (lambda: w > 0, lambda: w != 0, lambda: jax.lax.dot(a_BD, w)):
        with pytest.raises((TypeError, ValueError)):
            raises()
    assert np.array_equal(w == 0, ints == 0)
    assert np.array_equal(w[...] > 0, ints > 0)
    assert not isinstance(w, jax.Array) and isinstance(w[...], jax.Array)


# Annotate a model


def test_a_device_holds_its_columns_or_its_rows(page):
    """Of the first weight a device holds its columns, of the second its rows, 64 x 64 of each."""
    n = page.mesh.shape["model"]
    for weight, dimension in [(page.model.w_DF, 1), (page.model.w_FD, 0)]:
        held = {shard.device: shard.data for shard in weight.addressable_shards}
        parts = np.split(np.asarray(weight), n, axis=dimension)
        for (_, i), device in np.ndenumerate(page.mesh.devices):
            np.testing.assert_array_equal(held[device], parts[i])
        assert weight.addressable_shards[0].data.shape == (64, 64)
    assert page.model.w_DF.out_sharding == (None, "model")  # kept as it was written


def test_without_a_mesh_or_the_axis_flax_raises(page):
    """If no mesh is set, or if it has no axis model, Flax raises an error."""
    other = jax.make_mesh((8,), ("data",), axis_types=page.auto[:1])
    for current, message in [(None, "mesh context"), (other, "axis: model")]:
        with jax.set_mesh(current) if current else contextlib.nullcontext():
            with pytest.raises(ValueError, match=message):
                nnx.Param(np.ones((8, 16)), out_sharding=(None, "model"))


def test_without_an_annotation_an_array_is_whole_on_every_device_of_the_mesh(page):
    """Made under a mesh, an array is whole on all its devices; outside, on one device."""
    forgotten = page.forgotten
    assert {shard.data.shape for shard in forgotten.addressable_shards} == {(8, 16)}
    assert len(forgotten.devices()) == page.mesh.size
    assert nnx.Param(jnp.ones((8, 16))).devices() == {jax.devices()[0]}


# Read the annotation


def test_the_rule_gives_every_devices_piece(page):
    """The rule gives the piece of each device, for the page's four annotations and three more."""
    numbers, shape = page.numbers, page.mesh.shape

    def part(names, position):
        slices = []
        for name, size in zip(names, numbers.shape, strict=True):
            count, i = (shape[name], position[name]) if name else (1, 0)
            slices.append(slice(i * size // count, (i + 1) * size // count))
        return tuple(slices)

    choices = (None, "data", "model")
    pairs = [(a, b) for a in choices for b in choices if a is None or a != b]
    assert len(pairs) == 7  # an axis can shard one dimension only
    for names in pairs:
        variable = nnx.Param(numbers, out_sharding=names, mesh=page.mesh)
        held = {shard.device: shard.data for shard in variable.addressable_shards}
        for position, device in np.ndenumerate(page.mesh.devices):
            where = part(names, dict(zip(page.mesh.axis_names, position, strict=True)))
            np.testing.assert_array_equal(held[device], numbers[where])


def test_the_pieces_that_the_page_prints(page):
    """By columns a piece of 8 x 16 is 8 x 4, by rows 2 x 16, in blocks 4 x 4, copied 8 x 16."""
    pieces = {
        (None, "model"): (8, 4),
        ("model", None): (2, 16),
        ("data", "model"): (4, 4),
        (None, None): (8, 16),
    }
    for names, piece in pieces.items():
        w = nnx.Param(page.numbers, out_sharding=names, mesh=page.mesh)
        assert w.sharding.shard_shape(w.shape) == piece
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_again(page, PAGE, "tuples")
    lines = [f"{names!s:18} {piece} on each device" for names, piece in pieces.items()]
    assert printed.getvalue().splitlines() == lines


# Count the bytes


def test_each_device_holds_a_quarter(page):
    """Each device holds 32,768 of 131,072 bytes: a quarter, because only model is named."""
    held, n = page.held, page.mesh.shape
    total = np.asarray(page.model.w_DF).nbytes + np.asarray(page.model.w_FD).nbytes
    assert total == 131_072 and held.bytes_per_device == 32_768 == total // n["model"]
    assert held.total_bytes == total * n["data"]
    assert sum(s.data.nbytes for s in page.model.w_DF.addressable_shards) == total // 2 * n["data"]
    assert all(leaf.copies == n["data"] for leaf in held.leaves)


# Run the model


def test_the_model_computes_what_numpy_does(page):
    """On eight devices the model gives the numbers of NumPy, and y is sharded as x is."""
    expected = np.tanh(page.x_host @ np.asarray(page.model.w_DF)) @ np.asarray(page.model.w_FD)
    np.testing.assert_allclose(page.y_BD, expected, atol=1e-5)  # another order of adding
    assert page.y_BD.sharding.is_equivalent_to(page.x_BD.sharding, 2)
    assert page.y_BD.addressable_shards[0].data.shape == (8, 64)


@compiled_for_cpu
def test_one_all_reduce_of_2048_bytes(page):
    """The program has one all-reduce, along model, of one device's rows of y; 3,072 are sent."""
    moved = traffic(page.forward, page.model, page.x_BD, mesh=page.mesh)
    assert [(row.kind, row.axes) for row in moved] == [("all-reduce", ("model",))]
    assert moved.total_payload_bytes == 8 * 64 * 4 == 2_048
    (row,) = moved
    assert row.wire_bytes == 2_048 * 6 // 4 == 3_072
    for compiler in ("cpu", "gpu", "tpu"):
        assert stored_moves("variables-mlp", compiler, "kind", "axes", "payload") == [
            ("all-reduce", ["model"], 2_048)
        ]


# Flax's own layers


def test_the_strategies_shard_up_as_printed(page):
    """Of up, 64 x 256, FSDP leaves 32 x 256 on each device, tensor parallelism 64 x 64, both 32 x 64."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_again(page, PAGE, "strategies")
    pieces = {"FSDP": (32, 256), "tensor parallelism": (64, 64), "both": (32, 64)}
    lines = [f"{strategy:18} {piece} on each device" for strategy, piece in pieces.items()]
    assert printed.getvalue().splitlines() == lines
    assert 8 * 32 * 64 == 64 * 256  # with both, one eighth


def test_the_rule_is_d_along_data_and_the_other_dimension_along_model(page):
    """FSDP names data for D, tensor parallelism model for F, in up and, turned round, in down."""
    rule = {"FSDP": ("data", None), "tensor parallelism": (None, "model")}
    assert page.strategies == rule | {"both": ("data", "model")}
    for names in page.strategies.values():
        with jax.set_mesh(page.mesh):
            up, down = (
                nnx.Linear(
                    *sizes,
                    use_bias=False,
                    kernel_metadata={"out_sharding": way},
                    rngs=nnx.Rngs(0),
                )
                for sizes, way in [((64, 256), names), ((256, 64), names[::-1])]
            )
            y_BD = jax.jit(lambda up, down, x_BD: down(jnp.tanh(up(x_BD))))(up, down, page.x_BD)
        assert sharded_as(up.kernel, page.mesh, *names)
        assert sharded_as(down.kernel, page.mesh, *names[::-1])
        expected = np.tanh(page.x_host @ np.asarray(up.kernel)) @ np.asarray(down.kernel)
        np.testing.assert_allclose(y_BD, expected, atol=1e-5)


def test_attention_without_out_kernel_metadata_shards_the_wrong_dimension(page):
    """Without it the output weight (H, C, D) is sharded along C, and no error is raised."""
    with jax.set_mesh(page.mesh):
        attention = nnx.MultiHeadAttention(
            num_heads=8,
            in_features=64,
            kernel_metadata={"out_sharding": (None, "model", None)},
            decode=False,
            rngs=nnx.Rngs(0),
        )
    assert attention.out.kernel.shape == (8, 8, 64)
    assert attention.out.kernel.out_sharding == (None, "model", None)
    assert attention.out.kernel.sharding.shard_shape((8, 8, 64)) == (8, 2, 64)


def test_a_layer_without_annotations_of_its_own_is_whole(page):
    """The kernel of up is sharded by columns; its bias, which has no annotation, is whole."""
    assert sharded_as(page.up.kernel, page.mesh, None, "model")
    assert page.up.bias.sharding.is_fully_replicated
    assert page.misplaced(page.up, page.mesh) == ["bias: no annotation"]


def test_none_annotates_a_bias_that_should_be_whole(page):
    """With bias_metadata of (None,) misplaced no longer names the bias."""
    kernel, bias = page.by_columns, {"out_sharding": (None,)}
    with jax.set_mesh(page.mesh):
        up = nnx.Linear(64, 256, kernel_metadata=kernel, bias_metadata=bias, rngs=nnx.Rngs(0))
    assert page.misplaced(up, page.mesh) == []


# Check that the array is sharded as its annotation says


def test_two_spellings_of_one_sharding(page):
    """P("model") and P("model", None) shard a matrix alike, and are not equal."""
    long, short = page.long, page.short
    where = long.sharding.devices_indices_map(long.shape)
    assert where == short.sharding.devices_indices_map(short.shape)
    assert long.sharding != short.sharding and P("model", None) != P("model")
    assert long.sharding.spec != long.out_sharding  # a spec never equals a tuple


def test_misplaced_names_what_is_sharded_otherwise(page):
    """misplaced accepts each spelling, and names what is sharded otherwise or not annotated."""
    assert page.misplaced(page.model, page.mesh) == []
    with nnx.use_eager_sharding(False):
        noted = page.MLP(64, 256, nnx.Rngs(0))  # annotations only, all on one device
    assert page.misplaced(noted, page.mesh) == [
        "w_DF: annotated (None, 'model'), on each device (64, 256)",
        "w_FD: annotated ('model', None), on each device (256, 64)",
    ]
    assert page.misplaced(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), page.mesh) == [
        "bias: no annotation",
        "kernel: no annotation",
    ]

    class Pair(nnx.Module):
        def __init__(self):
            self.long, self.short = page.long, page.short

    pair = Pair()
    assert page.misplaced(pair, page.mesh) == []
    pair.long.set_value(put(page.numbers, page.mesh, "model"))  # annotated ("model", None)
    assert pair.long.sharding.spec == P("model") and page.misplaced(pair, page.mesh) == []


def test_misplaced_names_an_annotation_that_is_longer_than_the_shape(page):
    """A vector with the annotation of a matrix is listed, also if all of it is whole."""
    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    for annotation in [(None, "model"), ("model", None), P(None, None)]:
        model.kernel = nnx.Param(np.ones(8), out_sharding=annotation, eager_sharding=False)
        line = f"kernel: annotated {annotation}, too long for (8,)"
        assert page.misplaced(model, page.mesh) == [line]


# Who reads an annotation, and when


def test_new_values_bring_their_own_sharding(page):
    """set_value and nnx.update bring the sharding of the new array; the annotation is kept."""
    for write in (
        lambda model, new: model.w_DF.set_value(new),
        lambda model, new: nnx.update(model, {"w_DF": new}),
    ):
        with jax.set_mesh(page.mesh):
            model = page.MLP(64, 256, nnx.Rngs(0))
            write(model, jnp.ones((64, 256)))
        told = ["w_DF: annotated (None, 'model'), on each device (64, 256)"]
        assert page.misplaced(model, page.mesh) == told
        write(model, put(np.ones((64, 256), "float32"), page.mesh, None, "model"))
        assert page.misplaced(model, page.mesh) == []


class OneWeight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((256, 512)), out_sharding=(None, "model"))


def test_flax_shards_the_array_once_when_the_variable_is_made(page):
    """Flax shards the array by the annotation once; another annotation later moves nothing."""
    with jax.set_mesh(page.mesh):
        model = OneWeight()
        assert sharded_as(model.w, page.mesh, None, "model")
        model.w.set_metadata(out_sharding=("data", None))
    assert sharded_as(model.w, page.mesh, None, "model")


def test_the_optimizer_reads_the_annotation_later(page):
    """nnx.Optimizer reads the annotation when it is made, and nothing compares it with the array."""
    with jax.set_mesh(page.mesh):
        model = OneWeight()
        model.w.set_metadata(out_sharding=("data", None))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    moment = optimizer.opt_state[0].mu.w
    assert sharded_as(moment, page.mesh, "data", None)
    assert sharded_as(model.w, page.mesh, None, "model")


def test_adams_moments_follow_their_weights(page):
    """Adam's moments get the annotation of their weight, and are sharded as it is."""
    with jax.set_mesh(page.mesh):
        optimizer = nnx.Optimizer(page.model, optax.adam(1e-3), wrt=nnx.Param)
    for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        assert sharded_as(moments.w_DF, page.mesh, None, "model")
        assert sharded_as(moments.w_FD, page.mesh, "model", None)


# Exercises


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
