"""Deeper page to chapter 2, "Columns first, then rows": what it counts is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compared import sharded_as
from many_devices.compiled import stored_program
from many_devices.helpers import put, traffic
from pages import check_exercise, compiled_for_cpu, exercises_of
from stored_moves import stored_moves

PAGE = "02e-columns-rows"
P = jax.P


def expected(page):
    return np.tanh(page.x_host @ page.w_DF_host) @ page.w_FD_host


def pair(page, first, second):
    return put(page.w_DF_host, page.mesh, *first), put(page.w_FD_host, page.mesh, *second)


def test_columns_first_computes_what_numpy_does(page):
    """Columns, then rows is the MLP of these matrices, and y is sharded as x is."""
    y_BD = page.mlp(page.x_BD, *pair(page, page.columns, page.rows))
    np.testing.assert_allclose(y_BD, expected(page), atol=1e-5)
    assert y_BD.sharding.is_equivalent_to(page.x_BD.sharding, 2)


@compiled_for_cpu
def test_columns_first_needs_one_all_reduce_of_y(page):
    """It is along model, and has 2,048 bytes: the 8 x 64 numbers of one mesh row."""
    moved = traffic(page.mlp, page.x_BD, *pair(page, page.columns, page.rows), mesh=page.mesh)
    assert [(row.kind, row.axes, row.shape) for row in moved] == [
        ("all-reduce", ("model",), (8, 64))
    ]
    assert moved.total_payload_bytes == 8 * 64 * 4 == 2_048


@compiled_for_cpu
def test_the_sum_belongs_to_the_second_product(page):
    """The first product and the tanh move nothing, so the sum is that of the second."""

    def first_product(x_BD, w_DF):
        return jnp.tanh(x_BD @ w_DF)

    w_DF, _ = pair(page, page.columns, page.rows)
    assert not traffic(first_product, page.x_BD, w_DF, mesh=page.mesh)


def test_both_orders_compute_the_same_function(page):
    """Rows first is the same function, although tanh of a sum is not the sum of tanhs."""
    y_BD = page.mlp(page.x_BD, *pair(page, page.rows, page.columns))
    np.testing.assert_allclose(y_BD, expected(page), atol=1e-5)
    np.testing.assert_allclose(page.y_BD, expected(page), atol=1e-5)  # printed last
    assert not np.allclose(np.tanh(1.0) + np.tanh(2.0), np.tanh(3.0))


@compiled_for_cpu
def test_rows_first_sums_h_four_times_the_bytes(page):
    """Columns first sums the narrow y; rows first sums the wide h and leaves y in columns."""
    right, wrong = pair(page, page.columns, page.rows), pair(page, page.rows, page.columns)
    narrow = traffic(page.mlp, page.x_BD, *right, mesh=page.mesh)
    wide = traffic(page.mlp, page.x_BD, *wrong, mesh=page.mesh)
    assert [row.shape for row in narrow] == [(8, 64)] and [row.shape for row in wide] == [(8, 256)]
    assert wide.total_payload_bytes == 4 * narrow.total_payload_bytes == 8192
    assert page.moved.total_payload_bytes == wide.total_payload_bytes  # printed last
    assert sharded_as(page.mlp(page.x_BD, *wrong), page.mesh, "data", "model")
    assert page.mlp(page.x_BD, *right).sharding.is_equivalent_to(page.x_BD.sharding, 2)


def test_the_payloads_are_those_for_h100_and_tpu(page):
    """Compiled for H100 and TPU v5e, both orders have the payloads that the page prints."""
    for compiler in ("gpu", "tpu", "cpu"):
        first = stored_moves("variables-columns-rows", compiler, "kind", "axes", "payload")
        second = stored_moves("variables-rows-columns", compiler, "kind", "axes", "payload")
        assert first == [("all-reduce", ["model"], 2_048)]
        assert second == [("all-reduce", ["model"], page.moved.total_payload_bytes)]


@compiled_for_cpu
def test_with_more_rows_the_weight_moves_instead(page):
    """With 512 rows in the wrong order, the compilers gather the weight."""
    many_BD = put(np.zeros((512, 64), "float32"), page.mesh, "data", None)
    found = traffic(page.mlp, many_BD, *pair(page, page.rows, page.columns), mesh=page.mesh)
    assert page.many.kinds == found.kinds == {"all-gather"}
    assert [row.shape for row in found] == [(64, 256)]  # w_DF; the sum has (256, 256)
    for compiler in ("gpu", "tpu"):
        kinds = {row["kind"] for row in stored_program("variables-many-rows")[compiler]["moves"]}
        assert kinds == {"all-gather"}


@compiled_for_cpu
def test_with_more_rows_the_wrong_order_sends_less_and_computes_more(page):
    """With 512 rows, at most half of the bytes, and four times the work of the first product."""
    many_BD = put(np.zeros((512, 64), "float32"), page.mesh, "data", None)
    right, wrong = pair(page, page.columns, page.rows), pair(page, page.rows, page.columns)
    moved = traffic(page.mlp, many_BD, *right, mesh=page.mesh)
    assert moved.kinds == {"all-reduce"}
    sent = sum(row.wire_bytes for row in moved)
    assert sent == 2 * sum(row.wire_bytes for row in page.many) == 98_304
    for compiler in ("gpu", "tpu"):
        moves = stored_program("variables-many-rows")[compiler]["moves"]
        assert sum(row["wire"] for row in moves) <= sent / 2
    work = [
        jax.jit(page.mlp).lower(many_BD, *weights).compile().cost_analysis()["flops"]
        for weights in (right, wrong)
    ]
    first = 2 * 256 * 64 * 64  # rows of a device, D, and its quarter of F
    assert abs(work[1] - work[0] - 3 * first) < 0.02 * first


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
