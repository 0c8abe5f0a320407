"""Rules of what a page shows when it is executed: nothing that changes, every picture described."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbformat import NotebookNode

from bookkit.lint.markdown import bad_alt
from bookkit.lint.rules import Findings, Page, rule
from bookkit.model.chapter import Cell
from bookkit.model.entries import sections

CHANGING = {
    r"\bat 0x[0-9a-f]{6,}|\b0x[0-9a-f]{9,}\b": "an address in memory",
    r"/tmp/|ipykernel_\d": "a temporary path",
    r"/(?:home|root|Users|work|workspace)/|site-packages/": "a path of one machine",
    # That of a stored row stays.
    r"(?<!compiled for TPU v5e, on )(?<!compiled for H100, on )\b20\d\d-\d\d-\d\d\b": "a date",
    r"\b\d\d:\d\d:\d\d\b": "a time of day",
}


def outputs(page: Page) -> Iterator[tuple[Cell, NotebookNode]]:
    """(cell, output) of every output of an executed page."""
    if page.executed:
        for cell, ran in zip(page.chapter.cells, page.executed.cells, strict=True):
            for output in ran.get("outputs", ()):
                yield cell, output


def text_of_output(output: NotebookNode) -> str:
    """All text of one output: streams, results in every text form, errors."""
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join([output.ename, output.evalue, *output.traceback])
    return "\n".join(
        text if isinstance(text, str) else "".join(text)
        for mime, text in output.data.items()
        if mime.startswith("text/") or mime == "image/svg+xml"
    )


@rule
def executed(page: Page) -> Findings:
    """The code of a page was executed as it stands, so that its outputs can be checked."""
    if page.chapter.code and page.executed is None:
        how = f"run `.venv/bin/bookkit execute {page.chapter.page}`"
        yield 1, f"its code has not been executed as it stands: {how}, then look again"


@rule
def same_next_time(page: Page) -> Findings:
    """No output will differ next time: no addresses in memory, paths, dates, times of day."""
    for cell, output in outputs(page):
        for pattern, what in CHANGING.items() if "timing" not in cell.tags else ():
            if found := re.search(rf".{{0,30}}(?:{pattern}).{{0,30}}", text_of_output(output)):
                yield cell.line, f"shows {what}, {found[0].strip()!r}; print something else"


@rule
def described_pictures(page: Page) -> Findings:
    """Each picture among the outputs says what it shows, for readers who cannot see it."""
    for cell, output in outputs(page):
        data = output.get("data", {})
        html = "".join(data.get("text/html", ""))
        alts = []
        for tag in re.findall(r"<(?:svg|img)\b[^>]*>", html):
            label = re.search(r"\b(?:aria-label|alt)=([\"'])(.*?)\1", tag)
            if "aria-hidden" not in tag:
                alts.append(label[2] if label else "")
        if not html and any(mime.startswith("image/") for mime in data):
            alts.append(cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""))
        yield from ((cell.line, what) for alt in alts for what in bad_alt(alt))


@rule
def quoted_messages(page: Page) -> Findings:
    """The messages that messages-*.md quote were raised: there, or in a test of the page."""
    if not page.chapter.name.startswith("messages-") or page.executed is None:
        return
    name = f"test_{page.chapter.name.replace('-', '_')}.py"
    tests = page.book.root / "tests" / "book" / name
    tested = [
        node.value
        for node in ast.walk(ast.parse(tests.read_text("utf-8") if tests.exists() else ""))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for entry in sections(page.chapter):
        shown = [text_of_output(output) for cell, output in outputs(page) if cell in entry.code]
        evidence = ["".join(text.split()) for text in [*shown, *tested]]  # lines may be broken
        for fragment in entry.fragments:
            if not any("".join(fragment.split()) in text for text in evidence):
                how = "quote it, with … for what varies, or assert it in a test of the page"
                yield entry.line, f"{fragment!r} is in no output and no test: {how}"
