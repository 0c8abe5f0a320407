"""A proof by shapes: no instruction of a program holds a sharded array in one piece."""

from __future__ import annotations

import re
from typing import Any

from . import hlo
from .footprint import placed_leaves
from .programs import program_text
from .tables import shape_text


def assert_no_full_copy(compiled: Any, tree: Any) -> None:
    """Assert that no instruction of a program has the full shape of a sharded leaf.

    A compiled program has the shapes that one device sees. An instruction counts as a
    full copy if a result has the leaf's dimensions, in any order and whatever its dtype,
    dimensions of size 1 aside: transposed, cast or expanded, it is still a copy. What
    stands inside a fusion counts too, although it may never reach memory. Leaves that
    are whole on every device are not checked.

    Two limits. An activation with a leaf's shape is a false alarm: choose a batch size
    that occurs nowhere else. A copy reshaped to other dimensions passes: compare
    ``memory(compiled).temporaries`` with the pieces too.

    Args:
      compiled: what ``.lower(...).compile()`` returns, for example of an initialiser.
      tree: a pytree of arrays, or of ``jax.ShapeDtypeStruct`` with shardings, as they
        should lie; a Flax module or variable is one.

    Raises:
      AssertionError: a full copy, with the leaf's path, its shape and the program's line.
      ValueError: no leaf is left to check; or the shape found is also that of another
        leaf's piece, so that shapes cannot tell (choose sizes that differ).
      TypeError: a program that is not compiled; a leaf that lies nowhere.
    """
    full: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}
    pieces: dict[tuple[int, ...], str] = {}
    text = program_text(compiled)
    for path, leaf in placed_leaves(tree):
        shape = tuple(leaf.shape)
        piece = tuple(leaf.sharding.shard_shape(shape))
        pieces.setdefault(_dimensions(piece), path or "the array")
        if piece != shape:
            full.setdefault(_dimensions(shape), (path or "the array", shape))
    if not full:
        raise ValueError(
            "nothing to check, every leaf is whole on every device: pass arrays, or "
            "jax.ShapeDtypeStructs with shardings, of which at least one is split"
        )
    for instruction in hlo.parse(text).instructions():
        for found in {_dimensions(dims) for _, dims in instruction.arrays} & set(full):
            path, shape = full[found]
            line = re.sub(r",? (metadata|\w+_config)=\{.*", "", instruction.line)
            if found in pieces:
                raise ValueError(
                    f"cannot tell whether this is {path}, of shape {shape_text(shape)}, "
                    f"or a piece of {pieces[found]}; choose other sizes: {line}"
                )
            raise AssertionError(
                f"{path} has its full shape {shape_text(shape)} in the program: {line}"
            )


def _dimensions(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))
