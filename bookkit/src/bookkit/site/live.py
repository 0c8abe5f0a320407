"""Rebuild pages and reload the browser as files are saved; only chapters whose code changed execute.

    bookkit live [--port 8000] [--language zh_TW]

Warnings are shown and do not stop it. It builds into _build/live, so `make site` may run beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bookkit.model.book import Book

WATCHED = ["src/meshscope", "bookkit/src", "site", "locale", "_config.yml", "_toc.yml"]
IGNORED = [
    "_build",
    "notebooks",
    "tests",
    ".git",
    ".venv*",
    "__pycache__",
    "*.pyc",
    "*.mo",
]


def command(book: Book, code: str, port: int) -> list[str]:
    language = book.language(code)
    folder = book.root / "_build" / "live" / language.code
    watch = [word for path in WATCHED for word in ("--watch", str(book.root / path))]
    ignore = [word for path in IGNORED for word in ("--ignore", str(book.root / path))]
    build = [
        "-q",
        "-c",
        str(book.root),
        "-D",
        f"language={language.code}",
        "-d",
        str(folder / "doctrees"),
    ]
    serve = [sys.executable, "-m", "sphinx_autobuild", "--port", str(port), *watch, *ignore]
    return [*serve, *build, str(book.root), str(folder / "html")]


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit live", description=__doc__.split("\n")[0])
    options.add_argument("--port", type=int, default=8000)
    options.add_argument("--language", default="en", help="en (default) or zh_TW")
    chosen = options.parse_args(arguments)
    words = command(Book(), chosen.language, chosen.port)
    os.execv(words[0], words)
