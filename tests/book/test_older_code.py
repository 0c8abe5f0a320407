"""From older code: what each older form says now, and what took its place."""

import importlib
import re
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.experimental.shard_map
import jax.extend.backend
import jax.interpreters.pxla
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pytest
from flax import jax_utils, nnx
from flax.linen import partitioning
from flax.training import common_utils
from jax.experimental import mesh_utils, multihost_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType
from orbax.checkpoint import v1 as ocp

from pages import compiled_for_cpu, source_of

PAGE = "older-code"
P = jax.P


def there(name):
    """Whether the installed releases have what a dotted name such as jax.sharding.Mesh names."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def table_below(heading):
    """The rows of the first table below a heading, without its head."""
    text = source_of(PAGE).read_text("utf-8").split(f"\n{heading}\n", 1)[1]
    lines = [line for line in re.split(r"\n#+ ", text)[0].splitlines() if line.startswith("|")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def code_in(cell):
    """What a cell of a table says in code."""
    return re.findall(r"`([^`]+)`", cell)


def assert_all_add_up(page, name):
    """Today's form of this name gives the sum of all 64 numbers."""
    assert float(page.said[name][1]) == page.x_host.sum() == 2016


def deprecated(module, name):
    """A deprecated name of JAX, which must warn. JAX warns only once for each name and process."""
    module.__getattr__.cache_clear()
    with pytest.warns(DeprecationWarning, match=f"{module.__name__}.* is deprecated"):
        return getattr(module, name)


# JAX: meshes and specs


def test_with_mesh_warns_and_set_mesh_does_not(page):
    """`with mesh:` is deprecated; inside jax.set_mesh a constraint finds the mesh."""
    older, today = page.said["with mesh"]
    assert older.startswith("DeprecationWarning: `with mesh:` context")
    assert today == str(P("data"))


def test_use_mesh_is_gone(page):
    """jax.sharding has no use_mesh; jax.set_mesh sets the mesh for a block."""
    older, today = page.said["use_mesh"]
    assert older.endswith("has no attribute 'use_mesh'") and today == str(("data", "model"))


def test_make_mesh_without_axis_types_makes_explicit_axes(page):
    """Without axis_types= the axes are Explicit, so that an ambiguous product raises; Auto gives it."""
    older, today = page.said["axis_types"]
    assert "Contracting dimensions are sharded" in older
    assert float(today) == (page.x_host @ page.x_host).sum()


def test_axis_shapes_became_axis_sizes(page):
    """The keyword axis_shapes raises a TypeError since JAX 0.11.1; by position both work."""
    older, today = page.said["axis_shapes"]
    assert older.startswith("TypeError") == (jax.__version_info__ >= (0, 11, 1))
    assert today == "8"


def test_positional_sharding_is_gone(page):
    """PositionalSharding cannot be imported; a NamedSharding shards by rows."""
    older, today = page.said["PositionalSharding"]
    assert "cannot import name 'PositionalSharding'" in older and today == str(P("data"))


def test_specs_and_meshes_moved_to_jax_sharding(page):
    """jax.experimental.maps is gone; Mesh and PartitionSpec, which is jax.P, are in jax.sharding."""
    older, today = page.said["PartitionSpec"]
    assert "No module named 'jax.experimental.maps'" in older and today == "True"


def test_a_spec_is_not_a_tuple_and_does_not_equal_one(page):
    """Without a message, a spec compared with a tuple is False, and so is isinstance."""
    assert page.said["spec and tuple"] == ["(False, False)", "(True, True)"]


def test_thread_resources_warns_and_does_not_see_set_mesh(page):
    """pxla.thread_resources warns, and finds no mesh inside jax.set_mesh."""
    thread_resources = deprecated(jax.interpreters.pxla, "thread_resources")
    with jax.set_mesh(page.mesh):
        assert thread_resources.env.physical_mesh.empty
    assert page.said["thread_resources"][1] == "(2, 4)"


# The current mesh


CURRENT = "### The current mesh: `jax.get_mesh`, `get_abstract_mesh`, `get_concrete_mesh`"


def test_functions_for_the_current_mesh_are_there_since_the_release_named():
    """Each function is in jax.sharding, and by its short name since JAX 0.11.1; set_mesh is one."""
    rows = table_below(CURRENT)
    assert len(rows) == 4 and not there("jax.sharding.get_concrete_mesh")
    assert jax.sharding.set_mesh is jax.set_mesh and not there("jax.sharding.use_mesh")
    for _, today, since in rows[1:]:
        (name,), (short,) = code_in(today), code_in(since)
        assert there(name) and re.fullmatch(r"[\d.]+; as `[\w.]+` 0\.11\.1", since)
        assert there(short) == (jax.__version_info__ >= (0, 11, 1)), short


def test_get_mesh_has_devices_and_get_abstract_mesh_works_inside_jit(page):
    """Outside jit get_mesh gives the mesh; inside it raises, and get_abstract_mesh gives the axes."""
    seen = []

    @jax.jit
    def look(x):
        seen.append(jax.sharding.get_abstract_mesh())
        with pytest.raises(ValueError, match="can only be used outside of `jax.jit`"):
            jax.sharding.get_mesh()
        return x

    with jax.set_mesh(page.mesh):
        assert jax.sharding.get_mesh() == page.mesh
        look(page.x_host)
    assert seen[0].axis_names == ("data", "model") and seen[0].axis_types == page.mesh.axis_types
    assert page.said["current mesh"] == ["(2, 4)", "(2, 4)"]


@pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")
def test_none_of_them_sees_the_mesh_of_with_mesh(page):
    """Inside `with mesh:` neither get_mesh nor get_abstract_mesh knows of a mesh."""
    with page.mesh:
        assert jax.sharding.get_mesh().empty and jax.sharding.get_abstract_mesh().empty


def test_use_abstract_mesh_sets_another_mesh_inside_jit(page):
    """Inside jit, use_abstract_mesh replaces the current mesh for a block."""
    seen = []

    @jax.jit
    def look(x):
        with jax.sharding.use_abstract_mesh(page.explicit.abstract_mesh):
            seen.append(jax.sharding.get_abstract_mesh().axis_types)
        return x

    with jax.set_mesh(page.mesh):
        look(page.x_host)
    assert seen == [page.explicit.axis_types] != [page.mesh.axis_types]


# jax.experimental.shard


def test_experimental_shard_is_gone_and_its_functions_are_in_jax_sharding(page):
    """The module is gone; reshard, auto_axes and explicit_axes of jax.sharding do what they did."""
    assert page.said["experimental.shard"][0].startswith("ModuleNotFoundError: No module named")
    assert page.said["experimental.shard"][1] == "float32[8,8@model] and float32[8@data,8]"
    assert all(there(f"jax.sharding.{name}") for name in ("reshard", "auto_axes", "explicit_axes"))
    assert jax.reshard is jax.sharding.reshard
    with jax.set_mesh(page.explicit):
        x = jax.reshard(page.x_host, P(None, "model"))
        y = jax.sharding.auto_axes(lambda x: x @ x.T, out_sharding=P("data"))(x)
    np.testing.assert_array_equal(y, page.x_host @ page.x_host.T)
    with pytest.raises(TypeError, match="out_shardings"):
        jax.sharding.auto_axes(jnp.sin, out_shardings=P("data"))


# TransferToMemoryKind


def test_transfer_to_memory_kind_is_gone_and_a_space_keeps_the_sharding(page):
    """jax.memory.Space moves an array to the host and back, also inside jit, sharded as it was."""
    assert "cannot import name 'TransferToMemoryKind'" in page.said["memory kind"][0]
    assert page.said["memory kind"][1] == "('pinned_host', P('data',))"
    device_kind = page.placed.sharding.memory_kind
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    on_host = jax.device_put(page.placed, host)
    inside = jax.jit(lambda x: jax.device_put(x, host))(page.placed)
    back = jax.device_put(on_host, device)
    for moved, kind in ((on_host, "pinned_host"), (inside, "pinned_host"), (back, device_kind)):
        assert moved.sharding.memory_kind == kind and moved.sharding.spec == P("data")
        np.testing.assert_array_equal(moved, page.x_host)
    assert device_kind != "pinned_host"


# DeviceLocalLayout


def test_device_local_layout_is_layout_and_layout_is_format(page):
    """DeviceLocalLayout is gone; Layout takes an order and no sharding, and Format takes both."""
    assert "cannot import name 'DeviceLocalLayout'" in page.said["DeviceLocalLayout"][0]
    assert page.said["DeviceLocalLayout"][1] == "(1, 0)"
    with pytest.raises(TypeError):
        Layout(Layout(major_to_minor=(1, 0)), page.by_rows)
    assert page.placed.format.layout.major_to_minor == (0, 1)  # where nobody asks
    columns = jax.device_put(page.x_host, Format(Layout(major_to_minor=(1, 0)), page.by_rows))
    assert columns.sharding.spec == P("data")
    np.testing.assert_array_equal(columns, page.x_host)


def test_layout_of_arrays_and_programs_is_called_format(page):
    """An array has format and no layout, a compiled program input_formats and no input_layouts."""
    compiled = jax.jit(jnp.sin).lower(page.placed).compile()
    assert hasattr(page.placed, "format") and not hasattr(page.placed, "layout")
    assert hasattr(compiled, "input_formats") and not hasattr(compiled, "input_layouts")
    assert hasattr(compiled, "output_formats") and not hasattr(compiled, "output_layouts")


# GSPMDSharding, PmapSharding, xla_bridge, and other names


def test_what_jit_and_pmap_return_has_a_named_sharding(page):
    """GSPMDSharding and PmapSharding are gone: jit and pmap give a NamedSharding."""
    assert "cannot import name 'GSPMDSharding'" in page.said["GSPMDSharding"][0]
    assert page.said["GSPMDSharding"][1] == "('NamedSharding', P(None, 'data'))"
    assert not there("jax.sharding.GSPMDSharding") and not there("jax.sharding.PmapSharding")
    results = jax.jit(lambda x: x[:, ::2])(page.placed), jax.pmap(jnp.sin)(page.x_host)
    assert {type(result.sharding) for result in results} == {jax.NamedSharding}


def test_xla_bridge_is_gone_and_jax_itself_tells_the_back_end(page):
    """jax.lib has no xla_bridge, xla_client or xla_extension; JAX tells the back end and devices."""
    assert "cannot import name 'xla_bridge'" in page.said["xla_bridge"][0]
    assert page.said["xla_bridge"][1] == f"('{jax.default_backend()}', {jax.device_count()})"
    assert not any(there(f"jax.lib.xla_{name}") for name in ("bridge", "client", "extension"))
    assert jax.extend.backend.get_backend().platform == jax.default_backend()


def test_other_names_are_gone_and_todays_are_there():
    """Each name in the first column is gone from the installed release, each in the second is there."""
    rows = table_below("### Other names that are gone")
    assert len(rows) >= 12
    for older, today, _ in rows:
        for name in code_in(older):
            plain = re.sub(r"^from (\S+) import (\w+)$", r"\1.\2", name)
            assert not there(plain), name
        names = [name for name in code_in(today) if "(" not in name]
        assert all(there(name) for name in names), today


def test_xla_computation_is_lower():
    """jax.jit(f).lower(x) gives the program's text that jax.xla_computation gave."""
    assert "sine" in jax.jit(jnp.sin).lower(1.0).as_text()


# JAX: shard_map and what came before it


def test_the_experimental_shard_map_warns():
    """The import from jax.experimental.shard_map is deprecated, and jax says so."""
    assert callable(deprecated(jax.experimental.shard_map, "shard_map"))


def test_jax_shard_map_adds_up_all_rows(page):
    """jax.shard_map with a psum gives the sum over all devices, as the older import did."""
    assert_all_add_up(page, "experimental.shard_map")


def test_check_rep_is_check_vma(page):
    """shard_map takes no check_rep; it is called check_vma."""
    assert "unexpected keyword argument 'check_rep'" in page.said["check_rep"][0]
    assert_all_add_up(page, "check_rep")


def test_shard_map_takes_keywords_only(page):
    """Mesh and specs given by position raise; a mesh that is set need not be named."""
    assert "positional argument" in page.said["positional"][0]
    assert_all_add_up(page, "positional")


def test_auto_became_axis_names(page):
    """shard_map takes no auto=; axis_names= names the axes that are written by hand."""
    assert "unexpected keyword argument 'auto'" in page.said["auto"][0]
    assert_all_add_up(page, "auto")


def test_pvary_became_pcast(page):
    """jax.lax has no pvary; pcast(to="varying") marks a carry that varies."""
    older = page.said["pvary"][0]
    assert older.startswith("AttributeError") and "pvary" in older
    assert_all_add_up(page, "pvary")


def test_xmap_is_gone(page):
    """jax.experimental.maps is gone, and xmap with it; jax.vmap under jax.jit gives the sum."""
    assert "No module named 'jax.experimental.maps'" in page.said["xmap"][0]
    assert_all_add_up(page, "xmap")


# JAX: pjit and pmap


def test_pjit_takes_no_axis_resources(page):
    """in_axis_resources= of pjit is gone, and jax.jit takes in_shardings=."""
    assert "unexpected keyword argument 'in_axis_resources'" in page.said["pjit"][0] or (
        "jax.experimental.pjit.pjit has been deprecated" in page.said["pjit"][0]
    )
    assert_all_add_up(page, "pjit")


def test_a_constraint_takes_no_axis_resources(page):
    """with_sharding_constraint takes no axis_resources=."""
    older, today = page.said["axis_resources"]
    assert "unexpected keyword argument 'axis_resources'" in older and today == str(P("data"))


def test_device_of_jit_warns_and_a_placed_input_does_the_same(page):
    """jax.jit(device=) warns; with an input placed on device 1, the sum is made there."""
    assert page.said["jit device"][0].startswith("DeprecationWarning: backend and device")
    assert_all_add_up(page, "jit device")
    second = jax.devices()[1]
    assert jax.jit(jnp.sum)(jax.device_put(page.x_host, second)).devices() == {second}


def test_pmap_still_works_and_jit_gives_the_same(page):
    """pmap's shares add up to 1, and so do those of jax.jit, whose spec names the mesh's axis."""
    assert page.said["pmap"] == [str((P("i"), 1.0)), str((P("data"), 1.0))]


def test_a_row_of_a_result_of_pmap_is_copied_to_all_devices():
    """[0] of what pmap returns is whole on all eight devices."""
    row = jax.pmap(lambda x_D: 2 * x_D)(np.ones((8, 8), "float32"))[0]
    assert len(row.sharding.device_set) == 8 and row.sharding.is_fully_replicated


def test_device_put_replicated_is_gone(page):
    """device_put_replicated raises; with P() each of eight devices holds a copy of (8, 8)."""
    older, today = page.said["device_put_replicated"]
    assert "device_put_replicated is deprecated" in older and today == str(((8, 8), 8))


def test_replicate_of_flax_adds_a_dimension(page):
    """flax.jax_utils.replicate still works, and adds a dimension of eight devices."""
    assert jax_utils.replicate(page.x_host).shape == (8, 8, 8)


def test_device_put_sharded_is_gone(page):
    """device_put_sharded raises; device_put by rows leaves one row on each device."""
    older, today = page.said["device_put_sharded"]
    assert "device_put_sharded is deprecated" in older and today == str(((8, 8), (1, 8)))


# JAX: trees, keys, arrays


def test_tree_map_is_gone(page):
    """jax has no tree_map; jax.tree.map does the same. So are tree_leaves and tree_flatten."""
    assert page.said["tree_map"][0].endswith("has no attribute 'tree_map'")
    assert_all_add_up(page, "tree_map")
    for name in ("leaves", "flatten"):
        assert not there(f"jax.tree_{name}") and there(f"jax.tree.{name}")


def test_a_key_is_an_array_with_a_dtype_of_its_own(page):
    """jax.random has no KeyArray: a key's dtype is a prng_key."""
    older, today = page.said["KeyArray"]
    assert older.endswith("has no attribute 'KeyArray'") and today == "True"


def test_key_and_prngkey_give_the_same_numbers():
    """jax.random.PRNGKey still works, and draws the numbers of jax.random.key."""
    drawn = [jax.random.normal(make(0), (4,)) for make in (jax.random.key, jax.random.PRNGKey)]
    np.testing.assert_array_equal(*drawn)


def test_numbers_drawn_before_jax_0_5_differ_without_a_message(page):
    """The flag of before gives other numbers from the same key, and nothing says so."""
    before, now = (np.array(words.strip("[]").split(), float) for words in page.said["numbers"])
    assert before.shape == now.shape == (2,) and not np.isclose(before, now).any()


def test_device_buffer_is_gone(page):
    """An array has no device_buffer; it has shards, and devices() in place of device()."""
    older, today = page.said["device_buffer"]
    assert "device_buffer has been deprecated" in older and today == str(((1, 8), 8))


# Flax NNX before 0.12


def test_an_optimizer_needs_wrt(page):
    """nnx.Optimizer without wrt= raises."""
    older, today = page.said["wrt"]
    assert "As of Flax 0.11.0 the `wrt` argument is required" in older and today == "0"


def test_update_needs_the_model_and_the_gradients(page):
    """update(grads) raises; update(model, grads) takes one step of SGD by the right gradient."""
    older, today = page.said["update"]
    assert "update requires both (model, grads)" in older and today == "(1, -21.4)"
    column = page.x_host.sum(axis=0)  # the gradient of each column of w
    np.testing.assert_allclose(page.gradients.w[:, 0], column)
    np.testing.assert_allclose(page.layer.w[0, 0], 1 - 0.1 * column[0])


def test_value_of_a_variable_warns(page):
    """w.value warns; w[...] and w.get_value() give the array."""
    older, today = page.said["value"]
    assert "'.value' access is now deprecated" in older and today == str(((8, 8), (8, 8)))


def test_an_in_place_operation_on_a_variable_raises(page):
    """w += 1 raises; w[...] += 1 adds."""
    older, today = page.said["in place"]
    assert "In-place operations are no longer supported" in older and today == "2.0"


def test_the_annotation_is_called_out_sharding(page):
    """sharding= warns; whichever keyword wrote it, the metadata have no "sharding"."""
    older, today = page.said["sharding="]
    assert "'sharding' is deprecated, use 'out_sharding'" in older
    assert today == str((P("data", "model"), None))
    with warnings.catch_warnings(action="ignore"):
        for keyword in ("sharding", "sharding_names"):
            found = page.annotated(**{keyword: ("data", "model")})
            assert found == (P("data", "model"), None)


def test_an_annotated_variable_needs_a_mesh(page):
    """Without a mesh an annotated variable raises; inside jax.set_mesh it is sharded at once."""
    older, today = page.said["without mesh"]
    assert "mesh context or metadata is required" in older and today == "(4, 2)"


def test_flax_does_not_see_the_mesh_of_with_mesh(page):
    """Inside `with mesh:` an annotated variable raises as well."""
    older, today = page.said["flax with mesh"]
    assert "mesh context or metadata is required" in older
    assert today == str(P("data", "model"))


def test_the_constraint_of_nnx_is_gone(page):
    """nnx has no with_sharding_constraint; jax.lax has it."""
    older, today = page.said["nnx constraint"]
    assert "has no attribute 'with_sharding_constraint'" in older and today == str(P("data"))


def test_a_plain_list_of_layers_raises(page):
    """A list that holds weights raises; nnx.List holds two layers with two weights."""
    older, today = page.said["list"]
    assert "assigned to static attribute 'layers'" in older and today == "2"


def test_methods_of_state_warn(page):
    """state.flat_state() warns; nnx.to_flat_state gives the paths. Each has its function."""
    older, today = page.said["state"]
    assert "Please use the equivalent `nnx.to_flat_state`" in older and today == "[('w',)]"
    for name in ("to_flat_state", "to_pure_dict", "split_state", "filter_state"):
        assert there(f"flax.nnx.{name}")


def test_linen_returns_plain_dictionaries(page):
    """params.unfreeze() raises: Linen's parameters are a dict."""
    older, today = page.said["unfreeze"]
    assert "no attribute 'unfreeze'" in older and today == "['bias', 'kernel']"


# Orbax: from v0 to v1


def same(found, page):
    np.testing.assert_array_equal(found["w"], page.x_host)
    return found["w"].sharding.is_fully_replicated


def steps_of(saver):
    return [each.step for each in saver.checkpoints]


def test_both_managers_keep_the_same_steps_and_load_onto_the_target(page):
    """Of six steps both keep 2 and 4, and load them with the target's sharding and right numbers."""
    assert page.said["manager"] == ["([2, 4], P())"] * 2
    for name in ("v0", "v1"):
        with ocp.training.Checkpointer(page.disk / name) as saver:
            assert steps_of(saver) == [2, 4] and saver.latest.step == 4
    with ocp.training.Checkpointer(page.disk / "v1") as saver:
        assert same(saver.load(4, page.target), page)
    with v0.CheckpointManager(page.disk / "v0") as manager:
        assert manager.all_steps() == [2, 4] and manager.latest_step() == 4
        assert same(manager.restore(4, args=v0.args.StandardRestore(page.target)), page)


def test_save_waits_for_a_complete_checkpoint_and_save_async_need_not(page, tmp_path):
    """When saver.save returns, the step is complete; save_async is complete after its result."""
    with ocp.training.Checkpointer(tmp_path / "steps") as saver:
        saver.save(1, page.tree)
        assert ocp.is_orbax_checkpoint(tmp_path / "steps" / "1")
        assert saver.save_async(2, page.tree).result() and steps_of(saver) == [1, 2]
        saver.save_async(3, page.tree)
        saver.wait()
        assert steps_of(saver) == [1, 2, 3] and not hasattr(saver, "restore")
    assert v0.CheckpointManagerOptions().enable_async_checkpointing


def test_several_things_in_a_step(page):
    """Composite and save_checkpointables keep a dictionary beside the tree, and v1 reads v0's."""
    assert page.said["composite"] == ["{'tokens': 7}"] * 2
    for name in ("v0-things", "v1-things"):
        with ocp.training.Checkpointer(page.disk / name) as saver:
            found = saver.load_checkpointables(1, {"state": page.target, "data": None})
        assert same(found["state"], page) and found["data"] == {"tokens": 7}


def test_custom_metadata_is_enough_for_a_few_numbers(page, tmp_path):
    """custom_metadata of save comes back in metadata(step).custom_metadata."""
    with ocp.training.Checkpointer(tmp_path / "noted") as saver:
        saver.save(1, page.tree, custom_metadata={"tokens": 7})
        assert saver.metadata(1).custom_metadata == {"tokens": 7}


def test_a_step_of_checkpoint_manager_is_called_default(page):
    """v1 raises KeyError for an unnamed step of v0, and reads it as "default"; ocp.load finds it."""
    error, found = page.said["default"]
    assert error.startswith("KeyError") and "Available checkpointables: ['default']" in error
    assert found == "P()"
    assert same(ocp.load(page.disk / "v0" / "4", page.target), page)


def test_v0_reads_v1_from_the_folder_state(page, tmp_path):
    """StandardCheckpointer fails on what v1 saved, and reads the folder `state` inside it."""
    ocp.save(tmp_path / "new", page.tree)
    with v0.StandardCheckpointer() as older:
        with pytest.raises(Exception, match="not found"):
            older.restore(tmp_path / "new", page.target)
        assert same(older.restore(tmp_path / "new" / "state", page.target), page)


@pytest.mark.parametrize("kind", [v0.StandardCheckpointer, v0.PyTreeCheckpointer])
def test_v1_loads_what_the_checkpointers_of_v0_saved(page, tmp_path, kind):
    """ocp.load reads what StandardCheckpointer and PyTreeCheckpointer saved."""
    with kind() as older:
        older.save(tmp_path / "older", page.tree)
        if hasattr(older, "wait_until_finished"):
            older.wait_until_finished()
    assert same(ocp.load(tmp_path / "older", page.target), page)


def test_save_async_takes_the_place_of_async_checkpointer(page, tmp_path):
    """AsyncCheckpointer, then waiting, and save_async, then its result, leave the same tree."""
    with v0.AsyncCheckpointer(v0.StandardCheckpointHandler()) as older:
        older.save(tmp_path / "older", args=v0.args.StandardSave(page.tree))
        older.wait_until_finished()
    ocp.save_async(tmp_path / "newer", page.tree).result()
    for name in ("older", "newer"):
        assert same(ocp.load(tmp_path / name, page.target), page)


def test_the_target_says_what_restore_args_said(page, tmp_path):
    """Dtype and sharding that v0 takes from restore_args, v1 takes from the target."""
    like = page.w_target
    target = {"w": jax.ShapeDtypeStruct(like.shape, "bfloat16", sharding=like.sharding)}
    with v0.PyTreeCheckpointer() as older:
        older.save(tmp_path / "older", page.tree)
        restore_args = v0.checkpoint_utils.construct_restore_args(target)
        assert isinstance(restore_args["w"], v0.ArrayRestoreArgs)
        args = v0.args.PyTreeRestore(item=target, restore_args=restore_args)
        found = older.restore(tmp_path / "older", args=args)["w"]
    loaded = ocp.load(tmp_path / "older", target)["w"]
    assert found.dtype == loaded.dtype == jnp.bfloat16
    assert found.sharding == loaded.sharding == like.sharding


def run_both(page, folder, options, policies, metrics=(None,) * 6):
    """Save six steps with v0's options and with v1's policies; the steps that each kept."""
    with v0.CheckpointManager(folder / "v0", options=v0.CheckpointManagerOptions(**options)) as old:
        for step, metric in enumerate(metrics):
            old.save(step, args=v0.args.StandardSave(page.tree), metrics=metric)
        old.wait_until_finished()
        kept = list(old.all_steps())
    with ocp.training.Checkpointer(folder / "v1", **policies) as saver:
        for step, metric in enumerate(metrics):
            saver.save(step, page.tree, metrics=metric)
        return kept, steps_of(saver)


KEEP, WHEN = ocp.training.preservation_policies, ocp.training.save_decision_policies


def lowest(metrics):
    return metrics["loss"]


@pytest.mark.parametrize(
    "options, policies, kept",
    [
        (
            dict(save_interval_steps=2),
            dict(save_decision_policy=WHEN.FixedIntervalPolicy(2)),
            [0, 2, 4],
        ),
        (dict(max_to_keep=2), dict(preservation_policy=KEEP.LatestN(2)), [4, 5]),
        (
            dict(max_to_keep=1, keep_period=2),
            dict(
                preservation_policy=KEEP.AnyPreservationPolicy(
                    [KEEP.LatestN(1), KEEP.EveryNSteps(2)]
                )
            ),
            [0, 2, 4, 5],
        ),
        (
            dict(best_fn=lowest, best_mode="min", max_to_keep=2),
            dict(preservation_policy=KEEP.BestN(get_metric_fn=lowest, reverse=True, n=2)),
            [1, 4],
        ),
    ],
    ids=["every second", "the last two", "the last and every second", "the best two"],
)
def test_policies_do_what_options_did(page, tmp_path, options, policies, kept):
    """Of six steps, with losses 5, 1, 4, 6, 2, 3, policies of v1 keep what options of v0 kept."""
    metrics = [{"loss": loss} for loss in (5.0, 1.0, 4.0, 6.0, 2.0, 3.0)]
    assert run_both(page, tmp_path, options, policies, metrics) == (kept, kept)


def test_metrics_come_back(page, tmp_path):
    """manager.metrics(step) and saver.metadata(step).metrics give the metrics of a step."""
    options = v0.CheckpointManagerOptions(best_fn=lowest)
    with v0.CheckpointManager(tmp_path / "v0", options=options) as old:
        old.save(1, args=v0.args.StandardSave(page.tree), metrics={"loss": 1.0})
        old.wait_until_finished()
        assert old.metrics(1) == {"loss": 1.0}
    with ocp.training.Checkpointer(tmp_path / "v1") as saver:
        saver.save(1, page.tree, metrics={"loss": 1.0})
        assert saver.metadata(1).metrics == {"loss": 1.0}


def test_a_part_of_a_tree_is_loaded_with_partial_load(page, tmp_path):
    """partial_restore=True of v0 and partial_load of v1 read what the target names, and only that."""
    with v0.PyTreeCheckpointer() as older:
        older.save(tmp_path / "two", page.tree | {"v": page.placed})
        args = v0.args.PyTreeRestore(
            item=page.target,
            partial_restore=True,
            restore_args=v0.checkpoint_utils.construct_restore_args(page.target),
        )
        assert list(older.restore(tmp_path / "two", args=args)) == ["w"]
    with pytest.raises(Exception, match="do not match"):
        ocp.load(tmp_path / "two", page.target)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp.load(tmp_path / "two", page.target)
    assert list(found) == ["w"] and same(found, page)


def test_every_name_of_the_table_of_orbax_exists():
    """Names of v0's column are in orbax.checkpoint, those of v1's in orbax.checkpoint.v1."""
    rows = table_below("### Orbax v0 and v1, call by call")
    assert len(rows) >= 13
    for older, newer in rows:
        for name in re.findall(r"\b(?:[a-z_]+\.)?[A-Z]\w+", " ".join(code_in(older))):
            assert there(f"orbax.checkpoint.{name}") or name == "True", name
        for name in re.findall(r"\bocp\.([\w.]+)", " ".join(code_in(newer))):
            assert there(f"orbax.checkpoint.v1.{name}"), name


# What still works, and has a better form


def test_the_older_constructors_give_no_warning():
    """create_device_mesh and host_local_array_to_global_array do not warn."""
    row = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with warnings.catch_warnings(action="error"):
        mesh_utils.create_device_mesh((2, 4))
        multihost_utils.host_local_array_to_global_array(np.ones((8, 8)), row, P("data"))


@compiled_for_cpu
def test_create_device_mesh_and_mesh_make_the_mesh_of_make_mesh(page):
    """On CPU create_device_mesh, then Mesh, gives the mesh that make_mesh gives, with Auto axes."""
    assert page.by_hand == page.mesh
    assert page.by_hand.axis_types == (AxisType.Auto, AxisType.Auto)


def test_both_functions_make_the_same_global_array(page):
    """host_local_array_to_global_array and make_array_from_process_local_data give one array."""
    older = multihost_utils.host_local_array_to_global_array(page.x_host, page.row, P("data"))
    assert older.sharding.is_equivalent_to(page.given.sharding, 2)
    for found in (older, page.given, page.local):
        np.testing.assert_array_equal(found, page.x_host)


def test_psum_of_1_and_axis_size_count_the_devices(page):
    """psum(1, "data") and axis_size("data") are 8, the devices along the axis."""
    assert tuple(map(int, page.both)) == (8, 8) == (page.row.size, len(page.x_host))


def test_with_partitioning_annotates_a_layer(page):
    """nnx.with_partitioning still shards a kernel."""
    wrapped = nnx.with_partitioning(nnx.initializers.ones, ("data", "model"))
    with jax.set_mesh(page.mesh):
        linear = nnx.Linear(8, 8, kernel_init=wrapped, rngs=nnx.Rngs(0))
    assert linear.kernel.sharding.spec == P("data", "model")


def test_names_of_hosts_warn():
    """jax.host_id and jax.host_count warn, and give process_index and process_count."""
    for older, today in (("host_id", "process_index"), ("host_count", "process_count")):
        with pytest.warns(UserWarning, match=today):
            assert getattr(jax, older)() == getattr(jax, today)()


def test_helpers_of_flax_for_pmap_add_a_dimension_of_devices(page):
    """shard makes (8, 1, 8) of (8, 8), and prefetch_to_device wants a dimension of devices."""
    assert common_utils.shard(page.x_host).shape == (8, 1, 8)
    batch = next(jax_utils.prefetch_to_device(iter([page.x_host]), 1))
    assert batch.shape == (8, 8) and batch.addressable_shards[0].data.shape == (1, 8)
    with pytest.raises(ValueError):
        next(jax_utils.prefetch_to_device(iter([page.x_host[:4]]), 1))


def test_axis_rules_and_get_named_sharding_are_there():
    """flax.linen.partitioning.axis_rules is nn.logical_axis_rules; get_named_sharding still works."""
    assert partitioning.axis_rules is nn.logical_axis_rules
    assert callable(nnx.get_named_sharding)


# From PyTorch


def test_reshard_after_forward_is_a_policy_and_not_plain_checkpoint(page):
    """A policy that refuses all_gather gathers twice and multiplies once; plain checkpoint repeats
    the multiplications, too."""

    def loss_with(remat):
        @remat
        def layer(x_BD, w_block_DD):
            w_DD = jax.lax.all_gather(w_block_DD, "data", tiled=True)
            return jnp.tanh(jnp.sin(x_BD) @ w_DD)

        def loss(w_blocks, x_BD):
            for w_block_DD in w_blocks:
                x_BD = layer(x_BD, w_block_DD)
            return jax.lax.pmean(x_BD.sum(), "data")

        mapped = jax.shard_map(loss, mesh=page.row, in_specs=P("data"), out_specs=P())
        return jax.jit(jax.grad(mapped))

    def cost(remat):
        w_DD = jax.ShapeDtypeStruct((64, 64), "float32", sharding=page.by_rows)
        lowered = loss_with(remat).lower([w_DD] * 3, w_DD)
        text = lowered.as_text()
        return text.count("stablehlo.all_gather"), text.count("stablehlo.dot_general")

    def all_but_gathers(primitive, *_, **__):
        return primitive.name != "all_gather"

    free_gathers = partial(jax.checkpoint, policy=all_but_gathers)
    kept, freed, plain = cost(lambda layer: layer), cost(free_gathers), cost(jax.checkpoint)
    assert freed[0] == plain[0] > kept[0]
    assert plain[1] > freed[1] == kept[1]


# Further reading


def test_jax_itself_sends_to_the_migration_guide(page):
    """The guide about pmap that the page links is the one that JAX's own message names."""
    (guide,) = re.findall(r"https://docs\.jax\.dev\S*?\.html", page.said["device_put_sharded"][0])
    links = re.findall(r"\((https://docs\.jax\.dev[^)#]*)", source_of(PAGE).read_text("utf-8"))
    assert {link for link in links if not link.endswith("/changelog.html")} == {guide}
