"""Executed chapters: nothing on stderr, no warnings, nothing that changes from run to run.

That a second execution, without a network, shows the same is `bookkit offline`; here is
what one execution can show, and that the comparison itself is not blind.
"""
import re
import subprocess
import sys

import pytest

from bookkit.model.chapter import chapters
from executed import executed, outputs, shown
from rules import BOOK, verify
from test_style import bad_alt

CHANGING = {
    r"\bat 0x[0-9a-f]{6,}|\b0x[0-9a-f]{9,}\b": "an address in memory",
    r"/tmp/|ipykernel_\d": "a temporary path",
    r"/(?:home|root|Users|work|workspace)/|site-packages/": "a path of one machine",
    r"\b20\d\d-\d\d-\d\d\b": "a date",
    r"\b\d\d:\d\d:\d\d\b": "a time of day",
}


def stray(name, notebook):
    """What an execution wrote to stderr, warned of, or shows that will differ next time."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            where = f"book/{name}.md, cell {number}"
            text = shown(output)
            if output.output_type == "stream" and output.name == "stderr":
                yield f"{where}: writes to stderr: {text.strip()[:200]}; mend the cause"
            elif found := re.search(r"\b\w*Warning: .*", text):
                yield f"{where}: shows a warning: {found[0][:120]}; mend the cause"
            if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
                yield f"{where}: fails: {output.ename}: {output.evalue[:120]}"
            if "timing" in cell.metadata.get("tags", []):
                continue
            for pattern, what in CHANGING.items():
                if found := re.search(rf".{{0,30}}(?:{pattern}).{{0,30}}", text):
                    yield f"{where}: shows {what}, {found[0].strip()!r}; print something else"


def undescribed(name, notebook):
    """Pictures among the outputs that a reader who cannot see them misses."""
    for cell, output in outputs(notebook):
        data = output.get("data", {})
        where = f"book/{name}.md, the picture of `{first_line(cell)}`"
        for tag in re.findall(r"<svg\b[^>]*>", "".join(data.get("text/html", ""))):
            label = re.search(r"aria-label=([\"'])(.*?)\1", tag)
            if "aria-hidden" not in tag:
                yield from bad_alt(label[2] if label else "", where)
        for tag in re.findall(r"<img\b[^>]*>", "".join(data.get("text/html", ""))):
            label = re.search(r"\balt=([\"'])(.*?)\1", tag)
            yield from bad_alt(label[2] if label else "", where)
        if any(mime.startswith("image/") for mime in data) and "text/html" not in data:
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            yield from bad_alt(alt, where + " (give it HTML with an aria-label, or the cell "
                                            "`mystnb: {image: {alt: …}}`)")


def first_line(cell):
    return next((line for line in cell.source.splitlines() if line.strip()), "")[:60]


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_nothing_stray(chapter):
    verify(stray(chapter.name, executed(chapter.name)))


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_pictures_are_described(chapter):
    verify(undescribed(chapter.name, executed(chapter.name)))


def test_every_chapter_is_executed():
    names = {f"book/{chapter.name}" for chapter in chapters()}
    assert names == set(BOOK.chapters), "chapters in book/ and in _toc.yml differ; see test_toc"


@pytest.mark.parametrize("language", BOOK.languages[1:], ids=lambda language: language.code)
def test_a_translated_chapter_runs_as_it_is(language):
    """One here, all of them every night."""
    path = BOOK.notebook(BOOK.chapters[0], language)
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--nbmake-timeout=300", str(path)]
    done = subprocess.run(command, cwd=BOOK.root, capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1 notebooks passed" in done.stdout, done.stdout + done.stderr
