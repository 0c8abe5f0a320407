"""The wheels that notebooks install, meshscope and many_devices: the same bytes wherever they are built.

The site serves both below wheels/SHA256/, so that an address names its content. The setup cell of a
notebook pins the companion, many_devices, by its sha256, and the companion's own requirement pins
meshscope, so that pip takes no other, whoever owns the address. No wheel is committed: they follow
from the source.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import re
import subprocess
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bookkit.model.book import Problem


@dataclass(frozen=True)
class Package:
    """A package of this repository: the folder of its pyproject.toml, and what is built."""

    name: str
    folder: str
    sources: tuple[str, ...]


MESHSCOPE = Package(
    "meshscope", ".", ("src/meshscope", "src/pytest_meshscope.py", "pyproject.toml", "LICENSE")
)
COMPANION = Package(
    "many_devices", "companion", ("companion/many_devices", "companion/pyproject.toml")
)
REQUIREMENT = "companion/pyproject.toml"  # pins meshscope
CELL = "companion/setup_cell.py"  # pins the companion
CELL_HASH = re.compile(r'(?<=SHA256 = ")[0-9a-f]{64}(?=")')
FOLDER = "wheels/"  # below the site's address
FILE = re.compile(r"[0-9a-f]{64}/meshscope-[\w.+]+-py3-none-any\.whl")  # in that folder
REQUIRED = re.compile(rf"{FOLDER}{FILE.pattern}#sha256=[0-9a-f]{{64}}")
DATE = (2020, 2, 2, 0, 0, 0)  # of every file in the wheel


@dataclass(frozen=True)
class Wheel:
    name: str  # meshscope-0.1.0-py3-none-any.whl
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def path(self) -> str:
        """Below the site's address, where nothing else will ever be."""
        return f"{FOLDER}{self.sha256}/{self.name}"


def has_package(root: Path) -> bool:
    """Made-up books have no meshscope of their own."""
    return (root / "src" / "meshscope").is_dir()


def known_files(root: Path, package: Package = MESHSCOPE) -> list[Path]:
    """What git knows of a package, so that no stray file gets into it; all, if this is not a clone."""
    command = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *package.sources,
    ]
    git = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if git.returncode == 0 and git.stdout:
        paths = [root / name for name in git.stdout.split("\0") if name]
    else:
        paths = [
            path for part in package.sources for path in [root / part, *(root / part).rglob("*")]
        ]
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def stored(wheel: bytes) -> bytes:
    """The same wheel, uncompressed: what zlib makes of a file depends on its build and release."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(wheel)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            entry = zipfile.ZipInfo(name, DATE)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # as if on Unix
            new.writestr(entry, old.read(name))
    return out.getvalue()


def build_wheel(root: Path, package: Package = MESHSCOPE) -> Wheel:
    """The wheel of this source, in less than a second and without network."""
    project = root / package.folder / "pyproject.toml"
    requires = tomllib.loads(project.read_text("utf-8"))["build-system"]
    (wanted,) = requires["requires"]  # hatchling==1.33.0
    try:
        found = f"hatchling=={importlib.metadata.version('hatchling')}"
    except importlib.metadata.PackageNotFoundError:
        found = "no hatchling"
    if found != wanted:
        raise Problem(
            f"The wheel of {package.name} is built with {wanted} (pyproject.toml), and there is "
            f"{found}: run `make venv`, or install requirements.txt"
        )
    from hatchling.builders.wheel import WheelBuilder

    with tempfile.TemporaryDirectory(prefix="book-wheel-") as folder:
        for path in known_files(root, package):
            target = Path(folder, "source", path.relative_to(root))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        builder = WheelBuilder(str(Path(folder, "source", package.folder)))
        try:
            (made,) = builder.build(directory=str(Path(folder, "out")), versions=["standard"])
        except (OSError, ValueError, TypeError) as error:  # what hatchling says of pyproject.toml
            raise Problem(f"The wheel of {package.name} cannot be built: {error}") from None
        return Wheel(Path(made).name, stored(Path(made).read_bytes()))


# Where the wheel is named.


def with_requirement(text: str, wheel: Wheel) -> str:
    """The text, which names this wheel of meshscope: as the companion's requirement, or in a command."""
    return REQUIRED.sub(f"{wheel.path}#sha256={wheel.sha256}", text)


def with_cell_hash(text: str, wheel: Wheel) -> str:
    """The setup cell, which installs this wheel of the companion and no other."""
    return CELL_HASH.sub(wheel.sha256, text)


def unlike_companion(text: str, wheel: Wheel) -> str:
    """What a text with a setup cell asks for, if that is not this companion; empty if it is."""
    hashes = set(CELL_HASH.findall(text.replace('\\"', '"')))
    if hashes == {wheel.sha256}:
        return ""
    asked = ", ".join(f"{one[:12]}…" for one in sorted(hashes)) or "none"
    return f"pins many_devices by the sha256 {asked}, and its source gives {wheel.sha256[:12]}…"
