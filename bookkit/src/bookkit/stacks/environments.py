"""Find a Python and make an environment, for bookkit/stacks/colab.py."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bookkit.model.book import Problem

CHECK = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2], sys.executable)"


def candidates(version: str) -> Iterator[str]:
    """Where a Python of this version may be: this one, PATH, pyenv's folders, uv's."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield os.path.join(folder, f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    yield from (str(path) for path in sorted(pyenv.glob(f"{version}*/bin/python"), reverse=True))
    if uv := shutil.which("uv"):
        done = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        yield done.stdout.strip()


def find_python(version: str) -> str:
    """A Python of this version that runs. Each is tried: pyenv's shims exist and then fail."""
    for candidate in candidates(version):
        if not candidate or not os.access(candidate, os.X_OK):
            continue
        done = subprocess.run([candidate, "-c", CHECK], capture_output=True, text=True)
        found = done.stdout.split(maxsplit=1)
        if done.returncode == 0 and found[:1] == [version]:
            return found[1].strip()
    raise Problem(
        f"Python {version} was not found in PATH, among pyenv's versions or with uv: install it "
        f"(`uv python install {version}`, `pyenv install {version}`) with its venv module"
    )


def make_environment(
    folder: Path, python: Callable[[], str], key: str, install: Callable[[Path], None]
) -> Path:
    """A virtual environment in `folder`, made anew when `key` changed since it was complete."""
    note = folder / "installed.txt"
    environment = folder / "environment"
    digest = hashlib.sha256(key.encode()).hexdigest()
    if note.exists() and note.read_text("utf-8") == digest:
        return environment
    found = python()
    print(f"installing {folder.name} with {found}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([found, "-m", "venv", environment], capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"{found} cannot make a virtual environment:\n{done.stdout}{done.stderr}")
    install(environment / "bin" / "python")
    note.write_text(digest, "utf-8")
    return environment
