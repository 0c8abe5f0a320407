"""The Makefile and what chooses a Python, with made-up Pythons in PATH."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from toy import ROOT

FIND = ROOT / "bookkit" / "find_python.sh"


def python(folder, name, version):
    """A stand-in for Python: None is what pyenv's shim does for a version that is not there."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    if version is None:
        script = f"echo 'pyenv: {name}: command not found' >&2\nexit 127"
    else:
        script = f'exec {sys.executable} -c "import sys; sys.version_info = {version}; sys.executable = \'{path}\'; exec(sys.argv[1])" "$2"'
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def find(*folders, argument=""):
    path = ":".join([*map(str, folders), "/nowhere"])
    return subprocess.run(
        ["/bin/sh", FIND, argument], env={"PATH": path}, capture_output=True, text=True
    )


def test_3_12_is_preferred_and_shims_that_fail_are_passed_over(tmp_path):
    shims, usual = tmp_path / "shims", tmp_path / "usual bin"
    for name in ("python3.12", "python3.13", "python3.11", "python3"):
        python(shims, name, None)
    found = python(usual, "python3", (3, 12))
    assert find(shims, usual).stdout == f"{found}\n"
    found = python(usual, "python3.11", (3, 11))
    assert find(shims, usual).stdout == f"{found}\n"
    found = python(usual, "python3.13", (3, 13))
    assert find(shims, usual).stdout == f"{found}\n"
    found = python(usual, "python3.12", (3, 12))
    assert find(shims, usual).stdout == f"{found}\n"


@pytest.mark.parametrize("version", [None, (3, 10), (3, 14)])
def test_without_a_suitable_python_there_is_one_clear_sentence(tmp_path, version):
    python(tmp_path, "python3", version)
    done = find(tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_python_that_was_named_is_the_one_or_an_error(tmp_path):
    good, bad = python(tmp_path, "good", (3, 11)), python(tmp_path, "bad", (3, 9))
    assert find(tmp_path, argument=str(good)).stdout == f"{good}\n"
    for wrong in (str(bad), str(tmp_path / "none")):
        done = find(tmp_path, argument=wrong)
        assert done.returncode != 0 and wrong in done.stderr and len(done.stderr.splitlines()) == 1


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def make(*arguments, folder=ROOT, **environment):
    command = ["make", "--no-print-directory", *arguments]
    environment = {**os.environ, **environment}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@needs_make
def test_make_alone_says_what_each_target_does():
    said = make().stdout
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"\.PHONY: ((?:.*\\\n)*.*)", text)[1].replace("\\\n", " ").split()
    for target in set(phony) - {"venv", "venv-test"}:
        assert re.search(rf"^make {target} +\w", said, re.M), target
    assert set(re.findall(r"^([a-z-]+):", text, re.M)) == set(phony)


@needs_make
def test_an_interrupted_installation_does_not_look_ready(tmp_path):
    """pip fails here; the environment is not marked, so that the next make starts again."""
    (tmp_path / "bookkit").mkdir()
    for name in ("Makefile", "bookkit/find_python.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements.txt").write_text("./not-there\n")
    environment = {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"}
    for _ in range(2):
        done = make("venv", "VENV=venv", f"PYTHON={sys.executable}", folder=tmp_path, **environment)
        assert done.returncode != 0 and "installing requirements.txt" in done.stdout
        assert (tmp_path / "venv" / "bin" / "pip").exists()
        assert not (tmp_path / "venv" / ".requirements-installed").exists()
