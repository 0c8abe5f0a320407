"""Chapter 7, "Explicit sharding: the answer is in the type"."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from many_devices.helpers import attempt, put, traffic
from pages import check_exercise, compiled_for_cpu, exercises_of
from stored_moves import stored_moves

PAGE = "07-explicit"
P = jax.P
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def like(shape, *spec):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(MESH, P(*spec)))


def spec_of(function, *inputs):
    with jax.set_mesh(None):  # the page leaves its own mesh set
        return jax.eval_shape(function, *inputs).sharding.spec


def sent(collectives):
    """Bytes that one device sends in these collectives."""
    return sum(collective.wire_bytes for collective in collectives)


def message(function, *inputs):
    """What JAX raises, on one line."""
    return " ".join(attempt(function, *inputs).split())


# A sharding is part of the type


def test_the_type_of_an_array_is_its_sharding(page):
    """What jax.typeof shows is how the array is sharded, by rows, by columns and by both."""
    for array, spec in [
        (page.x_BD, P("data", None)),
        (page.w_DF, P(None, "model")),
        (page.h_BF, P("data", "model")),
    ]:
        assert jax.typeof(array).sharding.spec == spec == array.sharding.spec
        assert array.sharding.is_equivalent_to(jax.NamedSharding(page.mesh, spec), 2)


def test_a_device_holds_four_of_eight_rows_and_every_column(page):
    """8@data on an axis of two devices is four rows on each; a dimension without @ is whole."""
    assert str(jax.typeof(page.x_BD)) == "float32[8@data,16]"
    assert page.x_BD.addressable_shards[0].data.shape == (4, 16)
    assert page.h_BF.addressable_shards[0].data.shape == (4, 8)


def test_on_an_auto_mesh_the_type_does_not_show_the_sharding(page):
    """The same batch, sharded in the same way on an Auto mesh, has the type float32[8,16]."""
    auto_mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    on_auto = put(page.x_BD, auto_mesh, "data", None)
    assert on_auto.sharding.is_equivalent_to(page.x_BD.sharding, 2)
    assert str(jax.typeof(on_auto)) == "float32[8,16]"


def test_explicit_axes_are_the_default_of_make_mesh(page):
    """jax.make_mesh makes Explicit axes."""
    if jax.__version_info__ >= (0, 9):
        assert jax.make_mesh((2, 4), ("data", "model")).axis_types == page.mesh.axis_types


def test_a_type_is_known_while_tracing(page):
    """type_of, and jax.typeof inside a jitted function, give the type of the product."""
    assert page.type_of(jnp.dot, page.x_BD, page.w_DF) == "float32[8@data,32@model]"
    seen = []
    jax.jit(lambda x_BD: seen.append(str(jax.typeof(x_BD @ page.w_DF))))(page.x_BD)
    assert seen == ["float32[8@data,32@model]"]


def test_the_type_of_a_product_on_devices_that_are_not_here(page):
    """An abstract mesh of 64 x 16 devices gives the type of a product on 1,024 of them."""
    cluster = AbstractMesh((64, 16), ("data", "model"), axis_types=page.mesh.axis_types)

    def wide(columns, *spec):
        sharding = jax.NamedSharding(cluster, P(*spec))
        return jax.ShapeDtypeStruct((4096, columns), "float32", sharding=sharding)

    with jax.set_mesh(None):
        found = page.type_of(jnp.dot, wide(4096, "data", None), wide(16384, None, "model"))
    assert found == "float32[4096@data,16384@model]"
    assert cluster.size == 1024 > jax.device_count()


# ShardingTypeError


def test_a_product_over_a_dimension_that_is_sharded_in_both_raises(page):
    """The row-parallel product is ambiguous."""
    said = message(jnp.dot, page.h_BF, page.w_FD)
    assert said.startswith("ShardingTypeError: Contracting dimensions are sharded")


def test_out_sharding_or_reshard_gives_the_same_type_and_the_same_values(page):
    """Both ways to fix it return rows along data, and the product."""
    for answer in (page.with_out_sharding, page.with_reshard):
        assert page.type_of(answer, page.h_BF, page.w_FD) == "float32[8@data,16]"
        found = jax.jit(answer)(page.h_BF, page.w_FD)
        np.testing.assert_allclose(found, np.full((8, 16), 512.0))


@compiled_for_cpu
def test_one_way_sends_a_fifth_of_what_the_other_sends(page):
    """Compiled for CPU: an all-reduce of the rows of the result, or all-gathers of both inputs."""
    sums = traffic(page.with_out_sharding, page.h_BF, page.w_FD, mesh=page.mesh)
    gathers = traffic(page.with_reshard, page.h_BF, page.w_FD, mesh=page.mesh)
    of_result = page.h_BF.shape[0] * page.w_FD.shape[1] * 4 // page.mesh.shape["data"]
    of_rows = page.h_BF.nbytes // page.mesh.shape["data"]  # of one row of the mesh
    assert sums.by("kind", "axes").bytes("all-reduce", ("model",)) == of_result
    moved = gathers.by("kind", "axes").bytes("all-gather", ("model",))
    assert moved == of_rows + page.w_FD.nbytes
    assert sums.kinds == {"all-reduce"} and gathers.kinds == {"all-gather"}
    n = page.mesh.shape["model"]
    assert sent(sums) == 2 * of_result * (n - 1) // n == 384
    assert sent(gathers) == moved * (n - 1) // n == 1920 == 5 * sent(sums)
    assert "384 bytes" in page.sent_by(page.with_out_sharding, page.h_BF, page.w_FD)
    assert "1,920 bytes" in page.sent_by(page.with_reshard, page.h_BF, page.w_FD)


def test_h100_moves_what_cpu_moves_and_tpu_gathers_in_bfloat16():
    """The stored programs: 384 or 1,920 bytes for H100; the TPU gathers half of the bytes."""
    for compiler in ("cpu", "gpu", "tpu"):
        assert stored_moves("typed-result", compiler, "kind", "dtype", "wire") == [
            ("all-reduce", "float32", 384)
        ]
    for compiler, dtype, size in [("gpu", "float32", 1920), ("tpu", "bfloat16", 960)]:
        assert stored_moves("typed-inputs", compiler, "kind", "dtype", "wire") == [
            ("all-gather", dtype, size)
        ]


# The rules


def test_the_rules_of_the_table_hold(page):
    """Kept, combined, reduced, contracted, sliced and split dimensions have the types that it says."""
    x, h = page.x_BD, page.h_BF
    c = put(np.ones((8, 16), "float32"), page.mesh, None, "model")
    assert str(jax.typeof(x + c)) == "float32[8@data,16@model]"
    for function, inputs, expected in [
        (jnp.sin, (h,), "[8@data,32@model]"),
        (jnp.transpose, (h,), "[32@model,8@data]"),
        (jnp.dot, (x, page.w_DF), "[8@data,32@model]"),  # each kept in one operand only
        (jnp.add, (x, c), "[8@data,16@model]"),
        (jnp.multiply, (x, c), "[8@data,16@model]"),
        (jnp.add, (x, put(np.ones((8, 16), "float32"), page.mesh)), "[8@data,16]"),
        (jnp.add, (h, page.b_F), "[8@data,32@model]"),
        (jnp.add, (h, jnp.ones(32)), "[8@data,32@model]"),
        (jax.nn.softmax, (h,), "[8@data,32@model]"),
        (lambda h: h.sum(axis=1), (h,), "[8@data]"),
        (lambda h: h.max(axis=0), (h,), "[32@model]"),
        (lambda h: h.mean(axis=1), (h,), "[8@data]"),
        (jnp.dot, (c, put(np.ones((16, 32), "float32"), page.mesh)), "[8,32]"),  # by one operand
        (lambda x: x[2:4], (x,), "[2@data,16]"),
        (lambda h: h.reshape(8, 4, 8), (h,), "[8@data,4@model,8]"),
        (lambda x: x.reshape(4, 2, 16), (x,), "[4@data,2,16]"),
        (lambda x: x.reshape(2, 4, 16), (x,), "[2@data,4,16]"),
        (lambda h: h.reshape(8, 1, 32), (h,), "[8@data,1,32@model]"),  # the first part above 1
        (lambda h: h.reshape(8, 1, 4, 8), (h,), "[8@data,1,4@model,8]"),
    ]:
        assert page.type_of(function, *inputs) == "float32" + expected
    assert page.type_of(jnp.greater, x, c) == "bool[8@data,16@model]"


def test_a_dimension_that_a_product_keeps_from_one_operand_keeps_its_sharding():
    """Rows of x and columns of w keep their axes, and raise only if both have the same one."""
    axes = (None, "data", "model")
    for rows, columns in itertools.product(axes, repeat=2):
        pair = like((8, 16), rows, None), like((16, 32), None, columns)
        if rows == columns is not None:
            assert "illegally sharded result" in message(spec_of, jnp.dot, *pair)
        else:
            assert spec_of(jnp.dot, *pair) == P(rows, columns)


def test_a_part_that_the_devices_do_not_divide_raises(page):
    """A reshape to two heads for four devices raises."""
    two_heads = message(lambda q: q.reshape(8, 2, 32), page.queries)
    assert "reshape is not supported" in two_heads


def test_the_type_of_the_heads_is_what_the_program_does(page):
    """Four heads on four devices: a device holds one of them."""
    assert str(jax.typeof(page.queries)) == "float32[8@data,64@model]"
    assert str(jax.typeof(page.heads_BHC)) == "float32[8@data,4@model,16]"
    assert page.heads_BHC.addressable_shards[0].data.shape == (4, 1, 16)


def test_two_different_shardings_do_not_add_up(page):
    """Operands that are sharded along different axes raise, until one is resharded."""
    along_model = put(np.ones((8, 16), "float32"), page.mesh, "model", None)
    said = message(jnp.add, page.x_BD, along_model)
    assert said.startswith("ShardingTypeError: add got incompatible shardings")
    total = page.x_BD + jax.reshard(along_model, P("data", None))
    assert str(jax.typeof(total)) == "float32[8@data,16]"
    np.testing.assert_array_equal(total, np.full((8, 16), 2.0))


def test_no_axis_may_appear_twice_in_a_type(page):
    """A product, and a sum, that would have an axis twice raise; out_sharding= fixes the product."""
    said = message(jnp.dot, page.fsdp_h_BF, page.fsdp_w_FD)
    assert "illegally sharded result: f32[8@data,16@data]" in said
    v_D = put(np.ones(16, "float32"), page.mesh, "data")
    assert "illegally sharded" in message(jnp.add, page.x_BD, v_D)
    assert str(jax.typeof(page.y_BD)) == "float32[8@data,16]"
    np.testing.assert_array_equal(page.y_BD, np.full((8, 16), 32.0))


def test_the_first_matrix_of_an_mlp_under_fsdp_raises_no_error(page):
    """Its D is sharded along data, but in the batch D is whole, and the product sums over D."""
    fsdp_w_DF = put(np.ones((16, 32), "float32"), page.mesh, "data", None)
    assert page.type_of(jnp.dot, page.x_BD, fsdp_w_DF) == "float32[8@data,32]"


def test_about_the_sum_jax_asks_only_if_it_is_sharded_in_both_operands():
    """A product whose summed dimension is sharded in one operand is accepted, in both it raises."""
    whole, by_sum = like((16, 32)), like((16, 32), "model")
    assert spec_of(jnp.dot, like((8, 16), None, "model"), whole) == P(None, None)
    assert spec_of(jnp.dot, like((8, 16)), by_sum) == P(None, None)
    with pytest.raises(Exception, match="Contracting dimensions are sharded"):
        spec_of(jnp.dot, like((8, 16), None, "model"), by_sum)


@pytest.mark.parametrize("summed", [None, "model"])
def test_a_product_also_raises_where_an_axis_would_stand_twice(summed):
    """A product raises if an axis would stand twice in the result, whatever the sum."""
    x, v = like((8, 16), "data", None), like((16, 32), summed, "data")
    with pytest.raises(Exception, match="illegally sharded result"):
        spec_of(jnp.dot, x, v)


def test_three_operations_one_after_the_other(page):
    """The answer to the question: the bias is 32@model, and what the sum leaves is 16@model,2."""
    assert str(jax.typeof(page.b_F)) == "float32[32@model]"
    assert str(jax.typeof(page.sum_HC)) == "float32[16@model,2]"


# Legal does not mean free


@compiled_for_cpu
def test_a_slice_of_two_rows_sends_one(page):
    """Row 3, 64 bytes, crosses along data, as compiled for CPU."""
    assert str(jax.typeof(jax.jit(page.two_rows)(page.x_BD))) == "float32[2@data,16]"
    moves = traffic(page.two_rows, page.x_BD, mesh=page.mesh)
    assert set(moves.by("kind", "axes")) == {("collective-permute", ("data",))}
    row = page.x_BD.nbytes // page.x_BD.shape[0]
    assert sent(moves) == row == 64
    assert page.sent_by(page.two_rows, page.x_BD) == "{'collective-permute'}, 64 bytes"


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_send_the_same(compiler):
    """The stored programs of the slice send 64 bytes with each compiler."""
    moves = stored_moves("accepted-two-rows", compiler, "wire")
    assert sum(sent for (sent,) in moves) == 64


@compiled_for_cpu
def test_one_assertion_catches_it(page):
    """`assert not traffic(…)` fails for two_rows, and passes for a function that moves nothing."""
    assert traffic(page.two_rows, page.x_BD)
    assert not traffic(jnp.sin, page.x_BD)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
