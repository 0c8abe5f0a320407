"""The page "From mesh axes to logical names, weight by weight"."""

import jax
import pytest
from flax import nnx

from many_devices.logical import Rules, mesh_of
from pages import check_exercise, exercises_of

PAGE = "06e-axes-to-names"
P = jax.P


def test_the_comparison_finds_the_one_weight_that_would_move(page):
    """Of chapter 4's MLP under names, b_D alone is sharded otherwise than before."""
    assert page.old.keys() == page.new.keys() and len(page.old) == 4
    moved = [
        path[-1]
        for path, weight in page.old.items()
        if not page.new[path].sharding.is_equivalent_to(weight.sharding, weight.ndim)
    ]
    assert moved == ["b_D"]
    b_D = page.new[("b_D",)]
    assert b_D.sharding.spec == P("data") and page.old[("b_D",)].sharding.is_fully_replicated
    assert b_D.sharding.shard_shape(b_D.shape) == (96 // 2,)  # half of it


def test_none_in_place_of_embed_keeps_the_bias_whole(page):
    """rules(None) is the spec that chapter 4 wrote for b_D."""
    assert page.hybrid(None) == P(None)


def test_chapter_4_wrote_these_specs(page):
    """The old model's specs are those of chapter 4's block, for FSDP x tensor."""
    from many_devices import model as chapter_4

    strategy = chapter_4.strategies["FSDP x tensor"]

    def make():
        return chapter_4.Block(chapter_4.tiny, strategy, nnx.Rngs(0))

    _, state = nnx.get_abstract_model(make, page.mesh)
    for (name,), weight in page.old.items():
        assert state[name].sharding.is_equivalent_to(weight.sharding, weight.ndim), name


def test_nothing_is_allocated_for_the_comparison(page):
    """The weights that are compared are shapes with shardings."""
    for weight in (*page.old.values(), *page.new.values()):
        assert isinstance(weight.get_value(), jax.ShapeDtypeStruct)


def test_another_table_is_another_strategy(page):
    """Under tensor parallelism's table the same names shard the hidden units and nothing else."""
    mesh = mesh_of(1, 8)
    found = page.weights_of(lambda: page.MLP(96, 384, page.tensor), mesh)
    pieces = {name: w.sharding.shard_shape(w.shape) for (name,), w in found.items()}
    assert pieces == {"w_DF": (96, 48), "b_F": (48,), "w_FD": (48, 96), "b_D": (96,)}


def test_two_names_for_one_axis_can_be_told_apart(page):
    """With a row each, a table shards the heads and leaves the hidden units whole."""
    rules = Rules(heads="model")
    assert rules("heads") == P("model") and rules("hidden") == P(None)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
