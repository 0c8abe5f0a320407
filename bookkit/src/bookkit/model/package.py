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
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bookkit.model.book import Problem

# The folders with a pyproject.toml, from the repository's root.
MESHSCOPE, COMPANION = ".", "companion"
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


def stored(wheel: bytes) -> bytes:
    """The same wheel, uncompressed: what zlib makes of a file depends on its build and release."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(wheel)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            entry = zipfile.ZipInfo(name, DATE)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # as if on Unix
            new.writestr(entry, old.read(name))
    return out.getvalue()


def build_wheel(root: Path, package: str = MESHSCOPE) -> Wheel:
    """The wheel of this source, in less than a second and without network.

    hatchling leaves out what git ignores, and the files that Python keeps beside modules.
    """
    project = tomllib.loads((root / package / "pyproject.toml").read_text("utf-8"))
    (wanted,) = project["build-system"]["requires"]  # hatchling==1.33.0
    try:
        found = f"hatchling=={importlib.metadata.version('hatchling')}"
    except importlib.metadata.PackageNotFoundError:
        found = "no hatchling"
    if found != wanted:
        raise Problem(
            f"The wheel of {project['project']['name']} is built with {wanted} (pyproject.toml), and "
            f"there is {found}: run `make venv`, or install requirements.txt"
        )
    from hatchling.builders.wheel import WheelBuilder

    with tempfile.TemporaryDirectory(prefix="book-wheel-") as folder:
        (made,) = WheelBuilder(str(root / package)).build(directory=folder, versions=["standard"])
        return Wheel(Path(made).name, stored(Path(made).read_bytes()))
