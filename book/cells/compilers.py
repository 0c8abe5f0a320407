# @title Helper: one program, compiled for CPU and for a TPU that is not here
import hashlib, importlib.metadata as metadata, re
import jax.export

def for_tpu(function, *inputs):
    """The program lowered for TPU, with the numbers of its donated inputs."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    flags = jax.tree.leaves(jitted.trace(*inputs).args_info)
    donated = [i for i, info in enumerate(flags) if info.donated]
    return jax.export.export(jitted, platforms=["tpu"])(*inputs), donated

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

def compiled_for_tpu(lowered, order=None):
    """The program compiled by libtpu for a TPU v5e. Nothing runs, no TPU is needed."""
    from jax.experimental import topologies
    (exported, donated), sizes = lowered, sizes_of(lowered)
    shape = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}[exported.nr_devices]
    chips = f"v5e:{shape}"
    one = dict(chips_per_host_bounds=(1, 1, 1)) if chips == "v5e:1x1" else {}
    devices = topologies.get_topology_desc(chips, "tpu", **one).devices
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((*sizes.values(),), (*sizes,), devices=devices,
                             axis_types=(kind,) * len(sizes))
        if order:  # of the devices, where the program's mesh has its own
            shuffled = mesh.devices.ravel()[order].reshape(mesh.devices.shape)
            mesh = jax.sharding.Mesh(shuffled, (*sizes,), axis_types=mesh.axis_types)
        try:
            places = exported.in_shardings_jax(mesh)
        except ValueError:
            continue  # the program's axes are of the other kind
        break
    leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
              for aval, place in zip(exported.in_avals, places)]
    def call(*leaves):
        args, options = jax.tree.unflatten(exported.in_tree, leaves)
        return exported.call(*args, **options)
    with jax.set_mesh(mesh):
        return jax.jit(call, donate_argnums=donated).lower(*leaves).compile()

def both_compilers(name, function, *inputs):
    """Prints and returns what a device sends in function(*inputs), for CPU and for TPU.

    For TPU v5e from STORED, or compiled now where the same libtpu is installed.
    """
    lowered, about, stored = for_tpu(function, *inputs), STORED["about"], STORED[name]
    if (jax.__version__, metadata.version("flax")) == (about["jax"], about["flax"]):
        same = digest(lowered) == stored["hash"]
        assert same, f"{name} is another program than the stored: make second-compiler"
    sizes = sizes_of(lowered)
    mesh = jax.sharding.AbstractMesh((*sizes.values(),), (*sizes,))
    def sent(program):
        table = ms.collectives(program, mesh).by("kind", "axes", "dtype")
        return [[kind, " ".join(axes), dtype, total.wire_bytes]
                for (kind, axes, dtype), total in sorted(table.items())]
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    found = {"for CPU": sent(jitted.lower(*inputs).compile())}
    here = [one.version for one in metadata.distributions(name="libtpu")]
    if about["libtpu"] in here:
        found["for TPU v5e, now"] = sent(compiled_for_tpu(lowered))
    else:
        found[f"for TPU v5e, on {about['date']}"] = stored["sent"]
    for compiler, moves in found.items():
        print(f"compiled {compiler}, each device sends")
        for kind, axes, dtype, size in moves:
            print(f"  {kind:18} {axes:6} {dtype:9} {size:10,} bytes")
    return [*found.values()]
