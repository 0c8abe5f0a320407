"""The parts of a plan: candidates, published numbers, operations, results on disk, the picture."""

import json
import sys
import types
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import meshscope as ms
from meshscope import _plan_compilers as compilers
from meshscope._collectives import Collective
from meshscope._messages import MESSAGES, filled
from meshscope._plan_candidates import axes_of, candidates, meshes
from meshscope._plan_flops import traced_flops
from meshscope._plan_measure import told
from meshscope._plan_outcome import digits, outcome_of
from meshscope._plan_picture import picture
from meshscope._plan_results import Results

P = jax.P
AUTO = jax.sharding.AxisType.Auto

# Candidates


def test_meshes_are_all_ordered_factorizations():
    found = [tuple(mesh.values()) for mesh in meshes(8, ("data", "model"))]
    assert found == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert len(list(meshes(64, ("a", "b", "c")))) == 28
    assert list(meshes(3, ())) == [] and list(meshes(1, ())) == [{}]


def tried(tables, devices=8, axes=("data", "model")):
    return [(one.table, one.rules, one.where) for one in candidates(tables, devices, axes)]


def test_a_mesh_whose_axis_the_table_does_not_name_would_repeat_work():
    assert tried({"DP": {"batch": "data"}}) == [("DP", {"batch": "data"}, "data 8")]


def test_rules_of_axes_of_size_one_are_gone_and_what_is_then_the_same_is_tried_once():
    both = {"batch": "data", "embed": "data", "hidden": "model"}
    fsdp = {"batch": "data", "embed": "data"}
    assert tried({"both": both}) == [
        ("both", fsdp, "data 8"),
        ("both", both, "data 4 × model 2"),
        ("both", both, "data 2 × model 4"),
        ("both", {"hidden": "model"}, "model 8"),
    ]
    found = tried({"FSDP": fsdp, "both": both})
    assert [(table, where) for table, _, where in found].count(("FSDP", "data 8")) == 1
    assert ("both", fsdp, "data 8") not in found


def test_names_of_axes_do_not_make_another_candidate():
    hsdp = {"batch": ("data", "model"), "embed": "model"}
    others = {"DP": {"batch": "data"}, "FSDP": {"batch": "data", "embed": "data"}}
    found = tried({**others, "HSDP": hsdp})
    assert [where for table, _, where in found if table == "HSDP"] == [
        "data 4 × model 2",
        "data 2 × model 4",
    ], "over all devices it is FSDP, and with a single shard it is data parallelism"


def test_a_rule_of_two_axes_keeps_the_one_that_is_left():
    found = tried({"x": {"batch": ("data", "model"), "embed": "model"}})
    assert found[0] == ("x", {"batch": "data"}, "data 8")
    assert found[-1] == ("x", {"batch": "model", "embed": "model"}, "model 8")


def test_axes_come_in_the_order_in_which_tables_name_them():
    assert axes_of({"a": {"batch": "x", "embed": None}, "b": {"batch": ("y", "x")}}) == ("x", "y")


# Published numbers


def test_every_chip_says_where_its_numbers_are_from():
    for name, chip in ms.CHIPS.items():
        assert len(chip.sources) >= 2 and all(url.startswith("https://") for url in chip.sources)
        assert 1e12 < chip.flops < 1e16 and 1e9 < chip.hbm < 1e12, name
        assert (chip.node is None) == (chip.outside is None) == chip.name.startswith("TPU")


@pytest.mark.parametrize(
    ("sizes", "axes", "gigabytes"),
    [
        ({"data": 8, "model": 8}, ("model",), 450),  # inside a node
        ({"data": 8, "model": 8}, ("data",), 50),  # one device in each node: one network card
        ({"data": 16, "model": 4}, ("data",), 100),  # two in each node
        ({"data": 64}, ("data",), 400),  # all eight network cards of each node
        ({"data": 4}, ("data",), 450),
        ({"a": 2, "b": 2, "c": 16}, ("a", "c"), 400),  # groups of 32 in four nodes
    ],
)
def test_between_nodes_a_group_has_the_network_cards_of_its_devices(sizes, axes, gigabytes):
    assert ms.CHIPS["h100"].bandwidth(sizes, axes) == gigabytes * 1e9
    assert ms.CHIPS["v5e"].bandwidth(sizes, axes) == 90e9


@pytest.mark.parametrize(
    "kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
)
def test_a_closed_form_counts_wire_bytes_as_a_collective_does(kind):
    groups = ((0, 1, 2, 3),)
    row = Collective(kind, ("x",), "int8", (64,), 64, 1, False, "", None, ("x",), groups)
    record = {"table": "", "rules": {}, "mesh": {"x": 4}, "expected": [[kind, ["x"], 64]]}
    assert outcome_of(record).expected == {(kind, ("x",)): row.wire_bytes}


# Operations


def flops(f, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return traced_flops(jax.jit(f).trace(*arrays).jaxpr)


def test_operations_of_products_are_counted_wherever_they_stand():
    one = 2 * 4 * 8 * 16
    a, b, stack = (4, 8), (8, 16), (5, 8, 8)
    assert flops(jnp.matmul, a, b) == one
    assert flops(lambda a, b: jax.jit(jnp.matmul)(a, b) + jax.checkpoint(jnp.matmul)(a, b), a, b) == 2 * one  # fmt: skip
    scanned = flops(lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w), a, stack)
    assert scanned == 5 * 2 * 4 * 8 * 8
    branches = flops(lambda a, b: jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: a @ b * 2 + a @ b), a, b)  # fmt: skip
    assert branches == 2 * one, "of the dearest branch"
    assert flops(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), (2, 3, 8, 8), (5, 3, 3, 3)) == (
        2 * 2 * 5 * 64 * 27
    )


def test_inside_shard_map_the_operations_of_all_devices_count():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO,) * 2)
    with jax.set_mesh(mesh):
        by_row = jax.shard_map(jnp.matmul, in_specs=(P("data"), P()), out_specs=P("data"))
        assert flops(by_row, (8, 16), (16, 32)) == 2 * 2 * 8 * 16 * 32, "model repeats the work"


# Results


def test_a_line_that_was_cut_off_is_not_read_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "results.jsonl"
    Results(path).add({"digest": "a", "n": 1})
    with path.open("ab") as file:
        file.write(b'{"digest": "b", "n"')
    results = Results(path)
    assert results.records == {"a": {"digest": "a", "n": 1}}
    results.add({"digest": "c", "n": 3})
    assert [*Results(path).records] == ["a", "c"]
    assert json.loads(path.read_text().splitlines()[-1]) == {"digest": "c", "n": 3}


def test_a_file_of_something_else_is_not_written_into(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1, 2]}\n')
    with pytest.raises(ValueError, match="data.jsonl, line 1, is not a result of meshscope plan"):
        Results(path)


def test_what_was_being_compiled_is_known_once(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    with results.running({"digest": "a"}):
        assert Results(results.path).interrupted() == {"digest": "a"}
        assert Results(results.path).interrupted() is None
    with results.running({"digest": "b"}):
        pass
    assert results.interrupted() is None and [*tmp_path.iterdir()] == []


# Compilers and errors


@pytest.mark.parametrize(
    ("chip", "count", "shape"),
    [
        *[("v5e", 1, "1x1"), ("v5e", 4, "2x2"), ("v5e", 8, "2x4"), ("v5e", 128, "8x16")],
        *[("v5p", 4, "2x2x1"), ("v5p", 8, "2x2x2"), ("v5p", 64, "4x4x4"), ("v5p", 128, "4x4x8")],
    ],
)
def test_the_shape_of_a_slice(chip, count, shape):
    assert compilers.topology(chip, count) == shape


def test_a_slice_has_a_power_of_two_of_chips():
    with pytest.raises(RuntimeError, match="not 12: give another --devices"):
        compilers.topology("v5e", 12)


@pytest.mark.parametrize(
    ("compiler", "package"), [("tpu", r"jax\[tpu\]"), ("gpu", r"jax\[cuda13\]")]
)
def test_a_compiler_that_is_not_installed_is_named(compiler, package, monkeypatch):
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=f'pip install "{package}" brings it'):
        compilers.devices_for(compiler, "v5e", 8)


def test_an_error_is_one_line_with_the_line_of_the_callers_code():
    def fails():
        raise ValueError("first\nsecond")

    try:
        fails()
    except ValueError as error:
        assert told(error).startswith("ValueError: first (test_plan_parts.py:")
        assert "\n" not in told(error)
    text = told(ValueError("a" * 400 + "end"))
    assert len(text) < 230 and text.endswith("aend") and " … " in text


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.00123456, "0.00123"), (12.34, "12.3"), (1234.6, "1,235")]
)
def test_numbers_have_three_digits(value, shown):
    assert digits(value) == shown


# The picture


def marks(count):
    return [(n, f"table {n % 6}", f"data {n}", n * 10**9, 0.1 * n) for n in range(1, count + 1)]


def test_the_picture_has_a_mark_for_each_candidate_and_says_what_it_shows():
    drawing = picture(marks(12), 5e9, "H100", "as text")
    root = ET.fromstring(drawing.svg)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {str(n) for n in range(1, 13)} <= set(texts) and "5.00 GB of H100" in texts
    values = json.loads(root.get("data-values"))
    assert filled(root.get("data-message"), values) == root.get("aria-label")
    assert root.get("data-message") in MESSAGES
    assert root.get("aria-label").startswith("Memory and time of 12 candidates: 1 table 1, data 1: 1.00 GB, 100 ms")  # fmt: skip
    assert repr(drawing) == "as text"


def test_what_takes_more_memory_stands_further_right_and_what_is_slower_higher():
    def place(mark):
        svg = picture([mark, (2, "b", "", 10**9, 0.1), (3, "c", "", 10**12, 10.0)], 1e10, "H100", "").svg  # fmt: skip
        at = [
            node.get("d") for node in ET.fromstring(svg) if node.get("fill", "").startswith("var")
        ]
        x, y = at[0].removeprefix("M").split("a")[0].split()
        return float(x), float(y)

    small, large = place((1, "a", "", 2 * 10**9, 1.0)), place((1, "a", "", 5 * 10**10, 1.0))
    fast, slow = place((1, "a", "", 10**10, 0.2)), place((1, "a", "", 10**10, 5.0))
    assert small[0] < large[0] and small[1] == large[1]
    assert fast[1] > slow[1] and fast[0] == slow[0], "y grows downwards"


def test_a_picture_of_nothing_and_one_of_very_many_can_be_drawn():
    assert "no candidate" in picture([], 80e9, "H100", "").svg
    ET.fromstring(picture(marks(200), 80e9, "H100", "").svg)


@pytest.mark.parametrize("said, raised", [("ALREADY_EXISTS: PJRT_Api", False), ("broken", True)])
def test_a_plugin_that_jax_has_found_already_is_used(monkeypatch, said, raised):
    def initialize():
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setitem(sys.modules, "a_plugin", types.SimpleNamespace(initialize=initialize))
    monkeypatch.setattr(compilers, "_registered", set())
    if raised:
        with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
            compilers._register("a_plugin")
    else:
        compilers._register("a_plugin")
        assert compilers._registered == {"a_plugin"}
