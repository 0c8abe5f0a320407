# @title Helper: one program, compiled for CPU and for a TPU that is not here
import hashlib, importlib.util, re
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
    sizes = re.findall(r'"(\w+)"=(\d+)', found[1] if found else '"one"=1')
    return {name: int(size) for name, size in sizes}

def compiled_for_tpu(lowered, order=None):
    """The program compiled by libtpu for a TPU v5e. Nothing runs, no TPU is needed."""
    from jax.experimental import topologies
    (exported, donated), sizes = lowered, sizes_of(lowered)
    chips = {1: "v5e:1x1", 4: "v5e:2x2", 8: "v5e:2x4"}[exported.nr_devices]
    one = dict(chips_per_host_bounds=(1, 1, 1)) if chips == "v5e:1x1" else {}
    devices = topologies.get_topology_desc(chips, "tpu", **one).devices
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((*sizes.values(),), (*sizes,), devices=devices,
                             axis_types=(kind,) * len(sizes))
        if order:  # positions of the devices, where the program's mesh has its own order
            shuffled = mesh.devices.ravel()[order].reshape(mesh.devices.shape)
            mesh = jax.sharding.Mesh(shuffled, mesh.axis_names, axis_types=mesh.axis_types)
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
