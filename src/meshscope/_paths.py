"""The leaves of a tree and what they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from . import _advice, _compat


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order; ValueError for a tree without any.

    The box around an array, such as an ``nnx.Variable``, is no part of its path; a field
    that is called ``value`` is.
    """

    def stop(x: Any) -> bool:
        return _is_box(x) or (is_leaf is not None and is_leaf(x))

    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if not _is_box(leaf):
            found.append((_path(keys), leaf))
            continue
        inside = jax.tree_util.tree_flatten_with_path(leaf, is_leaf=is_leaf)[0]
        for more, array in inside:
            found.append((_path(keys if len(inside) == 1 else (*keys, *more)), array))
    if not found:
        raise ValueError("the tree has no leaves: pass arrays, or a tree of arrays")
    return found


def _path(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def _is_box(x: Any) -> bool:
    # Flax is not needed, and so not imported: its classes are known by name.
    boxes = {"Variable": "flax.nnx", "AxisMetadata": "flax.core"}
    return any(c.__module__.startswith(boxes.get(c.__name__, "\0")) for c in type(x).__mro__)


def placed_leaves(tree: Any, wanted: str = _advice.TREE) -> list[tuple[str, Any]]:
    """(path, array) of every leaf; TypeError for a leaf that has no place on devices."""
    found = leaves(tree)
    for path, leaf in found:
        if not _is_placed(leaf):
            raise TypeError(_advice.says(leaf, _advice.TREE if path else wanted, path))
    return found


def _is_placed(leaf: Any) -> bool:
    """Does it have a shape, and a sharding that says where its pieces are?"""
    if isinstance(leaf, _compat.Tracer):
        return False
    if isinstance(leaf, _compat.ShapedArray):
        return _compat.is_explicit(leaf)
    return getattr(leaf, "sharding", None) is not None and hasattr(leaf, "shape")
