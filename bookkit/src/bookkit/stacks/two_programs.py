"""Inside the process that runs a page's cells: one of its programs, compiled for CPU and for TPU.

A job of bookkit/run/cells.py runs, after a page's own cells, a cell that calls `note`. It evaluates
the code that makes the program, lowers that for TPU, and writes what each compiler made of it.
libtpu is only looked for where BOOK_LIBTPU says; without it the program is lowered, not compiled.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBTPU = "BOOK_LIBTPU"  # the folder that libtpu was installed into
QUIET = {  # libtpu asks no cloud where it is, and writes no logs into /tmp
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def helpers(root: Path) -> dict[str, Any]:
    """The functions of the shared cell that chapters have, under their names."""
    import jax

    names: dict[str, Any] = {"jax": jax}
    path = root / "book" / "cells" / "compilers.py"
    exec(compile(path.read_text("utf-8"), str(path), "exec"), names)
    return names


class Recorder:
    """jax.jit, which notes what is lowered while code makes a program."""

    def __init__(self, jit: Callable[..., Any], lower: Callable[..., Any]) -> None:
        self.jit, self.to_tpu = jit, lower
        self.seen: list[tuple[Any, list[int] | None, Any]] = []

    def __call__(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda function: self(function, **options)
        # The jitted function itself, as JAX asks it for more than a wrapper would answer.
        jitted = self.jit(function, **options)
        plain = jitted.lower

        def lower(*inputs: Any) -> Any:
            jitted.lower = plain
            found = plain(*inputs)
            self.seen.append((self.to_tpu(jitted, *inputs), order_of(inputs), found))
            return found

        jitted.lower = lower
        return jitted


def order_of(inputs: Any) -> list[int] | None:
    """The ids of the devices of the inputs' mesh, if they are not in order."""
    import jax

    for leaf in jax.tree.leaves(inputs):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            ids = [device.id for device in mesh.devices.flat]
            return None if ids == sorted(ids) else ids
    return None


@contextlib.contextmanager
def recording(lower: Callable[..., Any]) -> Iterator[Recorder]:
    import jax

    recorder = Recorder(jax.jit, lower)
    jax.jit = recorder
    try:
        yield recorder
    finally:
        jax.jit = recorder.jit


def evaluated(code: str, names: dict[str, Any]) -> Any:
    """Run the lines of `code` among a page's names; the value of its last line."""
    tree = ast.parse(code.strip(), "<make>")
    last = tree.body.pop()
    if not isinstance(last, ast.Expr):
        raise ValueError("the last line of `make` is to be an expression")
    exec(compile(tree, "<make>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<make>", "eval"), names)


def made(code: str, names: dict[str, Any], lower: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """The program lowered for TPU, the order of its devices, and the one compiled for CPU."""
    import jax

    with recording(lower) as recorder:
        value = evaluated(code, names)
    if isinstance(value, tuple) and value and callable(value[0]):
        function, *inputs = value
        lowered = lower(function, *inputs)
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        return lowered, order_of(inputs), jitted.lower(*inputs).compile()
    if len(recorder.seen) != 1:
        raise ValueError(f"lowers {len(recorder.seen)} programs with jax.jit; it is to lower one")
    lowered, order, for_cpu = recorder.seen[0]
    return lowered, order, value if isinstance(value, jax.stages.Compiled) else for_cpu.compile()


def account(program: Any, mesh: Any) -> dict[str, Any]:
    """What a compiler made: what moves, by kind, axes and dtype, and bytes of memory."""
    import meshscope as ms

    totals = ms.collectives(program, mesh).by("kind", "axes", "dtype")
    memory = ms.memory(program)
    return {
        "moves": [
            {
                "kind": kind,
                "axes": list(axes),
                "dtype": dtype,
                "executions": total.executions,
                "payload": total.payload_bytes,
                "wire": total.wire_bytes,
            }
            for (kind, axes, dtype), total in sorted(totals.items())
        ],
        "memory": {
            part: getattr(memory, part)
            for part in ("arguments", "outputs", "temporaries", "aliased")
        },
    }


def compiled_for_tpu(tools: dict[str, Any], lowered: Any, order: Any, mesh: Any) -> dict[str, Any]:
    import jax

    folder = os.environ[LIBTPU]
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return account(tools["compiled_for_tpu"](lowered, order), mesh)
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error).strip().splitlines()[0]}


def note(root: str, code: str, target: str) -> None:
    """Write what the compilers make of the program that `code` makes among a page's names."""
    import jax

    page: types.ModuleType = sys.modules["__main__"]
    tools = helpers(Path(root))
    lowered, order, on_cpu = made(code, page.__dict__, tools["for_tpu"])
    sizes = tools["sizes_of"](lowered)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    found = {"hash": tools["digest"](lowered), "mesh": sizes, "cpu": account(on_cpu, mesh)}
    if os.environ.get(LIBTPU):
        found["tpu"] = compiled_for_tpu(tools, lowered, order, mesh)
    Path(target).write_text(json.dumps(found), "utf-8")
