"""The cheat sheet: the batch of several processes, and what collectives and strategies send."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.processes import run as run_processes
from many_devices.processes import say
from pages import BOOK, cells_of, compiled_for_cpu

PAGE = "cheat-sheet"
P = jax.P


def table(page, first):
    """The rows of the table of a page whose first column has this name."""
    lines = (BOOK / f"{page}.md").read_text("utf-8").splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")]
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("| "):
            return rows
        rows.append([cell.strip() for cell in line.strip("| ").split(" | ")])


# Checkpoint; many processes


def batches(code):
    """Run in each process: the sheet's own code, then what it warns of."""
    names = {"jax": jax}
    exec(code, names)
    x_host, rows, whole = names["x_host"], names["rows"], names["whole"]
    say("all rows, with a shape:", names["batch"].shape, "right:", (whole == x_host).all())
    make, first = jax.make_array_from_process_local_data, 4 * jax.process_index()
    own = make(rows, x_host[first : first + 4], x_host.shape)
    say("own rows, with a shape:", own.shape)
    say("all rows, without:", make(rows, x_host).shape)


@pytest.fixture(scope="module")
def said():
    """What each of two processes with four devices said of its batches."""
    used = ("given", "mesh", "place", "processes")
    cells = [cell.source for cell in cells_of(PAGE) if cell.id in used]
    assert len(cells) == len(used)
    lives = run_processes(batches, 2, 4, given={"code": "\n".join(cells)})
    return [life.log for life in lives]


def test_with_the_global_shape_a_batch_has_its_rows_once(said):
    """Two processes that run the sheet's cells have 8 rows, also if each gives all 8 of them."""
    for log in said:
        assert "all rows, with a shape: (8, 16) right: True" in log
        assert "own rows, with a shape: (8, 16)" in log


def test_without_the_global_shape_rows_are_there_twice(said):
    """Without the global shape the same call makes 16 rows of 8, and nothing says so."""
    for log in said:
        assert "all rows, without: (16, 16)" in log and log[-1] == "ended"


# Collectives: S bytes on n devices


def evaluated(formula, S, n):
    """A formula of the table, such as $2S(n-1)/n$, in bytes."""
    products = re.sub(r"(?<=[\dS)])(?=[S(])", "*", formula.strip("$"))
    return eval(products, {"S": S, "n": n})


def operations():
    """For each row: the operation on a row of eight devices, the type of its input, and its specs."""
    to_next = [(i, (i + 1) % 8) for i in range(8)]
    piece, term = (64, 8), (512, 8)  # of a whole array of (64, 8), sharded by rows
    sharded, whole = P("data"), P()
    return {
        "`psum`, `pmean`": (jax.lax.psum, term, sharded, whole),
        "`all_gather`": (partial(jax.lax.all_gather, tiled=True), piece, sharded, sharded),
        "`psum_scatter`": (partial(jax.lax.psum_scatter, tiled=True), term, sharded, sharded),
        "`all_to_all`": (
            partial(jax.lax.all_to_all, split_axis=1, concat_axis=0, tiled=True),
            piece,
            sharded,
            sharded,
        ),
        "`ppermute`": (partial(jax.lax.ppermute, perm=to_next), piece, sharded, sharded),
        '`pcast(to="varying")`': (partial(jax.lax.pcast, to="varying"), piece, whole, sharded),
    }


@compiled_for_cpu
@pytest.mark.parametrize("row", table(PAGE, "in `shard_map`"), ids=lambda row: row[0])
def test_each_operation_sends_its_formula_of_the_whole_array(page, row):
    """S is the whole array in bytes, of a sum its result: each operation sends what its row says."""
    operation, shape, taken, given = operations()[row[0]]
    mapped = jax.shard_map(
        lambda x: operation(x, axis_name="data"), mesh=page.row, in_specs=taken, out_specs=given
    )
    x = jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(page.row, taken))
    moves = ms.collectives(jax.jit(mapped).lower(x).compile(), page.row)
    S = 64 * 8 * 4
    assert sum(move.wire_bytes for move in moves) == evaluated(row[2], S, page.row.size)


def test_the_formulas_are_those_of_other_pages():
    """The sheet, Notation, Five collectives and chapter 10 give one formula for each collective."""
    notation = {row[0]: row[3] for row in table("notation", "Collective")}
    collectives = {row[0]: row[2] for row in table("collectives", "Collective")}
    sheet = {row[0]: row[2] for row in table(PAGE, "in `shard_map`")}
    names = {
        "`psum`, `pmean`": "all-reduce",
        "`all_gather`": "all-gather",
        "`psum_scatter`": "reduce-scatter",
        "`all_to_all`": "all-to-all",
        "`ppermute`": "collective-permute",
    }
    for operation, kind in names.items():
        for other in (notation, collectives):
            theirs = re.sub(r"\\tfrac\{S\}\{n\}", "(S/n)", other[kind]).replace("\\,", "")
            assert theirs == sheet[operation], kind
    chapter = {row[0]: row[2] for row in table("10-autodiff", "Operation")}
    for operation in names:
        assert chapter[operation.split(",")[0]] == sheet[operation], operation


# Strategies: N weights, n devices


@pytest.mark.parametrize(
    "strategy, program",
    [("data parallel", "train-dp"), ("ZeRO-1", "train-zero1"), ("FSDP", "train-fsdp")],
)
def test_gathers_in_a_step_are_those_of_compiled_programs(strategy, program):
    """In gathers of all weights, chapter 4's step sends 2 with data parallelism, with ZeRO-1 2 and
    with FSDP 3 as compiled for H100; CPU's compiler makes 2, 3 and 4 of them."""
    (row,) = [row for row in table(PAGE, "strategy") if row[0] == strategy]
    for compiler, told in zip(("gpu", "cpu"), row[4].split(", "), strict=True):

        def sent(name, compiler=compiler):
            return sum(move["wire"] for move in stored_program(name)[compiler]["moves"])

        gather = sent("train-dp") / 2  # its all-reduce scatters, then gathers
        assert round(sent(program) / gather, 1) == int(told), compiler


def test_a_weight_takes_16_bytes(page):
    """A bfloat16 weight and its gradient take 2 + 2 bytes, a float32 master and two moments 12."""
    bytes_of = {"bfloat16": 2, "float32": 3}
    made = [jnp.zeros(64, dtype) for dtype, count in bytes_of.items() for _ in range(count)]
    assert sum(array.nbytes for array in made) == 64 * 16
    (rows,) = [row for row in table(PAGE, "strategy") if row[0] == "data parallel"]
    assert rows[3] == "$16N$"
