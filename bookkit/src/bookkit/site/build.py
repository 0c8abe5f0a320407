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
from bookkit.model.package import (
    CELL,
    COMPANION,
    REQUIREMENT,
    Wheel,
    build_wheel,
    has_package,
    unlike_companion,
)
from bookkit.model.sphinx_command import build_command
from bookkit.run.execute import execute
from bookkit.site.sitemap import write_sitemap

ALWAYS = ["index.html", "search.html", "searchindex.js", "notebooks.zip"]
ONCE = ["404.html"]  # for all languages


def build_pages(book: Book) -> None:
    """Build every language at the same time; raises Problem with what Sphinx said."""

    def one(language: Language) -> tuple[Language, subprocess.CompletedProcess[str]]:
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


def expected(book: Book) -> list[str]:
    """Every file that must be in the site: the pages of _toc.yml in every language, and a few more."""
    files = [*ALWAYS, *(f"{page}.html" for page in book.pages)]
    files += [f"notebooks/{book.notebook(page).name}" for page in book.chapters]
    return [*ONCE, *(language.path + file for language in book.languages for file in files)]


def wheels_of(book: Book) -> tuple[Wheel, Wheel] | None:
    """The wheels to serve; Problem if a pin asks for another, before anything is executed."""
    if not has_package(book.root):
        return None  # a made-up book
    meshscope, companion = build_wheel(book.root), build_wheel(book.root, COMPANION)
    required = (book.root / REQUIREMENT).read_text("utf-8")
    pins = {
        REQUIREMENT: "" if meshscope.sha256 in required else "requires another meshscope",
        CELL: unlike_companion((book.root / CELL).read_text("utf-8"), companion),
    }
    if wrong := [f"{name} {what}" for name, what in pins.items() if what]:
        raise Problem(f"{'; '.join(wrong)}: run `make sync`, and build again.")
    return meshscope, companion


def serve_wheels(wheels: tuple[Wheel, Wheel], site: Path) -> None:
    """Put the wheels into the site; Problem if a notebook there asks for others."""
    companion = wheels[1]
    for wheel in wheels:
        (site / wheel.path).parent.mkdir(parents=True)
        (site / wheel.path).write_bytes(wheel.data)
    wrong = []
    for path in sorted(site.glob("**/notebooks/*.ipynb")):
        text = path.read_text("utf-8")
        if "many_devices.setup()" in text and (what := unlike_companion(text, companion)):
            wrong.append(f"{path.relative_to(site).as_posix()} {what}")
    if wrong:
        raise Problem(
            "\n".join(wrong)
            + "\npip would refuse it in Colab: run `make sync`, and build the site again."
        )


def assemble(
    book: Book, outputs: dict[str, Path], site: Path, wheels: tuple[Wheel, Wheel] | None = None
) -> None:
    """Copy the outputs (by language) together, check that nothing is missing, then swap folders."""
    new, old = site.with_name(site.name + ".new"), site.with_name(site.name + ".old")
    if old.exists() and not site.exists():  # whoever swapped folders was stopped halfway
        old.rename(site)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    leave_out = shutil.ignore_patterns(".doctrees", ".buildinfo*", "objects.inv")
    for language in book.languages:
        shutil.copytree(
            outputs[language.code], new / language.path, ignore=leave_out, dirs_exist_ok=True
        )
    missing = [file for file in expected(book) if not (new / file).is_file()]
    if missing:
        shutil.rmtree(new)
        raise Problem(
            "The site lacks "
            + ", ".join(missing)
            + ". Each page of _toc.yml needs its file in book/, "
            "and each chapter its notebooks (`make sync`)."
        )
    try:
        if wheels:
            serve_wheels(wheels, new)
    except Problem:
        shutil.rmtree(new)
        raise
    write_sitemap(book, new)
    (new / ".nojekyll").touch()  # GitHub Pages then serves folders that begin with _
    if site.exists():
        site.rename(old)
    new.rename(site)
    shutil.rmtree(old, ignore_errors=True)


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
    outputs = {
        language.code: root / "_build" / language.code / "html" for language in book.languages
    }
    assemble(book, outputs, site, wheels)
    print(
        f"The site is in {site.relative_to(root)}: {len(book.pages)} pages in "
        f"{len(book.languages)} languages. `make serve` shows it."
    )
