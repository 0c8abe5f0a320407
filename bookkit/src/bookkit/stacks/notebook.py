"""Run one notebook with this Python, and write down what happened.

    bookkit run-notebook notebooks/01-mesh.ipynb --result result.json
    bookkit run-notebook notebooks/01-mesh.ipynb --result result.json --site file:///tmp/site/

`bookkit colab` runs this in Colab's environment (--colab). It needs no more than a kernel, nbclient
and PyYAML, which Colab has. The result is written at the start
of each cell, so that it names the cell even if this process is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from bookkit.model.book import Problem
from bookkit.run.execute import Failure, execute_notebook

PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint numpy scipy scikit-learn matplotlib ipykernel ipython"
).split()
COLAB_KERNEL = ("-m", "colab_kernel_launcher", "--ext=google.colab")


def versions() -> dict[str, str]:
    """What is installed now, by name: the packages that matter, and every CUDA plugin of JAX."""
    importlib.invalidate_caches()
    found = {"python": platform.python_version()}
    installed = {
        re.sub(r"[-_.]+", "-", distribution.name or "").lower(): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    plugins = sorted(name for name in installed if name.startswith("jax-cuda"))
    return found | {name: installed[name] for name in PACKAGES + plugins if name in installed}


def setup_of(notebook: NotebookNode) -> NotebookNode | None:
    """The cell that installs; the quick start has none."""
    tagged = (cell for cell in notebook.cells if "setup" in cell.metadata.get("tags", []))
    return next(tagged, None)


def pins(notebook: NotebookNode) -> dict[str, str]:
    """The releases that a notebook's setup cell installs in Colab; none without such a cell."""
    setup = setup_of(notebook)
    return {} if setup is None else dict(re.findall(r'"([\w-]+)==([\w.]+)"', setup.source))


def at_site(notebook: NotebookNode, address: str) -> NotebookNode:
    """The notebook, whose setup cell takes meshscope's wheel from another address."""
    setup = setup_of(notebook)
    if setup is None:
        return notebook
    setup.source, count = re.subn(r'(?m)^SITE = ".*"$', f'SITE = "{address}"', setup.source)
    if count != 1:
        raise Problem('the setup cell has no line SITE = "…", from where it takes meshscope')
    return notebook


def unlike_colab(
    before: Mapping[str, str], after: Mapping[str, str], wanted: Mapping[str, str]
) -> list[str]:
    """What the setup cell left other than it promises; nothing if it had nothing to install."""
    if before == after:
        return []
    problems = [
        f"{name} is {after.get(name, 'missing')}, the setup cell installs {version}"
        for name, version in wanted.items()
        if after.get(name) != version
    ]
    if before["numpy"] != after.get("numpy"):
        problems.append(
            f"numpy was {before['numpy']} and is {after.get('numpy', 'missing')}: Colab would ask "
            "for a restart; choose releases in book/cells/setup.py that leave its numpy alone"
        )
    left = [name for name in after if name.startswith("jax-cuda")]
    if left:
        problems.append(f"{', '.join(left)} is still there beside another JAX")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="bookkit run-notebook", description=__doc__.split("\n")[0]
    )
    options.add_argument("notebook", type=Path)
    options.add_argument("--result", type=Path, required=True, help="where to write the JSON")
    options.add_argument("--executed", type=Path, help="where to write the executed notebook")
    options.add_argument("--timeout", type=int, default=300, help="seconds for one cell (300)")
    options.add_argument("--site", default="", help="where the setup cell finds meshscope's wheel")
    options.add_argument("--colab", action="store_true", help="with Colab's kernel and its checks")
    chosen = options.parse_args(arguments)

    notebook = nbformat.read(chosen.notebook, as_version=4)
    if chosen.site:
        notebook = at_site(notebook, chosen.site)
    before, started = versions(), time.perf_counter()
    result: dict[str, Any] = {"status": "running", "cell": 0, "versions": before}

    def write(**more: Any) -> None:
        result.update(more, seconds=round(time.perf_counter() - started, 1))
        chosen.result.write_text(json.dumps(result, indent=1) + "\n", "utf-8")

    write()
    launcher: dict[str, Any] = {"launcher": COLAB_KERNEL} if chosen.colab else {}
    done = asyncio.run(
        execute_notebook(
            chosen.notebook.stem,
            notebook,
            chosen.timeout,
            note=lambda cell: write(cell=cell),
            **launcher,
        )
    )
    after = versions()
    if chosen.colab:
        result.update(before=before, versions=after)
    if isinstance(done, Failure):
        first = next((line for line in done.source.splitlines() if line.strip()), "")
        write(status="failed", cell=done.cell, first=first, error=done.error, trace=done.traceback)
        return 1
    if chosen.executed:
        nbformat.write(done, chosen.executed)
    problems = unlike_colab(before, after, pins(notebook)) if chosen.colab else []
    if problems:
        write(status="failed", cell=0, first="", error="; ".join(problems), trace="")
        return 1
    write(status="passed", cell=len(notebook.cells))
    return 0
