"""Chapter 3, "Initialise a model that never existed in one piece": what the page says is true."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import misplaced
from many_devices.compiled import stored_memory
from many_devices.helpers import attempt, put
from many_devices.stack import Block, large, make_stack, run_stack, small
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "03-init"
P = jax.P
KEY = jax.random.key(0)
WEIGHTS = 2 * 32 * 4096 * 16384  # of the large model


def abstract(page, config):
    return nnx.get_abstract_model(lambda: make_stack(config), page.mesh)[1]


def compiled(page, make):
    """The program that makes a model on the page's mesh; it does not run."""
    with jax.set_mesh(page.mesh):
        return jax.jit(make).lower().compile()


# The problem


def test_an_array_made_inside_the_mesh_is_replicated(page):
    """What an initialiser returns inside jax.set_mesh is whole on each of the eight devices."""
    assert page.w_DF.shape == (64, 512) and page.w_DF.sharding.is_fully_replicated
    assert len(page.w_DF.devices()) == 8
    assert ms.memory(page.w_DF).total_bytes == 8 * page.w_DF.nbytes


def test_the_large_model_in_gigabytes():
    """4,294,967,296 weights: 17.2 GB in float32, 8.6 for one array, 2.1 for one eighth, 9.7 at the peak.

    That peak fits in 16.9 GB, the whole does not; at twice the size one whole array, which each device makes, does not.
    """
    assert 2 * large.L * large.D * large.F == WEIGHTS == 4_294_967_296
    whole, array, piece = 4 * WEIGHTS, 2 * WEIGHTS, WEIGHTS // 4  # a piece: of one array
    told = [f"{size / 1e9:.1f}" for size in (whole, array, whole / 8, array + piece)]
    assert told == ["17.2", "8.6", "2.1", "9.7"]
    v5e = 15.75 * 2**30  # bytes that a program can use
    assert f"{v5e / 1e9:.1f}" == "16.9" and array + piece < v5e < whole == 2 * array


def test_a_stack_made_outside_jit_is_whole_first(page):
    """An initialiser returns all layers whole on each device; then their variable shards them."""
    with jax.set_mesh(page.mesh):
        w_LDF = jax.vmap(lambda key: page.init(key, (64, 512)))(jax.random.split(KEY, 6))
        stack = make_stack(small)
    assert w_LDF.shape == (6, 64, 512) and w_LDF.sharding.is_fully_replicated
    assert stack.w_DF.shape == (6, 64, 512)
    assert stack.w_DF.sharding.spec == P(None, "data", "model")


# The recipe


def test_each_device_holds_one_eighth(page):
    """Of the 262,144 bytes of a small block each device holds 32,768."""
    held = ms.memory(page.block)
    assert held.bytes_per_device == 2 * 64 * 512 * 4 // 8 == 32_768
    assert held.unique_bytes == 262_144


def test_both_weights_are_sharded_as_annotated(page):
    """model shards F and data shards D, in both weights."""
    for name, spec in [("w_DF", ("data", "model")), ("w_FD", ("model", "data"))]:
        weight = getattr(page.block, name)
        wanted = jax.NamedSharding(page.mesh, P(*spec))
        assert weight.sharding.is_equivalent_to(wanted, 2) and weight.out_sharding == spec


def test_the_numbers_are_those_of_one_device(page):
    """Bit for bit, the sharded block has the numbers of the block made on one device."""
    with nnx.use_eager_sharding(False):
        on_one_device = page.Block(64, 512, nnx.Rngs(0))
    for name in ("w_DF", "w_FD"):
        expected = getattr(on_one_device, name)
        np.testing.assert_array_equal(getattr(page.block, name), expected)


def test_misplaced_lists_what_is_not_sharded_as_annotated(page):
    """It lists nothing of the sharded block, and both weights of one made on one device."""
    with nnx.use_eager_sharding(False):
        on_one_device = page.Block(64, 512, nnx.Rngs(0))
    assert misplaced(page.block, page.mesh) == []
    assert len(misplaced(on_one_device, page.mesh)) == 2


def test_a_compiled_constructor_keeps_its_shardings(page):
    """Eager sharding was on when it was traced, so switched off later it changes nothing."""
    with jax.set_mesh(page.mesh), nnx.use_eager_sharding(False):
        again = page.create()
    assert misplaced(again, page.mesh) == []


def normal(rows, columns):
    return np.asarray(jax.random.normal(KEY, (rows, columns)))


def test_the_default_generator_is_threefry_partitionable():
    """JAX's default generator makes each piece by itself."""
    assert jax.config.jax_threefry_partitionable
    assert jax.config.jax_default_prng_impl == "threefry2x32"


def test_a_number_depends_on_its_place_in_the_flattened_array():
    """Each number depends on the key and on its place in the flattened array alone."""
    assert np.array_equal(normal(4, 8).ravel(), normal(8, 4).ravel())
    assert np.array_equal(normal(4, 8).ravel(), normal(1, 32).ravel())


def test_more_rows_keep_the_numbers():
    """Another number of rows keeps the numbers that there were."""
    assert np.array_equal(normal(8, 8)[:4], normal(4, 8))


def test_more_columns_change_all_rows_but_the_first():
    """With another number of columns all rows but the first get other numbers."""
    narrow, wide = normal(4, 8), normal(4, 16)[:, :8]
    assert np.array_equal(narrow[0], wide[0])
    for row in (1, 2, 3):
        assert not np.isin(narrow[row], wide[row]).any()


@pytest.mark.parametrize("spec", [P("data", "model"), P("model", None), P(None, "data")], ids=str)
@pytest.mark.parametrize(
    "init",
    [nnx.initializers.lecun_normal(), nnx.initializers.he_uniform()],
    ids=["normal", "uniform"],
)
def test_it_does_not_matter_which_device_generates_it(page, init, spec):
    """Made in pieces under jax.jit, the numbers are those of one device."""
    sharding = jax.NamedSharding(page.mesh, spec)
    made = jax.jit(lambda: init(KEY, (64, 512)), out_shardings=sharding)()
    assert not made.sharding.is_fully_replicated
    np.testing.assert_array_equal(made, init(KEY, (64, 512)))


# The compiled program


def not_annotated(page):
    return nnx.Param(page.init(KEY, (4096, 16384)))


def annotated(page):
    return nnx.Param(page.init(KEY, (4096, 16384)), out_sharding=("data", "model"))


def test_the_outputs_are_one_eighth_of_the_matrix(page):
    """Annotated, each device's output is one eighth of the matrix; not annotated, all of it."""
    piece = 4 * 4096 * 16384 // page.mesh.size
    memory = ms.memory(compiled(page, lambda: annotated(page)))
    bare = ms.memory(compiled(page, lambda: not_annotated(page)))
    assert 0 <= memory.outputs - piece < 1024
    assert 0 <= bare.outputs - 8 * piece < 1024
    for compiler in ("gpu", "tpu"):
        assert 0 <= stored_memory("init-annotated", compiler).outputs - piece < 1024


@compiled_for_cpu
def test_annotated_the_program_needs_one_eighth_of_the_memory(page):
    """Outputs and temporaries together are one eighth of those without the annotation."""
    memory = ms.memory(compiled(page, lambda: annotated(page)))
    bare = ms.memory(compiled(page, lambda: not_annotated(page)))
    assert 0.999 < bare.bytes_per_device / memory.bytes_per_device / 8 < 1.001


def conv():
    """A kernel 3 x 3 x 64 x 64, which is computed as 576 x 64."""
    return nnx.Conv(
        64,
        64,
        (3, 3),
        use_bias=False,
        kernel_init=nnx.initializers.orthogonal(),
        kernel_metadata={"out_sharding": (None, None, "data", "model")},
        rngs=nnx.Rngs(0),
    )


def heads():
    """A kernel 256 x 8 x 32, which is computed as 256 x 256."""
    return nnx.LinearGeneral(
        256,
        (8, 32),
        use_bias=False,
        kernel_init=nnx.initializers.orthogonal(),
        kernel_metadata={"out_sharding": ("data", "model", None)},
        rngs=nnx.Rngs(0),
    )


def in_order():
    """A weight that is made as one long row."""
    row = jnp.sort(jax.random.normal(KEY, (256 * 512,)))
    return nnx.Param(row.reshape(256, 512), out_sharding=("data", "model"))


def test_a_whole_copy_of_any_shape_is_found(page):
    """orthogonal, and weights made whole in another shape, do not pass assert_no_full_copy."""
    for make in (page.create_orthogonal, conv, heads, in_order):
        tree = nnx.get_abstract_model(make, page.mesh)[1]
        message = attempt(ms.assert_no_full_copy, compiled(page, make), tree)
        assert message.startswith("AssertionError"), make


@compiled_for_cpu
def test_outputs_alone_do_not_tell(page):
    """Their outputs are one eighth, but their temporaries are larger than the whole weight."""
    for make in (page.create_orthogonal, conv, heads, in_order):
        (leaf,) = jax.tree.leaves(nnx.get_abstract_model(make, page.mesh)[1])
        memory = ms.memory(compiled(page, make))
        assert 0 <= memory.outputs - 4 * leaf.size // 8 < 1024, make
        assert memory.temporaries > 4 * leaf.size, make


def test_orthogonal_ends_in_pieces_and_is_whole_on_the_way(page):
    """Each device ends with 128 x 64 numbers, and the message names the whole array."""
    assert page.w_DD.sharding.shard_shape((256, 256)) == (128, 64)
    with pytest.raises(AssertionError, match=r"^the array \(256, 256\) is whole in this program:"):
        ms.assert_no_full_copy(page.program, page.w_DD)


def test_the_check_does_not_see_a_copy_made_in_parts(page):
    """Two halves of a weight, each whole on every device, pass; the temporaries tell."""

    def in_halves():
        keys, make = jax.random.split(KEY), nnx.initializers.orthogonal()
        halves = [make(key, (256, 128)) for key in keys]
        pieces = [jax.lax.with_sharding_constraint(half, P(("data", "model"))) for half in halves]
        return nnx.Param(jnp.concatenate(pieces, 1), out_sharding=(("data", "model"), None))

    program = compiled(page, in_halves)
    ms.assert_no_full_copy(program, nnx.get_abstract_model(in_halves, page.mesh)[1])
    assert 0 <= ms.memory(program).outputs - 4 * 256 * 256 // 8 < 1024
    assert ms.memory(program).temporaries > 4 * 256 * 256


# A list of blocks, or one stack


def test_the_block_of_the_package_is_that_of_the_page(page):
    """Later pages import it, with its sizes and annotations in a Config: the same weights."""
    with jax.set_mesh(page.mesh):
        package = jax.jit(lambda: Block(small, nnx.Rngs(0)))()
    assert jax.tree.structure(nnx.state(package)) == jax.tree.structure(nnx.state(page.block))
    for name in ("w_DF", "w_FD"):
        one, other = getattr(package, name), getattr(page.block, name)
        assert one.sharding == other.sharding and one.out_sharding == other.out_sharding
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(package(X_HOST), page.block(X_HOST))


X_HOST = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")


def test_a_block_computes_two_products_and_a_tanh(page):
    """A block gives tanh(x w_DF) w_FD."""
    expected = np.tanh(X_HOST @ np.asarray(page.block.w_DF)) @ np.asarray(page.block.w_FD)
    np.testing.assert_allclose(page.block(X_HOST), expected, rtol=1e-3, atol=1e-5)


def make_list(page, config):
    class Tower(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([page.Block(config.D, config.F, rngs) for _ in range(config.L)])

        def __call__(self, x_BD):
            for block in self.blocks:
                x_BD = block(x_BD)
            return x_BD

    return Tower(nnx.Rngs(0))


def test_the_recipe_works_for_a_list_of_blocks(page):
    """A list of two blocks is sharded as annotated, and gives what its layers give in turn."""
    with jax.set_mesh(page.mesh):
        tower = jax.jit(lambda: make_list(page, replace(small, L=2)))()
    first, second = tower.blocks
    assert misplaced(tower, page.mesh) == [] and len(jax.tree.leaves(tower)) == 4
    assert second.w_DF.sharding.shard_shape((64, 512)) == (32, 128)
    assert not np.array_equal(first.w_DF, second.w_DF)
    x_BD = X_HOST
    for block in (first, second):
        x_BD = np.tanh(x_BD @ np.asarray(block.w_DF)) @ np.asarray(block.w_FD)
    np.testing.assert_allclose(tower(X_HOST), x_BD, rtol=1e-3, atol=1e-5)


def test_the_program_of_a_list_grows_with_its_layers(page):
    """With 48 layers in place of 6 a list's program is over five times as long, a stack's as long."""

    def lines(run, make, layers):
        with jax.set_mesh(page.mesh):
            model = nnx.eval_shape(lambda: make(replace(small, L=layers)))
            return len(jax.jit(run).lower(model, X_HOST).as_text().splitlines())

    of_list = [
        lines(lambda model, x: model(x), lambda config: make_list(page, config), layers)
        for layers in (6, 48)
    ]
    of_stack = [lines(run_stack, make_stack, layers) for layers in (6, 48)]
    assert of_list[1] > 5 * of_list[0] and of_stack[1] == of_stack[0] < of_list[1] / 2


# Activations


def forward(block, x_BD):
    return block(x_BD)


def pin_output(block, x_BD):
    """A block with the page's constraint."""
    return jax.lax.with_sharding_constraint(block(x_BD), P("data", None))


def output_of(page, function, rows):
    x_BD = put(np.ones((rows, 64), "float32"), page.mesh, "data", None)
    with jax.set_mesh(page.mesh):
        return jax.jit(function)(page.block, x_BD)


@compiled_for_cpu
def test_the_output_changes_its_sharding_with_the_batch(page):
    """With 512 rows it is sharded by rows; with 16 rows by features, and no value is other."""
    for rows, spec in [(512, P("data", None)), (16, P(None, "data"))]:
        y_BD = output_of(page, forward, rows)
        assert y_BD.sharding.is_equivalent_to(jax.NamedSharding(page.mesh, spec), 2)
        expected = np.tanh(np.ones((rows, 64)) @ np.asarray(page.block.w_DF)) @ np.asarray(
            page.block.w_FD
        )
        np.testing.assert_allclose(y_BD, expected, rtol=1e-3, atol=1e-5)


def test_constrained_the_output_keeps_its_rows(page):
    """With the constraint a device ends with its own rows, of 16 and of 512."""
    for rows in (16, 512):
        y_BD = output_of(page, pin_output, rows)
        assert y_BD.sharding.shard_shape((rows, 64)) == (rows // 2, 64)


# The capstone


def test_gigabytes_of_weights_and_of_training(page):
    """Replicated 17.2 and 68.7 GB, along model 4.3 and 17.2, along both axes 2.1 and 8.6: half a chip."""
    told = [("replicated", 1, "68.7"), ("along model", 4, "17.2"), ("along both", 8, "8.6")]
    assert list(page.ways) == [name for name, _, _ in told]
    for name, parts, training in told:
        axis_D, axis_F = page.ways[name]
        config = replace(large, axes_DF=(axis_D, axis_F), axes_FD=(axis_F, axis_D))
        held = ms.memory(abstract(page, config)).bytes_per_device
        assert held == 4 * WEIGHTS // parts and f"{4 * held / 1e9:.1f}" == training
        assert page.gigabytes(axis_D, axis_F) == held / 1e9
    assert 0.48 < 4 * page.gigabytes("data", "model") / 16.9 < 0.52


def test_an_abstract_model_has_a_shape_and_a_sharding_for_each_weight(page):
    """No array, and each weight is sharded as annotated; 32 layers are counted as one times 32."""
    _, shapes = nnx.get_abstract_model(lambda: page.Block(large.D, large.F, nnx.Rngs(0)), page.mesh)
    w_DF = shapes["w_DF"]
    assert w_DF.shape == (4096, 16384) and w_DF.sharding.spec == P("data", "model")
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(shapes))
    assert 32 * ms.memory(shapes).bytes_per_device == 4 * WEIGHTS // 8


def test_the_program_of_the_large_model_has_no_whole_stack(page):
    """Its outputs are one eighth, and no value has as many elements as a stack or one layer."""
    program = compiled(page, lambda: make_stack(large))
    ms.assert_no_full_copy(program, abstract(page, large))
    assert 0 <= ms.memory(program).outputs - 4 * WEIGHTS // 8 < 1024  # and a few pointers
    replicated = replace(large, axes_DF=(None, None), axes_FD=(None, None))
    message = attempt(
        ms.assert_no_full_copy,
        compiled(page, lambda: make_stack(replicated)),
        abstract(page, large),
    )
    assert message.startswith("AssertionError")


def test_the_temporaries_of_the_large_model():
    """For H100 and TPU v5e 0.1 GB beside 2.1 GB of weights."""
    for compiler in ("gpu", "tpu"):
        memory = stored_memory("init-large", compiler)
        assert f"{memory.temporaries / 1e9:.1f}, {memory.outputs / 1e9:.1f}" == "0.1, 2.1"


def test_nothing_is_allocated(page):
    """Counting bytes and compiling the large model make no array."""
    before = len(jax.live_arrays())
    page.gigabytes("data", "model")
    compiled(page, lambda: make_stack(large))
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
