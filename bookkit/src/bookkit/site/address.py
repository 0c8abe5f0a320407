"""Write another address, or another branch or tag, everywhere it stands.

    bookkit publish-as --site https://me.github.io/book/ --repo https://github.com/me/book
    bookkit publish-as --ref v1.0
    bookkit publish-as --check
    bookkit publish-as --check --from me/book --at https://books.example.org/

Chapters, notebooks and translations name the book's site and repository by full address, because
they are read on GitHub and in Colab as well. The addresses in _config.yml say what to look for.
Nothing is written unless the new addresses are sound and all places agree afterwards. For a site on
GitHub Pages the repository need not be given.

With --from, as the publishing workflow calls it, the addresses must also be those of the repository
that publishes, and the wheel that of the notebooks that Colab opens: readers install from there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from bookkit.model.addresses import foreign
from bookkit.model.book import Book, Problem, find_root
from bookkit.model.chapter import load_chapter
from bookkit.model.package import CELL, COMPANION, build_wheel, has_package, unlike_companion
from bookkit.words import sync

NOT_OURS = {".git", "_build", "node_modules"}
REPOSITORY = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)")


def text_files(root: Path) -> dict[Path, str]:
    """Every text file of the repository: what git knows of, or all when this is not a clone."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    git = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if git.returncode == 0 and git.stdout:
        paths = [root / name for name in git.stdout.split("\0") if name]
    else:
        paths = [
            path
            for path in root.rglob("*")
            if not any(part in NOT_OURS or part.startswith(".venv") for part in path.parts)
        ]
    found = {}
    for path in sorted(set(paths)):
        if path.is_file() and not path.is_symlink():
            try:
                found[path] = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue  # a font or a picture
    return found


# New addresses.


def sound_site(url: str) -> str:
    parts = urlsplit(url)
    host = (parts.hostname or "").split(".")
    if parts.scheme not in ("http", "https") or len(host) < 2 or not all(host):
        raise Problem(f"URL={url!r} is no address: it should look like https://me.github.io/book/")
    if parts.query or parts.fragment or re.search(r"[^\w./:~-]", url):
        raise Problem(f"URL={url!r} should be a plain folder, such as https://me.github.io/book/")
    return url.rstrip("/") + "/"


def sound_repo(url: str, site: str) -> str:
    if not url:
        parts = urlsplit(site)
        host, name = parts.hostname or "", parts.path.strip("/")
        if not host.endswith(".github.io") or "/" in name:
            raise Problem(
                f"Which repository belongs to {site}? Add REPO=https://github.com/me/book"
            )
        return f"https://github.com/{host.removesuffix('.github.io')}/{name or host}"
    plain = url.rstrip("/").removesuffix(".git")
    if not REPOSITORY.fullmatch(plain):
        raise Problem(
            f"REPO={url!r} is no repository that Colab can open: it should look like "
            "https://github.com/me/book"
        )
    return plain


def sound_ref(ref: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", ref) or ".." in ref or ref.endswith((".", ".lock")):
        raise Problem(f"REF={ref!r} is no branch or tag (without /) such as main or v1.0")
    return ref


# Replacing.


def slug(repo: str) -> str:
    return repo.removeprefix("https://github.com/")


def readdress(text: str, old: Book, site: str, repo: str) -> str:
    """One pass, so that a new address that contains the old one is not replaced again."""
    new = {old.site.rstrip("/"): site.rstrip("/"), old.repo: repo, slug(old.repo): slug(repo)}
    places = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.-])(?:{places})(?![\w-])", lambda place: new[place[0]], text)


def places_of_ref(book: Book) -> re.Pattern[str]:
    """Where a branch or tag stands: Colab's addresses, _config.yml."""
    return re.compile(
        rf"(?P<before>/github/{re.escape(slug(book.repo))}/blob/|^ *book_ref: )(?P<ref>[\w.-]+)",
        re.M,
    )


def with_ref(text: str, book: Book, ref: str) -> str:
    return places_of_ref(book).sub(lambda place: place["before"] + ref, text)


# Do all places agree?


def disagreements(texts: dict[Path, str], book: Book) -> Iterator[str]:
    """Places that name this book's notebooks, pages or package under another address."""
    for path, text in texts.items():
        if path.relative_to(book.root).parts[0] in ("tests", "bookkit"):
            continue  # code that makes addresses, and wrong ones on purpose
        for number, line in enumerate(text.splitlines(), 1):
            for found, beginning in foreign(line, book):
                where = path.relative_to(book.root)
                yield f"{where}:{number}: {found} does not begin with {beginning}"


def refuse_disagreements(texts: dict[Path, str], book: Book) -> None:
    if found := list(disagreements(texts, book)):
        raise Problem("Addresses disagree with _config.yml:\n" + "\n".join(found))


# Is it they who publish?


def refuse_other_publisher(book: Book, publisher: str, at: str = "") -> None:
    """Problem unless the book's addresses are those of the repository that publishes it."""
    repo = sound_repo(f"https://github.com/{publisher}", "")
    owner, name = (part.lower() for part in publisher.split("/"))
    own = f"https://{owner}.github.io/"
    site = (
        sound_site(at) if at else own if name == own[8:-1] else f"{own}{publisher.split('/')[1]}/"
    )
    wrong = [
        found
        for found, wanted in ((book.site, site), (book.repo, repo))
        if found.lower() != wanted.lower()  # as GitHub compares them
    ]
    if wrong:
        raise Problem(
            f"{publisher} would publish files that name {' and '.join(wrong)}, which may be anyone's, "
            "and readers' notebooks install from there. Nothing is published. "
            f"Run `make publish-as URL={site} REPO={repo}`, commit what it changes, and push. "
            "(For a site on a domain of your own, say its address in the repository's variable SITE.)"
        )


def refuse_other_wheel(book: Book) -> None:
    """Problem if Colab opens notebooks that ask for another wheel than this site would serve."""
    if book.ref == book.config["repository"]["branch"] or not has_package(book.root):
        return
    for command in (
        ["fetch", "--quiet", "--depth", "1", "origin", book.ref],
        ["show", f"FETCH_HEAD:{CELL}"],
    ):
        git = subprocess.run(["git", *command], cwd=book.root, capture_output=True, text=True)
        if git.returncode:
            raise Problem(
                f"Colab opens the notebooks of {book.ref}, which cannot be had: push that tag first, "
                f"or run `make release-ref REF=…`.\n{git.stderr.strip()}"
            )
    if what := unlike_companion(git.stdout, build_wheel(book.root, COMPANION)):
        raise Problem(
            f"Colab opens the notebooks of {book.ref}, whose setup cell {what}: pip would refuse it. "
            "Run `make release-ref REF=…` with a new tag, commit, and push the commit and the tag."
        )


class Changed(Book):
    """The book as it will be once `texts` are written."""

    def __init__(self, root: Path, texts: dict[Path, str]):
        super().__init__(root)
        self.__dict__["config"] = yaml.safe_load(texts[root / "_config.yml"])


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> None:
    options = argparse.ArgumentParser(prog="bookkit publish-as", description=__doc__.split("\n")[0])
    options.add_argument("--site", help="where the site will be published")
    options.add_argument("--repo", help="the repository on GitHub", default="")
    options.add_argument("--ref", help="the branch or tag that Colab opens and installs")
    options.add_argument("--check", action="store_true", help="only see that all places agree")
    options.add_argument("--from", dest="publisher", help="with --check: who publishes, OWNER/NAME")
    options.add_argument("--at", default="", help="with --from: where, if not on github.io")
    chosen, root = options.parse_args(arguments), root or find_root()
    book = Book(root)
    old = text_files(root)
    if chosen.check:
        refuse_disagreements(old, book)
        if chosen.publisher is not None:
            refuse_other_publisher(book, chosen.publisher, chosen.at)
            refuse_other_wheel(book)
        return
    if not chosen.site and not chosen.ref:
        raise Problem(
            "Say where: make publish-as URL=https://me.github.io/book/ "
            "REPO=https://github.com/me/book, or make release-ref REF=v1.0"
        )
    new = dict(old)
    if chosen.site:
        site = sound_site(chosen.site)
        repo = sound_repo(chosen.repo, site)
        new = {path: readdress(text, book, site, repo) for path, text in new.items()}
    if chosen.ref:
        ref, now = sound_ref(chosen.ref), Changed(root, new)
        new = {path: with_ref(text, now, ref) for path, text in new.items()}
    refuse_disagreements(new, Changed(root, new))
    changed = [path for path in new if new[path] != old[path]]
    for path in changed:
        path.write_bytes(new[path].encode("utf-8"))
    load_chapter.cache_clear()  # pages were read with their old addresses
    sync.main([], root)
    print(f"{len(changed)} files changed. `git diff` shows them; `make site` and commit come next.")
