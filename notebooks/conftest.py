"""What `pytest --nbmake notebooks/` says at the end: the cell that failed, and what it ran on.

Each chapter runs once: the notebooks of other languages hold the same code, cell by cell. To run
those, name their folder: `pytest --nbmake notebooks/zh-TW`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FIRST = "01-mesh.ipynb"  # the folder of a language has it again
ANSI = re.compile(r"\x1b\[[0-9;]*m")
ARROW = re.compile(r"^-+> *\d+ +(.*)$", re.M)  # how IPython marks the line that failed
INSTALLED = """
import importlib.metadata as metadata, platform, sys
print(f"Python {platform.python_version()} ({sys.executable})")
print(platform.platform())
for name in "jax jaxlib flax optax orbax-checkpoint numpy meshscope".split():
    found = [one.version for one in metadata.distributions(name=name)]
    print(name, *(found[:1] or ["is not installed"]))
"""
DEVICES = """
import jax
kinds = sorted({device.device_kind for device in jax.devices()})
print(f"{jax.device_count()} {jax.default_backend()} devices ({', '.join(kinds)})")
"""


def pytest_ignore_collect(collection_path, config):
    """Pass over the folders of other languages, unless the command names them or what is in them."""
    if not (collection_path / FIRST).is_file() or collection_path == HERE:
        return None
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(collection_path) for path in named) else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and getattr(item, "nbmake", False):
        report.user_properties.append(("chapter failed", what_failed(item, call.excinfo.value)))
    return report


def what_failed(item, raised):
    """The notebook, the cell (from 1, Markdown and code together), the error, the line."""
    name = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else item.name
    result = raised.args[0] if raised.args else None
    error = getattr(result, "error", None)
    if error is None:  # no cell: the kernel died, or the file is not a notebook
        lines = str(raised).strip().splitlines() or [""]
        return f"{name}: {type(raised).__name__}: {lines[0]}"
    cell = result.nb.cells[error.failing_cell_index]
    outputs = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
    if not outputs:  # such as a cell that took too long
        return f"{name}, cell {error.failing_cell_index + 1}: {ANSI.sub('', error.summary)}"
    said = f"{outputs[0]['ename']}: {outputs[0]['evalue']}".splitlines()[0].rstrip(": ")
    text = f"{name}, cell {error.failing_cell_index + 1}: {said}"
    line = ARROW.search(ANSI.sub("", "\n".join(outputs[0]["traceback"])))
    return text + (f"\n    {line[1].strip()}" if line else "")


def kernel_python(name):
    """The Python that the notebooks ran on, which need not be the one that runs pytest."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        python = KernelSpecManager().get_kernel_spec(name or "python3").argv[0]
    except NoSuchKernel:
        return sys.executable
    return python if os.path.isabs(python) else sys.executable


def answer(python, code):
    """What a fresh process prints; if it fails, its last words. Devices as the setup cell asks."""
    environment = dict(os.environ)
    if environment.get("BOOK_DEVICES") != "real":
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    try:
        done = subprocess.run(
            [python, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not be asked: {error}"
    if done.returncode == 0:
        return done.stdout.strip()
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"`import jax` and asking for devices failed: {last}"


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if not config.option.nbmake:
        return
    failed = [
        text
        for report in terminalreporter.getreports("failed")
        for name, text in report.user_properties
        if name == "chapter failed"
    ]
    passed = len(terminalreporter.getreports("passed"))
    if not failed and not passed:
        return
    python = kernel_python(config.option.nbmake_kernel)
    installed = answer(python, INSTALLED).splitlines()
    say = terminalreporter.write_line
    terminalreporter.section("the chapters on this installation")
    for text in failed:
        say(f"FAILED {text}")
    say(f"{passed} of {passed + len(failed)} notebooks passed")
    for line in installed[:2]:
        say(line)
    say(", ".join(installed[2:]))
    say(answer(python, DEVICES))
    if failed:
        say("Tested releases: https://github.com/many-devices/one-program/blob/main/requirements.txt")
    if os.environ.get("GITHUB_ACTIONS"):
        about = "%0A".join([*installed[2:5]])
        for text in failed:  # shown on the run's page
            say(f"::error title=chapter failed::{text.splitlines()[0]}%0A{about}")
