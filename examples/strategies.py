"""Six strategies: how many devices each axis of the mesh gets, and which sizes then divide.

The model names the mesh axes of its weights once (model.py): `fsdp` and `model`. The batch is split
over `data` and `fsdp`. So a strategy is only a choice of how many devices each axis has.

Importing this file touches no device, so a program can still choose its devices, or call
`jax.distributed.initialize`, after the import.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

P = jax.P
AXES = ("data", "fsdp", "model")  # the last has the fastest links: its devices are neighbours
ROWS = ("data", "fsdp")  # the axes that split the batch
Sizes = tuple[int, int, int]  # devices on each of AXES
Asked = Mapping[str, int | None]  # the same by name; None where it was not given


class Refused(Exception):
    """Settings that cannot work. The message says why, and what to change."""


class Strategy(NamedTuple):
    """Which mesh axes may have more than one device."""

    says: str
    axes: tuple[str, ...]
    moments: str | None = None  # the axis over which moments are split, although weights are whole


STRATEGIES = {
    "data-parallel": Strategy(
        "each device has the whole model and a share of the batch", ("data",)
    ),
    "zero1": Strategy("data parallel, with Adam's moments sharded", ("data",), "data"),
    "fsdp": Strategy(
        "weights, gradients and moments are sharded; weights are gathered for use", ("fsdp",)
    ),
    "hsdp": Strategy("FSDP within a node, data parallel between nodes", ("data", "fsdp")),
    "tensor": Strategy("heads and hidden units are sharded over `model`", ("data", "model")),
    "fsdp-tensor": Strategy(
        "FSDP over `fsdp`, heads and hidden units over `model`", ("fsdp", "model")
    ),
}


class Split(NamedTuple):
    """A dimension that is split over axes of the mesh."""

    flag: str  # that sets its size
    size: int
    ways: int  # devices that share it
    where: str  # for people

    @property
    def divides(self) -> bool:
        return self.size % self.ways == 0


Splits = Callable[[str, Sizes], list[Split]]  # what a strategy splits on a mesh of these sizes


def splits_of(
    name: str, sizes: Sizes, dimensions: Mapping[str, int], batch: int, accumulate: int
) -> list[Split]:
    """All dimensions that this strategy splits. `dimensions` has D, H, K, F and V."""
    data, fsdp, model = sizes
    rows = f"{accumulate} microbatches on " if accumulate > 1 else ""
    found = [Split("--batch", batch, data * fsdp * accumulate, f"{rows}{data * fsdp} devices")]
    D, moments = dimensions["D"], STRATEGIES[name].moments
    found.append(Split("--D", D, fsdp, f"the {fsdp} devices of the axis `fsdp`"))
    if moments:
        ways = sizes[AXES.index(moments)]
        found.append(Split("--D", D, ways, f"the {ways} devices of the axis `{moments}`"))
    for letter in ("H", "K", "F", "V"):
        where = f"the {model} devices of the axis `model`"
        found.append(Split(f"--{letter}", dimensions[letter], model, where))
    return found


# ---- the mesh -------------------------------------------------------------------------------


def make_mesh(name: str, asked: Asked, splits: Splits, devices: Sequence[Any]) -> Mesh:
    """A `data` × `fsdp` × `model` mesh of all these devices; sizes that were not given follow.

    A refusal names sizes that work.
    """
    count, used = len(devices), STRATEGIES[name].axes
    given = {axis: size for axis, size in asked.items() if size is not None}
    for axis, size in given.items():
        if axis not in used and size > 1:
            able = [key for key, it in STRATEGIES.items() if {*given} <= {*it.axes}]
            others = f"use --strategy {either(able)}, or " if able else ""
            raise Refused(
                f"--strategy {name} splits nothing over `{axis}`, so {size} devices would repeat "
                f"the same work: {others}leave --{axis} out"
            )
    sizes = complete(name, given, count)
    if math.prod(sizes) != count:
        more = "only " if count < math.prod(sizes) else ""
        raise Refused(
            f"{flags_of(name, sizes)} is {math.prod(sizes)} devices, and JAX sees {more}{count}: "
            f"{meshes_that_work(name, devices, splits)}"
        )
    slices = slice_count(devices)
    outer = outermost(name, sizes)
    if sizes[outer] % slices:
        raise Refused(
            f"--{AXES[outer]} {sizes[outer]} does not divide over {slices} slices: use a multiple "
            f"of {slices}"
        )
    automatic = (AxisType.Auto,) * len(AXES)
    if slices > 1:  # only the outermost axis may cross from one to another: `model` talks most
        across = [1] * len(AXES)
        across[outer] = slices
        inside = [size // many for size, many in zip(sizes, across)]
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices)
        return Mesh(grid, AXES, axis_types=automatic)
    return jax.make_mesh(sizes, AXES, axis_types=automatic, devices=devices)


def sizes_of(mesh: Mesh) -> Sizes:
    return mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["model"]


def outermost(name: str, sizes: Sizes) -> int:
    """Which of AXES spans the slowest links: the first with more than one device, never `model`."""
    rows = [AXES.index(axis) for axis in STRATEGIES[name].axes if axis in ROWS]
    return next((axis for axis in rows if sizes[axis] > 1), rows[0])


def slice_count(devices: Sequence[Any]) -> int:
    """A slice is a group of devices with fast links; of GPUs it is often one server."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def complete(name: str, given: Mapping[str, int], count: int) -> Sizes:
    """Sizes of all axes. What is left goes to the axis that was not asked for."""
    used = STRATEGIES[name].axes
    sizes = {axis: given.get(axis, 1) for axis in AXES}
    free = [axis for axis in used if axis not in given]
    if len(free) == 2:
        sizes[free[1]] = default_inner(name, count)
    if free:
        others = math.prod(size for axis, size in sizes.items() if axis != free[0])
        sizes[free[0]] = max(count // others, 1)
    return sizes["data"], sizes["fsdp"], sizes["model"]


def default_inner(name: str, count: int) -> int:
    """Devices on the second axis of a strategy that has two, unless others were given."""
    if name == "tensor":
        return count
    if name == "hsdp":  # a node is one process, or a slice; one alone is split in two
        nodes = max(jax.process_count(), slice_count(jax.devices()))
        nodes = nodes if nodes > 1 else 2
        return count // nodes if count % nodes == 0 else count
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    return next(size for size in divisors if size * size >= count)


# ---- sizes that divide, and what to change where they do not --------------------------------


def check_sizes(name: str, mesh: Mesh, splits: Splits, fixed: bool = False) -> None:
    """Every dimension that is split must divide: nothing is rounded, and nothing stays whole.

    `fixed` says that a checkpoint has decided the sizes, so that only the devices can change.
    """
    found = splits(name, sizes_of(mesh))
    bad = [split for split in found if not split.divides]
    if not bad:
        return
    changes = []
    for flag, size in dict.fromkeys((split.flag, split.size) for split in bad):
        ways = math.lcm(*(split.ways for split in found if split.flag == flag))
        near = [size // ways * ways, -(-size // ways) * ways]
        changes.append(f"{flag} {either([value for value in near if value])}")
    devices, change = meshes_that_work(name, list(mesh.devices.flat), splits), " and ".join(changes)
    if fixed:
        advice = f"{devices}, or start over, in other --checkpoints, with {change}"
    else:
        advice = f"use {change}, or {devices}"
    first = bad[0]
    raise Refused(
        f"{first.flag} {first.size} does not divide over {first.where} (strategy {name}, "
        f"{flags_of(name, sizes_of(mesh))}): {advice}"
    )


def flags_of(name: str, sizes: Sizes) -> str:
    """As in "--fsdp 2 --model 4"."""
    used = STRATEGIES[name].axes
    return " ".join(
        f"--{axis} {size}" for axis, size in zip(AXES, sizes) if axis in used or size > 1
    )


def fits(name: str, sizes: Sizes, splits: Splits) -> bool:
    return all(split.divides for split in splits(name, sizes))


def meshes_that_work(name: str, devices: Sequence[Any], splits: Splits) -> str:
    """Advice: other sizes of a mesh of so many devices, or else fewer devices."""
    count, slices, usable = len(devices), slice_count(devices), []
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    choices = [divisors if axis in STRATEGIES[name].axes else [1] for axis in AXES]
    for data, fsdp, model in itertools.product(*choices):
        sizes = data, fsdp, model
        if math.prod(sizes) != count or not fits(name, sizes, splits):
            continue
        if sizes[outermost(name, sizes)] % slices == 0:
            usable.append(flags_of(name, sizes))
    if usable:
        return f"use {either(usable)}"
    return f"start it on {counts_that_work(name, count, splits)}, without --data, --fsdp, --model"


def counts_that_work(name: str, most: int, splits: Splits) -> str:
    counts = [
        count for count in range(1, most + 1) if fits(name, complete(name, {}, count), splits)
    ]
    return f"{either(counts)} {'devices' if counts[1:] else 'device'}"


def either(choices: Sequence[Any]) -> str:
    """As in "1, 2 or 4"."""
    *others, last = map(str, choices or [""])
    return f"{', '.join(others)} or {last}" if others else last
