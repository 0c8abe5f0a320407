"""What moved leads on in a browser, with a script and without one, in every language."""

import shutil

import pytest

from bookkit.model.book import Book
from bookkit.site.anchors import PASSING, ids_inside
from bookkit.site.browser import serving
from bookkit.site.redirects import REDIRECTS, honour
from built import BELOW, BOOK, SITE
from survey import PATIENCE

LANGUAGES = [language.path for language in BOOK.languages]
PAGE, OTHER = f"{BOOK.chapters[0]}.html", f"{BOOK.pages[-1]}.html"  # any two in one folder
BESIDE = OTHER.rpartition("/")[2]


def place(file):
    """An anchor in the middle of a page."""
    names = [name for name in ids_inside(SITE / file).found if not PASSING.match(name)]
    return names[len(names) // 2]


@pytest.fixture(scope="module")
def moved(site_folder, tmp_path_factory):
    """The built site with redirects: on one page, to another page, of a page."""
    root = tmp_path_factory.mktemp("book")
    for name in ("_config.yml", "_toc.yml"):
        shutil.copyfile(BOOK.root / name, root / name)
    shutil.copytree(BOOK.root / "locale", root / "locale")
    (root / "site").mkdir()
    (root / REDIRECTS).write_text(
        f'"{PAGE}#old" = "{PAGE}#{place(PAGE)}"\n"{PAGE}#away" = "{OTHER}#{place(OTHER)}"\n'
        f'"book/gone.html" = "{PAGE}"\n"book/gone.html#left" = "{OTHER}"\n'
    )
    built = root / "built"
    shutil.copytree(SITE, built, ignore=shutil.ignore_patterns("notebooks*"))
    honour(Book(root), built)
    with serving(built, BELOW) as address:
        yield address


def arrive(browsing, url, settled, script=True):
    """Where one comes from an address: the address in the end, and how high on it one is."""
    run, browser = browsing

    async def go():
        context = await browser.new_context(java_script_enabled=script, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        page = await context.new_page()
        await page.goto(url)
        if settled.startswith("**"):
            await page.wait_for_url(settled)
        else:
            await page.locator(settled).first.wait_for(state="attached")
        target = page.locator(":target")
        box = await target.first.bounding_box() if await target.count() else None
        for _ in range(20):  # without a script, the browser goes there once the styles have come
            if box is None or -48 < box["y"] < 720:
                break
            await page.wait_for_timeout(250)
            box = await target.first.bounding_box()
        address = page.url
        await context.close()
        return address, box and box["y"]

    return run(go())


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("language", LANGUAGES)
class TestMoved:
    def test_on_its_page(self, browsing, moved, language, script):
        _, top = arrive(browsing, f"{moved}{language}{PAGE}#old", "[id='old']:target", script)
        assert -48 < top < 720  # a font that comes late moves lines

    def test_to_another_page(self, browsing, moved, language, script):
        old, there = f"{moved}{language}{PAGE}#away", f"{language}{OTHER}#{place(OTHER)}"
        if script:
            assert arrive(browsing, old, f"**/{there}")[0] == moved + there
        else:  # the line with the link shows
            note = f".moved:target a[href='{BESIDE}#{place(OTHER)}']"
            _, top = arrive(browsing, old, note, script)
            assert -48 < top < 720  # a font that comes late moves lines

    def test_a_page(self, browsing, moved, language, script):
        gone, there = f"{moved}{language}book/gone.html", f"{language}{PAGE}"
        address, _ = arrive(browsing, f"{gone}#{place(PAGE)}", f"**/{there}*", script)
        assert address.partition("#")[0] == moved + there
        if script:
            assert address.partition("#")[2] == place(PAGE)
            assert (
                arrive(browsing, f"{gone}#left", f"**/{BESIDE}")[0] == f"{moved}{language}{OTHER}"
            )


def test_the_line_about_a_moved_passage_shows_to_nobody_else(browsing, moved):
    run, browser = browsing

    async def go():
        page = await browser.new_page()
        await page.goto(moved + PAGE)
        assert await page.locator(".moved").count() == 1
        assert not await page.locator(".moved").is_visible()
        await page.close()

    run(go())
