"""The built site in the system's Chromium, driven by Playwright.

No browser is ever downloaded. The site is served as GitHub Pages serves it: below the path of its
address, with 404.html for what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.async_api import Browser, Page, async_playwright

from bookkit.model.book import Problem

# The first has no window of its own to draw, so that a page takes a quarter less.
BROWSERS = [
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable"),
]
ELSEWHERE = ["/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
HOW = "Debian and Ubuntu: sudo apt-get install chromium (elsewhere Chrome will do)"
# Without this, headless Chromium says that the machine has no mouse.
MOUSE = (
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,"
    "availablePointerTypes=4"
)


def chromium() -> str | None:
    """The browser of this system, or the one that the variable CHROMIUM names."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    found = filter(None, map(shutil.which, [*BROWSERS, *ELSEWHERE]))
    return next(found, None)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Browser]:
    """One headless browser; whoever has none is told how to get it."""
    path = chromium()
    if path is None:
        raise Problem(f"No Chromium was found. {HOW}")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--hide-scrollbars", MOUSE]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


class Pages(http.server.SimpleHTTPRequestHandler):
    """Files below a path, and 404.html for all else."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *about: Any, path: str, **more: Any) -> None:
        self.below = path
        super().__init__(*about, **more)

    def translate_path(self, path: str) -> str:
        asked = unquote(urlsplit(path).path)
        if not asked.startswith(self.below):
            return str(Path(self.directory, "no-such-file"))
        return super().translate_path("/" + asked.removeprefix(self.below))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        page = Path(self.directory, "404.html")
        if code != 404 or not page.is_file():
            return super().send_error(code, message, explain)
        body = page.read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A browser that closes a page hangs up: nothing to report."""


@contextlib.contextmanager
def serving(site: Path, path: str = "/") -> Iterator[str]:
    """The address, with a slash at its end, under which the site's files are while this lasts."""
    handler = functools.partial(Pages, directory=str(site), path=path)
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{path}"
        finally:
            server.shutdown()


def watch(page: Page, site: str) -> list[str]:
    """What goes wrong on a page while it is open: this list grows."""
    wrong: list[str] = []
    host = "{0.scheme}://{0.netloc}/".format(urlsplit(site))

    def asked(url: str) -> None:
        if not url.startswith((host, "data:", "blob:")):
            wrong.append(f"asks another host: {url}")

    def said(kind: str, text: str, url: str) -> None:
        if kind in ("error", "warning"):
            wrong.append(f"console: {text} {url}".rstrip())

    def failed(url: str, why: str) -> None:
        if why != "net::ERR_ABORTED":  # the browser cancels what it still loads on leaving a page
            wrong.append(f"{url} did not come: {why}")

    page.on("request", lambda request: asked(request.url))
    page.on("console", lambda message: said(message.type, message.text, message.location["url"]))
    page.on("pageerror", lambda error: wrong.append(f"error in a script: {error}"))
    page.on("requestfailed", lambda one: failed(one.url, one.failure or "no reason given"))
    return wrong


async def visit(page: Page, url: str) -> None:
    """Open a page and wait until its fonts stand."""
    await page.goto(url)
    await page.evaluate("document.fonts.ready.then(() => true)")


async def too_wide(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    return int(
        await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
    )
