"""The page of the version matrix, and the README's summary, from book/matrix.json.

    bookkit matrix-page          write what changed
    bookkit matrix-page --check  write nothing; fail if something is out of date

`bookkit matrix` records what ran and calls this. The tables are HTML as it is, so that their
numbers are no messages for translators; the sentences around them are.
"""

from __future__ import annotations

import argparse
import html
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bookkit.model.book import Book, Problem

MATRIX_PAGE = "book/matrix"
BEGIN, END = "<!-- made by bookkit {}: {} -->", "<!-- end of {} -->"
README = "<!-- made by bookkit matrix-page from book/matrix.json -->"
SHOWN = "python jax jaxlib flax optax orbax-checkpoint numpy scipy scikit-learn ipython".split()
SUMMARY = {
    "floor": "oldest supported",
    "pinned": "pinned",
    "py313": "pinned",
    "colab": "Colab, after the setup cell",
    "newest": "newest, no pins",
}


def path_of(book: Book) -> Path:
    return book.root / "book" / "matrix.json"


def load_record(book: Book) -> dict[str, Any]:
    path = path_of(book)
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def seconds_cell(notebook: dict[str, Any] | None) -> str:
    """Seconds, or the cell that failed with its error, or a dash."""
    if notebook is None:
        return "–"
    if "failed" in notebook:
        return f'<span title="{html.escape(notebook["error"])}">✗ cell {notebook["failed"]}</span>'
    return f"{notebook['seconds']}"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads are names of stacks, packages, notebooks and fields of the record: not translated."""
    top = "<td></td>" + "".join(f'<th scope="col"><code>{one}</code></th>' for one in head)
    lines = [
        f'<tr><th scope="row"><code>{row[0]}</code></th>'
        + "".join(f"<td>{one}</td>" for one in row[1:])
        + "</tr>"
        for row in rows
    ]
    return "\n".join(
        [
            "```{raw} html",
            '<div class="pst-scrollable-table-container"><table class="table">',
            f"<thead><tr>{top}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody>",
            "</table></div>",
            "```",
        ]
    )


def versions_table(data: dict[str, Any]) -> str:
    rows: list[list[str]] = [
        [name, *(version_cell(stack, name) for stack in data.values())] for name in SHOWN
    ]
    rows.append(["date", *(stack["date"] for stack in data.values())])
    rows.append(["commit", *(f"<code>{stack['commit']}</code>" for stack in data.values())])
    return html_table(list(data), rows)


def version_cell(stack: dict[str, Any], name: str) -> str:
    """A version; in Colab also the one that was replaced."""
    now, before = stack["versions"].get(name, "–"), stack["before"].get(name)
    return f"<s>{before}</s> {now}" if before not in (None, now) else now


def seconds_table(data: dict[str, Any]) -> str:
    names = sorted({name for stack in data.values() for name in stack["notebooks"]})
    names.sort(key=lambda name: "/" in name)  # translations last
    rows = [
        [name, *(seconds_cell(stack["notebooks"].get(name)) for stack in data.values())]
        for name in names
    ]
    return html_table(list(data), rows)


def differences_table(data: dict[str, Any]) -> str:
    others = {name: stack for name, stack in data.items() if "differs" in stack}
    names = sorted({name for stack in others.values() for name in stack["differs"]})
    rows = [
        [
            name,
            *(", ".join(map(str, stack["differs"].get(name, []))) for stack in others.values()),
        ]
        for name in names
    ]
    return html_table(list(others), rows) if rows else ""


def passed(stack: dict[str, Any]) -> tuple[int, int]:
    notebooks = stack["notebooks"].values()
    return sum("failed" not in notebook for notebook in notebooks), len(notebooks)


def summary_for_readme(book: Book, data: dict[str, Any]) -> str:
    lines = [
        f"| [tested on]({book.page_url(MATRIX_PAGE)}) | Python | jax | flax | notebooks | when |",
        "|---|---|---|---|---|---|",
    ]
    for name, stack in data.items():
        good, count = passed(stack)
        python = ".".join(stack["versions"]["python"].split(".")[:2])
        found = [stack["versions"].get(package, "–") for package in ("jax", "flax")]
        result = f"{good} pass" if good == count else f"{good} of {count} pass"
        cells = [SUMMARY[name], python, *found, result, stack["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(text: str, name: str, made: str, where: str, verb: str = "matrix-page") -> str:
    """The text, with what a verb made between the two lines that name it."""
    begin, end = BEGIN.format(verb, name), END.format(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise Problem(f"{where} needs the lines {begin} and {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"


def files_of_record(book: Book, data: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    data = {name: data[name] for name in SUMMARY if name in data}
    yield path_of(book), json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    page = book.source(MATRIX_PAGE)
    text = page.read_text("utf-8")
    for name, make in (
        ("versions", versions_table),
        ("seconds", seconds_table),
        ("differences", differences_table),
    ):
        text = fill(text, name, make(data), page.name)
    yield page, text
    readme = book.root / "README.md"
    text = readme.read_text("utf-8")
    if text.count(README) != 1:
        raise Problem(f"README.md needs the line {README}, once, above its table")
    made = lambda _: f"{README}\n{summary_for_readme(book, data)}\n"  # noqa: E731
    yield readme, re.sub(re.escape(README) + r"\n(?:\|.*\n)*", made, text)


def write_record(book: Book, data: dict[str, Any]) -> list[str]:
    """Names of the files that were out of date."""
    stale = []
    for path, text in files_of_record(book, data):
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            stale.append(path.relative_to(book.root).as_posix())
    return stale


def out_of_date(book: Book) -> list[str]:
    return [
        path.relative_to(book.root).as_posix()
        for path, text in files_of_record(book, load_record(book))
        if not path.exists() or path.read_text("utf-8") != text
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        prog="bookkit matrix-page", description=__doc__.split("\n")[0]
    )
    options.add_argument("--check", action="store_true", help="only say what is out of date")
    book = Book()
    if options.parse_args(arguments).check:
        if stale := out_of_date(book):
            raise Problem(f"Out of date: {', '.join(stale)}. Run `bookkit matrix-page`.")
        return
    print(
        "\n".join(f"wrote {name}" for name in write_record(book, load_record(book)))
        or "all up to date"
    )
