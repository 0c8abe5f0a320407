"""Drawings and tables as they were looked at, in fixtures/gallery: one file each.

    python tests/meshscope/gallery.py       writes them again; `git diff` shows what changed

A change of any of them is meant, and seen in a browser first, or it is a mistake.
"""

import dataclasses
import gzip
import itertools
import os
import pathlib
import re
import shutil

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "gallery"


def drawings():
    """(name, drawing): every kind of array, mesh and tree, and everything that a drawing says."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import meshscope as ms

    def mesh_of(*sizes, names=("data", "model", "stage"), kind=AxisType.Auto, order=range(8)):
        devices = np.array(jax.devices())[list(order)[: np.prod(sizes)]].reshape(sizes)
        return Mesh(devices, names[: len(sizes)], axis_types=(kind,) * len(sizes))

    def shape(spec, *sizes, mesh=None, dtype="float32"):
        return jax.ShapeDtypeStruct(
            sizes, dtype, sharding=NamedSharding(mesh or mesh_of(2, 4), spec)
        )

    def abstract(*sizes, names=("data", "model", "stage"), kind=AxisType.Auto):
        return AbstractMesh(sizes, names[: len(sizes)], axis_types=(kind,) * len(sizes))

    cube, line = mesh_of(2, 2, 2), mesh_of(8)
    w = shape(P("data"), 8, 16)
    explicit = mesh_of(2, 4, kind=AxisType.Explicit)
    yield "mesh", ms.show(mesh_of(2, 4), "a mesh")
    yield "mesh-line", ms.show(line)
    yield "mesh-cube", ms.show(cube)
    yield "mesh-order", ms.show(mesh_of(4, 2, names=("rows", "Y"), order=[3, 1, 4, 0, 5, 7, 2, 6]))
    yield "mesh-abstract", ms.show(abstract(2, 4, kind=AxisType.Explicit))
    yield "mesh-large", ms.show(abstract(4, 64))
    yield "mesh-four-axes", ms.show(abstract(2, 2, 2, 2, names=("data", "model", "stage", "seq")))
    yield "mesh-seven-axes", ms.show(abstract(*(1,) * 7, names=tuple("abcdefg")))
    yield "whole", ms.show(shape(P(), 8, 16))
    yield "rows", ms.show(shape(P("data"), 8, 16), "rows over data")
    yield "columns", ms.show(shape(P(None, "model"), 8, 16))
    yield "both", ms.show(shape(P("data", "model"), 8, 16))
    yield "both-on-one", ms.show(shape(P(None, ("model", "data")), 8, 16))
    yield "scalar", ms.show(shape(P()), "one")
    yield "vector", ms.show(shape(P("model"), 16))
    yield "vector-whole", ms.show(shape(P(), 16))
    yield "three-dimensions", ms.show(shape(P(("data", "model")), 8, 16, 4), "three")
    yield "first-two-of-three", ms.show(shape(P("data", "model"), 8, 16, 4))
    yield "panels", ms.show(shape(P("data", "model", "stage"), 8, 16, 4, mesh=cube))
    yield (
        "panels-and-whole",
        ms.show(shape(P("data", "model", "stage", None), 8, 16, 4, 2, mesh=cube)),
    )
    yield "two-leading", ms.show(
        shape(P("data", "model", "stage", "seq"), 2, 4, 4, 8,
              mesh=abstract(2, 2, 2, 2, names=("data", "model", "stage", "seq"))))  # fmt: skip
    axes = ("data", "model", "stage", "seq")
    yield "panels-over-two-axes", ms.show(
        shape(P(("data", "model"), "stage", "seq"), 8, 4, 4, mesh=abstract(2, 2, 2, 2, names=axes)))  # fmt: skip
    yield "middle", ms.show(shape(P(None, "model"), 2, 8, 3))
    yield "many-cells", ms.show(((4096, 4096), NamedSharding(abstract(16, 16), P("data", "model"))))
    yield "left-out", ms.show(((512, 512), NamedSharding(abstract(4, 64), P(("data", "model")))))
    yield (
        "left-out-columns",
        ms.show(((512, 512), NamedSharding(abstract(4, 64), P(None, ("model", "data"))))),
    )
    yield (
        "left-out-panels",
        ms.show(((64, 8, 8), NamedSharding(abstract(64, 2, 2), P("data", "model", "stage")))),
    )
    # Eight parts are drawn wide, nine narrow; sixteen all, of seventeen the middle is left out.
    for n in (8, 9, 16, 17):
        names = NamedSharding(abstract(n, names=("model",)), P("model"))
        yield f"parts-{n}", ms.show(((2 * n,), names))
        across = NamedSharding(abstract(n, 1), P(None, "data"))
        yield f"across-{n}", ms.show(((4, 2 * n), across))
    yield "wide-words", ms.show(((64, 4096), NamedSharding(abstract(16, 64), P(None, "data"))))
    cut = NamedSharding(abstract(8, 2, 2), P(None, "data"))
    yield "eight-long-words", ms.show(((4, 16), cut))
    cut = NamedSharding(abstract(16, 2, 2), P(None, "data"))
    yield "turned-words", ms.show(((4, 32), cut))
    yield "narrow", ms.show(((16, 64), NamedSharding(abstract(2, 8), P("data", "model"))))
    yield (
        "numbers-thinned",
        ms.show(((4, 16000), NamedSharding(abstract(2, 16), P("data", "model")))),
    )
    wide = NamedSharding(abstract(2, 16), P("data", "model"))
    yield "numbers-thinned-twice", ms.show(((4, 16_000_000), wide))
    yield "nothing", ms.show(shape(P("data"), 0, 16))
    there = NamedSharding(mesh_of(2, 4), P("data"), memory_kind="pinned_host")
    yield "host-memory", ms.show(((8, 16), there))
    yield (
        "table-host-memory",
        ms.show({f"w{n:02}": ((8, 16), (there, w.sharding)[n % 2]) for n in range(13)}),
    )
    yield "unnamed-axes", ms.show(shape(P("Y"), 8, 16, mesh=mesh_of(2, 4, names=("rows", "Y"))))
    yield "one-device", ms.show(jnp.ones((4, 4)))
    yield "tree", ms.show({"w": shape(P("data"), 8, 16), "b": shape(P("model"), 16)}, "parameters")
    yield "tree-untitled", ms.show([shape(P("data"), 8, 16), shape(P("model"), 16)])
    yield "twelve", ms.show({f"w{n:02}": shape(P("data"), 8) for n in range(12)})
    yield "table", ms.show({f"w{n:02}": shape(P("data"), 8, 16) for n in range(13)}, "thirteen")
    yield "table-long", ms.show({f"w{n:02}": shape(P(), 8) for n in range(75)})
    yield "palette", ms.show(shape(P("data", "model"), 8, 16), palette={"data": "#123456"})
    yield "markup", ms.show(shape(P("a<b"), 8, mesh=mesh_of(8, names=("a<b",))), "<i> & \"x\" 'y'")

    # What is drawn on more devices than there are here is made up, from coordinates in the mesh.
    yield "devices-16", on_devices(shape(P(), 8, 16, mesh=abstract(4, 4)))
    yield "devices-15", on_devices(shape(P("data"), 9, 16, mesh=abstract(3, 5)))
    yield "devices-in-pairs", on_devices(shape(P("data"), 32, 16, mesh=abstract(16, 2)))
    yield "devices-in-threes", on_devices(shape(P("data"), 16, 8, mesh=abstract(8, 3)))
    yield "devices-256-rows", on_devices(shape(P("data"), 512, 512, mesh=abstract(16, 16)))
    yield (
        "devices-256-columns",
        on_devices(shape(P(None, "model"), 512, 512, mesh=abstract(16, 16))),
    )
    yield "devices-256-whole", on_devices(shape(P(), 512, mesh=abstract(16, 16)))
    yield "devices-64-both", on_devices(shape(P("data", "model"), 16, 16, mesh=abstract(8, 8)))
    yield "devices-in-steps", on_devices(shape(P("model"), 16, 16, mesh=abstract(4, 4, 4)))
    yield "devices-over-eight", on_devices(shape(P(None, "model"), 16, 18, mesh=abstract(4, 9)))
    yield "devices-in-nine-rows", on_devices(shape(P("data"), 18, 16, mesh=abstract(9, 3)))
    yield (
        "devices-in-eight-columns",
        on_devices(shape(P(None, "model"), 16, 16, mesh=abstract(4, 8))),
    )
    yield "devices-in-nine-columns", on_devices(shape(P(None, "data"), 16, 18, mesh=abstract(9, 3)))
    yield "devices-left-out", on_devices(shape(P(None, "data"), 16, 36, mesh=abstract(18, 3)))
    yield (
        "devices-over-sixteen",
        on_devices(shape(P("stage", "model"), 16, 16, mesh=abstract(4, 16, 2))),
    )
    for sizes in ((4, 4), (17, 1), (2, 18)):
        yield f"devices-mesh-{sizes[0]}-{sizes[1]}", on_devices(abstract(*sizes))

    seen = []

    def note(x):
        seen.append(ms.show(x))
        return x

    rows = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(explicit, P("data")))
    jax.jit(note)(rows)
    yield "traced", seen.pop()
    jax.shard_map(note, mesh=explicit, in_specs=P("data"), out_specs=P("data"))(rows)
    yield "varying", seen.pop()
    types = (AxisType.Explicit, AxisType.Auto)
    mixed = Mesh(explicit.devices, ("data", "model"), axis_types=types)
    jax.jit(note)(jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mixed, P("data"))))
    yield "left-to-the-compiler", seen.pop()
    with jax.set_mesh(explicit):
        x = jax.device_put(np.ones((8, 16), np.float32), P(None, "model"))
        y = jax.device_put(np.ones((16, 8), np.float32), P("model", None))
        yield (
            "partial-sums",
            ms.show(jnp.dot(x, y, out_sharding=P(None, None, unreduced={"model"}))),
        )
        whole = jax.device_put(np.ones((8, 16), np.float32), P())
        yield "reduced", ms.show(jax.reshard(whole, P(reduced={"data"})))
    from jax._src.sharding_impls import GSPMDSharding  # only instances are public

    for name, spec in [
        ("positional", P("data", "model", "stage")),
        ("positional-copies", P("data")),
    ]:
        lost = NamedSharding(cube, spec)._to_xla_hlo_sharding(3)
        sharding = GSPMDSharding(tuple(cube.devices.flat), lost)
        yield name, ms.show(jax.device_put(np.ones((8, 8, 8), np.float32), sharding))
        yield f"{name}-nothing", ms.show(((0, 8, 8), sharding))


def on_devices(x):
    """A drawing of an array, or a mesh, with made-up devices in place of coordinates."""
    from meshscope import _in_characters, _placement, _scene, _show, _svg

    (here,) = (placement for _, placement in _placement.leaves(x))
    sizes = [size for _, size in here.mesh]
    ids = {at: str(n) for n, at in enumerate(itertools.product(*map(range, sizes)))}

    def held(block):
        """The devices of a block: its label has a coordinate for each axis of the mesh, or a colon."""
        (label,) = here.blocks[block]
        asked = label.split(",")
        return tuple(name for at, name in ids.items()
                     if all(one in (":", str(n)) for one, n in zip(asked, at)))  # fmt: skip

    here = dataclasses.replace(here, blocks={block: held(block) for block in here.blocks}, keys="")
    scene = _scene.Scene(here, [])
    svg = _svg.svg([_svg.picture(scene, {})])
    return _show.Drawing(svg, _in_characters.as_text(scene), (svg,))


def tables():
    """(name, result): one of each kind of table, and of each thing that one may say."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import meshscope as ms

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def shape(spec, *sizes, kind=None, dtype="float32"):
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def compiled(f, *inputs, out=None):
        out = NamedSharding(mesh, out or P())
        return jax.jit(f, out_shardings=out).lower(*inputs).compile()

    w, b = shape(P("data", "model"), 8, 16), shape(P(), 16)
    yield "memory", ms.memory({"w": w, "b": b})
    yield "memory-one", ms.memory(w)
    yield "memory-host", ms.memory({"moments": shape(P("data"), 8, 16, kind="pinned_host"), "w": w})
    x = jax.device_put(np.ones((8, 16), np.float32), w.sharding) + 0
    yield "memory-shared", ms.memory({"x": x, "tied": x, "one": jnp.ones(8)})
    yield "memory-shared-in-a-row", ms.memory([x, x])
    x.delete()
    yield "memory-deleted", ms.memory(x)
    yield (
        "memory-long",
        ms.memory({f"w{n:02}": shape(P("data"), 2 * (13 - n), 16) for n in range(13)}),
    )
    yield "memory-twelve", ms.memory({f"w{n:02}": b for n in range(12)})
    yield "memory-markup", ms.memory({'<b> & "x"': shape(P("data"), 1000)})
    total = compiled(lambda w: w.sum(0), w)
    yield "program-host", ms.ProgramMemory(64, 32, 16, 8, 4096, 1024, 512, 256)
    yield "program", ms.ProgramMemory(64_000, 32, 16, 8)
    rows = ms.collectives(total)
    yield "collectives", rows
    yield "collectives-one", rows[:1]
    yield "collectives-none", rows[:0]
    yield "collectives-text", ms.collectives(total.as_text(), mesh)
    half = compiled(lambda w: w.sum(0), shape(P("data"), 8, 16, dtype="bfloat16"))
    yield "collectives-for-cpu", ms.collectives(half)
    yield "difference-for-cpu", ms.diff(rows[:0], ms.collectives(half))
    yield "collectives-text-for-cpu", ms.collectives(half.as_text(), mesh)
    kept = FOLDER.parent / "known" / "gpu" / "hidden_gathers.hlo.gz"
    line = jax.sharding.AbstractMesh((8,), ("data",))
    overlap = ms.overlap(gzip.decompress(kept.read_bytes()).decode(), line)
    yield "overlap", overlap
    yield "overlap-by", overlap.by("kind", "axes", "hidden", "beside")
    yield "overlap-for-cpu", ms.overlap(total)
    yield "overlap-none", overlap[:0]
    fields = ("kind", "axes", "dtype", "shape", "payload_bytes", "executions", "inside_loop",
              "op_name", "source_line", "within", "groups", "group_size", "wire_bytes")  # fmt: skip
    yield "by-everything", rows.by(*fields)
    yield "by-one", rows.by("inside_loop")
    yield "no-difference", ms.diff(rows, rows)
    yield "difference", ms.diff(rows[:0], rows)
    yield "whole-nothing", ms.full_copies(total, {"w": shape(P("data"), 48, 80)})
    line = ("(w (48, 80)", "%all-gather.1 = f32[48,80]{1,0} all-gather(%p)")
    copies = [
        ms.FullCopy(
            ("w", "v"), (48, 80), False, (48, 80), "float32", "jit(f)/dot", "f.py:3", line, None
        ),
        ms.FullCopy(("stack",), (96, 384), True, (36864,), "int8", "", None, line[:1], None),
        ms.FullCopy(("b",), (48, 80), False, (48, 80), "float32", "", None, line, "a"),
        ms.FullCopy(("",), (48, 80), False, (1, 48, 80), "bfloat16", "", "f.py:4", line, None),
    ]
    yield "whole", ms.FullCopies(copies)
    yield "whole-one", ms.FullCopies(copies[:1])


def files(kind=""):
    """What each file of the gallery holds, or those of drawings, or of tables."""
    for name, drawing in drawings() if kind != "tables" else ():
        yield f"{name}.svg", drawing.svg + "\n"
        yield f"{name}.txt", drawing.text + "\n"
    for name, result in tables() if kind != "drawings" else ():
        for ending, text in ((".table.html", result._repr_html_()), (".table.txt", repr(result))):
            text = re.sub(r"\(jax [\d.]+\)", "(jax 0.0)", text)
            text = re.sub(r'"version":"jax [\d.]+"', '"version":"jax 0.0"', text)
            text = re.sub(r"gallery\.py:\d+", "gallery.py:1", text)
            yield name + ending, text + "\n"


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for name, text in files():
        (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
    print(f"{len(list(FOLDER.iterdir()))} files in {FOLDER}")
