"""Messages about compiling and memory: each program raises what its heading quotes; fixes are right."""

import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshscope as ms
from many_devices.compiled import stored_program
from many_devices.helpers import put, traffic
from pages import compiled_for_cpu
from printed import assert_raised, quoted_in_headings, run_and_read, said

PAGE = "messages-compiler"
P = jax.P

ENTRIES = quoted_in_headings(PAGE)
HOST = "No registered implementation for untyped custom call to Sharding for Host"
BEFORE = {HOST: ((0, 11), "no message: float32[8@data,16]")}
FLATBUFFERS = "Please install 'flatbuffers' in order to use Exported serialization"
OLDER = ["Ran out of memory in memory space hbm", "Failed to allocate request for"]
ELSEWHERE = {"export-others": [FLATBUFFERS], "oom": OLDER}  # raised below, or no more
WARN_ABOVE = jax.config.jax_captured_constants_warn_bytes  # before a page changes it


@pytest.fixture(scope="module")
def page():
    """The page, executed once."""
    with run_and_read(PAGE) as executed:
        yield executed
    jax.clear_caches()


def compiled(function, *inputs, **options):
    return jax.jit(function, **options).lower(*inputs).compile()


@pytest.mark.parametrize("slug", ENTRIES)
def test_the_program_raises_what_its_heading_quotes(page, slug):
    """The first cell of the entry prints each piece of a message that stands in its heading."""
    elsewhere = ELSEWHERE.get(slug, [])
    here = [piece for piece in ENTRIES[slug] if piece not in elsewhere]
    assert here
    assert_raised(page, slug, here, BEFORE, elsewhere)


def test_all_messages_have_an_entry():
    """No heading of the page is left out above."""
    assert len(ENTRIES) == 18


# Memory


def test_older_words_for_too_little_memory_stand_in_the_heading(page):
    """The heading quotes two older wordings, which neither this CPU nor a TPU's compiler says."""
    assert ENTRIES["oom"][2:] == OLDER
    assert not any("".join(words.split()) in page.printed["oom"] for words in OLDER)


def test_too_large_an_array_raises_and_the_message_names_its_bytes(page):
    """4 × 2**50 bytes are refused, which is what the compiled program asks for."""
    raised = said(jnp.zeros, (2**25, 2**25))
    assert "RESOURCE_EXHAUSTED: Out of memory" in raised and str(4 * 2**50) in raised
    assert page.bytes_of_each_device() == 4 * 2**50


def test_in_eight_pieces_a_device_is_asked_for_an_eighth(page):
    """Sharded by both axes, the compiled program asks for an eighth on each device."""
    assert page.bytes_of_each_device("data", "model") == 4 * 2**50 // 8


def test_the_compiler_for_tpu_was_asked_for_44_of_15_g():
    """The stored answer of TPU v5e's compiler: 44.8 G of temporaries, of 15.75 G."""
    refused = stored_program("train-large-fsdp")["tpu"]["refused"]
    assert refused.startswith("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of")
    assert re.findall(r"\(([\d.]+)G\)", refused) == ["44.80", "15.75"]


def test_a_donated_array_is_deleted_and_so_is_what_device_put_did_not_copy(page):
    """device_put onto the same sharding gives the same memory, which the step deletes."""
    donated_BD = put(page.x_BD, page.mesh, "data")
    alias_BD = put(donated_BD, page.mesh, "data")
    page.after("deleted").step(donated_BD, np.ones_like(page.x_BD))
    for gone in (donated_BD, alias_BD):
        assert "Array has been deleted with shape=float32[8,16]" in said(jnp.sum, gone)


def test_under_the_old_name_is_the_result_and_the_copy_is_as_before(page):
    """The weights are 0.1 less than the copy in host memory."""
    now = page.after("deleted-fixed")
    np.testing.assert_allclose(now.w_BD, page.x_BD - 0.1, rtol=1e-6)
    np.testing.assert_array_equal(now.before, page.x_BD)


def warned(function, array):
    """What donating the array to this function warns of."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        jax.jit(lambda x: function(x), donate_argnums=0)(array)  # compiled anew
    return [str(warning.message) for warning in caught]


def test_a_donation_that_is_not_usable_warns_on_one_device_only(page):
    """The sum of an array on one device warns; of one on eight it does not, in JAX up to 0.12, and
    neither is deleted. One that is used is deleted."""
    (words,) = warned(jnp.sum, jnp.array(page.x_BD))
    assert words.startswith("Some donated buffers were not usable: float32[8,16].")
    kept_BD, given_BD = (put(page.x_BD, page.mesh, "data") for _ in range(2))
    assert warned(jnp.sum, kept_BD) == [] or jax.__version_info__ >= (0, 13)  # so far
    assert warned(jnp.negative, given_BD) == []
    assert given_BD.is_deleted() and not kept_BD.is_deleted()


@compiled_for_cpu
def test_the_compiled_program_says_how_many_bytes_it_reuses(page):
    """None for a sum; for a result like the donated array, all of a device's piece."""
    assert page.reused == {"sum": 0, "negative": 4 * 4 * 16}


def test_a_result_of_another_size_cannot_take_over_the_memory(page):
    """Half of the rows, half of the bits, or pieces of another size: nothing is reused."""

    def reused(function, **options):
        return ms.memory(compiled(function, page.rows_BD, donate_argnums=0, **options)).aliased

    by_model = jax.NamedSharding(page.mesh, P("model"))
    assert reused(lambda x_BD: 2 * x_BD[:4]) == reused(lambda x: x.astype("bfloat16")) == 0
    assert reused(jnp.negative, out_shardings=by_model) == 0


def test_host_and_device_memory_do_not_mix(page):
    """The message names the function, and the type of what is in host memory."""
    raised = said(jnp.add, page.moment_BD, page.rows_BD)
    assert "memory_space of all inputs passed to `add` must be the same" in raised
    assert "float32<host>[8,16]" in raised
    assert page.moment_BD.sharding.memory_kind == "pinned_host"


def test_moved_inside_the_program_they_add_up(page):
    """The sum is right, and in device memory."""
    np.testing.assert_array_equal(page.sum_BD, 2 * page.x_BD)
    assert page.sum_BD.sharding.memory_kind == page.rows_BD.sharding.memory_kind == "device"


def test_a_weight_from_outside_is_whole_in_the_program_and_nothing_warns_below_2_gb(page):
    """The warning, asked for from 10 kB on, names 16.38 kB; unless it is set, it begins at 2 GB."""
    words = str(page.after("constants").caught[0].message)
    assert "A large amount of constants were captured during lowering (16.38KB" in words
    assert jax.config.jax_captured_constants_warn_bytes == WARN_ABOVE == 2 * 10**9
    assert len(ms.full_copies(page.captured, [page.w_DF])) == 1


@compiled_for_cpu
def test_passed_as_an_argument_only_a_piece_goes_in(page):
    """Nothing is whole; the program gets an eighth of the weight, and the product is the same."""
    assert len(ms.full_copies(page.passed, [page.w_DF])) == 0
    sizes = [ms.memory(program).arguments for program in (page.captured, page.passed)]
    assert sizes == [4 * 4 * 64, 4 * 4 * 64 + 4 * 4096 // 8]
    products = page.captured(page.x_64_BD), page.passed(page.x_64_BD, page.w_DF)
    np.testing.assert_allclose(*products, rtol=1e-6)


def test_one_array_is_not_donated_twice(page):
    """The message is in the log; JAX 0.10 ends the process by a signal, JAX 0.12 raises."""
    done = page.after("donated-twice").done
    assert "Attempt to donate the same buffer twice in Execute()" in done.stderr
    died = "JaxRuntimeError: INVALID_ARGUMENT" not in done.stderr  # a signal, not an exception
    assert done.returncode == (-11 if died else 1)
    if jax.__version_info__ < (0, 11) or jax.__version_info__ >= (0, 12):
        assert died == (jax.__version_info__ < (0, 11))


def test_with_an_array_for_each_name_both_are_donated(page):
    """Both are deleted, and the new state is right."""
    now = page.after("donated-twice-fixed")
    assert all(array.is_deleted() for array in now.state.values())
    for leaf in now.new_state.values():
        np.testing.assert_array_equal(leaf, -page.x_BD)


# What the partitioner logs, and kernels


def test_one_move_from_columns_to_rows_is_logged(page):
    """The log tells of an involuntary full rematerialization, and that the tensor is replicated."""
    log = page.after("rematerialization").log
    assert "[SPMD] Involuntary full rematerialization. The compiler cannot go from" in log
    assert "replicate the tensor and then partition it" in log


IN_TWO_MOVES = """
def sharding(*spec):
    return jax.NamedSharding(mesh, P(*spec))

x_BD = jax.device_put(np.ones((16, 16), "float32"), sharding(None, "data"))

@jax.jit
def in_two_moves(x_BD):
    x_BD = jax.lax.with_sharding_constraint(x_BD, sharding("model", "data"))
    return jax.lax.with_sharding_constraint(2 * x_BD, sharding("model"))

in_two_moves(x_BD)
"""


def test_two_moves_are_not_logged(page):
    """With a sharding in between, the log of the new process stays empty."""
    done = page.run_in_new_process(IN_TWO_MOVES)
    assert done.returncode == 0 and done.stderr == ""


@compiled_for_cpu
def test_two_moves_move_a_quarter_of_the_bytes(page):
    """One move gathers all 16 × 16 numbers, two gather a quarter of them."""
    for function, size in ((page.to_rows, 4 * 16 * 16), (page.in_two_moves, 4 * 16 * 16 // 4)):
        moves = traffic(function, page.columns_BD, mesh=page.mesh)
        assert [(move.kind, move.payload_bytes) for move in moves] == [("all-gather", size)]


def test_after_two_moves_the_rows_are_right(page):
    """The result is sharded by rows along model, and doubled."""
    result_BD = jax.jit(page.in_two_moves)(page.columns_BD)
    assert result_BD.sharding.is_equivalent_to(jax.NamedSharding(page.mesh, P("model")), 2)
    np.testing.assert_array_equal(result_BD, np.full((16, 16), 2))


def test_a_kernel_on_a_sharded_array_cannot_be_lowered_for_tpu(page):
    """The message asks for shard_map."""
    raised = said(page.lower_for_tpu, page.call)
    assert "Mosaic kernels cannot be automatically partitioned. Please wrap the call" in raised


def test_in_shard_map_each_device_calls_the_kernel_on_its_block(page):
    """There is one custom call, on blocks of 8 × 128."""
    text = page.after("mosaic-fixed").text
    (call,) = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    assert "tensor<8x128xf32>" in call and "tensor<16x128xf32>" not in call


def test_a_ragged_exchange_runs_on_tpus_only(page):
    """XLA for CPU refuses it, and JAX lowers it for TPU."""
    ragged = jax.jit(page.row_by_row(page.one_to_each))
    raised = said(ragged, page.x_64_B)
    assert "HLO opcode `ragged-all-to-all` is not supported by XLA:CPU Thunk" in raised
    text = ragged.trace(page.x_64_B).lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_all_to_all" in text


def test_equal_blocks_are_exchanged_here(page):
    """Each device gets one number of each other device."""
    np.testing.assert_array_equal(page.exchanged_B, page.x_64_B.reshape(8, 8).T.ravel())


# Compiled for one thing, given another


def test_a_program_accepts_only_the_shardings_for_which_it_was_compiled(page):
    """Compiled for one device it raises for rows; compiled for rows, for columns."""
    raised = said(page.after("disagree").program, page.rows_BD)
    assert "was compiled for input shardings that disagree with the shardings" in raised
    assert "Required sharding: SingleDeviceSharding" in raised
    columns_BD = put(page.x_BD, page.mesh, None, "data")
    program = page.after("disagree-fixed").program
    assert "disagree with the shardings of arguments" in said(program, columns_BD)


def test_compiled_for_rows_it_takes_rows(page):
    """The result is -x, by rows."""
    result_BD = page.after("disagree-fixed").program(page.rows_BD)
    np.testing.assert_array_equal(result_BD, -page.x_BD)
    assert result_BD.sharding.is_equivalent_to(page.rows_BD.sharding, 2)


def test_jit_does_not_move_an_array_that_you_placed(page):
    """in_shardings along model raises for rows along data, and places what nobody placed."""
    raised = said(page.negative, page.rows_BD)
    assert "Sharding passed to jit does not match the sharding on the respective" in raised
    for accepted in (page.x_BD, jnp.array(page.x_BD), put(page.x_BD, page.mesh, "model")):
        np.testing.assert_array_equal(page.negative(accepted), -page.x_BD)
        assert page.negative(accepted).sharding.is_equivalent_to(page.by_model, 2)


def test_without_in_shardings_it_is_taken_as_it_is_and_moved_first_it_passes(page):
    """Both results are -x, along data and along model."""
    for result, wanted in (
        (page.as_it_is_BD, page.rows_BD.sharding),
        (page.moved_BD, page.by_model),
    ):
        np.testing.assert_array_equal(result, -page.x_BD)
        assert result.sharding.is_equivalent_to(wanted, 2)


def test_keywords_and_in_shardings_exclude_each_other(page):
    """A keyword argument raises."""
    raised = said(lambda: page.placed_double(x_BD=page.x_BD))
    assert "does not support kwargs when in_shardings is specified" in raised


def test_by_position_or_placed_by_yourself_both_are_right(page):
    """Both results are twice x, along model."""
    for result_BD in (page.by_position_BD, page.by_name_BD):
        np.testing.assert_array_equal(result_BD, 2 * page.x_BD)
        assert result_BD.sharding.is_equivalent_to(page.by_model, 2)


def test_in_shardings_has_an_entry_for_each_array_and_none_for_what_is_static(page):
    """Three entries are too many, and one is too few."""
    one = jax.jit(page.scale, in_shardings=(page.by_rows,), static_argnums=2)
    for function, length in [(page.three, 3), (one, 1)]:
        raised = said(function, page.rows_BD, 2.0, True)
        assert "pjit in_shardings specification must be a tree prefix of the positional" in raised
        assert f"list of length {length} for an args tuple of length 2" in raised


def test_with_two_entries_or_none_the_rows_are_scaled(page):
    """Both results are right, with four rows on each device."""
    for function in (page.two, jax.jit(page.scale, static_argnums=2)):
        result_BD = function(page.rows_BD, 2.0, True)
        np.testing.assert_array_equal(result_BD, 2 * page.x_BD**2)
        assert result_BD.addressable_shards[0].data.shape == (8 // 2, 16)


def test_nnx_jit_says_it_in_the_words_of_the_next_entry(page):
    """With an entry too many nnx.jit raises a pytree structure error."""
    layered = nnx.jit(page.scale, in_shardings=(page.by_rows, None, None), static_argnums=2)
    raised = said(layered, page.rows_BD, 2.0, True)
    assert "pytree structure error: different lengths of tuple" in raised


def test_a_forgotten_leaf_raises_and_the_message_names_it(page):
    """out_shardings without b_D: the message names the path and the key."""
    raised = said(page.w_only, page.after("tree-structure").state)
    assert "pytree structure error: different" in raised and "at key path" in raised
    assert "pjit out_shardings" in raised and "b_D" in raised


def test_a_tuple_around_one_result_raises(page):
    """The message says that the types differ, for jax.jit and for nnx.jit."""
    around = jax.jit(jnp.negative, out_shardings=(page.rows_BD.sharding,))
    linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    apply = nnx.jit(lambda linear, x: linear(x), out_shardings=(None,))
    for raised in (said(around, page.rows_BD), said(apply, linear, page.rows_BD)):
        assert "pytree structure error: different types" in raised and "at key path" in raised


def test_with_shardings_of_the_state_itself_each_leaf_is_as_before(page):
    """The matrix is by rows and the bias whole, and the matrix is halved."""
    np.testing.assert_array_equal(page.halved["w_BD"], page.x_BD / 2)
    assert page.halved["w_BD"].addressable_shards[0].data.shape == (8 // 2, 16)
    assert page.halved["b_D"].is_fully_replicated


def test_one_sharding_stands_for_a_whole_branch(page):
    """P() for the whole state leaves every leaf whole."""
    whole = jax.jit(page.halve, out_shardings=jax.NamedSharding(page.mesh, P()))
    state = page.after("tree-structure").state
    assert all(leaf.is_fully_replicated for leaf in whole(state).values())


def test_a_traced_array_has_no_sharding(page):
    """In both modes."""
    for mesh in (page.mesh, page.explicit_mesh):
        raised = said(jax.jit(lambda x: x.sharding), put(page.x_BD, mesh, "data"))
        assert "The 'sharding' attribute is not available on traced array" in raised


def test_explicit_types_and_the_compiler_know_the_sharding(page):
    """The type of the Explicit array names data, that of the other does not; asked, the compiler
    tells both."""
    assert [str(kind) for kind in page.types] == ["float32[8@data,16]", "float32[8,16]"]
    assert [each.is_equivalent_to(page.rows_BD.sharding, 2) for each in page.shardings] == [
        True
    ] * 2


# Partitioned and exported programs


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
        assert HOST in said(jax.jit(auto), page.typed_BD)


def test_an_exported_program_takes_any_array_on_a_mesh_of_its_shape(page):
    """Rows, columns, Explicit axes, or NumPy with such a mesh in context: the result is -x, in the
    sharding that was exported."""
    x_BD = page.x_BD
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
    on_row = put(page.x_BD, page.row_mesh, "data")
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
    larger = put(np.ones((16, 16), "float32"), page.mesh, "data")
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
