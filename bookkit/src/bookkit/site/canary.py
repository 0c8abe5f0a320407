"""Build both languages with the newest Sphinx, myst-parser and theme, whatever the pins say.

    bookkit canary

Jupyter Book 1 keeps to Sphinx 7; this says whether the book could leave it. The newest releases of
NEWEST go into an environment of their own, _build/canary/venv, and everything else as in
requirements.txt, so that chapters that were executed stay executed. The site is left alone: pages
are built into _build/canary/LANGUAGE, with warnings as errors. Where this fails, the message is the
reason why the book cannot move; where it stays red, the reason goes into the workflow's head.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Language, Problem
from bookkit.model.sphinx_command import build_command
from bookkit.run.execute import execute

NEWEST = (
    "sphinx docutils myst-parser myst-nb sphinx-book-theme pydata-sphinx-theme markdown-it-py "
    "mdit-py-plugins sphinx-external-toc"
).split()


def checked(command: Sequence[str | Path], what: str) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8")
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise Problem(f"{what} failed (status {done.returncode}):\n{said}")
    return done.stdout


def environment(folder: Path) -> Path:
    """A fresh virtual environment with the newest of NEWEST; its Python."""
    tool = folder.parent / "uv"
    programs = "Scripts" if sys.platform == "win32" else "bin"
    if not list((tool / programs).glob("uv*")):
        checked([sys.executable, "-m", "venv", tool], "Making an environment for uv")
        checked([tool / programs / "python", "-m", "pip", "install", "--quiet", "uv"], "pip")
    uv, venv = tool / programs / "uv", folder / "venv"
    overrides = folder / "newest.txt"
    overrides.write_text("\n".join(NEWEST) + "\n", "utf-8")
    checked([uv, "venv", "--quiet", "--python", sys.executable, venv], "uv venv")
    python = venv / programs / "python"
    wanted = ["-r", "requirements.txt", "--override", str(overrides)]
    checked([uv, "pip", "install", "--quiet", "--python", python, *wanted], "uv pip install")
    found = checked([uv, "pip", "freeze", "--python", python], "uv pip freeze").splitlines()
    print(*(line for line in found if line.split("==")[0].lower() in NEWEST), sep="\n")
    return python


def build_with(book: Book, language: Language, python: Path, folder: Path) -> None:
    out = folder / language.code
    command = build_command(book, language, folder=out, python=python)
    checked(command, f"The {language.name} site with the newest releases")
    missing = [page for page in book.pages if not (out / "html" / f"{page}.html").is_file()]
    if missing:
        raise Problem(f"The {language.name} site lacks {', '.join(missing)}")
    print(f"{language.name}: {len(book.pages)} pages, no warning")


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="bookkit canary", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    book = Book()
    os.chdir(book.root)
    folder = book.root / "_build" / "canary"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = environment(folder)
    execute(book)
    for language in book.languages:
        build_with(book, language, python, folder)
