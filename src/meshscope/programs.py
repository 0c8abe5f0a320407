"""Which collectives a program executes, how often, and between which devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from . import hlo

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

# An instruction, its computation, its executions, whether it is inside a loop.
Found = tuple[hlo.Instruction, str, int | None, bool]


def program_text(compiled: Any) -> str:
    """The text of a compiled program; TypeError, saying what to do, for the rest."""
    if hasattr(compiled, "as_text") and hasattr(compiled, "memory_analysis"):
        return str(compiled.as_text())
    kind = type(compiled).__name__
    if hasattr(compiled, "as_text") or hasattr(compiled, "compile"):
        raise TypeError(f"this {kind} is not compiled: call .compile() first")
    if hasattr(compiled, "lower"):
        raise TypeError(f"this {kind} is not compiled: call .lower(...).compile() first")
    how = "jax.jit(f).lower(...).compile()"
    raise TypeError(f"expected a compiled program, not {kind}: pass {how}")


def executed(program: hlo.Program) -> tuple[list[Found], list[str]]:
    """The collectives that run, and the lines that mention one but were not reached."""
    found = list(_walk(program, program.entry, 1, False))
    reached = {instruction for instruction, *_ in found}
    lost = [line for line in program.unread if _MENTION.search(line)]
    every = filter(_collective, program.instructions())
    lost += [instruction.line for instruction in every if instruction not in reached]
    again = _repeated(program)
    return [each for each in found if each[0] not in again], lost


def _collective(instruction: hlo.Instruction) -> bool:
    """Is it, or may it be, a collective? Not its end, nor a transfer to the host."""
    return (
        bool(_MENTION.match(instruction.opcode + "("))
        and not instruction.opcode.endswith(("-done", "-update"))
        and "is_host_transfer=true" not in instruction.attributes
    )


def _walk(program: hlo.Program, name: str, executions: int | None, inside: bool) -> Iterator[Found]:
    """The collectives of one computation and of what it calls, in the text's order."""
    for instruction in program.computations.get(name, {}).values():
        opcode, called = instruction.opcode, instruction.called()
        if _collective(instruction):
            yield instruction, name, executions, inside
        if opcode.endswith(("-done", "-update")):
            continue  # what they call was called by the start
        trips = _trips(program, name, instruction) if opcode == "while" else None
        for key, target in called:
            runs, loop = executions, inside
            if opcode == "while":
                # A condition is evaluated once more than its body runs.
                more = int(key == "condition")
                runs = None if runs is None or trips is None else runs * (trips + more)
                loop = True
            elif opcode == "conditional" and len(called) > 1:
                runs = None
            yield from _walk(program, target, runs, loop)


def _trips(program: hlo.Program, name: str, loop: hlo.Instruction) -> int | None:
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


def _repeated(program: hlo.Program) -> set[hlo.Instruction]:
    """Collectives that carry on, inside a fusion, what another fusion has started.

    Compiled for TPU, the fusions of one start, steps and end share a channel.
    """

    def channel(i: hlo.Instruction) -> str:
        return f"{i.opcode} {hlo.numbers('channel_id', i.attributes)}"

    mark = 'custom_call_target="AsyncCollectiveStart"'
    every = program.computations
    starts = {n for n, c in every.items() if any(mark in i.line for i in c.values())}
    begun = {channel(i) for n in starts for i in every[n].values() if _collective(i)}
    fusions = (i for i in program.instructions() if i.opcode == "fusion")
    fused = {name for i in fusions for _, name in i.called()} - starts
    return {i for n in fused for i in every[n].values() if channel(i) in begun}


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


def positions(mesh: Mesh | AbstractMesh, own: Mesh | None) -> np.ndarray:
    """The program's position of every device of a mesh, in the mesh's shape.

    A program numbers devices in the order of its own mesh, whatever their ids are.
    """
    shape = tuple(mesh.shape.values())
    if not isinstance(mesh, Mesh) or own is None:
        return np.arange(math.prod(shape)).reshape(shape)
    order = {device: i for i, device in enumerate(own.devices.flat)}
    if set(order) != set(mesh.devices.flat):
        raise ValueError("the mesh and the program have different devices")
    return np.array([order[device] for device in mesh.devices.flat]).reshape(shape)


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
