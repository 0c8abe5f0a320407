"""Rules of Markdown: what Colab and GitHub cannot show, pictures without words, dead addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser

from bookkit.lint.rules import Findings, Page, rule

EXTENSIONS = {"amsmath", "colon_fence", "deflist", "dollarmath", "substitution"}
MYST = create_md_parser(MdParserConfig(enable_extensions=EXTENSIONS), RendererHTML)
ONLY_MYST = {  # what tokens are called, and what to write instead
    "myst_target": "write a heading and link to it by its full address",
    "myst_role": "write it out, or link by full address",
    "myst_line_comment": "delete it",
    "myst_block_break": "delete it",
    "colon_fence": "use a GitHub alert, a table or a list",
    "substitution_inline": "write it out",
    "substitution_block": "write it out",
    "footnote_ref": "write a sentence, or a link",
    "dl_open": "write a list or a table",
}
FOLD = re.compile(
    r'<details class="(?:predict|aside)">\n<summary>[^\n]+</summary>\n*|</details>\n*'
)
NOT_AN_ALERT = re.compile(r"\[!(?!(?:NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]$)\w", re.M)
WORDS_OF_ALT = 4


def tokens(page: Page) -> Iterator[tuple[int, Token]]:
    """(line of the file, token) of all Markdown of a page, as MyST reads it."""
    for cell in page.chapter.markdown:
        for token in MYST.parse(cell.source):
            line = cell.line + (token.map or [0])[0]
            yield line, token
            yield from ((line, child) for child in token.children or ())


@rule
def portable(page: Page) -> Findings:
    """A page with code uses only what the site, Colab and GitHub all show."""
    if not page.chapter.code:
        return
    folds = 0
    for line, token in tokens(page):
        text = token.content
        if token.type in ONLY_MYST:
            yield line, f"only MyST shows {text[:40]!r}; {ONLY_MYST[token.type]}"
        elif token.type == "fence" and token.info.startswith("{"):
            yield line, f"only MyST shows {token.info}; use a GitHub alert, a table or a list"
        elif token.type == "link_open":
            url = str(token.attrs["href"])
            if not url.startswith(("http://", "https://")):
                yield line, f"Colab cannot follow {url!r}; write its full address"
        elif token.type == "html_block" and FOLD.fullmatch(text):
            folds += 1 if text.startswith("<details") else -1
        elif token.type in ("html_block", "html_inline") and not text.startswith("<!--"):
            yield (
                line,
                (
                    f"raw HTML, {text[:40]!r}; use Markdown. A fold is <details "
                    'class="predict"> (or aside), on the next line <summary>…</summary>, a blank '
                    "line, the text, a blank line, </details>"
                ),
            )
        elif token.type == "inline" and NOT_AN_ALERT.match(text):
            yield line, "GitHub has no such alert; write [!NOTE], TIP, IMPORTANT, WARNING, CAUTION"
    if folds:
        yield 1, "a <details> without its </details>, or the reverse; write both"


@rule
def alt_text(page: Page) -> Findings:
    """Each picture in Markdown says what it shows."""
    for line, token in tokens(page):
        if token.type == "image" and not str(token.attrs["src"]).endswith("/colab-badge.svg"):
            yield from ((line, what) for what in bad_alt(token.content))


def bad_alt(alt: str) -> Iterator[str]:
    if len(alt.split()) < WORDS_OF_ALT:
        yield f"a picture with the alt text {alt!r}; say what it shows, its axes and the conclusion"
