"""Photograph a page of the built site with Chromium, and say what is wrong with it in a browser.

    bookkit screenshot book/01-mesh.html mesh.png --width 390 --dark

Needs Chromium or Chrome (Debian: apt install chromium); nothing else asks for it. Reports console
errors, requests to other hosts and pages that are wider than the window, and fails if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import http.server
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

from bookkit.model.book import Problem, find_root

BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
QUIET = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-sync
    --remote-debugging-port=0 about:blank""".split()


# Without this, headless Chromium says that the machine has no mouse.
MOUSE = """--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,
    availablePointerTypes=4""".replace("\n    ", "")


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Tab:
    """One tab, spoken to in the DevTools protocol."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self.socket, self.numbers = socket, itertools.count(1)
        self.events: list[dict[str, Any]] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.write_message(
            json.dumps({"id": number, "method": method, "params": params})
        )
        while True:
            message = await self.read()
            if message.get("id") == number:
                if "error" in message:
                    raise Problem(f"Chromium refused {method}: {message['error']['message']}")
                return message["result"]

    async def read(self) -> dict[str, Any]:
        text = await self.socket.read_message()
        if text is None:
            raise Problem("Chromium closed the page: is there enough memory?")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    async def value(self, expression: str) -> Any:
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")


async def photograph(port: int, site: str, options: argparse.Namespace) -> tuple[bytes, list[str]]:
    from tornado.httpclient import AsyncHTTPClient, HTTPRequest

    request = HTTPRequest(f"http://127.0.0.1:{port}/json/new?about:blank", "PUT", body="")
    tab = json.loads((await AsyncHTTPClient().fetch(request)).body)
    page = Tab(await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=2**28))
    for domain in ("Page", "Runtime", "Network", "Log"):
        await page.send(f"{domain}.enable")
    size = {"width": options.width, "height": options.height}
    phone = options.width < 600
    await page.send(
        "Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=options.scale, mobile=phone
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if options.dark else "light"}
    await page.send("Emulation.setEmulatedMedia", features=[scheme])
    await page.send("Page.navigate", url=f"{site}/{options.page}")
    while not any(event["method"] == "Page.loadEventFired" for event in page.events):
        await page.read()
    await page.value("document.fonts.ready.then(() => true)")
    if options.at:
        found = await page.value(
            f"(e => (e?.scrollIntoView({{behavior: 'instant'}}), !!e))"
            f"(document.querySelector({json.dumps(options.at)}))"
        )
        if not found:
            raise Problem(f"{options.page} has nothing that matches {options.at!r}")
    await asyncio.sleep(0.5)
    wide = await page.value("document.documentElement.scrollWidth - innerWidth")
    wrong = [f"the page is {wide} px wider than the window"] if wide > 0 else []
    picture = await page.send("Page.captureScreenshot", captureBeyondViewport=options.full,
                              **(await whole(page) if options.full else {}))  # fmt: skip
    for event in page.events:
        what, about = event["method"], event["params"]
        if what == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith((site, "data:", "blob:")):
                wrong.append(f"asks another host: {url}")
        elif what == "Runtime.exceptionThrown":
            wrong.append(f"error in a script: {about['exceptionDetails']['text']}")
        elif what == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            wrong.append(f"console: {about['entry']['text']} {about['entry'].get('url', '')}")
        elif what == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            words = " ".join(str(arg.get("value", "")) for arg in about["args"])
            wrong.append(f"console: {words}")
    return base64.b64decode(picture["data"]), wrong


async def whole(page: Tab) -> dict[str, Any]:
    height = await page.value("document.documentElement.scrollHeight")
    width = await page.value("innerWidth")
    return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}


def browse(site: str, options: argparse.Namespace) -> tuple[bytes, list[str]]:
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        raise Problem("No Chromium found. Debian: sudo apt install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        mouse = [] if options.width < 600 else [MOUSE]
        command = [chromium, *QUIET[:-1], *mouse, f"--user-data-dir={profile}", QUIET[-1]]
        browser = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            assert browser.stderr is not None
            for line in browser.stderr:
                if "DevTools listening on" in line:
                    port = int(line.split("127.0.0.1:")[1].split("/")[0])
                    break
            else:
                raise Problem("Chromium did not start")
            threading.Thread(target=browser.stderr.read, daemon=True).start()
            return asyncio.run(photograph(port, site, options))
        finally:
            browser.terminate()
            browser.wait(10)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bookkit screenshot", description=__doc__.split("\n")[0])
    parser.add_argument("page", help="below the site's root, such as book/01-mesh.html")
    parser.add_argument("out", type=Path, help="the picture to write (PNG)")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--scale", type=float, default=1, help="pixels per CSS pixel")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--full", action="store_true", help="the whole page, not one window")
    parser.add_argument("--at", metavar="SELECTOR", help="scroll to this element first")
    parser.add_argument("--site", type=Path, default=find_root() / "_build" / "html")
    options = parser.parse_args(arguments)
    if not (options.site / options.page.split("?")[0].split("#")[0]).is_file():
        raise Problem(f"{options.site} has no {options.page}: run `make site` first")
    handler = functools.partial(Handler, directory=str(options.site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        picture, wrong = browse(f"http://127.0.0.1:{server.server_port}", options)
        server.shutdown()
    options.out.write_bytes(picture)
    print(f"{options.out}: {len(picture):,} bytes")
    for line in wrong:
        print(f"{options.page}: {line}", file=sys.stderr)
    return 1 if wrong else 0
