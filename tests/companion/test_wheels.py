"""The wheels that notebooks install: the same bytes anywhere, and pip takes no other."""

import functools
import hashlib
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from bookkit.model.package import CELL, CELL_HASH, COMPANION, MESHSCOPE, REQUIREMENT, build_wheel
from bookkit.words import sync

ROOT = Path(__file__).parents[2]
SITE = "https://many-devices.github.io/one-program/"


def copied(folder):
    """The sources of both packages elsewhere, which is not a clone."""
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "companion"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave_out)
    for name in ("LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize(
    ("which", "name"), [(MESHSCOPE, "src/meshscope"), (COMPANION, "companion/many_devices")]
)
def test_the_bytes_of_a_wheel_follow_from_its_source(which, name, tmp_path, monkeypatch):
    """Times, permissions, stray files and settings change nothing; one byte of source does."""
    wheel = build_wheel(ROOT, which)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    there = copied(tmp_path)
    module = there / name / "__init__.py"
    module.chmod(0o600)
    (module.parent / "__pycache__").mkdir()
    (module.parent / "__pycache__" / "stray.pyc").write_bytes(b"stray")
    assert build_wheel(there, which) == wheel
    module.write_text(module.read_text("utf-8") + "# more\n", "utf-8")
    assert build_wheel(there, which).sha256 != wheel.sha256


def test_the_pins_are_those_of_this_source():
    """What `make sync` writes is committed."""
    before = (ROOT / REQUIREMENT).read_text("utf-8")
    assert build_wheel(ROOT).path in before
    [digest] = CELL_HASH.findall((ROOT / CELL).read_text("utf-8"))
    assert digest == build_wheel(ROOT, COMPANION).sha256


# The setup cell, with a real pip, where all but the book's own packages is installed already.

COLAB = """
import sys, types
for name in ("google", "google.colab", "google.colab.output"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["google.colab"].output = sys.modules["google.colab.output"]  # JAX imports it
"""
REPORT = """
import jax, many_devices, meshscope
print("GOT", many_devices.__file__, meshscope.__file__, len(jax.devices()))
"""
posix = pytest.mark.skipif(os.name == "nt", reason="the layout of a virtual environment is another")


@pytest.fixture
def bare(tmp_path):
    """A Python with all that this one has but the book's own packages."""
    environment, others = tmp_path / "bare", tmp_path / "others"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    others.mkdir()
    own = r"_?_?(editable.*)?(meshscope|many_devices)|.*\.pth$"
    for path in Path(metadata.distribution("jax").locate_file("")).iterdir():
        if not re.match(own, path.name):
            (others / path.name).symlink_to(path)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{others}\n")
    return environment / "bin" / "python"


@pytest.fixture
def served(tmp_path):
    """(folder, setup cell): a site that serves both wheels, and the cell that installs them."""
    root, folder = copied(tmp_path / "source"), tmp_path / "site"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        requirement = root / REQUIREMENT
        text = requirement.read_text("utf-8").replace(
            SITE, f"http://127.0.0.1:{server.server_port}/"
        )
        for name in ("jax", "jaxlib", "flax"):  # the releases that are here
            text = re.sub(rf'"{name}==[\d.]+"', f'"{name}=={metadata.version(name)}"', text)
        requirement.write_text(text, "utf-8")
        requirement.write_text(sync.requirement(root, build_wheel(root))[1], "utf-8")
        _, cell = sync.pinned(root)
        for wheel in (build_wheel(root), build_wheel(root, COMPANION)):
            (folder / wheel.path).parent.mkdir(parents=True)
            (folder / wheel.path).write_bytes(wheel.data)
        yield folder, cell.replace(SITE, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()


def run_cell(python, cell, folder, before=COLAB):
    """(exit status, what it printed) of the setup cell."""
    (folder / "program.py").write_text(f"{before}\n{cell}\n{REPORT}", "utf-8")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX", "XLA", "PYTHON", "PIP_"))
    }
    quiet = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        [python, "program.py"],
        capture_output=True,
        text=True,
        env=kept | quiet,
        cwd=folder,
        timeout=180,
    )
    return done.returncode, done.stdout + done.stderr


@posix
def test_colab_installs_both_wheels_in_one_call(bare, served, tmp_path):
    """The companion by the hash in the cell, meshscope by the hash in the companion."""
    status, printed = run_cell(bare, served[1], tmp_path)
    assert status == 0, printed
    files = re.search(r"GOT (\S+) (\S+) 8", printed).groups()
    assert all(Path(file).is_relative_to(tmp_path / "bare") for file in files)


@posix
@pytest.mark.parametrize("name", ["many_devices", "meshscope"])
def test_a_changed_wheel_is_not_installed(bare, served, tmp_path, name):
    """pip compares the hash, and the cell says what to do."""
    folder, cell = served
    [wheel] = folder.glob(f"wheels/*/{name}-*.whl")
    changed = tmp_path / "changed.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry).replace(b"__version__ = ", b"__version__= "))
    wheel.write_bytes(changed.read_bytes())
    status, printed = run_cell(bare, cell, tmp_path)
    assert status != 0 and "GOT" not in printed and "DO NOT MATCH THE HASHES" in printed
    assert (
        printed.strip()
        .splitlines()[-1]
        .startswith(
            "ImportError: many_devices is not installed: open this page anew from http://127.0.0.1:"
        )
    )


@posix
def test_without_the_wheel_or_a_network(bare, served, tmp_path):
    folder, cell = served
    shutil.rmtree(folder / "wheels")
    status, printed = run_cell(bare, cell, tmp_path)
    assert status != 0 and "404" in printed
    assert printed.strip().splitlines()[-1].startswith("ImportError: many_devices is not installed")


@posix
def test_elsewhere_nothing_is_installed_and_the_command_is_said(bare, served, tmp_path):
    status, printed = run_cell(bare, served[1], tmp_path, before="")
    assert status != 0
    *_, last = printed.strip().splitlines()
    assert 'run pip install "many_devices[instruments] @ http://127.0.0.1:' in last
    assert not list((tmp_path / "bare").glob("lib/python*/site-packages/many_devices*"))


def test_publishing_keeps_the_wheels_of_earlier_notebooks(tmp_path):
    """A saved notebook finds its wheel after the next push; a changed one is not kept."""
    live, new = tmp_path / "live", tmp_path / "new"
    contents = {"old": b"an earlier wheel", "changed": b"changed since", "same": b"today's"}
    paths = {}
    for name, data in contents.items():
        made = hashlib.sha256(b"as it was" if name == "changed" else data).hexdigest()
        paths[name] = f"wheels/{made}/many_devices-0.1.0-py3-none-any.whl"
        (live / paths[name]).parent.mkdir(parents=True)
        (live / paths[name]).write_bytes(data)
    (live / "wheels" / "index.txt").write_text("\n".join(paths.values()) + "\n")
    (new / paths["same"]).parent.mkdir(parents=True)
    (new / paths["same"]).write_bytes(contents["same"])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(live))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}/"
        command = [ROOT / ".ci" / "keep-wheels", site, new]
        done = subprocess.run(command, check=True, text=True, capture_output=True)
        server.shutdown()
    assert (new / paths["old"]).read_bytes() == contents["old"]
    assert not (new / paths["changed"]).exists() and "is not the wheel" in done.stderr
    listed = (new / "wheels" / "index.txt").read_text().split()
    assert listed == sorted([paths["old"], paths["same"]])
    subprocess.run([*command[:1], "http://127.0.0.1:1/", new], check=True)  # never published
