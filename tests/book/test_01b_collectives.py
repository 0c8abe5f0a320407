"""The page "Five collectives on a ring of four": what each sends, and its gradient."""

import jax
import numpy as np
import pytest

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import traffic
from pages import check_exercise, compiled_for_cpu, exercises_of, source_of

PAGE = "01b-collectives"
P = jax.P
TEXT = source_of(PAGE).read_text("utf-8")
TABLE = np.arange(1, 17).reshape(4, 4)
S = 131_072  # bytes of the whole array


def moves_of(function, *inputs):
    return list(ms.collectives(jax.jit(function).lower(*inputs).compile()))


def size_of_result(result):
    """S: the bytes of the whole array that results, with copies counted once."""
    held = {str(shard.index): shard.data.nbytes for shard in result.addressable_shards}
    return sum(held.values())


# The five tables


def devices_hold(array, mesh):
    """What each device of the row holds, in their order."""
    held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    return [held[device] for device in mesh.devices]


def test_a_row_of_the_table_is_a_device(page):
    """Device i has row i of 1, 2, …, 16."""
    rows = devices_hold(page.table, page.mesh)
    assert page.n == 4 and all(np.array_equal(row, [TABLE[i]]) for i, row in enumerate(rows))


def test_a_reduce_scatter_leaves_each_device_one_piece_of_the_sum(page):
    """Device 0 has 28 = 1 + 5 + 9 + 13, and the others 32, 36 and 40."""
    found = [x.item() for x in devices_hold(page.sums, page.mesh)]
    assert found == list(TABLE.sum(axis=0)) == [28, 32, 36, 40]


def test_an_all_gather_gives_every_device_all_pieces(page):
    """Each of four rows of the result is the whole sum."""
    found = page.all_gather(page.sums)
    assert np.array_equal(found, np.tile(TABLE.sum(axis=0), (4, 1)))


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(page):
    """It gives every device the sum, as its two halves do one after the other."""
    found = page.all_reduce(page.table)
    assert np.array_equal(found, page.all_gather(page.reduce_scatter(page.table)))
    assert np.array_equal(found, np.tile(TABLE.sum(axis=0), (4, 1)))


def test_an_all_to_all_moves_the_sharding_to_the_columns(page):
    """Device i has column i afterwards."""
    assert np.array_equal(page.all_to_all(page.table), TABLE.T)


def test_a_permute_sends_each_row_to_the_next_device(page):
    """Every row moves one device on, and the row of device 3 to device 0."""
    assert np.array_equal(page.permute(page.table), np.roll(TABLE, 1, axis=0))


# What each device sends, for a whole array of S bytes on n devices


@compiled_for_cpu
@pytest.mark.parametrize(
    "name, of_the_result, formula",
    [
        ("reduce_scatter", 1, lambda S, n: S * (n - 1) / n),
        ("all_gather", "a copy on each", lambda S, n: S * (n - 1) / n),
        ("all_reduce", "a copy on each", lambda S, n: 2 * S * (n - 1) / n),
        ("all_to_all", 1, lambda S, n: (S / n) * (n - 1) / n),
        ("permute", 1, lambda S, n: S / n),
    ],
)
def test_each_collective_sends_what_its_formula_says_of_the_whole_array(
    page, name, of_the_result, formula
):
    """S is the size of the whole array; all-gather and reduce-scatter send S(n-1)/n, an all-reduce
    2S(n-1)/n, an all-to-all (S/n)(n-1)/n and a collective-permute S/n."""
    function, n = getattr(page, name), page.n
    x = page.pieces if name in ("all_gather", "all_to_all", "permute") else page.terms
    result = jax.jit(function)(x)
    # where every device gets a copy, out_specs=P("X") stacks n of them
    S = size_of_result(result) / (n if of_the_result == "a copy on each" else 1)
    (move,) = moves_of(function, x)
    assert move.wire_bytes == formula(S, n)


def test_meshscope_counts_by_the_whole_array_too(page):
    """The payload of an all-gather, a reduce-scatter's result times n and an all-reduce's are S."""
    x = {"all_gather": page.pieces, "reduce_scatter": page.terms, "all_reduce": page.terms}
    for name, value in x.items():
        (move,) = moves_of(getattr(page, name), value)
        assert move.payload_bytes == 131_072, name


@compiled_for_cpu
def test_the_reduce_scatter_of_the_small_table_sends_12_bytes(page):
    """Three quarters of a row of 16 bytes."""
    (move,) = traffic(page.reduce_scatter, page.table, mesh=page.mesh)
    assert (move.payload_bytes, move.wire_bytes) == (16, 12)


def kinds_and_bytes(page):
    found = {}
    for function, x in page.inputs.items():
        (move,) = traffic(function, x, mesh=page.mesh)
        found[move.kind] = move.wire_bytes
        assert move.axes == ("X",)
    return found


@compiled_for_cpu
def test_for_cpu_the_five_stay_what_they_are_and_send_what_the_table_says(page):
    """98,304 and 98,304, 196,608, 24,576 and 32,768 bytes: no kind is replaced by another."""
    once = S * 3 / 4
    assert kinds_and_bytes(page) == {
        "reduce-scatter": once,
        "all-gather": once,
        "all-reduce": 2 * once,
        "all-to-all": once / 4,
        "collective-permute": S / 4,
    }


@pytest.mark.parametrize("column, compiler", [("H100", "gpu"), ("TPU v5e", "tpu"), ("CPU", "cpu")])
def test_the_table_says_what_three_compilers_make_of_the_five(column, compiler):
    """For TPU v5e the reduce-scatter is an all-reduce; all else is as the formula says."""
    lines = TEXT.splitlines()
    start = lines.index("| | by formula | H100 | TPU v5e | CPU |")
    head = [cell.strip() for cell in lines[start].strip("|").split("|")]
    for line in lines[start + 2 : start + 7]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row = dict(zip(head, cells, strict=True))
        name = "five-" + cells[0].replace("collective-", "")
        (move,) = stored_program(name)[compiler]["moves"]
        assert row[column] == f"{move['wire']:,}"
        replaced = (cells[0], compiler) == ("reduce-scatter", "tpu")
        assert move["kind"] == ("all-reduce" if replaced else cells[0])
        assert (row[column] == row["by formula"]) != replaced


def test_what_an_all_to_all_passes_on_doubles_what_a_device_sends():
    """On a one-way ring of four, n - 1, n - 2, … pieces pass: 6/16 S, twice its own 3/16 S."""
    passed = sum(left * S / 4 / 4 for left in (3, 2, 1))
    assert passed == 49_152 == 6 / 16 * S == 2 * (3 / 16 * S)


# Gradients


def backward(page, function, x):
    """The communication of the transpose of a linear function of x."""
    y = jax.eval_shape(function, x)
    return traffic(lambda y: jax.linear_transpose(function, x)(y), y, mesh=page.mesh)


@compiled_for_cpu
@pytest.mark.parametrize(
    "name, kind",
    [
        ("reduce_scatter", "all-gather"),
        ("all_gather", "reduce-scatter"),
        ("all_to_all", "all-to-all"),
        ("permute", "collective-permute"),
    ],
)
def test_the_gradient_of_each_sends_as_much_as_it_does(page, name, kind):
    """A scatter becomes a gather, a gather a scatter, and the other two their own kind."""
    function = getattr(page, name)
    x = page.inputs[function]
    (move,) = backward(page, function, x)
    (forward,) = traffic(function, x, mesh=page.mesh)
    assert move.kind == kind and move.wire_bytes == forward.wire_bytes


def test_the_gradient_of_an_all_reduce_needs_nothing_if_all_use_the_same_sum(page):
    """With out_specs=P() the sum is one shared row, and backwards nothing moves."""

    @jax.shard_map(mesh=page.mesh, in_specs=P("X"), out_specs=P())
    def total_of_rows(term):
        return jax.lax.psum(term, "X")

    assert traffic(total_of_rows, page.terms, mesh=page.mesh).kinds == {"all-reduce"}
    assert len(backward(page, total_of_rows, page.terms)) == 0


@compiled_for_cpu
def test_the_gradient_of_an_all_reduce_is_another_if_each_device_uses_its_own_sum(page):
    """With a sum for each device, backwards their gradients are added by an all-reduce."""
    assert backward(page, page.all_reduce, page.terms).kinds == {"all-reduce"}


@compiled_for_cpu
def test_backwards_an_all_gather_in_shard_map_is_a_reduce_scatter(page):
    """Inside shard_map the gradient of an all-gather is a reduce-scatter."""
    y = jax.eval_shape(page.all_gather, page.pieces)
    transposed = jax.linear_transpose(page.all_gather, page.pieces)
    assert [move.kind for move in moves_of(lambda y: transposed(y), y)] == ["reduce-scatter"]


def test_backwards_a_gather_that_all_devices_use_alike_moves_nothing(page):
    """Where all devices compute the same with what jax.reshard gathered, backwards nothing moves."""

    def whole(x):
        return jax.reshard(x, P(None, None))

    with jax.set_mesh(page.mesh):
        forward = moves_of(whole, page.pieces)
        assert [move.kind for move in forward] == ["all-gather"]
        y = whole(page.pieces)
        assert moves_of(lambda y: jax.vjp(whole, page.pieces)[1](y), y) == []


# The ring


def share_of_a_two_way_ring(n):
    """Time of an all-to-all over that of an all-gather, on a ring with links in both directions.

    Every device has n pieces for n devices, each of size 1, and each goes the shorter way; what is
    exactly opposite goes half and half. The busiest link decides.
    """
    links = np.zeros((n, 2))
    for device in range(n):
        for distance in range(1, n):
            ways = [(distance, 0)] if 2 * distance < n else [(n - distance, 1)]
            if 2 * distance == n:
                ways = [(distance, 0), (distance, 1)]
            for steps, direction in ways:
                for step in range(steps):
                    sender = device + step if direction == 0 else device - step
                    links[sender % n, direction] += 1 / len(ways)
    gather = n * (n - 1) / 2  # n pieces of each of the others, half of them from each side
    return links.max() / gather


@pytest.mark.parametrize("n", [4, 8, 16, 64])
def test_an_all_to_all_on_a_two_way_ring_takes_a_third_to_a_quarter_of_a_gather(n):
    """On a two-way ring an all-to-all takes n/4(n-1) of an all-gather's time: a third on four
    devices, about a quarter on a long ring."""
    assert share_of_a_two_way_ring(n) == pytest.approx(n / (4 * (n - 1)))


def test_the_share_is_a_third_on_four_devices_and_a_quarter_on_many():
    """A third on four devices, about a quarter on a long ring."""
    assert share_of_a_two_way_ring(4) == pytest.approx(1 / 3)
    assert share_of_a_two_way_ring(256) == pytest.approx(1 / 4, rel=0.01)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    """Its check says "not yet" to the stub and a wrong answer, and "correct" to the solution."""
    check_exercise(page, PAGE, exercise)
