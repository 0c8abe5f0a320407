"""Read the text of a compiled XLA program: instructions, groups, source lines."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Array = tuple[str, tuple[int, ...]]  # (HLO element type, dimensions)
Groups = tuple[tuple[int, ...], ...]

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
# What else a module has: its first line, ends of computations, tables of files and frames.
_AROUND = re.compile(r"HloModule |\}|(File|Function)(Names|Locations)$|StackFrames$|\d+ ")
_HOST_SPACE = re.compile(r"S\([56]\)")  # pinned_host, unpinned_host
_LOWERED = re.compile(r"\b(stablehlo|mhlo)\.|^(ENTRY|HloModule) ", re.MULTILINE)
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|"
    r"false_computation|called_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a program. ``arrays`` are its results, tuples taken apart."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str  # the operands as text
    attributes: str  # what follows the operands, strings left empty
    line: str

    def called(self) -> list[tuple[str, str]]:
        """(attribute, computation) for each computation that this one calls."""
        return [
            (key, name.strip(" %"))
            for key, several, one in _CALLED.findall(self.attributes)
            for name in (several or one).split(",")
        ]


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Program:
    """The computations of a module, the entry's name, and lines not understood."""

    computations: dict[str, Computation]
    entry: str
    unread: tuple[str, ...]
    devices: int  # that it is partitioned for; 0 if it does not say

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction of every computation."""
        return (i for c in self.computations.values() for i in c.values())

    def caller(self, name: str) -> tuple[str, Instruction] | None:
        """The first instruction that calls a computation, and where it stands; None: the entry."""
        return self._callers.get(name)

    @functools.cached_property
    def _callers(self) -> dict[str, tuple[str, Instruction]]:
        found: dict[str, tuple[str, Instruction]] = {}
        for where, computation in self.computations.items():
            for instruction in computation.values():
                for _, target in instruction.called():
                    found.setdefault(target, (where, instruction))
        return found


def root(computation: Computation) -> Instruction:
    """What a computation returns."""
    return next(i for i in computation.values() if i.line.startswith("ROOT "))


def parse(text: str, trusted: bool = False) -> Program:
    """Take the text of a compiled module apart; ValueError for a text that is none.

    Only a compiled program has a schedule, for which a text is searched unless it is
    ``trusted``. Before that, collectives are missing that the compiler adds, and shapes
    are those of whole arrays.
    """
    computations: dict[str, Computation] = {}
    unread: list[str] = []
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header[2]
            computations[current] = {}
            entry = current if header[1] else entry
        elif current and line[:1].isspace() and (instruction := _instruction(line)):
            computations[current][instruction.name] = instruction
        elif line.strip() and not _AROUND.match(line):
            unread.append(line.strip())
    head = text.split("\n", 1)[0]
    if not (computations.get(entry) and head.startswith("HloModule ")):
        what = "not a compiled program"
        what = "a program that is not compiled" if _LOWERED.search(text) else what
    elif not trusted and not re.search(r"\bis_scheduled=true\b", head):
        what = "a program that is not compiled to the end"
    else:
        parts = re.search(r"\bnum_partitions=(\d+)", head)
        return Program(computations, entry, tuple(unread), int(parts[1]) if parts else 0)
    start = text.strip()[:60].split("\n")[0]
    raise ValueError(
        f"this text is {what}: pass jax.jit(f).lower(...).compile(), or the text that its "
        f"as_text() gives. It begins {start!r}"
    )


def _instruction(line: str) -> Instruction | None:
    # %name = type opcode(operands), attributes: only brackets tell where a part ends
    # (a type on TPU is f32[8,128]{1,0:T(8,128)}, a tuple's type starts with one).
    head = _NAME.match(line)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line[head.end() :] if head else "")
    end = _closing(bare, 0) if bare.startswith("(") else bare.find(" ")
    opcode = _OPCODE.match(bare, end)
    close = _closing(bare, opcode.end() - 1) if opcode else 0
    if head is None or opcode is None or not close:
        return None
    literal = bare[opcode.end() : close - 1]
    result = tuple(
        (kind, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
        for kind, dims in _ARRAY.findall(bare[:end])
    )
    return Instruction(
        name=head[1],
        opcode=opcode[1],
        arrays=result,
        operands=tuple(re.findall(r"%([\w.\-]+)", literal)),
        literal=literal,
        attributes=bare[close:],
        line=line.strip(),
    )


def _closing(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`, 0 if none does."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return 0


def host_bytes(text: str) -> dict[str, int]:
    """Bytes of a program's arguments, outputs and aliased outputs that are in the host's memory.

    They are in its first line, ``entry_computation_layout={(f32[8,64]{1,0:S(5)})->...}``, where a
    layout names the memory space. What it puts on the host in between is not.
    """
    head = text.split("\n", 1)[0]
    entry = head.partition("entry_computation_layout={")[2]
    inputs, outputs = (
        [nbytes(array) if host else 0 for array, host in _spaces(part)]
        for part in _up_to_brace(entry).partition(")->")[::2]
    )
    alias = _up_to_brace(head.partition("input_output_alias={")[2])
    aliased = [int(index or 0) for index in re.findall(r"\{(\d*)\}: \(", alias)]
    reused = sum(outputs[index] for index in aliased if index < len(outputs))
    return {"arguments": sum(inputs), "outputs": sum(outputs), "aliased": reused}


def _spaces(types: str) -> Iterator[tuple[Array, bool]]:
    """Each array of a list of types, and whether it is in the host's memory."""
    for found in re.finditer(_ARRAY.pattern + r"(\{[^{}]*\})?", types):
        dims = tuple(int(n.lstrip("<=")) for n in found[2].split(",") if n)
        yield (found[1], dims), bool(_HOST_SPACE.search(found[3] or ""))


def _up_to_brace(text: str) -> str:
    """The part of a text before the first brace that it closes and has not opened."""
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return text[:i]
    return ""


def nbytes(array: Array) -> int:
    """Bytes of one array without padding: f32 has 4 per element, pred 1, s4 a half."""
    digits = re.match(r"[a-z]+(\d+)", array[0])
    bits = int(digits[1]) if digits else 8 * (array[0] == "pred")
    return -(-bits * math.prod(array[1]) // 8)


def dtype(element: str) -> str:
    """JAX's name of an HLO element type: f32 is float32, s8 int8, pred bool."""
    words = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    found = re.fullmatch(r"(bf|f|s|u|c)(\d+)(\w*)", element)
    if found is None:
        return "bool" if element == "pred" else element
    return words[found[1]] + found[2] + ("_" + found[3] if found[3] else "")


def numbers(key: str, attributes: str) -> list[int] | None:
    """``key={1,2}`` or ``key=3`` as a list of integers, None if there is no such key."""
    found = re.search(rf"\b{key}=(?:\{{([\d,]*)\}}|(\d+))", attributes)
    return found and _ints(found[1] or found[2] or "")


def pairs(line: str) -> Groups | None:
    """The (source, target) positions of a collective-permute, send or recv."""
    found = re.search(r'source_target_pairs="?\{((?:\{[\d,]*\},?)*)\}', line)
    return found and _braces(found[1])


def groups(attributes: str, devices: int) -> Groups | None:
    """The groups of positions of one collective, from any of the three spellings.

    ``{{0,1},{2,3}}``, ``[2,2]<=[4]`` and ``mesh['a'=2,'b'=2] {'b'}`` say the same. An empty
    list is one group of all ``devices``. None: there is no such attribute.
    """
    if found := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return _braces(found[1]) or (tuple(range(devices)),)
    if found := re.search(
        r"replica_groups=\[(\d+),\d+\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes
    ):
        return _tuples(_iota(found[2]).reshape(int(found[1]), -1))
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?= ))? \{([^}]*)\}",
        attributes,
    ):
        return _mesh_groups(*found.groups())
    return None


def _mesh_groups(sizes: str, ids: str | None, axes: str) -> Groups:
    # A sub-axis 'a':(2)4 is the middle one of three that 'a' is split into: 2, 4, rest.
    used = [
        (name, int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes)
    ]
    shape: list[int] = []
    inside: list[int] = []
    for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", sizes):
        spans = [(b, b * n if n else int(size)) for a, b, n in used if a == name]
        edges = sorted({1, int(size)}.union(*spans))
        for low, high in itertools.pairwise(edges):
            if any(start <= low and high <= stop for start, stop in spans):
                inside.append(len(shape))
            shape.append(high // low)
    flat = np.arange(math.prod(shape))
    if ids:
        flat = _iota(ids).reshape(-1) if ids.startswith("[") else np.array(_ints(ids))
    outside = [d for d in range(len(shape)) if d not in inside]
    grid = flat.reshape(shape).transpose(outside + inside)
    return _tuples(grid.reshape(-1, math.prod(shape[d] for d in inside)))


def _iota(text: str) -> np.ndarray:
    """``[4,2]T(1,0)``: 0 to 7 as 4 rows of 2, transposed."""
    dims, _, order = text.partition("T")
    grid = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return grid.transpose(_ints(order)) if order else grid


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _braces(text: str) -> Groups:
    return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _tuples(grid: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in grid)


def op_name(line: str) -> str:
    """JAX's name of the operation that a line comes from, or ``""``."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
    return found[1] if found else ""


class Sources:
    """Where instructions come from: ``file.py:12``, or ``cell:12`` inside a notebook.

    Only a file's last name is kept, so that the answer is the same on every machine.
    Frames inside installed packages are passed over where a caller outside is known.
    """

    def __init__(self, text: str) -> None:
        def section(title: str, row: str) -> dict[str, tuple[str, str]]:
            found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
            rows = re.findall(rf"^(\d+) {row}", found[1], re.MULTILINE) if found else []
            return {key: (a, b) for key, a, b in rows}

        files = section("FileNames", '"(.*)"()')
        places = section("FileLocations", r"\{file_name_id=(\d+) .*?\bline=(\d+)")
        frames = r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        self._places = {k: (files[file][0], line) for k, (file, line) in places.items()}
        self._frames = section("StackFrames", frames)

    def find(self, line: str) -> str | None:
        """The source of one HLO line, None if it names none."""
        places: list[tuple[str, str]] = []
        if found := re.search(r"\bstack_frame_id=(\d+)", line):
            # XLA prints 1 + the parent: the first frame, which has none, says 1.
            frame, off = int(found[1]), int(self._frames.get("1", ("", "0"))[1] or 0)
            while str(frame) in self._frames and len(places) < len(self._frames):
                place, parent = self._frames[str(frame)]
                places.append(self._places[place])
                frame = int(parent or 0) - off
        elif found := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
            places.append((found[1], found[2]))
        installed = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen")
        own = [place for place in places if not installed.search(place[0])]
        for file, number in own or places:
            notebook = re.search(r"ipykernel_|ipython-input", file)
            name = "cell" if notebook else re.split(r"[/\\]", file)[-1]
            return f"{name}:{number}"
        return None
