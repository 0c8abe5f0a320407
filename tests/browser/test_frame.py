"""What a reader does with the frame of a page: menus, languages, schemes, the list of pages, 404."""

import io

import pytest
from PIL import Image

from built import BELOW, BOOK
from chromium import visit, watch
from survey import DESK, PATIENCE, PHONE

FIRST, SECOND = BOOK.languages[0], BOOK.languages[-1]
PAGE = next(page for page in BOOK.chapters if BOOK.number(page))
LAST = BOOK.pages[-1]
HERE, THERE = (f"{language.path}{PAGE}.html" for language in (FIRST, SECOND))


@pytest.fixture
def on(browsing, site):
    """Run a check on a page that was just opened: on(check, file, width and the like)."""
    run, browser = browsing

    def do(check, file=HERE, expected=(), **about):
        async def go():
            context = await browser.new_context(
                **{"viewport": DESK, "color_scheme": "light", "reduced_motion": "reduce", **about}
            )
            context.set_default_timeout(PATIENCE)
            page = await context.new_page()
            wrong = watch(page, site)
            if about.get("java_script_enabled", True):
                await visit(page, site + file)
            else:
                await page.goto(site + file)
            answer = await check(page)
            await context.close()
            assert [one for one in wrong if not any(part in one for part in expected)] == []
            return answer

        return run(go())

    return do


def test_a_change_of_language_keeps_the_section(on, site):
    async def check(page):
        section = page.locator("main section[id] section[id]").nth(2)
        name = await section.get_attribute("id")
        await page.goto(f"{site}{HERE}#{name}")
        await page.locator(".language-menu > summary").click()
        await page.locator(f".language-menu a[hreflang='{SECOND.web}']").click()
        await page.wait_for_url(f"**/{THERE}*")
        assert page.url == f"{site}{THERE}#{name}"
        top = await page.locator(f"[id='{name}']").evaluate(
            "one => one.getBoundingClientRect().top"
        )
        assert 0 <= top < DESK["height"] / 2

    on(check)


def test_a_change_of_language_at_the_top_stays_at_the_top(on, site):
    async def check(page):
        await page.locator(".language-menu > summary").click()
        await page.locator(f".language-menu a[hreflang='{SECOND.web}']").click()
        await page.wait_for_url(f"**/{THERE}*")
        assert page.url == site + THERE

    on(check)


def test_escape_closes_a_menu_and_the_focus_stays_there(on):
    async def check(page):
        await page.locator(".language-menu > summary").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.hreflang")
        await page.keyboard.press("Escape")
        assert not await page.locator(".language-menu[open]").count()
        assert await page.evaluate("document.activeElement.matches('.language-menu > summary')")

    on(check)


@pytest.mark.parametrize("file", [f"{page}.html" for page in (BOOK.pages[0], PAGE, LAST)])
def test_the_list_of_pages_names_the_open_one_and_shows_it(on, file):
    async def check(page):
        here = page.locator(".contents [aria-current='page']")
        assert await here.count() == 1
        box = await here.bounding_box()
        assert DESK["width"] > box["x"] >= 0 and 0 <= box["y"] <= 600 - box["height"]

    on(check, file, viewport={"width": 1280, "height": 600})


def test_the_drawer_on_a_phone_opens_holds_the_focus_and_closes(on):
    async def check(page):
        inside = "document.activeElement.closest('#contents') !== null"
        await page.locator("[data-drawer-open]").focus()
        await page.keyboard.press("Enter")
        assert await page.evaluate(inside)
        for key in ("Shift+Tab", "Tab"):
            await page.keyboard.press(key)
            assert await page.evaluate(inside)
        await page.keyboard.press("Escape")
        assert await page.evaluate("document.activeElement.matches('[data-drawer-open]')")

    on(check, viewport=PHONE)


def test_the_scheme_follows_the_system_until_the_reader_chooses(on):
    async def check(page):
        theme = "document.documentElement.dataset.theme"
        assert await page.evaluate(theme) == "dark"
        await page.locator("[data-theme-switch]").click()
        assert await page.evaluate(theme) == "light"
        await page.reload()
        assert await page.evaluate(theme) == "light"
        assert (
            await page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
        )

    on(check, color_scheme="dark")


@pytest.mark.parametrize("file, word", [(HERE, "mesh"), (THERE, "網格")])
def test_search_is_a_key_away_and_finds(on, file, word):
    async def check(page):
        await page.keyboard.press("/")
        await page.keyboard.type(word)
        await page.keyboard.press("Enter")
        # Results come into the list one by one: what is waited for is the page, not the first of them.
        await page.locator(f"#search-results a[href*='{PAGE}']").first.wait_for()

    on(check, file)


TERM = "main a[href*='glossary.html#']"


@pytest.mark.parametrize("way", ["mouse", "keyboard", "touch"])
def test_a_term_of_the_glossary_shows_its_entry_and_hides_it(on, way):
    async def check(page):
        link, card = page.locator(TERM).first, page.locator(".term-card")
        address = page.url
        if way == "mouse":
            await link.hover()
        elif way == "touch":
            await link.tap()
        else:
            await link.evaluate("link => link.focus({ focusVisible: true })")
        await card.wait_for()
        words = await card.inner_text()
        assert (await link.inner_text()).lower()[:4] in words.lower() and len(words) > 40
        assert await link.get_attribute("aria-describedby") == "term-card"
        box = await card.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
        assert page.url == address
        if way == "touch":
            await link.tap()  # the second touch follows the link
            await page.wait_for_url("**/glossary.html#*")
        else:
            await page.keyboard.press("Escape")
            await card.wait_for(state="hidden")

    on(check, **({"has_touch": True, "viewport": PHONE} if way == "touch" else {}))


def test_a_page_that_was_read_to_its_end_is_ticked_in_both_languages(on, site):
    async def check(page):
        ticked = page.locator(".contents a.read")
        assert not await ticked.count()
        await page.locator(".turn").scroll_into_view_if_needed()
        await ticked.first.wait_for()
        await page.goto(site + THERE)
        here = page.locator(".contents [aria-current='page']")
        assert await ticked.count() == 1
        assert "read" in (await here.get_attribute("class")).split()
        assert await here.locator(".sr-only").count() == 1

    on(check)


def test_a_name_of_jax_leads_to_its_documentation_and_a_page_says_when_it_changed(on):
    async def check(page):
        links = await page.locator("main a.api").evaluate_all(
            "all => all.map((link) => [link.innerText, link.href])"
        )
        assert dict(links)["jax.jit"].startswith("https://docs.jax.dev/en/latest/")
        assert not await page.locator(":is(h1, h2, h3) a.api").count()
        in_cells = await page.locator(".cell_input a.api").all_text_contents()
        assert "jax.make_mesh" in in_cells and len(set(in_cells)) == len(in_cells)
        kaggle = page.locator(
            "a[href^='https://kaggle.com/kernels/welcome?src=https://github.com/']"
        )
        assert (await kaggle.first.get_attribute("href")).endswith(f"/{HERE[5:-5]}.ipynb")
        changed = page.locator(".colophon time").first
        assert (await changed.get_attribute("datetime"))[:2] == "20"

    on(check)


@pytest.mark.parametrize("file", [HERE, THERE])
def test_a_shared_link_shows_a_picture(on, site, file):
    async def check(page):
        said = await page.locator("meta[property='og:image']").get_attribute("content")
        assert said.endswith("_static/social.png")
        answer = await page.request.get(f"{site}_static/social.png")
        assert Image.open(io.BytesIO(await answer.body())).size == (1200, 630)

    on(check, file)


def test_code_is_as_large_as_the_text_allows(on):
    """Neither shouts: code has three quarters of the text's size or more, and 88 columns fit."""

    async def check(page):
        return await page.evaluate("""() => {
          const size = (one) => parseFloat(getComputedStyle(document.querySelector(one)).fontSize);
          const block = document.querySelector("main .cell:not(.tag_setup) .cell_input pre"), probe = document.createElement("span");
          probe.textContent = "x".repeat(88);
          block.append(probe);
          const { paddingLeft, paddingRight } = getComputedStyle(block);
          const room = block.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
          return [size("main .cell_input pre") / size("body"), probe.offsetWidth - room];
        }""")

    for width in (1280, 1440):
        ratio, over = on(check, viewport={"width": width, "height": 900})
        assert 0.74 <= ratio <= 0.8 and over <= 0.5, (width, ratio, over)


def test_without_a_script_a_page_can_be_read(on):
    async def check(page):
        assert await page.locator("main h1").is_visible()
        fold = page.locator("main details").first
        await fold.locator("> summary").click()
        assert await fold.get_attribute("open") is not None
        assert not await page.locator(".js-only:visible").count()

    on(check, java_script_enabled=False)


@pytest.mark.parametrize("language", BOOK.languages, ids=lambda one: one.code)
def test_next_leads_from_chapter_to_chapter_and_the_arrow_keys_do_too(on, site, language):
    async def check(page):
        seen = []
        for file in BOOK.path:
            assert page.url == f"{site}{language.path}{file}.html"
            seen.append(await page.locator("main h1").inner_text())
            if file != BOOK.path[-1]:
                await page.keyboard.press("ArrowRight")
                await page.wait_for_url(lambda url, here=file: not url.endswith(f"{here}.html"))
        assert len(set(seen)) == len(seen)
        await page.keyboard.press("ArrowLeft")
        await page.wait_for_url(f"{site}{language.path}{BOOK.path[-2]}.html")
        numbers = [BOOK.number(file) for file in BOOK.path if BOOK.number(file)]
        assert numbers == sorted(numbers) and numbers[0] == 1

    on(check, file=f"{language.path}{BOOK.path[0]}.html")


@pytest.mark.parametrize(
    "file", ["book/no-such-page.html", "zh-TW/book/very/deep/none.html", "none"]
)
def test_an_address_that_leads_nowhere_is_answered_in_every_language(on, site, file):
    async def check(page):
        for language in BOOK.languages:
            section = page.locator(f"main section[lang='{language.web}']")
            assert await section.locator(":is(h1, h2)").is_visible()
            link = section.locator("a").first
            leads_to = await link.evaluate("(link) => new URL(link.href).pathname")
            assert leads_to == f"{BELOW}{language.path}{BOOK.pages[0]}.html"
        assert (
            await page.evaluate("getComputedStyle(document.querySelector('.topbar')).position")
            == "sticky"
        )
        addresses = await page.evaluate("[...document.links].map((link) => link.href)")
        here = {address.split("#")[0] for address in addresses if address.startswith(site)}
        for address in here - {site + file}:
            assert (await page.request.get(address)).ok, address
        await page.locator("main a").first.click()
        assert await page.locator(".hero").is_visible()

    on(check, file, expected=["404 (Not Found)"])
