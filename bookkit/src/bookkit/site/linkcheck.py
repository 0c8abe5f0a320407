"""Try every link of the pages to other sites, and name the page, the line and what came back.

    bookkit linkcheck

Sphinx's linkcheck does the asking; nothing is executed for it. Addresses of the book itself are
left to `bookkit links`, which follows them on the built site, so that this passes before
anything is published. Links that moved for good are named and do not fail.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bookkit.model.book import Book, Problem, find_root

# Anchors that GitHub makes with JavaScript, where the link checker cannot see them.
UNSEEN = "^!,^L[0-9],^issuecomment-,^discussion"
NOT_OURS_TO_MEND = ("working", "local", "unchecked", "ignored", "redirected")


def options(book: Book) -> list[str]:
    repo = book.repo.removeprefix("https://github.com/")
    openers = ["https://colab.research.google.com/github", "https://mybinder.org/v2/gh"]
    own = [book.site, book.repo, *(f"{opener}/{repo}" for opener in openers)]
    settings = {
        "linkcheck_ignore": ",".join(re.escape(address) for address in own),
        "linkcheck_anchors_ignore": UNSEEN,
        "linkcheck_timeout": "30",
        "linkcheck_retries": "3",
        "linkcheck_report_timeouts_as_broken": "1",
    }
    return [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]


def results(book: Book) -> list[dict[str, Any]]:
    """One entry for each link: filename, lineno, uri, status, code, info."""
    out = book.root / "_build" / "linkcheck"
    shutil.rmtree(out, ignore_errors=True)  # every link is asked again
    where = ["-c", str(book.root), "-d", str(out / "doctrees"), str(book.root), str(out)]
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "linkcheck", *options(book), *where]
    done = subprocess.run(command, cwd=book.root, capture_output=True, encoding="utf-8")
    found = out / "output.json"
    if not found.is_file():
        raise Problem(f"Sphinx did not check the links:\n{(done.stderr or done.stdout).strip()}")
    return [json.loads(line) for line in found.read_text("utf-8").splitlines()]


def to_mend(links: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What to mend, and what could be."""
    broken, moved = [], []
    for link in sorted(links, key=lambda link: (link["filename"], link["lineno"], link["uri"])):
        text = f"{Path(link['filename']).as_posix()}:{link['lineno']}: {link['uri']}"
        if link["status"] not in NOT_OURS_TO_MEND:
            broken.append(f"{text}\n    {link['status']}: {link['info']}")
        elif link["status"] == "redirected" and link["code"] in (301, 308):
            moved.append(f"{text}\n    moved for good to {link['info']}")
    return broken, moved


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    argparse.ArgumentParser(
        prog="bookkit linkcheck", description=__doc__.split("\n")[0]
    ).parse_args(arguments)
    links = results(Book(root or find_root()))
    broken, moved = to_mend(links)
    asked = sum(link["uri"].startswith("http") and link["status"] != "ignored" for link in links)
    if moved:
        print("\n".join(moved), f"{len(moved)} links moved: better write the new address", sep="\n")
    if broken:
        said = "\n".join(broken)
        count = f"{len(broken)} of {asked} links to other sites lead nowhere."
        if len(broken) == asked > 1:
            count += " That is every one: is there a network?"
        raise Problem(f"{said}\n{count}")
    print(f"{asked} links to other sites: each leads somewhere")
