"""Build meshscope's wheel and source archive, and see that anyone would get the same, and that it works.

    bookkit wheel            into _build/wheel/dist

Built twice, from copies of what git knows in two folders, with other times, other permissions and
another umask: the bytes must be the same. The source archive must give the same wheel. What PyPI would
show and refuse is checked by twine and check-wheel-contents. Then the wheel is installed alone, with
JAX and nothing else, and the examples of its docstrings run there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from bookkit.model.book import Problem, find_root

TOOLS = ("twine==7.0.0", "check-wheel-contents==0.6.3")
PARTS = ("src/meshscope", "pyproject.toml", "LICENSE")
DOCTESTS = Path("tests", "meshscope", "doctests.py")


def run(command: Sequence[str | Path], cwd: Path, what: str, umask: int = -1) -> str:
    """The output of a command; Problem, with what it said, if it fails."""
    # Nothing from here may reach the package: no import path, no settings of pip or of the build.
    left_out = ("PYTHON", "PIP_", "VIRTUAL_ENV", "SOURCE_DATE_EPOCH", "HATCH_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    if any(str(part) == "pip" for part in command):
        clean |= pip
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, text=True, capture_output=True, umask=umask
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-4000:]
        raise Problem(f"{what} failed:\n{said}")
    return done.stdout


def known_files(root: Path) -> list[Path]:
    """What git knows of the package, so that no stray file gets into it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS]
    listed = run(command, root, "git ls-files").split("\0")
    return [root / name for name in listed if name and (root / name).is_file()]


def copy(root: Path, folder: Path, time: int, mode: int) -> Path:
    """The package's files in another folder, with other times and permissions."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in known_files(root):
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        target.chmod(mode)
        os.utime(target, (time, time))
    return folder


def kept_environment(root: Path, name: str, packages: Sequence[str], *more: str | Path) -> Path:
    """A virtual environment with these packages, made again when they change. Its Python."""
    folder = root / "_build" / "wheel" / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    noted = folder / "installed.txt"
    wanted = "\n".join([sys.version, *packages])
    if not (noted.exists() and noted.read_text() == wanted):
        run([sys.executable, "-m", "venv", "--clear", folder], root, "making a virtual environment")
        install: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        run([*install, *more, *packages], root, f"installing {', '.join(packages)}")
        noted.write_text(wanted)
    return python


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def members(archive: Path) -> dict[str, bytes]:
    """The files of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            return {name: file.read(name) for name in file.namelist()}
    with tarfile.open(archive) as file:
        found = ((one.name, file.extractfile(one)) for one in file.getmembers())
        return {name: data.read() for name, data in found if data}


def check_same(one: Path, other: Path, what: str) -> None:
    """Problem if two archives differ, with the files that do."""
    if one.read_bytes() == other.read_bytes():
        return
    a, b = members(one), members(other)
    differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    inside = ", ".join(differ) or "none: times, permissions or their order do"
    raise Problem(f"{what}: {one.name} is not the same twice. Files that differ: {inside}")


def check_contents(wheel: Path, root: Path) -> None:
    """Problem if a wheel has other files than the package, or lacks what PyPI shows."""
    inside = members(wheel)
    sources = {path.relative_to(root / "src").as_posix() for path in known_files(root)
               if path.is_relative_to(root / "src") and path.name != "README.md"}  # fmt: skip
    code = {name for name in inside if ".dist-info/" not in name}
    if code != sources:
        raise Problem(f"{wheel.name} has other files than src/meshscope: {sorted(code ^ sources)}")
    about = next(data for name, data in inside.items() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(about.decode("utf-8"))
    wanted = (
        "Summary",
        "Author",
        "License-Expression",
        "Classifier",
        "Project-URL",
        "Requires-Python",
    )
    if missing := [field for field in wanted if not metadata[field]]:
        raise Problem(f"{wheel.name} says nothing about {', '.join(missing)}: see pyproject.toml")
    readme = (root / "src" / "meshscope" / "README.md").read_text("utf-8")
    if metadata.get_payload() != readme:
        raise Problem(f"{wheel.name} does not show src/meshscope/README.md")
    needs = metadata.get_all("Requires-Dist") or []
    if [need.split(">")[0] for need in needs] != ["jax"]:
        raise Problem(f"{wheel.name} needs {needs}, and should need jax alone")


def pinned(root: Path, target: Path) -> Path:
    """requirements.txt as constraints: the book's own versions, so that a new JAX breaks no build."""
    lines = (root / "requirements.txt").read_text("utf-8").splitlines()
    target.write_text("\n".join(line for line in lines if "==" in line) + "\n", encoding="utf-8")
    return target


def build(root: Path) -> tuple[Path, Path]:
    """The wheel and the source archive, both checked, in _build/wheel/dist."""
    work = root / "_build" / "wheel"
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["build-system"]
    python = kept_environment(root, "tools", [*settings["requires"], *TOOLS])
    made = []
    for n, (time, mode, umask) in enumerate([(10**9, 0o644, 0o022), (10**9 + 10**8, 0o600, 0o077)]):
        source = copy(root, work / ("copy", "another-copy")[n], time, mode)
        out = source / "out"
        run([python, "-m", "hatchling", "build", "-d", out], source, "the build", umask)
        made.append([*out.glob("*.whl"), *out.glob("*.tar.gz")])
    for one, other in zip(*made, strict=True):
        check_same(one, other, "Two builds")
    wheel, archive = made[0]
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    run(
        [python, "-m", "hatchling", "build", "-t", "wheel", "-d", source / "out"],
        source,
        "the build",
    )
    check_same(wheel, source / "out" / wheel.name, "A wheel from the source archive")
    check_contents(wheel, root)
    run([python, "-m", "twine", "check", "--strict", wheel, archive], root, "twine check")
    run([python, "-m", "check_wheel_contents", wheel], root, "check-wheel-contents")
    dist = work / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    for path in (wheel, archive):
        shutil.copy(path, dist / path.name)
    return dist / wheel.name, dist / archive.name


def try_alone(wheel: Path, root: Path) -> str:
    """Install a wheel with what it needs and nothing else, and run its examples. What they said."""
    constraints = pinned(root, root / "_build" / "wheel" / "constraints.txt")
    python = kept_environment(
        root, "alone", [f"{wheel.as_uri()}#sha256={sha256(wheel)}"], "-c", constraints
    )
    away = root / "_build" / "wheel" / "elsewhere"
    away.mkdir(exist_ok=True)
    where = "import meshscope, sys; print(meshscope.__file__, meshscope.__version__)"
    found, version = run([python, "-I", "-c", where], away, "importing meshscope").split()
    if root / "src" in Path(found).parents or version not in wheel.name:
        raise Problem(f"{found}, version {version}, is not what {wheel.name} installed")
    return run(
        [python, "-I", root / DOCTESTS], away, "the examples of the installed package"
    ).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="bookkit wheel", description=__doc__.split("\n")[0]).parse_args(
        arguments
    )
    root = find_root()
    wheel, archive = build(root)
    said = try_alone(wheel, root)
    for path in (wheel, archive):
        print(f"{path.relative_to(root)}  sha256 {sha256(path)}  {path.stat().st_size:,} bytes")
    print(f"The same bytes twice, and from the source archive. Installed alone: {said}.")
