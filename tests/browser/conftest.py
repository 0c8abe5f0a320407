"""One browser and one server for all checks of the built site, or a word on why they are left out.

BROWSER=required, as in .ci/run, makes a failure of what is otherwise left out.
"""

from __future__ import annotations

import asyncio
import os
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
