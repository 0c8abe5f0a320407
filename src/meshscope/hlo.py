"""Read the text of a compiled XLA program: computations, instructions, replica groups."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]
Array = tuple[str, Shape]  # (HLO element type, dimensions)
Groups = tuple[tuple[int, ...], ...]

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|"
    r"false_computation|called_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Instruction:
    """One line of a program. `arrays` are its results, tuples taken apart."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str  # what follows the operands, quoted strings left out
    line: str

    def called(self) -> list[tuple[str, str]]:
        """(attribute, computation) for each computation this instruction calls."""
        return [
            (key, name.strip().lstrip("%"))
            for key, several, one in _CALLED.findall(self.attributes)
            for name in (several or one).split(",")
            if name.strip()
        ]


@dataclass(frozen=True)
class Program:
    """A module: its computations by name, the entry's name, and the unread lines."""

    text: str
    computations: dict[str, list[Instruction]]
    entry: str
    unread: tuple[str, ...]


def _closing(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced brackets: {text}")


def _instruction(line: str, name: str, start: int) -> Instruction | None:
    bare = _STRING.sub('""', line[start:])
    try:
        end = _closing(bare, 0) if bare.startswith("(") else bare.index(" ")
        found = _OPCODE.match(bare, end)
        if found is None:
            return None
        close = _closing(bare, found.end() - 1)
    except ValueError:
        return None
    operands = re.findall(r"%([\w.\-]+)", bare[found.end() : close])
    result = tuple(arrays(bare[:end]))
    return Instruction(name, found[1], result, tuple(operands), bare[close:], line.strip())


def arrays(text: str) -> list[Array]:
    """Every `f32[8,16]` in a piece of text, as ("f32", (8, 16))."""
    return [
        (kind, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for kind, dims in _ARRAY.findall(text)
    ]


def parse(text: str) -> Program:
    """Take a module's text apart; a line that is not understood lands in `unread`."""
    computations: dict[str, list[Instruction]] = {}
    unread: list[str] = []
    entry, current = "", ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current and (start := _NAME.match(line)):
            found = _instruction(line, start[1], start.end())
            if found:
                computations[current].append(found)
            else:
                unread.append(line.strip())
        elif current and line.startswith((" ", "\t")) and line.strip():
            unread.append(line.strip())
    return Program(text, computations, entry, tuple(unread))


def bits(element: str) -> int:
    """Bits of one element: f32 -> 32, bf16 -> 16, pred -> 8, s4 -> 4, token -> 0."""
    digits = re.match(r"[a-z]+(\d+)", element)
    return int(digits[1]) if digits else 8 * (element == "pred")


def nbytes(array: Array) -> int:
    """Bytes of one array, without padding."""
    return -(-bits(array[0]) * math.prod(array[1]) // 8)


def dtype(element: str) -> str:
    """JAX's name of an HLO element type: f32 -> float32, s8 -> int8, pred -> bool."""
    if element == "pred":
        return "bool"
    found = re.fullmatch(r"(bf|f|s|u|c)(\d+)(\w*)", element)
    if found is None:
        return element
    word = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    return word[found[1]] + found[2] + ("_" + found[3] if found[3] else "")


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _ints(dims)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_ints(order)) if order else grid


_LIST = r"\{((?:\{[\d,]*\},?)*)\}"
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, *device_ids=\((.*?)\)(?= *\{))? *\{([^}]*)\}"
)


def replica_groups(attributes: str, devices: int) -> Groups | None:
    """The groups of positions of one instruction, from any of the three spellings.

    `{{0,1},{2,3}}`, `[2,2]<=[4]T(0)` and `mesh['a'=2,'b'=2] {'b'}` say the same.
    An empty list is one group of all `devices`. None: there is no such attribute.
    """
    if found := re.search("replica_groups=" + _LIST, attributes):
        listed = [tuple(_ints(g)) for g in re.findall(r"\{([\d,]*)\}", found[1])]
        return tuple(listed) or (tuple(range(devices)),)
    if found := _IOTA.search(attributes):
        grid = _iota(found[2], found[3]).reshape(_ints(found[1])[0], -1)
        return tuple(map(tuple, grid.tolist()))
    if found := _MESH.search(attributes):
        return _mesh_groups(*found.groups())
    return None


def dimension(attributes: str) -> list[int]:
    """The numbers in `dimensions={...}`."""
    return _ints(re.search(r"\bdimensions=\{([\d,]*)\}", attributes)[1])  # type: ignore[index]


def _mesh_groups(sizes: str, ids: str | None, axes: str) -> Groups:
    names = re.findall(r"'?([^',=]+)'?=(\d+)", sizes)
    flat = np.arange(math.prod(int(size) for _, size in names))
    if ids and ids.startswith("["):
        dims, _, order = ids.partition("T")
        flat = _iota(dims, order).reshape(-1)
    elif ids:
        flat = np.array(_ints(ids))
    # A sub-axis 'a':(2)4 is the middle one of 'a' split into 2, 4 and the rest.
    used = re.findall(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", axes)
    shape: list[int] = []
    inside: list[int] = []
    for name, size in names:
        cuts = {1, int(size)}
        parts = [(int(pre or 1), int(width or size)) for n, pre, width in used if n == name]
        for pre, width in parts:
            cuts |= {pre, pre * width}
        edges = sorted(cuts)
        for low, high in zip(edges, edges[1:], strict=False):
            if any(pre <= low and high <= pre * width for pre, width in parts):
                inside.append(len(shape))
            shape.append(high // low)
    grid = flat.reshape(shape)
    outside = [i for i in range(len(shape)) if i not in inside]
    size = math.prod(shape[i] for i in inside)
    return tuple(map(tuple, grid.transpose(outside + inside).reshape(-1, size).tolist()))


def source_target_pairs(line: str) -> Groups | None:
    """The (source, target) positions of a collective-permute, send or recv."""
    found = re.search(r'source_target_pairs="?' + _LIST, line)
    return found and tuple(tuple(_ints(p)) for p in re.findall(r"\{([\d,]*)\}", found[1]))


_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen")


class Sources:
    """Where instructions come from: `file.py:12`, or `cell:12` inside a notebook.

    Only the file's last name is kept, so that the answer is the same on every machine.
    Frames inside installed packages are passed over while the caller is known.
    """

    def __init__(self, text: str) -> None:
        head = text.split("\n%", 1)[0].split("\nENTRY", 1)[0]
        files = dict(re.findall(r'^(\d+) "(.*)"$', _section(head, "FileNames"), re.M))
        places = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
        self._places = {
            key: (files.get(file, ""), line)
            for key, file, line in re.findall(places, _section(head, "FileLocations"), re.M)
        }
        frames = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        self._frames = {
            key: (place, parent)
            for key, place, parent in re.findall(frames, _section(head, "StackFrames"), re.M)
        }

    def find(self, line: str) -> str | None:
        """The source line of one HLO line, or None if it names none."""
        places = []
        if found := re.search(r"\bstack_frame_id=(\d+)", line):
            frame, seen = found[1], set[str]()
            while frame in self._frames and frame not in seen:
                seen.add(frame)
                place, frame = self._frames[frame]
                places.append(self._places.get(place, ("", "")))
        elif found := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', line):
            places.append((found[1], found[2] or ""))
        places = [(file, number) for file, number in places if file and number]
        if not places:
            return None
        own = [place for place in places if not _INSTALLED.search(place[0])]
        file, number = (own or places)[0]
        notebook = re.search(r"ipykernel_|ipython-input", file)
        return ("cell:" if notebook else re.split(r"[/\\]", file)[-1] + ":") + number


def _section(head: str, title: str) -> str:
    found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", head, re.M | re.S)
    return found[1] if found else ""
