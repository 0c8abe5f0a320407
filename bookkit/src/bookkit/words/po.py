"""Write the catalogues for translators: locale/LANGUAGE/LC_MESSAGES/**/*.po, from the English book.

    bookkit po            write what changed
    bookkit po --check    write nothing; name what is out of date and fail

Nothing is executed. A catalogue whose messages did not change is left as it is, byte for byte. A
new message is empty, an edited one keeps its translation as fuzzy, with the earlier English beside
it (`#| msgid`); both show English until somebody translates them. bookkit/words/catalogues.py says what
becomes of text that is gone.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Problem, find_root
from bookkit.model.sphinx_command import build_command
from bookkit.words import catalogues
from bookkit.words.catalogues import Catalogue, Message
from bookkit.words.messages import code_messages


def page_messages(book: Book) -> dict[str, list[Message]]:
    """The messages of pages and templates by catalogue, as Sphinx takes them apart."""
    command = build_command(book, book.languages[0], "gettext", book.root / "_build" / "gettext")
    templates = Path(command[-1])
    command += ["-D", "gettext_location=0"]
    done = subprocess.run(command, cwd=book.root, text=True, capture_output=True)
    if done.returncode:
        raise Problem(f"The texts could not be collected:\n{done.stderr or done.stdout}")
    names = [*book.pages, "sphinx"]
    paths = {name: templates / f"{name}.pot" for name in names}
    return {
        name: [Message(entry.msgid) for entry in catalogues.read_catalogue(path)]
        for name, path in paths.items()
        if path.exists()
    }


def every_message(book: Book) -> dict[str, list[Message]]:
    """All messages of the English book as it is now, by catalogue."""
    return {**page_messages(book), **code_messages(book)}


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit po", description=__doc__.split("\n")[0])
    options.add_argument("--check", action="store_true", help="only say what is out of date")
    check, root = options.parse_args(arguments).check, root or find_root()
    book = Book(root)
    messages = every_message(book)
    changed = []
    for language in book.languages[1:]:
        folder = catalogues.catalogue_folder(book, language)
        title = f"{book.config['title']}: {language.name}"
        memory = {
            text: new
            for path in sorted(folder.rglob("*.po"))
            for text, new in Catalogue(path).translations.items()
        }
        for name, wanted in messages.items():
            path = folder / f"{name}.po"
            if catalogues.update(path, wanted, title, language.code, memory, dry=check):
                changed.append(str(path.relative_to(root)))
        done = total = 0
        for name in messages:
            states = Catalogue(folder / f"{name}.po").states(m.text for m in messages[name])
            done += sum(state == "translated" for state in states.values())
            total += len(states)
        where = folder.relative_to(root)
        print(f"{language.name}: {done} of {total} messages translated, in {where}")
    if check and changed:
        raise Problem(f"Out of date: {', '.join(changed)}. Run `make po` and commit.")
    print("\n".join(f"wrote {name}" for name in changed) or "all up to date")
