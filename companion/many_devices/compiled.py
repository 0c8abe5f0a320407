"""What the compilers for TPU v5e and H100 made of programs of the book."""

import functools
import hashlib
import importlib.resources
import json
import math
import re

import jax.export

import meshscope as ms


@functools.cache
def stored():
    """All that was stored: "about", the releases and the date; "programs", what each compiler made.

    `make second-compiler` writes it (companion/many_devices/compiled.json).
    """
    file = importlib.resources.files("many_devices") / "compiled.json"
    return json.loads(file.read_text("utf-8"))


def stored_program(name):
    """What was stored of one program: its hash, its mesh, and for "cpu", "tpu" and "gpu" the rows."""
    return stored()["programs"][name]


def stored_memory(name, compiler):
    """The memory of a stored program on one device, as ms.memory tells that of a compiled one."""
    return ms.ProgramMemory(**stored_program(name)[compiler]["memory"])


def stored_payload(name, compiler, kind):
    """Bytes that the collectives of one kind, such as "all-gather", give a device in one run."""
    moves = stored_program(name)[compiler]["moves"]
    return sum(row["payload"] for row in moves if row["kind"] == kind)


def stored_mb(name, compiler):
    """What one device sends in a run of a stored program, in MB: for "gpu", "tpu" or "cpu"."""
    return sum(row["wire"] for row in stored_program(name)[compiler]["moves"]) / 1e6


def lowered_for(platform, function, *inputs):
    """The program lowered for "tpu" or "cuda", with the numbers of donated inputs."""
    known = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")  # JAX's own
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    flags = jax.tree.leaves(jitted.trace(*inputs).args_info)
    donated = [i for i, info in enumerate(flags) if info.donated]
    export = jax.export.export(jitted, platforms=[platform], disabled_checks=[known])
    return export(*inputs), donated


def digest(lowered):
    """The same for the same program: of its text without files and lines."""
    text = lowered[0].mlir_module()
    text = re.sub(r"(?m)^#loc.*\n| loc\((?:[^()]|\([^()]*\))*\)", "", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sizes_of(lowered):
    """The axes of the program's mesh with their sizes."""
    found = re.search(r"sdy\.mesh @\w+ = <\[(.+?)\]", lowered[0].mlir_module())
    sizes = re.findall(r'"(\w+)"=(\d+)', found[1]) if found else []
    return {name: int(size) for name, size in sizes} or {"all": lowered[0].nr_devices}


def on_tpu_v5e(sizes):
    """A grid of TPU v5e chips to compile for, along their network. None is here."""
    from jax.experimental import topologies

    count = math.prod(sizes.values())
    shape = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}[count]
    one = dict(chips_per_host_bounds=(1, 1, 1)) if count == 1 else {}
    devices = topologies.get_topology_desc(f"v5e:{shape}", "tpu", **one).devices
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    axes = (*sizes.values(),), (*sizes,)
    return jax.make_mesh(*axes, devices=devices, axis_types=kinds).devices


def compiled_for(grid, lowered, order=None, switches=None):
    """The program compiled for a grid of devices that are not here. Nothing runs."""
    (exported, donated), sizes = lowered, sizes_of(lowered)
    if order:  # of the devices, where the program's mesh has its own
        grid = grid.ravel()[order].reshape(grid.shape)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.sharding.Mesh(grid, (*sizes,), axis_types=(kind,) * len(sizes))
        try:
            places = exported.in_shardings_jax(mesh)
        except ValueError:
            continue  # the program's axes are of the other kind
        break
    leaves = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
        for aval, place in zip(exported.in_avals, places)
    ]

    def call(*leaves):
        args, options = jax.tree.unflatten(exported.in_tree, leaves)
        return exported.call(*args, **options)

    with jax.set_mesh(mesh):
        program = jax.jit(call, donate_argnums=donated).lower(*leaves)
        return program.compile(compiler_options=switches)
