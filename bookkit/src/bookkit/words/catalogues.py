"""The catalogue of a language, locale/LANGUAGE/LC_MESSAGES/book.po, and what it says of a message.

A message is `translated`, `fuzzy` (its English was edited since) or `missing`. The last two are
shown in English. Text without words, such as a formula, needs no translation.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polib

from bookkit.model.book import Book, Language, Problem

State = Literal["translated", "fuzzy", "missing"]
DOMAIN = "book"  # gettext_compact in _config.yml
WITHOUT_WORDS = re.compile(  # code, pictures (their alt is a message of its own), formulas, …
    r"(`+).+?\1|!\[[^\]]*\]\(\S*\)|\$\$.+?\$\$|\$[^$]+\$|https?://\S+|<[^<>]+>|[^\W\d_]\b|[\W\d_]",
    re.S,
)
PYTHON_TYPE = re.compile(  # as the reference of meshscope shows it
    r"(?:str|int|bool|float|Any|None|(?:tuple|list|dict)(?=\[)|(?:\w+\.)+\w+|[\s\[\],.|])+"
)


def has_words(text: str) -> bool:
    """Is there anything to translate besides code, formulas, addresses and numbers?"""
    return not PYTHON_TYPE.fullmatch(text) and bool(WITHOUT_WORDS.sub("", text))


@dataclass(frozen=True)
class Catalogue:
    """The messages of a .po file by their English, without those that the book no longer has."""

    path: Path
    entries: dict[str, polib.POEntry]
    translations: dict[str, str]  # those that are finished

    def state(self, text: str) -> State:
        """What there is of a text of the book as it is now."""
        if text in self.translations or not has_words(text):
            return "translated"
        entry = self.entries.get(text)
        return "fuzzy" if entry is not None and entry.msgstr else "missing"


def catalogue_path(book: Book, language: Language) -> Path:
    return book.root / "locale" / language.code / "LC_MESSAGES" / f"{DOMAIN}.po"


def catalogue_of(book: Book, language: Language) -> Catalogue:
    """The catalogue of a language; without its file, as for English, it is empty."""
    path = catalogue_path(book, language)
    return read_catalogue(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.lru_cache(maxsize=4)  # reading takes seconds, and every page asks
def read_catalogue(path: Path, changed: int) -> Catalogue:
    """Read a catalogue that was changed at this time; 0: there is none."""
    try:
        file = polib.pofile(str(path), wrapwidth=0) if changed else []
    except (OSError, ValueError) as error:
        raise Problem(f"{error}. Correct that line, or save the file with Poedit.") from None
    entries = {entry.msgid: entry for entry in file if not entry.obsolete}
    done = {text: e.msgstr for text, e in entries.items() if e.msgstr and not e.fuzzy}
    return Catalogue(path, entries, done)
