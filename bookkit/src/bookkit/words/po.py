"""Bring the catalogues for translators up to date: locale/LANGUAGE/LC_MESSAGES/book.po.

Sphinx's gettext builder collects the text of pages and templates; comments and docstrings in code
and words of drawings are added (bookkit/words/messages.py), in the order of the book. gettext's
msgmerge then does what it does in every project: a message whose English did not change stays, an
edited one keeps its translation as fuzzy with the earlier English beside it (`#| msgid`), and what
the book no longer says stays at the end (`#~`), where it is found again when its English comes
back. Nothing is executed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import polib

from bookkit.model.book import Book, Problem, find_root
from bookkit.model.sphinx_command import build_command
from bookkit.words.catalogues import DOMAIN, catalogue_path
from bookkit.words.messages import unseen_by_sphinx

GET_GETTEXT = "install gettext (apt-get install gettext, brew install gettext, conda/pixi: gettext)"


def collected_by_sphinx(book: Book) -> list[polib.POEntry]:
    """The messages of pages and templates, as Sphinx takes them apart."""
    folder = book.root / "_build" / "gettext"
    command = build_command(book, book.languages[0], "gettext", folder)
    command.remove("-W")  # a link that leads nowhere is refused when the pages are built
    command += ["-D", "nb_execution_mode=off"]
    done = subprocess.run(command, cwd=book.root, text=True, capture_output=True)
    if done.returncode:
        raise Problem(f"The texts could not be collected:\n{done.stderr or done.stdout}")
    paths = [folder / "gettext" / f"{domain}.pot" for domain in (DOMAIN, "sphinx")]
    return [entry for path in paths if path.exists() for entry in polib.pofile(str(path))
            if entry.msgid]  # fmt: skip


def template(book: Book) -> polib.POFile:
    """Every message of the English book as it is now, once, in the order of the book."""
    order = {f"{page}.md": n for n, page in enumerate(book.pages)}
    found: dict[str, polib.POEntry] = {}
    places: dict[str, list[tuple[int, str, int]]] = {}  # where in the book, file, line
    reached: dict[str, int] = {}  # the cells of a table have no line: they follow what had one
    for entry in [*collected_by_sphinx(book), *unseen_by_sphinx(book)]:
        found.setdefault(entry.msgid, entry)
        for place, line in entry.occurrences:
            if file := file_of(place):
                reached[file] = int(line or 0) or reached.get(file, 0)
                at = (order.get(file, len(order)), file, reached[file])
                places.setdefault(entry.msgid, []).append(at)
    pot = polib.POFile(wrapwidth=0)
    pot.header = f"{book.config['title']}: messages for translators"
    pot.metadata = {
        "Project-Id-Version": book.config["title"],
        "Report-Msgid-Bugs-To": f"{book.repo}/issues",
        "MIME-Version": "1.0",
        "Content-Type": "text/plain; charset=UTF-8",
        "Content-Transfer-Encoding": "8bit",
    }
    for text in sorted(found, key=lambda text: min(places[text])):
        files = dict.fromkeys(file for _, file, _ in sorted(places[text]))
        about = {"comment": found[text].comment, "flags": found[text].flags}
        pot.append(polib.POEntry(msgid=text, occurrences=[(file, "") for file in files], **about))
    return pot


def file_of(place: str) -> str:
    """book/01-mesh.md of ../../../book/01-mesh.md; "" for the rest of "file:docstring of name"."""
    found = re.fullmatch(r"(?:\.\./)*([^:]+/[^:]+?)(?::docstring)?", place)
    return found[1] if found else ""


def run_gettext(program: str, *arguments: str | Path) -> None:
    if not shutil.which(program):
        raise Problem(f"{program} was not found: {GET_GETTEXT}")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"{program} failed:\n{done.stderr.strip()}")


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    argparse.ArgumentParser(prog="bookkit po", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    book = Book(root or find_root())
    pot, path = template(book), book.root / "_build" / "gettext" / f"{DOMAIN}.pot"
    pot.save(str(path))
    for language in book.languages[1:]:
        catalogue = catalogue_path(book, language)
        if catalogue.exists():
            update = ("--quiet", "--previous", "--no-wrap", "--update", "--backup=none")
            run_gettext("msgmerge", *update, catalogue, path)
        else:
            catalogue.parent.mkdir(parents=True, exist_ok=True)
            start = ("--no-translator", "--no-wrap", f"--locale={language.code}")
            run_gettext("msginit", *start, "-i", path, "-o", catalogue)
        # gettext wraps the lines that name files; as polib writes them, a change is its own diff.
        polib.pofile(str(catalogue), wrapwidth=0).save()
        print(f"{catalogue.relative_to(book.root).as_posix()} is up to date with the English")
    print("`make translations` says what is left to translate")
