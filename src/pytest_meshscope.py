"""The pytest plugin of meshscope: the fixture ``sharding_snapshot`` and ``--update-sharding``.

It is a module of its own because pytest imports it at every start. Importing meshscope imports JAX,
which reads its environment then, before a test file or conftest.py could say how many devices to
simulate. So meshscope is imported when the fixture is first called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = "sharding_snapshots"
_WRITTEN = pytest.StashKey[list[str]]()
_NAMES = pytest.StashKey[dict[Path, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-sharding``."""
    parser.getgroup("meshscope").addoption(
        "--update-sharding",
        action="store_true",
        help=f"write the files in {FOLDER}/ that sharding_snapshot compares programs with",
    )


@pytest.fixture
def sharding_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a compiled program with its snapshot, a file in sharding_snapshots/ beside the test.

    ``sharding_snapshot(compiled, name, mesh, tree=..., tolerance=...)``: the name is that of the
    file, by default that of the test; the rest is as in ``meshscope.testing.assert_snapshot``.
    """

    def check(compiled: Any, name: str = "", mesh: Any = None, **options: Any) -> None:
        from meshscope.testing import assert_snapshot

        __tracebackhide__ = True
        node, config = request.node, request.config
        stem = name or re.sub(r"[^\w.-]+", "-", node.name.removeprefix("test_")).strip("-")
        if not re.fullmatch(r"[\w.-]+", stem):
            raise ValueError(
                f"{stem!r} cannot be the name of a file: use letters, digits, _, - and ."
            )
        file = Path(node.path).parent / FOLDER / f"{stem}.txt"
        owner = config.stash.setdefault(_NAMES, {}).setdefault(file, node.nodeid)
        if owner != node.nodeid:
            raise ValueError(f"{owner} has a snapshot {stem!r} already: give this one another name")
        update = config.getoption("--update-sharding")
        if assert_snapshot(compiled, file, mesh, update=update, **options):
            config.stash.setdefault(_WRITTEN, []).append(str(file))

    return check


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which snapshots were written."""
    for file in config.stash.get(_WRITTEN, []):
        terminalreporter.write_line(f"sharding snapshot written: {file}")
