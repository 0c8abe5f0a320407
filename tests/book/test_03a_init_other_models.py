"""Models without annotations, tied, in bfloat16 or from files: what the page says is true."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import misplaced
from many_devices.helpers import attempt
from pages import check_exercise, compiled_for_cpu, exercises_of, run

PAGE = "03a-init-other-models"
P = jax.P


def made_plainly(make):
    """The model that make() returns, on one device."""
    with nnx.use_eager_sharding(False):
        return make()


# A rule, and out_shardings


def test_one_array_is_drawn_in_pieces(page):
    """With out_shardings each device has (32, 128), the numbers are the same, and none was whole."""
    assert page.drawn_DF.sharding.shard_shape((64, 512)) == (32, 128)
    np.testing.assert_array_equal(page.drawn_DF, page.draw())
    program = jax.jit(page.draw, out_shardings=page.in_pieces).lower().compile()
    ms.assert_no_full_copy(program, page.drawn_DF)


def test_by_a_rule_a_model_has_the_pieces_and_numbers_that_annotations_give(page):
    """Both kernels are sharded by the rule, note it, and have the numbers of one device."""
    plain = made_plainly(page.make_theirs)
    for name, spec in [("up", ("data", "model")), ("down", ("model", "data"))]:
        weight = getattr(page.theirs, name).kernel
        wanted = jax.NamedSharding(page.mesh, P(*spec))
        assert weight.sharding.is_equivalent_to(wanted, 2) and weight.out_sharding == spec
        np.testing.assert_array_equal(weight, getattr(plain, name).kernel)
    assert misplaced(page.theirs, page.mesh) == []
    assert ms.memory(page.theirs).bytes_per_device == 32_768 == 262_144 // 8
    assert ms.memory(page.theirs).unique_bytes == 262_144


def test_without_a_rule_the_model_is_whole_on_every_device(page):
    """A model without annotations comes out of jax.jit as copies."""
    with jax.set_mesh(page.mesh):
        model = jax.jit(page.make_theirs)()
    for layer in (model.up, model.down):
        assert layer.kernel.sharding.is_fully_replicated and len(layer.kernel.devices()) == 8


def test_a_bias_is_copied(page):
    """Where the rule names no axis the array is whole on every device; the kernel is sharded."""

    def make_biased():
        return nnx.Linear(64, 512, rngs=nnx.Rngs(0))

    def biased_rule(path):
        return ("data", "model") if "kernel" in path else ()

    biased = page.create_by_rule(make_biased, biased_rule, page.mesh)
    assert biased.bias.sharding.is_fully_replicated and misplaced(biased, page.mesh) == []
    assert biased.kernel.sharding.shard_shape((64, 512)) == (32, 128)
    assert page.rule(("up", "bias")) == ()


def test_a_size_that_devices_do_not_divide_raises(page):
    """Ten columns over four devices are an IndivisibleError."""

    def make_ten():
        return nnx.Linear(64, 10, use_bias=False, rngs=nnx.Rngs(0))

    raised = attempt(page.create_by_rule, make_ten, lambda path: (None, "model"), page.mesh)
    assert raised.startswith("IndivisibleError")


def test_on_an_explicit_mesh_the_initialiser_needs_a_sharding(page):
    """With an annotation alone the weight is made whole; with out_sharding in init it is not."""
    axis_types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types)
    key = jax.random.key(0)

    def by_annotation():
        return nnx.Param(page.init(key, (64, 512)), out_sharding=("data", "model"))

    def by_argument():
        return page.init(key, (64, 512), jnp.float32, out_sharding=P("data", "model"))

    with jax.set_mesh(mesh):
        late, in_time = (jax.jit(make).lower().compile() for make in (by_annotation, by_argument))
    shape = jax.ShapeDtypeStruct((64, 512), "float32", sharding=page.in_pieces)
    assert attempt(ms.assert_no_full_copy, late, shape).startswith("AssertionError")
    ms.assert_no_full_copy(in_time, shape)


def test_the_older_recipe_gives_what_the_recipe_of_chapter_3_gives(page):
    """The same pieces and the same numbers."""
    with jax.set_mesh(page.mesh):
        block = jax.jit(lambda: page.Block(page.small, nnx.Rngs(0)))()
    plain = made_plainly(lambda: page.Block(page.small, nnx.Rngs(0)))
    for name in ("w_DF", "w_FD"):
        older = getattr(page.older, name)
        np.testing.assert_array_equal(older, getattr(plain, name))
        assert older.sharding.is_equivalent_to(getattr(block, name).sharding, 2)
    assert misplaced(page.older, page.mesh) == []


# Tied weights


def test_nnx_jit_keeps_a_tie_and_jax_jit_breaks_it(page):
    """jax.jit returns two arrays of equal numbers, 16,384 bytes on a device; nnx.jit one, 8,192."""
    one, untied, tied = page.on_one_device, page.untied, page.tied
    assert one.head is one.embed and tied.head is tied.embed
    assert untied.head is not untied.embed
    np.testing.assert_array_equal(untied.head, untied.embed)
    assert ms.memory(one).bytes_per_device == 65_536
    assert ms.memory(untied).bytes_per_device == 2 * 256 * 64 * 4 // 8 == 16_384
    assert ms.memory(tied).bytes_per_device == 8_192
    assert tied.embed.sharding.shard_shape((256, 64)) == (64, 32)


def test_the_tied_model_uses_both_names(page):
    """Its output is a row of the table times the table, transposed."""
    table_VD = np.asarray(page.untied.embed)
    head_VD = np.arange(256 * 64, dtype="float32").reshape(256, 64)
    with jax.set_mesh(page.mesh):
        model = jax.jit(page.make_tied)()
        model.head.set_value(jax.device_put(head_VD, model.embed.sharding))
    np.testing.assert_allclose(model(jnp.arange(8)), table_VD[:8] @ head_VD.T, rtol=1e-3)


def step(model):
    """One step down the gradient of a loss."""

    def loss(model):
        return ((model(jnp.arange(8)) - 1) ** 2).mean()

    gradients = nnx.grad(loss)(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), gradients))
    return model


def test_after_a_step_the_two_arrays_differ(page):
    """Each has the part of the gradient that is its own; a tied table has the sum of both."""
    with jax.set_mesh(page.mesh):
        untied = jax.jit(step)(page.untied)
        tied = nnx.jit(step)(nnx.jit(page.make_tied)())
    assert not np.array_equal(untied.head, untied.embed) and tied.head is tied.embed
    start = np.asarray(page.untied.embed)
    moved = [np.asarray(table) - start for table in (untied.embed, untied.head)]
    assert all(np.abs(part).max() > 1e-4 for part in moved)
    np.testing.assert_allclose(tied.embed, start + sum(moved), atol=1e-5)


def test_each_jax_jit_that_returns_the_model_makes_two_arrays_again(page):
    """jax.jit breaks the tie of a tied model too; nnx.jit keeps it, also with donation."""
    with jax.set_mesh(page.mesh):
        tied = nnx.jit(page.make_tied)()
        untied = jax.jit(lambda model: model)(tied)
        assert untied.head is not untied.embed
        same = nnx.jit(lambda model: model)(tied)
        assert same.head is same.embed
        donated = nnx.jit(page.make_tied)()
        given = donated.embed[...]  # on CPU, JAX 0.11 keeps what NumPy has looked at
        nnx.jit(step, donate_argnums=0)(donated)
    assert given.is_deleted() and donated.head is donated.embed


def test_one_name_needs_no_nnx_jit(page):
    """With the table under one name, jax.jit makes one array."""

    class OneName(nnx.Module):
        def __init__(self, rngs):
            table_VD = page.init(rngs.params(), (256, 64))
            self.embed = nnx.Param(table_VD, out_sharding=("model", "data"))

        def __call__(self, tokens):
            return self.embed[tokens] @ self.embed.T

    with jax.set_mesh(page.mesh):
        model = jax.jit(lambda: OneName(nnx.Rngs(0)))()
    assert ms.memory(model).bytes_per_device == 8_192
    tokens = jnp.arange(8)
    np.testing.assert_allclose(model(tokens), page.on_one_device(tokens), atol=1e-5)


def test_create_by_rule_and_abstract_models_keep_ties(page):
    """nnx.state lists a tied variable once, so there is one array."""
    assert len(jax.tree.leaves(nnx.get_abstract_model(page.make_tied, page.mesh)[1])) == 1
    with jax.set_mesh(page.mesh):  # this model is annotated, so it needs a mesh
        model = page.create_by_rule(page.make_tied, lambda path: ("model", "data"), page.mesh)
    assert model.head is model.embed and misplaced(model, page.mesh) == []


def test_a_change_is_kept_by_nnx_jit_alone():
    """After jax.jit(double) the table is as before, and after nnx.jit(double) twice as large."""
    with run(PAGE, until="untied") as earlier:
        before = np.asarray(earlier.tied.embed)
    with run(PAGE, until="double") as later:
        np.testing.assert_array_equal(later.tied.embed, 2 * before)  # doubled once
        np.testing.assert_array_equal(later.before, before)
        with jax.set_mesh(later.mesh):
            jax.jit(later.double)(later.tied)
        np.testing.assert_array_equal(later.tied.embed, 2 * before)


def test_the_table_was_doubled_once(page):
    """Of the two calls on the page one changed the model."""
    np.testing.assert_array_equal(page.tied.embed, 2 * np.asarray(page.on_one_device.embed))


# bfloat16


def kernel_of(page, make, dtype):
    with jax.set_mesh(page.mesh):
        return jax.jit(make, static_argnums=0)(dtype).kernel


def test_drawn_in_bfloat16_there_are_128_values(page):
    """Rounded from float32 there are over twenty times as many, and the bytes are the same."""
    full, coarse = (kernel_of(page, page.layer, dtype) for dtype in ("float32", "bfloat16"))
    fine = kernel_of(page, page.rounded, "bfloat16")
    assert fine.dtype == coarse.dtype == jnp.bfloat16
    distinct = [len(np.unique(np.asarray(kernel))) for kernel in (coarse, fine, full)]
    assert distinct[0] == 128 and distinct[1] > 20 * 128 and distinct[2] > 250_000
    np.testing.assert_array_equal(fine, np.asarray(full).astype(jnp.bfloat16))
    sizes = [ms.memory(kernel).bytes_per_device for kernel in (full, coarse, fine)]
    assert sizes == [131_072, 65_536, 65_536]
    assert jnp.finfo(jnp.bfloat16).nmant == 7 and jnp.finfo(jnp.float32).nmant == 23


def test_each_kernel_is_sharded_as_annotated(page):
    """In float32, in bfloat16, and rounded."""
    wanted = jax.NamedSharding(page.mesh, P("data", "model"))
    for make, dtype in [
        (page.layer, "float32"),
        (page.layer, "bfloat16"),
        (page.rounded, "bfloat16"),
    ]:
        assert kernel_of(page, make, dtype).sharding.is_equivalent_to(wanted, 2)


def program_of_rounded(page):
    with jax.set_mesh(page.mesh):
        return jax.jit(page.rounded, static_argnums=0).lower("bfloat16").compile()


def test_rounding_makes_no_whole_matrix(page):
    """The program that draws in float32 and rounds has no value as large as the kernel."""
    ms.assert_no_full_copy(program_of_rounded(page), kernel_of(page, page.layer, "float32"))


@compiled_for_cpu
def test_rounding_needs_temporaries_of_the_order_of_the_pieces(page):
    """At most a little over four float32 pieces."""
    assert ms.memory(program_of_rounded(page)).temporaries <= 4.1 * 131_072


def test_dtype_says_what_a_layer_computes_in():
    """nnx.Linear with dtype=bfloat16 keeps float32 parameters, and returns bfloat16."""
    layer = nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer.kernel.dtype == jnp.float32
    assert layer(jnp.ones((1, 4))).dtype == jnp.bfloat16


# Files


def test_a_matrix_is_read_in_pieces(page):
    """Each device asks for its own (32, 128), and together they are the matrix."""
    asked = []

    class OnDisk:
        shape = (64, 512)

        def __getitem__(self, index):
            asked.append(index)
            return np.asarray(page.drawn_DF)[index]

    again = page.read_pieces(OnDisk(), page.in_pieces)
    assert len({str(index) for index in asked}) == 8
    assert {np.asarray(page.drawn_DF)[index].shape for index in asked} == {(32, 128)}
    for array in (page.pieces_DF, again):
        assert array.sharding.shard_shape((64, 512)) == (32, 128)
        np.testing.assert_array_equal(array, page.drawn_DF)


def test_a_model_is_read_from_its_files(page):
    """Both weights have the numbers of the files and are sharded as annotated."""
    assert isinstance(page.read, page.Block) and misplaced(page.read, page.mesh) == []
    for name in ("w_DF", "w_FD"):
        weight = getattr(page.read, name)
        np.testing.assert_array_equal(weight, getattr(page.older, name))
        assert weight.dtype == jnp.float32 and isinstance(weight[...], jax.Array)


def test_a_file_of_another_shape_raises(page):
    """The message names the weight, and both shapes."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/w_DF.npy", np.zeros((64, 511), "float32"))
        message = attempt(page.create_from_files, page.make_block, folder, page.mesh)
    assert message.startswith("ValueError: w_DF: float32(64, 511) in the file")


def test_a_file_of_another_type_raises(page):
    """A float64 file is not taken for a float32 weight."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/w_DF.npy", np.zeros((64, 512), "float64"))
        message = attempt(page.create_from_files, page.make_block, folder, page.mesh)
    assert message.startswith("ValueError: w_DF: float64(64, 512) in the file")


def test_ties_survive_reading(page):
    """A tied model that is read from one file is tied."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/embed.npy", np.asarray(page.on_one_device.embed))
        model = page.create_from_files(page.make_tied, folder, page.mesh)
    assert model.head is model.embed
    np.testing.assert_array_equal(model.embed, page.on_one_device.embed)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
