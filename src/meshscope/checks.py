"""A proof by shapes: no instruction of a program holds a sharded array in one piece."""

from __future__ import annotations

import re
from typing import Any

from . import hlo
from .programs import program_text
from .footprint import placed_leaves


def assert_no_full_copy(compiled: Any, tree: Any) -> None:
    """Assert that no instruction of a program has the full shape of a sharded leaf.

    compiled   what `.lower(...).compile()` returns, for example of an initialiser.
    tree       arrays, or `jax.ShapeDtypeStruct`s with shardings, as they should end up: the
               program's result or `jax.eval_shape` of it with shardings.

    The text of a compiled program has the shapes that one device sees. An instruction counts
    as a full copy if its result (or one part of it) has the leaf's dimensions, in any order
    and with or without dimensions of size 1, whatever its dtype: a transposed, cast or
    expanded copy is still a copy. Instructions inside fusions count too, although they may
    never reach memory.

    Raises AssertionError with the leaf's path, its shape and the line of the program.
    Raises ValueError if nothing is left to check, because every leaf is whole on every
    device; and if a full shape is found that is also the piece of another leaf, where shapes
    cannot tell which one it is: choose sizes that differ.

    Limits. An activation that happens to have a leaf's shape is a false alarm: choose a batch
    size that occurs nowhere else. A copy flattened or reshaped to other dimensions passes;
    compare `memory(compiled).temporaries` with the size of the pieces as well.
    """
    text = program_text(compiled)
    full: dict[tuple[int, ...], str] = {}
    pieces: dict[tuple[int, ...], str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in placed_leaves(tree):
        shape, piece = tuple(leaf.shape), tuple(leaf.sharding.shard_shape(tuple(leaf.shape)))
        name = path or "the array"
        shapes[name] = shape
        pieces.setdefault(_key(piece), name)
        if piece != shape:
            full.setdefault(_key(shape), name)
    if not full:
        raise ValueError(
            "nothing to check: every leaf is whole on every device. Pass arrays or "
            "jax.ShapeDtypeStructs with shardings that split at least one leaf"
        )
    program = hlo.parse(text)
    for computation in program.computations.values():
        for instruction in computation:
            for _, dims in instruction.arrays:
                if (name := full.get(_key(dims))) is None:
                    continue
                line = re.sub(r",? (metadata|backend_config|frontend_attributes)=.*", "", instruction.line)
                if other := pieces.get(_key(dims)):
                    raise ValueError(
                        f"cannot tell: {shapes[name]} is the full shape of {name} and the "
                        f"piece of {other}. Choose sizes that differ. Found in: {line}"
                    )
                raise AssertionError(
                    f"{name} has the full shape {shapes[name]} in the compiled program: {line}"
                )


def _key(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))
