"""Figures have room for the words of every language: inside the drawing, and none over another.

What their programs leave room for is the English; what overlaps there too is meant.
"""

import pytest

from bookkit.sphinx_ext.figures import in_language
from built import BOOK

FIGURES = sorted((BOOK.root / "book" / "figures").glob("*.svg"))
SLACK = 1.5  # px, of 360: a box of text is higher and wider than its signs

MEASURED = """() => {
  const svg = document.querySelector("svg"), { x, y, width, height } = svg.viewBox.baseVal;
  const turned = svg.getScreenCTM().inverse();
  const texts = [...svg.querySelectorAll("text")].map((text) => {
    const { x, y, width, height } = text.getBBox(), matrix = turned.multiply(text.getScreenCTM());
    const corners = [[x, y], [x + width, y + height]].map(([a, b]) => new DOMPoint(a, b).matrixTransform(matrix));
    const [left, right] = corners.map((one) => one.x).sort((a, b) => a - b);
    const [top, bottom] = corners.map((one) => one.y).sort((a, b) => a - b);
    return { said: text.textContent, left, right, top, bottom };
  });
  return { box: [x, y, x + width, y + height], texts };
}"""


def outside(box, texts):
    """Texts of which something is cut off."""
    left, _, right, _ = box
    return {
        n for n, text in enumerate(texts)
        if text["said"].strip() and (text["left"] < left - SLACK or text["right"] > right + SLACK)
    }  # fmt: skip


def over(texts):
    """Pairs of texts one of which stands over the other."""
    shown = [(n, text) for n, text in enumerate(texts) if text["said"].strip()]

    def apart(one, other):
        high = 0.3 * min(one["bottom"] - one["top"], other["bottom"] - other["top"])
        return (
            one["right"] < other["left"] + SLACK or other["right"] < one["left"] + SLACK
            or one["bottom"] < other["top"] + high or other["bottom"] < one["top"] + high
        )  # fmt: skip

    return {
        (m, n) for i, (m, one) in enumerate(shown) for n, other in shown[i + 1 :] if not apart(one, other)
    }  # fmt: skip


def crowded(english, translated):
    """What a reader of the translation cannot read, and a reader of the English can."""
    texts = translated["texts"]
    for n in sorted(outside(translated["box"], texts) - outside(english["box"], english["texts"])):
        yield f"{texts[n]['said']!r} is cut off"
    for m, n in sorted(over(texts) - over(english["texts"])):
        yield f"{texts[m]['said']!r} stands over {texts[n]['said']!r}"


@pytest.fixture(scope="module")
def measured(browsing):
    run, browser = browsing

    async def look() -> dict:
        page = await browser.new_page(viewport={"width": 360, "height": 640})
        found = {}
        for language in BOOK.languages:
            for path in FIGURES:
                svg = in_language(BOOK, language, path.read_text("utf-8"))
                await page.set_content(f'<body lang="{language.web}" style="margin:0">{svg}')
                found[language.code, path.stem] = await page.evaluate(MEASURED)
        await page.close()
        return found

    return run(look())


@pytest.mark.parametrize("language", BOOK.languages[1:], ids=lambda language: language.code)
def test_translated_figures_are_legible(language, measured):
    source = BOOK.languages[0].code
    wrong = [
        f"{path.name}, {language.code}: {what}: shorten it in book.po"
        for path in FIGURES
        for what in crowded(measured[source, path.stem], measured[language.code, path.stem])
    ]
    assert not wrong, "\n".join(wrong)
