"""If your code is Linen: what the page says of boxes, the bridge, logical names and FSDP is true."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "09f-linen"
P = jax.P
LAYER = 4 * 256 * 256  # bytes of one layer's kernel


def kernel_of(variables):
    return variables["params"]["kernel"]


# Boxes


def test_init_ignores_the_annotation_with_and_without_jit(page):
    """A box moves nothing: every device holds the whole kernel, also under jax.jit."""
    for made in (page.dense.init, jax.jit(page.dense.init)):
        with jax.set_mesh(page.mesh):
            ignored = kernel_of(made(page.key, page.x_BD))
        assert isinstance(ignored, nn.Partitioned) and ignored.names == (None, "model")
        assert ignored.value.sharding.is_fully_replicated
        assert len(ignored.value.sharding.device_set) == 8
    assert page.after("ignored").kernel_DF.addressable_shards[0].data.nbytes == 2048


def test_out_shardings_from_the_boxes_shard_the_kernel(page):
    """With nn.get_sharding as out_shardings each device holds its columns, of the same numbers."""
    kernel_DF = page.kernel_DF
    spec = nn.get_partition_spec(page.abstract)["params"]["kernel"]
    assert spec == P(None, "model") == kernel_DF.sharding.spec
    assert kernel_DF.addressable_shards[0].data.nbytes == 4 * 16 * 32 // 4
    np.testing.assert_array_equal(kernel_DF, page.after("ignored").kernel_DF)


def test_no_device_makes_the_whole_kernel(page):
    """Initialised sharded, the program has no array of the kernel's full size."""
    jitted = jax.jit(page.dense.init, out_shardings=page.shardings)
    program = jitted.lower(page.key, page.x_BD).compile()
    ms.assert_no_full_copy(program, [page.kernel_DF])


def test_apply_takes_boxes_as_they_are(page):
    """apply of boxes is apply of the arrays that unbox takes out of them."""
    with_boxes = page.dense.apply(page.after("obeyed").variables, page.x_BD)
    unboxed = page.dense.apply(nn.meta.unbox(page.after("obeyed").variables), page.x_BD)
    np.testing.assert_allclose(with_boxes, unboxed)


def test_moments_are_boxed_and_sharded_as_their_weights(page):
    """Optax boxes a weight's moments with its names, and the same calls shard them."""
    moment = page.adam.init(page.after("moments").params)[0].mu["kernel"]
    assert moment.names == (None, "model") and moment.value.shape == page.kernel_DF.shape
    for moments in (page.state[0].mu, page.state[0].nu):
        assert moments["kernel"].value.sharding.spec == P(None, "model")


# The bridge


def test_a_bridged_module_follows_the_annotation(page):
    """ToNNX turns boxes into annotated variables, which jax.set_mesh is enough to shard."""
    assert page.bridged.kernel.out_sharding == (None, "model")
    assert page.bridged.kernel.get_value().addressable_shards[0].data.shape == (16, 8)


def test_a_bridged_module_computes_what_the_linen_module_does(page):
    """With the same numbers, the output is that of Linen's apply."""
    by_name = {name: np.asarray(getattr(page.bridged, name)[...]) for name in ("kernel", "bias")}
    expected = page.dense.apply({"params": by_name}, page.x_BD)
    np.testing.assert_allclose(page.bridged(page.x_BD), expected, rtol=1e-5)


def test_an_optimizer_takes_a_bridged_module(page):
    """nnx.Optimizer shards its moments as the kernel."""
    with jax.set_mesh(page.mesh):
        optimizer = nnx.Optimizer(page.bridged, optax.adam(1e-3), wrt=nnx.Param)
    assert optimizer.opt_state[0].mu["kernel"].sharding.spec == P(None, "model")


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x_BD):
        return nn.BatchNorm(use_running_average=False)(x_BD)


def test_a_mutable_collection_is_updated_in_place():
    """With mutable=["batch_stats"] a bridged call returns the output alone and updates the variable."""
    x_BD = np.random.default_rng(0).normal(1, 1, (8, 16)).astype("float32")
    normed = nnx.bridge.lazy_init(nnx.bridge.ToNNX(Normed(), rngs=nnx.Rngs(0)), x_BD)

    def mean():
        return np.asarray(nnx.state(normed, nnx.BatchStat)["BatchNorm_0"]["mean"][...])

    before = mean()
    assert np.abs(normed(x_BD, mutable=["batch_stats"]).mean(0)).max() < 1e-5
    assert not np.allclose(before, mean())


# Logical names


def test_linen_takes_the_first_row_that_fits(page):
    """Rules are read from the top; a taken axis sends a name on to its next row."""
    axes = page.axes
    assert axes(("embed",)) == P("model")
    assert axes(("embed", "hidden")) == P("data", "model")
    assert axes(("hidden", "embed")) == P("model", "data")  # the order is that of the rules
    assert axes(("batch", "embed")) == P("data", "model")
    embed_first = [("embed", "model"), *page.rules]
    assert nn.logical_to_mesh_axes(("embed", "hidden"), embed_first) == P("model", None)


def test_linen_leaves_a_name_without_an_axis_whole(page):
    """A typing error, or a taken axis without another row, leaves the dimension whole in silence."""
    assert page.axes(("embd", "hidden")) == P(None, "model")
    assert nn.logical_to_mesh_axes(("batch", "embed"), page.few_rules) == P("data", None)


def test_a_module_of_logical_names_is_sharded_by_the_rules(page):
    """logical_to_mesh_sharding gives what out_shardings expects."""
    made = jax.jit(page.named.init, out_shardings=page.of_rules)(page.key, page.x_BD)
    assert kernel_of(made).value.sharding.spec == P("data", "model")


def in_nnx(page, *names):
    with jax.set_mesh(page.mesh), nnx.logical_axis_rules(page.rules):
        weight = nnx.Param(jnp.ones((16,) * len(names)), out_sharding=names)
    return weight.get_value().sharding.spec


def test_nnx_takes_the_last_row(page):
    """The table's NNX column: the last row of embed wins, alone and beside hidden."""
    assert page.weight_D.get_value().sharding.spec == P("data") == in_nnx(page, "embed")
    assert in_nnx(page, "embed", "hidden") == P("data", "model")


def test_nnx_raises_where_linen_forgives(page):
    """A collision and an unknown name are errors in NNX."""
    with pytest.raises(Exception, match="duplicate entries for `data`"):
        in_nnx(page, "batch", "embed")
    with pytest.raises(Exception, match="Resource axis: embd"):
        in_nnx(page, "embd", "batch")


def constrained(page, *names):
    return jax.jit(lambda x: nn.with_logical_constraint(x, names))(page.x_64_BD).sharding


def test_the_constraint_forgives_a_collision_and_a_typing_error(page):
    """All three lines of the page are sharded by rows alone."""
    rows = jax.NamedSharding(page.mesh, P("data", None))
    with jax.set_mesh(page.mesh), nn.logical_axis_rules(page.few_rules):
        for other in ("embed", "embd", None):
            assert constrained(page, "batch", other).is_equivalent_to(rows, 2)


def test_a_fallback_makes_the_constraint_raise(page):
    """With RAISE_ERROR both mistakes raise, with the same message; what was meant passes."""
    rows = jax.NamedSharding(page.mesh, P("data", None))
    with jax.set_mesh(page.mesh), nn.logical_axis_rules(page.few_rules):
        for other in ("embed", "embd"):
            with pytest.raises(ValueError, match="did not match a rule"):
                page.strict(page.x_64_BD, ("batch", other))
        assert page.strict(page.x_64_BD, ("batch", None)).sharding.is_equivalent_to(rows, 2)


def test_without_mesh_or_rules_the_constraint_does_nothing(page):
    """It returns its input as it is, and says nothing."""
    with nn.logical_axis_rules(page.few_rules):
        assert len(constrained(page, "batch", None).device_set) == 1  # no mesh
    with jax.set_mesh(page.mesh):
        assert constrained(page, "batch", None).is_fully_replicated  # no rules


# FSDP


def test_the_longest_dimension_that_divides_is_sharded(page):
    """Small arrays stay whole; of two equal dimensions the first is taken."""
    assert page.names_for((96, 64)) == ("data", None) == page.names_for((256, 256))
    assert page.names_for((64, 256)) == (None, "data")
    assert page.names_for((64,)) == (None,) == page.names_for((256,))


def test_one_kernel_is_sharded_over_eight_devices(page):
    """Each device holds 32 of 256 rows, in a box with the names."""
    assert page.box.names == ("data", None)
    assert page.box.value.addressable_shards[0].data.shape == (256 // 8, 256)


def test_gather_undoes_shard(page):
    """Gathered shards are the array that was sharded, number by number."""
    w_host = np.arange(96 * 64, dtype="float32").reshape(96, 64)
    there_and_back = jax.jit(
        jax.shard_map(
            lambda value: page.gather(page.shard(value)),
            mesh=page.line, in_specs=P(), out_specs=P(), check_vma=False,
        )
    )  # fmt: skip
    np.testing.assert_array_equal(there_and_back(w_host), w_host)


def test_specs_follow_from_the_names_of_the_first_init(page):
    """enter's kernel is sharded by columns, a layer's by rows, behind the dimension of the layers."""
    assert page.specs["enter"]["kernel"] == P(None, "data")
    assert page.specs["layers"]["Dense_0"]["kernel"] == P(None, "data", None)


def test_each_device_holds_an_eighth_of_the_kernels_and_all_biases(page):
    """146,496 of 1,135,680 bytes, of which the biases are 5,184."""
    whole = jax.eval_shape(page.plain.init, page.key, jnp.ones((8, 64)))["params"]
    sizes = [leaf.size for leaf in jax.tree.leaves(whole)]
    kernels = sum(4 * size for size in sizes if size >= 4096)
    biases = sum(4 * size for size in sizes if size < 4096)
    assert (kernels + biases, biases) == (1_135_680, 5_184)
    assert ms.memory(page.shards).bytes_per_device == kernels // 8 + biases == 146_496


def test_stored_parameters_stay_sharded_while_they_train(page):
    """Before and after twenty steps every box holds an eighth on each device."""
    for stored in (page.shards, page.boxes):
        leaves = [
            leaf for leaf in jax.tree.leaves(stored, is_leaf=page.is_box) if page.is_box(leaf)
        ]
        assert len(leaves) == 3
        for leaf in leaves:
            expected = jax.NamedSharding(page.line, P(*leaf.names))
            assert leaf.value.sharding.is_equivalent_to(expected, leaf.value.ndim)
            assert leaf.value.addressable_shards[0].data.size == leaf.value.size // 8


def drawn(page):
    """The program that draws the parameters of the module as it is, each device its own."""
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(page.line, spec), page.specs)
    return jax.jit(lambda x_BI: page.plain.init(page.key, x_BI)["params"], out_shardings=shardings)


def test_a_larger_model_is_drawn_outside_shard_map_with_the_same_numbers(page):
    """jax.jit(plain.init, out_shardings=...) gives the shards, number by number."""

    def boxed(value, found):
        return nn.Partitioned(value, found.names) if page.is_box(found) else value

    made = jax.tree.map(boxed, drawn(page)(page.x_host), page.first, is_leaf=page.is_box)
    assert jax.tree.structure(made) == jax.tree.structure(page.shards)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(page.shards), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@compiled_for_cpu
def test_only_the_wrapped_init_makes_whole_kernels(page):
    """Compiled for CPU, init inside shard_map needs more scratch than all parameters, outside a quarter."""
    outside = ms.memory(drawn(page).lower(page.x_host).compile()).temporaries
    inside = ms.memory(page.make_shards.lower(page.x_host).compile()).temporaries
    assert outside < 1_135_680 / 4 and inside > 1_135_680


def gradients_with(page, network):
    def loss(params, x_block_BI, target_block_BV):
        return jax.lax.pmean(page.loss_of(network, params, x_block_BI, target_block_BV), "data")

    specs = (page.specs, P("data"), P("data"))
    mapped = jax.shard_map(jax.grad(loss), mesh=page.line, in_specs=specs, out_specs=page.specs)
    return jax.jit(mapped)


def assert_same(one, other, **tolerance):
    one, other = (jax.tree.leaves(nn.meta.unbox(tree)) for tree in (one, other))
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, **tolerance)


def gradients_on_one_device(page):
    params = jax.tree.map(np.asarray, nn.meta.unbox(page.shards))
    loss = partial(page.loss_of, page.plain)
    return jax.grad(loss)(params, page.x_host, page.target_host)


def test_gradients_are_those_of_one_device(page):
    """Kernels and biases: the page's loss over eight devices has the gradient of the plain one."""
    specs = (page.specs, P("data"), P("data"))
    mapped = jax.shard_map(
        jax.grad(page.mean_loss), mesh=page.line, in_specs=specs, out_specs=page.specs
    )
    found = jax.jit(mapped)(page.shards, page.x_host, page.target_host)
    assert_same(found, gradients_on_one_device(page), rtol=1e-4, atol=1e-6)


def test_twenty_steps_agree_with_one_device(page):
    """Loss and weights after twenty steps are those of one device, up to rounding."""
    np.testing.assert_allclose(page.fsdp_loss, page.loss, rtol=1e-5)
    assert_same(page.boxes, page.params, rtol=1e-4, atol=1e-6)


@compiled_for_cpu
def test_a_step_of_the_scan_gathers_one_layer(page):
    """Compiled for CPU, the loop gathers and reduce-scatters one layer's kernel, four times each."""
    gradients = gradients_with(page, page.fsdp)
    program = gradients.lower(page.shards, page.x_host, page.target_host).compile()
    moves = ms.collectives(program, page.line)
    inside = {(m.kind, m.payload_bytes, m.executions) for m in moves if m.inside_loop}
    wanted = {("all-gather", LAYER, 4), ("reduce-scatter", LAYER, 4), ("all-reduce", 4 * 256, 4)}
    assert inside == wanted
    by_kind = moves.by("kind")
    assert by_kind.bytes("all-gather") == by_kind.bytes("reduce-scatter") == 1_130_496


@compiled_for_cpu
def test_remat_gathers_again_and_keeps_less(page):
    """Compiled for CPU, nn.remat gathers a layer twice; less than half of the scratch is needed."""
    again = page.Network(lambda module: nn.remat(page.sharded(module)))
    kept, freed = (gradients_with(page, network) for network in (page.fsdp, again))
    found = freed(page.shards, page.x_host, page.target_host)
    assert_same(found, gradients_on_one_device(page), rtol=1e-4, atol=1e-6)
    few = page.x_host[:8], page.target_host[:8]  # so that weights are most of what is kept
    kept, freed = (program.lower(page.shards, *few).compile() for program in (kept, freed))
    scratch = [ms.memory(program).temporaries for program in (kept, freed)]
    assert scratch[0] > 4 * LAYER and 2 * scratch[1] < scratch[0]
    moves = ms.collectives(freed, page.line)
    gathers = [
        m.payload_bytes * m.executions for m in moves if m.inside_loop and m.kind == "all-gather"
    ]
    assert sum(gathers) == 2 * 4 * LAYER
