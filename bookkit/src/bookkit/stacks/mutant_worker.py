"""A process that tries meshscope's tests on one planted fault after another.

From one fault to the next everything stays imported and every program stays compiled: in the function
that holds the fault, the code alone is exchanged. (Forks, one for each fault as mutmut makes them, hang
once JAX has threads; new processes would import JAX thousands of times.)
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

if sys.platform == "win32":
    raise ImportError("faults are planted in meshscope on Linux only")

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "MESHSCOPE_FEWER_EXAMPLES": "20",  # tests/meshscope/effort.py
    # A program that was compiled once is read; its source lines are part of what is tested.
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
MEMORY = 4 << 30  # bytes that a test with a fault may take beyond what was taken before
Tests = Sequence[tuple[str, float]]  # with their seconds


class Hung(BaseException):
    """A test takes many times as long as without the fault. No `except Exception` stops this."""


def inner(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from inner(const)


def function_code(code: CodeType, name: str) -> CodeType:
    """The code of a function, by its qualified name; of overloads the last, which is the function."""
    return [c for c in inner(code) if c.co_qualname == name][-1]


def functions_of(space: ModuleType | type, module: str) -> dict[str, FunctionType]:
    """The functions, methods and properties that a module defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for value in vars(space).values():
        value = getattr(value, "fget", None) or getattr(value, "func", None) or value
        value = inspect.unwrap(getattr(value, "__func__", value))
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, FunctionType):
            found[value.__qualname__] = value
        elif isinstance(value, type) and value is not space:
            found |= functions_of(value, module)
    return found


class Runner:
    """A pytest plugin that runs the tests that it is asked for instead of all."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.failed = pipe, False
        self.items: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for verb, *order in iter(self.pipe.recv, None):
            self.pipe.send(("answer", getattr(self, verb)(*order)))
        return True

    def fails(self, name: str, seconds: float) -> bool:
        """Whether a test fails that took so long without a fault."""
        self.pipe.send(("running", name, seconds))
        self.failed, item = False, self.items[name]
        # Seconds of this process: those of a busy machine are no sign of a fault.
        signal.setitimer(signal.ITIMER_PROF, 5 + 20 * seconds)
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        except Hung:
            self.failed = True
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return self.failed

    def measure(self) -> dict[str, tuple[float, list[tuple[str, int]] | None]]:
        """Seconds of each test, and the lines of meshscope that it runs; None if it fails."""
        monitor: Any = getattr(sys, "monitoring")  # noqa: B009 - typed as on 3.11
        tool, lines, found = monitor.COVERAGE_ID, set(), {}

        def saw(code: CodeType, line: int) -> Any:
            lines.add((Path(code.co_filename).stem, line))
            return monitor.DISABLE  # until the next test

        monitor.use_tool_id(tool, "lines of meshscope")
        monitor.register_callback(tool, monitor.events.LINE, saw)
        for name, module in list(sys.modules.items()):
            for function in functions_of(module, name).values() if "meshscope." in name else ():
                for code in inner(function.__code__):
                    monitor.set_local_events(tool, code, monitor.events.LINE)
        for name in self.items:
            lines.clear()
            monitor.restart_events()
            began = time.process_time()
            failed = self.fails(name, 60)
            found[name] = (time.process_time() - began, None if failed else sorted(lines))
        monitor.free_tool_id(tool)
        return found

    def exchange(
        self, module: str, function: str, source: str, tests: Tests
    ) -> tuple[str | None, bool]:
        """The first test that fails with other code in a function, and whether it still does then."""
        imported = sys.modules[f"meshscope.{module}"]
        target = functions_of(imported, imported.__name__)[function]
        # The file's own name: tests look for it in tracebacks and warnings.
        code = compile(source, imported.__file__ or "", "exec", dont_inherit=True)
        before, pages = target.__code__, int(Path("/proc/self/statm").read_text().split()[5])
        import resource  # which Windows lacks

        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        target.__code__ = function_code(code, function)
        try:
            failed = next((name for name, seconds in tests if self.fails(name, seconds)), None)
        finally:
            target.__code__ = before
        return failed, failed is not None and self.fails(failed, 60)


def serve_tests(pipe: Connection, root: Path, cache: Path) -> None:
    """Collect meshscope's tests and run those that are asked for, until the pipe is closed."""
    os.chdir(root)
    os.environ |= {**SETTINGS, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    import hypothesis
    import pytest

    def hung(*_: Any) -> None:
        raise Hung

    signal.signal(signal.SIGPROF, hung)
    # No test remembers an example, and none looks for a smaller one once it failed.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "faults", phases=phases, database=None, deadline=None, derandomize=True
    )
    hypothesis.settings.load_profile("faults")
    options = ["-p", "no:cacheprovider", "--tb=no", "tests/meshscope"]
    pytest.main(options, plugins=[Runner(pipe)])
