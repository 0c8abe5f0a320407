"""Messages about compiling and memory: each program raises what its heading quotes; fixes are right."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-compiler"
P = jax.P

RAISED = {
    "custom-partitioning": [
        "No registered implementation for untyped custom call to Sharding for Host"
    ],
    "exported": ["was exported for 8 devices and is called in a context with 1 devices"],
    "export-others": [
        "was exported for platforms",
        "but it is used on",
        "does not match the mesh used for export",
        "serialization of host_callbacks is not yet implemented",
        "Batching rule for 'call_exported' not implemented",
    ],
}
BEFORE = {RAISED["custom-partitioning"][0]: ((0, 11), "no message: float32[8@data,16]")}
FLATBUFFERS = "Please install 'flatbuffers' in order to use Exported serialization"
ELSEWHERE = {"export-others": [FLATBUFFERS]}  # raised below, as if it were not installed
OLDER = ["Ran out of memory in memory space hbm", "Failed to allocate request for"]


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
        executed.child.communicate()  # the second process, in which C++ logs
    jax.clear_caches()


@pytest.mark.parametrize("slug", RAISED)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    assert_raised(page, slug, RAISED[slug], BEFORE, ELSEWHERE.get(slug, ()))


def test_older_words_for_too_little_memory_stand_in_the_heading(page):
    """The heading quotes what is raised here, what a TPU's compiler said, and two older wordings,
    which neither says any more."""
    today = ["RESOURCE_EXHAUSTED: Out of memory", "CompileTimeHbmOom: Ran out of memory on HBM"]
    assert quoted_in_headings(PAGE)["oom"] == [*today, *OLDER]
    assert all("".join(words.split()) in page.printed["oom"] for words in today)
    assert not any("".join(words.split()) in page.printed["oom"] for words in OLDER)


def test_a_partitioned_function_runs_in_shard_map_and_on_an_auto_mesh(page):
    """Both give three times x, in rows along data."""
    for result in (page.on_blocks_BD, page.auto_BD):
        np.testing.assert_array_equal(result, 3 * page.x_BD)
        assert result.addressable_shards[0].data.shape == (4, 16)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the program passes there")
def test_auto_axes_around_it_raises_the_same(page):
    """Handing the call to Auto axes does not help."""
    with jax.set_mesh(page.explicit_mesh):
        auto = jax.sharding.auto_axes(page.triple, out_sharding=P("data"))
        assert RAISED["custom-partitioning"][0] in said(jax.jit(auto), page.typed_BD)


def test_an_exported_program_takes_any_array_on_a_mesh_of_its_shape(page):
    """Rows, columns, Explicit axes, or NumPy with such a mesh in context: the result is -x, in the
    sharding that was exported."""
    put, x_BD = page.put, page.x_BD
    results = [
        page.exported.call(array)
        for array in (
            page.rows_BD,
            put(x_BD, page.mesh, None, "model"),
            put(x_BD, page.explicit_mesh, "data"),
        )
    ]
    with jax.set_mesh(page.mesh):
        results.append(page.exported.call(x_BD))
    for result in results:
        np.testing.assert_array_equal(result, -x_BD)
        assert result.addressable_shards[0].data.shape == (4, 16)


def test_another_shape_of_the_mesh_is_incompatible(page):
    """Eight devices in a row instead of 2 x 4 raise the message that the text quotes."""
    on_row = page.put(page.x_BD, page.row_mesh, "data")
    assert "is incompatible with mesh_shape" in said(page.exported.call, on_row)


def test_exported_for_two_platforms_it_runs_on_this_one(page):
    """The program for CPU and TPU gives -x here."""
    np.testing.assert_array_equal(page.both.call(page.rows_BD), -page.x_BD)


def test_a_symbolic_batch_leaves_the_features_to_be_sharded(page):
    """One program takes three rows and eight, in columns along model."""
    for rows in (3, 8):
        x_BD = jax.device_put(page.x_BD[:rows], page.by_features)
        result = page.of_any_size.call(x_BD)
        np.testing.assert_array_equal(result, -page.x_BD[:rows])
        assert result.addressable_shards[0].data.shape == (rows, 4)


def test_the_table_of_export_says_what_is_raised(page, monkeypatch):
    """Without flatbuffers, with a symbolic sharded size, another batch size or a bare function."""
    monkeypatch.setitem(sys.modules, "flatbuffers", None)  # as if it were not installed
    for module in [name for name in sys.modules if "export.serialization" in name]:
        monkeypatch.delitem(sys.modules, module)
    assert FLATBUFFERS in said(page.exported.serialize)
    symbolic = jax.ShapeDtypeStruct((page.batch, 16), "float32", sharding=page.rows_BD.sharding)
    raised = said(jax.export.export(jax.jit(jnp.negative)), symbolic)
    assert "partitioned 2 times, but the dimension size is batch" in raised
    larger = page.put(np.ones((16, 16), "float32"), page.mesh, "data")
    words = "Shape mismatch for args[0].shape[0] (expected same constant)"
    assert words in said(page.exported.call, larger)
    bare = said(lambda: jax.export.export(page.double)(page.like_rows))
    assert "Function to be exported must be the result of `jit`" in bare


def test_a_fraction_of_gpu_memory_has_two_names_that_exclude_each_other(monkeypatch):
    """jaxlib reads XLA_CLIENT_MEM_FRACTION, or its older name, and refuses both."""
    from jaxlib import xla_client

    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    read = xla_client.generate_pjrt_gpu_plugin_options
    assert "memory_fraction" not in read()
    for name in names:
        with monkeypatch.context() as only:
            only.setenv(name, "0.9")
            assert read()["memory_fraction"] == 0.9
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert read()["preallocate"] is False
    for name in names:
        monkeypatch.setenv(name, "0.9")
    assert "is specified together with XLA_PYTHON_CLIENT_MEM_FRACTION" in said(read)
