"""bookkit/stacks/wheel.py notices an archive that differs, holds something else, or says too little."""
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from bookkit.model.book import Problem
from bookkit.stacks import wheel

pytestmark = pytest.mark.reads()  # the package alone

METADATA = """\
Metadata-Version: 2.5
Name: meshscope
Summary: s
Author: a
License-Expression: Apache-2.0
Classifier: Typing :: Typed
Project-URL: Homepage, https://example.org/
Requires-Python: >=3.11
Requires-Dist: jax>=0.10.2

"""


@pytest.fixture
def root(tmp_path):
    """A repository with a small package."""
    folder = tmp_path / "repository"
    package = folder / "src" / "meshscope"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    (package / "README.md").write_text("# A package\n")
    (folder / "LICENSE").write_text("free\n")
    wheel.run(["git", "init", "-q"], folder, "git init")
    return folder


def packed(path, date=(2020, 2, 2, 0, 0, 0), **changes):
    """A wheel of that package; changes by file name, None leaves one out."""
    files = {"meshscope/__init__.py": '__version__ = "0"\n',
             "meshscope-0.dist-info/METADATA": METADATA + "# A package\n"}
    with zipfile.ZipFile(path, "w") as file:
        for name, text in (files | {key.replace("__", "/"): text for key, text in changes.items()}).items():
            if text is not None:
                file.writestr(zipfile.ZipInfo(name, date), text)
    return path


def test_two_builds_with_the_same_bytes_are_the_same(tmp_path):
    wheel.check_same(packed(tmp_path / "a.whl"), packed(tmp_path / "b.whl"), "Two builds")


def test_a_file_that_differs_is_named(tmp_path):
    a, b = packed(tmp_path / "a.whl"), packed(tmp_path / "b.whl", meshscope__more="1")
    with pytest.raises(Problem, match="Two builds: a.whl is not the same twice. .* differ: meshscope/more$"):
        wheel.check_same(a, b, "Two builds")


def test_times_alone_make_a_difference(tmp_path):
    a, b = packed(tmp_path / "a.whl"), packed(tmp_path / "b.whl", date=(2021, 1, 1, 0, 0, 0))
    with pytest.raises(Problem, match="none: times, permissions or their order do"):
        wheel.check_same(a, b, "Two builds")


def test_source_archives_are_compared_too(tmp_path):
    for name, text in (("a", "1"), ("b", "2")):
        (tmp_path / "file").write_text(text)
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as file:
            file.add(tmp_path / "file", "package/file")
    with pytest.raises(Problem, match="differ: package/file$"):
        wheel.check_same(tmp_path / "a.tar.gz", tmp_path / "b.tar.gz", "Two builds")


def test_a_sound_wheel_passes(root, tmp_path):
    wheel.check_contents(packed(tmp_path / "w.whl"), root)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"meshscope__stray.txt": "x"}, r"other files than src/meshscope: \['meshscope/stray.txt'\]"),
        ({"meshscope/__init__.py": None}, "other files than src/meshscope"),
        ({"meshscope-0.dist-info/METADATA": METADATA + "# Another\n"}, "does not show src/meshscope/README.md"),
        ({"meshscope-0.dist-info/METADATA": METADATA.replace("Author: a\n", "") + "# A package\n"},
         "says nothing about Author: see pyproject.toml"),
        ({"meshscope-0.dist-info/METADATA": METADATA.replace("jax>", "flax>") + "# A package\n"},
         "should need jax alone"),
    ],
)
def test_a_wheel_that_is_not_the_package_is_refused(root, tmp_path, changes, says):
    made = tmp_path / "w.whl"
    files = {"meshscope/__init__.py": '__version__ = "0"\n',
             "meshscope-0.dist-info/METADATA": METADATA + "# A package\n"} | {
                 key.replace("meshscope__", "meshscope/"): text for key, text in changes.items()}
    with zipfile.ZipFile(made, "w") as file:
        for name, text in files.items():
            if text is not None:
                file.writestr(name, text)
    with pytest.raises(Problem, match=says):
        wheel.check_contents(made, root)


def test_files_that_git_ignores_stay_out(root, tmp_path):
    (root / ".gitignore").write_text("*.pyc\n")
    (root / "src" / "meshscope" / "stray.pyc").write_text("")
    (root / "src" / "meshscope" / "new.py").write_text("")
    names = {path.name for path in wheel.known_files(root)}
    assert names == {"__init__.py", "README.md", "LICENSE", "new.py"}
    made = wheel.copy(root, tmp_path / "copy", 10**9, 0o600)
    file = made / "src" / "meshscope" / "new.py"
    assert file.stat().st_mtime == 10**9
    assert os.name == "nt" or file.stat().st_mode & 0o777 == 0o600


def test_a_command_that_fails_says_what_it_said(tmp_path):
    with pytest.raises(Problem, match="the build failed:\n.*no-such-file"):
        wheel.run(["git", "hash-object", "no-such-file"], tmp_path, "the build")


def test_nothing_of_the_caller_s_environment_reaches_a_build(tmp_path, monkeypatch):
    for name in ("SOURCE_DATE_EPOCH", "PYTHONPATH", "HATCH_BUILD_HOOKS_ENABLE", "PIP_NO_DEPS"):
        monkeypatch.setenv(name, "1")
    seen = wheel.run(["env"], tmp_path, "env")
    assert not any(name in seen for name in ("SOURCE_DATE_EPOCH", "PYTHONPATH", "HATCH_", "PIP_"))


def test_constraints_are_the_book_s_pins(tmp_path):
    lines = wheel.pinned(Path(__file__).parents[2], tmp_path / "constraints.txt").read_text().splitlines()
    assert any(line.startswith("jax==") for line in lines) and "." not in lines
