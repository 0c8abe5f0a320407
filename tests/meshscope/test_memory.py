"""Bytes told by meshscope, against the shards that JAX itself holds."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effort import examples
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
@settings(max_examples=examples(60), deadline=None, derandomize=True)
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
    assert [leaf.shares for leaf in ms.memory({"a": x, "b": [x]}).leaves] == [None, "a"]
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
        (np.ones(3), r"type ndarray and on the host, not .*: pass jax.device_put\(x, sharding\)"),
        ({"a": {"b": 3.0}}, r"a.b is of type float and on the host, not an array on devices"),
        (
            [jax.ShapeDtypeStruct((3,), "float32")],
            r"0 is a jax.ShapeDtypeStruct without a sharding",
        ),
        (len, r"pass jax.jit\(f\).lower\(...\).compile\(\)"),
        (jitted, r"call .lower\(...\).compile\(\) first"),
        (jitted.lower(1.0), r"call .compile\(\) first"),
        (jitted.trace(1.0), r"call .lower\(...\).compile\(\) first"),
        (mesh_of(8), "this is a mesh, not an array on devices"),
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
    assert "P(None, None) {R:a}" in str(ms.memory(finished())) and "4 copies" in str(
        ms.memory(finished())
    )


def finished():
    """A value whose sum over a is done, as its type says: {R:a}."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        return jax.reshard(
            jax.device_put(np.ones((8, 16), np.float32), P()), P(None, None, reduced={"a"})
        )


# Names of leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    query: jax.Array
    value: jax.Array


def split(x):
    return jax.device_put(x, jax.NamedSharding(mesh_of(8), P("a")))


def test_leaves_that_are_called_value_keep_their_name():
    x = split(np.ones((8, 4), np.float32))
    tree = {"query": x, "value": x + 1, "eigenvalue": x + 2, "a": {"value": x + 3}}
    names = ["a.value", "eigenvalue", "query", "value"]
    assert sorted(leaf.path for leaf in ms.memory(tree).leaves) == names
    assert sorted(ms.show(tree).text.split("\n\n")[n].split("\n")[0] for n in range(4)) == names
    fields = Attention(x, x + 1)
    assert [leaf.path for leaf in ms.memory(fields).leaves] == ["query", "value"]
    assert [leaf.path for leaf in ms.memory([fields]).leaves] == ["0.query", "0.value"]
    assert [t.split("\n")[0] for t in ms.show(fields).text.split("\n\n")] == ["query", "value"]
    assert [leaf.path for leaf in ms.memory(x).leaves] == [""]
    gather = jax.jit(lambda x: x * 2, out_shardings=jax.NamedSharding(mesh_of(8), P()))
    with pytest.raises(AssertionError, match=r"^a.value or eigenvalue or query or value \(8, 4\)"):
        ms.assert_no_full_copy(gather.lower(x).compile(), tree)


def test_boxes_of_flax_are_no_part_of_a_name():
    from flax import linen

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh):
        boxed = linen.Dense(8, kernel_init=init).init(jax.random.key(0), jnp.ones((2, 4)))
        value = nnx.Dict(value=nnx.Param(jnp.ones(8)))
    assert [leaf.path for leaf in ms.memory(boxed).leaves] == ["params.kernel", "params.bias"]
    for told in (ms.memory(value), ms.memory(nnx.state(value))):
        assert [leaf.path for leaf in told.leaves] == ["value"]
    pair = nnx.Variable({"a": jnp.ones(8), "b": jnp.ones(4)})
    assert [leaf.path for leaf in ms.memory([pair]).leaves] == ["0.value.a", "0.value.b"]


# Memory that counts once, or not at all


def test_deleted_arrays_hold_nothing():
    x = split(np.ones((64, 16), np.float32)) + 0
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    told = ms.memory({"x": x, "y": y})
    assert (told.bytes_per_device, told.total_bytes, told.unique_bytes) == (512, 4096, 4096)
    gone = told.leaves[1]
    assert (gone.path, gone.deleted, gone.bytes_per_device, gone.total_bytes, gone.unique_bytes) == (
        "x", True, 0, 0, 0)  # fmt: skip
    assert gone.shape == (64, 16) and repr(told).split("\n")[-1].endswith("0  deleted")
    assert ms.memory([x]).bytes_per_device == 0
    with pytest.raises(
        ValueError, match=r"float32\[64,16\] was deleted and is on no device \(leaf x\): .*donated"
    ):
        ms.show({"x": x, "y": y})
    with pytest.raises(ValueError, match="is on no device: .* show what the function returned"):
        ms.show(x)


def test_shared_buffers_count_once():
    x = split(np.ones((64, 16), np.float32)) + 0
    shards = [shard.data for shard in x.addressable_shards]
    y = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
    assert y is not x
    told = ms.memory({"x": x, "y": y, "z": x + 1})
    assert (told.bytes_per_device, told.total_bytes, told.unique_bytes) == (1024, 8192, 8192)
    assert [(leaf.path, leaf.bytes_per_device, leaf.shares) for leaf in told.leaves] == [
        ("x", 512, None), ("z", 512, None), ("y", 0, "x")]  # fmt: skip
    assert repr(told).endswith("sharded, the buffers of x")
    assert ms.memory([[x, y], x]).leaves[2].shares == "0.0"
    assert ms.memory((y, x)).bytes_per_device == 512


def test_a_copy_that_shares_one_device_s_buffer():
    """device_put of an array to all devices may keep the piece that is there already."""
    one = jax.device_put(jnp.arange(1024.0), jax.devices()[0])
    everywhere = jax.device_put(one, jax.NamedSharding(mesh_of(8), P()))
    kept = (
        one.unsafe_buffer_pointer() == everywhere.addressable_shards[0].data.unsafe_buffer_pointer()
    )
    told = ms.memory({"one": one, "everywhere": everywhere})
    assert told.total_bytes == (8 if kept else 9) * 4096
    assert told.bytes_per_device == (1 if kept else 2) * 4096
    assert told.unique_bytes == (1 if kept else 2) * 4096


def test_empty_arrays_share_nothing():
    a, b = (split(np.ones((0, 4), np.float32)) for _ in range(2))
    assert [leaf.shares for leaf in ms.memory([a, b]).leaves] == [None, None]


def test_what_lies_in_the_host_s_memory_is_told_apart():
    mesh = mesh_of(8)
    there = jax.NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    here = jax.NamedSharding(mesh, P("a"))
    moments = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=there)
    weights = jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=here)
    told = ms.memory({"moments": moments, "weights": weights})
    assert (told.bytes_per_device, told.host_bytes_per_device) == (128 * 64 * 4, 128 * 128 * 4)
    assert told.total_bytes == told.unique_bytes == 1024 * 64 * 4
    assert [leaf.memory_kind for leaf in told.leaves] == ["pinned_host", None]
    assert repr(told).split("\n")[0] == (
        "32,768 bytes per device and 65,536 in host memory; 262,144 without copies, 262,144 on all devices"
    )
    assert repr(told).split("\n")[2].endswith("sharded, in pinned_host")
    assert "host" not in repr(ms.memory(weights))
    try:
        x = jax.device_put(np.ones((64, 16), np.float32), there)
    except ValueError:
        pytest.skip("this backend has no pinned_host")
    assert ms.memory(x).bytes_per_device == 0 and ms.memory(x).host_bytes_per_device == 512
    # Whatever the backend's ordinary memory is called, it is not the host's.
    ordinary = jax.NamedSharding(mesh, P("a"), memory_kind=jax.devices()[0].default_memory().kind)
    assert ms.memory(jax.device_put(np.ones((8, 4)), ordinary)).host_bytes_per_device == 0


class FakeStats:
    argument_size_in_bytes, output_size_in_bytes = 64, 32
    temp_size_in_bytes, alias_size_in_bytes = 16, 8
    host_argument_size_in_bytes, host_output_size_in_bytes = 4096, 1024
    host_temp_size_in_bytes, host_alias_size_in_bytes = 512, 256


class FakeProgram:
    """What a TPU says of a program that takes its moments from the host."""

    def __init__(self, stats):
        self.stats = stats

    def as_text(self):
        return ""

    def memory_analysis(self):
        return self.stats


@pytest.mark.parametrize("platform, told", [("tpu", 90), ("cuda", 104), ("cpu", 104)])
def test_on_tpu_the_peak_counts_and_elsewhere_the_sum_of_the_parts(platform, told):
    """For TPU, temporaries of loops that run in turn are counted twice; for CPU, the peak lacks them."""

    class Sharding(jax.sharding.Sharding):
        device_set = (SimpleNamespace(platform=platform),)

    program = FakeProgram(SimpleNamespace(**vars(FakeStats), peak_memory_in_bytes=90))
    program.input_shardings = ((Sharding(),), {})
    found = ms.memory(program)
    assert found.bytes_per_device == told and found.peak == (90 if platform == "tpu" else 0)
    assert ("peak" in repr(found)) == (platform == "tpu")


def test_a_program_s_bytes_in_the_host_s_memory():
    told = ms.memory(FakeProgram(FakeStats))
    assert told == ms.ProgramMemory(64, 32, 16, 8, 4096, 1024, 512, 256)
    assert (told.bytes_per_device, told.host_bytes_per_device) == (104, 4096 + 1024 + 512 - 256)
    assert repr(told) == (
        "104 bytes per device and 5,376 in host memory for a compiled program\n"
        "what              bytes per device\n"
        "arguments                       64\n"
        "outputs                         32\n"
        "temporaries                     16\n"
        "aliased                          8\n"
        "host arguments               4,096\n"
        "host outputs                 1,024\n"
        "host temporaries               512\n"
        "host aliased                   256"
    )
    with pytest.raises(ValueError, match="this backend does not tell the memory of a program"):
        ms.memory(FakeProgram(None))


# Programs with arguments or results in the host's memory, which XLA's CPU compiler counts as the device's


def on(kind=None):
    return jax.NamedSharding(mesh_of(2, 4), P("a"), memory_kind=kind)


def rows(count, kind=None, dtype="float32"):
    """count rows of 64 numbers, over two devices: 128 bytes a row and device in float32."""
    return jax.ShapeDtypeStruct((count, 64), dtype, sharding=on(kind))


def program(f, *inputs, **settings):
    return ms.memory(jax.jit(f, **settings).lower(*inputs).compile())


HOST_KINDS = ("pinned_host", "unpinned_host")


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_a_program_s_arguments_on_the_host_are_told_apart(kind):
    told = program(lambda a: jax.device_put(a, on()) * 2, rows(16, kind), out_shardings=on())
    assert (told.host_arguments, told.arguments) == (2048, 0)
    assert (told.host_outputs, told.outputs) == (0, 2048)
    assert ms.memory(rows(16, kind)).host_bytes_per_device == told.host_arguments


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_a_program_s_results_on_the_host_are_told_apart(kind):
    told = program(lambda a: a * 2, rows(16), out_shardings=on(kind))
    assert (told.host_outputs, told.outputs) == (2048, 0)
    assert (told.host_arguments, told.arguments) == (0, 2048)
    assert repr(told).startswith("2,048 bytes per device and 2,048 in host memory for")


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_a_result_that_is_put_on_the_host_is_where_the_array_then_is(kind):
    """Inside a program, CPU puts it into pinned_host and ignores unpinned_host."""
    put = jax.jit(lambda a: jax.device_put(a * 2, on(kind)))
    told, x = (
        ms.memory(put.lower(rows(16)).compile()),
        jax.device_put(np.ones((16, 64), np.float32), on()),
    )
    made = ms.memory(put(x))
    assert (told.host_outputs, told.outputs) == (made.host_bytes_per_device, made.bytes_per_device)
    assert sorted((told.host_outputs, told.outputs)) == [0, 2048]


def test_some_arguments_and_results_of_a_program_are_on_the_host():
    """A step that keeps moments on the host: each number stands where its array is."""

    def step(weights, moments):
        here = jax.device_put(moments, on()) + weights
        return weights - here, jax.device_put(here, on("pinned_host"))

    told = program(step, rows(16), rows(16, "pinned_host"))
    assert (told.host_arguments, told.arguments) == (2048, 2048)
    pointers = 2 * 8  # a tuple of two results
    assert (told.host_outputs, told.outputs) == (2048, 2048 + pointers)
    assert (told.host_aliased, told.aliased) == (0, 0)
    donated = program(step, rows(16), rows(16, "pinned_host"), donate_argnums=(0, 1))
    assert (donated.host_aliased, donated.aliased) == (2048, 2048)
    assert donated.host_bytes_per_device == 2048
    only = program(step, rows(16), rows(16, "pinned_host"), donate_argnums=1)
    assert (only.host_aliased, only.aliased) == (2048, 0)


def test_only_donated_results_on_the_host_are_aliased():
    """Two results there, of which one reuses an argument, and a third on the devices that reuses another."""
    there = on("pinned_host")

    def step(a, b):
        on_host = jax.device_put(jax.device_put(a, on()) * 2, there)
        return on_host, jax.device_put(b * 2, there), b + 1

    told = program(step, rows(16, "pinned_host"), rows(32), donate_argnums=(0, 1))
    assert (told.host_arguments, told.host_outputs, told.host_aliased) == (2048, 2048 + 4096, 2048)
    assert (told.arguments, told.aliased) == (4096, 4096)


def test_a_donated_argument_on_the_host_is_reused_there():
    told = program(
        lambda a: a * 2, rows(16, "pinned_host"), out_shardings=on("pinned_host"), donate_argnums=0
    )
    assert dataclasses.asdict(told) | {"host_temporaries": 0, "temporaries": 0} == {
        "arguments": 0, "outputs": 0, "temporaries": 0, "aliased": 0,
        "host_arguments": 2048, "host_outputs": 2048, "host_temporaries": 0, "host_aliased": 2048,
        "peak": 0,
    }  # fmt: skip
    assert told.host_bytes_per_device == 2048


def test_many_results_of_a_program_are_on_the_host():
    """More than the five that XLA writes before it begins to count them."""
    inputs = [rows(16 * n) for n in range(1, 9)]
    told = program(lambda many: [jax.device_put(one, on("pinned_host")) for one in many], inputs)
    total = sum(ms.memory(one).bytes_per_device for one in inputs)
    assert (told.host_outputs, told.arguments) == (total, total)


@pytest.mark.parametrize("dtype", ["int4", "bool", "bfloat16", "float8_e4m3fn"])
def test_small_types_on_the_host_are_as_small_there(dtype):
    x = rows(16, "pinned_host", jnp.dtype(dtype))
    told = program(lambda a: jax.device_put(a, on()), x)
    assert (told.host_arguments, told.arguments) == (ms.memory(x).host_bytes_per_device, 0)


def test_an_argument_that_is_not_used_is_nowhere():
    """JAX leaves it out of the program, unless it is told to keep it."""
    used = program(lambda a, b: b + 1, rows(16, "pinned_host"), rows(32))
    assert (used.host_arguments, used.arguments) == (0, 4096)
    kept = program(lambda a, b: b + 1, rows(16, "pinned_host"), rows(32), keep_unused=True)
    assert (kept.host_arguments, kept.arguments) == (2048, 4096)


def test_a_program_without_host_memory_says_nothing_of_it():
    told = program(lambda a: a * 2, rows(16))
    assert "host" not in repr(told) and told.host_bytes_per_device == 0
    assert (told.arguments, told.outputs) == (2048, 2048)


def test_a_backend_that_tells_host_memory_is_believed():
    """Where XLA counts it, for TPU with its padding, the text is not asked."""
    here = program(
        lambda a: jax.device_put(a, on()) * 2, rows(16, "pinned_host"), out_shardings=on()
    )
    text = jax.jit(lambda a: a + 1).lower(rows(16, "pinned_host")).compile().as_text()
    assert "S(5)" in text.split("\n")[0] and here.host_arguments == 2048

    class Padded(FakeProgram):
        def as_text(self):
            return text

    assert ms.memory(Padded(FakeStats)) == ms.ProgramMemory(64, 32, 16, 8, 4096, 1024, 512, 256)


def test_the_type_of_an_array_on_the_host_says_so():
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2
    )
    there = jax.NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    x = jax.device_put(np.ones((16, 64), np.float32), there)
    for told in (ms.memory(x), ms.memory(jax.typeof(x))):
        assert (told.bytes_per_device, told.host_bytes_per_device) == (0, 2048)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("int4", 4), ("uint4", 4), ("uint2", 2), ("int8", 8), ("float8_e4m3fn", 8), ("bfloat16", 16),
     ("bool", 8), ("float4_e2m1fn", 4), ("float32", 32), ("complex64", 64)],
)  # fmt: skip
def test_elements_are_as_small_as_the_compiler_makes_them(dtype, bits):
    """The bytes of an argument, as XLA packs it."""
    mesh = mesh_of(8)
    x = jax.ShapeDtypeStruct((16, 8), jnp.dtype(dtype), sharding=jax.NamedSharding(mesh, P("a")))
    told = ms.memory(x)
    assert told.bytes_per_device == 16 * bits // 8 and told.unique_bytes == 128 * bits // 8
    compiled = jax.jit(lambda x: x).lower(x).compile()
    assert told.bytes_per_device == ms.memory(compiled).arguments


def test_a_part_of_a_byte_is_a_byte():
    x = jax.ShapeDtypeStruct((8, 5), jnp.int4, sharding=jax.NamedSharding(mesh_of(8), P("a")))
    assert ms.memory(x).bytes_per_device == 3  # 5 halves
    assert ms.memory(x).total_bytes == 24 and ms.memory(x).unique_bytes == 20


def test_a_tree_of_nothing_is_refused_as_show_refuses_it():
    for nothing in ({}, None, [], [None], {"a": {}}):
        for instrument in (ms.memory, ms.show):
            with pytest.raises(
                ValueError, match="^the tree has no leaves: pass arrays, or a tree of arrays$"
            ):
                instrument(nothing)
