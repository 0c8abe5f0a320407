"""examples/test_sharding.py passes as it stands, and fails for what it is there to notice."""

import ast
import re
import subprocess
import sys

import lives
import pytest
from machines import DEVICES

pytestmark = pytest.mark.reads()  # programs alone

FILE = lives.ROOT / "examples" / "test_sharding.py"
SOURCE = FILE.read_text("utf-8")


def run(path, devices):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", path]
    done = subprocess.run(
        command, env=lives.environment(devices), cwd=path.parent, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.M)
    assert done.returncode == bool(failed), done.stdout
    return failed, done.stdout


@pytest.mark.parametrize("devices", DEVICES)
def test_it_passes(devices):
    failed, said = run(FILE, devices)
    assert not failed and "3 passed" in said, said


FAULTS = {
    "a weight loses its sharding": ('(F, D)), out_sharding=("data", None))', "(F, D)))"),
    "a weight is sharded along the other dimension": (
        '(F, D)), out_sharding=("data", None))', '(F, D)), out_sharding=(None, "data"))'),
    "activations are not pinned": (
        'jax.lax.with_sharding_constraint(jax.nn.relu(x_BD @ self.w_DF), P("data"))',
        "jax.nn.relu(x_BD @ self.w_DF)"),
    "nothing is donated": ("jax.jit(step, donate_argnums=(0, 1))", "jax.jit(step)"),
    "an optimizer with more state": ("optax.sgd(0.1)", "optax.adam(0.1)"),
}  # fmt: skip
NOTICED = {
    "a weight loses its sharding": {"test_shardings", "test_collectives", "test_bytes"},
    "a weight is sharded along the other dimension": {"test_shardings"},
    "activations are not pinned": {"test_collectives"},
    "nothing is donated": {"test_bytes"},
    "an optimizer with more state": {"test_bytes"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(tmp_path, fault):
    right, wrong = FAULTS[fault]
    assert SOURCE.count(right) == 1
    copy = tmp_path / FILE.name
    copy.write_text(SOURCE.replace(right, wrong))
    failed, said = run(copy, 8)
    assert set(failed) >= NOTICED[fault], said
    if fault == "a weight loses its sharding":
        message = re.search(r"AssertionError: .*", ast.get_docstring(ast.parse(SOURCE)))[0]
        assert re.search(rf"^E +{re.escape(message)}$", said, re.M), said


def test_it_is_short_and_stands_alone():
    """Readers copy it: nothing of this repository but meshscope, and little to read."""
    tree = ast.parse(SOURCE)
    imported = {
        name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported == {"os", "jax", "meshscope", "optax", "pytest", "flax"}
    tests = [node for node in tree.body if getattr(node, "name", "").startswith("test_")]
    assert len(tests) == 3 and sum(node.end_lineno - node.lineno + 1 for node in tests) <= 20
