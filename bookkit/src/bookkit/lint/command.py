"""Check pages against the rules: name the line, what is wrong, what to do.

    bookkit lint                      every page, every committed text, the tables
    bookkit lint book/01-mesh.md      one page, in seconds
    bookkit lint --rule plain-words   one rule
    bookkit lint --rules              what the rules are, and which kinds of pages they bind

Nothing is executed: rules about outputs read what the last execution of this very code showed.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from bookkit.lint import (  # noqa: F401 (each registers its rules)
    anatomy,
    code_rules,
    entries,
    names,
    outputs,
    prose_rules,
    repository,
)
from bookkit.lint.rules import RULES, Finding, Page, Rule, of_book, of_page, of_text
from bookkit.model.book import Book, Problem
from bookkit.model.chapter import load_chapter, page_files


def committed(book: Book) -> list[Path]:
    """Every file that git knows of, or all outside _build when this is not a clone."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=book.root, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [book.root / name for name in done.stdout.split("\0") if name]
    every = (path for path in book.root.rglob("*") if path.is_file())
    return [path for path in every if "_build" not in path.parts and ".venv" not in path.parts]


def findings(book: Book, files: Sequence[Path], rules: Sequence[Rule]) -> Iterator[Finding]:
    """What the rules say about these files."""
    pages = set(page_files(book.root))
    for path in files:
        name = path.relative_to(book.root).as_posix()
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a font, a picture, a file that was just deleted
        yield from of_text(name, text, book, rules)
        if path in pages:
            page = name.removesuffix(".md")
            yield from of_page(Page(load_chapter(path), book.kind(page), book), rules)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bookkit lint", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: everything")
    parser.add_argument("--rule", action="append", metavar="ID", help="only this rule (repeatable)")
    parser.add_argument("--rules", action="store_true", help="say what the rules are")
    chosen, book = parser.parse_args(arguments), Book()
    if unknown := set(chosen.rule or ()) - set(RULES):
        raise Problem(f"No rule {', '.join(unknown)}. There are: {', '.join(RULES)}")
    rules = [one for one in RULES.values() if not chosen.rule or one.id in chosen.rule]
    if chosen.rules:
        print("\n".join(f"{one.id:20} {', '.join(one.kinds):34} {one.about}" for one in rules))
        return 0
    files = [path.resolve() for path in chosen.files]
    for path in files:
        if not path.is_file() or not path.is_relative_to(book.root):
            raise Problem(f"{path} is no file of the book: name one such as book/01-mesh.md")
    found = list(findings(book, files or committed(book), rules))
    if not files:
        found += of_book(book, rules)
    print("\n".join(map(str, sorted(found))) or f"{len(rules)} rules: nothing to mend")
    if found:
        print(f"{len(found)} to mend; `bookkit lint --rules` says what each rule wants")
    return bool(found)
