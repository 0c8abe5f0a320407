"""Say how much of each page is translated, in each language, and what is broken.

    bookkit translations              a table per language: translated, stale, missing
    bookkit translations --list       and each stale or missing message, with its place
    bookkit translations --msgfmt     fail where gettext's msgfmt is not installed
    bookkit translations --complete   fail where anything is left to translate, as a release asks

Compared with the English as it is now, so an edit shows before `make po`. Nothing is executed. What
is left is reported and fails nothing: the pages show its English. What is broken exits with 2: a
translation that lost a link, a number, code or a formula, a catalogue that gettext refuses, words
against locale/LANGUAGE/terms.toml.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polib
from babel.messages.pofile import PoFileError, read_po

from bookkit.model.book import Book, Language, Problem, find_root
from bookkit.words import catalogues, po
from bookkit.words.catalogues import Catalogue, Message, State
from bookkit.words.checks import (
    House,
    Remark,
    as_signs,
    read_house,
    unlike_english,
    without_english,
)
from bookkit.words.messages import Lines

BROKEN = 2  # exit status
STATES: tuple[State, ...] = ("translated", "stale", "missing")
REST = {
    "code/shared": "comments that chapters share",
    "drawings": "drawings of meshscope",
    "figures": "figures",
    "sphinx": "words of the site",
}
HEADER = ("Language", "Last-Translator", "Language-Team", "PO-Revision-Date", "Content-Type")


# How much is done.


@dataclass(frozen=True)
class Part:
    """One catalogue of a language, and the messages that the English has now."""

    name: str  # book/01-mesh, code/01-mesh, drawings, …
    catalogue: Catalogue
    texts: tuple[str, ...]

    @cached_property
    def states(self) -> dict[str, State]:
        return self.catalogue.states(self.texts)

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.states.values())


def parts_of(book: Book, language: Language, now: dict[str, list[Message]]) -> dict[str, Part]:
    folder = catalogues.catalogue_folder(book, language)
    return {
        name: Part(name, Catalogue(folder / f"{name}.po"), tuple(one.text for one in messages))
        for name, messages in now.items()
    }


def table_of_states(book: Book, language: Language, parts: dict[str, Part]) -> list[str]:
    """Lines of a Markdown table: a row for each page, and for what pages share."""
    rows: list[list[str]] = []
    totals = (Counter[str](), Counter[str]())

    def row(name: str, text: Counter[str] | None, code: Counter[str] | None) -> None:
        both = [(counts, counts or Counter()) for counts in (text, code)]
        cells = [
            str(counts[state]) if known is not None else ""
            for known, counts in both
            for state in STATES
        ]
        sum_ = both[0][1] + both[1][1]
        left = sum_["stale"] + sum_["missing"]
        rows.append([name, *cells, str(left or ""), per_cent(sum_)])

    def counts(name: str, kind: int) -> Counter[str] | None:
        found = parts[name].counts if name in parts else None
        totals[kind].update(found or {})
        return found

    for page in book.pages:
        row(page, counts(page, 0), counts(catalogues.code_name(page), 1))
    for name, title in REST.items():
        text = name == "sphinx"
        row(title, counts(name, 0) if text else None, None if text else counts(name, 1))
    row("all", *totals)
    total = totals[0] + totals[1]
    heads = ["", *(f"text: {STATES[0]}", *STATES[1:]), *(f"code: {STATES[0]}", *STATES[1:])]
    heads += ["left", "%"]
    widths = [max(len(line[n]) for line in [heads, *rows]) for n in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (f"{cell:>{width}}" for cell, width in zip(cells, widths))
        return f"| {' | '.join([first.strip().ljust(widths[0]), *rest])} |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:]), ""])
    done = "complete" if total["translated"] == total.total() else "not complete"
    head = f"{language.name} ({language.code}): {done}, {total['translated']} of {total.total()}"
    about = "text: the page, code: its comments"
    return [f"{head} messages ({about})", "", line(heads), rule, *map(line, rows), ""]


def per_cent(counts: Counter[str]) -> str:
    """Rounded down: 100 is complete."""
    return str(100 * counts["translated"] // counts.total()) if counts else "100"


# Where a message stands.


def place_of_message(book: Book, name: str, text: str) -> str:
    """file:line of an English message; only the file where its line was not found."""
    chapter = f"book/{name.removeprefix('code/')}"
    files = [book.source(chapter if name.startswith("code/") else name)]
    if name == "sphinx":
        files = sorted(book.root.glob("*/**/templates/*.html")) + [book.root / "_config.yml"]
    elif name == "drawings":
        files = [book.root / "bookkit" / "src" / "bookkit" / "words" / "drawn.py"]
    elif name == "figures":
        files = sorted((book.root / "book" / "figures").glob("*.py"))
    elif name == "code/shared":
        files = sorted((book.root / "book" / "cells").glob("*.py"))
        files += [book.source(page) for page in book.chapters]
    elif not name.startswith("code/"):
        files += [book.root / "_toc.yml", *sorted((book.root / "src" / "meshscope").glob("*.py"))]
    for path in files:
        if path.exists() and (line := Lines(path.read_text("utf-8")).of(text)):
            return f"{path.relative_to(book.root).as_posix()}:{line}"
    return files[0].relative_to(book.root).as_posix() if files else name


def unfinished(book: Book, parts: dict[str, Part]) -> Iterator[str]:
    """A line for each stale or missing message, and what a translator does with it."""
    for name, part in parts.items():
        path = part.catalogue.path
        where = path.relative_to(book.root).as_posix()
        for text, state in part.states.items():
            if state == "translated":
                continue
            entry = part.catalogue.entries.get(text)
            at = f"{where}:{entry.linenum}" if entry else f"{where}: `make po` brings it there"
            yield f"{place_of_message(book, name, text)}: {state}: {short(text)}\n    {at}"


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:89]}…"


# What is broken.


@dataclass(frozen=True)
class Found:
    """A finding with its catalogue and message."""

    page: str
    path: Path
    line: int
    finding: Remark
    english: str
    translated: str

    def __str__(self) -> str:
        where = f"{self.path.as_posix()}:{self.line}" if self.line else self.path.as_posix()
        said = f"{where}: {self.finding.check}: {self.finding.what}"
        if self.english:
            said += f"\n    {short(self.english)}\n    {short(self.translated)}"
        return said


def is_markdown(name: str) -> bool:
    return not (name.startswith("code/") or name in REST)


def check_catalogue(root: Path, path: Path, name: str, house: House) -> Iterator[Found]:
    """Every finished message of one catalogue against its English and the language's rules.

    What a page says as a whole is asked of it only if nothing of it is left to translate.
    """
    markdown, shown, catalogue = is_markdown(name), path.relative_to(root), Catalogue(path)
    page: list[str] = []
    prose: list[tuple[str, polib.POEntry]] = []
    for text, entry in catalogue.entries.items():
        if not entry.msgstr or entry.fuzzy:
            continue
        read = as_signs(entry.msgstr, markdown)
        findings = [
            *unlike_english(text, entry.msgstr, markdown, numerals=house.chinese),
            *house.words(read),
            *house.punctuation(text, read),
        ]
        if name == "figures" and entry.msgstr.count("\n") > text.count("\n"):
            many = text.count("\n") + 1
            findings.append(Remark("lines", f"the figure has room for {many}: keep to that number"))
        for finding in findings:
            yield Found(name, shown, entry.linenum, finding, text, entry.msgstr)
        page.append(read)
        if re.search(r"[.:!?]\W*$", text):  # headings and heads of tables end with no point
            prose.append((read, entry))
    if name.startswith("book/") and catalogue.is_complete:
        for finding, number in without_english(house.terms, [read for read, _ in prose], page):
            entry = prose[number][1]
            yield Found(name, shown, entry.linenum, finding, entry.msgid, entry.msgstr)


def check_language(book: Book, language: Language) -> list[Found]:
    """All that is broken in a language, without what its terms.toml excepts."""
    folder = catalogues.catalogue_folder(book, language)
    house = read_house(folder.parent / "terms.toml")
    found: list[Found] = []
    for path in sorted(folder.rglob("*.po")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        found += check_catalogue(book.root, path, name, house)
    used = Counter[int]()

    def excepted(one: Found) -> bool:
        for number, known in enumerate(house.exceptions):
            if (
                known["page"] == one.page
                and known["check"] == one.finding.check
                and (known["text"] in one.finding.what or known["text"] in one.translated)
            ):
                used[number] += 1
                return True
        return False

    left = [one for one in found if not excepted(one)]
    for number, known in enumerate(house.exceptions):
        catalogue = Catalogue(folder / f"{known['page']}.po")  # incomplete: may be stale
        if not used[number] and house.path and catalogue.is_complete:
            what = (
                f"nothing is excepted any more by page {known['page']!r}, check "
                f"{known['check']!r}, text {known['text']!r}: delete that entry"
            )
            path = house.path.relative_to(book.root)
            left.append(Found("", path, 0, Remark("exception", what), "", ""))
    return left


def check_files(book: Book, language: Language, msgfmt: str | None) -> Iterator[str]:
    """Catalogues that gettext refuses, by polib and Babel, and by msgfmt where there is one."""
    for path in sorted(catalogues.catalogue_folder(book, language).parent.rglob("*.po")):
        yield from check_file(book, path, msgfmt)


def check_file(book: Book, path: Path, msgfmt: str | None) -> Iterator[str]:
    """What gettext has against one catalogue."""
    where = path.relative_to(book.root).as_posix()
    try:
        catalogue = polib.pofile(str(path), wrapwidth=0, check_for_duplicates=True)
        with path.open("rb") as stream:
            read_po(stream, abort_invalid=True)
    except (OSError, ValueError, PoFileError) as error:
        yield f"{where}: the file cannot be read: {error}. Mend it with a catalogue editor."
        return
    for name in HEADER:
        if not catalogue.metadata.get(name, "").strip():
            yield f"{where}: the header lacks {name}. `make po` writes it."
    if msgfmt:
        done = subprocess.run(
            [msgfmt, "-c", "-o", "/dev/null", path], capture_output=True, text=True
        )
        if done.returncode or done.stderr.strip():
            yield f"{where}: msgfmt -c says:\n{done.stderr.strip()}"


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="bookkit translations", description=__doc__.split("\n")[0]
    )
    options.add_argument("--list", action="store_true", help="name each stale or missing message")
    options.add_argument("--msgfmt", action="store_true", help="fail if msgfmt is not installed")
    options.add_argument("--complete", action="store_true", help="fail if a message is left")
    chosen, book = options.parse_args(arguments), Book(root or find_root())
    msgfmt = shutil.which("msgfmt")
    if chosen.msgfmt and not msgfmt:
        raise Problem("msgfmt was not found: install gettext (apt-get install gettext)")
    wrong: list[str] = []
    for language in book.languages[1:]:
        wrong += check_files(book, language, msgfmt)
    if not wrong:
        now = po.every_message(book)
        for language in book.languages[1:]:
            parts = parts_of(book, language, now)
            print("\n".join(table_of_states(book, language, parts)))
            if chosen.list:
                print("\n".join([*unfinished(book, parts), ""]))
            left = sum(part.counts["stale"] + part.counts["missing"] for part in parts.values())
            if chosen.complete and left:
                wrong.append(f"{language.name}: {left} messages are left to translate: --list")
            wrong += map(str, check_language(book, language))
    if not msgfmt:
        print("msgfmt is not installed: catalogues were read with polib and Babel only.")
    if wrong:
        print("\n".join(["Broken:", *wrong]), file=sys.stderr)
        return BROKEN
    return 0
