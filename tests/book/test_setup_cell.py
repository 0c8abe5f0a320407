"""The setup cell: the same bytes everywhere, and it does what it promises where it runs.

What it does is tried in processes of its own, with the installed versions, Colab, pip and JAX faked
around it.
"""
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from rules import BOOK, verify

pytestmark = pytest.mark.newest  # of kernels and setup cells: once is enough

SETUP = BOOK.root / "book" / "cells" / "setup.py"
AROUND = '''
import importlib.metadata, importlib.util, json, os, subprocess, sys, types
import importlib.machinery
ran, fakes, missing = [], {}, set()  # commands, versions that seem installed, names that do not
said = ""  # by a pip that fails
real_find, real_finder = importlib.util.find_spec, importlib.machinery.PathFinder.find_distributions

class Fake(importlib.metadata.Distribution):
    def __init__(self, name):
        self.text = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {fakes[name]}\\n"
    def read_text(self, filename):
        return self.text if filename == "METADATA" else None
    def locate_file(self, path):
        return path

def find_distributions(context=importlib.metadata.DistributionFinder.Context()):
    yield from (Fake(name) for name in list(fakes) if context.name in (None, name))
    hidden = set(fakes) | missing
    yield from (found for found in real_finder(context) if found.name not in hidden)

def find_spec(name, *rest):
    return None if name in missing else real_find(name, *rest)

def run(command, *rest, **more):
    ran.append(command if isinstance(command, list) else [command])
    if "install" in ran[-1]:
        if said:
            return subprocess.CompletedProcess(command, 1, "", said)
        fakes.pop("jax", None), fakes.pop("flax", None), missing.clear()
    return subprocess.CompletedProcess(command, 0, "", "")

importlib.machinery.PathFinder.find_distributions = find_distributions
importlib.util.find_spec = find_spec
subprocess.run = subprocess.check_call = subprocess.call = subprocess.check_output = run
os.system = lambda command: run(command.split())
def colab():
    for name in ("google", "google.colab", "google.colab.output"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["google.colab"].output = sys.modules["google.colab.output"]  # JAX imports it
SETUP = open(sys.argv[1]).read()
def report():
    import jax
    print("REPORT", json.dumps({
        "ran": ran, "devices": len(jax.devices()), "backend": jax.default_backend(),
        "env": {k: v for k, v in os.environ.items() if k.startswith(("JAX", "TF_"))}}))
'''


def run_setup(before="", after="report()", **environment):
    """(report or None, what was printed, exit status) of the setup cell after some lines."""
    program = AROUND + textwrap.dedent(before) + "\nexec(SETUP, globals())\n" + textwrap.dedent(after)
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("JAX", "XLA", "TF_", "BOOK_"))}
    done = subprocess.run([sys.executable, "-c", program, str(SETUP)], capture_output=True, text=True,
                          env={**kept, **environment}, timeout=120)
    found = re.search(r"REPORT (.*)", done.stdout)
    return (json.loads(found[1]) if found else None), done.stdout + done.stderr, done.returncode


def last_line(text):
    return text.strip().splitlines()[-1] if text.strip() else ""


def test_size():
    lines = SETUP.read_text("utf-8").rstrip("\n").split("\n")
    assert len(lines) <= 48, f"book/cells/setup.py has {len(lines)} lines; 48 are the limit"
    verify(f"book/cells/setup.py, line {number}: {len(line)} columns; 88 are the limit"
           for number, line in enumerate(lines, 1) if len(line) > 88)


def test_eight_simulated_devices_and_nothing_installed():
    report, printed, status = run_setup()
    assert status == 0, printed
    assert (report["devices"], report["backend"]) == (8, "cpu")
    assert report["ran"] == [], f"outside Colab nothing is installed, but it ran {report['ran']}"
    assert report["env"]["TF_CPP_MIN_LOG_LEVEL"] == "2", "XLA's notes from C++ are kept from stderr"
    assert "Warning" not in printed, printed


def test_forces_cpu_beside_other_settings():
    """A GPU's settings, or another number of devices, do not change what the book shows."""
    report, printed, status = run_setup(JAX_PLATFORMS="cuda,cpu", JAX_NUM_CPU_DEVICES="3")
    assert status == 0, printed
    assert (report["devices"], report["backend"]) == (8, "cpu")


def test_runs_twice():
    report, printed, status = run_setup(after="exec(SETUP, globals())\nreport()")
    assert status == 0 and report["devices"] == 8, printed


@pytest.mark.parametrize("package, version", [("jax", "0.7.2"), ("flax", "0.11.2"),
                                              ("flax", "0.12.7"), ("jax", "0.10.1")])
def test_too_old(package, version):
    """Older releases ignore out_sharding silently, so the cell refuses them, before importing."""
    report, printed, status = run_setup(f"fakes[{package!r}] = {version!r}")
    assert status != 0, f"{package} {version} was accepted"
    message = last_line(printed)
    assert package in message and version in message, (
        f"the message names what is too old and its version: {message}")
    oldest = re.search(rf'"{package}": "([\d.]+)"', SETUP.read_text("utf-8"))[1]
    assert message == f"AssertionError: Install, then restart: {package} {version} (needs {oldest})"


def test_newer_is_welcome():
    """Minimum versions only: also where 0.9 and 0.13, or 0.12.8 and 0.12.12, are compared."""
    report, printed, status = run_setup("fakes['flax'] = '0.13.0'; fakes['optax'] = '0.10.0'")
    assert status == 0, printed


def test_colab_installs_releases_that_leave_its_numpy_alone():
    report, printed, status = run_setup(
        "colab(); fakes.update(jax='0.7.2', flax='0.11.2'); missing.add('meshscope')")
    assert status == 0, printed
    commands = [" ".join(command) for command in report["ran"]]
    installs = [command for command in commands if " install" in command]
    assert len(installs) == 1, f"one pip install, not {commands}"
    assert "-m pip" in installs[0] and sys.executable in installs[0]
    for piece in ("jax==", "jaxlib==", "flax=="):
        assert piece in installs[0], f"{piece} is not pinned: {installs[0]}"
    assert "numpy" not in installs[0], "Colab's numpy stays as it is"
    wheel = re.search(r"meshscope @ (\S+)#sha256=[0-9a-f]{64}(?:\s|$)", installs[0])
    assert wheel and wheel[1].startswith(f"{BOOK.site}wheels/meshscope-"), (
        f"meshscope is a wheel of the book's own site, {BOOK.site}, pinned by its hash: {installs[0]}")
    assert "git+" not in installs[0], f"nothing comes from a repository: {installs[0]}"
    assert f"meshscope comes from {wheel[1]}\n" in printed, "the cell says from where"
    assert report["devices"] == 8


@pytest.mark.parametrize("said, sentence", [
    ("ERROR: Could not find a version that satisfies the requirement jax==0.11.2",
     "Nothing was installed: mend what pip says above, then run all again."),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
     "Nothing was installed: {site}wheels/{wheel} is not the wheel that this notebook was made with. "
     "Open it anew from {site}, an hour later if the site was just changing, or report it."),
], ids=["offline", "changed"])
def test_colab_when_pip_fails(said, sentence):
    """pip's own words are shown; the last line is a sentence that says what to do."""
    _, printed, status = run_setup(f"colab(); missing.add('meshscope'); said = {said!r}")
    wheel = re.search(r"meshscope-[\w.-]+\.whl", SETUP.read_text("utf-8"))[0]
    assert status != 0 and said in printed
    assert last_line(printed) == "AssertionError: " + sentence.format(site=BOOK.site, wheel=wheel)


def test_colab_without_meshscope():
    report, printed, status = run_setup("colab(); missing.add('meshscope')")
    assert status == 0 and len(report["ran"]) == 1, printed


def test_colab_with_everything_installs_nothing():
    report, printed, status = run_setup("colab()")
    assert status == 0 and report["ran"] == [], printed


def test_colab_removes_a_cuda_plugin_that_no_longer_fits():
    plugin = "colab(); fakes.update({'jax': '0.7.2', 'jax-cuda12-plugin': '0.7.2'})"
    report, printed, status = run_setup(plugin)
    assert status == 0, printed
    removed = [command for command in report["ran"] if "uninstall" in command]
    assert removed and any("jax-cuda12-plugin" in " ".join(command) for command in removed), (
        f"the plugin of the replaced JAX stays: {report['ran']}")
    assert all("-y" in command or "--yes" in command for command in removed), "pip would ask"


def test_colab_with_a_newer_jax_beside_an_old_flax():
    """Colab since September 2026: the same install, and the plugin of either CUDA goes."""
    report, printed, status = run_setup("""
        colab(); fakes.update({"jax": "0.11.1", "flax": "0.11.2", "jax-cuda13-plugin": "0.11.1"})
        """)
    assert status == 0, printed
    install, removal = [" ".join(command) for command in report["ran"]]
    assert "jax==" in install and "flax==" in install and "jax-cuda13-plugin" in removal


def test_outside_colab_too_old_installs_nothing():
    _, printed, status = run_setup("""
        fakes["jax"] = "0.7.2"
        import atexit
        atexit.register(lambda: print("RAN", ran))
        """)
    assert status != 0 and "RAN []" in printed, printed


@pytest.mark.parametrize("where", ["", "colab(); fakes.update(jax='0.7.2')\n"],
                         ids=["anywhere", "colab"])
def test_a_jax_imported_before_the_install(where):
    _, printed, status = run_setup(where + textwrap.dedent("""
        sys.modules["jax"] = types.ModuleType("jax")
        sys.modules["jax"].__version__ = "0.7.2"
        sys.modules["jax"].devices = lambda: [0] * 8
        sys.modules["jax"].default_backend = lambda: "cpu"
        """))
    assert status != 0, "a JAX of another version was accepted"
    sentence = "AssertionError: JAX 0.7.2 is loaded: restart the runtime, then run all"
    assert last_line(printed) == sentence


def test_devices_made_too_early():
    """Another cell, or another notebook's kernel, has started JAX with one device already."""
    _, printed, status = run_setup("import jax; jax.devices()", JAX_PLATFORMS="cpu")
    assert status != 0, "one device was accepted where the book needs eight"
    assert "restart" in last_line(printed).lower(), last_line(printed)


def test_real_devices_are_not_forced():
    report, printed, status = run_setup(BOOK_DEVICES="real", JAX_NUM_CPU_DEVICES="9",
                                        JAX_PLATFORMS="cpu")
    assert status == 0, printed
    assert report["devices"] == 9, "with BOOK_DEVICES=real the devices are as they are"
    _, printed, status = run_setup(after='print("PRECISION", jax.config.jax_default_matmul_precision)',
                                   BOOK_DEVICES="real", JAX_NUM_CPU_DEVICES="8", JAX_PLATFORMS="cpu")
    assert status == 0 and "PRECISION highest" in printed, (
        f"TPUs and recent GPUs would round the inputs of float32 products: {printed}")
    report, printed, status = run_setup(BOOK_DEVICES="real", JAX_NUM_CPU_DEVICES="4",
                                        JAX_PLATFORMS="cpu")
    assert status != 0 and "4 cpu devices, not 8" in last_line(printed), printed
    assert "quick start" in last_line(printed), "which pages work with four is not said"


def test_on_cpu():
    """Claims about the CPU compiler's choice count on a CPU and are skipped, aloud, elsewhere."""
    _, printed, status = run_setup(after="""
        assert on_cpu(1 + 1 == 2) and not on_cpu(1 + 1 == 3)
        jax.default_backend = lambda: "tpu"
        print("BEFORE"); assert on_cpu(1 + 1 == 3); print("AFTER")
        """)
    assert status == 0, printed
    assert re.search(r"BEFORE\n.+\nAFTER", printed), "nothing says that the claim was not checked"
