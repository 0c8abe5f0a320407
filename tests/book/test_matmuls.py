"""The page "Four sharded matmuls, and what each moves": the ways to finish a product, and their price."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from pages import compiled_for_cpu

PAGE = "matmuls"
P = jax.P


def matrices(page, lengths, a_spec, b_spec):
    """A[I, J] and B[J, K] in float32 on the page's mesh, and their product by NumPy."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype("float32") for shape in (lengths[:2], lengths[1:]))
    placed = [
        jax.device_put(x, jax.NamedSharding(page.mesh, spec))
        for x, spec in ((a, a_spec), (b, b_spec))
    ]
    return *placed, a.astype("float64") @ b


def sizes(a, b):
    """|A|, |B| and |C|: the bytes of the whole matrices, all devices' pieces together."""
    return a.nbytes, b.nbytes, 4 * a.shape[0] * b.shape[1]


def price(way, a, b):
    """The bytes that each device sends, and its share of the work."""
    program = jax.jit(way).lower(a, b).compile()
    sent = sum(move.wire_bytes for move in ms.collectives(program))
    return sent, program.cost_analysis()["flops"] / (2 * a.size * b.shape[1])


def by_all_to_alls(page, a, b):
    """Move X to J where it is not there yet, and finish as case 3 with a reduce-scatter."""
    return page.reduce_scatter_c(jax.reshard(a, P(None, "X")), jax.reshard(b, P("X", None)))


def lengths_of(page):
    return page.I, page.J, page.K


ROWS, COLUMNS, WHOLE = P("X", None), P(None, "X"), P(None, None)
# row of the table: where A and B are, the way, and its bytes by |A|, |B|, |C| and n
WAYS = {
    "case 2, all-gather A": (COLUMNS, WHOLE, "gather_a", lambda A, B, C, n: A * (n - 1) / n),
    "case 2, all-to-all A": (COLUMNS, WHOLE, "all_to_all_a", lambda A, B, C, n: A * (n - 1) / n**2),
    "case 2, slice B": (COLUMNS, WHOLE, "slice_b", lambda A, B, C, n: 2 * C * (n - 1) / n),
    "FSDP": (ROWS, ROWS, "gather_b", lambda A, B, C, n: B * (n - 1) / n),
    "not FSDP": (ROWS, ROWS, None, lambda A, B, C, n: A * (n - 1) / n**2 + C * (n - 1) / n),
    "case 3, sum": (COLUMNS, ROWS, "all_reduce_c", lambda A, B, C, n: 2 * C * (n - 1) / n),
    "case 3, scatter": (COLUMNS, ROWS, "reduce_scatter_c", lambda A, B, C, n: C * (n - 1) / n),
    "case 4, gather B": (ROWS, COLUMNS, "gather_b", lambda A, B, C, n: B * (n - 1) / n),
    "case 4, gather A": (ROWS, COLUMNS, "gather_a", lambda A, B, C, n: A * (n - 1) / n),
    "case 4, all-to-alls": (
        ROWS,
        COLUMNS,
        None,
        lambda A, B, C, n: (A + B) * (n - 1) / n**2 + C * (n - 1) / n,
    ),
}


def way_of(page, name):
    """The page's function of this name, or the all-to-alls that lead to case 3."""
    return getattr(page, name) if name else lambda a, b: by_all_to_alls(page, a, b)


@compiled_for_cpu
@pytest.mark.parametrize("name", WAYS)
def test_each_way_of_the_table_gives_the_product_for_the_bytes_of_its_formula(page, name):
    """Each row of the table sends what its formula says of the whole matrices, and its result is
    the product."""
    a_spec, b_spec, function, formula = WAYS[name]
    a, b, expected = matrices(page, lengths_of(page), a_spec, b_spec)
    way, n = way_of(page, function), page.n
    np.testing.assert_allclose(way(a, b), expected, rtol=1e-4, atol=1e-3)
    sent, share = price(way, a, b)
    assert sent == formula(*sizes(a, b), n)
    all_of_it = name == "case 2, all-gather A"  # both are whole when it multiplies
    assert share == pytest.approx(1 if all_of_it else 1 / n, abs=0.02)


# Case 4 has a third way


def case_4(page, lengths):
    """{way: bytes that each device sends} for a product of case 4."""
    a, b, _ = matrices(page, lengths, ROWS, COLUMNS)
    return {
        "gather A": price(page.gather_a, a, b)[0],
        "gather B": price(page.gather_b, a, b)[0],
        "all-to-alls": price(lambda a, b: by_all_to_alls(page, a, b), a, b)[0],
    }


@compiled_for_cpu
def test_with_the_pages_sizes_the_gather_of_a_sends_least(page):
    """Here the all-to-alls and the reduce-scatter send 135,168 bytes, more than the gather of A."""
    sent = case_4(page, lengths_of(page))
    assert sent["all-to-alls"] == 135_168
    assert min(sent, key=sent.get) == "gather A"


@compiled_for_cpu
def test_with_a_long_contraction_the_all_to_alls_send_least(page):
    """With I = K = 64 and J = 8,192 the third way sends 798,720 bytes, either gather 1,572,864."""
    sent = case_4(page, (64, 8192, 64))
    assert sent == {"gather A": 1_572_864, "gather B": 1_572_864, "all-to-alls": 798_720}


# The other matrix sharded too


@compiled_for_cpu
def test_case_2_with_both_sharded_by_columns_can_gather_a_or_move_x_in_b(page):
    """If the other matrix is sharded too, you can gather A, or move X from K to J in B and finish as
    case 3; either way each device does 1/n of the work."""
    a, b, expected = matrices(page, lengths_of(page), COLUMNS, COLUMNS)
    for way in (page.gather_a, lambda a, b: by_all_to_alls(page, a, b)):
        np.testing.assert_allclose(way(a, b), expected, rtol=1e-4, atol=1e-3)
        assert price(way, a, b)[1] == pytest.approx(1 / page.n, abs=0.02)
    kinds = ms.collectives(
        jax.jit(lambda a, b: by_all_to_alls(page, a, b)).lower(a, b).compile()
    ).kinds
    assert kinds == {"all-to-all", "reduce-scatter"}


def test_an_all_to_all_of_a_would_make_it_case_4(page):
    """An all-to-all of A would make it case 4, which Explicit mode refuses."""
    a, b, _ = matrices(page, lengths_of(page), COLUMNS, COLUMNS)
    with pytest.raises(Exception, match="illegally sharded"):
        jnp.dot(jax.reshard(a, ROWS), b)
