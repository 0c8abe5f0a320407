"""Say how much is translated, in each language, and what is broken.

    bookkit translations              how much, and each fuzzy or missing message, with its line
    bookkit translations --complete   fail where anything is left to translate, as a release asks

The English is collected as it is now, so an edit shows before `make po`: as missing. Nothing is
executed. What is left is reported and fails nothing: the pages show its English. What is broken
exits with 2: a catalogue that gettext refuses, a translation that lost a link, a number, code or a
formula, words against locale/LANGUAGE/terms.toml.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import polib

from bookkit.model.book import Book, Language, find_root
from bookkit.words.catalogues import Catalogue, State, catalogue_of, catalogue_path
from bookkit.words.checks import Style, as_signs, read_style, unlike_english
from bookkit.words.messages import ABOUT_LINES, is_plain
from bookkit.words.po import template

BROKEN = 2  # exit status
CORRECT = "Correct that line, or save the file with an editor for catalogues, such as Poedit."


# How much is done.


def by_message(left: Sequence[tuple[polib.POEntry, State]], known: Catalogue) -> Iterator[str]:
    """A line for each message: where it is translated, and where it is seen."""
    for entry, state in left:
        there = known.entries.get(entry.msgid)
        line = f":{there.linenum}" if there else ", after `make po`"
        files = ", ".join(file for file, _ in entry.occurrences)
        yield f"    {known.path.name}{line}: {state}: {short(entry.msgid)} ({files})"


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:89]}…"


# What is broken.


def check_message(entry: polib.POEntry, style: Style) -> Iterator[str]:
    """A finished message against its English and the language's rules."""
    text, new, markdown = entry.msgid, entry.msgstr, not is_plain(entry)
    read = as_signs(new, markdown)
    yield from unlike_english(text, new, markdown, numerals=style.chinese)
    yield from style.words(read)
    yield from style.punctuation(text, read)
    room = text.count("\n")
    if ABOUT_LINES in entry.comment and new.count("\n") > room:
        yield f"lines: the drawing has room for {room + 1}: keep to that number"


def check_language(book: Book, language: Language) -> list[str]:
    """All that is broken in a language, each with its line, its English and its translation."""
    catalogue = catalogue_of(book, language)
    where = catalogue.path.relative_to(book.root).as_posix()
    style = read_style(catalogue.path.parent.parent / "terms.toml")
    return [
        f"{where}:{entry.linenum}: {finding}\n    {short(entry.msgid)}\n    {short(entry.msgstr)}"
        for entry in map(catalogue.entries.__getitem__, catalogue.translations)
        for finding in check_message(entry, style)
    ]


def refused_by_gettext(path: Path, root: Path) -> str:
    """What msgfmt has against a catalogue; nothing where there is neither."""
    msgfmt = shutil.which("msgfmt")
    if not msgfmt or not path.exists():
        return ""
    where = path.relative_to(root).as_posix()
    command = [msgfmt, "--check", "--output-file=/dev/null", where]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return f"{done.stderr.strip()}\n    {CORRECT}" if done.returncode else ""


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="bookkit translations", description=__doc__.split("\n")[0]
    )
    options.add_argument("--complete", action="store_true", help="fail if a message is left")
    chosen, book = options.parse_args(arguments), Book(root or find_root())
    if not shutil.which("msgfmt"):
        print("msgfmt is not installed: whether gettext accepts the catalogues was not checked.")
    wrong: list[str] = []
    pot = template(book)
    for language in book.languages[1:]:
        if refused := refused_by_gettext(catalogue_path(book, language), book.root):
            wrong.append(refused)
            continue
        known = catalogue_of(book, language)
        states = [(entry, known.state(entry.msgid)) for entry in pot]
        left = [(entry, state) for entry, state in states if state != "translated"]
        print(f"{language.name}: {len(pot) - len(left)} of {len(pot)} messages are translated")
        for line in by_message(left, known):
            print(line)
        if chosen.complete and left:
            wrong.append(f"{language.name}: {len(left)} messages are left to translate")
        wrong += check_language(book, language)
    if wrong:
        print("\n".join(["Broken:", *wrong]), file=sys.stderr)
        return BROKEN
    return 0
