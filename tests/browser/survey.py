"""What a page of the built site does in a browser: one visit a page, everything that is wrong with it.

Each function takes an open page and yields sentences. `survey` visits many pages at once, in one
browser. What was judged once is not judged again: a pair of colours, a kind of fold on enough pages,
and the build of a page that its translation shares, with the classes and style sheets that its colours
come from.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from playwright.async_api import Browser, BrowserContext, Error, Page

from chromium import too_wide, visit, watch

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
PATIENCE = 180_000  # milliseconds: on a busy machine all is slow, and that is no fault of a page
LONGEST = (
    300  # seconds of one visit, a hundred times what it takes: nothing else ends a script's wait
)
FOLDS_PRESSED = 1  # of each kind on each page: a key press is a round trip
PAGES_PRESSED = 8  # for each kind: after these, a browser lays out pages for nothing

# Images load when they come into view: ask for all of them, and name those that do not come.
IMAGES = """async () => {
  const images = [...document.images];
  images.forEach((image) => { image.loading = "eager"; });
  await Promise.all(images.map((image) => image.decode().catch(() => null)));
  return images.filter((image) => !image.complete || !image.naturalWidth).map((image) => image.src);
}"""

# Follow each link into the page itself, and see that its target is there, in view, below the bar.
ANCHORS = """async () => {
  const here = (link) => link.hash && link.href.split("#")[0] === location.href.split("#")[0];
  const hashes = new Set([...document.querySelectorAll("a[href*='#']")].filter(here).map((link) => link.hash));
  const wrong = [];
  for (const hash of hashes) {
    const target = document.getElementById(decodeURIComponent(hash.slice(1)));
    if (!target) { wrong.push(`${hash} leads nowhere`); continue; }
    location.hash = hash;
    const { top, bottom } = target.getBoundingClientRect();
    const bar = document.querySelector(".topbar")?.getBoundingClientRect().bottom ?? 0;
    const atEnd = Math.ceil(scrollY + innerHeight) >= document.documentElement.scrollHeight - 1;
    if (!target.checkVisibility()) wrong.push(`${hash} leads to something hidden`);
    else if (top >= innerHeight || bottom < 0) wrong.push(`${hash} is out of view at ${Math.round(top)} px`);
    else if (top < bar - 1 && scrollY > 0 && !atEnd) wrong.push(`${hash} is hidden by the bar at the top`);
  }
  scrollTo(0, 0);
  return wrong;
}"""

IDS = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  return [...new Set(ids.filter((id, index) => ids.indexOf(id) !== index))];
}"""

# The first few folds of each kind: what the kind is, its class says.
FOLDS = """(many) => {
  const seen = {}, found = [];
  for (const fold of document.querySelectorAll("main details")) {
    const kind = fold.className || "plain";
    if (!fold.parentElement.closest("details:not([open])") && (seen[kind] = (seen[kind] || 0) + 1) <= many) {
      fold.dataset.pressed = found.length;
      found.push(fold.querySelector("summary")?.innerText.trim().slice(0, 60) || "");
    }
  }
  return found;
}"""

OPENED = (
    "(open) => document.querySelectorAll('main details').forEach((fold) => { fold.open = open; })"
)

# Two frames: what follows an event, such as the opening of a fold, has been done.
FRAMES = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""

# What print shows: nothing folded away, nothing of the frame, and the same colours from either scheme.
PRINTED = """() => {
  const content = (fold) => [...fold.children].filter((child) => child.tagName !== "SUMMARY");
  const shown = (element) => element.checkVisibility({ contentVisibilityAuto: true }) && element.getClientRects().length;
  // The setup cell stays folded. A sheet has its boxes only.
  const everywhere = ".tag_setup, .sheet .tag_hide-cell";
  const folds = [...document.querySelectorAll("main details")].filter((fold) => !fold.closest(everywhere));
  const folded = folds.filter((fold) => content(fold).some((child) => !shown(child)));
  const frame = [...document.querySelectorAll(".topbar, .contents, .toc, .turn, .page-actions, .copy")].filter(shown);
  return { folded: folded.map((fold) => fold.querySelector("summary")?.innerText.trim().slice(0, 60)),
           frame: [...new Set(frame.map((element) => element.className))] };
}"""
COLOURS = """() => Object.fromEntries([...document.documentElement.computedStyleMap()]
  .filter(([name]) => name.startsWith("--") || name === "color-scheme").map(([name, value]) => [name, String(value)]))"""

# A page has thousands of coloured words in code, of a dozen kinds: one of each kind is kept. Gradients
# at the edges of boxes would keep axe from judging what is on them.
FOR_AXE = """() => {
  const seen = new Set();
  for (const block of document.querySelectorAll("pre")) {
    const below = getComputedStyle(block).getPropertyValue("--under");
    for (const word of block.querySelectorAll("span")) {
      const kind = [word.className, word.style.cssText, below].join();
      if (seen.has(kind)) word.replaceWith(...word.childNodes);
      seen.add(kind);
    }
    block.normalize();
  }
  const style = document.createElement("style");
  style.textContent = `pre, .output, .pst-scrollable-table-container {
    background-image: none !important; background-color: var(--under, transparent) !important }`;
  document.head.append(style);
}"""
# Of text, axe judges the first in each pair of colours and size that it has not judged on another page.
CONTRAST = """async (judged) => {
  const known = new Set(judged), seen = new Map();
  const below = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const { backgroundColor, opacity } = getComputedStyle(one);
      if (backgroundColor !== "rgba(0, 0, 0, 0)") return `${backgroundColor} ${opacity} ${one.tagName}`;
    }
  };
  for (const element of document.body.querySelectorAll("*")) {
    const words = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!words || element.closest("svg, script, style") || !element.checkVisibility()) continue;
    const { color, fontSize, fontWeight } = getComputedStyle(element);
    const pair = [color, fontSize, fontWeight, below(element), element.tagName === "A"].join();
    if (!known.has(pair) && !seen.has(pair)) seen.set(pair, element);
  }
  const options = { runOnly: ["color-contrast"], resultTypes: ["violations"], preload: false };
  const { violations } = seen.size ? await axe.run({ include: [...seen.values()] }, options) : { violations: [] };
  return { violations, pairs: [...seen.keys()] };
}"""
STRUCTURE = """() => axe.run({ exclude: [["svg *"]] },
  { rules: { "color-contrast": { enabled: false } }, resultTypes: ["violations"], preload: false })"""
# How a page is built, without its words: of a translation the same, but for the order within a line.
BUILD = """() => {
  const itsOwn = /^(id|href|src|title|alt|lang|value|name|placeholder|aria-label|data-.*)$/;
  const build = (one) => {
    const about = [...one.attributes].filter(({ name }) => name !== "aria-current")
      .map(({ name, value }) => (itsOwn.test(name) ? `${name} ${value !== ""}` : `${name} ${value}`)).sort();
    const inner = one.localName === "svg" ? [] : [...one.children].map(build);
    if (one.matches("p, li, td, th, dt, dd, h1, h2, h3, h4, summary, figcaption, a, span, em, strong")) inner.sort();
    const words = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    return [one.localName, about, one.localName === "style" ? one.textContent : words, inner];
  };
  const sheets = [...document.styleSheets].map((sheet) => sheet.href?.split("/").at(-1) ?? sheet.ownerNode.textContent);
  return JSON.stringify([sheets, build(document.body)]);
}"""
THEME = "(theme) => { document.documentElement.dataset.theme = theme; }"


async def images(page: Page) -> AsyncIterator[str]:
    for source in await page.evaluate(IMAGES):
        yield f"image {source} does not load"


async def anchors(page: Page) -> AsyncIterator[str]:
    for what in await page.evaluate(ANCHORS):
        yield what
    for name in await page.evaluate(IDS):
        yield f"id {name!r} is there twice"


async def folds(page: Page, pressed: Counter[str]) -> AsyncIterator[str]:
    """Folds open and close with the Enter key, and show where the focus is."""
    for number, title in enumerate(await page.evaluate(FOLDS, FOLDS_PRESSED)):
        fold = page.locator(f"[data-pressed='{number}']")
        kind = await fold.get_attribute("class") or ""
        pressed[kind] += 1
        if pressed[kind] > PAGES_PRESSED and title:
            continue
        summary = fold.locator("> summary")
        if not title or not await summary.count():
            yield f"fold {number} has no title"
            continue
        was = await fold.evaluate("fold => fold.open")
        await summary.focus()
        await page.keyboard.press("Enter")
        after = await fold.evaluate(
            "fold => [fold.open, getComputedStyle(fold.querySelector('summary')).outlineStyle !== 'none']"
        )
        await page.keyboard.press("Enter")
        if after[0] == was or await fold.evaluate("fold => fold.open") != was:
            yield f"fold {title!r} does not follow the Enter key"
        if not after[1]:
            yield f"fold {title!r} does not show that it has the focus"


async def copying(page: Page, one_at_a_time: asyncio.Lock) -> AsyncIterator[str]:
    """The first button that copies puts the code that stands beside it on the clipboard."""
    block = page.locator("main div.highlight:has(> .copy):visible").first
    if not await block.count():
        if await page.locator(".cell_input div.highlight:visible").count():
            yield "code has no button to copy it"
        return
    async with one_at_a_time:  # a machine has one clipboard
        await page.evaluate("navigator.clipboard.writeText('')")
        await block.locator("> .copy").focus()
        await page.keyboard.press("Enter")
        await page.wait_for_timeout(50)
        copied = await page.evaluate("navigator.clipboard.readText()")
    code = await block.locator("pre").evaluate("pre => pre.textContent")
    if copied.rstrip("\n") != code.rstrip("\n"):
        yield f"the button copies {copied[:40]!r} in place of {code[:40]!r}"


async def printing(page: Page) -> AsyncIterator[str]:
    await page.emulate_media(media="print")
    await page.evaluate(FRAMES)  # what was folded is laid out in the next one
    printed = await page.evaluate(PRINTED)
    light = await page.evaluate(COLOURS)
    await page.evaluate(THEME, "dark")
    dark = await page.evaluate(COLOURS)
    await page.evaluate(THEME, "light")
    await page.emulate_media(media="screen")
    for title in printed["folded"]:
        yield f"print leaves out what is folded under {title!r}"
    for name in printed["frame"]:
        yield f"print shows .{name}"
    if other := sorted(name for name in light if light[name] != dark.get(name)):
        yield f"print from the dark scheme has other colours: {', '.join(other)}"


async def width(page: Page) -> AsyncIterator[str]:
    await page.set_viewport_size(PHONE)
    for state in (False, True):
        await page.evaluate(OPENED, state)
        if (wide := await too_wide(page)) > 0:
            yield f"{wide} px wider than a window of 360 px, folds {'open' if state else 'closed'}"
    await page.set_viewport_size(DESK)


async def colours(page: Page, judged: set[str]) -> AsyncIterator[str]:
    """Contrast in light at desk width and in dark on a phone, with all folds open."""
    await page.evaluate(OPENED, True)
    await page.evaluate(FRAMES)
    await page.evaluate(FOR_AXE)
    await page.evaluate(AXE)
    for scheme, size in (("light", DESK), ("dark", PHONE)):
        await page.set_viewport_size(size)
        await page.evaluate(THEME, scheme)
        result = await page.evaluate(CONTRAST, sorted(judged))
        judged.update(result["pairs"])
        for what in told(result):
            yield f"in {scheme}: {what}"
    await page.set_viewport_size(DESK)


async def structure(page: Page) -> AsyncIterator[str]:
    """All else that axe knows: names, roles, order. It finds itself on the page, with all folds open."""
    for what in told(await page.evaluate(STRUCTURE)):
        yield what


def told(result: dict[str, Any]) -> Iterator[str]:
    for rule in result["violations"]:
        where = [" ".join(map(str, node["target"])) for node in rule["nodes"]]
        yield f"axe {rule['id']}: {rule['help']}: {len(where)} ×, such as {' and '.join(where[:3])}"


@dataclass
class Judged:
    """What earlier pages showed, and need not show again."""

    colours: set[str] = field(default_factory=set)
    builds: set[str] = field(default_factory=set)  # of pages with which nothing was wrong
    folds: Counter[str] = field(default_factory=Counter)  # by kind, on how many pages
    clipboard: asyncio.Lock = field(default_factory=asyncio.Lock)


async def examine(
    context: BrowserContext, site: str, file: str, judged: Judged, axe: bool
) -> list[str]:
    """Everything that is wrong with one page; one that the browser lost is visited once more."""
    for _ in range(2):
        page = await context.new_page()
        try:
            return await asyncio.wait_for(examined(page, site + file, site, judged, axe), LONGEST)
        except TimeoutError:
            continue
        finally:
            await asyncio.wait([asyncio.ensure_future(page.close())], timeout=LONGEST)
    return [f"the page did not answer for {LONGEST} seconds, twice"]


async def examined(page: Page, url: str, site: str, judged: Judged, axe: bool) -> list[str]:
    wrong = watch(page, site)
    try:
        await visit(page, url)
        build = await page.evaluate(BUILD)
        new = build not in judged.builds
        checks = [images(page), anchors(page)]
        if new:
            checks += [
                folds(page, judged.folds), copying(page, judged.clipboard), printing(page)
            ]  # fmt: skip
        checks.append(width(page))
        if new and axe:
            checks += [colours(page, judged.colours), structure(page)]
        for check in checks:
            wrong += [what async for what in check]
        if not wrong:
            judged.builds.add(build)
    except Error as error:
        wrong.append(f"the visit broke off: {error}")
    return wrong


async def survey(
    browser: Browser, site: str, names: Iterable[str], axe: Container[str]
) -> dict[str, list[str]]:
    """What is wrong with each of these files; two contexts for each processor share one browser.

    axe: the files that axe judges as well, which takes half of the time of a visit.
    """
    queue, found, judged = iter(names), {}, Judged()

    async def visitor() -> None:
        context = await browser.new_context(
            viewport=DESK, color_scheme="light", reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
        )  # fmt: skip
        context.set_default_timeout(PATIENCE)
        for file in queue:
            found[file] = await examine(context, site, file, judged, file in axe)
        await context.close()

    await asyncio.gather(*(visitor() for _ in range(2 * (os.cpu_count() or 1))))
    return found
