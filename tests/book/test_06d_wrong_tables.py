"""The page "Mistakes that Flax's tables accept"."""

import jax
import numpy as np
import pytest
from flax import nnx

from many_devices.checks import assert_placed
from many_devices.helpers import attempt
from many_devices.logical import Rules, constrain
from many_devices.logical import weight as new_weight
from pages import check_exercise, exercises_of

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


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
