"""Which collectives a program executes, how often, and between which devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from . import _advice
from . import _hlo as hlo

PAIRWISE = ("collective-permute", "send", "recv")
KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-broadcast", *PAIRWISE),
)
UNMATCHED = ("?",)
_MENTION = re.compile(  # an opcode that is, or looks like, one of these
    r"(?<![\w%.\-])((ragged-)?all-[\w\-]+|reduce-scatter[\w\-]*|collective-[\w\-]+|"
    r"(send|recv)[\w\-]*)\("
)


@dataclass(frozen=True)
class Loop:
    """A loop around a collective, the innermost, and how often one run of it repeats its body."""

    name: str
    trips: int | None


@dataclass(frozen=True)
class Found:
    """A collective that runs."""

    instruction: hlo.Instruction
    where: str  # its computation
    executions: int | None
    loop: Loop | None
    counts: bool = True  # False: another branch of a conditional does the same


def program_text(compiled: Any) -> str:
    """The text of a compiled program; TypeError, saying what to pass, for anything else."""
    if _advice.is_compiled(compiled):
        return str(compiled.as_text())
    raise TypeError(_advice.says(compiled, _advice.PROGRAM))


def shardings_of(compiled: Any) -> list[Sharding]:
    """Those of a compiled program's inputs and outputs, in order."""
    places = (getattr(compiled, f"{side}_shardings", None) for side in ("input", "output"))
    return [leaf for leaf in jax.tree.leaves(tuple(places)) if isinstance(leaf, Sharding)]


def platform_of(shardings: list[Sharding]) -> str:
    """What a program with these shardings was compiled for; without any, it is this machine's."""
    device: Any = next((d for sharding in shardings for d in sharding.device_set), None)
    return str(device.platform if device else jax.default_backend())


def program(compiled: Any) -> tuple[str, hlo.Program]:
    """The text of a compiled program, or one that is text already, and what it says."""
    if isinstance(compiled, str):
        return compiled, hlo.parse(compiled)
    text = program_text(compiled)
    return text, hlo.parse(text, trusted=True)


def executed(program: hlo.Program) -> tuple[list[Found], list[str]]:
    """The collectives that run, and the lines that mention one but were not reached."""
    found = list(_walk(program, program.entry, 1, None))
    reached = {each.instruction for each in found}
    lost = [line for line in program.unread if _MENTION.search(line)]
    every = filter(is_collective, program.instructions())
    lost += [instruction.line for instruction in every if instruction not in reached]
    again = {inside for chain in chains(program).values() for _, inside in chain.carried}
    return [one for one in found if one.counts and one.instruction not in again], lost


def is_collective(instruction: hlo.Instruction) -> bool:
    """Is it, or may it be, a collective? Not its end, nor a transfer to the host."""
    return (
        bool(_MENTION.match(instruction.opcode + "("))
        and not instruction.opcode.endswith(("-done", "-update"))
        and "is_host_transfer=true" not in instruction.attributes
    )


def _walk(
    program: hlo.Program, name: str, executions: int | None, around: Loop | None
) -> Iterator[Found]:
    """The collectives of one computation and of what it calls, in the text's order."""
    for instruction in program.computations.get(name, {}).values():
        opcode, called = instruction.opcode, instruction.called()
        if is_collective(instruction):
            yield Found(instruction, name, executions, around)
        if opcode.endswith(("-done", "-update")):
            continue  # what they call was called by the start
        if opcode == "conditional":
            branches = [list(_walk(program, b, executions, around)) for _, b in called]
            yield from _one_of(program, branches) if branches else ()
            continue
        turns = trips(program, name, instruction) if opcode == "while" else None
        for key, target in called:
            runs, loop = executions, around
            if opcode == "while":
                # A condition is evaluated once more than its body runs.
                more = int(key == "condition")
                runs = None if runs is None or turns is None else runs * (turns + more)
                loop = Loop(instruction.name, turns)
            yield from _walk(program, target, runs, loop)


def _one_of(program: hlo.Program, branches: list[list[Found]]) -> Iterator[Found]:
    """The collectives of a conditional: known are those that every branch executes alike."""

    def same(one: Found) -> Hashable:
        kind, values, groups = read(program, one.instruction, one.where, program.devices)
        if not values:
            return one.instruction
        alike = frozenset(map(frozenset, groups or ())) if kind not in PAIRWISE else groups
        return kind, tuple(values), alike, one.executions, one.loop is not None

    counted = [Counter(map(same, branch)) for branch in branches]
    common = counted[0].copy()
    for count in counted[1:]:
        common &= count
    for n, branch in enumerate(branches):
        left = common.copy()
        for one in branch:
            if left[key := same(one)] > 0:
                left[key] -= 1
                yield dataclasses.replace(one, counts=one.counts and n == 0)
            else:
                yield dataclasses.replace(one, executions=None)


def trips(program: hlo.Program, name: str, loop: hlo.Instruction) -> int | None:
    """How often a loop runs: as the compiler says, or as its counter shows."""
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(found[1])

    def source(at: hlo.Computation, name: str, opcode: str) -> hlo.Instruction:
        while at[name].opcode in ("copy", "bitcast"):
            (name,) = at[name].operands
        if at[name].opcode != opcode:
            raise ValueError("not the loop of a counter")
        return at[name]

    def constant(at: hlo.Computation, name: str) -> int:
        return int(source(at, name, "constant").literal)

    def item(at: hlo.Computation, name: str) -> int:
        attributes = source(at, name, "get-tuple-element").attributes
        return hlo.numbers("index", attributes)[0]  # type: ignore[index]

    try:
        called, here = dict(loop.called()), program.computations[name]
        condition = program.computations[called["condition"]]
        body = program.computations[called["body"]]
        # state[i] < limit, where state[i] begins at a constant and grows by another
        test, state = hlo.root(condition), hlo.root(body)
        i = item(condition, test.operands[0])
        update = source(body, state.operands[i], "add")
        start = constant(here, here[loop.operands[0]].operands[i])
        limit = constant(condition, test.operands[1])
        step = constant(body, update.operands[1])
        counts = item(body, update.operands[0]) == i and step > 0
        if counts and test.opcode == "compare" and "direction=LT" in test.attributes:
            return max(0, -(-(limit - start) // step))
    except (KeyError, IndexError, TypeError, ValueError, StopIteration):
        pass
    return None


@dataclass
class Chain:
    """A collective that several fusions of one computation carry, begun by the first of them."""

    where: str  # the computation of these fusions
    start: hlo.Instruction
    carried: list[tuple[hlo.Instruction, hlo.Instruction]]  # fusion, and the collective in it


def chains(program: hlo.Program) -> dict[hlo.Instruction, Chain]:
    """By the collective inside the first fusion: the fusions that carry it on.

    Compiled for TPU, a collective may begin in one fusion, go on in others that compute
    something else, and end in one more; each of them holds the collective once. They are
    told by the values that are handed on: a fusion that takes the state which a start
    returned, and exchanges the value that the start exchanges.
    """
    found: dict[hlo.Instruction, Chain] = {}
    for where, here in program.computations.items():
        fusions = [(i, _fused(program, i)) for i in here.values() if i.opcode == "fusion"]
        begun = {
            fusion.name: _exchanges(program, here, fusion)
            for fusion, within in fusions
            if any(_START in i.line for i in within.values())
        }
        for name, started in begun.items():
            found |= {inside: Chain(where, here[name], []) for inside in started.values()}
        for fusion, _ in fusions if begun else ():
            takes = {_origin(program, here, name)[0] for name in fusion.operands}
            exchanges = _exchanges(program, here, fusion)
            for name in begun:
                for key in set(begun[name]) & set(exchanges) if name in takes else ():
                    found[begun[name][key]].carried.append((fusion, exchanges[key]))
    return found


_START = 'custom_call_target="AsyncCollectiveStart"'


def _fused(program: hlo.Program, fusion: hlo.Instruction) -> hlo.Computation:
    return program.computations.get(next((name for _, name in fusion.called()), ""), {})


def _exchanges(
    program: hlo.Program, here: hlo.Computation, fusion: hlo.Instruction
) -> dict[Hashable, hlo.Instruction]:
    """The collectives inside a fusion, by what they exchange and how."""
    within, found = _fused(program, fusion), dict[Hashable, hlo.Instruction]()
    for inside in filter(is_collective, within.values()):
        values = tuple(_outside(program, here, fusion, name) for name in inside.operands)
        how = hlo.numbers("dimensions", inside.attributes), hlo.groups(inside.attributes, 0)
        found[inside.opcode, values, inside.arrays, str(how), hlo.pairs(inside.line)] = inside
    return found


def _origin(
    program: hlo.Program, here: hlo.Computation, name: str, index: int | None = None
) -> tuple[str, int | None]:
    """The instruction, and which of its results, that made a value; passed on, it is the same."""
    made = here.get(name)
    if made is None or not made.operands:
        return name, index
    if made.opcode in ("copy", "bitcast"):
        return _origin(program, here, made.operands[0], index)
    if made.opcode == "get-tuple-element":
        (item,) = hlo.numbers("index", made.attributes) or [0]
        return _origin(program, here, made.operands[0], item)
    if made.opcode == "tuple" and index is not None:
        return _origin(program, here, made.operands[index])
    if made.opcode == "fusion" and (within := _fused(program, made)):
        end = hlo.root(within)
        if index is not None and end.opcode == "tuple":
            return _outside(program, here, made, end.operands[index], index)
        if index == 0 and _START in end.line and end.operands[0] in within:
            # It returns what it exchanges, the result to be, and its state.
            return _outside(program, here, made, within[end.operands[0]].operands[0], index)
    return name, index


def _outside(
    program: hlo.Program, here: hlo.Computation, fusion: hlo.Instruction, name: str,
    index: int | None = None,
) -> tuple[str, int | None]:  # fmt: skip
    """The origin of a value inside a fusion, or of the fusion's result that it is.

    That is outside where it came in as a parameter, unchanged.
    """
    within = _fused(program, fusion)
    inner, part = _origin(program, within, name)
    if part is None and inner in within and within[inner].opcode == "parameter":
        return _origin(program, here, fusion.operands[int(within[inner].literal)])
    return (f"{fusion.name}/{inner}", part) if index is None else (fusion.name, index)


def read(
    program: hlo.Program, instruction: hlo.Instruction, where: str, devices: int
) -> tuple[str, list[hlo.Array], hlo.Groups | None]:
    """Kind, values and groups of one collective; no values: it cannot be read."""
    kind, here = instruction.opcode.removesuffix("-start"), program.computations[where]
    if kind in PAIRWISE:
        groups = hlo.pairs(instruction.line)
    else:
        groups = hlo.groups(instruction.attributes, devices)
    readable = kind in KINDS and (groups is not None or kind in ("send", "recv"))
    if not readable or any(name not in here for name in instruction.operands):
        return kind, [], groups
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # the name TPU's compiler gives to the fusion of both
    values = [array for name in instruction.operands for array in here[name].arrays]
    if kind == "all-gather":
        (axis,) = hlo.numbers("dimensions", instruction.attributes) or [0]
        n = max(map(len, groups or ()))
        values = [(e, (*s[:axis], n * s[axis], *s[axis + 1 :])) for e, s in values]
        if any(value not in instruction.arrays for value in values):
            return kind, [], groups
    elif kind == "all-to-all" and len(values) > 1:
        values = [(values[0][0], (len(values), *values[0][1]))]
    elif kind == "recv":
        values = list(instruction.arrays[:1])
    elif kind in ("send", "ragged-all-to-all"):
        values = values[:1]
    return kind, values, groups


def positions(
    mesh: Mesh | AbstractMesh, own: Sequence[Mesh] | None, order: Sequence[jax.Device] | None
) -> np.ndarray:
    """The program's position of every device of a mesh, in the mesh's shape.

    A program numbers devices in the order of its own mesh, whatever their ids are. ``own``
    are the meshes that it names, None for a text, which names none; ``order`` its devices.
    """
    shape = tuple(mesh.shape.values())
    if isinstance(mesh, Mesh):
        if order is None:
            return np.arange(mesh.size).reshape(shape)
        place = {device: i for i, device in enumerate(order)}
        if set(place) != set(mesh.devices.flat):
            if len(place) != mesh.size:
                raise ValueError(_wrong_size(len(place), mesh))
            raise ValueError(
                "the mesh and the program have different devices, "
                f"{_ids(mesh.devices.flat)} and {_ids(order)}: {_ADVICE}"
            )
        return np.array([place[device] for device in mesh.devices.flat]).reshape(shape)
    for one in own or ():  # the same axes, in any order: their names say which is which
        if dict(one.shape) == dict(mesh.shape):
            axes = [one.axis_names.index(name) for name in mesh.axis_names]
            return np.arange(one.size).reshape(one.devices.shape).transpose(axes)
    if own is not None and sum(size > 1 for size in shape) > 1:
        names = " or ".join(str(dict(one.shape)) for one in own) or "none that it names"
        raise ValueError(
            f"an AbstractMesh of {dict(mesh.shape)} does not say which device stands where, and "
            f"the program's own mesh is {names}: pass a jax.sharding.Mesh of devices as mesh="
        )
    return np.arange(mesh.size).reshape(shape)


_ADVICE = "pass the mesh it was compiled for as mesh="


def _wrong_size(devices: int, mesh: Mesh | AbstractMesh) -> str:
    return f"the program runs on {devices} devices and the mesh has {mesh.size}: {_ADVICE}"


def _ids(devices: Sequence[jax.Device] | Any) -> list[int]:
    return [device.id for device in devices]


def check_size(program: hlo.Program, mesh: Mesh | AbstractMesh) -> None:
    """ValueError for a mesh of another size than the program's, as far as its text tells."""
    if program.devices and program.devices != mesh.size:
        raise ValueError(_wrong_size(program.devices, mesh))


def match(
    groups: hlo.Groups | None, kind: str, names: Sequence[str], grid: np.ndarray
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes, within) of groups of positions, as ``Collective`` defines them."""
    if groups is None:
        return UNMATCHED, tuple(names)
    place = {int(position): where for where, position in np.ndenumerate(grid)}
    if strange := {p for group in groups for p in group} - set(place):
        raise ValueError(f"the mesh has {grid.size} devices, none at {strange}")
    every = range(grid.ndim)
    used = [d for d in every if any(len({place[p][d] for p in g}) > 1 for g in groups)]
    within = tuple(names[d] for d in used)
    if kind in PAIRWISE:
        return within, within
    lines = grid.transpose([d for d in every if d not in used] + used)
    lines = lines.reshape(-1, math.prod(grid.shape[d] for d in used))
    same = {frozenset(g) for g in groups} == {frozenset(g) for g in lines.tolist()}
    return (within if same else UNMATCHED), within
