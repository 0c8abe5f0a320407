"""The built site that the checks look at, and whether it can be looked at."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from bookkit.model.book import Book

BOOK = Book()
SITE = BOOK.root / "_build" / "html"
BELOW = urlsplit(BOOK.site).path  # as it is published: no page may count on being at the root
INPUTS = (
    *("*.yml", "book/**/*", "locale/**/*.po", "src/**/*.py", "bookkit/**/sphinx_ext/**/*"),
    *(f"site/{name}/**/*" for name in ("templates", "static")),
    "bookkit/**/site/build.py",
)


def stale(root: Path = BOOK.root) -> str:
    """A file that changed after the site was put together."""
    built = (root / "_build" / "html" / ".nojekyll").stat().st_mtime
    inputs = (path for pattern in INPUTS for path in root.glob(pattern) if path.is_file())
    newer = (
        path for path in inputs if path.stat().st_mtime > built and "__pycache__" not in path.parts
    )
    return next((path.relative_to(root).as_posix() for path in newer), "")


def lacking() -> str:
    """Why the built site cannot be looked at, and what to do."""
    if not (SITE / ".nojekyll").is_file():
        return "there is no built site: run `make site` first"
    if path := stale():
        return f"{path} is newer than the built site: run `make site` first"
    return ""
