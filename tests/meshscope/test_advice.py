"""What an instrument says to something that it cannot take: what that is, and what to pass instead.

One table answers for all of them (src/meshscope/_advice.py), so each kind of thing is tried with every
public function that takes arrays, a tree, a program or a mesh; and advice is followed to see that it works.
"""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope as ms
from meshscope import _advice

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
SHARDING = NamedSharding(MESH, P("data"))
X = jax.ShapeDtypeStruct((48, 80), jnp.float32, sharding=SHARDING)
COMPILE = "jax.jit(f).lower(...).compile()"
SHAPE = "jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)"
NAMED = "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))"


def f(x):
    return x.sum(0)


JITTED = jax.jit(f)
COMPILED = JITTED.lower(X).compile()
EXPORTED = jax.export.export(JITTED)(X)


class Plain(nnx.Module, pytree=False):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))


# Functions by what they want; a tree's leaf has a path.
TAKES = {
    "memory": [ms.memory],
    "tree": [lambda x: ms.full_copies(COMPILED, x), lambda x: ms.assert_no_full_copy(COMPILED, x)],
    "program": [
        ms.collectives,
        lambda x: ms.full_copies(x, X),
        lambda x: ms.assert_no_full_copy(x, X),
        lambda x: ms.diff(x, COMPILED),
        lambda x: ms.diff(COMPILED, x),
    ],
    "drawing": [ms.show],
    "mesh": [lambda x: ms.collectives(COMPILED, x)],
}
LEAVES = [
    lambda x: ms.memory({"a": [X, x]}),
    lambda x: ms.full_copies(COMPILED, {"a": [X, x]}),
    lambda x: ms.assert_no_full_copy(COMPILED, {"a": [X, x]}),
]
ALL = {key: key for key in TAKES}
EXPORT = "pass jax.jit(exported.call).lower(...).compile(), with arguments on exported.nr_devices devices"
JAXPR = f"pass {COMPILE}, where f is the function that was traced"
OUTPUT = "pass what it returns, or (shape, sharding) of one of its outputs"
STRING = "pass the array itself, not its name, and leave strings out of a tree"
MODULE = "pass its variables: nnx.state(module), or what the init of a Linen module returns"
DEFAULT = {
    "memory": f"pass a jax.Array, a jax.ShapeDtypeStruct with a sharding, a tree of these, or a compiled program, {COMPILE}",
    "tree": "pass a jax.Array, a jax.ShapeDtypeStruct with a sharding, or a tree of these",
    "program": f"pass {COMPILE}",
    "drawing": "pass an array (of a function: its result), a jax.ShapeDtypeStruct with a sharding, (shape, sharding), "
    "a mesh, or a tree of these",
    "mesh": "pass a jax.sharding.Mesh or AbstractMesh",
}
NOT = {
    "memory": "an array on devices or a compiled program", "tree": "an array on devices",
    "program": "a compiled program", "drawing": "an array on devices", "mesh": "a mesh",
}  # fmt: skip

# The thing, what it is called, what to pass instead by what is wanted (None: this function takes it).
THINGS = {
    "an Exported": (EXPORTED, "an Exported", {"memory": EXPORT, "program": EXPORT, "drawing": OUTPUT}),
    "a jaxpr": (jax.make_jaxpr(f)(X), "a jaxpr", {"memory": JAXPR, "program": JAXPR, "drawing": OUTPUT}),
    "a jaxpr without constants": (
        jax.make_jaxpr(f)(X).jaxpr, "a jaxpr", {"memory": JAXPR, "program": JAXPR, "drawing": OUTPUT}),
    "the text of a compiled program": (
        COMPILED.as_text(), "the text of a program",
        {"memory": f"pass the program itself, {COMPILE}", "program": None, "drawing": OUTPUT}),
    "the text of StableHLO": (
        JITTED.lower(X).as_text(), "the text of a program",
        {"memory": f"pass the program itself, {COMPILE}", "program": None, "drawing": OUTPUT}),
    "the text of an Exported": (
        EXPORTED.mlir_module(), "the text of a program",
        {"memory": f"pass the program itself, {COMPILE}", "program": None, "drawing": OUTPUT}),
    "a string": ("w", "a string", {"memory": STRING, "tree": STRING, "program": None, "drawing": STRING}),
    "a mesh": (
        MESH, "a mesh",
        {"memory": f"pass arrays that are on it, or {NAMED}", "tree": f"pass arrays that are on it, or {NAMED}",
         "drawing": None, "mesh": None}),
    "an abstract mesh": (
        MESH.abstract_mesh, "a mesh",
        {"memory": f"pass arrays that are on it, or {NAMED}", "tree": f"pass arrays that are on it, or {NAMED}",
         "drawing": None, "mesh": None}),
    "a sharding": (
        SHARDING, "a sharding",
        {"memory": f"pass {SHAPE}", "tree": f"pass {SHAPE}", "drawing": "pass (shape, sharding)",
         "mesh": "pass its mesh, sharding.mesh"}),
    "the sharding of one device": (
        jax.sharding.SingleDeviceSharding(jax.devices()[0]), "a sharding",
        {"memory": f"pass {SHAPE}", "tree": f"pass {SHAPE}", "drawing": "pass (shape, sharding)",
         "mesh": "pass its mesh, sharding.mesh"}),
    "a spec": (
        P("data"), "a partition spec",
        {"memory": f"pass {NAMED}", "tree": f"pass {NAMED}", "drawing": "pass (shape, jax.NamedSharding(mesh, spec))"}),
    "a Format": (
        Format(Layout((1, 0)), SHARDING), "a Format",
        {"memory": "pass jax.ShapeDtypeStruct(shape, dtype, sharding=format)",
         "tree": "pass jax.ShapeDtypeStruct(shape, dtype, sharding=format)",
         "drawing": "pass (shape, format.sharding)", "mesh": "pass its mesh, format.sharding.mesh"}),
    "a Layout": (Layout((1, 0)), "of type Layout", {}),
    "a device": (jax.devices()[0], "of type .*Device", {}),
    "what is lowered": (
        JITTED.lower(X), "of type Lowered",
        {"memory": "call .compile() first", "program": "call .compile() first", "drawing": OUTPUT}),
    "what is traced": (
        JITTED.trace(X), "of type Traced",
        {"memory": "call .lower(...).compile() first", "program": "call .lower(...).compile() first",
         "tree": "pass what it returns", "drawing": OUTPUT}),
    "a compiled program": (
        COMPILED, "a compiled program",
        {"memory": None, "program": None, "drawing": OUTPUT,
         "tree": "pass arrays here; a program goes by itself, memory(compiled), or first, full_copies(compiled, tree)",
         "mesh": "pass the program first, collectives(compiled, mesh)"}),
    "an executable of XLA": (COMPILED.runtime_executable(), "of type LoadedExecutable", {}),
    "a function": (f, "a function", {"memory": f"pass {COMPILE}", "tree": "pass what it returns"}),
    "a module of Linen": (
        linen.Dense(3), "a Flax module that is not a pytree", {"memory": MODULE, "tree": MODULE, "drawing": MODULE}),
    "a module that is no tree": (
        Plain(), "a Flax module that is not a pytree", {"memory": MODULE, "tree": MODULE, "drawing": MODULE}),
    "a result": (ms.memory(X), "a result of meshscope", dict.fromkeys(ALL, "pass what it was made from")),
    "a table": (
        ms.collectives(COMPILED).by("kind"), "a result of meshscope", dict.fromkeys(ALL, "pass what it was made from")),
    "a drawing": (ms.show(X), "a result of meshscope", dict.fromkeys(ALL, "pass what it was made from")),
    "a host array": (
        np.ones(3), "of type ndarray and on the host",
        {"memory": f"pass jax.device_put(x, sharding), or {SHAPE}", "tree": f"pass jax.device_put(x, sharding), or {SHAPE}",
         "drawing": "pass jax.device_put(x, sharding), or (shape, sharding)"}),
    "a box around no array": (nnx.Variable(P("data")), "(of type Variable|a partition spec)", {
        "memory": f"pass {NAMED}", "tree": f"pass {NAMED}", "drawing": "pass (shape, jax.NamedSharding(mesh, spec))"}),
    "bytes": (b"w", "bytes", {
        key: "if they are a serialized Exported, pass jax.jit(jax.export.deserialize(data).call).lower(...).compile()"
        for key in ("memory", "program")}),
    "a set": ({1}, "of type set", {}),
    "an object": (object(), "of type object", {}),
}  # fmt: skip


def refusals(thing, wanted):
    for call in TAKES[wanted]:
        with pytest.raises(TypeError) as caught:
            call(thing)
        yield str(caught.value)


@pytest.mark.parametrize("wanted", TAKES)
@pytest.mark.parametrize("name", THINGS)
def test_every_function_says_what_it_got_and_what_to_pass(name, wanted):
    thing, called, instead = THINGS[name]
    advice = instead.get(wanted, DEFAULT[wanted])
    if advice is None:
        return
    subject = "mesh=" if wanted == "mesh" else "this"
    for said in refusals(thing, wanted):
        assert re.fullmatch(f"{subject} is {called}, not {NOT[wanted]}: {re.escape(advice)}", said)


@pytest.mark.parametrize("name", THINGS)
def test_a_leaf_is_named_by_its_path(name):
    thing, called, instead = THINGS[name]
    advice = instead.get("tree", DEFAULT["tree"])
    for call in LEAVES:
        with pytest.raises(TypeError) as caught:
            call(thing)
        assert re.fullmatch(
            f"a.1 is {called}, not an array on devices: {re.escape(advice)}", str(caught.value)
        )


def test_what_a_table_knows_is_tried_here():
    """Every kind but those whose things exist only while something is traced, and those of other tests."""
    tried = [next(k for k in _advice.KINDS if k.matches(thing)) for thing, _, _ in THINGS.values()]
    others = {k.name for k in _advice.KINDS if not any(k is one for one in tried)}
    assert others == {
        "a traced array", "the type of an array", "a shape and a partition spec",
        "a jax.ShapeDtypeStruct without a sharding",
    }  # fmt: skip


# Traced arrays


def while_traced(transform, *inputs):
    """What every function says to an array that is being traced."""
    said = {}

    def look(x):
        for wanted in ("memory", "tree", "program"):
            said[wanted] = list(refusals(x, wanted))
        with pytest.raises(TypeError) as caught:
            ms.memory({"x": x})
        said["leaf"] = [str(caught.value)]
        return x.sum()

    transform(look)(*inputs)
    return said


REAL = {
    mesh: jax.device_put(np.ones((48, 80), np.float32), NamedSharding(mesh, P("data")))
    for mesh in (MESH, EXPLICIT)
}
TRACED = {
    "jit, Auto axes": (jax.jit, REAL[MESH]),
    "jit, Explicit axes": (jax.jit, REAL[EXPLICIT]),
    "jit, no mesh": (jax.jit, jnp.ones(3)),
    "grad": (jax.grad, REAL[MESH]),
    "vmap": (jax.vmap, REAL[MESH]),
    "shard_map": (
        lambda look: jax.shard_map(lambda x: look(x)[None], mesh=MESH, in_specs=P("data"), out_specs=P("data")), REAL[MESH]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_array_is_called_one(name):
    said = while_traced(*TRACED[name])
    advice = "call this on what the jitted function returns or, where every axis of the mesh is Explicit, pass jax.typeof(x)"
    assert set(said["memory"]) == {f"this is a traced array, not {NOT['memory']}: {advice}"}
    assert set(said["tree"]) == {f"this is a traced array, not {NOT['tree']}: {advice}"}
    assert set(said["leaf"]) == {f"x is a traced array, not {NOT['tree']}: {advice}"}
    outside = f"outside of the function that is traced, pass {COMPILE}"
    assert set(said["program"]) == {f"this is a traced array, not a compiled program: {outside}"}


def test_the_type_of_a_traced_array_says_where_it_is_over_explicit_axes_alone():
    told = []
    jax.jit(lambda x: told.append(ms.memory(jax.typeof(x))) or x)(REAL[EXPLICIT])
    assert told[0].total_bytes == ms.memory(REAL[EXPLICIT]).total_bytes
    refused = (
        "this is the type of an array, not an array on devices or a compiled program: a type says where an array is only "
        "if every axis of its mesh is Explicit, and here the compiler chooses: pass what the jitted function returns"
    )
    mixed = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    types = [jax.typeof(REAL[MESH]), jax.typeof(jnp.ones(3))]
    types.append(jax.typeof(jax.device_put(np.ones((48, 80)), NamedSharding(mixed, P("data")))))
    inside = jax.shard_map(
        lambda x: types.append(jax.typeof(x)) or x,
        mesh=EXPLICIT,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    jax.jit(inside).trace(REAL[EXPLICIT])
    for each in types:
        with pytest.raises(TypeError) as caught:
            ms.memory(each)
        assert str(caught.value) == refused


def test_a_tree_with_attributes_of_any_name_is_a_tree():
    """nnx.Rngs makes a stream for each name that it is asked for, such as as_text or lower."""
    rngs = nnx.Rngs(0)
    assert hasattr(rngs, "as_text") and hasattr(rngs, "memory_analysis")
    told = ms.memory(rngs)
    assert {leaf.path for leaf in told.leaves} == {"default.count", "default.key"}
    assert told.bytes_per_device == 4 + jax.random.key_data(jax.random.key(0)).nbytes
    assert ms.show(rngs).text.startswith("default.count")
    for said in refusals(rngs, "program"):
        assert said == f"this is of type Rngs, not a compiled program: pass {COMPILE}"


# Advice, followed


def test_advice_for_programs_works():
    """Each thing becomes a compiled program in the way that is advised, and is read like the program itself."""
    right = ms.memory(COMPILED), list(ms.collectives(COMPILED)), len(ms.full_copies(COMPILED, X))
    assert EXPORTED.nr_devices == len(SHARDING.device_set)
    for compiled in (
        jax.jit(EXPORTED.call).lower(X).compile(),
        jax.jit(f).lower(X).compile(),  # of a jaxpr: the function that was traced
        JITTED.lower(X).compile(),
        JITTED.trace(X).lower().compile(),
    ):
        rows = ms.collectives(compiled)
        assert (ms.memory(compiled), len(ms.full_copies(compiled, X))) == (right[0], right[2])
        alike = [(row.kind, row.axes, row.payload_bytes, row.executions) for row in rows]
        assert alike == [
            (row.kind, row.axes, row.payload_bytes, row.executions) for row in right[1]
        ]
        assert not ms.diff(compiled, COMPILED)


def test_advice_for_arrays_works():
    right = ms.memory(REAL[MESH]).bytes_per_device
    shape, dtype, spec = (48, 80), jnp.float32, P("data")
    for x in (
        jax.device_put(np.ones(shape, dtype), SHARDING),
        jax.ShapeDtypeStruct(shape, dtype, sharding=SHARDING),
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(MESH, spec)),
        jax.ShapeDtypeStruct(shape, dtype, sharding=Format(Layout((1, 0)), SHARDING)),
    ):
        assert ms.memory(x).bytes_per_device == right
        assert ms.show(x).text.endswith("each device: 24×80")
        assert not ms.full_copies(JITTED.lower(X).compile(), {"w": x})
    for pair in (
        (shape, SHARDING),
        (shape, jax.NamedSharding(MESH, spec)),
        (shape, Format(Layout((1, 0)), SHARDING).sharding),
    ):
        assert ms.show(pair).text.endswith("each device: 24×80")
    assert ms.collectives(COMPILED, SHARDING.mesh).axis_sizes == dict(MESH.shape)
    assert ms.memory(nnx.state(Plain())).bytes_per_device == 12
    assert ms.memory(
        linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 4)))
    ).bytes_per_device == 4 * (12 + 3)
