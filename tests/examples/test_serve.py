"""examples/serve.py: the same tokens with both caches as by recomputing everything."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from bookkit.model.chapter import load_chapter

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "serve.py"


def definitions(source):
    """Each function, by name, without comments and line breaks."""
    return {
        node.name: ast.unparse(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def test_both_caches_give_the_same_tokens():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "163,584 bytes of weights on each device",
        "copies: 49,152 bytes of cache on each device, same tokens: True",
        "positions: 24,576 bytes of cache on each device, same tokens: True",
    ]


def test_its_functions_are_those_of_the_page():
    page = {}
    for cell in load_chapter(ROOT / "book" / "15-serving.md").code:
        page |= definitions(cell.source)
    program = definitions(PROGRAM.read_text("utf-8"))
    assert program.pop("main") and len(program) == 14
    assert program == {name: page.get(name) for name in program}
