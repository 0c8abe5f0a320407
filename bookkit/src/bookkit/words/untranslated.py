"""Messages that may stay untranslated for now: tests/exceptions.toml, a table for each language.

    [untranslated.zh_TW]
    03-init = 87          # a page, its code included
    "code/shared" = 4     # or a catalogue that pages share

A language that has a table there is complete but for what the table names, with the number of
messages that are left; the numbers only fall. `bookkit translations` fails where one is wrong. A
language without a table, such as one that was just begun, may be incomplete.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from bookkit.model.book import Book, Language, Problem

EXCEPTIONS = "tests/exceptions.toml"
TABLE = r"^\[untranslated\.{code}\][^\n]*\n(?:[\w\"/-]+ *= *\d+[^\n]*\n)*"


def allowed(book: Book, language: Language) -> dict[str, int] | None:
    """How many messages may be left, by name; None for a language that may be incomplete."""
    tables = book.exceptions.get("untranslated") or {}
    if not isinstance(tables, Mapping):
        raise Problem(
            f"{EXCEPTIONS}: untranslated is [untranslated.{language.code}], a table of numbers"
        )
    table = tables.get(language.code)
    for name, number in (table or {}).items():
        if type(number) is not int or number < 1:
            raise Problem(
                f"{EXCEPTIONS}: untranslated.{language.code}: {name} = {number!r} is no count"
            )
    return None if table is None else dict(table)


def waiting(book: Book) -> set[str]:
    """The pages, without their folder, of which a complete language lacks some messages as yet."""
    tables = [allowed(book, language) or {} for language in book.languages[1:]]
    return {name for table in tables for name in table}


def short_name(book: Book, catalogue: str) -> str:
    """What the list calls a catalogue: 03-init for book/03-init and code/03-init."""
    pages = {page.rsplit("/", 1)[-1] for page in book.pages}
    name = catalogue.rsplit("/", 1)[-1]
    return name if name in pages else catalogue


def left(book: Book, counts: Iterable[tuple[str, Mapping[str, int]]]) -> Counter[str]:
    """How many messages are stale or missing, by name, of the states that catalogues count."""
    found = Counter[str]()
    for catalogue, states in counts:
        found[short_name(book, catalogue)] += states.get("stale", 0) + states.get("missing", 0)
    return found


def wrong(language: Language, listed: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    """Where the list says something else than the catalogues, and what to do."""
    where = f"{EXCEPTIONS}: untranslated.{language.code}"
    for name in sorted(listed.keys() | now.keys()):
        is_left, may_be = now.get(name, 0), listed.get(name, 0)
        if name not in now:
            yield f"{where}: there is no page or catalogue {name}: delete that line"
        elif is_left > may_be:
            may = f"only {may_be} may be" if may_be else "it is not on the list"
            yield (
                f"{where}: {name}: {is_left} messages are not translated, {may}: `bookkit translations "
                "--list` names them. Translate them; if the English is new or was rewritten and its "
                f"translation is to follow, `bookkit translations --count {name}`"
            )
        elif is_left < may_be:
            yield (
                f"{where}: {name}: {is_left or 'none'} of {may_be} messages left to translate: "
                "`bookkit translations --count` writes that, commit it"
            )


def lowered(
    listed: Mapping[str, int], now: Mapping[str, int], rewritten: Collection[str]
) -> dict[str, int]:
    """The list as it should be: numbers fall, and rise only for pages that are named `rewritten`."""
    if unknown := sorted(set(rewritten) - now.keys()):
        raise Problem(f"There is no page or catalogue {', '.join(unknown)}: {', '.join(now)}")
    new = {name: min(number, now.get(name, 0)) for name, number in listed.items()}
    new |= {name: now[name] for name in rewritten}
    return {name: new[name] for name in now if new.get(name)}


def write_list(path: Path, language: Language, listed: Mapping[str, int]) -> None:
    """Replace a language's table; all else in the file stays."""
    lines = [f"[untranslated.{language.code}]"]
    for name, number in listed.items():
        key = name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'
        lines.append(f"{key} = {number}")
    table = "\n".join(lines) + "\n"
    pattern = re.compile(TABLE.format(code=re.escape(language.code)), re.M)
    text = path.read_text("utf-8")
    new, found = pattern.subn(lambda _: table, text)
    path.write_text(new if found else f"{text.rstrip(chr(10))}\n\n{table}", "utf-8")
