"""The page "Annotate Flax's layers": what it says is true."""

import runpy
import threading
import warnings
from ast import literal_eval

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from compared import sharded_as
from many_devices.checks import misplaced
from many_devices.helpers import attempt, put, traffic
from pages import BOOK, check_exercise, compiled_for_cpu, exercises_of
from printed import rows_of

PAGE = "02a-flax-layers"
P = jax.P
COLUMNS = (None, "model")


def forward(layer, x):
    return layer(x)


def weights_of(layers):
    """Every weight of a dict of layers, by its name."""
    return {
        ".".join([name, *path]): weight
        for name, layer in layers.items()
        for path, weight in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


# Annotate Flax's layers

TABLE = {  # FSDP, tensor parallelism
    "up.kernel": (("data", None), (None, "model")),
    "up.bias": ((None,), ("model",)),
    "down.kernel": ((None, "data"), ("model", None)),
    "down.bias": ((None,), (None,)),
    "attend.out.kernel": ((None, None, "data"), ("model", None, None)),
    "attend.out.bias": ((None,), (None,)),
    "heads.kernel": (("data", None, None), (None, "model", None)),
    "patches.kernel": ((None, None, None, "data"), (None, None, None, "model")),
    "embed.embedding": ((None, "data"), ("model", None)),
    "norm.scale": ((None,), (None,)),
}
for made in ("query", "key", "value"):
    TABLE[f"attend.{made}.kernel"] = (("data", None, None), (None, "model", None))
    TABLE[f"attend.{made}.bias"] = ((None, None), ("model", None))
CONV_BIAS = "patches.bias"  # along the axis that its kernel has
ROWS = {  # a weight: what the page's table calls its layer, or, in a layer's second row, the weight
    "up.kernel": "`nnx.Linear`, first of a pair",
    "down.kernel": "`nnx.Linear`, second",
    "attend.query.kernel": "`nnx.MultiHeadAttention`",
    "attend.out.kernel": "",
    "patches.kernel": "`nnx.Conv`",
    "embed.embedding": "`nnx.Embed`",
    "norm.scale": "`nnx.RMSNorm`, `nnx.LayerNorm`",
}

# The file that the page links to makes every layer of the table.
common_layers = runpy.run_path(str(BOOK.parent / "examples" / "annotate_common_layers.py"))[
    "common_layers"
]


def test_the_table_has_the_annotations_that_are_tested():
    """The rows of the page's table are those that the next tests check on the layers."""
    (path,) = BOOK.rglob(f"{PAGE}.md")
    table = rows_of(path.read_text("utf-8"), "Layer")
    assert table.keys() == set(ROWS.values())
    for weight, layer in ROWS.items():
        row = table[layer]
        wanted = {"FSDP": TABLE[weight][0], "Tensor parallelism": TABLE[weight][1]}
        assert {name: literal_eval(row[name].strip("`")) for name in wanted} == wanted, weight


def test_each_argument_annotates_its_weight_as_the_table_says(page):
    """Under FSDP and tensor parallelism every weight has the annotation of the table."""
    for fsdp, tensor, column in [("data", None, 0), (None, "model", 1)]:
        with jax.set_mesh(page.mesh):
            weights = weights_of(common_layers(nnx.Rngs(0), fsdp, tensor))
        assert weights.keys() == TABLE.keys() | {CONV_BIAS}
        for name, row in TABLE.items():
            assert weights[name].out_sharding == row[column], name
            assert sharded_as(weights[name], page.mesh, *row[column]), name
        assert weights[CONV_BIAS].out_sharding == (fsdp or tensor,)


def layers_on(mesh):
    """The layers of the file, for both strategies."""
    with jax.set_mesh(mesh):
        return common_layers(nnx.Rngs(0), fsdp="data")


def test_for_both_strategies_fill_in_both_axes(page):
    """With fsdp="data" as well each weight has both axes, except Conv, which has one large dimension."""
    layers = layers_on(page.mesh)
    for name, weight in weights_of(layers).items():
        if name.startswith("patches"):
            assert weight.out_sharding[-1] == "data"
            continue
        both = tuple(a or b for a, b in zip(*TABLE[name], strict=True))
        assert weight.out_sharding == both and sharded_as(weight, page.mesh, *both), name
    for layer in layers.values():
        assert misplaced(layer, page.mesh) == []


def test_the_pieces_of_tensor_parallelism(page):
    """A device holds a quarter of hidden units, heads, channels and words, and whole norms."""
    with jax.set_mesh(page.mesh):
        weights = weights_of(common_layers(nnx.Rngs(0)))
    for name, shape in {
        "up.kernel": (64, 64),
        "up.bias": (64,),
        "down.kernel": (64, 64),
        "down.bias": (64,),
        "embed.embedding": (128, 64),
        "norm.scale": (64,),
        "heads.kernel": (64, 2, 8),
        "patches.kernel": (4, 4, 3, 16),
        "patches.bias": (16,),
        "attend.query.kernel": (64, 2, 8),
        "attend.query.bias": (2, 8),
        "attend.out.kernel": (2, 8, 64),
        "attend.out.bias": (64,),
    }.items():
        assert weights[name].addressable_shards[0].data.shape == shape, name


def test_sharding_changes_no_number(page):
    """The sharded layers hold the numbers of plain ones."""
    with nnx.use_eager_sharding(False):
        plain = weights_of(common_layers(nnx.Rngs(0)))
    for name, weight in weights_of(layers_on(page.mesh)).items():
        np.testing.assert_array_equal(weight, plain[name])


def test_a_layer_norm_takes_scale_and_bias_metadata(page):
    """nnx.LayerNorm has the arguments that the table gives it."""
    whole = page.along(None)
    with jax.set_mesh(page.mesh):
        norm = nnx.LayerNorm(64, scale_metadata=whole, bias_metadata=whole, rngs=nnx.Rngs(0))
    assert norm.scale.out_sharding == norm.bias.out_sharding == (None,)
    assert misplaced(norm, page.mesh) == []


def test_the_kernel_of_up_is_sharded_by_columns(page):
    """kernel_metadata shards the kernel; the bias, which has no annotation, is a copy each."""
    assert sharded_as(page.up.kernel, page.mesh, *COLUMNS)
    assert page.up.kernel.out_sharding == COLUMNS
    assert page.up.bias.sharding.is_fully_replicated


# Traps


def test_five_spellings_leave_whole_copies(page):
    """A plural, two other keywords, a list and a string are not read: the weight stays whole."""
    assert len(page.unread) == 5
    for metadata in page.unread:
        with jax.set_mesh(page.mesh):
            w = nnx.Param(jnp.asarray(page.numbers), **metadata)
        assert w.sharding.is_fully_replicated and len(w.devices()) == page.mesh.size


def test_misplaced_reports_each_of_them(page):
    """misplaced catches each of the five."""
    for metadata in page.unread:
        with jax.set_mesh(page.mesh):
            listed = nnx.List([nnx.Param(jnp.asarray(page.numbers), **metadata)])
        assert len(misplaced(listed, page.mesh)) == 1


def test_attention_reuses_kernel_metadata_for_its_output_weight(page):
    """Without out_kernel_metadata a device has a quarter of every head, and misplaced is silent."""
    forgotten = page.forgotten
    assert forgotten.out.kernel.out_sharding == forgotten.query.kernel.out_sharding
    assert forgotten.out.kernel.shape == (8, 16, 128)
    assert forgotten.out.kernel.sharding.shard_shape((8, 16, 128)) == (8, 4, 128)
    assert [line for line in misplaced(forgotten, page.mesh) if "kernel" in line] == []


def test_with_out_kernel_metadata_a_device_has_whole_heads(page):
    """The output weight is then in pieces of two whole heads; the numbers are the same."""
    assert page.right.out.kernel.sharding.shard_shape((8, 16, 128)) == (2, 16, 128)
    long_BTD = put(np.random.default_rng(1).normal(size=(4, 16, 128)), page.mesh, "data")
    np.testing.assert_allclose(page.forgotten(long_BTD), page.right(long_BTD), atol=1e-5)


@compiled_for_cpu
def test_the_wrong_pieces_cost_an_all_to_all(page):
    """Compiled for CPU each call makes an extra all-to-all."""
    x_BTD = put(np.ones((4, 16, 128), "float32"), page.mesh, "data")
    assert traffic(forward, page.forgotten, x_BTD, mesh=page.mesh).kinds == {
        "all-reduce",
        "all-to-all",
    }
    assert traffic(forward, page.right, x_BTD, mesh=page.mesh).kinds == {"all-reduce"}


# Older code


def test_a_wrapped_initialiser_annotates_too(page):
    """nnx.with_partitioning shards the kernel; given both, the wrapper wins; scaling it fails."""
    wrapped_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), COLUMNS)
    with jax.set_mesh(page.mesh):
        wrapped = nnx.Linear(64, 256, kernel_init=wrapped_init, rngs=nnx.Rngs(0))
        rows = page.along("data", None)
        both = nnx.Linear(64, 256, kernel_init=wrapped_init, kernel_metadata=rows, rngs=nnx.Rngs(0))
    plain = nnx.Linear(64, 256, rngs=nnx.Rngs(0))  # no mesh, no annotation
    for layer in (page.up, wrapped, both):
        assert sharded_as(layer.kernel, page.mesh, *COLUMNS)
        assert layer.kernel.out_sharding == COLUMNS
        assert layer.bias.sharding.is_fully_replicated
        np.testing.assert_array_equal(layer.kernel, plain.kernel)
    with pytest.raises(TypeError, match="VariableMetadata"):
        0.5 * wrapped_init(jax.random.key(0), (8, 16))


@pytest.mark.parametrize("keyword", ["sharding", "sharding_names"])
def test_older_keywords_warn_and_are_stored_under_the_new_key(page, keyword):
    """sharding= and sharding_names= still shard, with a DeprecationWarning."""
    with warnings.catch_warnings(action="always", record=True) as caught:
        old = nnx.Param(page.numbers, mesh=page.mesh, **{keyword: COLUMNS})
    assert [warning.category for warning in caught] == [DeprecationWarning]
    assert sharded_as(old, page.mesh, *COLUMNS)
    assert old.out_sharding == COLUMNS and not old.has_metadata("sharding")


# Eager sharding


def make(page, value, **metadata):
    return nnx.Param(value, out_sharding=COLUMNS, **metadata)


def test_an_annotated_variable_needs_a_mesh(page):
    """Without a mesh Flax raises; with mesh= it accepts an array made before."""
    assert nnx.using_eager_sharding()
    assert attempt(make, page, page.numbers).startswith("ValueError: An auto mesh context")
    assert sharded_as(make(page, page.early, mesh=page.mesh), page.mesh, *COLUMNS)


def test_inside_the_mesh_an_array_of_one_device_raises(page):
    """NumPy arrays and arrays made inside are accepted, one made before only after device_put."""
    with jax.set_mesh(page.mesh):
        assert sharded_as(make(page, page.numbers), page.mesh, *COLUMNS)
        assert sharded_as(make(page, jnp.asarray(page.numbers)), page.mesh, *COLUMNS)
        assert attempt(make, page, page.early).startswith("TypeError")
        assert sharded_as(make(page, put(page.early, page.mesh)), page.mesh, *COLUMNS)


def test_eager_sharding_off_for_a_block_and_on_for_one_variable(page):
    """In the block annotations are notes; eager_sharding=True shards one variable all the same."""
    with nnx.use_eager_sharding(False):
        off = make(page, page.early)
        on = make(page, page.early, mesh=page.mesh, eager_sharding=True)
        assert not nnx.using_eager_sharding()
    assert sharded_as(on, page.mesh, *COLUMNS) and len(off.devices()) == 1
    assert on.out_sharding == off.out_sharding == COLUMNS  # kept as metadata in any case
    assert nnx.using_eager_sharding()  # back after the block


def test_eager_sharding_off_for_one_variable(page):
    """eager_sharding=False leaves one variable on one device, without a mesh."""
    assert len(make(page, page.early, eager_sharding=False).devices()) == 1


def test_the_call_holds_for_its_own_thread(page):
    """use_eager_sharding(False) is seen in its thread until the next call, and in no other."""
    seen = []

    def ask_a_worker():
        worker = threading.Thread(target=lambda: seen.append(nnx.using_eager_sharding()))
        worker.start()
        worker.join()

    nnx.use_eager_sharding(False)
    seen.append(nnx.using_eager_sharding())
    ask_a_worker()
    nnx.use_eager_sharding(True)
    flax.config.update("flax_always_shard_variable", False)  # the flag: for the others
    ask_a_worker()
    flax.config.update("flax_always_shard_variable", True)
    assert seen == [False, True, False] and nnx.using_eager_sharding()


def test_with_eager_sharding_off_every_weight_is_whole_on_the_first_device(page):
    """Annotations alone leave all weights on device 0, more than seven times what a device holds."""
    layers = layers_on(page.mesh)
    with nnx.use_eager_sharding(False):
        notes_only = common_layers(nnx.Rngs(0), fsdp="data")
    for noted in (weights_of(notes_only), weights_of({"attention": page.noted})):
        assert {device for w in noted.values() for device in w.devices()} == {jax.devices()[0]}
    for noted, sharded, times in [(notes_only, layers, 7), (page.noted, page.right, 3)]:
        whole = ms.memory(noted)
        assert whole.bytes_per_device == whole.total_bytes
        assert whole.bytes_per_device > times * ms.memory(sharded).bytes_per_device
    assert weights_of(notes_only)["up.kernel"].out_sharding == ("data", "model")
    assert page.noted.out.kernel.out_sharding == page.right.out.kernel.out_sharding


def test_a_large_model_fits_only_in_pieces(page):
    """32 pairs of 4096 x 16384 are 17.2 GB whole; sharded along model each device holds a quarter."""

    def pair():
        up = nnx.Linear(4096, 16384, kernel_metadata=page.along(*COLUMNS), rngs=nnx.Rngs(0))
        down = page.along("model", None)
        return nnx.List([up, nnx.Linear(16384, 4096, kernel_metadata=down, rngs=nnx.Rngs(0))])

    _, shapes = nnx.get_abstract_model(pair, page.mesh)  # shapes only: nothing is allocated
    kernels = [leaf for path, leaf in nnx.to_flat_state(shapes) if path[-1] == "kernel"]
    whole = sum(4 * leaf.size for leaf in kernels)
    held = sum(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in kernels)
    assert held == whole // 4 and 32 * whole > 15.75 * 2**30 and f"{32 * whole / 1e9:.1f}" == "17.2"


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """The stub and a wrong answer get "not yet", the solution "correct"."""
    check_exercise(page, PAGE, exercise)
