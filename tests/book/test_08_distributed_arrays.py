"""Chapter 8, "Committed arrays and constraints: who decides where a result lives"."""

import ast
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import attempt, put, traffic
from pages import cells_of, check_exercise, compiled_for_cpu, exercises_of, source_of

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
    """`placement_of` says the devices and whether the result is committed, or that it raises."""
    assert page.placement_of(jnp.add, page.loose, page.far) == "on [7], committed: True"
    assert page.placement_of(jnp.add, page.loose, 1) == "on [0], committed: False"
    assert page.placement_of(jnp.add, page.near, page.far) == "raises ValueError"


def fresh(page):
    """A new array, made inside set_mesh."""
    with jax.set_mesh(page.mesh):
        return jnp.asarray(page.host)


def test_the_assertion_about_the_sharding_of_the_batch(page):
    """It holds of a batch by rows, and not of one on one device, replicated or by columns."""
    (advice,) = re.findall(r"`assert (batch\.sharding\..*?)`", source_of(PAGE).read_text("utf-8"))
    right = page.rows_BD, put(page.x_host, page.mesh, "data")
    wrong = page.loose, page.near, fresh(page), page.columns_DD, page.spread
    for batches, holds in [(right, True), (wrong, False)]:
        for batch in batches:
            assert eval(advice, {"jax": jax, "P": P, "mesh": page.mesh, "batch": batch}) == holds


# jax.set_mesh


def test_a_new_array_is_committed_to_the_mesh_as_copies(page):
    """jnp.asarray of NumPy's numbers, inside set_mesh: a whole copy on each of eight devices."""
    array = fresh(page)
    assert array.committed and array.sharding.is_fully_replicated
    assert ms.memory(array).total_bytes == page.mesh.size * page.host.nbytes


# Received incompatible devices


def turned(page):
    """Like `spread`, on a mesh of the same devices in the opposite order."""
    mesh = page.mesh
    backwards = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    return put(page.host, backwards, "data", "model")


def test_the_message_names_both_sides(page):
    """It lists the devices of both arrays; for two orders of the same devices as well."""
    first, second = (
        message(jnp.add, page.far, page.spread),
        message(jnp.add, turned(page), page.spread),
    )
    assert "device ids [7]" in first and "[0, 1, 2, 3, 4, 5, 6, 7]" in first
    assert second.count("device ids") == 2
    assert turned(page).devices() == page.spread.devices()


def test_device_put_repairs_both(page):
    """Put onto the sharding of spread, both arrays can be added to it."""
    for repaired in (page.far_on_the_mesh, jax.device_put(turned(page), page.spread.sharding)):
        assert repaired.sharding == (repaired + page.spread).sharding == page.spread.sharding
        np.testing.assert_array_equal(repaired + page.spread, page.host + page.host)


# The mode of the mesh


@compiled_for_cpu
def test_in_auto_mode_the_compiler_chooses_a_sharding(page):
    """Compiled for CPU, the rows of a product over a dimension that is sharded in both stay along data."""
    assert (page.spread @ page.spread.T).sharding.spec == P("data")


# Constraints


def test_a_constraint_that_replicates_is_an_all_gather_of_the_whole_matrix(page):
    """One collective, along data, and the result is the sine on every device."""
    (move,) = traffic(page.sine_everywhere, page.rows_BD, mesh=page.mesh)
    assert (move.kind, move.payload_bytes, move.axes) == ("all-gather", WHOLE, ("data",))
    result = jax.jit(page.sine_everywhere)(page.rows_BD)
    assert result.sharding.is_fully_replicated
    np.testing.assert_allclose(result, np.sin(page.x_host), rtol=1e-5)


@pytest.mark.parametrize("compiler", ["gpu", "tpu", "cpu"])
def test_the_compilers_for_h100_and_tpu_move_the_same_for_a_constraint(compiler):
    """The stored program: an all-gather of the whole matrix."""
    moves = stored_program("arrays-everywhere")[compiler]["moves"]
    assert [(move["kind"], move["payload"]) for move in moves] == [("all-gather", WHOLE)]


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
    """The sine before the constraint, and a cosine after it, are replicated as it says."""
    seen = []

    def spy(x):
        jax.debug.inspect_array_sharding(x, callback=seen.append)
        return x

    def spied(x_BD):
        h_BD = page.pin(spy(jnp.sin(x_BD)), page.everywhere)
        return spy(jnp.cos(h_BD))

    jax.jit(spied).lower(page.rows_BD).compile()
    assert len(seen) == 2
    assert all(sharding.is_fully_replicated for sharding in seen)


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


def test_compatible_shardings_are_merged(page):
    """Rows along data plus columns along model is sharded along both axes."""
    found = (page.rows_BD + page.columns_DD).sharding
    assert found.is_equivalent_to(page.x_BD.sharding, 2)


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
