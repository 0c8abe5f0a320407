"""Rules of what a chapter shows when it is executed: nothing on stderr, nothing that changes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nbformat import NotebookNode

from bookkit.lint.prose_rules import bad_alt
from bookkit.lint.rules import CHAPTER, PAGE, Page, Said, rule
from bookkit.model.chapter import Cell

CHANGING = {
    r"\bat 0x[0-9a-f]{6,}|\b0x[0-9a-f]{9,}\b": "an address in memory",
    r"/tmp/|ipykernel_\d": "a temporary path",
    r"/(?:home|root|Users|work|workspace)/|site-packages/": "a path of one machine",
    # That of a stored row stays.
    r"(?<!compiled for TPU v5e, on )(?<!compiled for H100, on )\b20\d\d-\d\d-\d\d\b": "a date",
    r"\b\d\d:\d\d:\d\d\b": "a time of day",
}


def outputs(page: Page) -> Iterator[tuple[Cell, NotebookNode]]:
    """(cell, output) of every output of an executed chapter."""
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


@rule(CHAPTER, PAGE)
def executed(page: Page) -> Said:
    """The code of a page was executed as it stands, so that its outputs can be checked."""
    if page.chapter.code and page.executed is None:
        how = f"run `.venv/bin/bookkit execute {page.chapter.page}`"
        yield 1, f"its code has not been executed as it stands: {how}, then look again"


@rule(CHAPTER, PAGE)
def quiet(page: Page) -> Said:
    """Nothing is written to stderr, nothing warned of, nothing fails that is not meant to."""
    for cell, output in outputs(page):
        text = text_of_output(output)
        if output.output_type == "stream" and output.name == "stderr":
            yield cell.line, f"writes to stderr: {text.strip()[:200]}; mend the cause"
        elif found := re.search(r"(?<![a-z]: )\b\w*Warning: .*", text):  # unless "older: …Warning"
            yield cell.line, f"shows a warning: {found[0][:120]}; mend the cause"
        if output.output_type == "error" and "raises-exception" not in cell.tags:
            yield cell.line, f"fails: {output.ename}: {output.evalue[:120]}"


@rule(CHAPTER, PAGE)
def same_next_time(page: Page) -> Said:
    """No output will differ next time: no addresses in memory, paths, dates, times of day."""
    for cell, output in outputs(page):
        for pattern, what in CHANGING.items() if "timing" not in cell.tags else ():
            if found := re.search(rf".{{0,30}}(?:{pattern}).{{0,30}}", text_of_output(output)):
                yield cell.line, f"shows {what}, {found[0].strip()!r}; print something else"


@rule(CHAPTER, PAGE)
def described_pictures(page: Page) -> Said:
    """Each picture among the outputs says what it shows, for readers who cannot see it."""
    for cell, output in outputs(page):
        data = output.get("data", {})
        html = "".join(data.get("text/html", ""))
        for tag in re.findall(r"<(?:svg|img)\b[^>]*>", html):
            label = re.search(r"\b(?:aria-label|alt)=([\"'])(.*?)\1", tag)
            if "aria-hidden" not in tag:
                for what in bad_alt(label[2] if label else "", "a picture of this cell"):
                    yield cell.line, what
        if any(mime.startswith("image/") for mime in data) and "text/html" not in data:
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            how = "(give it HTML with an aria-label, or the cell `mystnb: {image: {alt: …}}`)"
            for what in bad_alt(alt, "a picture of this cell"):
                yield cell.line, f"{what} {how}"
