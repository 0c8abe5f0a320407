"""The page "Restored, but too large"."""

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import meshscope as ms
from many_devices.helpers import attempt
from pages import check_exercise, exercises_of

PAGE = "05d-target-shardings"
P = jax.P


def same(one, two):
    """Two trees of the same structure with the same numbers."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two)))


# Constraints and annotations


def test_what_only_a_constraint_sharded_comes_back_whole(page):
    """Saved in eight pieces, loaded whole on every device, without an error."""
    kernel = 64 * 512 * 4
    assert kernel == 131_072
    assert ms.memory(page.pieces).bytes_per_device == kernel // page.mesh.size
    assert ms.memory(page.whole).bytes_per_device == kernel
    assert same(page.pieces, page.whole)


def test_for_a_stack_by_jax_vmap_the_target_shards_the_wrong_dimensions(page):
    """`jax.vmap` knows no annotations: layers and rows are sharded, without an error."""

    def stack():
        def layer(key):
            w_DF = jax.random.normal(key, (64, 512))
            return nnx.Param(w_DF, out_sharding=("data", "model"))

        return jax.vmap(layer)(jax.random.split(jax.random.key(0), 8))

    stacked = nnx.get_abstract_model(stack, page.mesh)[1]
    assert stacked.shape == (8, 64, 512)
    assert stacked.sharding.shard_shape(stacked.shape) == (4, 16, 512)
    assert 4 * 16 * 512 == 8 * 32 * 128  # as large as with the right dimensions


# By hand


def test_a_target_made_by_hand_is_the_target_of_the_annotations(page):
    """Shape, dtype and sharding are those of the same layer with an annotation."""

    def annotated():
        metadata = {"out_sharding": ("data", "model")}
        rngs = nnx.Rngs(0)
        return nnx.Linear(64, 512, use_bias=False, kernel_metadata=metadata, rngs=rngs)

    _, target = nnx.get_abstract_model(annotated, page.mesh)
    (wanted,) = jax.tree.leaves(target)
    assert jax.tree.leaves(page.by_hand) == [wanted]
    assert wanted.sharding == jax.NamedSharding(page.mesh, P("data", "model"))


def test_in_a_deeper_tree_each_kernel_has_its_own_path(page, monkeypatch):
    """The name is the joined path, so two kernels do not collide."""
    specs = {"first/kernel": P("data"), "blocks/0/kernel": P("model")}
    for name, spec in specs.items():
        monkeypatch.setitem(page.specs, name, spec)
    pair = nnx.Dict(first=page.linear(), blocks=nnx.List([page.linear()]))
    target = jax.tree.map_with_path(page.target_for, nnx.state(pair))
    assert target["first"]["kernel"].sharding.spec == P("data")
    assert target["blocks"][0]["kernel"].sharding.spec == P("model")


def test_with_a_target_by_hand_the_kernel_is_loaded_in_pieces(page):
    """One eighth is on each device, with the saved numbers."""
    assert ms.memory(page.in_pieces).bytes_per_device == 64 * 512 * 4 // page.mesh.size
    assert same(page.pieces, page.in_pieces)


# Explicit mode


def test_inside_set_mesh_types_are_a_target_also_on_another_mesh(page):
    """Saved on 2×4, loaded on 2×4 and on 4×2: the types are right, and the numbers equal."""
    saved = {"w_DF": page.w_DF}
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    other_mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit)
    with jax.set_mesh(other_mesh):
        moved = ocp.load(page.disk / "typed", {"w_DF": jax.eval_shape(page.typed)})
    for typed, mesh in ((page.typed_back, page.explicit_mesh), (moved, other_mesh)):
        assert str(jax.typeof(typed["w_DF"][...])) == "float32[96@data,384@model]"
        assert typed["w_DF"].sharding == jax.NamedSharding(mesh, P("data", "model"))
        assert same(typed, saved)


def test_outside_set_mesh_types_as_a_target_raise_an_error(page):
    """The types name axes and their sizes, and Orbax needs devices."""
    assert page.types["w_DF"].sharding.spec == P("data", "model")
    assert "not found in mesh" in attempt(ocp.load, page.disk / "typed", page.types)


def test_get_abstract_model_finds_no_annotations_and_asks_for_the_whole(page):
    """Every device gets the whole weight, without an error."""
    assert str(jax.typeof(page.whole_back["w_DF"][...])) == "float32[96,384]"
    held = ms.memory(page.whole_back).total_bytes
    assert held == 8 * ms.memory(page.typed_back).total_bytes
    assert same(page.typed_back, page.whole_back)


# Tied weights


def arrays_on_disk(folder):
    return len(jax.tree.leaves(ocp.metadata(folder).metadata))


def test_a_state_stores_a_tied_weight_once_and_a_module_twice(page):
    """Only from the state does it come back tied; from the module nothing says that it does not."""
    assert arrays_on_disk(page.disk / "state") == 1
    assert arrays_on_disk(page.disk / "module") == 2
    assert page.from_state.head is page.from_state.embed
    assert page.from_module.head is not page.from_module.embed
    for loaded in (page.from_state, page.from_module):
        assert np.array_equal(loaded.embed.embedding, page.tied.embed.embedding)


def test_an_untied_checkpoint_does_not_fit_a_tied_target(page, tmp_path):
    """`jax.jit` makes two arrays of one variable (chapter 3): two are on disk, and the load fails."""
    untied = jax.jit(page.make_tied)()
    ocp.save(tmp_path / "untied", nnx.state(untied))
    assert arrays_on_disk(tmp_path / "untied") == 2
    with pytest.raises(ValueError, match="do not match"):
        ocp.load(tmp_path / "untied", page.tied_target)


# The check


def test_bytes_on_each_device_find_each_mistake_of_the_page(page):
    """A wrong load is larger; a right one has the bytes of what was saved."""
    wrong = {"constraint", "Explicit, annotations", "tied, module"}
    for name, (saved, loaded) in page.loads.items():
        before, after = (ms.memory(tree).bytes_per_device for tree in (saved, loaded))
        assert after > before if name in wrong else after == before, name
    assert wrong < set(page.loads)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
