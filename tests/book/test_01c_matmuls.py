"""The page "Four sharded matmuls, and what each moves": the ways to finish a product, and their price."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic, type_of
from pages import check_exercise, compiled_for_cpu, exercises_of

PAGE = "01c-matmuls"
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


def lengths_of(page):
    return page.I, page.J, page.K


ROWS, COLUMNS, WHOLE = P("X", None), P(None, "X"), P(None, None)
# row of the table: where A and B are, the way, and its bytes by |A|, |B|, |C| and n
WAYS = {
    "case 2, all-gather A": (COLUMNS, WHOLE, "gather_a", lambda A, B, C, n: A * (n - 1) / n),
    "case 2, all-to-all A": (COLUMNS, WHOLE, "all_to_all_a", lambda A, B, C, n: A * (n - 1) / n**2),
    "case 2, slice B": (COLUMNS, WHOLE, "slice_b", lambda A, B, C, n: 2 * C * (n - 1) / n),
    "FSDP": (ROWS, ROWS, "gather_b", lambda A, B, C, n: B * (n - 1) / n),
    "case 3, sum": (COLUMNS, ROWS, "all_reduce_c", lambda A, B, C, n: 2 * C * (n - 1) / n),
    "case 3, scatter": (COLUMNS, ROWS, "reduce_scatter_c", lambda A, B, C, n: C * (n - 1) / n),
    "case 4, gather B": (ROWS, COLUMNS, "gather_b", lambda A, B, C, n: B * (n - 1) / n),
    "case 4, gather A": (ROWS, COLUMNS, "gather_a", lambda A, B, C, n: A * (n - 1) / n),
}


@compiled_for_cpu
@pytest.mark.parametrize("name", WAYS)
def test_each_way_of_the_table_gives_the_product_for_the_bytes_of_its_formula(page, name):
    """Each row of the table sends what its formula says of the whole matrices, and its result is
    the product."""
    a_spec, b_spec, function, formula = WAYS[name]
    a, b, expected = matrices(page, lengths_of(page), a_spec, b_spec)
    way, n = getattr(page, function), page.n
    np.testing.assert_allclose(way(a, b), expected, rtol=1e-4, atol=1e-3)
    sent, share = price(way, a, b)
    assert sent == formula(*sizes(a, b), n)
    all_of_it = name == "case 2, all-gather A"  # both are whole when it multiplies
    assert share == pytest.approx(1 if all_of_it else 1 / n, abs=0.02)


# Cases 1 to 4 on the page


def check(page, way, a, b, kinds, sent, work):
    """One way, against NumPy and against the formulas."""
    truth = page.a_host.astype("float64") @ page.b_host
    np.testing.assert_allclose(way(a, b), truth, rtol=1e-4, atol=1e-3)
    found = page.price(way, a, b)
    assert traffic(way, a, b, mesh=page.mesh).kinds == kinds
    assert found.sent == sent and abs(found.work - work) < 0.02


def bytes_of(page):
    """|A|, |B|, |C| times (n - 1) / n."""
    sizes = page.a_host.nbytes, page.b_host.nbytes, 4 * page.I * page.K
    assert sizes == (131_072, 393_216, 49_152)
    return [size * (page.n - 1) / page.n for size in sizes]


@compiled_for_cpu
def test_in_case_1_nothing_moves_and_each_device_does_a_quarter(page):
    """A in rows or B in columns: C is sharded alike, no bytes are sent."""
    a_whole_IJ = put(page.a_host, page.mesh, None, None)
    rows, columns = (page.a_rows_IJ, page.b_whole_JK), (a_whole_IJ, page.b_columns_JK)
    for arrays in (rows, columns):
        check(page, page.product, *arrays, set(), 0, 1 / 4)
    assert type_of(page.product, *rows) == "float32[64@X,192]"
    assert type_of(page.product, *columns) == "float32[64,192@X]"


@compiled_for_cpu
def test_in_case_2_the_all_to_all_sends_least_and_the_gather_makes_each_device_do_all(page):
    """98,304, 24,576 or 73,728 bytes; after the gather of A the work is 1."""
    A, _, C = bytes_of(page)
    case_2 = page.a_columns_IJ, page.b_whole_JK
    check(page, page.gather_a, *case_2, {"all-gather"}, A, 1)
    check(page, page.all_to_all_a, *case_2, {"all-to-all"}, A / 4, 1 / 4)
    check(page, page.slice_b, *case_2, {"all-reduce"}, 2 * C, 1 / 4)
    assert (A, A / 4, 2 * C) == (98_304, 24_576, 73_728)


@compiled_for_cpu
def test_case_2_as_it_is_takes_the_third_way(page):
    """a @ b is accepted, C is whole, and B is sliced."""
    case_2 = page.a_columns_IJ, page.b_whole_JK
    check(page, page.product, *case_2, {"all-reduce"}, 73_728, 1 / 4)


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_for_h100_and_tpu_case_2_as_it_is_takes_the_third_way_too(compiler):
    """Their stored programs are those of slice_b: an all-reduce of 73,728 bytes."""
    (move,) = stored_program("case-2-plain")[compiler]["moves"]
    assert (move["kind"], move["wire"]) == ("all-reduce", 73_728)


def test_case_2_leaves_c_in_rows_after_the_all_to_all_and_else_whole(page):
    """The types of the four results."""
    case_2 = page.a_columns_IJ, page.b_whole_JK
    assert type_of(page.all_to_all_a, *case_2) == "float32[64@X,192]"
    for way in (page.product, page.gather_a, page.slice_b):
        assert type_of(way, *case_2) == "float32[64,192]"


def devices_hold(array, mesh):
    """What each device of the row holds, in their order."""
    held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    return [held[device] for device in mesh.devices]


def test_four_partial_sums_add_up_to_c(page):
    """Each has the shape of C and is not C; the devices have the parts that NumPy split."""
    truth = page.a_host.astype("float64") @ page.b_host
    assert {term.shape for term in page.partial_sums} == {(page.I, page.K)}
    np.testing.assert_allclose(sum(page.partial_sums), truth, rtol=1e-4, atol=1e-3)
    assert len(page.partial_sums) == 4 and not np.allclose(page.partial_sums[0], truth, rtol=0.1)
    for parts, array in [(page.a_parts, page.a_columns_IJ), (page.b_parts, page.b_rows_JK)]:
        for part, held in zip(parts, devices_hold(array, page.mesh), strict=True):
            assert np.array_equal(part, held)


def test_case_3_as_it_is_raises(page):
    """Explicit mode wants to know how the sum is sharded."""
    raised = attempt(page.product, page.a_columns_IJ, page.b_rows_JK)
    assert raised.startswith("ShardingTypeError: Contracting dimensions are sharded")


@compiled_for_cpu
def test_in_case_3_the_reduce_scatter_sends_half_of_the_all_reduce(page):
    """73,728 or 36,864 bytes: only the result moves."""
    _, _, C = bytes_of(page)
    case_3 = page.a_columns_IJ, page.b_rows_JK
    check(page, page.all_reduce_c, *case_3, {"all-reduce"}, 2 * C, 1 / 4)
    check(page, page.reduce_scatter_c, *case_3, {"reduce-scatter"}, C, 1 / 4)
    assert type_of(page.all_reduce_c, *case_3) == "float32[64,192]"
    assert type_of(page.reduce_scatter_c, *case_3) == "float32[64@X,192]"
    assert (2 * C, C) == (73_728, 36_864)


@compiled_for_cpu
def test_for_cpu_rows_of_c_by_out_sharding_are_a_slice_of_the_whole_sum(page):
    """The program sums all of C, 73,728 bytes."""

    def rows_asked(a_IJ, b_JK):
        return jnp.dot(a_IJ, b_JK, out_sharding=P("X", None))

    case_3 = page.a_columns_IJ, page.b_rows_JK
    assert traffic(rows_asked, *case_3, mesh=page.mesh).kinds == {"all-reduce"}
    assert page.price(rows_asked, *case_3).sent == 73_728


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_for_h100_and_tpu_rows_of_c_by_out_sharding_are_a_reduce_scatter(compiler):
    """36,864 bytes, as by hand."""
    (move,) = stored_program("case-3-asked")[compiler]["moves"]
    assert (move["kind"], move["wire"]) == ("reduce-scatter", 36_864)


def test_the_gradient_of_a_weight_in_data_parallelism_is_case_3(page):
    """x and dy are both sharded along the batch, so that the product x^T dy raises."""
    x_BD = jax.device_put(np.ones((64, 32), "float32"), jax.NamedSharding(page.mesh, ROWS))
    raised = attempt(lambda x, dy: x.T @ dy, x_BD, x_BD)
    assert "Contracting dimensions are sharded" in raised


@compiled_for_cpu
def test_in_case_4_gathering_a_is_cheaper_than_gathering_b(page):
    """98,304 bytes and C in columns, or 294,912 and C in rows."""
    A, B, _ = bytes_of(page)
    case_4 = page.a_rows_IJ, page.b_columns_JK
    check(page, page.gather_b, *case_4, {"all-gather"}, B, 1 / 4)
    check(page, page.gather_a, *case_4, {"all-gather"}, A, 1 / 4)
    assert type_of(page.gather_b, *case_4) == "float32[64@X,192]"
    assert type_of(page.gather_a, *case_4) == "float32[64,192@X]"
    assert (B, A) == (294_912, 98_304)


def test_case_4_as_it_is_raises(page):
    """X cannot be on both dimensions of C; one block of sixteen could be computed."""
    raised = attempt(page.product, page.a_rows_IJ, page.b_columns_JK)
    assert "illegally sharded" in raised.replace("\n", " ")
    blocks = {(i, k) for i in range(4) for k in range(4) if i == k}  # rows i meet columns k
    assert len(blocks) / 4**2 == 1 / 4


@compiled_for_cpu
def test_chapter_1s_fsdp_gathers_the_weight(page):
    """A and B in rows: the product as it is gathers B, and C is in rows."""
    _, B, _ = bytes_of(page)
    fsdp = page.a_rows_IJ, page.b_rows_JK
    check(page, page.product, *fsdp, {"all-gather"}, B, 1 / 4)
    assert type_of(page.product, *fsdp) == "float32[64@X,192]"
    (move,) = traffic(page.product, *fsdp, mesh=page.mesh)
    assert move.shape == (page.J, page.K)


@compiled_for_cpu
def test_each_of_nine_products_is_in_one_of_the_four_cases(page):
    """Cases 3 and 4 raise, case 2 sends something, and only case 1 moves nothing."""
    lefts = put(page.a_host, page.mesh, None, None), page.a_rows_IJ, page.a_columns_IJ
    rights = page.b_whole_JK, page.b_rows_JK, page.b_columns_JK
    cases = [[1, 2, 1], [1, 2, 4], [2, 3, 2]]  # A whole, in rows, in columns; B alike
    for a, row in zip(lefts, cases, strict=True):
        for b, number in zip(rights, row, strict=True):
            if number in (3, 4):
                assert attempt(page.product, a, b).startswith("ShardingTypeError")
            else:
                assert (page.price(page.product, a, b).sent > 0) == (number == 2)


NAMES = "gather-a all-to-all-a slice-b".split()


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_h100_and_tpu_send_what_cpu_sends(compiler):
    """All functions of the page but the product as it is: as for CPU, to the byte."""
    names = [f"case-2-{name}" for name in NAMES]
    names += ["case-3-sum", "case-3-scatter", "case-4-gather-b", "case-4-gather-a"]
    for name in names:
        stored = stored_program(name)
        assert stored[compiler]["moves"] == stored["cpu"]["moves"], name


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)
