"""What to pass in place of what an instrument cannot take: one table for all of them.

Every function that takes arrays, a tree, a program or a mesh asks here what to say when it gets
something else, so that the same thing gets the same answer everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from . import _compat

COMPILE = "jax.jit(f).lower(...).compile()"
SHAPE = "jax.ShapeDtypeStruct(shape, dtype, sharding={})"
NAMED = "jax.NamedSharding(mesh, spec)"

# What an instrument wants, in words, and the advice where the table has none for what it got.
MEMORY, TREE, PROGRAM, DRAWING, MESH = "memory", "tree", "program", "drawing", "mesh"
WANTED = {
    MEMORY: (
        "an array on devices or a compiled program",
        "pass a jax.Array, a jax.ShapeDtypeStruct with a sharding, a tree of these, or "
        f"a compiled program, {COMPILE}",
    ),
    TREE: (
        "an array on devices",
        "pass a jax.Array, a jax.ShapeDtypeStruct with a sharding, or a tree of these",
    ),
    PROGRAM: ("a compiled program", f"pass {COMPILE}"),
    DRAWING: (
        "an array on devices",
        "pass an array (of a function: its result), a jax.ShapeDtypeStruct with a sharding, "
        "(shape, sharding), a mesh, or a tree of these",
    ),
    MESH: ("a mesh", "pass a jax.sharding.Mesh or AbstractMesh"),
}


@dataclass(frozen=True)
class Kind:
    """One kind of thing: how it is recognised, its name, and what to pass instead of it."""

    matches: Callable[[Any], bool]
    name: str  # {type} is the name of its class
    instead: Mapping[str, str] = field(default_factory=dict)


def _arrays(advice: str, **others: str) -> dict[str, str]:
    """The same advice for both functions that take a tree."""
    return {MEMORY: advice, TREE: advice, **others}


def _programs(advice: str, **others: str) -> dict[str, str]:
    """The same advice for every function that takes a program, which ``memory`` does, too."""
    return {MEMORY: advice, PROGRAM: advice, **others}


def _of(*classes: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, classes)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda x: any(hasattr(x, name) for name in names) and _is_leaf(x)


def _called(package: str, *names: str) -> Callable[[Any], bool]:
    """By the name of a class, which needs no import and stands wherever a release puts it."""
    return lambda x: any(
        c.__module__.startswith(package) and c.__name__ in names for c in type(x).__mro__
    )


def _is_leaf(x: Any) -> bool:
    # A tree may have attributes of any name, as nnx.Rngs does, and no program is a tree.
    found = jax.tree.leaves(x)
    return len(found) == 1 and found[0] is x


def is_compiled(x: Any) -> bool:
    """Is it a compiled program?"""
    return hasattr(x, "as_text") and hasattr(x, "memory_analysis") and _is_leaf(x)


def _is_program_text(x: Any) -> bool:
    # XLA's own (HloModule, also without the line that says so) or StableHLO.
    begins = r"\s*(HloModule |(ENTRY )?%?[\w.\-]+ \(.*->|module @|#loc)"
    return isinstance(x, str) and re.match(begins, x) is not None


def _is_shape_and_spec(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and isinstance(x[1], PartitionSpec)


_OUTPUT = "pass what it returns, or (shape, sharding) of one of its outputs"
_TRACED = (
    "call this on what the jitted function returns or, where every axis of the mesh is Explicit, "
    "pass jax.typeof(x)"
)
_HOST = (np.ndarray, np.generic, int, float, complex)

KINDS = (  # the first that matches
    Kind(
        _of(_compat.Tracer),
        "a traced array",
        _arrays(_TRACED, program=f"outside of the function that is traced, pass {COMPILE}"),
    ),
    Kind(
        _of(_compat.ShapedArray),
        "the type of an array",
        _arrays(
            "a type says where an array is only if every axis of its mesh is Explicit, and "
            "here the compiler chooses: pass what the jitted function returns"
        ),
    ),
    Kind(
        is_compiled,
        "a compiled program",
        {
            TREE: "pass arrays here; a program goes by itself, memory(compiled), or first, "
            "full_copies(compiled, tree)",
            DRAWING: _OUTPUT,
            MESH: "pass the program first, collectives(compiled, mesh)",
        },
    ),
    Kind(
        _is_program_text,
        "the text of a program",
        {MEMORY: f"pass the program itself, {COMPILE}", DRAWING: _OUTPUT},
    ),
    Kind(
        _of(str),
        "a string",
        _arrays(
            "pass the array itself, not its name, and leave strings out of a tree",
            drawing="pass the array itself, not its name, and leave strings out of a tree",
        ),
    ),
    Kind(
        _of(bytes, bytearray),
        "bytes",
        _programs(
            "if they are a serialized Exported, pass "
            "jax.jit(jax.export.deserialize(data).call).lower(...).compile()"
        ),
    ),
    Kind(
        _called("jax", "Exported"),
        "an Exported",
        _programs(
            "pass jax.jit(exported.call).lower(...).compile(), with arguments on "
            "exported.nr_devices devices",
            drawing=_OUTPUT,
        ),
    ),
    Kind(
        _called("jax", "Jaxpr", "ClosedJaxpr"),
        "a jaxpr",
        _programs(f"pass {COMPILE}, where f is the function that was traced", drawing=_OUTPUT),
    ),
    Kind(
        _of(Mesh, AbstractMesh),
        "a mesh",
        _arrays(f"pass arrays that are on it, or {SHAPE.format(NAMED)}"),
    ),
    Kind(
        _of(Sharding),
        "a sharding",
        _arrays(
            f"pass {SHAPE.format('sharding')}",
            drawing="pass (shape, sharding)",
            mesh="pass its mesh, sharding.mesh",
        ),
    ),
    Kind(
        _of(PartitionSpec),
        "a partition spec",
        _arrays(f"pass {SHAPE.format(NAMED)}", drawing=f"pass (shape, {NAMED})"),
    ),
    Kind(
        _is_shape_and_spec,
        "a shape and a partition spec",
        _arrays(f"pass {SHAPE.format(NAMED)}", drawing=f"pass (shape, {NAMED})"),
    ),
    Kind(
        _called("jax", "Format"),
        "a Format",
        _arrays(
            f"pass {SHAPE.format('format')}",
            drawing="pass (shape, format.sharding)",
            mesh="pass its mesh, format.sharding.mesh",
        ),
    ),
    Kind(
        _has("as_text", "compile"),
        "of type {type}",
        _programs("call .compile() first", drawing=_OUTPUT),
    ),
    Kind(
        _has("lower"),
        "of type {type}",
        _programs("call .lower(...).compile() first", tree="pass what it returns", drawing=_OUTPUT),
    ),
    Kind(
        _called("flax", "Module"),
        "a Flax module that is not a pytree",
        _arrays(
            "pass its variables: nnx.state(module), or what the init of a Linen module returns",
            drawing="pass its variables: nnx.state(module), or what the init of a Linen module "
            "returns",
        ),
    ),
    Kind(
        lambda x: callable(x) and _is_leaf(x),
        "a function",
        _programs(f"pass {COMPILE}", tree="pass what it returns"),
    ),
    Kind(
        _called("meshscope", "Report", "Drawing"),
        "a result of meshscope",
        dict.fromkeys(WANTED, "pass what it was made from"),
    ),
    Kind(
        lambda x: isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None,
        "a jax.ShapeDtypeStruct without a sharding",
        _arrays(f"pass {SHAPE.format('sharding')}", drawing=f"pass {SHAPE.format('sharding')}"),
    ),
    Kind(
        _of(*_HOST),
        "of type {type} and on the host",
        _arrays(
            f"pass jax.device_put(x, sharding), or {SHAPE.format('sharding')}",
            drawing="pass jax.device_put(x, sharding), or (shape, sharding)",
        ),
    ),
    Kind(lambda x: True, "of type {type}"),
)


def says(x: Any, wanted: str, path: str = "") -> str:
    """What something is, what was wanted, and what to pass instead.

    >>> print(says(3.0, TREE, "lr"))
    lr is of type float and on the host, not an array on devices: pass jax.device_put(x, ...

    Args:
      x: what was passed, or one leaf of it.
      wanted: what the instrument wants: a key of ``WANTED``.
      path: of the leaf in its tree; ``""`` for a single array.
    """
    kind = next(kind for kind in KINDS if kind.matches(x))
    name = kind.name.format(type=type(x).__name__)
    what, advice = WANTED[wanted]
    return f"{path or 'this'} is {name}, not {what}: {kind.instead.get(wanted, advice)}"
