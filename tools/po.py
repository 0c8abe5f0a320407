"""Write the catalogues for translators: locale/LANGUAGE/LC_MESSAGES/*.po, from the English text.

A new message is empty, an edited one becomes fuzzy; both show English until somebody translates
them. What a catalogue holds for text that is gone is dropped.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import polib

from tools.book import Book, Problem
from tools.site import build_command


def run(command: list[str], root: Path) -> None:
    done = subprocess.run(command, cwd=root, text=True, capture_output=True)
    if done.returncode:
        raise Problem(f"{' '.join(command[:4])} … failed:\n{done.stderr or done.stdout}")


def tidy(text: str) -> str:
    """Without flags that take braces and percent signs in prose for Python's formats."""
    text = re.sub(r"^#, python-(?:brace-)?format\n", "", text, flags=re.M)
    return re.sub(r", python-(?:brace-)?format\b", "", text)


def main() -> None:
    book = Book()
    english = book.languages[0]
    templates = book.root / "_build" / "gettext"
    command = build_command(book, english, "gettext")
    command[command.index("-d") + 1] = str(templates.with_name("gettext-doctrees"))
    run([*command[:-1], "-D", "gettext_location=0", str(templates)], book.root)
    for language in book.languages[1:]:
        intl = [sys.executable, "-m", "sphinx_intl", "update", "-p", str(templates), "-d", "locale"]
        run([*intl, "-l", language.code, "-w", "0"], book.root)
        done = total = 0
        folder = book.root / "locale" / language.code / "LC_MESSAGES"
        for path in sorted(folder.rglob("*.po")):
            path.write_text(tidy(path.read_text("utf-8")), "utf-8")
            catalogue = polib.pofile(str(path))
            for entry in catalogue.obsolete_entries():
                catalogue.remove(entry)
            catalogue.header = f"{book.config['title']}: {language.name}"
            catalogue.metadata_is_fuzzy = False
            catalogue.metadata = {
                "Project-Id-Version": book.config["title"],
                "Language": language.code,
                "MIME-Version": "1.0",
                "Content-Type": "text/plain; charset=utf-8",
                "Content-Transfer-Encoding": "8bit",
                "Plural-Forms": "nplurals=1; plural=0;",
            }
            catalogue.wrapwidth = 0
            catalogue.save(str(path))
            done += len(catalogue.translated_entries())
            total += len(catalogue)
        print(
            f"{language.name}: {done} of {total} messages translated, in {folder.relative_to(book.root)}"
        )


if __name__ == "__main__":
    try:
        main()
    except Problem as problem:
        sys.exit(str(problem))
