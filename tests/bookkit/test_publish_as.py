"""`make publish-as` and `make release-ref`: once on a copy of the whole book, else on three of its pages."""

import shutil
import subprocess

import pytest

from bookkit.model.book import Book, Problem
from bookkit.model.package import CELL, COMPANION, build_wheel, unlike_companion
from bookkit.site import address
from toy import ROOT

BOOK = Book()
SITE, REPO = "https://someone.github.io/their-book/", "https://github.com/someone/their-book"


KEPT = {"00-intro", "01-mesh", "reference/run"}


def copied(folder, left_out=()):
    for path in address.text_files(ROOT):
        target = folder / path.relative_to(ROOT)
        page = f"{path.parent.name}/{path.stem}".removeprefix("book/")
        page = page.removeprefix("notebooks/").removeprefix("zh-TW/")
        if target.suffix in (".md", ".ipynb", ".po") and page in left_out:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The book with three pages, which name its addresses in every way."""
    gone = {page.removeprefix("book/") for page in BOOK.pages} - KEPT
    folder = copied(tmp_path_factory.mktemp("original"), gone)
    chapters = "\n".join(f"  - file: book/{name}" for name in sorted(KEPT - {"00-intro"}))
    toc = f"format: jb-book\nroot: book/00-intro\nchapters:\n{chapters}\n"
    (folder / "_toc.yml").write_text(toc, "utf-8")
    address.sync.main([], folder)  # that notebooks are up to date is another test
    return folder


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path, dirs_exist_ok=True)


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def occurrences(root, text):
    return {
        str(path.relative_to(root))
        for path, held in contents(root).items()
        if text.encode() in held
    }


def test_all_places_agree():
    address.main(["--check"])


def test_a_copy_of_the_whole_book_has_the_new_address_everywhere(tmp_path):
    copy = copied(tmp_path)
    slug = address.slug(BOOK.repo)
    places = occurrences(copy, slug)
    for place in (
        "_config.yml",
        "book/01-mesh.md",
        "notebooks/01-mesh.ipynb",
        "notebooks/zh-TW/01-mesh.ipynb",
        "CITATION.cff",
    ):
        assert place in places
    address.main(["--site", SITE.rstrip("/"), "--repo", REPO + ".git"], copy)
    assert not occurrences(copy, slug) and not occurrences(copy, BOOK.site.rstrip("/"))
    assert occurrences(copy, "someone/their-book") >= places
    new = Book(copy)
    assert (new.site, new.repo) == (SITE, REPO)
    colab = "https://colab.research.google.com/github/someone/their-book/blob/main/notebooks/"
    assert colab + "01-mesh.ipynb" in (copy / "book" / "01-mesh.md").read_text()
    assert colab + "zh-TW/01-mesh.ipynb" in (copy / "notebooks/zh-TW/01-mesh.ipynb").read_text()
    address.main(["--check"], copy)
    address.sync.main(["--check"], copy)
    setup = (copy / CELL).read_text()
    assert f'SITE = "{SITE}"' in setup
    assert unlike_companion(setup, build_wheel(copy, COMPANION)) == ""


def test_there_and_back_gives_the_same_bytes(copy):
    before = contents(copy)
    site, repo = "https://" + "far.example.org/away/", "https://github.com/far" + "/away-book"
    assert not occurrences(copy, site) and not occurrences(copy, repo)  # not even here
    address.main(["--site", site, "--repo", repo], copy)
    assert contents(copy) != before
    address.main(["--site", BOOK.site, "--repo", BOOK.repo], copy)
    assert contents(copy) == before


def test_an_address_that_contains_the_old_one(copy):
    address.main(["--site", BOOK.site.rstrip("/") + "-2", "--repo", BOOK.repo + "-2"], copy)
    assert not occurrences(copy, address.slug(BOOK.repo) + "-2-2")
    assert Book(copy).repo == BOOK.repo + "-2"


def test_on_github_pages_the_repository_follows_from_the_site(copy):
    address.main(["--site", SITE], copy)
    assert Book(copy).repo == REPO
    assert address.sound_repo("", "https://me.github.io/") == "https://github.com/me/me.github.io"


def test_a_release_is_named_everywhere(copy):
    address.main(["--ref", "v1.0"], copy)
    assert Book(copy).ref == "v1.0"
    assert "/blob/v1.0/notebooks/01-mesh.ipynb" in (copy / "book/01-mesh.md").read_text()
    assert "/blob/v1.0/notebooks/zh-TW/" in (copy / "notebooks/zh-TW/01-mesh.ipynb").read_text()
    assert "branch: main" in (copy / "_config.yml").read_text()  # where edits go
    address.main(["--ref", "main"], copy)
    address.main(["--check"], copy)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Say where: make publish-as URL="),
        (["--site", ""], "Say where"),
        (["--site", "someone.github.io/book"], "is no address"),
        (["--site", "ftp://someone.github.io/book"], "is no address"),
        (["--site", "https://localhost/"], "is no address"),
        (["--site", "https://a.github.io/x?y=1"], "plain folder"),
        (["--site", "https://a.github.io/x y/"], "plain folder"),
        (["--site", "https://books.example.org/"], "Add REPO="),
        (["--site", SITE, "--repo", "https://gitlab.com/a/b"], "no repository that Colab can open"),
        (["--site", SITE, "--repo", "https://github.com/a"], "no repository that Colab can open"),
        (["--ref", "feature/x"], "no branch or tag"),
        (["--ref", "v1..2"], "no branch or tag"),
    ],
)
def test_a_bad_address_is_refused_and_nothing_is_written(copy, arguments, complaint):
    before = contents(copy)
    with pytest.raises(Problem, match=complaint):
        address.main(arguments, copy)
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (BOOK.colab_url("book/01-mesh").replace("/main/", "/old/"), "colab.*/blob/main/"),
        (BOOK.colab_url("book/01-mesh").replace("one-program", "other"), "does not begin with"),
        ("https://other.github.io/x/book/01-mesh.html", "does not begin with"),
        ("https://other.github.io/x/_static/colab-badge.svg", "does not begin with"),
        (f"meshscope @ git+{BOOK.repo}@v0", f"does not begin with meshscope @ {BOOK.site}wheels/"),
        (
            "https://other.github.io/x/wheels/meshscope-0.1.0-py3-none-any.whl",
            "does not begin with",
        ),
        ('SITE = "https://other.github.io/x/"', "does not begin with"),
    ],
)
def test_a_place_that_disagrees_is_named(copy, wrong, complaint):
    page = copy / "book" / "reference" / "run.md"
    page.write_text(page.read_text() + f"\n{wrong}\n")
    last = len(page.read_text().splitlines())
    with pytest.raises(Problem, match=rf"book/reference/run\.md:{last}: (.|\n)*{complaint}"):
        address.main(["--check"], copy)


# Who publishes.

OWN = BOOK.repo.removeprefix("https://github.com/")


def test_the_book_is_published_by_the_repository_that_it_names():
    for publisher in (OWN, OWN.upper()):  # GitHub makes no difference
        address.refuse_other_publisher(BOOK, publisher)


def test_another_repository_is_refused_and_told_what_to_run():
    with pytest.raises(Problem) as refused:
        address.main(["--check", "--from", "someone/their-book"])
    said = str(refused.value)
    assert "someone/their-book would publish files that name " in said
    assert f"{BOOK.site} and {BOOK.repo}, which may be anyone's" in said
    assert (
        f"Run `make publish-as URL={SITE} REPO={REPO}`, commit what it changes, and push." in said
    )


def test_what_it_was_told_to_run_is_what_was_missing(copy):
    address.main(["--site", SITE, "--repo", REPO], copy)
    address.main(["--check", "--from", "someone/their-book"], copy)
    with pytest.raises(
        Problem, match="publish-as URL=https://someone.github.io/fork/ REPO=.*/someone/fork`"
    ):
        address.main(["--check", "--from", "someone/fork"], copy)


def test_a_site_elsewhere_is_refused_unless_the_repository_says_that_it_is_its_own(copy):
    away = "https://books.example.org/"
    address.main(["--site", away, "--repo", REPO], copy)
    with pytest.raises(Problem, match=f"name {away}, which .*REPO={REPO}`.*variable SITE"):
        address.main(["--check", "--from", "someone/their-book", "--at", ""], copy)
    address.main(["--check", "--from", "someone/their-book", "--at", away], copy)


def test_the_site_of_an_owner(copy):
    address.main(
        ["--site", "https://me.github.io/", "--repo", "https://github.com/Me/me.github.io"], copy
    )
    address.main(["--check", "--from", "Me/me.github.io"], copy)


@pytest.mark.parametrize("publisher", ["", "someone", "a/b/c", "a b/c"])
def test_a_publisher_that_is_none(publisher):
    with pytest.raises(Problem, match="is no repository"):
        address.main(["--check", "--from", publisher])


def git(folder, *command):
    about = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(["git", *about, *command], cwd=folder, check=True, capture_output=True)


def test_notebooks_of_a_tag_ask_for_the_wheel_that_is_served(copy, tmp_path_factory):
    """Colab opens those of the tag, whatever was pushed to main since."""
    address.main(["--ref", "v1.0"], copy)
    origin = tmp_path_factory.mktemp("origin")
    git(origin, "init", "-q", "--bare", ".")
    git(copy, "init", "-q", "-b", "main")
    git(copy, "remote", "add", "origin", str(origin))
    git(copy, "add", ".")
    git(copy, "commit", "-q", "-m", "one")
    check = ["--check", "--from", OWN]
    with pytest.raises(
        Problem, match="notebooks of v1.0, which cannot be had: push that tag first"
    ):
        address.main(check, copy)
    git(copy, "push", "-q", "origin", "HEAD:refs/tags/v1.0")
    address.main(check, copy)
    module = copy / "src" / "meshscope" / "_hlo.py"
    module.write_text(module.read_text("utf-8") + "\n# more\n", "utf-8")
    address.sync.main([], copy)
    with pytest.raises(
        Problem,
        match=r"v1.0, whose setup cell pins .*Run `make release-ref REF=…` with a new tag",
    ):
        address.main(check, copy)


def test_every_workflow_that_publishes_asks_first():
    for name, publishes in (("publish", "deploy-pages"), ("release", "upload-artifact")):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")
        asked = text.index('bookkit publish-as --check --from "$GITHUB_REPOSITORY"')
        assert asked < text.index(publishes), name
