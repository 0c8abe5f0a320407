"""Chapter 8, "Committed arrays and constraints: who decides where a result lives"."""

import ast
import itertools
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic
from pages import cells_of, check_exercise, compiled_for_cpu, exercises_of

PAGE = "08-distributed-arrays"
P = jax.P
WHOLE = 64 * 64 * 4  # bytes


def message(function, *inputs):
    """What JAX raises, on one line."""
    return " ".join(attempt(function, *inputs).split())


# Computation follows data


def test_every_device_takes_the_sine_of_its_own_block(page):
    """The sine of x is on the devices of x, block by block."""
    for mine, result in zip(page.x_BD.addressable_shards, jnp.sin(page.x_BD).addressable_shards):
        assert mine.data.shape == (32, 16) and mine.device == result.device
        np.testing.assert_allclose(result.data, np.sin(mine.data), rtol=1e-5)


def test_a_sine_and_a_copy_are_sharded_like_their_input(page):
    """Computation follows data: the result has the sharding of x."""
    assert jnp.sin(page.x_BD).sharding == jnp.copy(page.x_BD).sharding == page.x_BD.sharding


def test_a_product_of_rows_and_columns_is_sharded_along_both_axes(page):
    """Its rows are those of the batch, its columns those of the weight, and it is the product."""
    assert page.product_BD.sharding.is_equivalent_to(page.x_BD.sharding, 2)
    right = page.x_host @ page.x_host
    np.testing.assert_allclose(page.product_BD, right, rtol=1e-3, atol=1e-3)


def test_nothing_moves_for_a_sine_a_copy_and_this_product(page):
    """Their programs have no collectives."""
    product = [page.rows_BD, page.columns_DD]
    for function, inputs in [(jnp.sin, [page.x_BD]), (jnp.copy, [page.x_BD]), (jnp.dot, product)]:
        assert not traffic(function, *inputs)


def test_four_kinds_of_specs_shard_a_matrix_over_two_axes(page):
    """Each puts other pieces on the devices, and each of the ten specs that shard is like one of them."""

    def kind(spec):
        """The names of axes in each dimension; of one dimension alone, only their number."""
        named = [tuple(jax.tree.leaves(entry)) for entry in spec]
        return tuple(named) if all(named) else len(named[0] + named[1])

    entries = [None, "data", "model", ("data", "model"), ("model", "data")]
    every = [
        P(rows, columns)
        for rows, columns in itertools.product(entries, entries)
        if len(used := jax.tree.leaves([rows, columns])) == len(set(used)) > 0
    ]
    assert len(every) == 10
    assert {kind(spec) for spec in every} == {kind(spec) for spec in page.specs}
    found = set()
    for spec in page.specs:
        placed = put(page.x_host, page.mesh, *spec)
        found.add(str(placed.sharding.devices_indices_map(placed.shape)))
    assert len(found) == len(page.specs) == 4


def test_an_axis_that_a_spec_leaves_out_means_copies(page):
    """Every spec: the size of a piece, and how many devices hold each."""

    def parts(entry):
        return int(np.prod([page.mesh.shape[axis] for axis in jax.tree.leaves(entry)]))

    for spec in page.specs:
        shards = put(page.x_host, page.mesh, *spec).addressable_shards
        rows, columns = parts(spec[0]), parts(spec[1])
        assert {shard.data.shape for shard in shards} == {(64 // rows, 64 // columns)}
        holders = Counter(str(shard.index) for shard in shards)
        assert set(holders.values()) == {page.mesh.size // (rows * columns)}


# Committed arrays


def test_what_you_put_somewhere_is_committed(page):
    """loose is not committed, near, far and spread are; only spread is on every device."""
    arrays = page.loose, page.near, page.far, page.spread
    assert [array.committed for array in arrays] == [False, True, True, True]
    assert [len(array.devices()) for array in arrays] == [1, 1, 1, page.mesh.size]
    ids = [{device.id for device in array.devices()} for array in arrays[:3]]
    assert ids == [{0}, {0}, {7}]


def explicit_twin(page):
    """The mesh of the page in Explicit mode."""
    return jax.make_mesh((2, 4), page.names, axis_types=(AxisType.Explicit,) * 2)


def kinds_of_arrays(page):
    """Those that the page adds `far` to, and one on a mesh in Explicit mode."""
    typed = put(page.host, explicit_twin(page), "data", "model")
    return {**page.arrays, "Explicit": typed}


EXPRESSIONS = {
    "x + 1": lambda x, page: x + 1,
    "x + host": lambda x, page: x + page.host,
    "x + far": lambda x, page: x + page.far,
    "x + spread": lambda x, page: x + page.spread,
    "x.T": lambda x, page: x.T,
    "x @ x.T": lambda x, page: x @ x.T,
}


def found_at(expression, x, page):
    """The ids of the result's devices and whether it is committed; "NumPy", or "error"."""
    try:
        y = expression(x, page)
    except Exception:
        return "error"
    if isinstance(y, np.ndarray):
        return "NumPy"
    return sorted(device.id for device in y.devices()), y.committed


def by_the_rule(words, x, page, *context):
    """The same, by what the chapter says about committed inputs."""
    other = {"x + host": page.host, "x + far": page.far, "x + spread": page.spread}
    inputs = [x, *([other[words]] if words in other else [])]
    if not any(isinstance(y, jax.Array) for y in inputs):
        return "NumPy"
    decide = [
        sorted(device.id for device in y.devices())
        for y in inputs
        if getattr(y, "committed", False)
    ] + list(context)
    if any(ids != decide[0] for ids in decide):
        return "error"
    return (decide[0], True) if decide else ([0], False)


def test_thirty_sums_and_products_follow_the_rule_of_committed_inputs(page):
    """Outside of set_mesh; in Explicit mode two more raise, for their types."""
    others = []
    for words, expression in EXPRESSIONS.items():
        for name, x in kinds_of_arrays(page).items():
            if by_the_rule(words, x, page) != found_at(expression, x, page):
                others.append((words, name))
    assert others == [("x + spread", "Explicit"), ("x @ x.T", "Explicit")]
    assert len(EXPRESSIONS) * len(kinds_of_arrays(page)) == 30
    typed = kinds_of_arrays(page)["Explicit"]
    assert "Contracting dimensions" in message(lambda: typed @ typed.T)
    assert message(lambda: typed + page.spread).startswith("ValueError: Mesh")


def test_inside_set_mesh_the_mesh_decides_with_them(page):
    """The same thirty: the mesh is like one more committed input, and nothing is uncommitted."""
    mesh_ids = [device.id for device in page.mesh.devices.flat]
    with jax.set_mesh(page.mesh):
        for words, expression in EXPRESSIONS.items():
            for name, x in kinds_of_arrays(page).items():
                found = found_at(expression, x, page)
                if name == "Explicit":
                    assert found == "error"
                else:
                    assert found == by_the_rule(words, x, page, mesh_ids)
                    assert found in ("error", "NumPy") or found[1]


def test_where_the_sums_of_the_four_arrays_are_computed(page):
    """On which devices x + 1, x + far and x + spread are, outside of set_mesh, and x + 1 inside."""
    every = list(range(8)), True
    expected = {
        "host": ["NumPy", ([7], True), every, "NumPy"],
        "loose": [([0], False), ([7], True), every, every],
        "near": [([0], True), "error", "error", "error"],
        "spread": [every, "error", every, every],
    }
    for name, x in page.arrays.items():
        outside = [
            found_at(EXPRESSIONS[words], x, page) for words in ("x + 1", "x + far", "x + spread")
        ]
        with jax.set_mesh(page.mesh):
            inside = found_at(EXPRESSIONS["x + 1"], x, page)
        assert [*outside, inside] == expected[name], name


def test_the_page_prints_where_a_result_is(page):
    """`placement_of` says the devices and whether the result is committed, or what is raised."""
    assert page.placement_of(jnp.add, page.loose, page.far) == "on [7], committed: True"
    assert page.placement_of(jnp.add, page.loose, 1) == "on [0], committed: False"
    assert page.placement_of(jnp.add, page.near, page.far).endswith("Received incompatible devices")


def test_an_array_that_a_jitted_function_closes_over_decides_nothing(page):
    """It is not an input, even if it is committed."""
    found = jax.jit(lambda x: x + page.far)(page.spread)
    assert found.devices() == page.spread.devices()
    closed_over = jax.jit(lambda x: x + page.spread)(page.host)
    assert not closed_over.committed and len(closed_over.devices()) == 1
    assert "incompatible devices" in message(jnp.add, page.far, page.spread)


def test_the_assertion_about_the_devices_of_the_batch(page):
    """len(batch.devices()) == mesh.size holds of spread alone."""
    held = [len(x.devices()) == page.mesh.size for x in (page.loose, page.near, page.spread)]
    assert held == [False, False, True]


# jax.set_mesh


def test_a_new_array_is_committed_to_the_mesh_as_copies(page):
    """jnp.asarray of NumPy's numbers, inside set_mesh: a whole copy on each of eight devices."""
    assert page.fresh.committed and page.fresh.sharding.is_fully_replicated
    assert ms.memory(page.fresh).total_bytes == page.mesh.size * page.host.nbytes


def test_two_calls_make_no_new_array(page):
    """device_put without a destination, and an uncommitted array, stay on the default device.

    They are not the only ones: from_dlpack does not look at the mesh either.
    """
    for array in (page.put_host, page.again):
        assert not array.committed and array.devices() == {jax.devices()[0]}
    with jax.set_mesh(page.mesh):
        assert len(jnp.from_dlpack(page.x_host).devices()) == 1


# Received incompatible devices


def test_the_message_names_both_sides(page):
    """It lists the devices of both arrays; for two orders of the same devices as well."""
    first, second = (
        message(jnp.add, page.far, page.spread),
        message(jnp.add, page.turned, page.spread),
    )
    assert "device ids [7]" in first and "[0, 1, 2, 3, 4, 5, 6, 7]" in first
    assert second.count("device ids") == 2
    assert page.turned.devices() == page.spread.devices()


def test_device_put_repairs_both(page):
    """Put onto the sharding of spread, both arrays can be added to it."""
    for repaired in (page.far_on_the_mesh, jax.device_put(page.turned, page.spread.sharding)):
        assert repaired.sharding == (repaired + page.spread).sharding == page.spread.sharding
        np.testing.assert_array_equal(repaired + page.spread, page.host + page.host)


# The mode of the mesh


@compiled_for_cpu
def test_in_auto_mode_the_compiler_chooses_a_sharding(page):
    """Compiled for CPU, the rows of a product over a dimension that is sharded in both stay along data."""
    assert (page.spread @ page.spread.T).sharding.spec == P("data")


def test_in_explicit_mode_the_same_product_raises(page):
    """The two arrays are sharded alike, in all but the mode."""
    typed = put(page.host, explicit_twin(page), "data", "model")
    assert typed.sharding.is_equivalent_to(page.spread.sharding, 2)
    assert message(lambda: typed @ typed.T).startswith("ShardingTypeError: Contracting")


# Constraints


def test_from_rows_to_everywhere_is_an_all_gather_and_to_columns_an_all_to_all(page):
    """The kinds, payloads and results of the two constraints."""
    for function, kind, payload, sharding in [
        (page.sine_everywhere, "all-gather", WHOLE, page.everywhere),
        (page.sine_in_columns, "all-to-all", WHOLE // 2, page.columns),
    ]:
        (move,) = traffic(function, page.rows_BD, mesh=page.mesh)
        assert (move.kind, move.payload_bytes, move.axes) == (kind, payload, ("data",))
        result = jax.jit(function)(page.rows_BD)
        assert result.sharding.is_equivalent_to(sharding, 2)
        assert result.sharding.is_fully_replicated == (function is page.sine_everywhere)


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_move_the_same_for_a_constraint(compiler):
    """The stored programs: an all-gather of the whole matrix, an all-to-all of half."""
    for name, expected in [
        ("everywhere", ("all-gather", WHOLE)),
        ("columns", ("all-to-all", WHOLE // 2)),
    ]:
        moves = stored_program(f"arrays-{name}")[compiler]["moves"]
        assert [(move["kind"], move["payload"]) for move in moves] == [expected]


def test_one_constraint_moves_the_work_and_a_second_keeps_it_in_place(page):
    """With one, each device evaluates the sine on 4,096 elements, with two on half of them."""
    assert page.sines(page.sine_everywhere) == 4096
    assert page.sines(page.sine_of_rows_everywhere) == 2048


def test_two_constraints_give_the_same_values_for_the_same_bytes(page):
    """The collectives of both programs are the same, and so are their results."""
    one, two = (
        jax.jit(function).lower(page.rows_BD).compile()
        for function in (page.sine_everywhere, page.sine_of_rows_everywhere)
    )
    assert not ms.diff(one, two)
    np.testing.assert_array_equal(one(page.rows_BD), two(page.rows_BD))
    assert two(page.rows_BD).sharding.is_fully_replicated


def test_a_constraint_spreads_backwards_and_forwards(page):
    """The sine before it and the cosine after it are sharded as it says."""
    seen = []

    def spy(words, x):
        jax.debug.inspect_array_sharding(x, callback=seen.append)
        return x

    page.spied.__globals__["spy"], printing = spy, page.spy
    try:
        jax.jit(lambda x_BD: page.spied(x_BD)).lower(page.rows_BD).compile()
    finally:
        page.spied.__globals__["spy"] = printing
    assert len(seen) == 2
    assert all(sharding.is_equivalent_to(page.columns, 2) for sharding in seen)


def test_a_constraint_spreads_to_an_uncommitted_argument(page):
    """The compiled program expects the argument sharded as the constraint says."""
    uncommitted_BD = jnp.asarray(page.x_host)
    program = jax.jit(page.sine_in_columns).lower(uncommitted_BD).compile()
    ((expected,), _) = program.input_shardings
    assert not uncommitted_BD.committed
    assert expected.is_equivalent_to(page.columns, 2)


@pytest.mark.parametrize(
    "rows, expected, told",
    [
        ((None, "model"), P(None, "model"), "[{}, {"),
        ((P.UNCONSTRAINED, "model"), P("data", "model"), "[{?}, {"),
        ((), P(), "[{}, {}]"),
    ],
    ids=["None", "UNCONSTRAINED", "missing"],
)
def test_none_or_a_missing_entry_means_whole_and_unconstrained_leaves_it_to_the_compiler(
    page, rows, expected, told
):
    """The rows are made whole, or stay along data; in the program's text {?} is open for Shardy."""

    def constrained(x_BD):
        return page.pin(jnp.sin(x_BD), jax.NamedSharding(page.mesh, P(*rows)))

    result = jax.jit(constrained)(page.rows_BD)
    assert result.sharding.is_equivalent_to(jax.NamedSharding(page.mesh, expected), 2)
    text = jax.jit(constrained).lower(page.rows_BD).as_text()
    (line,) = [line for line in text.splitlines() if "sharding_constraint" in line]
    assert told in line


def test_a_constraint_whose_result_is_not_used_does_nothing(page):
    """It isn't even in the program."""

    def forgotten(x_BD):
        page.pin(x_BD, page.columns)  # no `x_BD =`
        return 2 * x_BD

    assert "sharding_constraint" not in jax.jit(forgotten).lower(page.rows_BD).as_text()
    result = jax.jit(forgotten)(page.rows_BD)
    assert result.sharding.is_equivalent_to(page.rows_BD.sharding, 2)
    np.testing.assert_array_equal(result, 2 * page.x_host)


# Conflicting shardings


def test_the_sum_of_two_matrices_in_eighths_is_whole_on_every_device(page):
    """Both operands have pieces of 2,048 bytes, and the sum takes 16,384 bytes on each device."""
    for operand in (page.x_BD, page.swapped_BD):
        assert ms.memory(operand).bytes_per_device == WHOLE // 8 == 2048
    assert page.collided.sharding.is_fully_replicated
    assert ms.memory(page.collided).bytes_per_device == WHOLE == 16_384
    np.testing.assert_array_equal(page.collided, page.x_host + page.x_host)
    with pytest.raises(AssertionError):
        program = jax.jit(jnp.add).lower(page.x_BD, page.swapped_BD).compile()
        ms.assert_no_full_copy(program, [page.x_BD, page.swapped_BD])


def test_if_one_operand_is_whole_the_sharding_of_the_other_wins(page):
    """In either order."""
    whole_BD = put(page.x_host, page.mesh)
    for total in (page.x_BD + whole_BD, whole_BD + page.x_BD):
        assert total.sharding.is_equivalent_to(page.x_BD.sharding, 2)


@compiled_for_cpu
def test_if_both_would_use_one_axis_the_second_operand_gives_way(page):
    """Rows and columns along data: the sum is sharded like the first, in either order."""
    columns_BD = put(page.x_host, page.mesh, None, "data")
    assert columns_BD.addressable_shards[0].data.shape == (64, 32)
    for first, second in [(page.rows_BD, columns_BD), (columns_BD, page.rows_BD)]:
        total = first + second
        assert total.sharding.is_equivalent_to(first.sharding, 2)
        np.testing.assert_array_equal(total, page.x_host + page.x_host)


def test_a_constraint_repairs_the_sum_and_no_device_makes_a_whole_matrix(page):
    """The pinned sum is sharded as x, and its program has no full copy."""
    program = jax.jit(page.pinned_sum).lower(page.x_BD, page.swapped_BD).compile()
    ms.assert_no_full_copy(program, [page.x_BD, page.swapped_BD])
    assert ms.memory(page.repaired_sum).bytes_per_device == WHOLE // 8
    assert page.repaired_sum.sharding == page.x_BD.sharding
    np.testing.assert_array_equal(page.repaired_sum, page.x_host + page.x_host)


def test_in_explicit_mode_the_same_sum_raises(page):
    """A constraint cannot repair it there, jax.reshard does."""
    operands, mesh = (page.x_BD, page.swapped_BD), explicit_twin(page)
    x, y = (put(page.x_host, mesh, *a.sharding.spec) for a in operands)
    assert message(jnp.add, x, y).startswith("ShardingTypeError: add got incompatible")
    assert "reshard" in message(jax.jit(lambda y: page.pin(y, x.sharding)), y)
    assert (x + jax.reshard(y, x.sharding)).sharding == x.sharding


# One MLP, three placements


def compiled_steps(page):
    """Inputs, mesh, axes of the rows, and what is summed over model besides, for each placement."""
    return [
        (page.in_eight, page.mesh, ("data", "model"), 8, {}),
        (page.in_four_by_two, page.tall_mesh, ("data",), 4, {("model",): 4 * 64 * 64 // 4}),
    ]


def test_the_loss_and_its_gradients_are_those_of_one_device(page):
    """In both placements."""
    loss_alone, gradients_alone = page.one_device
    for inputs, *_ in compiled_steps(page):
        loss, gradients = page.step(*inputs)
        np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, gradients_alone[name], rtol=1e-4, atol=1e-6)
    alone = page.step(page.params, page.x_host, page.target)[0]
    assert alone == loss_alone and len(loss_alone.devices()) == 1


def test_a_device_has_its_rows_of_the_batch_and_its_share_of_the_weights(page):
    """An eighth of the rows and all weights, or a quarter of the rows and half of the weights."""
    assert sum(w.nbytes for w in page.params.values()) == 66_048
    for inputs, _, _, rows, over_model in compiled_steps(page):
        for array in inputs[1:]:
            assert array.addressable_shards[0].data.shape == (64 // rows, 64)
        share = 2 if over_model else 1
        assert ms.memory(inputs[0]).bytes_per_device == 66_048 // share


@compiled_for_cpu
def test_a_step_sums_66052_bytes_or_37124(page):
    """Compiled for CPU: the gradients and the loss; on 4 x 2 the result of the second matmul too."""
    for inputs, mesh, row_axes, _, over_model in compiled_steps(page):
        moved = ms.collectives(page.step.lower(*inputs).compile(), mesh)
        expected = {row_axes: ms.memory(inputs[0]).bytes_per_device + 4, **over_model}
        assert sum(expected.values()) == (37_124 if over_model else 66_052)
        found = {axes: total.payload_bytes for axes, total in moved.by("axes").items()}
        assert found == expected and moved.kinds == {"all-reduce"}


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_sum_the_same(compiler):
    """The stored programs sum 66,052 and 37,124 bytes with each compiler."""
    for name, size in [("eight", 66_052), ("four-by-two", 37_124)]:
        moves = stored_program(f"arrays-{name}")[compiler]["moves"]
        assert {move["kind"] for move in moves} == {"all-reduce"}
        assert sum(move["payload"] for move in moves) == size


@compiled_for_cpu
def test_a_device_does_an_eighth_of_the_work(page):
    """Compiled for CPU, in both placements; little is computed twice."""
    alone = page.step.lower(page.params, page.x_host, page.target).compile()
    for inputs, *_ in compiled_steps(page):
        flops = page.step.lower(*inputs).compile().cost_analysis()["flops"]
        assert 1 < 8 * flops / alone.cost_analysis()["flops"] < 1.05


# JAX alone


def imported(source):
    """Top-level packages that a cell imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_the_chapter_needs_no_flax():
    """No cell imports it, and it is not loaded after the last one."""
    sources = [cell.source for cell in cells_of(PAGE)]
    assert "jax" in [name for source in sources for name in imported(source)]
    assert not [source for source in sources if "flax" in imported(source)]
    ends = "import sys", "print('loaded:', 'flax' in sys.modules)"
    code = "\n\n".join([*sources, *ends, "import flax", ends[1]])
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert [line for line in found.stdout.splitlines() if line.startswith("loaded")] == [
        "loaded: False",
        "loaded: True",
    ]


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
