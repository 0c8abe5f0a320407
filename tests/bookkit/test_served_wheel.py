"""The wheel that the site serves, and a setup cell that takes this one and no other, with a real pip."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from bookkit.lint.command import RULES, of_book
from bookkit.model import package
from bookkit.model.book import Book, Problem
from bookkit.model.package import SETUP, Wheel, build_wheel, unlike_pin, with_pin
from bookkit.site import build
from bookkit.site.address import text_files
from bookkit.words import sync
from toy import ROOT

pytestmark = pytest.mark.reads()  # of the pages, the setup cell alone

CELL = (ROOT / SETUP).read_text("utf-8")


@pytest.fixture(scope="module")
def wheel():
    return build_wheel(ROOT)


# The wheel.


def copied(folder, change=lambda path, data: data):
    """The package's files elsewhere, which is no clone."""
    for path in package.known_files(ROOT):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(change(path, path.read_bytes()))
    return folder


def test_the_same_bytes_elsewhere_with_other_times_and_settings(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    previous = os.umask(0o077)
    try:
        there = copied(tmp_path)
        (there / "src/meshscope/__pycache__").mkdir()
        (there / "src/meshscope/__pycache__/_hlo.cpython-312.pyc").write_bytes(b"stray")
        assert build_wheel(there) == wheel
    finally:
        os.umask(previous)


def test_nothing_is_compressed_so_that_no_zlib_decides_the_bytes(wheel, tmp_path):
    (tmp_path / wheel.name).write_bytes(wheel.data)
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        assert {one.compress_type for one in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {one.date_time for one in archive.infolist()} == {package.DATE}
        names = set(archive.namelist())
    sources = {f"meshscope/{path.name}" for path in (ROOT / "src/meshscope").glob("*.py")}
    assert sources < names and "meshscope/README.md" not in names


def test_a_change_of_the_source_changes_the_hash(wheel, tmp_path):
    more = copied(tmp_path, lambda path, data: data + b"\n# more\n" * (path.name == "_hlo.py"))
    assert build_wheel(more).sha256 != wheel.sha256


def test_one_release_of_hatchling_is_named_and_another_is_refused(tmp_path, monkeypatch):
    """Its number stands in the wheel."""
    own, tools = (tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8")) for folder in ("", "bookkit"))
    (wanted,) = own["build-system"]["requires"]
    assert wanted in tools["project"]["dependencies"]
    assert wanted in (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    with pytest.raises(Problem, match=f"built with {wanted} .* there is hatchling==1.0: run `make venv`"):
        build_wheel(ROOT)


def test_a_package_that_cannot_be_built_says_why(tmp_path):
    copied(tmp_path, lambda path, data: data.replace(b'"Typing :: Typed"', b'"Typing :: Odd"'))
    with pytest.raises(Problem, match="wheel of meshscope cannot be built: .*Typing :: Odd"):
        build_wheel(tmp_path)


# Where it is named.

OLD = Wheel("meshscope-0.0.9-py3-none-any.whl", b"old")


def test_the_cell_asks_for_the_wheel_of_this_source(wheel):
    assert unlike_pin(CELL, wheel) == ""
    for other in (Wheel(wheel.name, b"other"), Wheel(OLD.name, wheel.data)):
        assert unlike_pin(CELL, other).startswith(f"asks for {wheel.name} with sha256 {wheel.sha256[:12]}…, and ")
    assert "asks for no wheel of meshscope with sha256 none" in unlike_pin("import jax", wheel)


@pytest.fixture
def other_source(tmp_path):
    """The whole book, with a meshscope that changed since the last `make sync`."""
    for path, text in text_files(ROOT).items():
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to(ROOT)).write_bytes(text.encode("utf-8"))
    sync.main([], tmp_path)
    module = tmp_path / "src" / "meshscope" / "_hlo.py"
    module.write_text(module.read_text("utf-8") + "\n# more\n", "utf-8")
    return Book(tmp_path)


def test_a_hash_that_is_out_of_date_is_said_by_sync_lint_and_site(other_source, wheel, monkeypatch):
    root, new = other_source.root, build_wheel(other_source.root)
    with pytest.raises(Problem) as stale:
        sync.main(["--check"], root)
    assert str(stale.value).startswith(f"Out of date: {SETUP}, ") and "book/01-mesh.md, " in str(stale.value)
    assert str(stale.value).endswith(
        "The setup cell pins another wheel than the source of meshscope gives. Run `make sync` and commit.")
    [found] = of_book(other_source, [RULES["pinned-wheel"]])
    line = CELL[:CELL.index("wheels/")].count("\n") + 1
    asked = f"asks for {wheel.name} with sha256 {wheel.sha256[:12]}…"
    assert str(found).startswith(f"{SETUP}:{line}: it {asked}")
    assert "run `make sync` and commit" in str(found)
    monkeypatch.setattr(build, "execute", lambda book: pytest.fail("executed"))
    with pytest.raises(Problem, match=f"{SETUP} {asked}.*{new.sha256[:12]}….*run `make sync`"):
        build.main([], root)
    sync.main([], root)
    sync.main(["--check"], root)
    assert not list(of_book(other_source, [RULES["pinned-wheel"]]))
    assert unlike_pin((root / "notebooks/zh-TW/01-mesh.ipynb").read_text("utf-8"), new) == ""
    assert new.sha256 in (root / "book/instruments.md").read_text("utf-8")


def test_the_site_serves_the_wheel_or_is_not_built(wheel, tmp_path):
    """Whatever made a notebook in the site ask for another one."""
    book, outputs = Book(), {}
    for language in book.languages:
        outputs[language.code] = tmp_path / language.code
        for file in build.expected(book):
            if file.startswith(language.path):
                path = outputs[language.code] / file.removeprefix(language.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        for page in book.chapters:
            shutil.copy(book.notebook(page, language), outputs[language.code] / "notebooks")
    notebook = outputs["zh_TW"] / "notebooks" / "01-mesh.ipynb"
    text, site = notebook.read_text("utf-8"), tmp_path / "html"
    notebook.write_text(text.replace(wheel.sha256, OLD.sha256), "utf-8")
    with pytest.raises(Problem) as refused:
        build.assemble(book, outputs, site, wheel)
    assert str(refused.value) == (
        f"zh-TW/notebooks/01-mesh.ipynb asks for {wheel.name} with sha256 {OLD.sha256[:12]}…, and the source of "
        f"meshscope gives {wheel.name} with sha256 {wheel.sha256[:12]}…\n"
        "pip would refuse it in Colab: run `make sync`, and build the site again.")
    assert not site.exists() and not site.with_name("html.new").exists()
    notebook.write_text(text, "utf-8")
    build.serve_wheel(book, wheel, tmp_path / "zh_TW")
    assert (tmp_path / "zh_TW" / "wheels" / wheel.name).read_bytes() == wheel.data


def test_a_name_and_a_hash_are_written_where_they_stood(wheel):
    text = f'a\nW = "wheels/{OLD.name}"\nSHA256 = "{OLD.sha256}"\npip install x/{OLD.name}#sha256={OLD.sha256}\n'
    new = with_pin(text, lambda: wheel)
    assert new == text.replace(OLD.name, wheel.name).replace(OLD.sha256, wheel.sha256)
    assert unlike_pin(new, wheel) == "" and with_pin(new, lambda: wheel) == new


def test_a_text_without_a_hash_builds_nothing():
    assert with_pin("meshscope-0.0.9-py3-none-any.whl", lambda: pytest.fail("built")) == (
        "meshscope-0.0.9-py3-none-any.whl")


# The setup cell, where everything but meshscope is installed already.

COLAB = """
import sys, types
for name in ("google", "google.colab", "google.colab.output"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["google.colab"].output = sys.modules["google.colab.output"]
exec(open(sys.argv[1]).read(), globals())
import meshscope
print("GOT", meshscope.__file__, len(jax.devices()))
"""


@pytest.fixture
def colab(tmp_path):
    """A Python with all that this one has, but for meshscope, which pip installs into it."""
    environment, others = tmp_path / "colab", tmp_path / "others"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    others.mkdir()
    for path in Path(metadata.distribution("jax").locate_file("")).iterdir():
        if not re.match(r"_?_?(editable.*)?meshscope|.*\.pth$", path.name):
            (others / path.name).symlink_to(path)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{others}\n")
    return environment / "bin" / "python"


@pytest.fixture
def site(tmp_path):
    """A folder, and the address that serves it."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def run_cell(python, address, folder):
    """(exit status, what it printed) of the setup cell with the site's address and installed releases."""
    text, count = re.subn(r'(?m)^SITE = ".*"$', f'SITE = "{address}"', CELL)
    for name in ("jax", "jaxlib", "flax"):
        text = re.sub(rf'"{name}==[\d.]+"', f'"{name}=={metadata.version(name)}"', text)
    assert count == 1
    (folder / "cell.py").write_text(text, "utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA", "PYTHON", "PIP_"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run([python, "-c", COLAB, folder / "cell.py"], capture_output=True, text=True,
                          env=kept | offline, cwd=folder, timeout=120)
    return done.returncode, done.stdout + done.stderr


def put(wheel, folder, data=None):
    (folder / "wheels").mkdir()
    (folder / wheel.path).write_bytes(data or wheel.data)


@pytest.mark.skipif(os.name == "nt", reason="the layout of a virtual environment is another")
def test_the_right_wheel_is_installed(colab, site, wheel, tmp_path):
    folder, address = site
    put(wheel, folder)
    status, printed = run_cell(colab, address, tmp_path)
    assert status == 0, printed
    assert f"meshscope comes from {address}{wheel.path}" in printed
    found, devices = re.search(r"GOT (\S+) (\d+)", printed).groups()
    assert Path(found).is_relative_to(tmp_path / "colab") and devices == "8"


@pytest.mark.skipif(os.name == "nt", reason="the layout of a virtual environment is another")
def test_a_changed_wheel_is_refused_with_a_sentence(colab, site, wheel, tmp_path):
    folder, address = site
    put(wheel, folder, wheel.data.replace(b"__version__ = ", b"__version__= "))
    assert (folder / wheel.path).read_bytes() != wheel.data
    status, printed = run_cell(colab, address, tmp_path)
    assert status != 0 and "GOT" not in printed
    assert "DO NOT MATCH THE HASHES" in printed and wheel.sha256 in printed  # pip's own words
    assert printed.strip().splitlines()[-1] == (
        f"AssertionError: Nothing was installed: {address}{wheel.path} is not the wheel that this "
        f"notebook was made with. Open it anew from {address}, an hour later if the site was just "
        "changing, or report it.")
    assert not list((tmp_path / "colab").glob("lib/python*/site-packages/meshscope*"))


@pytest.mark.skipif(os.name == "nt", reason="the layout of a virtual environment is another")
def test_a_site_without_the_wheel_is_not_taken_for_a_changed_one(colab, site, wheel, tmp_path):
    status, printed = run_cell(colab, site[1], tmp_path)
    assert status != 0 and "404" in printed
    assert printed.strip().splitlines()[-1] == (
        "AssertionError: Nothing was installed: mend what pip says above, then run all again.")
