"""A page in the form of the book goes through all that the site makes of it, in English and in
⟦a made-up language⟧: folds, figures, tables, formulas.
"""

import platform
import re
import shutil

import pytest
from bs4 import BeautifulSoup

from bookkit.model.book import Book, Problem
from bookkit.site import build
from bookkit.words import po, sync
from bookkit.words.catalogues import catalogue_path, has_words
from toy import FRONT, ROOT, code, link_site

BOOK = Book()
PSEUDO = "ja"  # Sphinx's own words are Japanese; the book's are English in brackets
FIGURE = "![A square. It has four sides.]({site}_static/figures/square.svg)"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" class="fig" role="img" aria-label="A square"
 viewBox="0 0 360 90" color="#777" fill="currentColor" style="font-family:var(--sans,Arial)">
<defs><clipPath id="inside"><rect width="90" height="90"/></clipPath></defs>
<g clip-path="url(#inside)"><text x="5" y="20" data-message="side">side</text></g>
</svg>
"""


def page(book):
    return f"""{FRONT}
# Two and two: a sum

{code("# @title Setup: nothing" + chr(10) + "import math", "setup", "hide-cell", cellView="form")}

**Predict.** What is the sum of two and two?

<details class="predict">
<summary>Answer &amp; more</summary>

It is **four**, see [the square]({book.page_url("book/03-toy")}#fig-square).

</details>

{code("total = 2 + 2", "id-sum")}

{FIGURE.format(site=book.site)}

*The **square** of two, by `math`. A second sentence.*

| bare | drawing |
|---|---|
| square | {FIGURE.format(site=book.site)} |

A word between.

| one | $n$ |
|---|---|
| two | $\\frac{{n}}{{2}} + w_{{DF}} + B_{{data}}$ |

*Halves: and wholes. The second sentence.*

See [the table]({book.page_url("book/03-toy")}#table-halves).

$$
\\sum_{{i=1}}^n i
$$

<details class="aside">
<summary>An aside</summary>

| bare | table |
|---|---|

</details>

{code("# @title Solution" + chr(10) + "math.pi", "solution-a", "hide-cell", cellView="form")}
"""


def reference(book):
    """A page of kind reference: entries, the second with a deeper one."""
    return f"""{FRONT}
# What it means

{code("# @title Setup: nothing" + chr(10) + "import math", "setup", "hide-cell", cellView="form")}

See [the other]({book.page_url("book/messages/messages-toy")}#wrong-axis).

## `SumError … cut 8 times, but the size is 10`

{code("print('SumError: it is cut 8 times')", "id-uneven")}

### `AxisError: no such axis`

{code("2 + 2", "id-wrong-axis")}

## No name

{code("2 + 2")}

{code("2 + 3", "id-second")}
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    root = tmp_path_factory.mktemp("lesson")
    link_site(root)
    config = (ROOT / "_config.yml").read_text("utf-8")
    config, count = re.subn(
        r"zh_TW: \{.*\}", f"{PSEUDO}: {{name: Brackets, path: {PSEUDO}/}}", config
    )
    assert count == 1
    (root / "_config.yml").write_text(config, "utf-8")
    shutil.copyfile(ROOT / "conf.py", root / "conf.py")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/00-intro\nparts:\n"
        "  - caption: Foundations\n    chapters:\n      - file: book/03-toy\n"
        "  - caption: Reference\n    chapters:\n      - file: book/messages/messages-toy\n"
    )
    for name in ("figures", "messages"):
        (root / "book" / name).mkdir(parents=True)
    (root / "book" / "figures" / "square.svg").write_text(SVG)
    book = Book(root)
    (root / "book" / "00-intro.md").write_text(
        f"# Intro\n\nSee [four]({book.page_url('book/03-toy')}#fig-square).\n"
    )
    (root / "book" / "03-toy.md").write_text(page(book))
    (root / "book" / "messages" / "messages-toy.md").write_text(reference(book))
    translate(book)
    sync.main([], root)
    build.main([], root)
    return book


def translate(book):
    """Fill the catalogue of the made-up language, from the template that `make po` merges into it."""
    catalogue = po.template(book)
    for entry in catalogue:
        if has_words(entry.msgid):
            entry.msgstr = bracketed(entry.msgid)
    path = catalogue_path(book, book.language(PSEUDO))
    path.parent.mkdir(parents=True)
    catalogue.save(str(path))


def bracketed(text):
    """Brackets inside of what marks the whole as emphasised, so that a caption stays one."""
    mark = "*" if text.startswith("*") and text.endswith("*") and not text.startswith("**") else ""
    return f"{mark}⟦{text.removeprefix(mark).removesuffix(mark)}⟧{mark}"


def soup(book, file):
    return BeautifulSoup((book.root / "_build" / "html" / file).read_text("utf-8"), "html.parser")


@pytest.fixture(params=["", f"{PSEUDO}/"])
def toy(request, book):
    """The page in each language, and what a translated text looks like there."""
    return soup(book, f"{request.param}book/03-toy.html"), "⟦{}⟧" if request.param else "{}"


def test_folds_are_called_by_their_titles(toy):
    page, said = toy
    for tag, title in (("tag_setup", "Setup: nothing"), ("tag_solution-a", "Solution")):
        fold = page.select_one(f".{tag} > details")
        assert {name.text for name in fold.select("summary p")} == {said.format(title)}
        assert title not in fold.select_one(".cell_input").text


def test_the_answer_is_folded_right_below_its_question(toy):
    page, said = toy
    answer = page.select_one("details.predict")
    assert answer.summary.text.strip() == said.format("Answer & more")
    assert answer.find_previous_sibling().name == "p"
    assert "four" in answer.p.text and answer.a["href"].endswith("#fig-square")
    aside = page.select_one("details.aside")
    assert aside.summary.text.strip() == said.format("An aside") and aside.table


def test_a_figure_is_inlined_with_its_caption_number_and_anchor(toy):
    page, said = toy
    (figure,) = page.select("figure.drawn")
    assert figure["id"] == "fig-square"
    svg, caption = figure.svg, figure.figcaption
    assert svg["aria-label"] == said.format("A square. It has four sides.") and svg["role"] == "img"
    assert not svg.has_attr("color") and svg["viewbox"] == "0 0 360 90"
    assert svg.select_one("text").text == said.format("side")
    assert caption.select_one(".caption-number").text == said.format("Figure 3.1")
    assert said.format("The square of two, by math. A second sentence.") in caption.text
    assert caption.strong and not caption.em
    assert page.select_one("td svg")["aria-label"] == svg["aria-label"]
    ids = [element["id"] for element in page.select("[id]")]
    assert len(ids) == len(set(ids))
    for drawing in page.select("main svg.fig"):
        inside = drawing.select_one("clippath")["id"]
        assert drawing.g["clip-path"] == f"url(#{inside})"


def test_a_table_with_a_caption_has_a_number_and_an_anchor(toy):
    page, said = toy
    (figure,) = [table.find_parent("figure") for table in page.select("figure table")]
    assert figure["id"] == "table-halves"
    assert figure.select_one(".caption-number").text == said.format("Table 3.1")
    assert said.format("Halves: and wholes. The second sentence.") in figure.figcaption.text


def test_formulas_are_mathml_and_pages_load_no_script_for_them(toy):
    page, said = toy
    formula = page.select_one('div.math math[display="block"]')
    in_table = str(page.select("table math")[-1])
    assert "<mi>D</mi><mi>F</mi>" in in_table and "<mtext>data</mtext>" in in_table
    assert formula.select_one("munderover")
    assert ("⟦" in formula.text) == ("⟦" in said)
    assert not page.select("[src*=mathjax]") and "\\(" not in page.text


def test_drawings_are_served_for_notebooks_in_their_language(book):
    english, other = (
        book.root / "_build" / "html" / language.path / "_static/figures/square.svg"
        for language in book.languages
    )
    assert english.read_text("utf-8") == SVG
    told = SVG.replace(">side<", ">⟦side⟧<").replace("<svg ", f'<svg xml:lang="{PSEUDO}" ')
    assert other.read_text("utf-8") == told
    for language, path in zip(book.languages, ("", f"{PSEUDO}/")):
        notebook = book.notebook("book/03-toy", language).read_text("utf-8")
        assert f"({book.site}{path}_static/figures/square.svg)" in notebook


def test_the_foot_says_on_what_the_page_ran(toy):
    page, _ = toy
    assert f"Python {platform.python_version()}" in page.select_one("footer.colophon").text


def test_an_entry_of_a_reference_is_called_by_its_first_cell(book):
    for path in ("", f"{PSEUDO}/"):
        page = soup(book, f"{path}book/messages/messages-toy.html")
        for slug, words, old in (
            ("uneven", "SumError … cut 8 times, but the size is 10", "sumerror-cut-8-times-but-the-size-is-10"),
            ("wrong-axis", "AxisError: no such axis", "axiserror-no-such-axis"),
        ):  # fmt: skip
            (section,) = page.select(f"section#{slug}")
            assert section.select_one("h2, h3").code.text.strip("⟦⟧") == words
            assert section.select_one("h2 .headerlink, h3 .headerlink")["href"] == f"#{slug}"
            assert section.find(id=old, recursive=False)  # what others linked to still leads there
            assert page.select_one(f'.toc a[href="#{slug}"]')
        assert page.select_one('p a[href="#wrong-axis"]')
        assert page.select_one("section#no-name") and not page.select("#second")
        assert not soup(book, f"{path}book/03-toy.html").select("#sum")  # chapters keep theirs


def test_an_entry_that_is_called_like_another_heading_fails_the_build(book):
    page = book.source("book/messages/messages-toy")
    text = page.read_text()
    page.write_text(text.replace("id-uneven", "id-no-name"))
    try:
        with pytest.raises(Problem, match="#no-name is the anchor of another heading too"):
            build.main([], book.root)
    finally:
        page.write_text(text)


@pytest.mark.parametrize(
    ("old", "by", "said"),
    [
        ("figures/square.svg)\n\n*The", "figures/circle.svg)\n\n*The", "there is no book/figures/circle.svg"),
        ("\\sum_", "\\summe_", "this formula cannot be shown: "),
        ("#table-halves", "#table-thirds", "has no heading #table-thirds"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_fails_the_build(book, old, by, said):
    page = book.source("book/03-toy")
    text = page.read_text()
    assert old in text
    page.write_text(text.replace(old, by))
    try:
        with pytest.raises(Problem, match=re.escape(said)):
            build.main([], book.root)
    finally:
        page.write_text(text)
