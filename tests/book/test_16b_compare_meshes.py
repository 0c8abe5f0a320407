"""The page "Compare meshes before you have the chips": bytes, overlap, and the order of axes."""

import json
import math
import tomllib
from typing import NamedTuple

import jax
import pytest
from jax._src import mesh_utils as mesh_utils_of_jax
from jax.experimental import mesh_utils

import meshscope as ms
from many_devices import llama_step
from many_devices.compiled import stored_program
from meshscope._plan_outcome import outcome_of
from pages import BOOK, check_exercise, exercises_of
from stored_steps import GB, GIB, MESHES, made, needs, payload, sent

PAGE = "16b-compare-meshes"
AUTO = (jax.sharding.AxisType.Auto,) * 2


# The ranking of a plan


def stored_plans():
    """The results of `meshscope plan` on 64 devices: {(compiler, table, replicas): outcome}."""
    lines = (BOOK / "compiled" / "plans.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {
        (record["compiler"], record["table"], record["mesh"]["data"]): outcome_of(record)
        for record in records
    }


def test_the_table_of_the_plan_is_that_of_the_stored_results():
    """Memory of three compilers, and bytes by the formula, on H100 and on v5p, per device."""
    plans, rows = stored_plans(), {"FSDP, 64": ("FSDP", 64)}
    rows |= {f"HSDP, {n} × {64 // n}": ("HSDP", n) for n in (2, 4)}
    text = (BOOK / "deeper" / f"{PAGE}.md").read_text("utf-8")
    for name, (table, replicas) in rows.items():
        cpu, gpu, tpu = (plans[one, table, replicas] for one in ("cpu", "gpu", "tpu"))
        memory = [one.bytes_per_device for one in (cpu, gpu, tpu)]
        sent = [sum(one.values()) for one in (cpu.expected, gpu.counted, tpu.counted)]
        cells = " | ".join(f"{size / 1e9:.1f}" for size in memory + sent)
        assert f"| {name} | {cells} |" in text
        apart = [size / memory[0] for size in memory] + [size / sent[0] for size in sent]
        exception = 1 if table == "FSDP" else 0
        assert sum(abs(ratio - 1) > 0.1 for ratio in apart) == exception


def test_fsdp_over_64_chips_of_v5p_is_made_of_all_reduces():
    """No gather and no scatter is left, and 1.8 times as many bytes are sent."""
    fsdp = stored_plans()["tpu", "FSDP", 64]
    assert not {"all-gather", "reduce-scatter"} & {kind for kind, _ in fsdp.counted}
    assert 1.8 < sum(fsdp.counted.values()) / sum(fsdp.expected.values()) < 1.9


def test_these_three_are_the_first_of_the_ranking():
    """By time at the peaks of H100, to three digits, and then by memory."""
    chip, plans = ms.CHIPS["h100"], stored_plans()
    fits = [one for (by, *_), one in plans.items() if by == "cpu" and one.fits(chip.hbm)]
    made = ms.Plan((), chip, chip.hbm, "cpu", 64)
    fits.sort(key=lambda one: (float(f"{made.step_seconds(one):.3g}"), one.bytes_per_device))
    first = [(one.table, one.mesh["data"]) for one in fits[:3]]
    assert first == [("FSDP", 64), ("HSDP", 2), ("HSDP", 4)]


# What is sent


def asked_of_fsdp(model=1):
    """Payload of gathers and scatters, with the weights' last or first dimension over `model`."""
    named = llama_step.weights_of(llama_step.Config())
    sizes = {
        name: 2 * math.prod(dims) // (model if "model" in spec else 1)
        for name, (dims, spec) in named.items()
        if "data" in spec
    }
    layers = sum(size for name, size in sizes.items() if "_L" in name)
    return {"gathers": sum(sizes.values()) + layers, "scatters": sum(sizes.values())}


def test_fsdp_with_tensor_parallelism_on_h100_is_predicted(page):
    """On 8 × 8 H100s, to the byte: an eighth of gathers and scatters, and five sums in each layer."""
    name = "ahead-h100-64-inside"
    assert stored_program(name)["mesh"] == dict(replica=1, data=8, model=8)
    wanted = asked_of_fsdp(model=8)
    assert payload(name, "all-gather", "data") == wanted["gathers"]
    assert payload(name, "reduce-scatter", "data") == wanted["scatters"]
    found = payload(name, "all-reduce", "model")
    assert found == page.predicted_sums(page.llama_8b, sequences=8)
    assert found == sum(row["payload"] for row in page.sums)
    kinds = {row["kind"] for row in made(name)["moves"] if row["dtype"] == "bfloat16"}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}


# Which bytes can hide


def test_the_table_of_strategies(page):
    """GB needed, sent, and sent with no matmul beside them, as the text has them."""
    rows = {}
    for name in ROWS:
        sizes = needs(name), *page.sent_and_exposed(stored_program(name))
        rows[name] = tuple(f"{size / GB:.1f}" for size in sizes)
    assert rows == ROWS
    assert list(page.meshes.values()) == [name for name in ROWS if "v5e" in name]


ROWS = {
    "ahead-v5e-256": ("6.7", "63.0", "36.2"),
    "ahead-v5e-256-hsdp": ("13.6", "46.1", "20.4"),
    "ahead-v5e-256-hsdp4": ("8.1", "47.8", "20.9"),
    "ahead-v5e-256-tensor": ("9.4", "46.6", "39.9"),
    "ahead-v5p-2048": ("6.2", "92.1", "92.1"),
    "ahead-v5p-2048-hsdp": ("5.9", "59.3", "59.3"),
}


def test_on_256_chips_all_four_meshes_fit():
    """Each needs less than a v5e chip has."""
    assert max(needs(name) for name in ROWS if "v5e" in name) < 15.75 * GIB


def test_hsdp_sends_about_what_was_written_and_exposes_the_least(page):
    """With four replicas 48 GB for 46, and both kinds of HSDP expose less than the other meshes."""
    exposed = {name: float(row[2]) for name, row in ROWS.items() if "v5e" in name}
    assert sorted(exposed, key=exposed.get)[:2] == ["ahead-v5e-256-hsdp", "ahead-v5e-256-hsdp4"]
    wanted = asked_of_fsdp()
    for name in ("ahead-v5e-256-hsdp", "ahead-v5e-256-hsdp4"):
        assert sent(name) == pytest.approx(wanted["gathers"] + wanted["scatters"], rel=0.05)


def test_tensor_parallelism_sends_32_gb_of_sums_with_no_matmul_beside_them():
    """32 of its 47 GB are along model."""
    entry = made("ahead-v5e-256-tensor")
    sums = sum(row["wire"] for row in entry["moves"] if row["axes"] == ["model"])
    assert f"{sums / GB:.0f} {sent('ahead-v5e-256-tensor') / GB:.0f}" == "32 47"
    assert not any(beside for _, axes, beside, _ in entry["beside"] if axes == ["model"])


def test_plain_fsdp_on_256_chips_turns_scatters_and_some_gathers_into_all_reduces():
    """46 GB were asked for and 63 are sent."""
    wanted = asked_of_fsdp()
    name = "ahead-v5e-256"
    rows = [row for row in made(name)["moves"] if row["dtype"] == "bfloat16"]
    assert {(row["kind"], *row["axes"]) for row in rows} == {
        ("all-gather", "data"),
        ("all-reduce", "data"),
    }
    assert payload(name, "all-reduce", "data") > wanted["scatters"]
    assert payload(name, "all-gather", "data") < wanted["gathers"]
    asked = (wanted["gathers"] + wanted["scatters"]) * 255 / 256
    assert f"{asked / GB:.0f} {sent(name) / GB:.0f}" == "46 63"


def test_hsdp_with_four_replicas_needs_less_memory_than_with_sixteen():
    assert needs("ahead-v5e-256-hsdp4") < needs("ahead-v5e-256-hsdp")
    assert sent("ahead-v5p-2048-hsdp") / sent("ahead-v5p-2048") == pytest.approx(2 / 3, abs=0.03)


def test_switches_for_v5e_raise_an_error_for_v5p():
    """They start gathers early, and the error warns of incorrect results on other chips."""
    entry = stored_program("ahead-v5p-2048-switch")
    said = entry["tpu"]["refused"]
    assert entry["machine"].startswith("v5p") and "xla_tpu_enable_async_collective_fusion" in said
    assert "platforms other than TPU v5e" in said and "incorrect results" in said
    table = tomllib.loads((BOOK / "compiled" / "claims.toml").read_text("utf-8"))
    switches = table["program"]["ahead-v5p-2048-switch"]["switches"]
    assert len(switches) == 3 and "xla_enable_async_all_gather" in switches


def test_only_gathers_have_a_matmul_beside_them():
    """In every program of the table: no scatter and no sum can hide."""
    rows = [row for name in ROWS for row in made(name)["beside"]]
    assert {kind for kind, _, has_matmul, _ in rows if has_matmul} == {"all-gather"}


def test_a_gather_is_exposed_unless_a_matmul_is_beside_it(page):
    """Of a gather's payload, a chip sends (n - 1) / n."""
    entry = {
        "mesh": {"data": 4},
        "tpu": {
            "moves": [{"wire": 75}, {"wire": 30}],
            "beside": [["all-gather", ["data"], True, 40], ["all-gather", ["data"], False, 60]],
        },
    }
    assert page.sent_and_exposed(entry) == (105, 75)


# The order of a mesh


def test_nodes_of_groups(page):
    """model as the last axis is in one node; as the first it is in eight."""
    inside, across = (MESHES[f"ahead-h100-64-{name}"][0] for name in ("inside", "across"))
    assert page.nodes_of(inside, "model") == 1 and page.nodes_of(inside, "data") == 8
    assert page.nodes_of(across, "model") == 8 and page.nodes_of(across, "data") == 1
    assert page.nodes_of(dict(data=4, model=6), "model") == 2  # the first group alone is in one


def test_the_order_changes_no_byte_and_the_link_by_nine(page):
    """The two orders send the same; along model by NVLink, or by one NIC with a ninth."""
    inside, across = "ahead-h100-64-inside", "ahead-h100-64-across"
    assert made(inside)["moves"] == made(across)["moves"]
    speeds = [page.h100.bandwidth(MESHES[name][0], ("model",)) for name in (inside, across)]
    assert speeds == [450e9, 50e9]
    model = sum(row["wire"] for row in made(inside)["moves"] if row["axes"] == ["model"])
    data = sum(row["wire"] for row in made(inside)["moves"] if row["axes"] == ["data"])
    assert [f"{1e3 * model / speed:.0f}" for speed in speeds] == ["168", "1513"]
    assert [f"{size / GB:.1f}" for size in (model, data)] == ["75.6", "6.7"]


class Chip(NamedTuple):
    """A TPU v5p as jax.make_mesh asks for it."""

    id: int
    coords: tuple
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    process_index: int = 0
    core_on_chip: int = 0
    slice_index: int = 0


def test_8_and_256_can_be_axes_of_8_16_16_and_4_cannot():
    """jax.make_mesh puts each axis onto whole dimensions of a torus, or raises an error."""
    places = [(x, y, z) for z in range(16) for y in range(16) for x in range(8)]
    chips = [Chip(n, place) for n, place in enumerate(places)]
    grid = mesh_utils.create_device_mesh((8, 256, 1), chips)
    assert len({chip.coords[0] for chip in grid[0].flat}) == 1  # a replica is one layer of 16 × 16
    with pytest.raises(NotImplementedError, match="^Failed to find assignment for logical_axis"):
        mesh_utils.create_device_mesh((1, 512, 4), chips)


def test_on_v5e_a_dimension_may_be_split(monkeypatch):
    """4 × 64 on 16 × 16 chips: jax.make_mesh allows it for v5e, and not for other chips."""
    asked = []
    monkeypatch.setattr(
        mesh_utils_of_jax,
        "create_device_mesh",
        lambda *_, **options: asked.append(options) or {}[0],
    )
    for kind in ("TPU v5 lite", "TPU v5"):
        chips = [Chip(n, (n % 16, n // 16, 0), device_kind=kind) for n in range(256)]
        with pytest.raises(KeyError):
            jax.make_mesh((4, 64), ("replica", "data"), axis_types=AUTO, devices=chips)
    assert [options["allow_split_physical_axes"] for options in asked] == [True, False]
    grid = mesh_utils.create_device_mesh((4, 64), chips, allow_split_physical_axes=True)
    assert grid.shape == (4, 64)


@pytest.mark.parametrize("exercise", exercises_of(PAGE))
def test_exercise(page, exercise):
    check_exercise(page, PAGE, exercise)
