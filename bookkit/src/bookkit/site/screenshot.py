"""Photograph a page of the built site with Chromium, and say what is wrong with it in a browser.

    bookkit screenshot book/01-mesh.html mesh.png --width 390 --dark

Needs Chromium or Chrome (Debian: apt-get install chromium). Reports console errors, requests to
other hosts and pages that are wider than the window, and fails if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from bookkit.model.book import Problem, find_root
from bookkit.site.browser import opened, serving, too_wide, visit, watch


async def photograph(site: str, options: argparse.Namespace) -> tuple[bytes, list[str]]:
    phone = options.width < 600
    async with opened() as browser:
        page = await browser.new_page(
            viewport={"width": options.width, "height": options.height},
            device_scale_factor=options.scale,
            is_mobile=phone,
            has_touch=phone,
            color_scheme="dark" if options.dark else "light",
        )
        wrong = watch(page, site)
        await visit(page, site + options.page)
        if options.at:
            there = page.locator(options.at).first
            if not await there.count():
                raise Problem(f"{options.page} has nothing that matches {options.at!r}")
            await there.evaluate("one => one.scrollIntoView({behavior: 'instant'})")
        await page.wait_for_timeout(500)  # what moves comes to rest
        if (wide := await too_wide(page)) > 0:
            wrong.append(f"the page is {wide} px wider than the window")
        return await page.screenshot(full_page=options.full), wrong


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
    with serving(options.site) as site:
        picture, wrong = asyncio.run(photograph(site, options))
    options.out.write_bytes(picture)
    print(f"{options.out}: {len(picture):,} bytes")
    for line in wrong:
        print(f"{options.page}: {line}", file=sys.stderr)
    return 1 if wrong else 0
