"""Write the catalogues for translators: locale/LANGUAGE/LC_MESSAGES/**/*.po, from the English book.

    bookkit po            write what changed
    bookkit po --check    write nothing; name what is out of date and fail

Nothing is executed. A catalogue whose messages did not change is left as it is, byte for byte. A
message that is new on a page, but whose very text is or was translated somewhere in the book, has
that translation. An edited one keeps its translation as fuzzy, with the earlier English beside it
(`#| msgid`). Any other is empty. The last two show English until somebody translates them.

No translation is thrown away: what no page uses any more stands in locale/LANGUAGE/memory.po, and
is used again when its English comes back, on whatever page.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from bookkit.model.book import Book, Language, Problem, find_root
from bookkit.model.sphinx_command import build_command
from bookkit.words import catalogues
from bookkit.words.catalogues import Catalogue, Message
from bookkit.words.messages import code_messages, messages_of_page


def page_messages(book: Book) -> dict[str, list[Message]]:
    """The messages of pages and templates by catalogue, as Sphinx takes them apart."""
    command = build_command(book, book.languages[0], "gettext", book.root / "_build" / "gettext")
    templates = Path(command[-1])
    command.remove("-W")  # a link that leads nowhere is refused when the pages are built
    command += ["-D", "gettext_location=0", "-D", "nb_execution_mode=off"]
    done = subprocess.run(command, cwd=book.root, text=True, capture_output=True)
    if done.returncode:
        raise Problem(f"The texts could not be collected:\n{done.stderr or done.stdout}")
    found = {}
    for name in [*book.pages, "sphinx"]:
        path = templates / f"{name}.pot"
        if path.exists():
            texts = [entry.msgid for entry in catalogues.read_catalogue(path) if entry.msgid]
            found[name] = (
                [Message(text) for text in texts]
                if name == "sphinx"
                else messages_of_page(book, name, texts)
            )
    return found


def every_message(book: Book) -> dict[str, list[Message]]:
    """All messages of the English book as it is now, by catalogue."""
    return {**page_messages(book), **code_messages(book)}


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit po", description=__doc__.split("\n")[0])
    options.add_argument("--check", action="store_true", help="only say what is out of date")
    check, root = options.parse_args(arguments).check, root or find_root()
    book = Book(root)
    messages = every_message(book)
    everywhere = {message.text for found in messages.values() for message in found}
    changed: list[str] = []
    for language in book.languages[1:]:
        changed += update_language(book, language, messages, everywhere, check)
    if check and changed:
        raise Problem(f"Out of date: {', '.join(changed)}. Run `make po` and commit.")
    print("\n".join(changed) or "all up to date")


def update_language(
    book: Book,
    language: Language,
    messages: dict[str, list[Message]],
    everywhere: Collection[str],
    check: bool,
) -> list[str]:
    """Bring a language's catalogues up to date, unless `check`, and say which."""
    folder = catalogues.catalogue_folder(book, language)
    memory_file = catalogues.memory_path(book, language)
    title = f"{book.config['title']}: {language.name}"
    paths = [*sorted(folder.rglob("*.po")), *filter(Path.exists, [memory_file])]
    memory = catalogues.remembered(paths)
    wanted = {folder / f"{name}.po": found for name, found in messages.items()}
    changed, used = [], set[str]()
    done = total = 0
    for path, found in wanted.items():
        old = catalogues.read_catalogue(path) if path.exists() else None
        entries = catalogues.updated(old, found, memory, everywhere)
        used |= {entry.msgid for entry in entries if entry.msgstr and not entry.fuzzy}
        if catalogues.write_catalogue(path, entries, title, language.code, dry=check):
            changed.append(path)
        states = Catalogue(path).states(message.text for message in found)
        done += sum(state == "translated" for state in states.values())
        total += len(states)
    unused, about = catalogues.unused(memory, used), f"{title}, not in the book now"
    if catalogues.write_catalogue(memory_file, unused, about, language.code, dry=check):
        changed.append(memory_file)
    gone = [path for path in paths if path not in wanted and path != memory_file]
    print(f"{language.name}: {done} of {total} messages translated, in {shown(book, folder)}")
    if check:
        return [shown(book, path) for path in [*changed, *gone]]
    for path in gone:
        path.unlink()
    said = [f"wrote {shown(book, path)}" for path in changed]
    return said + [
        f"removed {shown(book, path)}, of no page; {memory_file.name} has it" for path in gone
    ]


def shown(book: Book, path: Path) -> str:
    return path.relative_to(book.root).as_posix()
