"""Catalogues of translations, locale/LANGUAGE/LC_MESSAGES/**/*.po: read, asked, brought up to date.

    NAME.po of a page    its text, as Sphinx takes it apart: book/01-mesh.po
    code/NAME.po         comments in its cells, and what its drawings say: code/01-mesh.po
    code/shared.po       the same of book/cells/
    drawings.po          what meshscope's drawings say
    sphinx.po            the words of the site's templates

A message is `translated`, `stale` (its English was edited since) or `missing`. Text without words,
such as a formula, needs no translation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import polib

from bookkit.model.book import Book, Language

State = Literal["translated", "stale", "missing"]
ALIKE = 0.6  # how much of a text must be left for it to count as the same text, edited
WITHOUT_WORDS = re.compile(  # code, pictures (their alt is a message of its own), formulas, …
    r"(`+).+?\1|!\[[^\]]*\]\(\S*\)|\$\$.+?\$\$|\$[^$]+\$|https?://\S+|<[^<>]+>|[^\W\d_]\b|[\W\d_]+",
    re.S,
)

UNTIL_EDITED = {  # header fields that `msgfmt -c` asks for; Poedit and Weblate write their own
    "Last-Translator": "the authors of {book}",
    "Language-Team": "none",
    "PO-Revision-Date": "2026-11-21 00:00+0000",
    "Plural-Forms": "nplurals=1; plural=0;",
}
PYTHON_TYPE = re.compile(  # as the reference of meshscope shows it
    r"(?:str|int|bool|float|Any|None|(?:tuple|list|dict)(?=\[)|(?:\w+\.)+\w+|[\s\[\],.|])+"
)


@dataclass(frozen=True)
class Message:
    """A text of the book in a catalogue."""

    text: str
    comment: str = ""  # for translators
    flags: tuple[str, ...] = ()


def has_words(text: str) -> bool:
    """Is there anything to translate besides code, formulas, addresses and numbers?"""
    return not PYTHON_TYPE.fullmatch(text) and bool(WITHOUT_WORDS.sub("", text))


def alike(one: str, other: str) -> float:
    """How much two texts have in common, 0 to 1."""
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    if matcher.real_quick_ratio() < ALIKE or matcher.quick_ratio() < ALIKE:
        return 0.0
    return matcher.ratio()


@dataclass(frozen=True)
class Catalogue:
    """One .po file; one that does not exist has no messages."""

    path: Path

    @cached_property
    def entries(self) -> dict[str, polib.POEntry]:
        if not self.path.exists():
            return {}
        return {entry.msgid: entry for entry in read_catalogue(self.path) if not entry.obsolete}

    @cached_property
    def translations(self) -> dict[str, str]:
        """What is finished: fuzzy messages fall back to English."""
        entries = self.entries.items()
        return {text: entry.msgstr for text, entry in entries if entry.msgstr and not entry.fuzzy}

    def states(self, texts: Iterable[str]) -> dict[str, State]:
        """The state of each of the page's texts, as they are now.

        A text that the catalogue does not know was edited, or is new: it is stale if it resembles
        a translated message that the page no longer has.
        """
        now = dict.fromkeys(texts)
        gone = [text for text, entry in self.entries.items() if entry.msgstr and text not in now]

        def state(text: str) -> State:
            entry = self.entries.get(text)
            if text in self.translations or not has_words(text):
                return "translated"
            if entry is not None:
                return "stale" if entry.msgstr else "missing"
            return "stale" if any(alike(text, old) >= ALIKE for old in gone) else "missing"

        return {text: state(text) for text in now}


def read_catalogue(path: Path) -> polib.POFile:
    return polib.pofile(str(path), wrapwidth=0)


def catalogue_folder(book: Book, language: Language) -> Path:
    return book.root / "locale" / language.code / "LC_MESSAGES"


def code_name(page: str) -> str:
    """The catalogue of a chapter's code: code/01-mesh for book/01-mesh."""
    return f"code/{page.rsplit('/', 1)[-1]}"


def catalogues_of_page(book: Book, language: Language, page: str) -> dict[str, Catalogue]:
    """A page's catalogues by kind: its text, and for a chapter its code."""
    here = catalogue_folder(book, language)
    found = {"text": Catalogue(here / f"{page}.po")}
    if page in book.chapters:
        found["code"] = Catalogue(here / f"{code_name(page)}.po")
    return found


def for_code(book: Book, language: Language, page: str) -> dict[str, str]:
    """Translations for a chapter's cells and drawings."""
    paths = paths_of_code(catalogue_folder(book, language), page)
    return {text: new for path in paths for text, new in Catalogue(path).translations.items()}


def names_for_code(page: str) -> tuple[str, ...]:
    """The catalogues that a chapter's cells and drawings use: shared ones, then its own."""
    return ("drawings", "code/shared", code_name(page))


def paths_of_code(here: Path, page: str) -> list[Path]:
    return [here / f"{name}.po" for name in names_for_code(page)]


def words_of_site(book: Book, language: Language) -> Callable[[str], str]:
    """Gettext for the words of the site's templates."""
    translations = Catalogue(catalogue_folder(book, language) / "sphinx.po").translations
    return lambda text: translations.get(text, text)


# Bringing a catalogue up to date.


def updated(
    old: polib.POFile | None, messages: Collection[Message], memory: Mapping[str, str]
) -> list[polib.POEntry]:
    """The entries of a catalogue for these messages, what was translated kept.

    A new message whose very text is translated elsewhere in the book (`memory`) has that
    translation. Any other takes over the translation of a similar one that is gone, or of the one that
    stood in its place: it becomes fuzzy, and keeps the earlier English as `#| msgid`. Finished
    translations of text that is gone stay at the end (`#~`), in case the text comes back.
    """
    before = {entry.msgid: entry for entry in old or ()}
    texts = dict.fromkeys(message.text for message in messages)
    gone = {text: entry for text, entry in before.items() if entry.msgstr and text not in texts}
    new = [text for text in texts if text not in before and text not in memory]
    order = [message.text for message in messages]
    successors = dict(predecessors(list(before.values()), order, new, gone))
    entries = []
    for message in messages:
        entry = polib.POEntry(
            msgid=message.text, comment=message.comment, flags=list(message.flags)
        )
        if kept := before.get(message.text):
            entry.msgstr, entry.previous_msgid = kept.msgstr, kept.previous_msgid
            entry.tcomment = kept.tcomment
            entry.flags += [flag for flag in kept.flags if flag not in entry.flags]
        elif known := memory.get(message.text):
            entry.msgstr = known
        elif predecessor := successors.get(message.text):
            was = gone.pop(predecessor)
            entry.msgstr, entry.tcomment = was.msgstr, was.tcomment
            entry.previous_msgid = (was.fuzzy and was.previous_msgid) or was.msgid
            entry.flags.append("fuzzy")
        entries.append(entry)
    for text, was in gone.items():
        if not was.fuzzy:
            entries.append(polib.POEntry(msgid=text, msgstr=was.msgstr, obsolete=True))
    return entries


def predecessors(
    old: Sequence[polib.POEntry],
    order: Sequence[str],
    new: Sequence[str],
    gone: Mapping[str, polib.POEntry],
) -> Iterator[tuple[str, str]]:
    """(new text, text that it replaces): the most similar first, then by place."""
    left, done = dict.fromkeys(gone), set[str]()
    scores = ((alike(text, was), text, was) for text in new for was in left)
    for _, text, was in sorted((found for found in scores if found[0] >= ALIKE), reverse=True):
        if text not in done and was in left:
            done.add(text)
            del left[was]
            yield text, was
    known = ["", *(entry.msgid for entry in old if not entry.obsolete), "\0"]
    now = ["", *order, "\0"]
    for text in new:
        at = now.index(text)
        before, after = now[at - 1], now[at + 1]
        if text in done or before not in known or after not in known:
            continue
        start, end = known.index(before) + 1, known.index(after)
        if end - start == 1 and known[start] in left:
            del left[known[start]]
            yield text, known[start]


def update(
    path: Path,
    messages: Collection[Message],
    title: str,
    code: str,
    memory: Mapping[str, str],
    dry: bool = False,
) -> bool:
    """Must a catalogue change? Then write it, unless `dry`; else it stays as it is, byte for byte."""
    old = read_catalogue(path) if path.exists() else None
    entries = updated(old, messages, memory)
    before = old.metadata if old is not None else {}
    same = old is not None and list(map(facts, old)) == list(map(facts, entries))
    if same and before.keys() >= UNTIL_EDITED.keys():
        return False
    if dry:
        return True
    new = polib.POFile(wrapwidth=0)
    new.header = title
    book = title.split(":")[0]
    new.metadata = {name: value.format(book=book) for name, value in UNTIL_EDITED.items()}
    new.metadata |= before
    new.metadata |= {
        "Project-Id-Version": book,
        "Language": code,
        "MIME-Version": "1.0",
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Transfer-Encoding": "8bit",
    }
    new.extend(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(new).rstrip("\n") + "\n", "utf-8")
    return True


def facts(entry: polib.POEntry) -> tuple[object, ...]:
    """What of an entry is worth writing a file for."""
    before = entry.previous_msgid or "" if entry.fuzzy else ""
    return (entry.msgid, entry.msgstr, entry.comment, before, set(entry.flags), entry.obsolete)
