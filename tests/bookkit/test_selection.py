"""What `make test` leaves out, in a small repository of its own: one page, one module, a few tests."""
import shutil
import subprocess
import sys

import pytest

import selection
from toy import FRONT, ROOT, code

pytestmark = pytest.mark.reads()  # a made-up repository

PAGE = FRONT + "\n# A page\n\nSome words.\n\n" + code("x = 1") + "\n"
TESTS = {
    "tests/book/test_pages.py": """
import pytest
from pathlib import Path

PAGES = sorted(Path("book").glob("*.md"))

@pytest.mark.reads("book/{path.stem}.md", "headings")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path):
    assert "wrong" not in path.read_text()
""",
    "tests/book/test_seen.py": """
from pathlib import Path

def test_opens_a_page_and_does_not_say_so():
    assert Path("book/02-b.md").read_text()

def test_beside_it():
    pass
""",
    "tests/book/test_code.py": """
import subprocess, sys
import pytest

def test_reads_no_prose():
    import math

@pytest.mark.reads("addresses")
def test_where_links_lead():
    subprocess.run([sys.executable, "-c", ""])

@pytest.mark.reads()
def test_starts_a_process_that_reads_none():
    subprocess.run([sys.executable, "-c", ""])
""",
    "tests/book/test_process.py": """
import subprocess, sys

def test_starts_a_process_that_could_read_anything():
    subprocess.run([sys.executable, "-c", ""])
""",
    "tests/book/test_import.py": """
from pathlib import Path

WORDS = Path("book/02-b.md").read_text()

def test_of_a_page_that_was_opened_when_this_was_imported():
    assert WORDS
""",
    "tests/book/test_site.py": """
from pathlib import Path

def test_of_the_built_site():
    site = Path("_build/html/page.html")
    assert not site.exists() or site.read_text()
""",
}
OF_02 = {"test_opens_a_page_and_does_not_say_so", "test_beside_it", "test_of_a_page_that_was_opened_when_this_was_imported"}
OF_ALL = {"test_starts_a_process_that_could_read_anything", "test_of_the_built_site"}
OF_CODE = {"test_reads_no_prose", "test_starts_a_process_that_reads_none", "test_where_links_lead"}
BOTH_PAGES = {"test_page[01-a]", "test_page[02-b]"}
ALL = OF_02 | OF_ALL | OF_CODE | BOTH_PAGES


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A repository in which everything has passed once."""
    root = tmp_path_factory.mktemp("clone")
    for name, text in {**TESTS, "book/01-a.md": PAGE, "book/02-b.md": PAGE, "README.md": "# Read me\n", "tool.py": "y = 1\n",
                       "locale/a.po": "", ".gitignore": "_build/\n__pycache__/\n.pytest_cache/\n",
                       "pytest.ini": "[pytest]\npythonpath = tests/bookkit\naddopts = -ra\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tests" / "bookkit").mkdir()
    (root / "_build" / "html").mkdir(parents=True)
    (root / "_build" / "html" / "page.html").write_text("<p>Some words.</p>")
    for name in ("tests/conftest.py", "tests/bookkit/selection.py"):
        shutil.copyfile(ROOT / name, root / name)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    assert ran(root) == ALL and ran(root) == set()  # and then there is nothing to do
    return root


def ran(root, *options, status=0):
    """The tests that ran, by name; as `make test` calls pytest."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:xdist", "--changed", *options, "tests"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return {line.split("::")[1].split()[0] for line in done.stdout.splitlines()
            if "::" in line and (" PASSED" in line or " FAILED" in line)}


@pytest.fixture
def change(clone):
    """Change a file, and change it back."""
    before = {}

    def changed(name, old, new):
        path = clone / name
        before.setdefault(path, path.read_text())
        path.write_text(before[path].replace(old, new) if old else new)
        return clone

    yield changed
    for path, text in before.items():
        path.write_text(text)
    ran(clone)


def test_a_changed_paragraph_runs_what_reads_that_page(change):
    assert ran(change("book/01-a.md", "Some words.", "Other words.")) == {"test_page[01-a]"} | OF_ALL
    assert ran(change("book/02-b.md", "Some words.", "Other words.")) == {"test_page[02-b]"} | OF_02 | OF_ALL


def test_a_changed_heading_runs_what_follows_links_there(change):
    assert ran(change("book/01-a.md", "# A page", "# Another page")) == BOTH_PAGES | OF_ALL


def test_a_changed_link_runs_what_follows_links(change):
    linked = change("book/01-a.md", "Some words.", "Some words (https://example.org/a).")
    assert ran(linked) == {"test_page[01-a]", "test_where_links_lead"} | OF_ALL


def test_a_changed_translation_or_readme_runs_those_that_could_read_anything(change):
    assert ran(change("locale/a.po", "", "msgid")) == OF_ALL
    assert ran(change("README.md", "# Read", "# Do read")) == OF_ALL


@pytest.mark.parametrize("name, old, new", [
    ("book/01-a.md", "x = 1", "x = 2"),  # code of a page
    ("tool.py", "y = 1", "y = 2"),
    ("tests/book/test_code.py", "import math", "import cmath"),
    ("pytest.ini", "-ra", "-ra --strict-markers"),
])  # fmt: skip
def test_changed_code_runs_everything(change, name, old, new):
    assert ran(change(name, old, new)) == ALL


def test_a_new_file_runs_everything(clone):
    (clone / "another.py").write_text("")
    assert ran(clone) == ALL
    (clone / "another.py").unlink()
    ran(clone)


def test_what_failed_runs_again_until_it_passes(change):
    clone = change("book/02-b.md", "Some words.", "Some wrong words.")
    assert ran(clone, status=1) == {"test_page[02-b]"} | OF_02 | OF_ALL
    assert ran(clone, status=1) == {"test_page[02-b]"}
    change("book/02-b.md", "Some words.", "Some right words.")
    assert "test_page[02-b]" in ran(clone) and ran(clone) == set()


def test_without_the_option_everything_runs(clone):
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:xdist"], cwd=clone, capture_output=True, text=True)
    assert f"{len(ALL)} passed" in done.stdout


def test_workers_of_xdist_leave_out_the_same(change):
    command = [sys.executable, "-m", "pytest", "--changed", "-n", "2", "--dist", "loadfile", "tests"]
    clone = change("book/01-a.md", "Some words.", "Words again.")
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout and "7 tests passed before" in done.stdout, done.stdout
    again = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert again.returncode == 0 and "10 tests passed before" in again.stdout, again.stdout


def test_patterns_name_files_as_a_shell_does():
    assert selection.matches("book/01-a.md", "book/*.md") and not selection.matches("book/figures/a.md", "book/*.md")
    assert selection.matches("locale/zh_TW/a.po", "locale/") and not selection.matches("book/01-a.md", "*.md")
    for name in ("book/01-a.md", "notebooks/zh-TW/01-a.ipynb", "locale/terms.toml", "README.md"):
        assert selection.is_prose(name), name
    for name in ("book/cells/setup.py", "notebooks/conftest.py", "tests/pages/01-a.toml", "bookkit/src/bookkit/x.py"):
        assert not selection.is_prose(name), name
