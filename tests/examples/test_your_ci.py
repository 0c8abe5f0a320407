"""examples/test_sharding.py passes as it stands, and fails for what it is there to notice."""

import ast
import re
import shutil
import subprocess
import sys

import lives
import pytest
from machines import DEVICES

FILE = lives.ROOT / "examples" / "test_sharding.py"
SOURCE = FILE.read_text("utf-8")


SNAPSHOTS = FILE.parent / "sharding_snapshots"


def run(path, devices, *options):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["-p", "pytest_meshscope", *options, path]  # the plugin, if it is not installed yet
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
    passed = "4 passed" if devices == 8 else "3 passed, 1 skipped"
    assert not failed and passed in said, said


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
SHOWN = {  # by the snapshot
    "a weight loses its sharding": r"\+ input 0.w_FD: float32 \(1024, 256\) P\(\)",
    "a weight is sharded along the other dimension": (
        r"\+ input 0.w_FD: float32 \(1024, 256\) P\(None, 'data'\)"
    ),
    "activations are not pinned": r"\+ all-\w+ over data, .* bytes, from test_sharding.py:\d+",
    "nothing is donated": r"~ memory: aliased 262,148 bytes before, 0 bytes now",
    "an optimizer with more state": (
        r"\+ input 1.opt_state\S*mu.w_DF: float32 \(256, 1024\) P\('data'\)"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(tmp_path, fault):
    right, wrong = FAULTS[fault]
    assert SOURCE.count(right) == 1
    copy = tmp_path / FILE.name
    copy.write_text(SOURCE.replace(right, wrong))
    shutil.copytree(SNAPSHOTS, tmp_path / SNAPSHOTS.name)
    failed, said = run(copy, 8)
    assert set(failed) >= NOTICED[fault] | {"test_snapshot"}, said
    assert re.search(rf"^E +{SHOWN[fault]}$", said, re.M), said
    if fault == "a weight loses its sharding":
        message = re.search(r"AssertionError: .*", ast.get_docstring(ast.parse(SOURCE)))[0]
        assert re.search(rf"^E +{re.escape(message)}$", said, re.M), said
        page = (lives.ROOT / "book" / "reference" / "how-it-is-tested.md").read_text("utf-8")
        lines = page.split("Here a weight has lost its annotation:\n\n```text\n")[1].split("\n```")[
            0
        ]
        difference = said.split("step.txt does not describe this program")[1]
        assert re.findall(r"^E +([-+~] .*)$", difference, re.M) == lines.splitlines()


MODEL = re.search(r"^class Model.*?(?=^def make)", SOURCE, re.M | re.S)[0]
LAYERS = """\
class Model(nnx.Module):
    def __init__(self, rngs):
        meta = dict(kernel_metadata={"out_sharding": ("data", None)})
        self.up = nnx.Linear(D, F, use_bias=False, rngs=rngs, **meta)
        self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs, **meta)

    def __call__(self, x_BD):
        h_BF = jax.lax.with_sharding_constraint(jax.nn.relu(self.up(x_BD)), P("data"))
        return jax.lax.with_sharding_constraint(self.down(h_BF), P("data"))


"""
BLOCKS = """\
class Block(nnx.Module):
    def __init__(self, rngs):
        meta = dict(kernel_metadata={"out_sharding": ("data", None)})
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs, **meta)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs, **meta)

    def __call__(self, x_BD):
        return x_BD + self.down(self.drop(jax.nn.relu(self.up(self.norm(x_BD)))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x_BD):
        for block in self.blocks:
            x_BD = jax.lax.with_sharding_constraint(block(x_BD), P("data"))
        return x_BD


"""


def with_model(tmp_path, model):
    copy = tmp_path / FILE.name
    copy.write_text(SOURCE.replace(MODEL, model))
    return copy


def test_a_model_of_layers_passes_with_the_same_numbers(tmp_path):
    failed, said = run(with_model(tmp_path, LAYERS), 8, "--update-sharding")
    assert not failed and "4 passed" in said, said


def test_a_model_of_blocks_in_a_list_keeps_its_shardings(tmp_path):
    """Biases, scales and the state of dropout too; only the numbers are another model's."""
    failed, said = run(with_model(tmp_path, BLOCKS), 8)
    assert "test_shardings" not in failed, said


def test_a_layer_that_loses_its_sharding_is_named_by_its_path(tmp_path):
    wrong = BLOCKS.replace("nnx.Linear(F, D, rngs=rngs, **meta)", "nnx.Linear(F, D, rngs=rngs)")
    assert wrong != BLOCKS
    failed, said = run(with_model(tmp_path, wrong), 8)
    assert "test_shardings" in failed, said
    assert "blocks.0.down.kernel is stored as P(), not as P('data', None)" in said


def test_it_is_short_and_stands_alone():
    """Readers copy it: nothing of this repository but meshscope, and little to read."""
    tree = ast.parse(SOURCE)
    imported = {
        name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported == {"os", "jax", "meshscope", "optax", "pytest", "flax"}
    tests = [node for node in tree.body if getattr(node, "name", "").startswith("test_")]
    assert len(tests) == 4 and sum(node.end_lineno - node.lineno + 1 for node in tests) <= 22
