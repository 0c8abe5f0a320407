"""Say how much of each page is translated, in each language, and what is broken.

    bookkit translations              a table per language: translated, fuzzy, missing
    bookkit translations --list       and each fuzzy or missing message, with its place
    bookkit translations --complete   fail where anything is left to translate, as a release asks

The English is collected as it is now, so an edit shows before `make po`: as missing. Nothing is
executed. What is left is reported and fails nothing: the pages show its English. What is broken
exits with 2: a catalogue that gettext refuses, a translation that lost a link, a number, code or a
formula, words against locale/LANGUAGE/terms.toml.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polib

from bookkit.model.book import Book, Language, Problem, find_root
from bookkit.words.catalogues import Catalogue, State, catalogue_of, catalogue_path
from bookkit.words.checks import (
    House,
    Remark,
    as_signs,
    read_house,
    unlike_english,
    without_english,
)
from bookkit.words.messages import ABOUT_LINES, is_plain
from bookkit.words.po import GET_GETTEXT, template

BROKEN = 2  # exit status
CORRECT = "Correct that line, or save the file with an editor for catalogues, such as Poedit."
STATES: tuple[State, ...] = ("translated", "fuzzy", "missing")
REST = {"book/figures/": "figures", "src/": "meshscope", "": "words of the site"}


# How much is done.


def part_of(file: str) -> str:
    """The row of the table for a file: its page, or what is no page."""
    if file.endswith(".md"):
        return file.removesuffix(".md")
    return next(title for folder, title in REST.items() if file.startswith(folder))


def table_of_states(book: Book, language: Language, pot: polib.POFile) -> str:
    """A Markdown table: a row for each page, and for what is on no page or on several."""
    known, counts = catalogue_of(book, language), defaultdict[str, Counter[str]](Counter)
    for entry in pot:
        state = known.state(entry.msgid)
        for part in {part_of(file) for file, _ in entry.occurrences} | {"all"}:
            counts[part][state] += 1
    parts = [part for part in (*book.pages, *REST.values(), "all") if part in counts]
    wide = max(map(len, parts))
    done, total = counts["all"]["translated"], counts["all"].total()
    lines = [
        f"{language.name} ({language.code}): {done} of {total} messages are translated",
        "",
        f"| {'':{wide}} | {' | '.join(STATES)} |   % |",
        f"|{'-' * (wide + 2)}|{'|'.join('-' * (len(one) + 1) + ':' for one in STATES)}|----:|",
    ]
    for part in parts:
        row = counts[part]
        cells = " | ".join(f"{row[state]:{len(state)}}" for state in STATES)
        percent = 100 * row["translated"] // row.total()  # rounded down: 100 is complete
        lines.append(f"| {part:{wide}} | {cells} | {percent:3} |")
    return "\n".join([*lines, ""])


def unfinished(book: Book, language: Language, pot: polib.POFile) -> Iterator[str]:
    """A line for each fuzzy or missing message: where it is translated, and where it is seen."""
    known = catalogue_of(book, language)
    where = known.path.relative_to(book.root).as_posix()
    for entry in pot:
        if (state := known.state(entry.msgid)) != "translated":
            there = known.entries.get(entry.msgid)
            line = f":{there.linenum}" if there else ", after `make po`"
            files = ", ".join(file for file, _ in entry.occurrences)
            yield f"{where}{line}: {state}: {short(entry.msgid)} ({files})"


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:89]}…"


# What is broken.


@dataclass(frozen=True)
class Found:
    """A finding with its message; without one, of a whole file."""

    path: Path
    finding: Remark
    entry: polib.POEntry | None = None

    def __str__(self) -> str:
        where = self.path.as_posix()
        if self.entry is None:
            return f"{where}: {self.finding.check}: {self.finding.what}"
        english, translated = short(self.entry.msgid), short(self.entry.msgstr)
        said = f"{where}:{self.entry.linenum}: {self.finding.check}: {self.finding.what}"
        return f"{said}\n    {english}\n    {translated}"

    def is_excepted_by(self, known: Mapping[str, str]) -> bool:
        """Does an [[exception]] of terms.toml say that this is right?"""
        return (
            self.entry is not None
            and known["check"] == self.finding.check
            and any(part_of(file) == known["page"] for file, _ in self.entry.occurrences)
            and (known["text"] in self.finding.what or known["text"] in self.entry.msgstr)
        )


def check_messages(catalogue: Catalogue, house: House, shown: Path) -> Iterator[Found]:
    """Every finished message against its English and the language's rules."""
    for text, new in catalogue.translations.items():
        entry = catalogue.entries[text]
        markdown = not is_plain(entry)
        read = as_signs(new, markdown)
        yield from (
            Found(shown, finding, entry)
            for finding in (
                *unlike_english(text, new, markdown, numerals=house.chinese),
                *house.words(read),
                *house.punctuation(text, read),
                *lines_of_drawing(entry),
            )
        )


def lines_of_drawing(entry: polib.POEntry) -> Iterator[Remark]:
    room = entry.msgid.count("\n")
    if ABOUT_LINES in entry.comment and entry.msgstr.count("\n") > room:
        yield Remark("lines", f"the drawing has room for {room + 1}: keep to that number")


def whole_pages(catalogue: Catalogue) -> dict[str, list[polib.POEntry]]:
    """The text of each page that is translated as a whole."""
    pages = defaultdict[str, list[polib.POEntry]](list)
    for entry in catalogue.entries.values():
        for file, _ in entry.occurrences:
            if not is_plain(entry):
                pages[part_of(file)].append(entry)
    return {
        page: entries
        for page, entries in pages.items()
        if all(catalogue.state(entry.msgid) == "translated" for entry in entries)
    }


def check_page(entries: Sequence[polib.POEntry], house: House, shown: Path) -> Iterator[Found]:
    """What a page must say once. Headings and heads of tables, without a full stop, are no prose."""
    prose = [entry for entry in entries if re.search(r"[.:!?]\W*$", entry.msgid)]
    every, sentences = ([as_signs(entry.msgstr) for entry in some] for some in (entries, prose))
    for finding, number in without_english(house.terms, sentences, every):
        yield Found(shown, finding, prose[number])


def check_language(book: Book, language: Language) -> list[Found]:
    """All that is broken in a language, without what its terms.toml excepts."""
    catalogue = catalogue_of(book, language)
    shown = catalogue.path.relative_to(book.root)
    house = read_house(catalogue.path.parent.parent / "terms.toml")
    whole, found = whole_pages(catalogue), list(check_messages(catalogue, house, shown))
    for entries in whole.values():
        found += check_page(entries, house, shown)
    left = [one for one in found if not any(map(one.is_excepted_by, house.exceptions))]
    for known in house.exceptions:
        used = any(one.is_excepted_by(known) for one in found)
        if house.path and not used and known["page"] in whole:  # else it may be of what waits
            what = f"nothing is excepted any more by {known}: delete that entry"
            left.append(Found(house.path.relative_to(book.root), Remark("exception", what)))
    return left


def check_file(path: Path, root: Path) -> Iterator[str]:
    """What gettext has against a catalogue: msgfmt where it is installed, else what polib reads."""
    where = path.relative_to(root).as_posix()
    if msgfmt := shutil.which("msgfmt"):
        command = [msgfmt, "--check", "--output-file=/dev/null", where]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            yield f"{done.stderr.strip()}\n    {CORRECT}"
        return
    try:
        polib.pofile(str(path), check_for_duplicates=True)
    except (OSError, ValueError) as error:
        yield f"{where}: the file cannot be read: {error}\n    {CORRECT}"


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="bookkit translations", description=__doc__.split("\n")[0]
    )
    options.add_argument("--list", action="store_true", help="name each fuzzy or missing message")
    options.add_argument("--msgfmt", action="store_true", help="fail if msgfmt is not installed")
    options.add_argument("--complete", action="store_true", help="fail if a message is left")
    chosen, book = options.parse_args(arguments), Book(root or find_root())
    if not shutil.which("msgfmt"):
        if chosen.msgfmt:
            raise Problem(f"msgfmt was not found: {GET_GETTEXT}")
        print("msgfmt is not installed: whether gettext accepts the catalogues was not checked.")
    wrong: list[str] = []
    pot = template(book)
    for language in book.languages[1:]:
        path = catalogue_path(book, language)
        refused = list(check_file(path, book.root)) if path.exists() else []
        wrong += refused
        if refused:
            continue
        print(table_of_states(book, language, pot))
        left = list(unfinished(book, language, pot))
        if chosen.list:
            print("\n".join([*left, ""]))
        if chosen.complete and left:
            wrong.append(f"{language.name}: {len(left)} messages are left to translate: --list")
        wrong += map(str, check_language(book, language))
    if wrong:
        print("\n".join(["Broken:", *wrong]), file=sys.stderr)
        return BROKEN
    return 0
