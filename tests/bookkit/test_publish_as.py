"""`make publish-as`, on a copy of the whole book."""

import shutil
import subprocess

import pytest

from bookkit.model.book import Book, Problem
from bookkit.model.package import CELL, COMPANION, build_wheel
from bookkit.site import publish_as
from toy import ROOT

BOOK = Book()
OWNER, NAME = "someone", "their-book"  # in parts: this file is readdressed too
SITE, REPO = f"https://{OWNER}.github.io/{NAME}/", f"https://github.com/{OWNER}/{NAME}"
SLUG = BOOK.repo.removeprefix("https://github.com/")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the book as it is in the working tree."""
    folder = tmp_path_factory.mktemp("clone")
    for path in publish_as.text_files(ROOT):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def copied(clone):
    """The clone, brought up to date: that notebooks are is another test."""
    publish_as.sync.main([], clone)
    return clone


def contents(root):
    paths = (path for path in root.rglob("*") if ".git" not in path.parts and path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def naming(root, text):
    return {name for name, held in contents(root).items() if text.encode() in held}


@pytest.mark.slow
def test_a_copy_has_the_new_address_everywhere_and_back_again_the_old_bytes(copied):
    before, places = contents(copied), naming(copied, SLUG)
    assert {"_config.yml", "notebooks/zh-TW/01-mesh.ipynb", "CITATION.cff"} <= places
    publish_as.main(["--site", SITE.rstrip("/"), "--repo", REPO], copied)
    new = Book(copied)
    assert (new.site, new.repo) == (SITE, REPO)
    assert not naming(copied, SLUG) and not naming(copied, BOOK.site.rstrip("/"))
    assert naming(copied, f"{OWNER}/{NAME}") >= places
    colab = f"https://colab.research.google.com/github/{OWNER}/{NAME}/blob/main/notebooks/"
    for language in ("", "zh-TW/"):
        notebook = (copied / "notebooks" / language / "01-mesh.ipynb").read_text("utf-8")
        assert f"{colab}{language}01-mesh.ipynb" in notebook
    setup = (copied / CELL).read_text()
    assert f'SITE = "{SITE}"' in setup
    assert build_wheel(copied, COMPANION).sha256 in setup
    publish_as.main(["--site", BOOK.site, "--repo", BOOK.repo], copied)
    assert contents(copied) == before


@pytest.mark.slow
def test_an_address_may_contain_the_old_one(copied):
    longer = BOOK.site.rstrip("/") + "-2/", BOOK.repo + "-2"
    publish_as.main(["--site", longer[0], "--repo", longer[1]], copied)
    assert (Book(copied).site, Book(copied).repo) == longer
    assert not naming(copied, f"{SLUG}-2-2")
    publish_as.main(["--site", BOOK.site, "--repo", BOOK.repo], copied)


@pytest.mark.slow
def test_a_release_is_named_everywhere_and_edits_still_go_to_main(copied):
    publish_as.main(["--ref", "v1.0"], copied)
    assert Book(copied).ref == "v1.0"
    assert "branch: main" in (copied / "_config.yml").read_text()
    for name in ("book/01-mesh.md", "notebooks/01-mesh.ipynb", "notebooks/zh-TW/01-mesh.ipynb"):
        text = (copied / name).read_text("utf-8")
        assert f"/github/{SLUG}/blob/v1.0/notebooks/" in text and "/blob/main/" not in text
    publish_as.main(["--ref", "main"], copied)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Say both addresses"),
        (["--site", SITE], "Say both addresses"),
        (["--site", "someone.github.io/book", "--repo", REPO], "https://me.github.io/book/"),
        (["--site", "https://localhost/", "--repo", REPO], "https://me.github.io/book/"),
        (["--site", "https://a.github.io/x?y=1", "--repo", REPO], "https://me.github.io/book/"),
        (["--site", SITE, "--repo", "https://gitlab.com/a/b"], "https://github.com/me/book"),
        (["--ref", "feature/x"], "main or v1.0"),
    ],
)
def test_a_bad_address_is_told_and_nothing_is_written(clone, arguments, said):
    before = contents(clone)
    with pytest.raises(Problem, match=said):
        publish_as.main(arguments, clone)
    assert contents(clone) == before


def test_outside_a_clone_it_says_what_to_do(tmp_path):
    with pytest.raises(Problem, match="is not a git clone"):
        publish_as.text_files(tmp_path)


def test_every_workflow_that_publishes_asks_first_whose_addresses_these_are():
    for name, publishes in (("ci", "deploy-pages"), ("release", "upload-artifact")):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")
        assert text.index(".ci/own-address") < text.index(publishes), name


@pytest.mark.parametrize("repository, code", [(SLUG, 0), (SLUG.upper(), 0), ("some/fork", 1)])
def test_a_fork_that_still_names_the_original_is_not_published(repository, code):
    environment = {"GITHUB_REPOSITORY": repository, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [ROOT / ".ci" / "own-address"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == code
    assert ("run `make publish-as" in done.stderr) == bool(code)
