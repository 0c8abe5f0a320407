"""The page "Slices, lookups and joins in Explicit mode"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from many_devices.helpers import attempt, put, traffic, type_of
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "07f-explicit-slices"
P = jax.P


def message(function, *inputs):
    """What JAX raises, on one line."""
    return " ".join(attempt(function, *inputs).split())


def on(page, shape, *spec):
    return put(np.ones(shape, "float32"), page.mesh, *spec)


# More rules


def test_the_table_of_more_rules_holds(page):
    """Slices, joins, choices, new, merged and split dimensions have the types that it says."""
    x, h = on(page, (8, 16), "data", None), on(page, (8, 32), "data", "model")
    k = on(page, (8, 16), ("data", "model"), None)
    for function, inputs, expected in [
        (lambda x: x[2:4], (x,), "[2@data,16]"),
        (lambda x: jnp.concatenate([x, x]), (x,), "[16@data,16]"),
        (lambda x: jnp.where(x > 0, x, 2 * x), (x,), "[8@data,16]"),
        (lambda x: x[None], (x,), "[1,8@data,16]"),
        (lambda x: x.reshape(1, 8, 16), (x,), "[1,8@data,16]"),  # the second part
        (lambda h: h.reshape(256), (h,), "[256@(data,model)]"),
        (lambda x: x.reshape(128), (x,), "[128@data]"),
        (lambda x: x[None].reshape(8, 16), (x,), "[8@data,16]"),  # the first has size 1
        (lambda k: k.reshape(2, 4, 16), (k,), "[2@data,4@model,16]"),  # both parts
        (lambda x: jnp.sort(x, axis=1), (x,), "[8@data,16]"),
        (jnp.concatenate, ([h, h],), "[16@data,32@model]"),
    ]:
        assert type_of(function, *inputs) == "float32" + expected


def test_a_slice_raises_outside_of_jit_and_where_the_devices_do_not_divide_it(page):
    """Also if a jitted function closes over x."""
    x = on(page, (8, 16), "data", None)
    assert "slicing on sharded dims where out dim (3)" in message(jax.jit(lambda x: x[:3]), x)
    assert "at[...].get" in message(lambda: x[2:4])
    assert "at[...].get" in message(jax.jit(lambda: x[2:4]))


def test_joins_and_choices_raise_if_they_are_not_sharded_alike(page):
    """Even if one operand is whole."""
    x, whole = on(page, (8, 16), "data", None), on(page, (8, 16), None, None)
    c = on(page, (8, 16), None, "model")
    for other in (whole, c):
        said = message(jnp.concatenate, [x, other])
        assert said.startswith("ShardingTypeError: All operands should have the same sharding")
    assert "select cases" in message(jnp.where, x > 0, x, whole)
    assert "select `which`" in message(jnp.where, whole > 0, x, x)
    assert type_of(lambda x: jnp.where(x > 0, x, 0), x) == "float32[8@data,16]"  # a number
    v_X, v_Y, v = (on(page, (64,), axis) for axis in ("data", "model", None))
    for other in (v_Y, v):
        assert "ShardingTypeError" in message(jnp.concatenate, [v_X, other])


def test_other_reshapes_raise(page):
    """Merging where only the second is sharded, and a reshape that neither splits nor merges."""
    x, c = on(page, (8, 16), "data", None), on(page, (8, 16), None, "model")
    assert "reshape is not supported" in message(lambda c: c.reshape(128), c)
    assert "reshape is not" in message(jax.jit(lambda x: x.reshape(16, 8)), x)


def test_a_sort_raises_along_a_sharded_dimension_only(page):
    """Along the whole dimension of a sharded matrix it is accepted."""
    assert "sorting dimension" in message(jnp.sort, page.x_BD)
    assert type_of(jnp.sort, page.rows_BD) == "float32[16@data,64]"


def test_a_lookup_raises_until_it_says_its_sharding(page):
    """With .at[...].get(out_sharding=) it has that type, and the rows that were asked for."""
    said = message(jax.eval_shape, lambda t, i: t[i], page.table_VD, page.ids_B)
    assert said.startswith("ShardingTypeError: Use `.at[...].get(out_sharding=)`")
    assert type_of(page.look_up, page.table_VD, page.ids_B) == "float32[8@data,16@model]"
    numbers = np.arange(1024, dtype="float32").reshape(64, 16)
    table = put(numbers, page.mesh, None, "model")
    found = jax.jit(page.look_up)(table, page.ids_B)
    np.testing.assert_array_equal(found, numbers[np.asarray(page.ids_B)])


def test_one_row_raises_until_the_rows_are_whole(page):
    """Two devices do not divide one row."""
    said = message(jax.eval_shape, lambda x: x[0], page.rows_BD)
    assert "slicing on sharded dims where out dim (1)" in said
    assert type_of(page.first_row, page.rows_BD) == "float32[64]"
    np.testing.assert_array_equal(jax.jit(page.first_row)(page.rows_BD), page.x_host[0])


def test_reshard_fixes_a_slice_a_merge_and_a_join(page):
    """What we write instead has the values that the line has on one device."""
    host = np.arange(128, dtype="float32").reshape(8, 16)
    x, c = put(host, page.mesh, "data", None), put(host, page.mesh, None, "model")
    for instead, inputs, expected, values in [
        (lambda x: jax.reshard(x, P())[:3], (x,), "[3,16]", host[:3]),
        (
            lambda c: jnp.reshape(c, 128, out_sharding=P("model")),
            (c,),
            "[128@model]",
            host.reshape(128),
        ),
        (
            lambda x, c: jnp.concatenate([x, jax.reshard(c, P("data", None))]),
            (x, c),
            "[16@data,16]",
            np.concatenate([host, host]),
        ),
    ]:
        assert type_of(instead, *inputs) == "float32" + expected
        np.testing.assert_allclose(jax.jit(instead)(*inputs), values, rtol=1e-6)


def test_the_types_of_the_other_operations(page):
    """tanh and a transpose keep the sharding, a sum and an argmax are whole along what they reduce."""
    for function, expected in [
        (jnp.tanh, "float32[16@data,64@model]"),
        (jnp.transpose, "float32[64@model,16@data]"),
        (jnp.sum, "float32[]"),
        (page.largest_feature, "int32[16@data]"),
        (page.two_batches, "float32[32@data,64@model]"),
        (lambda x: jnp.max(x, axis=0), "float32[64@model]"),
    ]:
        assert type_of(function, page.x_BD) == expected


@compiled_for_cpu
def test_which_of_them_communicate(page):
    """Compiled for CPU: a sum, an argmax and a join move bytes, tanh and a transpose do not."""
    for function, moves in [
        (jnp.tanh, False),
        (jnp.transpose, False),
        (jnp.sum, True),
        (page.largest_feature, True),
        (page.two_batches, True),
    ]:
        assert bool(traffic(function, page.x_BD, mesh=page.mesh)) == moves


def test_an_index_into_a_sharded_dimension_raises(page):
    """It drops its dimension if that is whole, and raises if it is sharded, under jit as well."""
    columns = on(page, (8, 16), None, "model")
    assert type_of(lambda c: c[0], columns) == "float32[16@model]"
    assert "ShardingTypeError" in message(jax.jit(lambda h: h[0]), page.x_BD)


# Forbid communication while tracing

with_the_guard = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX before 0.12")
FORBIDDEN = "ForbiddenCollectiveError: Collective across axis 'model' is forbidden"
LOSES_MODEL = {
    "sum": lambda x, w: x.sum(1),
    "argmax": lambda x, w: x.argmax(1),
    "product": lambda x, w: jnp.dot(x, w, out_sharding=P("data", None)),
    "reshard": lambda x, w: jax.reshard(x, P("data", None)),
    "lookup": lambda x, w: w.at[np.arange(8)].get(out_sharding=P("data", None)),
}
KEEPS_MODEL = {
    "slice": (lambda x: x[:, :32], {"collective-permute"}),
    "join": (lambda x: jnp.concatenate([x, x], 1), {"all-to-all"}),
    "merge": (lambda x: x.reshape(1024), {"all-to-all"}),
    "tanh": (lambda x: jnp.tanh(x), set()),
}


@with_the_guard
@pytest.mark.parametrize("name", LOSES_MODEL)
def test_no_collectives_raises_where_a_result_loses_the_axis(page, name):
    """A sum, an argmax, a product over a sharded dimension, a reshard to whole and a lookup raise."""
    w = on(page, (64, 32), "model", None)

    def guarded(x, w):
        with jax.sharding.no_collectives({"model"}):
            return LOSES_MODEL[name](x, w)

    type_of(LOSES_MODEL[name], page.x_BD, w)
    assert message(jax.eval_shape, guarded, page.x_BD, w).startswith(FORBIDDEN)


@with_the_guard
@compiled_for_cpu
def test_no_collectives_raises_for_a_lookup_that_sends_nothing(page):
    """The page's look_up keeps model, and communicates nothing along it."""

    def guarded(table_VD, ids_B):
        with jax.sharding.no_collectives({"model"}):
            return page.look_up(table_VD, ids_B)

    assert not traffic(page.look_up, page.table_VD, page.ids_B, mesh=page.mesh)
    assert message(jax.eval_shape, guarded, page.table_VD, page.ids_B).startswith(FORBIDDEN)


@with_the_guard
def test_in_manual_code_no_collectives_raises_for_pieces_that_only_move(page):
    """A ppermute and an all-to-all keep the sharding, and raise."""
    along = [(device, (device + 1) % 4) for device in range(4)]
    for moved in (
        lambda block: jax.lax.ppermute(block, "model", along),
        lambda block: jax.lax.all_to_all(block, "model", 0, 0, tiled=True),
    ):
        spec = P("data", "model")
        by_hand = jax.shard_map(moved, in_specs=spec, out_specs=spec)

        def guarded(x, by_hand=by_hand):
            with jax.sharding.no_collectives({"model"}):
                return by_hand(x)

        assert type_of(by_hand, page.x_BD) == "float32[16@data,64@model]"
        assert message(jax.eval_shape, guarded, page.x_BD).startswith(FORBIDDEN)


@with_the_guard
@compiled_for_cpu
@pytest.mark.parametrize("name", KEEPS_MODEL)
def test_no_collectives_does_not_see_pieces_that_move(page, name):
    """A slice, a join and a merge along the axis pass, and communicate, as compiled for CPU."""
    function, kinds = KEEPS_MODEL[name]

    def guarded(x):
        with jax.sharding.no_collectives({"model"}):
            return function(x)

    assert traffic(guarded, page.x_BD, mesh=page.mesh).kinds == kinds


@with_the_guard
def test_no_collectives_along_another_axis_says_nothing(page):
    """Only the axes that it names are forbidden."""

    def guarded(x):
        with jax.sharding.no_collectives({"data"}):
            return x.argmax(1)

    assert type_of(guarded, page.x_BD) == "int32[16@data]"


@with_the_guard
def test_in_manual_code_no_collectives_raises_and_in_auto_mode_it_is_silent(page):
    """A psum inside shard_map raises; on Auto axes a sum passes, and is an all-reduce."""
    auto = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def guarded(x):
        with jax.sharding.no_collectives({"model"}):
            return x.sum(1)

    def by_hand(x_block):
        with jax.sharding.no_collectives({"model"}):
            return jax.lax.psum(x_block.sum(1), "model")

    with jax.set_mesh(auto):
        x = put(page.x_host, auto, "data", "model")
        assert "all-reduce" in traffic(guarded, x, mesh=auto).kinds
        mapped = jax.shard_map(by_hand, in_specs=P("data", "model"), out_specs=P("data"))
        assert message(jax.eval_shape, mapped, x).startswith("ForbiddenCollectiveError")


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
