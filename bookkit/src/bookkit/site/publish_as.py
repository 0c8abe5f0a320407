"""Write another address of the site and the repository, or another branch or tag, everywhere.

    bookkit publish-as --site https://me.github.io/book/ --repo https://github.com/me/book
    bookkit publish-as --ref v1.0

Pages, notebooks and translations name both by full address, because they are read on GitHub and in
Colab as well. What is replaced is what _config.yml says now; notebooks and setup cells are then
written from the pages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bookkit.model.book import Book, Problem, find_root
from bookkit.words import sync

SITE = re.compile(r"https?://[\w-]+(\.[\w-]+)+(/[\w./~-]*)?")
REPOSITORY = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+")
REF = re.compile(r"\w[\w.-]*")


def accepted(value: str, pattern: re.Pattern[str], example: str) -> str:
    if not pattern.fullmatch(value):
        raise Problem(f"{value!r} should look like {example}. Nothing was written.")
    return value


def text_files(root: Path) -> dict[Path, str]:
    """What git tracks and can be read as UTF-8: no fonts, no pictures."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if git.returncode:
        raise Problem(f"{root} is not a git clone: clone your repository, and run this there.")
    found = {}
    for path in sorted(root / name for name in git.stdout.split("\0") if name):
        try:
            found[path] = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
    return found


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit publish-as", description=__doc__.split("\n")[0])
    options.add_argument("--site", metavar="URL", help="where the site will be published")
    options.add_argument("--repo", metavar="URL", help="its repository on GitHub")
    options.add_argument("--ref", help="the branch or tag that Colab opens")
    chosen, root = options.parse_args(arguments), root or find_root()
    if bool(chosen.site) != bool(chosen.repo) or not (chosen.site or chosen.ref):
        raise Problem(
            "Say both addresses, make publish-as URL=https://me.github.io/book/ "
            "REPO=https://github.com/me/book, or a branch or tag, make publish-as REF=v1.0."
        )
    book = Book(root)
    site = accepted(chosen.site or book.site, SITE, "https://me.github.io/book/").rstrip("/")
    repo = accepted(chosen.repo or book.repo, REPOSITORY, "https://github.com/me/book")
    ref = accepted(chosen.ref or book.ref, REF, "main or v1.0")
    slug, old_slug = (url.removeprefix("https://github.com/") for url in (repo, book.repo))
    new = {book.site.rstrip("/"): site, book.repo: repo, old_slug: slug}
    places = "|".join(map(re.escape, new))  # in one pass: a new address may contain the old one
    address = re.compile(rf"(?<![\w.-])(?:{places})(?![\w-])")
    branch = re.compile(rf"(/github/{re.escape(slug)}/blob/|\bbook_ref: ){re.escape(book.ref)}\b")
    changed = 0
    for path, text in text_files(root).items():
        readdressed = branch.sub(rf"\g<1>{ref}", address.sub(lambda one: new[one[0]], text))
        if readdressed != text:
            path.write_bytes(readdressed.encode("utf-8"))
            changed += 1
    sync.main([], root)
    print(f"{changed} files changed. `git diff` shows them; `make site` and a commit come next.")
