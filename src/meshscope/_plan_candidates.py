"""Which meshes and tables there are to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Axes = str | tuple[str, ...] | None  # the mesh axes of one logical axis; None leaves it whole
Rules = Mapping[str, Axes]


@dataclass(frozen=True)
class Candidate:
    """A table on a mesh."""

    table: str
    rules: dict[str, Axes]  # without axes of size 1
    mesh: dict[str, int]  # sizes of all axes

    @property
    def where(self) -> str:
        """``data 8 × model 8``, without axes of size 1."""
        sizes = [f"{name} {size}" for name, size in self.mesh.items() if size > 1]
        return " × ".join(sizes) or "one device"


def as_tuple(axes: Axes) -> tuple[str, ...]:
    """The mesh axes that a rule names."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def axes_of(tables: Mapping[str, Rules]) -> tuple[str, ...]:
    """The mesh axes that tables name, in the order in which they do."""
    named = [
        axis for rules in tables.values() for axes in rules.values() for axis in as_tuple(axes)
    ]
    return tuple(dict.fromkeys(named))


def meshes(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """The sizes of every mesh of so many devices, from those with a long first axis on."""
    if not axes:
        if devices == 1:
            yield {}
        return
    first, *rest = axes
    for size in range(devices, 0, -1):
        if devices % size == 0:
            for others in meshes(devices // size, rest):
                yield {first: size, **others}


def candidates(tables: Mapping[str, Rules], devices: int, axes: Sequence[str]) -> list[Candidate]:
    """Each table with each mesh on which it says something that no earlier one said.

    Left out are meshes with an axis that a table does not name, because its devices would
    repeat each other's work; and what is a table before it, once axes of size 1 are dropped
    and the others are called alike (FSDP × tensor parallelism with a single device on ``model``
    is FSDP; so is HSDP that shards over all devices).
    """
    found: dict[object, Candidate] = {}
    for table, rules in tables.items():
        for mesh in meshes(devices, axes):
            here: dict[str, Axes] = {}
            for name, given in rules.items():
                left = tuple(axis for axis in as_tuple(given) if mesh[axis] > 1)
                if left:
                    here[name] = left[0] if len(left) == 1 else left
            used = {axis for given in here.values() for axis in as_tuple(given)}
            if any(size > 1 and axis not in used for axis, size in mesh.items()):
                continue
            place = {axis: n for n, axis in enumerate(axis for axis in axes if mesh[axis] > 1)}
            says = {name: tuple(place[a] for a in as_tuple(given)) for name, given in here.items()}
            key = tuple(sorted(says.items())), tuple(mesh[axis] for axis in place)
            found.setdefault(key, Candidate(table, here, mesh))
    return list(found.values())
