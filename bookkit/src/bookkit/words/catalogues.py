"""Catalogues of translations, locale/LANGUAGE/LC_MESSAGES/**/*.po: read, asked, brought up to date.

    NAME.po of a page    its text, as Sphinx takes it apart: book/01-mesh.po
    code/NAME.po         comments in its cells: code/01-mesh.po
    code/shared.po       the same of several pages
    drawings.po          what meshscope's drawings say
    figures.po           what the figures of book/figures/ say
    sphinx.po            the words of the site's templates
    ../memory.po         what was translated once and is not in the book now, of every catalogue

A message is `translated`, `stale` (its English was edited since) or `missing`. Text without words,
such as a formula, needs no translation.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

import polib

from bookkit.model.book import Book, Language
from bookkit.model.history import last_changes

State = Literal["translated", "stale", "missing"]
ALIKE = 0.6  # how much of a text must be left for it to count as the same text, edited
ALIKE_ELSEWHERE = 0.75  # and if it stood on another page, or long ago
WORDS_ALIKE = 0.5  # of those, texts that share fewer words are not compared sign by sign
WITHOUT_WORDS = re.compile(  # code, pictures (their alt is a message of its own), formulas, …
    r"(`+).+?\1|!\[[^\]]*\]\(\S*\)|\$\$.+?\$\$|\$[^$]+\$|https?://\S+|<[^<>]+>|[^\W\d_]\b|[\W\d_]",
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
    if 2 * min(len(one), len(other)) < ALIKE * (len(one) + len(other)):
        return 0.0
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    if matcher.quick_ratio() < ALIKE:
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

    @property
    def is_complete(self) -> bool:
        """Is every message of the file translated? Only `make po` brings new ones there."""
        return all(text in self.translations or not has_words(text) for text in self.entries)

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
    return f"code/{page.removeprefix('book/')}"


def catalogues_of_page(book: Book, language: Language, page: str) -> dict[str, Catalogue]:
    """A page's catalogues by kind: its text, and for a chapter its code."""
    here = catalogue_folder(book, language)
    found = {"text": Catalogue(here / f"{page}.po")}
    if page in book.chapters:
        found["code"] = Catalogue(here / f"{code_name(page)}.po")
    return found


def for_code(book: Book, language: Language, page: str) -> dict[str, str]:
    """Translations for a chapter's cells and drawings."""
    folder = catalogue_folder(book, language)
    return {
        text: new
        for path in paths_of_code(folder, page)
        for text, new in Catalogue(path).translations.items()
    }


def paths_of_figures(book: Book, language: Language) -> list[Path]:
    """What the figures of book/figures/ are shown with; meshscope drew parts of some."""
    folder = catalogue_folder(book, language)
    return [folder / f"{name}.po" for name in ("drawings", "figures")]


def for_figures(book: Book, language: Language) -> dict[str, str]:
    """Translations for the figures of book/figures/."""
    found: dict[str, str] = {}
    for path in paths_of_figures(book, language):
        found |= Catalogue(path).translations
    return found


def names_for_code(page: str) -> tuple[str, ...]:
    """The catalogues that a chapter's cells and drawings use: shared ones, then its own."""
    return ("drawings", "code/shared", code_name(page))


def paths_of_code(here: Path, page: str) -> list[Path]:
    return [here / f"{name}.po" for name in names_for_code(page)]


def last_change(book: Book, page: str, language: Language) -> str:
    """When the page, or its translation, was last committed; "" where the history is not known."""
    here = catalogue_folder(book, language)
    own = [book.source(page), here / f"{page}.po", here / f"{code_name(page)}.po"]
    known = last_changes(book.root)
    names = [path.relative_to(book.root).as_posix() for path in own]
    days = [known[name] for name in names if name in known]
    return max(days, key=datetime.fromisoformat, default="")


def words_of_site(book: Book, language: Language) -> Callable[[str], str]:
    """Gettext for the words of the site's templates."""
    translations = Catalogue(catalogue_folder(book, language) / "sphinx.po").translations
    return lambda text: translations.get(text, text)


# What is known from all catalogues.


def memory_path(book: Book, language: Language) -> Path:
    """Not below LC_MESSAGES: no page is shown with it."""
    return catalogue_folder(book, language).parent / "memory.po"


def remembered(paths: Iterable[Path]) -> dict[str, str]:
    """Every English text that these catalogues know a finished translation of.

    First what is in use, then what is kept of text that is gone (`#~`) or was edited (`#| msgid`).
    """
    used, kept = dict[str, str](), dict[str, str]()
    for path in paths:
        for entry in read_catalogue(path):
            if not entry.msgstr:
                continue
            if entry.fuzzy and entry.previous_msgid:
                kept.setdefault(entry.previous_msgid, entry.msgstr)
            elif not entry.fuzzy:
                (kept if entry.obsolete else used).setdefault(entry.msgid, entry.msgstr)
    return {**kept, **used}


# Bringing a catalogue up to date.


def updated(
    old: polib.POFile | None,
    messages: Collection[Message],
    memory: Mapping[str, str],
    everywhere: Collection[str] = (),
) -> list[polib.POEntry]:
    """The entries of a catalogue for these messages, what was translated kept.

    A new message whose very text is translated elsewhere in the book, or was once (`memory`), has
    that translation. Any other takes over the translation of a similar one that is gone, from this
    page or from the book (`everywhere` has all its texts), or of the one that stood in its place: it
    becomes fuzzy, and keeps the earlier English as `#| msgid`. What no message uses any more is
    left out, and kept by the catalogue of what is `unused`.
    """
    before = {entry.msgid: entry for entry in old or () if not entry.obsolete}
    texts = dict.fromkeys(message.text for message in messages)
    gone = {
        text: Earlier(
            (entry.fuzzy and entry.previous_msgid) or text, entry.msgstr, entry.tcomment, here=True
        )
        for text, entry in before.items()
        if entry.msgstr and text not in texts
    }
    for text, known in memory.items():
        if text not in gone and text not in texts and text not in everywhere:
            gone[text] = Earlier(text, known)
    unknown = [text for text in texts if text not in before and text not in memory]
    new = [text for text in unknown if has_words(text)]
    moved = {text for text in gone if text in everywhere}
    order = [message.text for message in messages]
    successors = dict(predecessors(list(before.values()), order, new, gone, moved))
    entries = []
    for message in messages:
        entry = polib.POEntry(
            msgid=message.text, comment=message.comment, flags=list(message.flags)
        )
        kept, same = before.get(message.text), memory.get(message.text)
        edited = kept and kept.fuzzy and kept.previous_msgid
        if kept and (same is None or (kept.msgstr and not edited)):
            entry.msgstr, entry.previous_msgid = kept.msgstr, kept.previous_msgid
            entry.tcomment = kept.tcomment
            entry.flags += [flag for flag in kept.flags if flag not in entry.flags]
        elif same is not None:
            entry.msgstr = same
            entry.tcomment = kept.tcomment if kept else ""
        elif predecessor := successors.get(message.text):
            was = gone[predecessor]
            entry.msgstr, entry.tcomment = was.translation, was.comment
            entry.previous_msgid = was.english
            entry.flags.append("fuzzy")
        entries.append(entry)
    return entries


@dataclass(frozen=True)
class Earlier:
    """A translation whose English is gone."""

    english: str  # that it was made from
    translation: str
    comment: str = ""  # the translator's own
    here: bool = False  # on this page, just now


def predecessors(
    old: Sequence[polib.POEntry],
    order: Sequence[str],
    new: Sequence[str],
    gone: Mapping[str, Earlier],
    moved: Collection[str] = (),
) -> Iterator[tuple[str, str]]:
    """(new text, text that it replaces): the most similar first, then by place.

    In the place of a text that `moved` to another page there is a new one.
    """
    left, done = dict.fromkeys(gone), set[str]()
    scores = ((likeness(text, was, gone[was].here), text, was) for text in new for was in left)
    for _, text, was in sorted((found for found in scores if found[0]), reverse=True):
        if text not in done and was in left:
            done.add(text)
            del left[was]
            yield text, was
    known = ["", *(entry.msgid for entry in old), "\0"]
    now = ["", *order, "\0"]
    for text in new:
        at = now.index(text)
        before, after = now[at - 1], now[at + 1]
        if text in done or before not in known or after not in known:
            continue
        start, end = known.index(before) + 1, known.index(after)
        if end - start == 1 and known[start] in left and known[start] not in moved:
            del left[known[start]]
            yield text, known[start]


def likeness(text: str, was: str, here: bool) -> float:
    """How much an earlier text has in common with a new one, if it is enough; else 0."""
    if here:
        score = alike(text, was)
        return score if score >= ALIKE else 0.0
    shared, size = (
        len(bag_of_words(text) & bag_of_words(was)),
        len(bag_of_words(text)) + len(bag_of_words(was)),
    )
    if 2 * shared < WORDS_ALIKE * size:
        return 0.0
    score = alike(text, was)
    return score if score >= ALIKE_ELSEWHERE else 0.0


@functools.cache
def bag_of_words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def unused(memory: Mapping[str, str], used: Collection[str]) -> list[polib.POEntry]:
    """What is translated and not `used` now, in the order of the English: nothing is thrown away."""
    kept = sorted((text, known) for text, known in memory.items() if text not in used)
    return [polib.POEntry(msgid=text, msgstr=known) for text, known in kept]


def write_catalogue(
    path: Path, entries: Sequence[polib.POEntry], title: str, code: str, dry: bool = False
) -> bool:
    """Must a catalogue change? Then write it, unless `dry`; else it stays as it is, byte for byte."""
    old = read_catalogue(path) if path.exists() else None
    if old is None and not entries:
        return False
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
