"""examples/explicit_types.py names the types on a mesh that is not there, and the line that JAX refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "explicit_types.py"
SOURCE = FILE.read_text("utf-8")


def run(path, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, path, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("mesh, devices", [((64, 16), "1,024"), ((2, 4), "8")])
def test_it_types_a_large_model_for_any_mesh(mesh, devices):
    done = run(FILE, "--mesh", *mesh)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "blocks.up.kernel         float32[32,4096@data,16384@model]" in done.stdout
    assert done.stdout.endswith(f"have types on {devices} devices\n")


FAULTS = {
    "a product left open": (
        'self.down(h_BF, out_sharding=P("data", None))', "self.down(h_BF)",
        "Contracting dimensions are sharded"),
    "a lookup left open": (
        'self.embed(tokens_B, out_sharding=P("data", None))', "self.embed(tokens_B)",
        "out_sharding"),
    "an axis twice": (
        'P("model", "data"))', 'P("model", "model"))', "at most one positional dimension"),
    "a constraint that disagrees": (
        "h_BF = jax.nn.silu(",
        'h_BF = (lambda y: jax.lax.with_sharding_constraint(y, P("data")))(',
        "acts as an assert"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refusal_names_the_line_and_exits_non_zero(tmp_path, fault):
    right, wrong, says = FAULTS[fault]
    assert SOURCE.count(right) == 1
    copy = tmp_path / FILE.name
    copy.write_text(SOURCE.replace(right, wrong))
    done = run(copy)
    assert done.returncode == 1 and not done.stdout
    line = 1 + SOURCE[: SOURCE.index(right)].count("\n")
    assert says in done.stderr and "on 64 x 16 devices" in done.stderr, done.stderr
    if fault != "an axis twice":  # that spec is named where it is used
        assert f"line {line}," in done.stderr, done.stderr


def test_sizes_that_do_not_divide_are_refused():
    done = run(FILE, "--mesh", 3, 4)
    assert done.returncode == 1 and "does not evenly divide the dimension size 4096" in done.stderr
