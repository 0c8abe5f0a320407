"""Trace and compile one candidate, and note what it takes: a record that JSON can hold."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from . import _hlo as hlo
from . import _work as work
from ._collectives import collectives
from ._memory import memory
from ._plan_candidates import Candidate
from ._plan_compilers import QUICK
from ._plan_flops import traced_flops
from ._plan_results import Record, Results
from ._plan_step import as_step

MEMORY = ("arguments", "outputs", "temporaries", "aliased")
_INDIVISIBLE = re.compile(
    r"(?:key path (\S+) )?was given the sharding.* implies that array axis (\d+) is partitioned "
    r"(\d+) times, but the dimension size is (\d+)"
)
LONGEST = 200  # characters of an error that are shown
AS_STORED = 1  # of the form of a record: another number is compiled anew


def measure(
    make: Callable[[Mesh, dict[str, Any]], Any],
    candidate: Candidate,
    devices: Sequence[Any],
    compiler: str,
    explicit: bool,
    results: Results,
) -> Record:
    """The record of a candidate: from ``results`` if the same program is there, else compiled.

    An exception, of the callable or of the compiler, becomes the record's ``error``.
    """
    began = time.process_time()
    kind = AxisType.Explicit if explicit else AxisType.Auto
    record: Record = {
        "digest": "",
        "table": candidate.table,
        "rules": candidate.rules,
        "mesh": candidate.mesh,
        "compiler": compiler,
        "jax": jax.__version__,
    }
    try:
        sizes = tuple(candidate.mesh.values())
        used = devices[: math.prod(sizes)]
        kinds = (kind,) * len(sizes)
        mesh = _mesh(sizes, tuple(candidate.mesh), kinds, used)
        with jax.set_mesh(mesh):
            step = as_step(make(mesh, dict(candidate.rules)))
            lowered = step.traced.lower()
            record["digest"] = _digest(lowered.as_text(), record)
            expected = step.expected(mesh)
            record["expected"] = expected and [
                [kind, list(axes), size] for (kind, axes), size in expected.items()
            ]
            record["batch"] = [step.batch] if isinstance(step.batch, str) else step.batch
            if stored := results.records.get(record["digest"]):
                # The closed form is not a part of the program, and may be another one today.
                return {**stored, **{key: record[key] for key in ("expected", "batch")}}
            record["traced_flops"] = traced_flops(step.traced.jaxpr)
            with results.running(record):
                compiled = lowered.compile(QUICK if compiler == "cpu" else None)
            _read(compiled, mesh, record)
    except Exception as error:
        record["error"] = told(error)
        record["digest"] = record["digest"] or _digest("", record)
    record["seconds"] = round(time.process_time() - began, 2)
    if record["digest"] not in results.records:
        results.add(record)
    return record


def _mesh(
    sizes: tuple[int, ...],
    axes: tuple[str, ...],
    kinds: tuple[AxisType, ...],
    devices: Sequence[Any],
) -> Mesh:
    try:
        return jax.make_mesh(sizes, axes, axis_types=kinds, devices=devices)
    except NotImplementedError:  # an axis that fills no axis of the TPUs' torus
        grid = create_device_mesh(sizes, list(devices), allow_split_physical_axes=True)
        return Mesh(grid, axes, axis_types=kinds)


def _read(compiled: Any, mesh: Mesh, record: Record) -> None:
    """Add what a compiled program takes: memory, what it sends, operations on one device."""
    found = memory(compiled)
    record["memory"] = {name: getattr(found, name) for name in MEMORY}
    with warnings.catch_warnings(record=True) as unread:
        warnings.simplefilter("always")
        table = collectives(compiled, mesh).by("kind", "within")
    record["unread"] = len(unread)
    record["sent"] = [
        [kind, list(axes), total.payload_bytes, total.wire_bytes]
        for (kind, axes), total in table.items()
    ]
    program = hlo.parse(str(compiled.as_text()), trusted=True)
    record["flops"] = work.inside(program, program.entry).flops


def _digest(text: str, record: Record) -> str:
    """The same for the same program, compiled by the same release for the same machine."""
    parts = [text, record["compiler"], record["jax"], str(AS_STORED)]
    if not text:
        parts += [record["table"], str(record["rules"]), str(record["mesh"]), record["error"]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def told(error: BaseException) -> str:
    """An exception in one line, with the line of the caller's own code that raised it."""
    text = next(iter(str(error).strip().splitlines()), "")
    if found := _INDIVISIBLE.search(text):
        where = f"{found[1]}: " if found[1] else ""
        text = f"{where}dimension {found[2]} has size {found[4]}, not divisible by {found[3]}"
    if len(text) > LONGEST:  # what is wrong is said at the start, and what of, at the end
        text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    here, installed = os.path.dirname(__file__), sysconfig.get_paths()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folder = os.path.dirname(frame.filename)
        outside = (here, installed["purelib"], installed["stdlib"])
        if not any(folder.startswith(part) for part in outside) and "<" not in frame.filename:
            text = f"{text} ({os.path.basename(frame.filename)}:{frame.lineno})"
            break
    return f"{type(error).__name__}: {text}".strip()
