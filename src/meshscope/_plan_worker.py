"""The process that `meshscope plan` compiles in: it loads the file, plans and shows the tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ._plan import Plan, plan
from ._plan_command import failed
from ._plan_measure import told
from ._plan_outcome import Outcome, digits

BAR = 20  # characters of a full progress bar


class Unusable(Exception):
    """The file does not define what a plan needs, in one sentence."""


def load(path: Path) -> Any:
    """The module that a file defines; Unusable where it raises, or lacks a name."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Unusable(f"{path} is not a Python file: give one that defines `step` and TABLES")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Unusable(f"{path} cannot be loaded: {told(error)}") from None
    if not callable(getattr(module, "step", None)):
        raise Unusable(f"{path} defines no function step(mesh, rules): add it")
    tables = getattr(module, "TABLES", None)
    named = isinstance(tables, dict) and all(isinstance(rules, dict) for rules in tables.values())
    if not named:
        example = '{"FSDP": {"batch": "data", "embed": "data"}}'
        raise Unusable(f"{path} defines no TABLES, rules by the name of a table: add {example}")
    return module


class Progress:
    """A bar on stderr: of one line on a terminal, and elsewhere a line for each candidate."""

    def __init__(self, parent: int) -> None:
        self.parent, self.began = parent, time.monotonic()

    def __call__(self, done: int, count: int, outcome: Outcome) -> None:
        if os.getppid() != self.parent:
            sys.exit(2)  # whoever asked for this has gone
        full = BAR * done // count
        left = (time.monotonic() - self.began) / done * (count - done)
        state = "failed" if outcome.error else f"{outcome.seconds:.1f} s"
        line = f"[{'#' * full}{'.' * (BAR - full)}] {done}/{count}, about {left:.0f} s left: "
        line += f"{outcome.table}, {outcome.where}, {state}"
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        end = "\n" if done == count else ""
        print(f"\r{line[:width]:{width}}", end=end, file=sys.stderr, flush=True)


def planned(given: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for."""
    module = load(Path(given.file))
    return plan(
        module.step,
        module.TABLES,
        given.devices,
        axes=getattr(module, "AXES", None),
        chip=given.chip,
        hbm=given.hbm,
        compiler=given.compiler,
        explicit=given.explicit,
        results=given.results,
        progress=Progress(given.parent),
    )


def main(asked: str) -> int:
    """Plan as `_plan_command` asks, in JSON; the exit status."""
    given = argparse.Namespace(**json.loads(asked))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what that file prints, too
            found = planned(given)
        if given.picture:
            found.drawing.save(given.picture)
    except (Unusable, ValueError, RuntimeError, OSError) as error:
        return failed(str(error).strip().splitlines()[0])
    except KeyboardInterrupt:
        return 130
    print(found)
    if not found.fitting:
        sizes = [one for one in found.outcomes if one.bytes_per_device is not None]
        if not sizes:
            return failed("no candidate has a program: the last table says why", 1)
        size = digits((sizes[0].bytes_per_device or 0) / 1e9)
        nearest = f"{sizes[0].table}, {sizes[0].where},"
        return failed(f"nothing fits: {nearest} comes nearest, with {size} GB", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
