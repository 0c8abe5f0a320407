"""How Sphinx is called: for pages and for catalogues."""

from __future__ import annotations

import sys
from pathlib import Path

from bookkit.model.book import Book, Language


def build_command(
    book: Book,
    language: Language,
    builder: str = "html",
    folder: Path | None = None,
) -> list[str]:
    """How to build one language into folder/BUILDER, _build/LANGUAGE/html; warnings fail it."""
    folder = folder or book.root / "_build" / language.code
    strict = ["-W", "-n", "--keep-going", "-q"]
    where = ["-c", str(book.root), "-d", str(folder / "doctrees")]
    about = ["-D", f"language={language.code}"]
    sphinx = [sys.executable, "-m", "sphinx", "-b", builder, *strict, *where, *about]
    return [*sphinx, str(book.root), str(folder / builder)]
