"""Rules of words, pictures, titles, and Markdown that the site, Colab and GitHub all show well."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bookkit.lint.prose import blocks, headings, read_aloud
from bookkit.lint.rules import CHAPTER, PAGE, REFERENCE, Page, Said, rule
from bookkit.model.chapter import Cell

BANNED = {
    r"simply|just|obviously|clearly|of course|easily": "tells the reader how it should feel",
    r"(?i:behaviors?|colors?|neighbors?|favor|center(?:s|ed)?|labeled|labeling|modeling"
    r"|analyz\w+|initializ(?!er)\w+|parallelize\w*|utiliz\w+|organiz\w+|recogniz\w+|summariz\w+"
    r"|memoriz\w+|penaliz\w+|emphasiz\w+|minimiz\w+|maximiz\w+|realiz\w+)": (
        "is spelled the American way: the book writes colour, behaviour, initialise"
    ),
}
# Words of the field and of the instruments' names keep their spelling.
SPELLED_SO = re.compile(r"(?i)^(rematerializ|materializ|normaliz|optimiz|serializ)")


def prose(page: Page) -> Iterator[tuple[int, str]]:
    """(line of the file, text) of what is read."""
    for cell in page.chapter.markdown:
        for _, text, line, _ in blocks(cell.source):
            yield cell.line + line, text


@rule(CHAPTER, PAGE)
def plain_words(page: Page) -> Said:
    """No word tells the reader how it should feel; spelling is British."""
    for line, text in prose(page):
        for pattern, why in BANNED.items():
            own = re.sub(r'"[^"]*"', " ", read_aloud(text))  # quotations keep their spelling
            for found in re.finditer(rf"(?i:\b(?:{pattern})\b)", own):
                if not SPELLED_SO.match(found[0]):
                    yield line, f'"{found[0]}" {why}; use another word'


# Pictures.


def bad_alt(alt: str, what: str) -> Iterator[str]:
    if not alt.strip():
        yield f"{what} has no alt text; say what it shows, its axes and the conclusion"
    elif re.search(r"\.(?:svg|png|jpe?g|gif|webp)$", alt.strip(), re.I) or "/" in alt.split()[0]:
        yield f"{what} has a file name as alt text ({alt!r}); say what it shows"
    elif len(alt.split()) < 4:
        yield f"{what} has the alt text {alt!r}; say what it shows, its axes and the conclusion"


@rule(CHAPTER, PAGE)
def alt_text(page: Page) -> Said:
    """Each picture in Markdown has an alt text that says what it shows."""
    for cell in page.chapter.markdown:
        pictures = [
            (found.start(), found[1], found[2])
            for found in re.finditer(r"!\[([^\]]*)\]\(([^)\s]*)", cell.source)
        ]
        for tag in re.finditer(r"<img\b[^>]*>", cell.source, re.I):
            alt = re.search(r"\balt=[\"']([^\"']*)", tag[0], re.I)
            pictures.append((tag.start(), alt[1] if alt else "", tag[0]))
        for at, text, source in pictures:
            if not (source.endswith("/colab-badge.svg") and text == "Open in Colab"):
                for what in bad_alt(text, f"the picture {source[:60]}"):
                    yield line_at(cell, at), what


def line_at(cell: Cell, position: int) -> int:
    """The line of the file where a position of the cell's source lies."""
    return cell.line + cell.source.count("\n", 0, position)


# Markdown that is shown alike everywhere.

CODE_OR_FENCE = re.compile(
    r"(?ms)^(`{3,}|~{3,})(?!\s*\{).*?^\1\s*$|(?!^`{3})(?<!`)(`+)(?!`).+?(?<!`)\2(?!`)"
)
FORMULA = re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.S)
NOT_EVERYWHERE = {
    "a MyST target": (r"^\([\w-]+\)=\s*$", "write a heading and link to it by its full address"),
    "a MyST role": (r"\{[\w:-]+\}`", "write it out, or link by full address"),
    "a MyST directive": (r"^\s*(?:`{3,}|:{3,})\s*\{", "use a GitHub alert, a table or a list"),
    "a MyST comment or block break": (r"^(?:%(?:\s|$)|\+\+\+)", "delete it"),
    "a substitution": (r"\{\{.*?\}\}", "write it out"),
    "a link that Colab cannot follow": (r"\]\((?!https?://)[^)]*\)?", "write its full address"),
    "a reference link": (
        r"(?<!\])\[[^\]\n]+\]\[[^\]\n]*\]|^\[[^\]\n]+\]:\s",
        "write the address beside the text",
    ),
    "a link without text": (r"(?<!!)\[\s*\]\(", "say where it leads"),
    "a footnote": (r"\[\^", "write a sentence, or a link"),
    "an alert that GitHub lacks": (
        r"^>\s*\[!(?!(?:NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\s*$)",
        "write [!NOTE], TIP, IMPORTANT, WARNING or CAUTION alone on its line",
    ),
    "raw HTML": (r"<(?!https?://|!--)/?[a-z][^>]*>", "use Markdown"),
    r"\( \) around a formula": (r"\\\(|\\\[", "use dollar signs"),
}
FOLD_TAGS = re.compile(r'<details class="(?:predict|aside)">|</details>|</?summary>')
FOLD = re.compile(r"(?ms)^<details\b[^\n]*\n.*?^</details>[ \t]*$")
# As Colab and GitHub need it, so that they read Markdown in it.
WELL_FOLDED = re.compile(
    r'(?s)<details class="(?:predict|aside)">\n<summary>[^\n]+</summary>\n\n\S.*\S\n\n</details>'
)


def hidden(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "x", found[0])


@rule(CHAPTER, PAGE)
def portable(page: Page) -> Said:
    """The Markdown of a page with code uses only what the site, Colab and GitHub all show."""
    if page.kind == PAGE and not page.chapter.code:
        return  # it is no notebook, so neither Colab nor GitHub shows it
    for cell in page.chapter.markdown:
        # Code and formulas are left out, but directives look like code and stay.
        text = FORMULA.sub(hidden, CODE_OR_FENCE.sub(hidden, cell.source))
        text = FOLD_TAGS.sub(hidden, text)
        for what, (pattern, remedy) in NOT_EVERYWHERE.items():
            source = cell.source if what == "a MyST role" else text
            for found in re.finditer(pattern, source, re.M):
                if text[found.start()] != source[found.start()]:
                    continue  # in a code span, such as an array's type, `f32[8]{V:data}`
                said = f"{what}, {found[0][:40].strip()!r}; {remedy}"
                yield line_at(cell, found.start()), said


@rule(CHAPTER, PAGE)
def folded_text(page: Page) -> Said:
    """Folded text is a predict or an aside: details, summary on the next line, then blank lines."""
    for cell in page.chapter.markdown:
        text = CODE_OR_FENCE.sub(hidden, cell.source)
        for found in FOLD.finditer(text):
            if not WELL_FOLDED.fullmatch(found[0].rstrip()):
                how = (
                    'write <details class="predict"> (or aside), <summary>…</summary> on the next '
                    "line, a blank line, the text, a blank line, </details>"
                )
                yield line_at(cell, found.start()), f"folded text that Colab misreads: {how}"
        rest = FOLD.sub(hidden, text)
        for found in re.finditer(r"</?(?:details|summary)\b", rest):
            yield line_at(cell, found.start()), f"{found[0]} without its other half: write both"


@rule(CHAPTER, PAGE, REFERENCE)
def one_title(page: Page) -> Said:
    """A page has one title, and its headings skip no level."""
    found = [
        (cell.line + line, level, text)
        for cell in page.chapter.markdown
        for line, level, text in headings(cell.source)
    ]
    for line, _, text in [one for one in found if one[1] == 1][1:]:
        yield line, f"a second title {text!r}; use ## for sections"
    for (_, before, _), (line, level, text) in zip(found, found[1:]):
        if level > before + 1:
            yield line, f"{text!r} skips a level; use {'#' * (before + 1)}"
