"""Chapter 8 teaches JAX alone: neither its cells nor the instruments bring Flax in."""
import ast
import os
import subprocess
import sys

import pytest

from bookkit.model.chapter import by_name

NAME = "08-distributed-arrays"
AFTER = 'import sys\nbrought = [name for name in sys.modules if name.split(".")[0] == "flax"]\n' \
        'assert not brought, f"{len(brought)} modules of flax were imported"\n'


@pytest.fixture(scope="module")
def chapter():
    if NAME not in by_name():
        pytest.skip(f"no chapter {NAME}")
    return by_name()[NAME]


def imported(source):
    """Top-level packages that a cell imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def run(source):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    environment.pop("XLA_FLAGS", None)
    return subprocess.run([sys.executable, "-"], input=source, env=environment, timeout=300,
                          capture_output=True, text=True)


def test_no_cell_imports_flax(chapter):
    bad = [cell.where for cell in chapter.code if "flax" in imported(cell.source)]
    assert not bad, f"{', '.join(bad)}: imports flax; chapter 8 is JAX alone"


def test_flax_is_not_loaded_after_the_last_cell(chapter):
    cells = [cell.source for cell in chapter.code]
    finished = run("\n\n".join([*cells, AFTER]))
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_the_check_can_fail():
    finished = run(f"import flax\n{AFTER}")
    assert finished.returncode == 1 and "modules of flax were imported" in finished.stderr
