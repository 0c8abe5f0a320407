"""Build the site in every language and put it together in _build/html.

Each language is built into _build/LANGUAGE/html; the site has the source language at its root and
the others below (zh-TW/). _build/html is replaced only when everything is complete: no warning, no
failing cell, no missing page, no notebook that asks for other wheels than those in wheels/.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Language, Problem, find_root
from bookkit.model.package import CELL, COMPANION, REQUIREMENT, Wheel, build_wheel, has_package
from bookkit.model.sphinx_command import build_command
from bookkit.run.execute import execute


def build_pages(book: Book) -> None:
    """Build every language at the same time; raises Problem with what Sphinx said.

    Nothing of an earlier build is kept: Sphinx warns only of pages that it reads, does not know that
    each shows the titles of all, and leaves those that are no more.
    """

    def one(language: Language) -> tuple[Language, subprocess.CompletedProcess[str]]:
        shutil.rmtree(book.root / "_build" / language.code, ignore_errors=True)
        command = build_command(book, language)
        return language, subprocess.run(command, cwd=book.root, text=True, capture_output=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(one, book.languages))
    said = [
        f"The {language.name} site was not built:\n{(done.stderr or done.stdout).strip()}"
        for language, done in results
        if done.returncode
    ]
    if said:
        raise Problem("\n\n".join(said))


def wheels_of(book: Book) -> list[Wheel]:
    """The wheels to serve; Problem if a notebook asks for others, which pip would refuse in Colab."""
    if not has_package(book.root):
        return []  # a made-up book
    meshscope, companion = build_wheel(book.root), build_wheel(book.root, COMPANION)
    asking = {book.root / REQUIREMENT: meshscope, book.root / CELL: companion}
    for path in sorted((book.root / "notebooks").rglob("*.ipynb")):
        if "many_devices.setup()" in path.read_text("utf-8"):
            asking[path] = companion
    wrong = [
        path.relative_to(book.root).as_posix()
        for path, wheel in asking.items()
        if wheel.sha256 not in path.read_text("utf-8")
    ]
    if wrong:
        raise Problem(
            f"Other wheels than those of this source are asked for by {', '.join(wrong)}: "
            "run `make sync`, and build again."
        )
    return [meshscope, companion]


def assemble(book: Book, site: Path, wheels: Sequence[Wheel]) -> None:
    """Put the languages and the wheels together, then replace the site at once."""
    new = site.with_name(site.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    leave_out = shutil.ignore_patterns(".doctrees", ".buildinfo*", "objects.inv")
    for language in book.languages:
        built = book.root / "_build" / language.code / "html"
        shutil.copytree(built, new / language.path, ignore=leave_out, dirs_exist_ok=True)
    for wheel in wheels:
        (new / wheel.path).parent.mkdir(parents=True)
        (new / wheel.path).write_bytes(wheel.data)
    (new / ".nojekyll").touch()  # GitHub Pages then serves folders that begin with _
    shutil.rmtree(site, ignore_errors=True)
    new.rename(site)


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    argparse.ArgumentParser(prog="bookkit site", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    root = root or find_root()
    book, site = Book(root), root / "_build" / "html"
    absent = [f"{page}.md" for page in book.pages if not book.source(page).exists()]
    if absent:
        raise Problem(f"_toc.yml names {', '.join(absent)}, which do not exist.")
    wheels = wheels_of(book)
    execute(book)
    build_pages(book)
    assemble(book, site, wheels)
    print(
        f"The site is in {site.relative_to(root)}: {len(book.pages)} pages in "
        f"{len(book.languages)} languages. `make serve` shows it."
    )
