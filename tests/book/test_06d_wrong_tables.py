"""The page "Mistakes that Flax's tables accept"."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.checks import assert_placed
from many_devices.helpers import attempt
from many_devices.logical import Config, Rules, constrain, make, mesh_of, tiny
from many_devices.logical import weight as new_weight
from pages import check_exercise, compiled_for_cpu, exercises_of
from steps_by_table import RING, compiled, sent

PAGE = "06d-wrong-tables"
P = jax.P
NAMES = ("embed", "hidden")
HYBRID = Rules(batch="data", embed="data", hidden="model", heads="model", vocab="model")


def test_three_wrong_tables_raise(page):
    """A missing row, an axis that the mesh does not have, and a collision raise in Flax."""
    assert page.spec_of(page.columns, *NAMES) == P(None, "model")  # as meant
    for message, table in [
        ("Resource axis: embed of", [("hidden", "model")]),
        ("Resource axis: fsdp of", [("embed", "fsdp"), ("hidden", "model")]),
        ("DuplicateSpecError", [("embed", "model"), ("hidden", "model")]),
    ]:
        assert message in attempt(page.spec_of, table, *NAMES)
    assert "too many values" in attempt(page.spec_of, dict(page.columns), *NAMES)


def test_four_mistakes_pass(page):
    """A name that is an axis, a row that nothing uses, two rows for a name, too few names."""
    spec_of = page.spec_of
    assert spec_of(page.forgotten_row, "model", "hidden") == P("model", None)
    assert spec_of(page.misspelt, *NAMES) == P(None, "model")
    assert spec_of(page.two_rows, *NAMES) == P(None, "model")
    assert spec_of(page.two_rows[::-1], *NAMES) == P("data", "model")  # the last row wins
    assert spec_of(page.columns, "hidden") == P("model")
    assert spec_of(page.columns, "embed") == P(None)


def test_a_misspelt_row_has_no_effect_and_the_last_of_two_rows_wins(page):
    """Flax's tables raise for neither."""
    for rows, spec in [
        ([*page.columns, ("hiden", "data")], P(None, "model")),
        ([("embed", "data"), *page.columns], P(None, "model")),
        ([*page.columns, ("embed", "data")], P("data", "model")),
    ]:
        with jax.set_mesh(page.mesh), nnx.logical_axis_rules(rows):
            assert nnx.Param(np.ones((8, 8)), out_sharding=NAMES).sharding.spec == spec


def test_assert_placed_does_not_find_a_wrong_table(page):
    """Each weight is where the wrong table says, so it raises for none of the four."""

    class Layer(nnx.Module):
        def __init__(self, names):
            self.w = nnx.Param(np.ones((8, 8)), out_sharding=names)

    for table, names in [
        (page.forgotten_row, ("model", "hidden")),
        (page.misspelt, NAMES),
        (page.two_rows, NAMES),
        (page.columns, ("hidden",)),
    ]:
        with jax.set_mesh(page.mesh), nnx.logical_axis_rules(table):
            assert_placed(Layer(names), page.mesh)


def test_a_table_object_raises_for_a_forgotten_and_for_a_misspelt_row(page):
    """A name without a row is a KeyError, and a row that the class does not have a TypeError."""
    assert attempt(page.by_columns, "model", "hidden").startswith("KeyError: \"no row for 'model'")
    assert attempt(lambda: Rules(hidden="model", hiden="data")).startswith("TypeError")


def test_two_rows_for_a_name_are_a_syntax_error_in_a_table_object():
    """Two rows for embed would be a SyntaxError."""
    with pytest.raises(SyntaxError, match="keyword argument repeated: embed"):
        compile('Rules(embed="data", embed=None)', "a table", "eval")


def test_too_few_names_are_noticed_by_weight_and_constrain(page):
    """Both raise an error if a table object gets fewer names than the array has dimensions."""
    spec = HYBRID("embed")
    assert "for the shape" in attempt(new_weight, nnx.Rngs(0), (8, 8), spec)
    with jax.set_mesh(page.mesh):
        raised = attempt(constrain, np.ones((8, 8)), HYBRID, "embed")
    assert "for the shape" in raised
    with jax.set_mesh(page.mesh):
        assert nnx.Param(np.ones((8, 8)), out_sharding=HYBRID("embed")).sharding.spec == P("data")


# head_size along model

LONG = Config(L=2, D=1024, F=4096, H=8, C=128, S=2048)  # of the stored programs


def weights_of(config, rules, mesh):
    """Bytes of the weights on one device."""
    _, state = nnx.get_abstract_model(functools.partial(make, config, rules), mesh)
    return ms.memory(state[0]).bytes_per_device


@compiled_for_cpu
def test_head_size_may_take_a_free_axis():
    """head_size goes along any axis that its weight has free, without a change of the model."""
    rules, mesh = Rules(batch="data", embed="data", head_size="model"), mesh_of(2, 4)
    _, state = nnx.get_abstract_model(lambda: make(tiny, rules), mesh)
    attention = state[0]["blocks"]["attention"]
    assert attention["w_q_DHC"].sharding.spec == jax.P(None, "data", None, "model")
    assert attention["w_o_HCD"].sharding.spec == jax.P(None, None, "model", "data")


def test_head_size_adds_up_scores_and_heads_none():
    """Compiled for CPU, head_size along model adds up the S x S scores, twice in each layer."""
    by_size, mesh = compiled(LONG, Rules(head_size="model"), (1, 8), 8)
    by_heads, _ = compiled(LONG, Rules(heads="model"), (1, 8), 8)
    summed = [move for move in ms.collectives(by_size, mesh) if move.shape[-2:] == (LONG.S, LONG.S)]
    assert summed and all(move.kind == "all-reduce" for move in summed)
    scores = sum(move.payload_bytes * move.executions for move in summed)
    assert scores == 2 * LONG.L * 8 * LONG.H * LONG.S**2 * 4  # eight images, four bytes
    assert all(LONG.S not in move.shape[-1:] for move in ms.collectives(by_heads, mesh))


def test_head_size_divides_the_weights_as_evenly():
    """As much of the weights on each device as with heads along model."""
    tables = Rules(heads="model"), Rules(head_size="model")
    by_heads, by_size = (weights_of(LONG, rules, mesh_of(1, 8)) for rules in tables)
    assert by_heads == by_size < weights_of(LONG, Rules(), mesh_of(1, 1))


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_what_head_size_along_model_sends(compiler):
    """17 times what heads along model send, on H100 and TPU v5e: the scores, twice in each layer."""
    by_size, by_heads = (sent(key, compiler) for key in ("names-head-size", "names-heads"))
    assert round(by_size / by_heads) == 17
    scores = 8 * LONG.H * LONG.S**2 * 4
    assert by_size - by_heads == pytest.approx(2 * RING * 2 * LONG.L * scores, rel=1e-3)


def test_six_heads_work_with_a_model_axis_of_two():
    """A mesh whose model axis divides the heads, such as mesh_of(4, 2), shards six of them."""
    six = replace(tiny, H=6)
    mesh = mesh_of(4, 2)
    build = functools.partial(make, six, Rules(heads="model"))
    _, state = nnx.get_abstract_model(build, mesh)
    kernel = state[0]["blocks"]["attention"]["w_q_DHC"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 96, 3, 12)
    not_divided = jax.NamedSharding(mesh_of(1, 8), kernel.sharding.spec)
    assert "divi" in attempt(jax.device_put, np.zeros(kernel.shape), not_divided)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
