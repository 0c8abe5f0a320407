"""What show accepts and refuses, and what every drawing promises: size, contrast,
determinism, a label for those who cannot see it, plain text without control codes."""

import dataclasses
import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_drawing import Picture, check, read_svg, read_text, words

import meshscope as ms
from meshscope import PALETTE as COLOURS
from meshscope import _compat, _scene, _svg
from meshscope._placement import place

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(sizes=(2, 4), names=("data", "model"), kind=AUTO):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def array(shape, spec, mesh=None):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    return jax.device_put(x, NamedSharding(mesh or mesh_of(), spec))


def shape_of(shape, spec, mesh):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def gallery():
    mesh, cube = mesh_of(), mesh_of((2, 2, 2), ("stage", "fsdp", "model"))
    yield ms.show(mesh)
    yield ms.show(cube)
    yield ms.show(mesh.abstract_mesh)
    for spec in [P(), P("data"), P("data", "model"), P(None, ("model", "data"))]:
        yield ms.show(array((8, 16), spec), title="x_BD")
    yield ms.show(array((), P()))
    yield ms.show(array((16,), P(("data", "model"))))
    yield ms.show(shape_of((4, 8, 16, 32), P("stage", "fsdp", None, "model"), cube))
    yield ms.show(shape_of((4096, 65536, 8), P(("stage", "model"), "fsdp"), cube))
    yield ms.show({"w": array((8, 16), P("data")), "b": array((16,), P())})


# Other things than an array with a mesh.


@pytest.mark.parametrize("spec", [P(), P("data"), P("data", "model"), P(("model", "data"))])
def test_a_shape_with_a_sharding_is_drawn_like_the_array(spec):
    x = array((8, 16), spec)
    for other in [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        nnx.Param(x),
        nnx.Param(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)),
    ]:
        assert ms.show(other) == ms.show(x)
    pair = ms.show((x.shape, x.sharding))
    assert pair.text == ms.show(x).text.replace("float32", "")


def test_an_array_on_one_device():
    x = jnp.arange(12.0).reshape(3, 4)
    _, picture = check(ms.show(x), x, np.asarray(x))
    assert len(picture.blocks) == 1
    assert "SingleDeviceSharding" in ms.show(x).text


def test_a_sharding_that_lost_its_axis_names():
    from jax._src.sharding_impls import GSPMDSharding  # only instances are public

    mesh = Mesh(np.array(jax.devices())[[3, 1, 4, 0, 5, 7, 2, 6]].reshape(2, 4), ("a", "b"))
    host = np.arange(64).reshape(8, 8)
    for spec in [P("b"), P(None, ("b", "a")), P("a", "b"), P()]:
        hlo = NamedSharding(mesh, spec)._to_xla_hlo_sharding(2)
        x = jax.device_put(host, GSPMDSharding(tuple(mesh.devices.flat), hlo))
        assert type(x.sharding).__name__ == "GSPMDSharding"
        check(ms.show(x), x, host)
        copies = len(x.addressable_shards) // len({str(s.index) for s in x.addressable_shards})
        assert (f"copied × {copies}" in ms.show(x).text) == (copies > 1)


def test_what_jit_makes_of_an_uneven_constraint():
    mesh = mesh_of()
    sharding = NamedSharding(mesh, P("model"))
    constrain = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    host = np.arange(40.0, dtype=np.float32).reshape(10, 4)
    x = constrain(host)
    check(ms.show(x), x, host)


@pytest.mark.parametrize("spec", [P(), P("data"), P("model", "data"), P(None, ("data", "model"))])
def test_a_traced_array_is_labelled_with_mesh_coordinates(spec):
    mesh = mesh_of(kind=EXPLICIT)
    x = array((8, 16), spec, mesh)
    drawn = []
    jax.jit(lambda y: drawn.append(ms.show(y)) or y)(x)
    (drawing,) = drawn
    truth = {str(d.id): box for d, box in x.sharding.devices_indices_map(x.shape).items()}
    for boxes in (read_svg(drawing, 2)[0], read_text(drawing, 2)[0]):
        found = {}
        for label, (box,) in boxes.items():
            at = tuple(slice(None) if i == ":" else int(i) for i in label.split(","))
            for device in np.atleast_1d(mesh.devices[at]).flat:
                assert str(device.id) not in found
                found[str(device.id)] = box
        assert found == {
            k: tuple(s.indices(n)[:2] for s, n in zip(v, x.shape)) for k, v in truth.items()
        }
    assert "each device (data, model): " in drawing.text
    assert ms.show(jax.typeof(x)) == drawing


def test_partial_sums_and_varying_values_are_not_called_copies():
    mesh = mesh_of(kind=EXPLICIT)
    drawn = []

    def product(x, w):
        y = jnp.einsum("bd,df->bf", x, w, out_sharding=P(unreduced={"model"}))
        drawn.append(ms.show(y).text)
        return jax.reshard(y, P())

    with jax.set_mesh(mesh):
        jax.jit(product)(array((4, 8), P(None, "model"), mesh), array((8, 4), P("model"), mesh))
    assert "partial sums over model(4)" in drawn[0]
    assert "copied over data(2)" in drawn[0]

    def block(x):
        drawn.append(ms.show(x).text)
        return x

    jax.shard_map(block, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(
        array((8, 4), P("data"), mesh)
    )
    assert "varying over data(2)" in drawn[1]
    assert "copied over model(4)" in drawn[1]


def test_older_releases_name_varying_axes_elsewhere():
    """Before `manual_axis_type`, a type had `vma`."""
    found = _compat.manual_axes(types.SimpleNamespace(vma=frozenset({"data"})))
    assert found == {"varying": {"data"}, "unreduced": frozenset(), "reduced": frozenset()}


def test_states_of_sums_are_drawn():
    """As jax.typeof prints them: {U:model} is still to be summed, {R:data} is summed."""
    mesh = mesh_of(kind=EXPLICIT)
    with jax.set_mesh(mesh):
        left, right = array((4, 8), P(None, "model"), mesh), array((8, 4), P("model"), mesh)
        sums = jnp.dot(left, right, out_sharding=P(None, None, unreduced={"model"}))
        whole = jax.device_put(np.ones((8, 16), np.float32), P())
        done = jax.reshard(whole, P(None, None, reduced={"data"}))
    assert "{U:model}" in str(jax.typeof(sums)) and "{R:data}" in str(jax.typeof(done))
    text = ms.show(sums).text
    assert text.startswith("float32[4,4]  P(None, None) {U:model}\n")
    assert "partial sums over model(4)\n" in text and "copied over data(2)\n" in text
    assert "reduced" not in text
    text = ms.show(done).text
    assert text.startswith("float32[8,16]  P(None, None) {R:data}\n")
    assert "reduced over data(2)\n" in text and "copied over model(4)\n" in text
    drawn = []
    with jax.set_mesh(mesh):
        jax.jit(lambda x: drawn.append(ms.show(x).text) or x)(done)
    assert "reduced over data(2)\n" in drawn[0] and "copied over model(4)\n" in drawn[0]

    def block(x):
        drawn.append(ms.show(jax.lax.pcast(x, "model", to="reduced")).text)
        return x

    jax.shard_map(block, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(
        array((8, 4), P("data"), mesh)
    )
    assert "varying over data(2)\n" in drawn[1] and "reduced over model(4)\n" in drawn[1]
    # Reduced values are the same on every device, so they lie in sheets, as copies do.
    sheets = lambda drawing: drawing.svg.count("<path ")  # noqa: E731
    assert (sheets(ms.show(sums)), sheets(ms.show(done)), sheets(ms.show(whole))) == (1, 2, 2)


def test_the_palette_is_the_caller_s():
    mesh = AbstractMesh((2, 2, 2), ("data", "tp", "x"))
    usual = ms.show(mesh).svg
    mine = ms.show(mesh, palette={"tp": "#123456", "x": "rebeccapurple"}).svg
    assert "#123456" in mine and "rebeccapurple" in mine and "#123456" not in usual
    assert "var(--ms-data,#0072b2)" in mine and "var(--ms-axis" not in mine
    assert "var(--ms-data" not in ms.show(mesh, palette={"data": "hsl(10 20% 30% / 50%)"}).svg
    assert ms.show(mesh, palette={}).svg == usual == ms.show(mesh, palette=ms.PALETTE | {}).svg.replace(
        "#0072b2", "var(--ms-data,#0072b2)")  # fmt: skip
    table = {f"w{n:02}": array((8, 16), P("data")) for n in range(13)}
    assert "#123456" in ms.show(table, palette={"data": "#123456"}).svg
    for colour in ('"/><script>', "red;fill:blue", "url(x&y)", ""):
        with pytest.raises(ValueError, match="is no colour for tp: pass one such as '#d55e00'"):
            ms.show(mesh, palette={"tp": colour})


def test_a_tree_is_drawn_leaf_by_leaf():
    tree = {"layer": [array((8, 16), P("data")), array((16,), P("model"))], "s": array((), P())}
    drawing = ms.show(tree, title="params")
    alone = [ms.show(leaf) for leaf in jax.tree.leaves(tree)]
    texts = drawing.text.split("\n\n")
    assert [t.split("\n", 1)[0] for t in texts] == ["params", "layer.1", "s"]
    assert texts[0].split("\n")[1] == "layer.0"
    for text, one in zip(texts, alone):
        assert text.endswith(one.text)
    assert drawing._repr_html_().count("<svg ") == 3
    everything = Picture(drawing.svg)
    assert len(everything.blocks) == sum(len(Picture(a.svg).blocks) for a in alone)
    with jax.set_mesh(mesh_of()):
        layer = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    assert "\nkernel\n" in "\n" + ms.show(layer).text
    assert "\nkernel\n" in "\n" + ms.show(nnx.state(layer)).text


def test_a_pair_of_trees_is_no_shape_with_a_sharding():
    pair = ({"w": array((8, 16), P("data"))}, {"b": array((16,), P())})
    drawing = ms.show(pair)
    assert [line for line in drawing.text.split("\n") if line in ("0.w", "1.b")] == ["0.w", "1.b"]
    assert drawing._repr_html_().count("<svg") == 2
    between = re.sub(r"<svg.*?</svg>|</?div[^>]*>", "", drawing._repr_html_(), flags=re.S)
    assert between == "", "and nothing stands between two pictures"


def test_many_leaves_make_a_table():
    tree = {f"layer{i:02}": array((8, 16), P(None, "model")) for i in range(13)}
    drawing = ms.show(tree, title="params")
    rows = [re.split(r"  +", line) for line in drawing.text.split("\n")[2:]]
    assert rows == [[k, "float32[8,16]", "P(None, 'model')", "8×4"] for k in tree]
    lines = [words(t) for t in ET.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}text")]
    assert [line for line in lines if line.startswith("layer")] == list(tree)
    tree = {f"layer{i:03}": array((8,), P("model")) for i in range(75)}
    drawing = ms.show(tree)
    shown = len(re.findall(r"layer\d", drawing.text))
    assert f"⋯ {75 - shown} more leaves" in drawing.text
    assert f"⋯ {75 - shown} more leaves" in drawing.svg


# 256 devices.


def test_many_devices_in_one_block_stand_in_rows():
    """Sixteen do not fit side by side; what is drawn on more devices than these must be made up."""
    here = place(shape_of((8, 16), P(), AbstractMesh((16,), ("data",), axis_types=(AUTO,))))
    ids = tuple(map(str, range(16)))
    here = dataclasses.replace(here, blocks={block: ids for block in here.blocks})
    svg = _svg.svg([_svg.picture(_scene.Scene(here, []), {})])
    group = re.search(r'<g class="ms-ids"[^>]*>(.*?)</g>', svg)[1]
    spots = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(\d+)</text>', group)
    rows = [
        [(x, n) for x, at, n in spots if at == y] for y in dict.fromkeys(y for _, y, _ in spots)
    ]
    assert [n for row in rows for _, n in row] == list(ids), "read line by line"
    assert [len(row) for row in rows] == [7, 7, 2], "as many as have room, in whole columns"
    assert [x for x, _ in rows[0]] == [x for x, _ in rows[1]]


def test_256_mesh_coordinates_fit_a_column():
    mesh = AbstractMesh((16, 16), ("data", "model"), axis_types=(AUTO, AUTO))
    drawing = ms.show(((4096, 4096), NamedSharding(mesh, P("data", "model"))))
    boxes, _, picture = read_svg(drawing, 2)
    assert dict(boxes) == {
        f"{i},{j}": [((256 * i, 256 * i + 256), (256 * j, 256 * j + 256))]
        for i, j in itertools.product(range(16), range(16))
    }
    assert float(picture.root.get("width")) <= 700


def test_what_is_left_out_is_counted():
    mesh = AbstractMesh((4, 64), ("data", "model"), axis_types=(AUTO, AUTO))
    for spec in [P(("data", "model")), P(None, ("model", "data")), P("data", "model")]:
        drawing = ms.show(((512, 512), NamedSharding(mesh, spec)))
        shown = len(Picture(drawing.svg).blocks)
        assert f"⋯ {256 - shown} of 256 not drawn" in drawing.text
        assert f"⋯ {256 - shown} of 256 not drawn" in drawing.svg
        assert len(re.findall(r"\d+,\d+", drawing.text.split("\n", 1)[1])) == shown
        assert len(drawing.svg) < 16_000


def test_256_devices_are_compressed_and_complete():
    program = """
    import re, jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 256)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import meshscope as ms
    mesh = jax.make_mesh((16, 16), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    full = ms.show(mesh)
    ids = [int(n) for line in full.text.split("\\n")[3:] if "│" in line
           for n in re.findall(r"\\d+", line.split("│", 1)[1])]
    assert ids == list(range(256)), ids
    def cells(spec):
        text = ms.show(((512, 512), NamedSharding(mesh, spec))).text
        assert max(map(len, text.split("\\n"))) <= 120, text
        return [c.strip() for line in text.split("\\n") if "│" in line
                for c in line.split("│")[1:-1]]
    for i, cell in enumerate(cells(P("data"))):
        assert cell == f"{16 * i}–{16 * i + 15}", cell
    narrow = cells(P(None, "model"))
    for i in range(16):
        assert narrow[i] + narrow[i + 16] == f"{i},{i + 16}…{i + 240}", narrow
    assert cells(P()) == ["0–255"]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Memory of the host.


def test_a_drawing_says_that_an_array_is_in_host_memory():
    sharding = NamedSharding(mesh_of(), P("data"), memory_kind="pinned_host")
    x = jax.device_put(np.ones((8, 16), np.float32), sharding)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for thing in (x, shape, (x.shape, sharding)):
        drawing = ms.show(thing)
        assert drawing.text.split("\n")[-1] == "in host memory (pinned_host)"
        label = ET.fromstring(drawing.svg).get("aria-label")
        assert label.endswith("in host memory (pinned_host)")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind="unpinned_host")
    assert ms.show(((8,), one)).text.endswith("\nin host memory (unpinned_host)")
    abstract = NamedSharding(
        AbstractMesh((2, 4), ("data", "model")), P("data"), memory_kind="pinned_host"
    )
    assert ms.show(((8, 16), abstract)).text.endswith("\nin host memory (pinned_host)")


def test_a_drawing_says_nothing_of_the_devices_own_memory():
    kind = jax.devices()[0].default_memory().kind
    for given in (None, kind, "device"):
        sharding = NamedSharding(mesh_of(), P("data"), memory_kind=given)
        assert "memory" not in ms.show(((8, 16), sharding)).svg


def test_the_devices_own_memory_has_the_name_that_the_backend_gives_it(monkeypatch):
    """There are backends whose own memory is called unpinned_host."""
    sharding = NamedSharding(mesh_of(), P("data"), memory_kind="unpinned_host")
    assert "in host memory (unpinned_host)" in ms.show(((8, 16), sharding)).text
    monkeypatch.setattr(_compat, "default_memory", lambda device: "unpinned_host")
    assert "memory" not in ms.show(((8, 16), sharding)).text


def test_a_traced_array_says_that_it_is_in_host_memory():
    mesh = mesh_of(kind=EXPLICIT)
    seen = []
    for kind in (None, "pinned_host"):
        x = jax.device_put(np.ones((8, 16)), NamedSharding(mesh, P("data"), memory_kind=kind))
        jax.jit(lambda x: seen.append(ms.show(x).text) or x).trace(x)
    assert ["in host memory (pinned_host)" in text for text in seen] == [False, True]


def test_a_table_says_which_leaves_are_in_host_memory():
    here, there = (
        NamedSharding(mesh_of(), P("data"), memory_kind=kind) for kind in (None, "pinned_host")
    )
    tree = {
        f"w{n:02}": jax.ShapeDtypeStruct((8, 16), "float32", sharding=(here, there)[n % 2])
        for n in range(14)
    }
    drawing = ms.show(tree)
    rows = drawing.text.split("\n")[1:]
    assert [row.endswith("4×16, in host memory (pinned_host)") for row in rows] == [
        n % 2 == 1 for n in range(14)
    ]
    assert [row.endswith("4×16") for row in rows] == [n % 2 == 0 for n in range(14)]
    assert drawing.svg.count(">4×16, in host memory (pinned_host)</text>") == 7


# Refusals say what to do instead.

CASES = {
    "host array": (lambda m: np.zeros(3), TypeError, r"jax\.device_put"),
    "number": (lambda m: 3.0, TypeError, r"jax\.device_put"),
    "host leaf": (lambda m: {"a": {"b": np.zeros(3)}}, TypeError, r"^a\.b is of type ndarray"),
    "function": (lambda m: len, TypeError, "its result"),
    "jitted": (lambda m: jax.jit(jnp.sin), TypeError, "what it returns"),
    "compiled": (lambda m: jax.jit(jnp.sin).lower(1.0).compile(), TypeError, "what it returns"),
    "spec": (lambda m: P("data"), TypeError, r"\(shape, jax\.NamedSharding"),
    "sharding": (lambda m: NamedSharding(m, P()), TypeError, r"\(shape, sharding\)"),
    "shape and spec": (lambda m: ((8, 8), P("data")), TypeError, r"jax\.NamedSharding\(mesh"),
    "a number for a shape": (
        lambda m: (8, NamedSharding(m, P("data"))), TypeError, r"^8 is not a shape: .*\(8,\) for one dimension"),
    "a shape of fractions": (
        lambda m: {"w": ((8.0,), NamedSharding(m, P("data")))}, TypeError, r"\(8.0,\) is not a shape \(leaf w\)"),
    "text": (lambda m: "w", TypeError, "pass the array itself"),
    "empty": (lambda m: {}, ValueError, "no leaves"),
    "none": (lambda m: None, ValueError, "no leaves"),
    "bare shape": (lambda m: jax.ShapeDtypeStruct((3,), jnp.float32), ValueError, "sharding=sharding"),
    "empty mesh": (lambda m: jax.sharding.get_mesh(), ValueError, r"jax\.make_mesh"),
    "long spec": (lambda m: ((8,), NamedSharding(m, P(None, "data"))), ValueError, "2 dimensions"),
    "unconstrained": (
        lambda m: ((8,), NamedSharding(m, P(P.UNCONSTRAINED))), ValueError, "UNCONSTRAINED"),
    "uneven": (
        lambda m: ((64, 10), NamedSharding(m, P("data", "model"))), ValueError,
        r"dimension 1 of \[64,10\] has size 10, which mesh axis 'model' of size 4"),
    "uneven leaf": (
        lambda m: {"w": shape_of((6, 8), P(("data", "model")), m)}, ValueError,
        r"size 6, .*'data' of size 2 × 'model' of size 4 does not divide \(leaf w\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_says_what_to_pass_instead(name):
    make, kind, says = CASES[name]
    with pytest.raises(kind, match=says):
        ms.show(make(mesh_of()))


def test_an_uneven_sharding_without_names_is_refused():
    from jax._src.sharding_impls import GSPMDSharding

    mesh = mesh_of()
    hlo = NamedSharding(mesh, P("model"))._to_xla_hlo_sharding(1)
    with pytest.raises(ValueError, match=r"\[10\] does not divide evenly"):
        ms.show(((10,), GSPMDSharding(tuple(mesh.devices.flat), hlo)))


def test_an_array_that_the_compiler_has_not_placed_is_refused():
    with pytest.raises(ValueError, match="Auto axes.* what the jitted function returns"):
        jax.jit(lambda x: ms.show(x) and x)(array((8, 16), P("data")))
    with pytest.raises(ValueError, match="without a mesh"):
        jax.jit(lambda x: ms.show(x) and x)(np.zeros((8, 16)))


# Promises of every drawing.


def test_a_drawing_stands_alone_and_says_what_it_shows():
    for drawing in gallery():
        root = ET.fromstring(drawing.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("role") == "img"
        assert len(drawing.svg.encode()) <= 8_000
        assert not re.search(
            r"\bid=|href|url\(|<script|<style|\x1b|http(?!://www.w3.org/2000/svg)", drawing.svg
        )
        colours = re.findall(r'(?:fill|stroke)="([^"]*)"', drawing.svg)
        for colour in set(colours) - {"none", "currentColor"}:
            assert re.search(r"var\(--ms-[a-z0-9-]+,#[0-9a-f]{6}\)", colour)


def test_the_label_names_what_axes_and_conclusion():
    label = ET.fromstring(ms.show(array((8, 16), P("data")), title="x_BD").svg).get("aria-label")
    for part in [
        "x_BD",
        "float32[8,16]",
        "P('data')",
        "dimension 0 of size 8 split over data into 2 of 4",
        "dimension 1 of size 16 whole",
        "copied over model(4)",
        "each device: 4×16",
    ]:
        assert part in label
    label = ET.fromstring(ms.show(mesh_of()).svg).get("aria-label")
    assert (
        "axis data of size 2, Auto; axis model of size 4, Auto; in order 0 1 2 3 4 5 6 7" in label
    )


def test_drawings_are_the_same_every_time():
    first, second = list(gallery()), list(gallery())
    assert first == second
    program = "import jax; jax.config.update('jax_num_cpu_devices', 8); import meshscope as ms; " \
        "print(ms.show(jax.make_mesh((2, 4), ('zeta', 'model'))).svg)"  # fmt: skip
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1


def test_text_is_plain():
    for drawing in gallery():
        assert repr(drawing) == str(drawing) == drawing.text
        assert (
            drawing.text.isprintable()
            or set(drawing.text) - {"\n"}
            and all(c.isprintable() for c in drawing.text.replace("\n", ""))
        )
        assert not any(line != line.rstrip() for line in drawing.text.split("\n"))
        assert max(map(len, drawing.text.split("\n"))) <= 88


def test_titles_are_text_not_markup():
    drawing = ms.show(mesh_of(), title='<b> & "x"')
    assert '<b> & "x"' in [words(t) for t in ET.fromstring(drawing.svg).iter() if t.text]
    assert drawing.text.startswith('<b> & "x"\n')
    assert "a<b" in words(ET.fromstring(ms.show(AbstractMesh((2,), ("a<b",))).svg))


def test_nothing_overlaps_or_leaves_the_picture():
    for drawing in gallery():
        for svg in drawing.pieces:
            picture = Picture(svg)
            width, height = (float(picture.root.get(k)) for k in ("width", "height"))
            assert width <= 360
            for x, y, w, h in picture.blocks:
                assert 0 < x and x + w < width and 0 < y and y + h < height
            pairs = itertools.combinations(picture.blocks, 2)
            for (x, y, w, h), (a, b, c, d) in pairs:
                assert x + w < a or a + c < x or y + h < b or b + d < y
            chips = [
                [float(r.get(k)) for k in ("x", "y", "width", "height")]
                for g in picture.root.iter() if g.get("class") == "ms-chips" for r in g
            ]  # fmt: skip
            for x, y, w, h in chips:
                assert any(
                    a < x and b < y and x + w < a + c and y + h < b + d
                    for a, b, c, d in picture.blocks
                )


def test_a_notebook_stores_the_picture_and_the_text_and_nothing_else(monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    stored = []
    monkeypatch.setattr(
        "IPython.core.displaypub.DisplayPublisher.publish",
        lambda self, data, *args, **kwargs: stored.append(data),
    )
    shell = InteractiveShell.instance()
    drawing = ms.show(mesh_of())
    shown, _ = shell.display_formatter.format(drawing)
    assert shown == {"text/html": drawing.svg, "text/plain": drawing.text}
    assert stored == []  # nothing is shown on the side


def test_a_file_stands_alone_and_follows_the_reader_s_theme(tmp_path):
    drawing = ms.show({"w": array((8, 16), P("data")), "b": array((16,), P())}, "x_BD")
    for path in (tmp_path / "drawing.svg", str(tmp_path / "again.svg")):
        assert drawing.save(path) is None
        text = pathlib.Path(path).read_bytes().decode("utf-8")
        root = ET.fromstring(text)
        assert root[0].tag.endswith("style") and root[0].text.startswith("svg{color:#1a1a1a}")
        assert "prefers-color-scheme:dark){svg{color:#eee}}" in root[0].text
        assert (
            text.replace(text[text.index("<style>") : text.index("</style>") + 8], "")
            == drawing.svg + "\n"
        )
        assert len(Picture(text).blocks) == len(Picture(drawing.svg).blocks)


# Colours.


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))


def test_fallback_colours_can_be_seen_on_white_and_on_black():
    for colour in COLOURS.values():
        assert 1.05 / (luminance(colour) + 0.05) >= 3
        assert (luminance(colour) + 0.05) / (luminance("#121212") + 0.05) >= 3


def test_the_book_s_six_axes_differ_to_colour_blind_eyes():
    # Machado, Oliveira and Fernandes 2009, severity 1; distances in CIELAB.
    seen_as = {
        "trichromat": "1 0 0  0 1 0  0 0 1",
        "protanope": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216  "
        "-0.003882 -0.048116 1.051998",
        "deuteranope": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413  "
        "-0.011820 0.042940 0.968881",
        "tritanope": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602  "
        "0.004733 0.691367 0.303900",
    }
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )

    def lab(rgb):
        t = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
        f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    six = ("data", "model", "fsdp", "stage", "seq", "expert")
    for eye, numbers in seen_as.items():
        seen = np.array(numbers.split(), float).reshape(3, 3)
        for a, b in itertools.combinations(six, 2):
            there, here = (lab(seen @ linear(COLOURS[c])) for c in (a, b))
            assert np.linalg.norm(there - here) > 12, (eye, a, b)


def test_an_axis_keeps_its_colour_whatever_else_the_mesh_has():
    for name in ("data", "model", "fsdp", "stage", "seq", "expert"):
        for others in [(), ("a",), ("a", "b", "c")]:
            svg = ms.show(AbstractMesh((2,) * (1 + len(others)), (*others, name))).svg
            assert f"var(--ms-{name},{COLOURS[name]})" in svg
    seven = AbstractMesh((1,) * 7, tuple("abcdefg"))
    assert len(set(re.findall(r"--ms-([a-z0-9-]+)", ms.show(seven).svg))) == 7
