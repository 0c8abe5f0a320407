"""The cheat sheet is one sheet of A4 in every language: all boxes on it, legible, no line of code cut off."""

import re

import pytest

from built import BOOK
from chromium import visit

SHEETS = [f"{language.path}book/reference/cheat-sheet.html" for language in BOOK.languages]
A4 = (595, 842)  # points
INSIDE = {"width": 741, "height": 1070}  # pixels of A4 within its margins
SMALLEST = 7.5  # points

# What stands on paper: the heading of each box, the smallest letters, code that is wider than its box.
ON_PAPER = """() => {
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const sizes = [];
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const around = text.parentElement;
    if (text.data.trim() && around.checkVisibility({ contentVisibilityAuto: true }))
      sizes.push([parseFloat(getComputedStyle(around).fontSize) * 0.75, text.data.trim().slice(0, 40)]);
  }
  const code = [...document.querySelectorAll("main pre")].filter((pre) => pre.checkVisibility() && pre.getClientRects().length);
  return {
    boxes: [...document.querySelectorAll("main h2")].filter((one) => one.checkVisibility()).length,
    cells: code.length,
    smallest: sizes.sort((a, b) => a[0] - b[0])[0],
    cut: code.filter((pre) => pre.scrollWidth > pre.clientWidth + 1).map((pre) => pre.innerText.slice(0, 60)),
    shown: [...document.querySelectorAll(".cell_output, details.checked")].filter((one) => one.checkVisibility()).length,
  };
}"""


@pytest.fixture(scope="module")
def printed(browsing, site):
    """What Chromium's PDF of each sheet is, and what is on its paper."""
    run, browser = browsing

    async def look(file: str) -> tuple[bytes, dict]:
        page = await browser.new_page(viewport=INSIDE)
        await visit(page, site + file)
        pdf = await page.pdf(prefer_css_page_size=True, print_background=True)
        await page.emulate_media(media="print")
        found = await page.evaluate(ON_PAPER)
        await page.close()
        return pdf, found

    return {file: run(look(file)) for file in SHEETS}


@pytest.mark.parametrize("file", SHEETS)
def test_one_page_of_a4(file, printed):
    pdf, _ = printed[file]
    pages = re.findall(rb"/Type\s*/Page\b(?!s)", pdf)
    sizes = {
        tuple(map(float, box.split()[2:])) for box in re.findall(rb"/MediaBox\s*\[([^\]]*)\]", pdf)
    }
    assert len(pages) == 1, f"{file} is printed on {len(pages)} pages: shorten a box"
    assert {tuple(map(round, size)) for size in sizes} == {A4}


@pytest.mark.parametrize("file", SHEETS)
def test_all_boxes_are_legible(file, printed):
    _, found = printed[file]
    assert found["boxes"] >= 10 and found["cells"] >= 6
    size, words = found["smallest"]
    assert size >= SMALLEST - 0.01, f"{words!r} has {size} points"
    assert not found["cut"], "wider than its box, so cut off: break a line of this code"
    assert not found["shown"], "outputs take the room of the boxes"
