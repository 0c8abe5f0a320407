"""What moved leads on in a browser, with a script and without one, in every language."""

import shutil

import pytest

from bookkit.model.book import Book
from bookkit.site.browser import served
from bookkit.site.redirects import REDIRECTS, honour
from built import BELOW, BOOK, SITE

LANGUAGES = [language.path for language in BOOK.languages]


@pytest.fixture(scope="module")
def moved(site_folder, tmp_path_factory):
    """The built site with three redirects more: on its page, to another page, of a page."""
    root = tmp_path_factory.mktemp("book")
    for name in ("_config.yml", "_toc.yml"):
        shutil.copyfile(BOOK.root / name, root / name)
    shutil.copytree(BOOK.root / "locale", root / "locale")
    (root / "site").mkdir()
    (root / REDIRECTS).write_text(
        '"book/01-mesh.html#old" = "book/01-mesh.html#exercises"\n'
        '"book/01-mesh.html#away" = "book/notation.html#notation"\n'
        '"book/gone.html" = "book/01-mesh.html"\n"book/gone.html#left" = "book/notation.html"\n'
    )
    shutil.copytree(
        SITE, root / "site-built", ignore=shutil.ignore_patterns("notebooks*", "*.ipynb")
    )
    honour(Book(root), root / "site-built")
    with served(root / "site-built", BELOW) as address:
        yield address


def arrive(browsing, url, settled, script=True):
    """Where one comes from an address: the address in the end, and what `settled` waited for."""
    run, browser = browsing

    async def go():
        context = await browser.new_context(java_script_enabled=script, reduced_motion="reduce")
        page = await context.new_page()
        await page.goto(url)
        if settled.startswith("**"):
            await page.wait_for_url(settled)
        else:
            await page.locator(settled).wait_for()
        address, top = page.url, await page.locator(":target").first.bounding_box()
        await context.close()
        return address, top and top["y"]

    return run(go())


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("language", LANGUAGES)
class TestMoved:
    def test_on_its_page(self, browsing, moved, language, script):
        _, top = arrive(
            browsing, f"{moved}{language}book/01-mesh.html#old", "section#exercises", script
        )
        assert 0 <= top < 400

    def test_to_another_page(self, browsing, moved, language, script):
        there = f"{moved}{language}book/notation.html#notation"
        if script:
            assert (
                arrive(browsing, f"{moved}{language}book/01-mesh.html#away", f"**{there[6:]}")[0]
                == there
            )
        else:  # the line with the link shows
            note = ".moved:target a[href='notation.html#notation']"
            _, top = arrive(browsing, f"{moved}{language}book/01-mesh.html#away", note, script)
            assert 0 <= top < 720

    def test_a_page(self, browsing, moved, language, script):
        there = f"{moved}{language}book/01-mesh.html"
        address, _ = arrive(
            browsing, f"{moved}{language}book/gone.html#exercises", f"**{there[6:]}*", script
        )
        assert address == there + ("#exercises" if script else "")
        if script:
            address, _ = arrive(
                browsing, f"{moved}{language}book/gone.html#left", "**/notation.html"
            )
            assert address == f"{moved}{language}book/notation.html"


def test_the_line_about_a_moved_passage_shows_to_nobody_else(browsing, moved):
    run, browser = browsing

    async def go():
        page = await browser.new_page()
        await page.goto(f"{moved}book/01-mesh.html")
        assert (
            await page.locator(".moved").count() == 1
            and not await page.locator(".moved").is_visible()
        )
        await page.close()

    run(go())
