"""Snapshots of sharding: what they hold, what makes them fail, and the line and cause that are named."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
import upgraded
from flax import nnx
from jax.sharding import AxisType

from meshscope import testing

P = jax.P
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
B, D, F = 16, 64, 192


def compiled(f, *args, **options):
    return jax.jit(f, **options).lower(*args).compile()


def shape(spec, *dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(MESH, spec))


def rows(text, what):
    return [row for row in testing._read(text) if row.what == what]


# What a snapshot holds


def test_a_line_for_each_input_output_collective_and_sum_of_memory():
    text = testing.snapshot(compiled(lambda x: x.sum(0), shape(P("data"), 8, 16)))
    assert [row[:4] for row in testing._read(text)][:4] == [
        ("program", "on", "cpu, data=2, model=4", "-"),
        ("input", "0", "float32 (8, 16) P('data')", "1"),
        ("output", "result", "float32 (16) P()", "1"),
        ("collective", "all-reduce", "over data, float32 (16)", "64 bytes"),
    ]
    assert [row.name for row in rows(text, "memory")] == [
        "arguments", "outputs", "aliased", "temporaries"]  # fmt: skip
    assert re.fullmatch(r"test_testing.py:\d+", rows(text, "collective")[0].source)
    assert text.splitlines()[0].endswith(f", jax {jax.__version__}")


def test_arguments_by_name_and_those_that_are_not_used():
    def f(x, unused, *, scale):
        return x * scale

    args = shape(P("data"), 8, 16), shape(P(), 4)
    program = jax.jit(f).lower(*args, scale=shape(P(), 16)).compile()
    found = {row.name: row.how for row in rows(testing.snapshot(program), "input")}
    assert found == {
        "0": "float32 (8, 16) P('data')",
        "1": "float32 (4) unused",
        "scale": "float32 (16) P()",
    }


def test_a_leaf_that_is_not_there_is_not_one_that_is_not_used():
    tree = {"kernel": shape(P("data"), 8, 16), "bias": None, "spare": shape(P(), 4)}
    program = compiled(lambda tree: tree["kernel"] + 1, tree)
    assert [row[1:3] for row in rows(testing.snapshot(program), "input")] == [
        ("0.kernel", "float32 (8, 16) P('data')"),
        ("0.spare", "float32 (4) unused"),
    ]


def test_layers_of_a_list_share_a_line():
    tree = {"blocks": [{"w": shape(P("data"), 8, 16)} for _ in range(12)], "head": shape(P(), 3)}
    program = compiled(lambda tree: jax.tree.map(jnp.sin, tree), tree)
    found = [row[1:4] for row in rows(testing.snapshot(program), "input")]
    assert found == [
        ("0.blocks.*.w", "float32 (8, 16) P('data')", "12"),
        ("0.head", "float32 (3) P()", "1"),
    ]
    tree["blocks"][3]["w"] = shape(P(), 8, 16)
    program = compiled(lambda tree: jax.tree.map(jnp.sin, tree), tree)
    found = [row[1:4] for row in rows(testing.snapshot(program), "input")]
    assert ("0.blocks.*.w", "float32 (8, 16) P()", "1") in found


def test_a_spec_has_one_spelling():
    for spec in (P("data"), P("data", None), P(("data",)), P(("data",), None)):
        program = compiled(lambda x: x + 1, shape(spec, 8, 16))
        assert rows(testing.snapshot(program), "input")[0].how == "float32 (8, 16) P('data')"
    one = jax.make_mesh((8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(one, P(("data", "model")))
    program = compiled(lambda x: x + 1, jax.ShapeDtypeStruct((8, 16), "float32", sharding=sharding))
    assert rows(testing.snapshot(program), "input")[0].how == "float32 (8, 16) P('data')"
    program = compiled(lambda x: x + 1, shape(P(None, ("data", "model")), 8, 16))
    assert rows(testing.snapshot(program), "input")[0].how.endswith("P(None, ('data', 'model'))")


def test_a_whole_leaf_has_a_line_where_a_tree_is_given():
    w = shape(P("data"), 48, 80)
    gather = compiled(lambda w: w * 2, w, out_shardings=jax.NamedSharding(MESH, P()))
    assert not rows(testing.snapshot(gather), "whole")
    assert [row[1:3] for row in rows(testing.snapshot(gather, tree={"w": w}), "whole")] == [
        ("w", "float32")
    ]


def test_no_collective_and_no_mesh():
    text = testing.snapshot(compiled(jnp.sin, jnp.ones(4)))
    assert rows(text, "program")[0].how == "cpu, no mesh" and not rows(text, "collective")


def test_it_says_what_to_pass():
    with pytest.raises(TypeError, match="call .lower"):
        testing.snapshot(jax.jit(jnp.sin))
    with pytest.raises(TypeError, match="is the text of a program, not a compiled program"):
        testing.snapshot(compiled(jnp.sin, jnp.ones(4)).as_text())


# What is compared


def test_lines_of_source_may_move_and_scratch_memory_may_vary():
    old = (
        "# written with jax 1\n"
        "collective  all-reduce   over data, float32 (16)  64 bytes   model.py:10\n"
        "memory      arguments    -                        640 bytes  -\n"
        "memory      temporaries  -                        1,000 bytes  -\n"
    )
    assert testing.differences(old, old.replace("model.py:10", "model.py:11")) == []
    assert testing.differences(old, old.replace("1,000", "1,100")) == []
    assert testing.differences(old, old.replace("1,000", "900")) == []
    for other in ("1,101", "899"):
        told = [f"~ memory: temporaries 1,000 bytes before, {other} bytes now"]
        assert testing.differences(old, old.replace("1,000", other)) == told
    assert testing.differences(old, old.replace("640", "641")) == [
        "~ memory: arguments 640 bytes before, 641 bytes now"
    ]
    assert testing.differences(old, old.replace("1,000", "1,001"), tolerance=0)
    assert testing.differences(old, old.replace("1,000", "1,500"), tolerance=0.5) == []


def test_the_number_of_equal_collectives_counts():
    line = "collective  all-reduce  over data, float32 (16)  64 bytes  model.py:10\n"
    assert testing.differences(2 * line, 2 * line) == []
    told = "all-reduce over data, float32 (16), 64 bytes, from model.py:10"
    assert testing.differences(line, 3 * line) == [f"+ {told}"] * 2
    assert testing.differences(2 * line, line) == [f"- {told}"]


def test_causes_come_before_effects():
    old = (
        "program     on  cpu, data=8  -  -\n"
        "input       w   float32 (8) P('data')  1  -\n"
        "collective  all-gather  over data, float32 (8)  32 bytes  a.py:1\n"
        "memory      arguments   -  4 bytes  -\n"
    )
    new = (
        "memory      arguments   -  32 bytes  -\n"
        "whole       w  float32  -  a.py:2\n"
        "collective  all-reduce  over data, float32 (8)  32 bytes, 4 times in a loop  a.py:3\n"
        "input       w   float32 (8) P()  1  -\n"
        "program     on  gpu, data=8  -  -\n"
    )
    assert testing.differences(old, new) == [
        "- program on: cpu, data=8",
        "+ program on: gpu, data=8",
        "- input w: float32 (8) P('data')",
        "+ input w: float32 (8) P()",
        "- all-gather over data, float32 (8), 32 bytes, from a.py:1",
        "+ all-reduce over data, float32 (8), 32 bytes, 4 times in a loop, from a.py:3",
        "+ w is whole on a device, as float32, from a.py:2",
        "~ memory: arguments 4 bytes before, 32 bytes now",
    ]


def test_a_file_that_is_not_a_snapshot_is_an_error():
    with pytest.raises(ValueError, match=r"not a line of a snapshot: '<<<<<<< HEAD'"):
        testing.differences("<<<<<<< HEAD\n", "")


# Regressions in a model: which line says what


class Model(nnx.Module):
    """FSDP over data; the fields say what is wrong with it."""

    def __init__(self, rngs, fault=""):
        init = nnx.initializers.lecun_normal()
        down = {"annotation dropped": None, "axis swapped": ("model", None)}
        self.up = nnx.Param(init(rngs.params(), (D, F)), out_sharding=("data", None))
        self.down = nnx.Param(
            init(rngs.params(), (F, D)), out_sharding=down.get(fault, ("data", None))
        )
        self.fault = fault

    def __call__(self, x_BD):
        h_BF = jax.nn.relu(x_BD @ self.up)  # here
        spec = P() if self.fault == "activation replicated" else P("data")
        h_BF = jax.lax.with_sharding_constraint(h_BF, spec)
        return jax.lax.with_sharding_constraint(h_BF @ self.down, P("data"))


HERE = next(n for n, line in enumerate(open(__file__, encoding="utf-8"), 1) if "# here" in line)


def step(fault=""):
    """The text of a snapshot of a training step."""

    def make():
        model = Model(nnx.Rngs(0), fault)
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train(model, optimizer, x_BD):
        optimizer.update(model, nnx.grad(lambda model: (model(x_BD) ** 2).mean())(model))
        return model, optimizer

    with jax.set_mesh(MESH):
        model, optimizer = nnx.merge(*nnx.get_abstract_model(make, MESH))
        program = compiled(train, model, optimizer, shape(P("data"), B, D), donate_argnums=(0, 1))
        return testing.snapshot(program, MESH, tree=model)


@pytest.fixture(scope="module")
def right():
    return step()


def test_a_dropped_annotation_is_named_with_its_leaf(right):
    told = testing.differences(right, step("annotation dropped"))
    assert told[0] == "- input 0.down: float32 (192, 64) P('data')"
    assert "+ input 0.down: float32 (192, 64) P()" in told
    memory = [line for line in told if line.startswith("~ memory: arguments")]
    assert memory and len(told) > 3


def test_a_swapped_axis_is_named_with_its_leaf_and_the_collectives_that_follow(right):
    told = testing.differences(right, step("axis swapped"))
    assert told[0] == "- input 0.down: float32 (192, 64) P('data')"
    assert "+ input 0.down: float32 (192, 64) P('model')" in told
    assert any(
        re.match(r"\+ all-\w+ over .* bytes, from test_testing.py:\d+", line) for line in told
    )


def test_a_replicated_activation_is_named_with_its_line(right):
    told = testing.differences(right, step("activation replicated"))
    assert not any("input" in line or "output" in line for line in told)
    gathers = [
        line for line in told if line.startswith("+ all-gather over data, float32 (16, 192)")
    ]
    assert gathers and any(line.endswith(f"from test_testing.py:{HERE}") for line in gathers), told


def test_the_same_model_has_no_difference(right):
    assert testing.differences(right, step()) == []


# An upgrade of JAX


PAGE = pathlib.Path(__file__).parents[2] / "book" / "reference" / "how-it-is-tested.md"


def test_what_an_upgrade_changed_is_what_the_page_says():
    """The snapshot that JAX 0.10.2 made, against the program of the JAX that is here."""
    kept = pathlib.Path(__file__).parent / "fixtures" / "upgraded-jax-0.10.2.txt"
    told = testing.differences(kept.read_text("utf-8"), testing.snapshot(upgraded.program()))
    if jax.__version__ == "0.10.2":
        assert told == []
    else:
        section = PAGE.read_text("utf-8").split("### When you upgrade JAX\n")[1]
        assert "\n".join(told) == section.split("```text\n")[1].split("\n```")[0]


# Files


@pytest.fixture
def program():
    return compiled(lambda x: x.sum(0), shape(P("data"), 8, 16))


def test_without_a_file_it_says_how_to_make_one(program, tmp_path):
    with pytest.raises(AssertionError, match="there is no snapshot .*run pytest --update-sharding"):
        testing.assert_snapshot(program, tmp_path / "step.txt")


def test_a_file_is_written_once_and_nothing_is_left_beside_it(program, tmp_path):
    file = tmp_path / "more" / "step.txt"
    assert testing.assert_snapshot(program, file, update=True)
    assert not testing.assert_snapshot(program, file, update=True)
    assert not testing.assert_snapshot(program, file)
    assert [path.name for path in file.parent.iterdir()] == ["step.txt"]
    assert file.read_text("utf-8") == testing.snapshot(program)


def test_a_write_that_fails_leaves_the_old_file(program, tmp_path, monkeypatch):
    file = tmp_path / "step.txt"
    file.write_text("old")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        testing.assert_snapshot(program, file, update=True)
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["step.txt"]


def test_a_difference_names_both_releases_of_jax(program, tmp_path):
    file = tmp_path / "step.txt"
    testing.assert_snapshot(program, file, update=True)
    text = file.read_text("utf-8")
    file.write_text(
        text.replace(f"jax {jax.__version__}", "jax 0.1.2").replace("64 bytes", "65 bytes")
    )
    with pytest.raises(AssertionError) as caught:
        testing.assert_snapshot(program, file)
    told = str(caught.value)
    assert f"It was written with jax 0.1.2, and this is {jax.__version__}." in told
    assert "--update-sharding" in told and "~ memory: outputs 65 bytes before, 64 bytes now" in told
    file.write_text(text.replace("64 bytes", "65 bytes"))
    with pytest.raises(AssertionError) as caught:
        testing.assert_snapshot(program, file)
    assert "written with" not in str(caught.value)


# With pytest

TEST = """
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import pytest

mesh = jax.make_mesh((8,), ("data",))
spec = jax.P("data")


@pytest.mark.parametrize("axis", [0, 1])
def test_sums(sharding_snapshot, axis):
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(mesh, spec))
    assert jax.device_count() == 8, "the plugin did not start JAX"
    sharding_snapshot(jax.jit(lambda x: x.sum(axis)).lower(x).compile(){name})
"""


def run(folder, *options, name="", replace=("", "")):
    source = TEST.replace("{name}", name).replace(*replace)
    (folder / "test_it.py").write_text(source, "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(folder), "-p", "pytest_meshscope", *options, str(folder)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_test_writes_its_snapshots_and_then_keeps_to_them(tmp_path):
    code, said = run(tmp_path)
    assert code == 1 and said.count("there is no snapshot") >= 2
    code, said = run(tmp_path, "--update-sharding")
    folder = tmp_path / "sharding_snapshots"
    assert code == 0 and said.count("sharding snapshot written: ") == 2, said
    assert sorted(path.name for path in folder.iterdir()) == ["sums-0.txt", "sums-1.txt"]
    code, said = run(tmp_path)
    assert code == 0 and "written" not in said
    changed = 'spec = jax.P("data")', 'spec = jax.P(None, "data")'
    code, said = run(tmp_path, replace=changed)
    assert code == 1, said
    assert re.search("^E +AssertionError: sums-0.txt does not describe this program", said, re.M)
    assert re.search(r"- all-reduce over data, float32 \(16\), 64 bytes, from test_it.py:\d+", said)


def test_two_tests_do_not_share_a_file(tmp_path):
    code, said = run(tmp_path, "--update-sharding", name=', "sums"')
    assert code == 1 and "has a snapshot 'sums' already: give this one another name" in said
    code, said = run(tmp_path, name=', "../sums"')
    assert code == 1 and "cannot be the name of a file" in said


def test_the_plugin_imports_no_jax():
    """pytest imports it before a test file can say how many devices to simulate."""
    code = "import sys, pytest_meshscope; assert not {'jax', 'meshscope'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
