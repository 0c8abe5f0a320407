"""One browser and one server for all checks of the built site, or a word on why they are left out.

BROWSER=required, as in .ci/run, makes a failure of what is otherwise left out.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from built import BELOW, SITE, lacking
from chromium import HOW, chromium, opened, serving


def leave_out(why: str) -> None:
    if os.environ.get("BROWSER") == "required":
        pytest.fail(f"BROWSER=required, and {why}", pytrace=False)
    pytest.skip(why)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out, and why: a run without a browser is no run of everything."""
    skipped = [
        one for one in terminalreporter.stats.get("skipped", ()) if "tests/browser/" in one.nodeid
    ]
    reasons = Counter(one.longrepr[2].removeprefix("Skipped: ") for one in skipped)
    for why, many in reasons.items():
        terminalreporter.write_line(
            f"tests/browser: {many} checks of the built site were left out: {why}", yellow=True
        )


@pytest.fixture(scope="session")
def site_folder() -> Path:
    if why := lacking():
        leave_out(why)
    return SITE


@pytest.fixture(scope="session")
def browsing():
    """run(coroutine) in the loop that the browser lives in, and the browser."""
    if chromium() is None:
        leave_out(f"no Chromium was found. {HOW}")
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    browser = loop.run_until_complete(stack.enter_async_context(opened()))
    yield loop.run_until_complete, browser
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.fixture(scope="session")
def site(site_folder: Path) -> Iterator[str]:
    """The address of the built site."""
    with serving(SITE, BELOW) as address:
        yield address
