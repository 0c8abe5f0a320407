"""What is rarely met, and promised all the same: words and numbers at the edges of the package."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms
from meshscope import _compat, _hlo, _placement, _programs, _tables

AUTO = AxisType.Auto


def mesh_of(*sizes, names=("data", "model")):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(AUTO,) * len(sizes))


def placed(shape, spec, mesh):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))


def summed(mesh):
    """A program with one all-reduce over data."""
    return jax.jit(lambda x: x.sum(0)).lower(placed((8, 16), P("data"), mesh)).compile()


# Tables of collectives


def test_a_collective_in_a_loop_is_in_one():
    mesh = mesh_of(8)

    def three(x):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(jnp.tanh(x), "data"), None), x, length=3)[0]

    mapped = jax.shard_map(
        three, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    rows = ms.collectives(jax.jit(mapped).lower(np.ones(8, np.float32)).compile())
    assert "yes" in repr(rows.by("inside_loop")).split()
    assert "no" in repr(ms.collectives(summed(mesh)).by("inside_loop")).split()


def test_a_difference_knows_axes_of_size_one():
    """They are left out of rows, and may be named all the same, by whoever has them."""
    one, two = (ms.collectives(summed(mesh_of(*sizes))) for sizes in [(8, 1), (4, 2)])
    table = ms.diff(
        ms.collectives(jax.jit(abs).lower(placed((8,), P("data"), mesh_of(8, 1))).compile()), one
    )
    assert table.bytes("all-reduce", ("data", "model")) == table.bytes("all-reduce", "data") == 64
    assert ms.diff(one, two).bytes("all-reduce", "model") == 0


def test_a_program_that_moves_nothing_says_who_compiled_it():
    mesh = mesh_of(2, 4)
    quiet = jax.jit(abs).lower(placed((8,), P("data"), mesh)).compile()
    for given in (None, mesh):
        assert f"CPU program (jax {jax.__version__})" in repr(ms.collectives(quiet, given))


def test_two_meshes_are_one_too_many():
    a, b = placed((8, 16), P("data"), mesh_of(2, 4)), placed((8, 16), P("data"), mesh_of(8))
    both = jax.jit(lambda a, b: (a.sum(0), b.sum(0))).lower(a, b).compile()
    with pytest.raises(
        ValueError, match="outputs of this program name 2 meshes: pass the one to use"
    ):
        ms.collectives(both)


def test_no_mesh_is_one_too_few():
    from jax._src.sharding_impls import GSPMDSharding  # only instances are public

    mesh = mesh_of(8)
    lost = GSPMDSharding(
        tuple(mesh.devices.flat), NamedSharding(mesh, P("data"))._to_xla_hlo_sharding(2)
    )
    x = jax.device_put(np.ones((8, 16), np.float32), lost)
    compiled = jax.jit(lambda x: x.sum(0), out_shardings=None).lower(x).compile()
    silent = types.SimpleNamespace(
        as_text=compiled.as_text,
        memory_analysis=None,
        input_shardings=(lost,),
        output_shardings=lost,
    )
    with pytest.raises(
        ValueError, match="outputs of this program name no mesh: pass the one to use"
    ):
        ms.collectives(silent)
    assert [row.axes for row in ms.collectives(silent, mesh)] == [("data",)]


def test_a_mesh_of_another_size_is_told_with_both_sizes():
    small = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    with pytest.raises(
        ValueError, match="the program runs on 8 devices and the mesh has 4: pass the mesh"
    ):
        ms.collectives(summed(mesh_of(8)), small)
    order = jax.devices()
    with pytest.raises(
        ValueError, match="the program runs on 8 devices and the mesh has 4: pass the mesh"
    ):
        _programs.positions(small, None, order)


def test_an_abstract_mesh_that_fits_none_is_told_of_those_that_are_there():
    mesh, other = mesh_of(2, 4), mesh_of(4, 2)
    wrong = AbstractMesh((2, 2, 2), ("a", "b", "c"))
    for own, names in [
        ([mesh, other], "{'data': 2, 'model': 4} or {'data': 4, 'model': 2}:"),
        ([], "none that it names:"),
    ]:
        with pytest.raises(ValueError) as caught:
            _programs.positions(wrong, own, None)
        assert f"the program's own mesh is {names}" in str(caught.value)


# What is no program


class Lowered:
    def as_text(self): ...


class Traced:
    def compile(self): ...


@pytest.mark.parametrize("thing", [Lowered(), Traced()])
def test_what_has_a_text_or_can_be_compiled_is_told_to_compile(thing):
    with pytest.raises(
        TypeError,
        match=r"of type (Lowered|Traced), not a compiled program: call \.compile\(\) first",
    ):
        _programs.program_text(thing)


def test_a_program_from_jax_is_trusted_to_be_compiled():
    """Its text says so today; whether it does in another release changes nothing."""
    compiled = summed(mesh_of(8))
    silent = types.SimpleNamespace(
        as_text=lambda: compiled.as_text().replace("is_scheduled=true, ", ""), memory_analysis=None
    )
    text, program = _programs.program(silent)
    assert "is_scheduled" not in text and program.computations
    with pytest.raises(ValueError, match="not compiled to the end"):
        _programs.program(text)


def test_a_refused_text_is_quoted_in_one_line():
    with pytest.raises(ValueError, match="It begins 'hello'$"):
        ms.collectives("hello\nworld")
    with pytest.raises(ValueError) as caught:
        ms.collectives("x" * 100)
    assert str(caught.value).endswith(f"It begins {'x' * 60!r}")


# Words and numbers


@pytest.mark.parametrize(("value", "said"), [(1536, "1,536"), (1536.25, "1,536.2"), (0.5, "0.5")])
def test_numbers_have_commas_and_one_decimal(value, said):
    assert _tables.number(value) == said


def test_states_of_a_spec_are_sets_that_may_be_missing():
    spec = types.SimpleNamespace(partitions=(None,), unreduced={"model", "data"}, reduced={"stage"})
    assert _compat.unreduced(spec) == {"data", "model"} and _compat.reduced(spec) == {"stage"}
    assert _compat.unreduced(object()) == _compat.reduced(object()) == frozenset()


def test_a_spec_is_written_with_its_states():
    spec = P("model", unreduced={"stage", "data"}, reduced={"seq"})
    assert _tables.spec_text(spec) == "P('model') {U:data,stage, R:seq}"


@pytest.mark.parametrize(("element", "dtype", "size"), [
    ("pred", "bool", 1), ("token", "token", 0), ("s4", "int4", 0.5), ("f8e4m3fn", "float8_e4m3fn", 1)])  # fmt: skip
def test_element_types_have_names_and_sizes(element, dtype, size):
    assert _hlo.dtype(element) == dtype and _hlo.nbytes((element, (8,))) == 8 * size


def test_manual_axes_of_a_type_are_told_apart():
    manual = types.SimpleNamespace(varying={"a"}, unreduced={"b"}, reduced={"c"})
    found = _compat.manual_axes(types.SimpleNamespace(manual_axis_type=manual))
    assert found == {"varying": {"a"}, "unreduced": {"b"}, "reduced": {"c"}}
    assert _compat.manual_axes(types.SimpleNamespace(vma={"a"})) == {
        "varying": {"a"}, "unreduced": frozenset(), "reduced": frozenset()}  # fmt: skip


# Memory


class Buffer:
    """A piece whose backend tells no address."""

    def __init__(self, shape, dtype="float32"):
        self.shape, self.dtype = shape, dtype

    def unsafe_buffer_pointer(self):
        raise NotImplementedError


class Shard:
    def __init__(self, device, index):
        self.device, self.data, self._index = device, Buffer((4,)), index

    @property
    def index(self):
        if self._index is None:
            raise NotImplementedError
        return self._index


def test_buffers_without_an_address_are_those_of_their_array():
    devices = jax.devices()[:2]
    whole = types.SimpleNamespace(addressable_shards=[Shard(d, (slice(0, 4),)) for d in devices])
    other = types.SimpleNamespace(addressable_shards=[Shard(d, (slice(0, 4),)) for d in devices])
    first, again, second = (list(_compat.buffers(x)) for x in (whole, whole, other))
    assert first == again, "one array is the same memory each time"
    assert not {each[2] for each in first} & {each[2] for each in second}, "another is not"
    assert [index for _, index, _ in first] == [((0, 4),)] * 2


def test_partial_sums_lie_at_a_place_of_each_device():
    devices = jax.devices()[:2]
    sums = types.SimpleNamespace(addressable_shards=[Shard(d, None) for d in devices])
    assert [index for _, index, _ in _compat.buffers(sums)] == [(d.id,) for d in devices]


def test_pieces_of_one_memory_with_another_dtype_are_other_pieces():
    device = jax.devices()[0]
    x = types.SimpleNamespace(addressable_shards=[Shard(device, (slice(0, 4),))])
    before = list(_compat.buffers(x))
    x.addressable_shards[0].data.dtype = "int32"
    assert before != list(_compat.buffers(x))


def test_the_memory_of_a_device_has_a_kind():
    device = jax.devices()[0]
    assert _compat.default_memory(device) == device.default_memory().kind
    assert _compat.default_memory(object()) is None


def test_a_backend_that_does_not_tell_is_told_of():
    silent = types.SimpleNamespace(as_text=lambda: "", memory_analysis=lambda: None)
    with pytest.raises(ValueError, match="^this backend does not tell the memory of a program$"):
        ms.memory(silent)


def test_a_backend_without_host_memory_has_none_of_it():
    stats = types.SimpleNamespace(
        argument_size_in_bytes=4,
        output_size_in_bytes=3,
        temp_size_in_bytes=2,
        alias_size_in_bytes=1,
    )
    told = ms.memory(types.SimpleNamespace(as_text=lambda: "", memory_analysis=lambda: stats))
    assert told == ms.ProgramMemory(4, 3, 2, 1)


def test_partial_sums_over_two_axes_are_listed_in_order():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((8, 16), np.float32), P(None, ("data", "model")))
        y = jax.device_put(np.ones((16, 8), np.float32), P(("data", "model"), None))
        sums = jnp.dot(x, y, out_sharding=P(None, None, unreduced={"model", "data"}))
    assert "partial sums over data, model" in repr(ms.memory({"sums": sums}))


def test_an_array_inside_a_pair_is_shown_for_itself():
    """A shape and a sharding are one thing to show; two arrays are two."""
    mesh = mesh_of(8)
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("data")))
    assert _placement._is_leaf(((8, 16), x.sharding))
    assert not _placement._is_leaf((x, x.sharding)) and not _placement._is_leaf((x, x))
    assert [name for name, _ in _placement.leaves((x, x))] == ["0", "1"]


def test_something_with_a_shape_alone_has_no_placement():
    for thing in (types.SimpleNamespace(shape=(8,)), types.SimpleNamespace(sharding=None)):
        with pytest.raises(
            TypeError, match="of type SimpleNamespace, not an array on devices: pass an array"
        ):
            ms.show(thing)


def test_leaves_in_boxes_stand_beside_others():
    from flax import nnx

    mesh = mesh_of(8)
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("data")))
    told = ms.memory({"a": x, "b": nnx.Param(x + 0), "c": {"shape": x + 1}})
    assert sorted(leaf.path for leaf in told.leaves) == ["a", "b", "c.shape"]
    with pytest.raises(TypeError, match=r"^c is of type ndarray and on the host"):
        ms.memory({"a": x, "c": np.ones(3)})


def test_a_piece_that_was_counted_once_is_not_counted_for_its_copies():
    """Whichever of the copies is the shared one, the first or the last."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = NamedSharding(mesh, P())
    x = jax.device_put(np.ones(4, np.float32), sharding)
    pieces = [shard.data for shard in x.addressable_shards]
    for n, fresh in enumerate(pieces):
        mixed = [jax.device_put(np.zeros(4, np.float32), fresh.devices().pop()) if i == n else piece
                 for i, piece in enumerate(pieces)]  # fmt: skip
        y = jax.make_array_from_single_device_arrays((4,), sharding, mixed)
        assert ms.memory({"x": x, "y": y}).unique_bytes == 16


def test_empty_arrays_share_nothing():
    told = ms.memory({"a": jnp.zeros((0,)), "b": jnp.zeros((0,))})
    assert "the buffers of" not in repr(told) and told.bytes_per_device == 0


def test_a_box_may_hold_a_shape_and_a_sharding():
    from flax import nnx

    sharding = NamedSharding(mesh_of(8), P("data"))
    (named,) = _placement.leaves({"w": nnx.Variable(((8, 16), sharding))})
    assert named[0] == "w" and named[1].edges[0].parts == 8


def test_a_traced_value_may_be_terms_of_a_sum():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Manual,) * 2)
    manual = types.SimpleNamespace(varying=None, unreduced={"model"}, reduced={"data"})
    value = types.SimpleNamespace(
        shape=(8,), dtype="float32", sharding=NamedSharding(mesh, P()), manual_axis_type=manual
    )
    notes = dict(_placement._traced(value, "").notes)
    assert notes[_placement.UNREDUCED] == (("model", 4),)
    assert notes[_placement.REDUCED] == (("data", 2),)


def test_several_drawings_flow_beside_each_other():
    sharding = NamedSharding(mesh_of(8), P("data"))
    drawing = ms.show([((8, 16), sharding), ((16,), sharding)])
    assert 'style="display:flex;flex-wrap:wrap;' in drawing._repr_html_()
