"""Bytes told by meshscope, against the shards that JAX itself holds."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

import meshscope as ms

P = jax.P
MESHES = [(8,), (2, 4), (4, 2), (1, 8), (2, 2, 2), (2, 1, 2)]


def mesh_of(*sizes, order=range(8)):
    count = int(np.prod(sizes))
    devices = np.array(jax.devices())[list(order)[:count]].reshape(sizes)
    return Mesh(devices, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


@st.composite
def arrays(draw, mesh):
    """An array of random rank, dtype and spec; every dimension is divided evenly."""
    rank = draw(st.integers(0, 3))
    free = list(draw(st.permutations(mesh.axis_names)))
    spec, shape = [], []
    for _ in range(rank):
        names = [free.pop() for _ in range(draw(st.integers(0, len(free))))]
        spec.append(tuple(names) if len(names) != 1 else names[0])
        parts = int(np.prod([mesh.shape[n] for n in names]))
        shape.append(parts * draw(st.integers(0, 3)))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "bool"]))
    spec = P(*[s if s != () else None for s in spec])
    return jax.device_put(jnp.ones(shape, dtype), jax.NamedSharding(mesh, spec))


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_bytes_are_those_of_the_shards(data):
    sizes = data.draw(st.sampled_from(MESHES), "mesh")
    mesh = mesh_of(*sizes, order=data.draw(st.permutations(range(8)), "device order"))
    tree = {f"leaf{i}": data.draw(arrays(mesh)) for i in range(data.draw(st.integers(1, 4)))}
    held = Counter()
    for x in tree.values():
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    told = ms.memory(tree)
    assert told.bytes_per_device == max(held.values())
    assert told.total_bytes == sum(held.values())
    assert told.unique_bytes == sum(x.nbytes for x in tree.values())
    sizes = [leaf.bytes_per_device for leaf in told.leaves]
    assert sizes == sorted(sizes, reverse=True)
    for leaf in told.leaves:
        x = tree[leaf.path]
        shards = x.addressable_shards
        assert leaf.bytes_per_device == max(s.data.nbytes for s in shards)
        assert leaf.sharded == any(s.data.shape != x.shape for s in shards)
        assert (leaf.shape, leaf.dtype) == (x.shape, x.dtype.name)
        assert leaf.spec == x.sharding.spec
        if x.size:
            alike = Counter(str(s.index) for s in shards)
            assert {leaf.copies} == set(alike.values())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    assert ms.memory(shapes) == told


def test_no_device_is_needed_for_an_abstract_mesh():
    sharding = jax.NamedSharding(AbstractMesh((2, 4), ("a", "b")), P("a"))
    told = ms.memory(jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding))
    assert (told.bytes_per_device, told.total_bytes, told.unique_bytes) == (128, 1024, 256)
    assert told.leaves[0].copies == 4


def test_devices_that_hold_more_than_others():
    """A whole array on one device beside one that is split over eight."""
    mesh = mesh_of(8)
    split = jax.device_put(np.ones((8, 4), np.float32), jax.NamedSharding(mesh, P("a")))
    alone = jax.device_put(np.ones(100, np.float32), jax.devices()[3])
    told = ms.memory({"split": split, "alone": alone})
    assert told.bytes_per_device == 16 + 400
    assert told.total_bytes == told.unique_bytes == 128 + 400
    first, second = told.leaves
    assert (first.path, first.copies, first.sharded, first.spec) == ("alone", 1, False, None)
    assert (second.path, second.copies, second.sharded) == ("split", 1, True)
    assert "one device" in repr(told) and "sharded" in repr(told)


def test_an_array_that_stands_twice_counts_once():
    x = jax.device_put(np.ones(8, np.float32), jax.NamedSharding(mesh_of(8), P()))
    assert ms.memory({"a": x, "b": [x]}).total_bytes == 8 * 32
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert ms.memory([shape, shape]).total_bytes == 2 * 8 * 32  # two arrays to be


def test_keys_of_random_numbers_have_bytes_too():
    mesh = mesh_of(8)
    key = jax.device_put(jax.random.key(0), jax.NamedSharding(mesh, P()))
    keys = jax.device_put(jax.random.split(key, 16), jax.NamedSharding(mesh, P("a")))
    raw = jax.random.key_data(keys)
    told = ms.memory({"key": key, "keys": keys})
    assert told.unique_bytes == jax.random.key_data(key).nbytes + raw.nbytes
    (leaf,) = ms.memory(keys).leaves
    assert (leaf.shape, leaf.dtype, leaf.sharded) == ((16,), "key<fry>", True)
    assert leaf.bytes_per_device == raw.nbytes // 8


def test_flax_modules_states_and_variables():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        metadata = {"out_sharding": (None, "model")}
        model = nnx.Linear(16, 32, rngs=nnx.Rngs(0), kernel_metadata=metadata)
        told = ms.memory(model)
        assert [leaf.path for leaf in told.leaves] == ["kernel", "bias"]
        assert [leaf.bytes_per_device for leaf in told.leaves] == [16 * 8 * 4, 32 * 4]
        assert [leaf.copies for leaf in told.leaves] == [2, 8]
        assert [leaf.sharded for leaf in told.leaves] == [True, False]
        assert ms.memory(nnx.state(model)) == told
        (kernel,) = ms.memory(model.kernel).leaves
        assert (kernel.path, kernel.bytes_per_device) == ("", 512)
    assert "replicated, 8 copies" in repr(told) and "sharded, 2 copies" in repr(told)


def test_a_compiled_program_by_purpose():
    mesh = mesh_of(2, 4)
    split = jax.NamedSharding(mesh, P("a", "b"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)  # 2048 bytes here

    def f(x, y):
        return x + 1, (y @ y).sum()

    told = ms.memory(jax.jit(f).lower(x, x).compile())
    assert told.arguments == 2 * 2048
    assert 2048 + 4 <= told.outputs < 2048 + 4 + 64  # and a few pointers
    assert told.aliased == 0
    assert told.temporaries > 0  # y is gathered for the product
    total = told.arguments + told.outputs + told.temporaries
    assert told.bytes_per_device == total
    donated = ms.memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
    assert donated.aliased == 2048 == donated.bytes_per_device - donated.temporaries
    text = repr(told)
    assert [line.split()[0] for line in text.split("\n")[2:]] == [
        "arguments",
        "outputs",
        "temporaries",
        "aliased",
    ]
    assert "peak" not in text and "activation" not in text


def test_large_programs_need_no_memory():
    mesh = mesh_of(8)
    w = jax.ShapeDtypeStruct(
        (1 << 16, 1 << 16), jnp.float32, sharding=jax.NamedSharding(mesh, P("a"))
    )
    assert ms.memory(w).bytes_per_device == 1 << 31
    assert ms.memory(jax.jit(lambda w: w[0, 0]).lower(w).compile()).arguments == 1 << 31


def test_bad_arguments_say_what_to_pass():
    jitted = jax.jit(jnp.sin)
    for wrong, says in [
        (np.ones(3), r"type ndarray, no array on devices: pass jax.device_put\(x, sharding\)"),
        ({"a": {"b": 3.0}}, r"a.b is of type float, no array"),
        ([jax.ShapeDtypeStruct((3,), "float32")], r"0 is a ShapeDtypeStruct without a sharding"),
        (len, r"pass jax.jit\(f\).lower\(...\).compile\(\)"),
        (jitted, r"call .lower\(...\).compile\(\) first"),
        (jitted.lower(1.0), r"call .compile\(\) first"),
        (jitted.trace(1.0), r"call .lower\(...\).compile\(\) first"),
        (mesh_of(8), "type Mesh, no array on devices"),
    ]:
        with pytest.raises(TypeError, match=says):
            ms.memory(wrong)


def test_tables_for_a_terminal_and_a_notebook():
    mesh = mesh_of(2, 4)
    x = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(mesh, P(("a", "b"))))
    told = ms.memory({"<w>": x})
    assert repr(told) == (
        "32 bytes per device; 256 without copies, 256 on all devices\n"
        "leaf  shape   dtype    spec           bytes per device  placement\n"
        "<w>   (8, 8)  float32  P(('a', 'b'))                32  sharded"
    )
    html = told._repr_html_()
    assert "&lt;w&gt;" in html and "<w>" not in html


def test_partial_sums_are_not_called_copies():
    """A value whose sum is still to be done has the same indices, and other numbers, everywhere."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        left = jax.device_put(np.ones((8, 16), np.float32), P(None, "a"))
        right = jax.device_put(np.ones((16, 4), np.float32), P("a", None))
        sums = jnp.dot(left, right, out_sharding=P(None, None, unreduced={"a"}))
    held = {shard.data.nbytes for shard in sums.addressable_shards}
    assert {ms.memory(sums).bytes_per_device} == held
    assert "P(None, None) {U:a}" in str(ms.memory(sums))
    assert (
        "partial sums over a" in str(ms.memory(sums))
        and "copies" not in str(ms.memory(sums)).split("\n")[-1]
    )
