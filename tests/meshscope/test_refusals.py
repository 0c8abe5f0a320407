"""Every refusal, word for word: what happened, where, and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms

AUTO = (AxisType.Auto,) * 2
HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
ENTRY = HEAD + "ENTRY %main (p: f32[24,80]) -> f32[48,80] {\n  %p = f32[24,80]{1,0} parameter(0)\n"
PASS_TEXT = "pass jax.jit(f).lower(...).compile(), or the text that its as_text() gives"


def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)


def shape(spec, *sizes, on=None):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(on or mesh(), spec))


def summed():
    return jax.jit(lambda x: x.sum(0)).lower(shape(P("data"), 8, 16)).compile()


def text(line):
    return f"{ENTRY}  {line}\n}}\n"


def deleted():
    x = jnp.ones((8, 16)) + 0
    x.delete()
    return x


def traced(f, *inputs):
    """What f raises while it is traced."""
    return lambda: jax.jit(f).trace(*inputs)


def one_device():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def other_devices():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def four_of_the_rest():
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(other_devices(), P("data")))
    rest = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("data", "model"))
    return ms.collectives(jax.jit(lambda x: x.sum(0)).lower(x).compile(), rest)


def two_meshes():
    line = jax.make_mesh((8,), ("x",), axis_types=AUTO[:1])
    inputs = shape(P("data"), 8, 8), shape(P("x"), 8, 8, on=line)
    return ms.collectives(jax.jit(lambda x, y: (x + y).sum()).lower(*inputs).compile())


def no_mesh():
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "model"), mesh=mesh(), in_specs=P("model"), out_specs=P()
    )
    text = jax.jit(f).lower(np.ones((8, 8), np.float32)).compile().as_text()
    return ms.collectives(text)


TREE = "the tree has no leaves: pass arrays, or a tree of arrays"
SHOWN = ("pass an array (of a function: its result), a jax.ShapeDtypeStruct with a sharding, "
         "(shape, sharding), a mesh, or a tree of these")  # fmt: skip
HOST = "pass jax.device_put(x, sharding), or jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)"
FIELDS = ("there are kind, axes, dtype, shape, payload_bytes, executions, inside_loop, op_name, "
          "source_line, within, groups, group_size, wire_bytes")  # fmt: skip
KINDS = ("there are all-gather, all-reduce, reduce-scatter, all-to-all, ragged-all-to-all, "
         "collective-broadcast, collective-permute, send, recv")  # fmt: skip
W = "w (48, 80) is whole in this program: "
CASES = {
    # show
    "show nothing": (lambda: ms.show({}), ValueError, TREE),
    "show a host array": (
        lambda: ms.show(np.zeros(3)), TypeError,
        "this is of type ndarray and on the host, not an array on devices: pass jax.device_put(x, sharding), or (shape, sharding)"),
    "show a number in a tree": (
        lambda: ms.show({"a": [3.0]}), TypeError,
        "a.0 is of type float and on the host, not an array on devices: pass jax.device_put(x, sharding), or (shape, sharding)"),
    "show a program": (
        lambda: ms.show(jax.jit(jnp.sin).lower(1.0)), TypeError,
        "this is of type Lowered, not an array on devices: pass what it returns, or (shape, sharding) of one of its outputs"),
    "show a function": (lambda: ms.show(len), TypeError, f"this is a function, not an array on devices: {SHOWN}"),
    "show a word": (lambda: ms.show("w"), TypeError, "this is a string, not an array on devices: pass the array itself, not its name, and leave strings out of a tree"),
    "show a spec": (
        lambda: ms.show(P("data")), TypeError,
        "this is a partition spec, not an array on devices: pass (shape, jax.NamedSharding(mesh, spec))"),
    "show a shape and a spec": (
        lambda: ms.show({"w": ((8, 8), P("data"))}), TypeError,
        "w is a shape and a partition spec, not an array on devices: pass (shape, jax.NamedSharding(mesh, spec))"),
    "show no shape": (
        lambda: ms.show((8, NamedSharding(mesh(), P("data")))), TypeError,
        "8 is not a shape: pass (shape, sharding), a shape being a tuple of integers such as (8, 16), or (8,) for one dimension"),
    "show a shape alone": (
        lambda: ms.show([jax.ShapeDtypeStruct((3,), jnp.float32)]), ValueError,
        "0 is a jax.ShapeDtypeStruct without a sharding, not an array on devices: pass jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)"),
    "show a deleted array": (
        lambda: ms.show(deleted()), ValueError,
        "this float32[8,16] was deleted and is on no device: a function to which an array is donated takes its memory; "
        "show what the function returned"),
    "show an empty mesh": (
        lambda: ms.show(jax.sharding.get_abstract_mesh()), ValueError,
        "the mesh is empty: make one with jax.make_mesh, or call jax.set_mesh first"),
    "show a long spec": (
        lambda: ms.show(((8,), NamedSharding(mesh(), P(None, "data")))), ValueError,
        "P(None, 'data') names 2 dimensions, [8] has 1: pass a spec that is no longer than the shape"),
    "show what is unconstrained": (
        lambda: ms.show({"w": ((8, 4), NamedSharding(mesh(), P("data", P.UNCONSTRAINED)))}), ValueError,
        "dimension 1 of [8,4] is left to the compiler by UNCONSTRAINED (leaf w): name the mesh axes that split it, or None"),
    "show an uneven dimension": (
        lambda: ms.show({"w": ((6, 8), NamedSharding(mesh(), P(("data", "model"))))}), ValueError,
        "dimension 0 of [6,8] has size 6, which mesh axis 'data' of size 2 × 'model' of size 4 does not divide (leaf w): "
        "pad the dimension, or leave it whole"),
    "show a value over Auto axes": (
        traced(lambda x: ms.show(x) and x, shape(P("data"), 8, 16)), ValueError,
        "float32[8,16] is traced over Auto axes: the compiler has not placed it yet: show what the jitted function "
        "returns, or give it arrays on a mesh of Explicit axes"),
    "show a value without a mesh": (
        traced(lambda x: ms.show({"y": x}) and x, np.zeros((8, 16), np.float32)), ValueError,
        "float32[8,16] is traced without a mesh (leaf y): show what the jitted function returns, or give it arrays on a "
        "mesh of Explicit axes"),
    "show in no colour": (
        lambda: ms.show(mesh(), palette={"data": "<red>"}), ValueError,
        "'<red>' is no colour for data: pass one such as '#d55e00'"),
    # memory
    "memory of nothing": (lambda: ms.memory(None), ValueError, TREE),
    "memory of a host array": (
        lambda: ms.memory(np.ones(3)), TypeError,
        f"this is of type ndarray and on the host, not an array on devices or a compiled program: {HOST}"),
    "memory of a number": (
        lambda: ms.memory({"a": {"b": 3.0}}), TypeError,
        f"a.b is of type float and on the host, not an array on devices: {HOST}"),
    "memory of a shape alone": (
        lambda: ms.memory([jax.ShapeDtypeStruct((3,), "float32")]), TypeError,
        "0 is a jax.ShapeDtypeStruct without a sharding, not an array on devices: pass jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)"),
    "memory of a function": (
        lambda: ms.memory(len), TypeError,
        "this is a function, not an array on devices or a compiled program: pass jax.jit(f).lower(...).compile()"),
    "memory of what is jitted": (
        lambda: ms.memory(jax.jit(jnp.sin)), TypeError,
        "this is of type PjitFunction, not an array on devices or a compiled program: call .lower(...).compile() first"),
    "memory of what is lowered": (
        lambda: ms.memory(jax.jit(jnp.sin).lower(1.0)), TypeError,
        "this is of type Lowered, not an array on devices or a compiled program: call .compile() first"),
    "memory of what is traced": (
        lambda: ms.memory(jax.jit(jnp.sin).trace(1.0)), TypeError,
        "this is of type Traced, not an array on devices or a compiled program: call .lower(...).compile() first"),
    # collectives
    "collectives of an array": (
        lambda: ms.collectives(np.ones(3)), TypeError,
        "this is of type ndarray and on the host, not a compiled program: pass jax.jit(f).lower(...).compile()"),
    "collectives on no mesh": (
        lambda: ms.collectives(summed(), (2, 4)), TypeError, "mesh= is of type tuple, not a mesh: pass a jax.sharding.Mesh or AbstractMesh"),
    "collectives of a word": (
        lambda: ms.collectives("hello"), ValueError,
        f"this text is not a compiled program: {PASS_TEXT}. It begins 'hello'"),
    "collectives of StableHLO": (
        lambda: ms.collectives("\nmodule @f {\n  stablehlo.add\n}"), ValueError,
        f"this text is a program that is not compiled: {PASS_TEXT}. It begins 'module @f {{'"),
    "collectives of a dump": (
        lambda: ms.collectives(text("ROOT %y = f32[48,80]{1,0} iota()").replace("is_scheduled=true, ", "")), ValueError,
        f"this text is a program that is not compiled to the end: {PASS_TEXT}. It begins "
        "'HloModule m, num_partitions=8'"),
    "collectives of a text without a mesh": (
        no_mesh, ValueError,
        "a program given as text names no mesh: pass the one to use, collectives(compiled, mesh)"),
    "collectives on two meshes": (
        two_meshes, ValueError,
        "the inputs and outputs of this program name 2 meshes: pass the one to use, collectives(compiled, mesh)"),
    "collectives on too few devices": (
        lambda: ms.collectives(summed(), other_devices()), ValueError,
        "the program runs on 8 devices and the mesh has 4: pass the mesh it was compiled for as mesh="),
    "collectives on other devices": (
        four_of_the_rest, ValueError,
        "the mesh and the program have different devices, [4, 5, 6, 7] and [0, 1, 2, 3]: pass the mesh it was compiled for as mesh="),
    "collectives on a mesh of no devices": (
        lambda: ms.collectives(summed(), AbstractMesh((4, 2), ("a", "b"))), ValueError,
        "an AbstractMesh of {'a': 4, 'b': 2} does not say which device stands where, and the program's own mesh is "
        "{'data': 2, 'model': 4}: pass a jax.sharding.Mesh of devices as mesh="),
    "a misspelt kind": (
        lambda: ms.collectives(summed()).by("kind").bytes("allreduce"), ValueError, f"no kind 'allreduce', {KINDS}"),
    "a misspelt axis": (
        lambda: ms.collectives(summed()).by("axes").wire("modle"), ValueError,
        "no axis 'modle' on this mesh, which has data, model"),
    "an axis without a mesh": (
        lambda: ms.collectives(jax.jit(jnp.sin).lower(1.0).compile()).by("axes").bytes("data"), ValueError,
        "no axis 'data' as the program has no mesh"),
    "no axes": (
        lambda: ms.collectives(summed()).by("axes").bytes(None), ValueError,
        "axes: give a name or a tuple of names, not None"),
    "a misspelt dtype": (
        lambda: ms.collectives(summed()).by("dtype").bytes("flaot32"), ValueError,
        "no dtype 'flaot32': give JAX's name, as 'float32'"),
    "a part of a key": (
        lambda: ms.collectives(summed()).by("kind", "axes").bytes("all-reduce"), ValueError,
        "give one value for each of kind, axes"),
    "a misspelt field": (
        lambda: ms.collectives(summed()).by("kindd"), ValueError, f"no field 'kindd', {FIELDS}"),
    "no field": (
        lambda: ms.collectives(summed()).by(), ValueError,
        f'name a field, for example by("kind", "axes"); {FIELDS}'),
    # full copies
    "nothing to check": (
        lambda: ms.assert_no_full_copy(summed(), shape(P(), 8)), ValueError,
        "nothing to check, every leaf is whole on every device: pass arrays, or jax.ShapeDtypeStructs with "
        "shardings, of which at least one is split"),
    "a line that was not read": (
        lambda: ms.assert_no_full_copy(text("ROOT %y = strange"), shape(P("data"), 48, 80)), ValueError,
        "1 line(s) of this program could not be read, so that it cannot be told what they hold: ROOT %y = strange"),
    "an idle exclusion": (
        lambda: ms.full_copies(summed(), shape(P("data"), 48, 80), exclude="x.py:1"), ValueError,
        "exclude='x.py:1' excludes nothing: give a pattern for an operation's name or for file.py:line, or a shape, "
        "as full_copies lists them"),
    "a full copy": (
        lambda: ms.assert_no_full_copy(text("ROOT %y = f32[3840]{0} iota()"), {"w": shape(P("data"), 48, 80)}),
        AssertionError, W + "float32[3840]: ROOT %y = f32[3840]{0} iota()"),
    "a full copy with a name": (
        lambda: ms.assert_no_full_copy(
            text('%y = f32[3840]{0} iota(), metadata={op_name="f/iota" source_file="/a/b.py" source_line=7}\n'
                 '  ROOT %z = f32[3840]{0} iota(), metadata={op_name="f/iota" source_file="/a/b.py" source_line=7}'),
            {"w": shape(P("data"), 48, 80)}),
        AssertionError, W + "float32[3840] by f/iota at b.py:7, 2 lines: %y = f32[3840]{0} iota()"),
    "many full copies": (
        lambda: ms.assert_no_full_copy(
            text("\n  ".join(
                f'%y{n} = s8[3840]{{0}} iota(), metadata={{op_name="f/iota" source_file="a.py" source_line={n}}}'
                for n in range(1, 8))),
            shape(P("data"), 48, 80)),
        AssertionError,
        "the array (48, 80) is whole in this program: "
        + "\n  ".join(f"int8[3840] by f/iota at a.py:{n}: %y{n} = s8[3840]{{0}} iota()" for n in range(1, 6))
        + "\n  and 2 more, which full_copies(...).grouped() lists"),
    "a layer": (
        lambda: ms.assert_no_full_copy(
            text("ROOT %y = f32[3840]{0} iota()"), {"a": shape(P(None, "data"), 4, 48, 80), "b": shape(P(None, "data"), 5, 48, 80)}),
        AssertionError,
        "one layer of a or b (48, 80) is whole in this program: float32[3840]: ROOT %y = f32[3840]{0} iota()"),
    "a doubtful copy": (
        lambda: ms.assert_no_full_copy(
            text("ROOT %y = f32[3840]{0} iota()"), {"a": shape(P("data"), 96, 80), "w": shape(P("data"), 48, 80)}),
        ValueError,
        "cannot tell whether this is w (48, 80) or a piece of a, which has as many elements; choose sizes that differ, "
        "or exclude it: float32[3840]: ROOT %y = f32[3840]{0} iota()"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_word_for_word(name):
    call, kind, says = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == says


def test_a_warning_word_for_word():
    line = "%r = f32[24,80]{1,0} all-reduce-sideways(%p), " + "x" * 400
    with pytest.warns(ms.UnparsedCollectiveWarning) as caught:
        ms.collectives(text(line), mesh())
    assert [str(one.message) for one in caught] == [f"not counted, cannot read: {line}"[:326]]


def test_a_warning_points_to_the_caller():
    with pytest.warns(ms.UnparsedCollectiveWarning) as caught:
        ms.collectives(text("%r = f32[24,80]{1,0} all-reduce-sideways(%p)"), mesh())
    assert [one.filename for one in caught] == [__file__]
