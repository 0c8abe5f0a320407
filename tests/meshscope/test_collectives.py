"""Collectives of programs known by construction: each test writes what it then reads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import meshscope as ms

pytestmark = pytest.mark.filterwarnings("error::meshscope.UnparsedCollectiveWarning")
P = jax.P
ROWS, COLUMNS = 16, 4  # of the piece that one device holds, float32
PIECE = 4 * ROWS * COLUMNS  # bytes


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def spread(x, axes):
    """All-gather, then back to a piece, so that the result can be fed in again."""
    whole = jnp.tanh(jax.lax.all_gather(x, axes, tiled=True))
    return whole.reshape(-1, ROWS, COLUMNS).sum(0)


def scatter(x, axes):
    part = jax.lax.psum_scatter(x, axes, tiled=True)
    return jnp.tile(part, (x.shape[0] // part.shape[0], 1))


# kind -> (what to write, payload over PIECE, bytes sent over PIECE), n in a group
KINDS = {
    "all-reduce": (
        jax.lax.psum,
        lambda n: 1,
        lambda n: 2 * (n - 1) / n,
    ),
    "all-gather": (spread, lambda n: n, lambda n: n - 1),
    "reduce-scatter": (scatter, lambda n: 1, lambda n: (n - 1) / n),
    "all-to-all": (
        lambda x, axes: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
        lambda n: 1,
        lambda n: (n - 1) / n,
    ),
    "collective-permute": (
        lambda x, axes: jax.lax.ppermute(x, axes, ring(jax.lax.axis_size(axes))),
        lambda n: 1,
        lambda n: 1,
    ),
}
SIZES = [(8,), (2, 4), (4, 2), (8, 1), (1, 8), (2, 2, 2), (2, 1, 4), (1, 4, 2), (4, 1, 2)]


def looped(f, trips):
    """f, inside as many scans as there are trips."""
    for n in trips:
        f = lambda x, g=f, n=n: jax.lax.scan(lambda c, _: (g(c), None), x, length=n)[0]  # noqa: E731
    return f


def program(f, mesh, count=1):
    """f of pieces on every device of a mesh, compiled; `count` arrays in and out."""
    everywhere = P(mesh.axis_names)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    whole = jax.ShapeDtypeStruct(
        (ROWS * mesh.size, COLUMNS),
        jnp.float32,
        sharding=jax.NamedSharding(mesh, everywhere),
    )
    return jax.jit(mapped).lower(*[whole] * count).compile()


def grid(*sizes, names="abc", order=range(8), types=AxisType.Auto):
    devices = np.array(jax.devices())[list(order)[: math.prod(sizes)]].reshape(sizes)
    return Mesh(devices, tuple(names[: len(sizes)]), axis_types=(types,) * len(sizes))


@given(data=st.data())
@settings(max_examples=examples(80), deadline=None, derandomize=True)
def test_kind_axes_bytes_and_executions_are_those_written(data):
    sizes = data.draw(st.sampled_from(SIZES), "sizes")
    names = data.draw(st.permutations("abc"), "names")
    order = data.draw(st.permutations(range(8)), "device order")
    types = data.draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]), "types")
    kind = data.draw(st.sampled_from(sorted(KINDS)), "kind")
    trips = data.draw(st.lists(st.integers(2, 5), max_size=2), "trips")
    mesh = grid(*sizes, names=names, order=order, types=types)
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True, min_size=1), "axes")

    if kind == "collective-permute":  # JAX wants the mesh's order here
        axes.sort(key=mesh.axis_names.index)

    write, payload, wire = KINDS[kind]
    compiled = program(looped(lambda x: jnp.tanh(write(x, tuple(axes))), trips), mesh)
    rows = ms.collectives(compiled)
    n = math.prod(mesh.shape[a] for a in axes)
    table = rows.by("kind", "axes")
    if n == 1:  # the compiler may leave it in or out, but nothing moves
        assert rows.total_payload_bytes == 0
        assert all((r.axes, r.payload_bytes, r.wire_bytes) == ((), 0, 0) for r in rows)
        assert table.bytes(kind, tuple(axes)) == 0
        return
    expected = tuple(a for a in mesh.axis_names if a in axes and mesh.shape[a] > 1)
    times = math.prod(trips)
    totals = (times, times * payload(n) * PIECE, times * wire(n) * PIECE)
    assert table == {(kind, expected): totals}
    assert table.bytes(kind, axes[::-1]) == totals[1]  # any order, size 1 or not
    assert {row.inside_loop for row in rows} == {bool(trips)}
    assert {row.dtype for row in rows} == {"float32"}


@pytest.mark.parametrize("order", [range(8), [3, 1, 4, 0, 5, 7, 2, 6], range(7, -1, -1)])
def test_positions_follow_the_mesh_not_the_device_ids(order):
    """On a permuted mesh both axes keep their own bytes, so neither is taken for the
    other: 2 devices along a, 4 along b."""
    mesh = grid(2, 4, order=order)

    def f(x):
        return scatter(jnp.tanh(spread(x, "a")), "b")

    table = ms.collectives(program(f, mesh)).by("kind", "axes")
    assert table.bytes("all-gather", "a") == 2 * PIECE
    assert table.bytes("reduce-scatter", "b") == PIECE
    assert len(table) == 2
    # The same devices in other meshes: transposed, the axes stay the same groups; moved
    # on by one device, a's pairs (each and the fourth after it) stay, b's fours do not.
    other = Mesh(mesh.devices.T, ("b", "a"), axis_types=(AxisType.Auto,) * 2)
    assert ms.collectives(program(f, mesh), other).by("kind", "axes") == table
    shuffled = grid(2, 4, order=np.roll(list(order), 1))
    moved = ms.collectives(program(f, mesh), shuffled)
    assert {row.kind: row.axes for row in moved} == {
        "all-gather": ("a",),
        "reduce-scatter": ("?",),
    }


def test_a_compiler_that_makes_up_names_is_not_believed():
    """Without shard_map the program prints axes called axis_0 and axis_1."""
    mesh = grid(2, 4, order=[3, 1, 4, 0, 5, 7, 2, 6])
    x = jax.ShapeDtypeStruct((8, 64), "float32", sharding=jax.NamedSharding(mesh, P("a", "b")))
    w = jax.ShapeDtypeStruct((64, 32), "float32", sharding=jax.NamedSharding(mesh, P("b")))
    out = jax.NamedSharding(mesh, P("a"))
    compiled = jax.jit(jnp.dot, out_shardings=out).lower(x, w).compile()
    # x_[8a, 64b] w_[64b, 32] leaves a partial sum along b of the local (4, 32) result.
    assert ms.collectives(compiled).by("kind", "axes") == {
        ("all-reduce", ("b",)): (1, 4 * 4 * 32, 2 * 3 / 4 * 4 * 4 * 32)
    }
    shapes = {row.shape for row in ms.collectives(compiled)}
    assert shapes == {(4, 32)}


def test_groups_that_are_no_axes_are_reported_as_such():
    mesh = grid(2, 4)
    halves = [[0, 1], [2, 3]]

    def f(x):
        part = jax.lax.psum(x, "b", axis_index_groups=halves)
        return part + jax.lax.psum(jnp.tanh(x), "b")

    rows = ms.collectives(program(f, mesh))
    part, whole = sorted(rows, key=lambda row: row.group_size)
    assert (part.axes, part.within, part.group_size) == (("?",), ("b",), 2)
    assert set(map(frozenset, part.groups)) == {
        frozenset(g) for g in ({0, 1}, {2, 3}, {4, 5}, {6, 7})
    }
    assert (part.payload_bytes, part.wire_bytes) == (PIECE, PIECE)
    assert (whole.axes, whole.within) == (("b",), ("b",))
    table = rows.by("kind", "axes")
    assert table.bytes("all-reduce", ("?",)) == PIECE == table.bytes("all-reduce", "b")
    assert "? within b" in repr(rows)


def test_a_permute_has_the_axes_along_which_it_moves():
    mesh = grid(2, 4)

    def f(x):
        one = jax.lax.ppermute(x, "b", [(0, 1)])
        swap = jax.lax.ppermute(jnp.tanh(one), ("a", "b"), [(0, 5), (5, 0)])
        return jax.lax.ppermute(jnp.sin(swap), ("a", "b"), [(1, 5), (5, 1)])

    rows = ms.collectives(program(f, mesh))
    assert [row.axes for row in rows] == [("b",), ("a", "b"), ("a",)]
    assert all(row.wire_bytes == PIECE for row in rows)


def test_what_is_not_known_is_none():
    mesh = grid(8)

    def f(x):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "a"), jnp.tanh, x)
        go_on = lambda x: jax.lax.pmax(x, "a").sum() < 10  # noqa: E731
        step = lambda x: jax.lax.ppermute(x, "a", ring(8)) + 1  # noqa: E731
        x = jax.lax.while_loop(go_on, step, x)
        return jax.lax.all_to_all(x, "a", 0, 0, tiled=True)

    rows = ms.collectives(program(f, mesh))
    told = {(row.kind, row.op_name.split("/")[-1]): row for row in rows}
    branch, test = told["all-reduce", "psum"], told["all-reduce", "pmax"]
    assert (branch.executions, branch.inside_loop) == (None, False)
    assert (test.executions, test.inside_loop) == (None, True)
    step = told["collective-permute", "ppermute"]
    assert (step.executions, step.inside_loop) == (None, True)
    table = rows.by("kind")
    assert table["all-reduce"] == (None, None, None) == table["collective-permute"]
    assert table["all-to-all"] == (1, PIECE, 7 / 8 * PIECE)
    assert table.bytes("all-reduce") is None
    assert rows.total_payload_bytes is None


def test_a_branch_in_a_counted_loop_stays_unknown():
    def f(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "a"), jnp.tanh, x)

    (row,) = ms.collectives(program(looped(f, [3]), grid(8)))
    assert (row.executions, row.inside_loop) == (None, True)


def test_a_loop_condition_runs_once_more_than_its_body():
    """A loop of 5 rounds whose test also sums over the mesh: 6 sums and 5 moves."""
    mesh = grid(8)

    def test(state):
        i, x = state
        return (i < 5) & (jax.lax.pmin(x, "a").sum() < 1e9)

    def f(x):
        step = lambda s: (s[0] + 1, jax.lax.ppermute(s[1], "a", ring(8)))  # noqa: E731
        return jax.lax.while_loop(test, step, (0, x))[1]

    compiled = program(f, mesh)
    unknown = ms.collectives(compiled)
    assert {row.executions for row in unknown} == {None}  # the sum may end it early
    text = compiled.as_text()
    loop = next(line for line in text.splitlines() if " while(" in line)
    counted = loop + ', backend_config={"known_trip_count":{"n":"5"}}'
    told = ms.collectives(text.replace(loop, counted), mesh).by("kind")
    assert told["all-reduce"].executions == 6
    assert told["collective-permute"].executions == 5


def test_values_that_travel_together_are_one_row_each():
    """Two sums over one axis may become one instruction; bytes and dtypes stay apart."""
    mesh = grid(2, 4)

    def f(x, y):
        y = y.astype(jnp.int32)
        a, b = jax.lax.psum((x, y), "b")
        return a, b.astype(jnp.float32)

    rows = ms.collectives(program(f, mesh, count=2))
    assert sorted(row.dtype for row in rows) == ["float32", "int32"]
    assert rows.by("kind", "axes") == {("all-reduce", ("b",)): (2, 2 * PIECE, 3 * PIECE)}


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-gather", 10 / 3),
        ("reduce-scatter", 10 / 3),
        ("all-to-all", 10 / 3),
        ("all-reduce", 20 / 3),
        ("collective-permute", 5),
        ("collective-broadcast", 5),
        ("send", 5),
        ("recv", 0),
        ("ragged-all-to-all", None),
    ],
)
def test_wire_bytes_of_what_does_not_divide(kind, sent):
    row = ms.Collective(kind, ("x",), "int8", (5,), 5, 1, False, "", None, ("x",), ((0, 1, 2),))
    assert row.group_size == 3 and row.wire_bytes == sent


def test_by_takes_any_fields():
    mesh = grid(2, 4)
    compiled = program(looped(lambda x: jax.lax.psum(jnp.tanh(x), "b"), [3]), mesh)
    rows = ms.collectives(compiled)
    assert rows.kinds == {"all-reduce"}
    assert rows.total_payload_bytes == 3 * PIECE
    assert rows.by("kind") == {"all-reduce": (3, 3 * PIECE, 4.5 * PIECE)}
    assert list(rows.by("inside_loop", "dtype")) == [(True, "float32")]
    assert rows.by("kind").wire("all-reduce") == 4.5 * PIECE
    assert rows.by("kind")["all-reduce"].payload_bytes == 3 * PIECE
    table = rows.by("kind", "axes")
    assert table.get(("all-gather", ("a",))) is None
    assert table.bytes("all-gather", ("a",)) == 0 == table.wire("all-gather", "a")
    for wrong in [("all-gather", ("modle",)), ("allgather", "a"), ("all-gather",)]:
        with pytest.raises(ValueError, match="no axis|no kind|one value for each"):
            table.bytes(*wrong)
    with pytest.raises(ValueError, match="name a field"):
        rows.by()
    assert isinstance(rows[0], ms.Collective) and len(rows[:1]) == 1


def test_diff_is_what_the_second_has_more():
    mesh = grid(2, 4)
    less = program(lambda x: jax.lax.psum(x, "b"), mesh)
    more = program(looped(lambda x: jax.lax.psum(jnp.tanh(x), "b"), [3]), mesh)
    other = program(lambda x: spread(x, "a"), mesh)
    assert ms.diff(less, more) == {("all-reduce", ("b",)): (2, 2 * PIECE, 3 * PIECE)}
    assert ms.diff(more, less) == {("all-reduce", ("b",)): (-2, -2 * PIECE, -3 * PIECE)}
    assert ms.diff(less, other) == {
        ("all-reduce", ("b",)): (-1, -PIECE, -1.5 * PIECE),
        ("all-gather", ("a",)): (1, 2 * PIECE, PIECE),
    }
    assert not ms.diff(less, ms.collectives(less))
    assert repr(ms.diff(less, less)).startswith("No difference. CPU program")


def test_mesh_comes_from_inputs_or_outputs_or_is_asked_for():
    mesh = grid(2, 4)
    f = jax.shard_map(lambda x: jax.lax.psum(x, "b"), mesh=mesh, in_specs=P("b"), out_specs=P())
    host = np.ones((ROWS, COLUMNS), np.float32)
    compiled = jax.jit(f).lower(host).compile()  # its input names no mesh, its output does
    assert ms.collectives(compiled).by("axes").keys() == {("b",)}

    unnamed = jax.jit(lambda x: f(x).sum()).lower(host).compile()
    shardings = jax.tree.leaves((unnamed.input_shardings, unnamed.output_shardings))
    if not any(isinstance(s, jax.NamedSharding) for s in shardings):
        with pytest.raises(ValueError, match="pass the one to use as mesh="):
            ms.collectives(unnamed)
    assert ms.collectives(unnamed, mesh).by("axes").keys() == {("b",)}
    with pytest.raises(ValueError, match="8 devices and the mesh has 4"):
        ms.collectives(compiled.as_text(), grid(4))
    with pytest.raises(ValueError, match="8 devices and the mesh has 4"):
        ms.collectives(compiled, grid(4))
    with pytest.raises(
        TypeError,
        match="mesh= is of type tuple, not a mesh: pass a jax.sharding.Mesh or AbstractMesh",
    ):
        ms.collectives(compiled, (2, 4))
    with pytest.raises(ValueError, match="no mesh"):
        ms.collectives(compiled.as_text())


def test_two_meshes_in_one_program_ask_which():
    one, two = grid(2, 4), grid(8, names="x")
    shape = lambda m, a: jax.ShapeDtypeStruct(  # noqa: E731
        (8, 8), jnp.float32, sharding=jax.NamedSharding(m, P(a))
    )
    add = lambda x, y: (x + y).sum()  # noqa: E731
    compiled = jax.jit(add).lower(shape(one, "b"), shape(two, "x")).compile()
    with pytest.raises(ValueError, match="name 2 meshes"):
        ms.collectives(compiled)
    assert ms.collectives(compiled, two).by("axes").keys() <= {("x",), ("?",)}


def test_a_program_that_moves_nothing_needs_no_mesh():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    rows = ms.collectives(compiled)
    assert (len(rows), rows.kinds, rows.total_payload_bytes) == (0, set(), 0)
    assert repr(rows).startswith("No collectives. CPU program (jax ")


def test_bad_arguments_say_what_to_pass():
    jitted = jax.jit(jnp.sin)
    for wrong, says in [
        (lambda x: x, r"jax.jit\(f\).lower\(...\).compile\(\)"),
        (jitted, r"call .lower\(...\).compile\(\) first"),
        (jitted.lower(1.0), r"call .compile\(\) first"),
        (jitted.trace(1.0), r"call .lower\(...\).compile\(\) first"),
        (jnp.ones(3), "not a compiled program: pass jax.jit"),
        (np.ones(3), "of type ndarray and on the host, not a compiled program"),
    ]:
        with pytest.raises(TypeError, match=says):
            ms.collectives(wrong)


def test_reports_name_the_backend_and_carry_no_addresses_or_colours():
    mesh = grid(2, 4)
    rows = ms.collectives(program(lambda x: spread(x, "a"), mesh))
    text, html = repr(rows), rows._repr_html_()
    for told in (text, html, repr(rows.by("kind")), repr(ms.diff(rows, rows[:0]))):
        assert f"CPU program (jax {jax.__version__}); another backend may choose" in told
        assert "0x" not in told and "/tmp" not in told and "\x1b" not in told
    assert "all-gather" in text and "test_collectives.py:" in text
    assert html.count("<tr>") == 2
    assert "#" not in html  # no colour of its own


def test_source_lines_are_the_same_on_every_machine(tmp_path):
    """A file's last name and line; inside a notebook, whose file is temporary, the line
    of the cell; and the caller where the operation stands in an installed package."""
    code = "def f(x):\n    return g(x)\n"
    library = "import jax\ndef g(x):\n\n    return jax.lax.psum(x, 'a')\n"
    for file, expected in [
        (str(tmp_path / "model.py"), "model.py:2"),
        ("/tmp/ipykernel_4242/1234567.py", "cell:2"),
        ("<ipython-input-3-0123456789ab>", "cell:2"),
    ]:
        scope = {}
        exec(compile(library, "/x/lib/site-packages/flax/nnx/linear.py", "exec"), scope)
        exec(compile(code, file, "exec"), scope)
        (row,) = ms.collectives(program(scope["f"], grid(8)))
        assert row.source_line == expected
        assert row.op_name.endswith("psum")


def test_source_lines_of_older_texts():
    (line,) = (
        '  %r = f32[4] all-reduce(%p), metadata={op_name="a" '
        'source_file="/home/me/x.py" source_line=7}',
    )
    from meshscope import _hlo as hlo

    assert hlo.Sources("").find(line) == "x.py:7"
    assert hlo.Sources("").find("  %r = f32[4] all-reduce(%p)") is None


# Programs on different meshes


def gathered_over(mesh, axis, shape=(64, 64)):
    """x @ w with the contraction split over one axis: its all-reduce is 64 x 64 floats."""
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for spec in (P(None, axis), P(axis))
    )
    out = jax.NamedSharding(mesh, P())
    return jax.jit(jnp.dot, out_shardings=out).lower(x, w).compile()


def test_a_diff_of_programs_on_different_meshes_answers_the_keys_in_its_table():
    """Tensor parallel (1, 8) against data parallel (8, 1), with the same axis names."""
    tensor, data = grid(1, 8, names=("data", "model")), grid(8, 1, names=("data", "model"))
    one, two = gathered_over(tensor, "model"), gathered_over(data, "data")
    changes = ms.diff(one, two)
    assert set(changes) == {("all-reduce", ("model",)), ("all-reduce", ("data",))}
    for (kind, axes), total in changes.items():
        assert changes.bytes(kind, axes) == changes.bytes(kind, *axes) == total.payload_bytes
        assert changes.wire(kind, axes) == total.wire_bytes
    assert changes.bytes("all-reduce", "model") == -16384
    assert changes.bytes("all-reduce", "data") == 16384
    # Along both axes at once, each side knows what that is on its own mesh: the same bytes.
    assert changes.bytes("all-reduce", ("model", "data")) == 0
    assert changes.bytes("all-gather", "model") == 0
    with pytest.raises(ValueError, match="no axis 'modle' on this mesh, which has data, model"):
        changes.bytes("all-reduce", "modle")


@pytest.mark.parametrize("other", ["a mesh without the axis", "no mesh"])
def test_a_diff_knows_the_axes_of_both_sides(other):
    one = gathered_over(grid(2, 4, names=("data", "model")), "model")
    x = jax.ShapeDtypeStruct(
        (64,), "float32", sharding=jax.NamedSharding(grid(8, names="x"), P("x"))
    )
    two = jax.jit(lambda x: x.sum()).lower(*[1.0 if other == "no mesh" else x]).compile()
    for a, b, sign in [(one, two, -1), (two, one, 1)]:
        changes = ms.diff(a, b)
        assert changes.bytes("all-reduce", "model") == sign * 16384
        assert changes.bytes("all-reduce", ("data", "model")) == 0
        with pytest.raises(ValueError, match="no axis 'y'"):
            changes.bytes("all-reduce", "y")
    if other != "no mesh":
        assert changes.bytes("all-reduce", "x") == -4
        assert changes.bytes("all-reduce", ("x", "model")) == 0  # on no mesh together


def test_a_diff_does_not_mind_the_order_of_axes():
    """The same sums over both axes, of meshes that name them in another order."""
    one = program(lambda x: jax.lax.psum(x, ("a", "b")), grid(2, 4, names="ab"))
    two = program(lambda x: jax.lax.psum(x, ("a", "b")), grid(4, 2, names="ba"))
    assert ms.diff(one, two) == {}
    assert ms.diff(one, two).bytes("all-reduce", ("b", "a")) == 0
    more = program(
        looped(lambda x: jax.lax.psum(jnp.tanh(x), ("a", "b")), [3]), grid(4, 2, names="ba")
    )
    assert ms.diff(one, more) == {("all-reduce", ("a", "b")): (2, 2 * PIECE, 2 * 7 / 4 * PIECE)}


def test_a_diff_of_groups_that_are_no_axes():
    def halves(x):
        return jax.lax.psum(x, "b", axis_index_groups=[[0, 1], [2, 3]])

    one, two = program(jnp.tanh, grid(2, 4)), program(halves, grid(2, 4))
    changes = ms.diff(one, two)
    assert changes == {("all-reduce", ("?",)): (1, PIECE, PIECE)}
    assert changes.bytes("all-reduce", "?") == PIECE
    with pytest.raises(ValueError, match="no axis '.'"):
        changes.bytes("all-reduce", ("?", "b"))


def test_a_diff_with_what_is_not_known_is_not_known():
    def maybe(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "a"), jnp.tanh, x)

    mesh = grid(8)
    once, unknown = program(lambda x: jax.lax.psum(x, "a"), mesh), program(maybe, mesh)
    assert ms.diff(once, unknown) == {("all-reduce", ("a",)): (None, None, None)}
    assert ms.diff(unknown, once).bytes("all-reduce", "a") is None
    assert "unknown" in repr(ms.diff(unknown, once))


# Typing errors are not zeros


def test_a_misspelt_axis_is_an_error_without_a_mesh_too():
    table = ms.collectives(jax.jit(jnp.sin).lower(1.0).compile()).by("kind", "axes")
    with pytest.raises(ValueError, match="no axis 'modle' as the program has no mesh"):
        table.bytes("all-gather", "modle")
    assert table.bytes("all-gather", ()) == 0
    named = ms.collectives(jax.jit(jnp.sin).lower(1.0).compile(), grid(2, 4)).by("axes")
    assert named.bytes("a") == 0
    with pytest.raises(ValueError, match="no axis 'modle' on this mesh, which has a, b"):
        named.bytes("modle")


def test_a_misspelt_field_says_which_there_are():
    rows = ms.collectives(program(lambda x: jax.lax.psum(x, "a"), grid(8)))
    for wrong in ("kindd", "by", "_rows"):
        with pytest.raises(
            ValueError, match=f"no field '{wrong}', there are kind, axes, dtype, shape"
        ):
            rows.by("kind", wrong)
    with pytest.raises(ValueError, match="name a field.*there are kind"):
        rows.by()
    for field in ("kind", "axes", "dtype", "shape", "payload_bytes", "executions", "inside_loop",
                  "op_name", "source_line", "within", "groups", "group_size", "wire_bytes"):  # fmt: skip
        (key,) = rows.by(field)
        assert key == getattr(rows[0], field)


def test_keys_that_make_no_sense_are_refused():
    rows = ms.collectives(program(lambda x: jax.lax.psum(x, "a"), grid(8)))
    for axes in (None, 3, {"a": 1}):
        with pytest.raises(ValueError, match="axes: give a name or a tuple of names, not"):
            rows.by("kind", "axes").bytes("all-reduce", axes)
    for axes in (["a"], {"a"}, frozenset("a")):
        assert rows.by("kind", "axes").bytes("all-reduce", axes) == PIECE
    assert rows.by("within").bytes("a") == PIECE
    assert rows.by("dtype").bytes("float32") == PIECE
    assert rows.by("dtype").bytes("bfloat16") == 0
    with pytest.raises(ValueError, match="no dtype 'flaot32': give JAX's name"):
        rows.by("dtype").bytes("flaot32")
    assert rows.by("source_line").bytes("nowhere.py:1") == 0


def test_rows_are_taken_by_any_integer():
    rows = ms.collectives(program(lambda x: jax.lax.psum(spread(x, "a"), "b"), grid(2, 4)))
    assert len(rows) == 2
    for index in (np.int64(1), np.uint8(1), -1):
        assert rows[index] is rows[1] and isinstance(rows[index], ms.Collective)
    assert list(rows[np.int64(1) :]) == [rows[1]] and rows[1:].axis_sizes == rows.axis_sizes
    with pytest.raises(TypeError):
        rows["all-reduce"]
    with pytest.raises(IndexError):
        rows[2]


# Meshes that say no devices


SQUARE = [
    ((2, 2), ("model", "data")),
    ((2, 2), ("data", "model")),
    ((2, 1, 2), ("data", "x", "model")),
]


@pytest.mark.parametrize("order", [range(4), [2, 0, 3, 1]])
def test_an_abstract_mesh_with_the_program_s_axes_gives_their_names(order):
    """A sum over model on 2 x 2 devices: transposed, an abstract mesh has the same shape."""
    mesh = grid(2, 2, names=("data", "model"), order=order)
    compiled = program(lambda x: jax.lax.psum(x, "model"), mesh)
    for sizes, names in SQUARE[:2]:
        abstract = jax.sharding.AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
        (row,) = ms.collectives(compiled, abstract)
        assert row.axes == ("model",)
        concrete = Mesh(mesh.devices.T if names[0] == "model" else mesh.devices, names)
        assert ms.collectives(compiled, concrete)[0].axes == ("model",)


def test_an_abstract_mesh_of_other_axes_is_ambiguous():
    mesh = grid(2, 4, names=("data", "model"))
    compiled = program(lambda x: jax.lax.psum(x, "model"), mesh)
    for sizes, names in [((2, 4), ("a", "b")), ((4, 2), ("data", "model")), ((2, 2, 2), "abc")]:
        abstract = jax.sharding.AbstractMesh(sizes, tuple(names))
        with pytest.raises(
            ValueError, match=r"does not say which device stands where.*\{'data': 2, "
        ):
            ms.collectives(compiled, abstract)
    # One axis leaves no choice: some devices of it, or all.
    line = jax.sharding.AbstractMesh((8, 1), ("x", "y"))
    (row,) = ms.collectives(compiled, line)
    assert (row.axes, row.within) == (("?",), ("x",))
    everywhere = program(lambda x: jax.lax.psum(x, ("data", "model")), mesh)
    assert ms.collectives(everywhere, line)[0].axes == ("x",)
    with pytest.raises(ValueError, match="8 devices and the mesh has 4"):
        ms.collectives(compiled, jax.sharding.AbstractMesh((4,), ("x",)))


def test_a_program_that_names_no_mesh_still_has_an_order_of_devices():
    """Its shardings are positional; the mesh is given, in the program's order or another."""
    order = [3, 1, 4, 0, 5, 7, 2, 6]
    mesh = grid(2, 4, order=order)
    hlo_sharding = jax.NamedSharding(mesh, P("b"))._to_xla_hlo_sharding(2)
    from jax._src.sharding_impls import GSPMDSharding

    lost = GSPMDSharding(tuple(mesh.devices.flat), hlo_sharding)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=lost)
    compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    if any(isinstance(s, jax.NamedSharding) for s in jax.tree.leaves(compiled.input_shardings)):
        pytest.skip("this JAX gives names to positional shardings")
    assert ms.collectives(compiled, mesh)[0].axes == ("b",)
    other = Mesh(mesh.devices.T, ("b", "a"))
    assert ms.collectives(compiled, other)[0].axes == ("b",)
    with pytest.raises(ValueError, match="AbstractMesh"):
        ms.collectives(compiled, mesh.abstract_mesh)
    few = Mesh(np.array(jax.devices()[:4]), ("b",))
    with pytest.raises(ValueError, match="8 devices and the mesh has 4"):
        ms.collectives(compiled, few)
